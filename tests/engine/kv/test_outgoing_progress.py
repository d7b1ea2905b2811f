"""The books of prompts that move while they compute: who holds which block, in every ending."""

import pytest

from engine.kv.cache import BlockCache, check_blocks
from engine.kv.transfer import (
    HandoffDropped,
    HandoffProgress,
    HandoffReady,
    HandoffRetracted,
    HandoffStarted,
    OutgoingEvent,
    OutgoingHandoffs,
)
from engine.request import Request, RequestSpec, SamplingParams
from tests.engine.kv.handoff_world import BLOCK_SIZE, key_of

NUM_BLOCKS = 9
NUM_TOKENS = 3 * BLOCK_SIZE + 1


class Computing:
    """One prompt of 3 full blocks and a partial one; this plays the scheduler."""

    def __init__(self, num_hit_blocks: int = 0) -> None:
        self.cache = BlockCache(NUM_BLOCKS, enable_prefix_caching=False, protected_share=0.8)
        self.events: list[OutgoingEvent] = []
        self.outgoing = OutgoingHandoffs(self.cache, self.events.append)
        self.request = Request(
            spec=RequestSpec(params=SamplingParams(max_tokens=9)),
            key=key_of(1),
            ingress_id="ingress-0",
            tokens=list(range(NUM_TOKENS)),
            num_prompt_tokens=NUM_TOKENS,
            arrival_s=0.0,
            decode_worker="decode-0",
        )
        self.admit(num_hit_blocks)

    def admit(self, num_hit_blocks: int = 0) -> None:
        block_ids = self.cache.allocate(4)
        assert block_ids is not None, "no room for it"
        self.request.block_ids = block_ids
        self.request.num_indexed_blocks = num_hit_blocks
        self.outgoing.start(self.request)

    def advance(self, num_full_blocks: int) -> list[int]:
        self.request.num_indexed_blocks = num_full_blocks
        self.outgoing.advance(self.request)
        self.check()
        return self.request.block_ids[:num_full_blocks]

    def give_back(self) -> None:
        self.cache.release(self.request.block_ids)
        self.request.block_ids = []
        self.request.num_indexed_blocks = 0

    def preempt(self) -> None:
        self.outgoing.retract(self.request.key)
        self.give_back()
        self.check()

    def drop(self) -> None:
        self.outgoing.drop(self.request.key)
        self.give_back()
        self.check()

    def finish(self) -> None:
        self.request.num_computed_tokens = NUM_TOKENS
        self.request.tokens.append(42)
        block_ids = self.request.block_ids
        self.outgoing.add(self.request)
        self.request.block_ids = []
        assert self.events[-1] == HandoffReady(
            key=self.request.key, block_ids=block_ids, first_token_id=42
        )
        self.check()

    def check(self) -> None:
        owners = [("scheduler", self.request.block_ids), *self.outgoing.owners()]
        check_blocks(self.cache, owners)


def test_full_blocks_are_told_once_and_those_of_earlier_notices_first() -> None:
    computing = Computing()
    for num_full_blocks in (0, 1, 1, 3):
        computing.advance(num_full_blocks)
    told = [event for event in computing.events if isinstance(event, HandoffProgress)]
    assert [event.block_ids for event in told] == [
        computing.request.block_ids[:1],
        computing.request.block_ids[:3],
    ]


def test_what_the_prefix_cache_holds_is_told_with_the_start() -> None:
    computing = Computing(num_hit_blocks=2)
    assert [type(event) for event in computing.events] == [HandoffStarted, HandoffProgress]


def test_a_prompt_that_ends_holds_every_block_once() -> None:
    computing = Computing()
    computing.advance(3)
    computing.finish()
    assert computing.cache.num_held == 4
    computing.outgoing.release(computing.request.key)
    assert computing.cache.num_held == len(computing.outgoing) == 0


def test_a_request_that_is_dropped_keeps_what_may_be_read_until_its_release() -> None:
    computing = Computing()
    shared = computing.advance(2)
    computing.drop()
    computing.outgoing.drop(computing.request.key)
    assert computing.events[2:] == [HandoffDropped(key=computing.request.key)]
    assert computing.cache.num_held == len(shared)
    computing.outgoing.release(computing.request.key)
    assert computing.cache.num_held == len(computing.outgoing) == 0


@pytest.mark.parametrize("lets_go", [True, False])
def test_a_preempted_prompt_gives_its_room_back_when_nothing_reads_it(lets_go: bool) -> None:
    computing = Computing()
    computing.advance(2)
    computing.preempt()
    assert computing.events[-1] == HandoffRetracted(key=computing.request.key)
    assert computing.cache.num_held == 2
    computing.admit(num_hit_blocks=0)
    computing.advance(1)
    computing.preempt()
    assert computing.cache.num_held == 3
    if lets_go:
        computing.outgoing.let_go(computing.request.key)
        assert computing.cache.num_held == 1, "the oldest goes first"
        computing.outgoing.let_go(computing.request.key)
        assert computing.cache.num_held == 0
    computing.admit()
    computing.finish()
    computing.outgoing.release(computing.request.key)
    assert computing.cache.num_held == len(computing.outgoing) == 0


def test_a_sender_that_gives_up_leaves_only_what_the_scheduler_holds() -> None:
    computing = Computing()
    computing.advance(1)
    computing.preempt()
    computing.admit(num_hit_blocks=1)
    computing.outgoing.release(computing.request.key)
    computing.outgoing.let_go(computing.request.key)  # its retraction was still being answered
    computing.check()
    num_events = len(computing.events)
    computing.advance(3)
    assert len(computing.events) == num_events, "nobody wants to know"
    assert computing.cache.num_held == 4
    computing.drop()
    assert computing.cache.num_held == len(computing.outgoing) == 0


def test_nothing_happens_for_a_request_that_never_started() -> None:
    computing = Computing()
    other = Request(
        spec=RequestSpec(params=SamplingParams(max_tokens=1)),
        key=key_of(2),
        ingress_id="ingress-0",
        tokens=[1],
        num_prompt_tokens=1,
        arrival_s=0.0,
    )
    computing.outgoing.advance(other)
    computing.outgoing.retract(other.key)
    computing.outgoing.let_go(other.key)
    assert len(computing.events) == 1


def test_only_blocks_that_somebody_holds_can_be_shared() -> None:
    cache = BlockCache(NUM_BLOCKS, enable_prefix_caching=True, protected_share=0.8)
    block_ids = cache.allocate(2)
    assert block_ids is not None
    cache.share(block_ids)
    cache.release(block_ids)
    assert cache.num_held == 2
    cache.release(block_ids)
    with pytest.raises(AssertionError, match="nobody holds"):
        cache.share(block_ids)

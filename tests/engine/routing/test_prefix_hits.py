"""What the allocator believes is cached where: equal to the worker's index, or nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.cache import BlockCache
from engine.messages import BlockChanges
from engine.routing.prefix_hits import PrefixHits

CHAIN = [bytes([i]) * 16 for i in range(6)]


def _changes(
    sequence: int,
    added: list[bytes] | None = None,
    removed: list[bytes] | None = None,
    *,
    is_resync: bool = False,
    incarnation: str = "one",
) -> BlockChanges:
    return BlockChanges(
        incarnation=incarnation,
        sequence=sequence,
        is_resync=is_resync,
        added=added or [],
        removed=removed or [],
    )


def test_a_hit_ends_at_the_first_hash_a_worker_lacks() -> None:
    hits = PrefixHits(block_size=16)
    assert hits.apply("a", _changes(3, CHAIN[:2] + CHAIN[3:], is_resync=True))
    assert hits.apply("b", _changes(0, CHAIN[:5], is_resync=True))
    assert hits.apply("c", _changes(0, CHAIN[1:], is_resync=True))
    assert hits.hit_tokens(CHAIN) == {"a": 32, "b": 80}
    assert hits.hit_tokens([]) == {}
    assert hits.apply("a", _changes(4, [CHAIN[2]], [CHAIN[5]]))
    assert hits.hit_tokens(CHAIN) == {"a": 80, "b": 80}
    assert hits.num_blocks() == {"a": 5, "b": 5, "c": 5}


@pytest.mark.parametrize(
    "report",
    [
        _changes(5, [CHAIN[1]]),
        _changes(3, [CHAIN[1]]),
        _changes(4, [CHAIN[1]], incarnation="two"),
    ],
    ids=["skipped", "repeated", "restarted"],
)
def test_a_report_that_does_not_follow_makes_the_worker_empty_until_a_resync(
    report: BlockChanges,
) -> None:
    hits = PrefixHits(block_size=16)
    hits.apply("a", _changes(3, CHAIN[:1], is_resync=True))
    assert hits.last_sequence("a") == 3
    assert not hits.apply("a", report)
    assert hits.last_sequence("a") is None
    assert hits.hit_tokens(CHAIN) == {}
    assert not hits.apply("a", _changes(6, CHAIN[:2]))
    assert hits.apply("a", _changes(7, CHAIN[:2], is_resync=True, incarnation="two"))
    assert hits.hit_tokens(CHAIN) == {"a": 32}


def test_a_lost_worker_has_nothing() -> None:
    hits = PrefixHits(block_size=16)
    hits.apply("a", _changes(0, CHAIN, is_resync=True))
    hits.forget("a")
    hits.forget("a")
    assert hits.hit_tokens(CHAIN) == {}


class _Worker:
    """The side that reports: a real cache, asked as a worker asks it."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = BlockCache(num_blocks, enable_prefix_caching=True, protected_share=0.5)
        self.last: int | None = None

    def report(self, after: int | None) -> BlockChanges | None:
        if after is None or after != self.last:
            self.cache.request_resync()
        events = self.cache.take_events()
        if events is None:
            return None
        self.last = events.sequence
        return _changes(events.sequence, events.added, events.removed, is_resync=events.is_resync)

    def use(self, hashes: list[bytes]) -> None:
        """Compute a prompt of these blocks and let go of it."""
        held = self.cache.acquire_prefix(hashes)
        new = self.cache.allocate(len(hashes) - len(held))
        assert new is not None, "nothing is held between two prompts"
        held += new
        for index, block_id in enumerate(held):
            self.cache.index(block_id, hashes[index], hashes[index - 1] if index else None)
        self.cache.release(held)


def _chain(name: int, num_blocks: int) -> list[bytes]:
    return [bytes([name, index]) * 8 for index in range(num_blocks)]


STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 5), st.sampled_from(["heard", "lost", "unasked"])),
    max_size=40,
)


@given(STEPS)
def test_what_is_believed_is_what_the_worker_holds_whatever_is_lost(
    steps: list[tuple[int, int, str]],
) -> None:
    worker, hits = _Worker(num_blocks=12), PrefixHits(block_size=4)
    for name, num_blocks, fate in steps:
        worker.use(_chain(name, num_blocks))
        if fate == "unasked":
            continue
        changes = worker.report(hits.last_sequence("w"))
        if changes is not None and fate == "heard":
            hits.apply("w", changes)
    for _ in range(3):  # the report after a gap says so, the next one heals it
        changes = worker.report(hits.last_sequence("w"))
        if changes is not None:
            hits.apply("w", changes)
    for name in range(10):
        chain = _chain(name, 5)
        expected = 4 * len(worker.cache.match(chain))
        assert hits.hit_tokens(chain).get("w", 0) == expected

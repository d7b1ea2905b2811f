"""BlockCache against a model of dicts and minima, under random histories; and proof that the
comparison can fail: each of a list of planted bugs must be found by the same machine.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.kv.cache import BlockCache
from engine.kv.hashes import extend_hashes, root_hash
from engine.kv.index import PrefixIndex
from tests.engine.kv.block_cache_model import (
    BLOCK_SIZE,
    MAX_PROTECTED,
    NUM_BLOCKS,
    Content,
    Model,
    chain_of,
)

KEY = bytes(range(16))


def _salted_root(salt: str) -> bytes:
    return root_hash(KEY, model="m", dtype="float32", salt=salt)


@dataclass
class Live:
    salt: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_indexed: int = 0
    num_gone: int = 0  # leading blocks given up already (a handoff that releases piece by piece)


# One of few prompts for each length, so that prefixes are shared and contents duplicated.
TOKENS = st.builds(
    lambda length, bits: [bits >> (i // BLOCK_SIZE) & 1 for i in range(length)],
    st.integers(1, 9),
    st.sampled_from([0, 0b10, 0b100, 0b110]),
)
SALTS = st.sampled_from(["", "tenant"])
PICK = st.integers(0, 99)


class CacheMachine(RuleBasedStateMachine):
    cache_class: type[BlockCache] = BlockCache
    index_class: type[PrefixIndex] = PrefixIndex
    root_of: Callable[[str], bytes] = staticmethod(_salted_root)

    def __init__(self) -> None:
        super().__init__()
        share = MAX_PROTECTED / NUM_BLOCKS
        self.cache = self.cache_class(NUM_BLOCKS, enable_prefix_caching=True, protected_share=share)
        if self.index_class is not PrefixIndex:
            self.cache._index = self.index_class(NUM_BLOCKS, max_protected=MAX_PROTECTED)
        self.model = Model()
        self.live: list[Live] = []
        self.written: dict[int, Content] = {}  # what the KV store would hold
        self.seen: dict[Content, list[bytes]] = {}  # every complete block's content ever named
        self.reader: set[bytes] = set()  # applies the events, as a remote reader would
        self.next_sequence = 0

    # ---- rules ------------------------------------------------------------------------------

    @rule(salt=SALTS, tokens=TOKENS, is_committed=st.booleans())
    def admit(self, salt: str, tokens: list[int], is_committed: bool) -> None:
        seq = Live(salt, tokens, hashes=self._hash(salt, tokens, []))
        chain = chain_of(salt, tokens)
        expected = self.model.match(chain)
        num_new = -(-len(tokens) // BLOCK_SIZE) - len(expected)
        fits = num_new <= NUM_BLOCKS - len(self._refs().keys() | set(expected))
        found = self.cache.match(seq.hashes)
        assert found == expected, f"hits {found}, and should hit {expected}"
        assert (num_new <= self.cache.num_available_without(expected)) == fits
        seq.blocks = self.cache.acquire_prefix(seq.hashes)
        assert seq.blocks == expected
        self.model.hit(chain)
        seq.num_indexed = len(expected)
        self.live.append(seq)
        new_ids = self._allocate(num_new)
        assert (new_ids is not None) == fits
        seq.blocks += new_ids or []
        if new_ids is None:
            self._release(seq)
        elif is_committed:
            self._commit(seq)

    @rule(salt=SALTS, tokens=TOKENS)
    def serve_at_once(self, salt: str, tokens: list[int]) -> None:
        num_live = len(self.live)
        self.admit(salt, tokens, is_committed=True)
        if len(self.live) > num_live:
            self._release(self.live[-1])

    @rule(salt=SALTS, tokens=TOKENS, more=st.integers(0, 3), is_first_gone=st.booleans())
    def race(self, salt: str, tokens: list[int], more: int, is_first_gone: bool) -> None:
        """Two requests compute one prompt at the same time, each into its own blocks."""
        num_live = len(self.live)
        self.admit(salt, tokens, is_committed=False)
        self.admit(salt, tokens + [0] * more, is_committed=False)
        racers = self.live[num_live:]
        for seq in racers:
            self._commit(seq)
        if racers and is_first_gone:
            self._release(racers[0])

    @precondition(lambda self: self.live)
    @rule(pick=PICK, suffix=TOKENS, is_committed=st.booleans())
    def fork(self, pick: int, suffix: list[int], is_committed: bool) -> None:
        seq = self._pick(pick)
        self.admit(seq.salt, seq.tokens + suffix[:3], is_committed)

    @precondition(lambda self: self.live)
    @rule(pick=PICK, suffix=TOKENS)
    def extend(self, pick: int, suffix: list[int]) -> None:
        seq = self._pick(pick)
        tokens = seq.tokens + suffix
        new_ids = self._allocate(-(-len(tokens) // BLOCK_SIZE) - len(seq.blocks) - seq.num_gone)
        if new_ids is not None:
            seq.blocks += new_ids
            seq.tokens = tokens
            self._hash(seq.salt, tokens, seq.hashes)

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        self._commit(self._pick(pick))

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        self._release(self._pick(pick))

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def release_first_block(self, pick: int) -> None:
        seq = self._pick(pick)
        if seq.blocks:
            seq.num_gone += 1
            self._let_go([seq.blocks.pop(0)])

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def press(self, num_blocks: int) -> None:
        """Somebody needs room for a moment."""
        self._let_go(self._allocate(num_blocks) or [])

    @precondition(lambda self: self.model.block_of)
    @rule(pick=PICK)
    def forget(self, pick: int) -> None:
        content = list(self.model.block_of)[pick % len(self.model.block_of)]
        self.cache.forget([self.model.block_of[content]])
        self.model.remove(content)

    @rule(lost=st.booleans())
    def drain_events(self, lost: bool) -> None:
        if lost:
            self.reader = {b"stale"}
            self.cache.request_resync()
        events = self.cache.take_events()
        if events is not None:
            assert events.sequence == self.next_sequence
            self.next_sequence += 1
            assert events.is_resync or len(events.added) + len(events.removed) <= NUM_BLOCKS
            assert events.is_resync or self.reader.isdisjoint(events.added)
            assert (set() if events.is_resync else self.reader).issuperset(events.removed)
            kept = set() if events.is_resync else self.reader - set(events.removed)
            self.reader = kept | set(events.added)
        assert self.reader == {self.seen[content][-1] for content in self.model.block_of}

    # ---- invariants -------------------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        owners = {f"sequence {i}": seq.blocks for i, seq in enumerate(self.live)}
        self.cache.check_conservation(owners)
        num_held, num_idle = len(self._refs()), len(self.model.idle_since)
        statistics = self.cache.statistics()
        assert statistics.num_held_blocks == num_held
        num_free = NUM_BLOCKS - num_held - num_idle
        assert statistics.num_free_blocks == num_free, f"{num_free} free: {statistics}"
        assert self.cache.num_cached_idle == num_idle
        assert self.cache.num_available == NUM_BLOCKS - num_held
        num_shielded = sum(c in self.model.protected for c in self.model.idle_since)
        assert statistics.num_protected_blocks == num_shielded, (
            f"{num_shielded} protected: {statistics}"
        )
        assert statistics.num_indexed_blocks == len(self.model.block_of)

    @invariant()
    def what_is_found_is_what_was_written(self) -> None:
        for (salt, tokens), hashes in self.seen.items():
            chain = chain_of(salt, tokens)
            found = self.cache.match(hashes)
            assert found == self.model.match(chain)
            assert [self.written.get(b) for b in found] == chain[: len(found)]

    def teardown(self) -> None:
        while self.live:
            self._release(self.live[0])
        self.the_books_balance()
        assert self.cache.num_available == NUM_BLOCKS
        assert sorted(self._allocate(NUM_BLOCKS) or []) == list(range(NUM_BLOCKS))
        assert self.cache.statistics().num_indexed_blocks == 0

    # ---- steps shared by rules --------------------------------------------------------------

    def _pick(self, pick: int) -> Live:
        return self.live[pick % len(self.live)]

    def _refs(self) -> Counter[int]:
        return Counter(b for seq in self.live for b in seq.blocks)

    def _hash(self, salt: str, tokens: list[int], hashes: list[bytes]) -> list[bytes]:
        extend_hashes(KEY, self.root_of(salt), tokens, BLOCK_SIZE, hashes)
        for i, content in enumerate(chain_of(salt, tokens)):
            self.seen[content] = hashes[: i + 1]
        return hashes

    def _allocate(self, num_blocks: int) -> list[int] | None:
        refs = self._refs()
        block_ids = self.cache.allocate(num_blocks)
        assert (block_ids is None) == (num_blocks > NUM_BLOCKS - len(refs))
        if block_ids is None:
            return None
        assert len(set(block_ids)) == num_blocks
        assert refs.keys().isdisjoint(block_ids)
        while NUM_BLOCKS - len(refs) - len(self.model.idle_since) < num_blocks:
            self.model.evict()
        for block_id in block_ids:
            self.written.pop(block_id, None)
        return block_ids

    def _commit(self, seq: Live) -> None:
        """The step is done: the sequence's complete blocks hold their content."""
        chain = chain_of(seq.salt, seq.tokens)
        for i in range(max(seq.num_indexed, seq.num_gone), len(chain)):
            block_id = seq.blocks[i - seq.num_gone]
            self.written[block_id] = chain[i]
            self.cache.index(block_id, seq.hashes[i], seq.hashes[i - 1] if i else None)
            self.model.index(block_id, chain[i])
        seq.num_indexed = len(chain)

    def _release(self, seq: Live) -> None:
        self.live.remove(seq)
        self._let_go(seq.blocks)

    def _let_go(self, block_ids: list[int]) -> None:
        """The books no longer name these references when this is called."""
        self.cache.release(block_ids)
        refs = self._refs()
        self.model.let_go(b for b in reversed(block_ids) if refs[b] == 0)


# ---- planted bugs ---------------------------------------------------------------------------


class ReleaseForgetsOne(BlockCache):
    def release(self, block_ids: Sequence[int]) -> None:
        super().release(block_ids[:3])


class EvictsBeforeItRefuses(BlockCache):
    def allocate(self, num_blocks: int) -> list[int] | None:
        while self.num_free < num_blocks and self.num_cached_idle:
            self._pool.free([block_id for block_id, _ in self._index.evict()])
        return self._pool.allocate(num_blocks)


class WhatIsHitCanStillBeEvicted(BlockCache):
    def acquire_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        block_ids = self.match(hashes)
        self._pool.acquire(block_ids)
        return block_ids


class MatchesOneTooMany(PrefixIndex):
    def match(self, hashes: Sequence[bytes]) -> list[int]:
        block_ids = super().match(hashes)
        if 0 < len(block_ids) < len(hashes):
            block_ids += list(self._by_block[block_ids[-1]].children)[:1]
        return block_ids


class ParentsGoBeforeTheirLeaves(PrefixIndex):
    def add_idle(self, block_id: int) -> None:
        self._enqueue(self._by_block[block_id])


class LaterDuplicateReplaces(PrefixIndex):
    def insert(self, block_id: int, block_hash: bytes, parent: bytes | None) -> bool:
        if block_id not in self._by_block:
            self.forget(self.match([block_hash]))
        return super().insert(block_id, block_hash, parent)


class OrphansAreIndexed(PrefixIndex):
    def insert(self, block_id: int, block_hash: bytes, parent: bytes | None) -> bool:
        return super().insert(block_id, block_hash, parent if parent in self._by_hash else None)


class ForgetLeavesDescendants(PrefixIndex):
    def forget(self, block_ids: Iterable[int]) -> list[int]:
        return super().forget([b for b in block_ids if not self._by_block[b].children])


class SecondUseDoesNotProtect(PrefixIndex):
    def use(self, block_ids: Iterable[int]) -> None:
        block_ids = list(block_ids)
        super().use(block_ids)
        for block_id in block_ids:
            self._by_block[block_id].is_protected = False


class NothingIsDemoted(PrefixIndex):
    def __init__(self, num_blocks: int, *, max_protected: int) -> None:
        super().__init__(num_blocks, max_protected=num_blocks)


def _root_without_salt(_salt: str) -> bytes:
    return _salted_root("")


SETTINGS = settings(
    deadline=None,
    database=None,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
CacheMachine.TestCase.settings = settings(SETTINGS, max_examples=100)
TestBlockCacheAgainstTheModel = pytest.mark.slow(CacheMachine.TestCase)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_cache_under_many_random_histories() -> None:
    run_state_machine_as_test(CacheMachine, settings=settings(SETTINGS, max_examples=10_000))


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        ({"cache_class": ReleaseForgetsOne}, "references, its owners"),
        ({"cache_class": EvictsBeforeItRefuses}, "free: "),
        ({"cache_class": WhatIsHitCanStillBeEvicted}, "is idle already"),
        ({"index_class": MatchesOneTooMany}, "and should hit"),
        ({"index_class": ParentsGoBeforeTheirLeaves}, "would go before its child"),
        ({"index_class": LaterDuplicateReplaces}, "free: "),
        ({"index_class": OrphansAreIndexed}, "free: "),
        ({"index_class": ForgetLeavesDescendants}, "free: "),
        ({"index_class": SecondUseDoesNotProtect}, "protected: "),
        ({"index_class": NothingIsDemoted}, "protected: "),
        ({"root_of": staticmethod(_root_without_salt)}, "and should hit"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_the_machine_finds_a_planted_bug(planted: dict[str, object], named: str) -> None:
    machine = type("PlantedMachine", (CacheMachine,), planted)
    # The first failure is enough (no shrinking), and it is the same on every day.
    options = settings(SETTINGS, max_examples=400, phases=[Phase.generate], derandomize=True)
    with pytest.raises(AssertionError, match=named):
        run_state_machine_as_test(machine, settings=options)

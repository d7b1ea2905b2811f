"""Tracks the KV blocks: which are referenced, and which idle blocks can be found by their hash.

Combines the pool (free lists, reference counts) and the prefix index (hashes, eviction order); the
scheduler and the handoff use this class. Knows no tensors, no tokens and no requests: callers pass
block ids and block hashes. Every block is in exactly one of three states:

    free          content worthless
    cached idle   indexed and unreferenced: found by its hash, or evicted when blocks are needed
    held          referenced; indexed or not

`check_blocks` verifies that these add up; it runs when an engine is idle and in every test.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.kv.index import IndexChanges, PrefixIndex
from engine.kv.pool import BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """Counters since the start (the first four) and current sizes; blocks except `num_lookups`."""

    num_lookups: int  # calls of `acquire_prefix`
    num_lookup_blocks: int  # hashes in these calls
    num_hit_blocks: int  # of these, found
    num_evicted_blocks: int  # idle blocks evicted to be allocated
    num_blocks: int
    num_free_blocks: int
    num_held_blocks: int
    num_indexed_blocks: int  # held or idle
    num_probationary_blocks: int  # idle
    num_protected_blocks: int  # idle


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTerms:
    """Conditions under which a request may take blocks."""

    num_spare_blocks: int  # must stay available
    max_new_blocks: int | None = None  # may be allocated; None = any number


class BlockCache:
    """`num_blocks` blocks, of which at most `protected_share` are protected: evicted last.

    With `enable_prefix_caching=False` nothing is indexed, so nothing is found or evicted.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_prefix_caching: bool,
        protected_share: float,
        on_evict: Callable[[Sequence[tuple[int, bytes]]], None] | None = None,
        on_allocate: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """on_evict: takes blocks (id, hash) that are evicted, before they are handed out again.

        on_allocate: takes blocks that are handed out, whatever for: their content is worthless.
        """
        assert 0.0 <= protected_share <= 1.0, f"protected_share is {protected_share}"
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(num_blocks, max_protected=int(protected_share * num_blocks))
        self._enable_prefix_caching = enable_prefix_caching
        self._on_evict = on_evict
        self._on_allocate = on_allocate
        self._num_lookups = 0
        self._num_lookup_blocks = 0
        self._num_hit_blocks = 0
        self._num_evicted_blocks = 0

    @property
    def keeps_prefixes(self) -> bool:
        """Whether blocks can be found by hash at all; if not, no hashes are needed."""
        return self._enable_prefix_caching

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached_idle(self) -> int:
        return self._index.num_idle

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    @property
    def num_available(self) -> int:
        """The exact number of blocks that `allocate` can hand out now.

        Idle entries are unreferenced. Each `evict` frees at least one idle block and makes none
        unavailable: it takes the first entry in eviction order, which has no idle child. If that
        entry has held children, they leave the index and stay with their holders. So at most
        `num_cached_idle` calls free every idle block.
        """
        return self._pool.num_free + self._index.num_idle

    def num_available_without(self, block_ids: Sequence[int]) -> int:
        """`num_available` if these blocks (a match) were held."""
        count = self._pool.reference_count
        return self.num_available - sum(count(block_id) == 0 for block_id in block_ids)

    def num_references(self, block_id: int) -> int:
        """Number of references to a block; 0 for an idle or a free one."""
        return self._pool.reference_count(block_id)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest indexed prefix of a chain of hashes; changes nothing."""
        return self._index.match(hashes)

    def acquire_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """`match`, plus one reference to each block found; counts as a use of them."""
        block_ids = self.hold_prefix(hashes)
        self._num_lookups += 1
        self._num_lookup_blocks += len(hashes)
        self._num_hit_blocks += len(block_ids)
        return block_ids

    def hold_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """`acquire_prefix`, but for a request that will look its prefix up again."""
        block_ids = self._index.match(hashes)
        self._index.use(block_ids)
        self._pool.acquire(block_ids)
        return block_ids

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Allocate `num_blocks` blocks without content; evicts only if too few are free.

        Returns None, and changes nothing, if too few blocks are available.
        """
        if num_blocks > self.num_available:
            return None
        if self._pool.num_free < num_blocks:
            self._evict(num_blocks)
        block_ids = self._pool.allocate(num_blocks)
        if self._on_allocate is not None and block_ids:
            self._on_allocate(block_ids)
        return block_ids

    def _evict(self, num_free: int) -> None:
        """Evict until so many blocks are free."""
        evicted: list[tuple[int, bytes]] = []
        while self._pool.num_free + len(evicted) < num_free:
            evicted += self._index.evict()
        if self._on_evict is not None:
            self._on_evict(evicted)
        self._pool.free([block_id for block_id, _ in evicted])
        self._num_evicted_blocks += len(evicted)

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each of these blocks, which must be held."""
        for block_id in block_ids:
            assert self._pool.reference_count(block_id) > 0, f"nobody holds block {block_id}"
        self._pool.acquire(block_ids)

    def index(self, block_id: int, block_hash: bytes, parent: bytes | None) -> None:
        """Add a complete block, held by the caller, to the prefix index.

        `parent` is the hash of the block before it, None for a sequence's first. The block is not
        indexed if its content is indexed under another block, or if its parent is not indexed.
        """
        assert self._pool.reference_count(block_id) > 0, (
            f"block {block_id} offered as {block_hash.hex()}, but nobody holds it"
        )
        if self._enable_prefix_caching:
            self._index.insert(block_id, block_hash, parent)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence, given in the sequence's order.

        Later blocks go first, so that they are evicted before the blocks that they continue.
        Release a sequence at once or from its end: if a call leaves a tail held, the later release
        of that tail walks up all ancestors that were released before.
        """
        index = self._index
        free = []
        for block_id in self._pool.release(reversed(block_ids)):
            if block_id in index:
                index.add_idle(block_id)
            else:
                free.append(block_id)
        self._pool.free(free)

    def forget(self, block_ids: Sequence[int]) -> list[int]:
        """Remove these blocks and their descendants from the index (NaN, a failed digest).

        Held blocks stay with their holders, who release them as usual. Idle ones become free and
        are returned, so that bad content can be cleared before the blocks are allocated again.
        """
        free = self._index.forget(block_ids)
        self._pool.free(free)
        return free

    def request_resync(self) -> None:
        """Make the next `take_events` list every indexed hash (for a new reader or after a gap)."""
        self._index.request_resync()

    def take_events(self) -> IndexChanges | None:
        """Net changes of the set of indexed hashes since the last call; None if there are none.

        At most `num_blocks` changes are kept; beyond that the next batch is a resync.
        """
        return self._index.take_changes()

    def statistics(self) -> CacheStatistics:
        return CacheStatistics(
            num_lookups=self._num_lookups,
            num_lookup_blocks=self._num_lookup_blocks,
            num_hit_blocks=self._num_hit_blocks,
            num_evicted_blocks=self._num_evicted_blocks,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            num_held_blocks=self._pool.num_held,
            num_indexed_blocks=len(self._index),
            num_probationary_blocks=self._index.num_probationary,
            num_protected_blocks=self._index.num_protected,
        )

    def check_conservation(self, held_by: Mapping[str, Sequence[int]]) -> None:
        """Check that free + cached idle + held == total and that references have owners.

        `held_by` maps each owner to the blocks it references, once per reference. O(num_blocks).
        Raises AssertionError with all terms and the owners.
        """
        problems = self._pool.find_problems() + self._index.find_problems()
        num_references = Counter(b for block_ids in held_by.values() for b in block_ids)
        for block_id in range(self.num_blocks):
            problems += self._problems_of(block_id, num_references.pop(block_id, 0))
        problems += [f"block {b} does not exist" for b in num_references]
        total = self.num_free + self.num_cached_idle + self.num_held
        if problems or total != self.num_blocks:
            owners = {owner: list(block_ids) for owner, block_ids in held_by.items()}
            raise AssertionError(
                f"KV blocks: free {self.num_free} + cached idle {self.num_cached_idle}"
                f" + held {self.num_held} = {total} of {self.num_blocks}; "
                f"{'; '.join(problems)}; owners: {owners}"
            )

    def _problems_of(self, block_id: int, num_owned: int) -> list[str]:
        problems = []
        count = self._pool.reference_count(block_id)
        if count != num_owned:
            problems.append(f"block {block_id} has {count} references, its owners {num_owned}")
        is_indexed = block_id in self._index
        if self._pool.is_free(block_id):
            if is_indexed:
                problems.append(f"block {block_id} is free and indexed")
        elif count == 0 and not is_indexed:
            problems.append(f"block {block_id} is lost: not held, not indexed, not free")
        return problems


class Conserved(Protocol):
    """A `BlockCache`, or those of several ranks."""

    def check_conservation(self, held_by: Mapping[str, Sequence[int]]) -> None: ...


def check_blocks(cache: Conserved, owners: Iterable[tuple[str, list[int]]]) -> None:
    """Check that free + cached + held == total and that all references have an owner.

    Raises AssertionError that prints every term and every owner.
    """
    held_by: dict[str, list[int]] = {}
    for name, block_ids in owners:
        held_by.setdefault(name, []).extend(block_ids)
    cache.check_conservation(held_by)


def num_held(owners: Iterable[tuple[str, list[int]]]) -> dict[str, int]:
    """Owner -> number of blocks, for reports and for baselines in tests."""
    return {name: len(block_ids) for name, block_ids in owners if block_ids}

"""The KV cache: which blocks are held, and which idle blocks can be found by their hash.

Composes the pool (free lists, reference counts) and the prefix index (hashes, eviction order);
this is what scheduler and handoff use. Knows no tensors, no tokens and no requests: callers pass
block ids and block hashes. Every block is in exactly one of three states:

    free          content worthless
    cached idle   indexed, not referenced: found by its hash, or evicted when blocks are needed
    held          referenced; indexed or not

`check_blocks` is the conservation law of these, checked when an engine is idle and in every test.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.kv.index import IndexChanges, PrefixIndex
from engine.kv.pool import BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """Counters since the start (the first four) and sizes now, all in blocks but `num_lookups`."""

    num_lookups: int  # calls of `acquire_prefix`
    num_lookup_blocks: int  # hashes asked for in them
    num_hit_blocks: int  # of those, found
    num_evicted_blocks: int  # idle blocks whose content was given up
    num_blocks: int
    num_free_blocks: int
    num_held_blocks: int
    num_indexed_blocks: int  # held or idle
    num_probationary_blocks: int  # idle
    num_protected_blocks: int  # idle


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTerms:
    """The terms on which a request may take blocks."""

    num_spare_blocks: int  # stay available beside it
    max_new_blocks: int | None = None  # it may take; None = any number


class BlockCache:
    """`num_blocks` blocks, of which at most `protected_share` are shielded from eviction.

    With `enable_prefix_caching=False` nothing is ever indexed, so nothing is found or evicted.
    """

    def __init__(
        self, num_blocks: int, *, enable_prefix_caching: bool, protected_share: float
    ) -> None:
        assert 0.0 <= protected_share <= 1.0, f"protected_share is {protected_share}"
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(num_blocks, max_protected=int(protected_share * num_blocks))
        self._enable_prefix_caching = enable_prefix_caching
        self._num_lookups = 0
        self._num_lookup_blocks = 0
        self._num_hit_blocks = 0
        self._num_evicted_blocks = 0

    @property
    def keeps_prefixes(self) -> bool:
        """Whether blocks can be found by hash at all; if not, hashes are not needed."""
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

        Free blocks need no proof. An idle entry is one that nobody holds, and each `evict` frees
        at least one of them and blocks none: it takes the first in its order, which has no idle
        child, and if it has held ones they leave the index and stay with their holders. So
        `num_cached_idle` calls at most free every idle block.
        """
        return self._pool.num_free + self._index.num_idle

    def num_available_beside(self, block_ids: Sequence[int]) -> int:
        """`num_available` if these blocks (a match) were held: room for the rest of a prompt."""
        count = self._pool.reference_count
        return self.num_available - sum(count(block_id) == 0 for block_id in block_ids)

    def num_references(self, block_id: int) -> int:
        """Returns the number of a block's holders; 0 for an idle or a free block."""
        return self._pool.reference_count(block_id)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest indexed prefix of a chain of hashes; a look-up, nothing changes."""
        return self._index.match(hashes)

    def acquire_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """`match`, and one reference to each block found; counts as a use of them."""
        block_ids = self._index.match(hashes)
        self._index.use(block_ids)
        self._pool.acquire(block_ids)
        self._num_lookups += 1
        self._num_lookup_blocks += len(hashes)
        self._num_hit_blocks += len(block_ids)
        return block_ids

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hold `num_blocks` blocks without content, evicting only what the free ones fall short.

        None = not now, and nothing has changed.
        """
        if num_blocks > self.num_available:
            return None
        while self._pool.num_free < num_blocks:
            evicted = self._index.evict()
            self._pool.free(evicted)
            self._num_evicted_blocks += len(evicted)
        return self._pool.allocate(num_blocks)

    def share(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to each of these blocks, which are held already."""
        for block_id in block_ids:
            assert self._pool.reference_count(block_id) > 0, f"nobody holds block {block_id}"
        self._pool.acquire(block_ids)

    def index(self, block_id: int, block_hash: bytes, parent: bytes | None) -> None:
        """Offer a complete block, held by the caller, to whoever asks for its content.

        `parent` is the hash of the block before it, None for a sequence's first. The block stays
        un-indexed if its content is indexed under another block, or if its parent's is not.
        """
        assert self._pool.reference_count(block_id) > 0, (
            f"block {block_id} offered as {block_hash.hex()}, but nobody holds it"
        )
        if self._enable_prefix_caching:
            self._index.insert(block_id, block_hash, parent)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block of a sequence, given in the sequence's order.

        Later blocks go first, so that they are evicted before those they continue. Let go of a
        sequence at once or from its end: each call that leaves a tail held makes the later
        release of that tail walk up all that was released before.
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
        """Nobody may find these blocks again, nor what continues them (NaN, a failed digest).

        Held blocks stay with their holders, who release them as ever. Idle ones become free and
        are returned, so that bad content can be cleared before somebody else gets them.
        """
        free = self._index.forget(block_ids)
        self._pool.free(free)
        return free

    def request_resync(self) -> None:
        """Make the next `take_events` list every indexed hash (a reader saw a gap, or is new)."""
        self._index.request_resync()

    def take_events(self) -> IndexChanges | None:
        """Net changes of the set of indexed hashes since the last call, None without any.

        At most `num_blocks` are kept; beyond that the next batch is a resync.
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
        """free + cached idle + held == total, and every reference has an owner. O(num_blocks).

        `held_by` maps each owner to the blocks it references, as often as it references them.
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


def check_blocks(cache: BlockCache, owners: Iterable[tuple[str, list[int]]]) -> None:
    """free + cached + held == total, and every held block has exactly its owners' references.

    Raises AssertionError that prints every term and every owner.
    """
    held_by: dict[str, list[int]] = {}
    for name, block_ids in owners:
        held_by.setdefault(name, []).extend(block_ids)
    cache.check_conservation(held_by)


def num_held(owners: Iterable[tuple[str, list[int]]]) -> dict[str, int]:
    """Owner -> number of blocks, for reports and for baselines in tests."""
    return {name: len(block_ids) for name, block_ids in owners if block_ids}

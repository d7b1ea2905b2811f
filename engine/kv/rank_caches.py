"""The block caches of all ranks of one worker with DP attention, seen as one.

Each rank has blocks of its own and finds prefixes among these alone; its scheduler uses its cache.
Others (reports, checks, placement) ask about all: block i of rank r is block r * n + i here, and a
hash is indexed as long as any rank has it. Knows no requests.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from engine.kv.cache import BlockCache
from engine.kv.index import IndexChanges


def find_rank(
    block_ids: Sequence[int], num_blocks: int, num_ranks: int
) -> tuple[int, list[int]] | None:
    """The rank that has these blocks, one or more, and their ids there; None = no rank has all.

    num_blocks: of each rank.
    """
    rank = block_ids[0] // num_blocks
    own_ids = [block_id - rank * num_blocks for block_id in block_ids]
    has_all = 0 <= rank < num_ranks and all(0 <= own_id < num_blocks for own_id in own_ids)
    return (rank, own_ids) if has_all else None


class RankCaches:
    """`of_rank[r]` is rank r's; all are of one size."""

    def __init__(self, of_rank: Sequence[BlockCache]) -> None:
        self.of_rank = of_rank
        self._size = of_rank[0].num_blocks
        self._indexed: list[set[bytes]] = [set() for _ in of_rank]
        self._num_ranks_with: Counter[bytes] = Counter()
        self._is_resync = False
        self._sequence = 0

    @property
    def num_blocks(self) -> int:
        return sum(cache.num_blocks for cache in self.of_rank)

    @property
    def num_available(self) -> int:
        return sum(cache.num_available for cache in self.of_rank)

    @property
    def num_held(self) -> int:
        return sum(cache.num_held for cache in self.of_rank)

    def first_block(self, rank: int) -> int:
        """The id here of a rank's first block."""
        return rank * self._size

    def numbered(self, rank: int, block_ids: Iterable[int]) -> list[int]:
        """The ids here of a rank's blocks."""
        return [self.first_block(rank) + block_id for block_id in block_ids]

    def check_conservation(self, held_by: Mapping[str, Sequence[int]]) -> None:
        """`BlockCache.check_conservation` of each rank; `held_by` has ids of this class."""
        for rank, cache in enumerate(self.of_rank):
            own = range(rank * self._size, (rank + 1) * self._size)
            cache.check_conservation(
                {
                    owner: [b - own.start for b in block_ids if b in own]
                    for owner, block_ids in held_by.items()
                }
            )

    # ---- events, as of one `BlockCache` ----------------------------------------------------------

    def request_resync(self) -> None:
        """Make the next `take_events` list every indexed hash."""
        self._is_resync = True

    def take_events(self) -> IndexChanges | None:
        """Net changes of the set of hashes that any rank has indexed; None if there are none."""
        touched: dict[bytes, bool] = {}  # hash -> whether any rank had it before
        for cache, indexed in zip(self.of_rank, self._indexed, strict=True):
            changes = cache.take_events()
            if changes is not None:
                self._apply(changes, indexed, touched)
        counts = self._num_ranks_with
        added = [h for h, was_there in touched.items() if counts[h] > 0 and not was_there]
        removed = [h for h, was_there in touched.items() if counts[h] == 0 and was_there]
        for block_hash in touched:
            if counts[block_hash] == 0:
                del counts[block_hash]
        is_resync, self._is_resync = self._is_resync, False
        if not (is_resync or added or removed):
            return None
        self._sequence += 1
        return IndexChanges(
            sequence=self._sequence - 1,
            is_resync=is_resync,
            added=list(counts) if is_resync else added,
            removed=[] if is_resync else removed,
        )

    def _apply(
        self, changes: IndexChanges, indexed: set[bytes], touched: dict[bytes, bool]
    ) -> None:
        """Bring `indexed`, of one rank, and the counts up to date."""
        added, removed = set(changes.added), set(changes.removed)
        if changes.is_resync:
            removed = indexed - added
        for block_hash in added - indexed:
            touched.setdefault(block_hash, self._num_ranks_with[block_hash] > 0)
            self._num_ranks_with[block_hash] += 1
        for block_hash in removed & indexed:
            touched.setdefault(block_hash, self._num_ranks_with[block_hash] > 0)
            self._num_ranks_with[block_hash] -= 1
        indexed |= added
        indexed -= removed

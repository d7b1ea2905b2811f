"""The host tier as one rank sees it that has blocks of its own (DP attention).

The tier is the worker's, and numbers blocks through all its ranks; a rank's cache and scheduler
number their own. What one rank has evicted, any of them finds.
"""

from collections.abc import Sequence

from engine.kv.host.arena import HostBlock
from engine.kv.host.disk import DiskBlock
from engine.kv.host.tier import HostLoad, HostTier, Save, Stores


class RankTier:
    """`HostTier` for one rank's cache and scheduler."""

    def __init__(self, tier: HostTier, first_block: int) -> None:
        """first_block: the number, in the worker, of the rank's first block."""
        self._tier = tier
        self._first_block = first_block

    @property
    def stores(self) -> Stores:
        return self._tier.stores

    def save(self, evicted: Sequence[tuple[int, bytes]]) -> None:
        self._tier.save([(self._first_block + block_id, name) for block_id, name in evicted])

    def begin_save(self, evicted: Sequence[tuple[int, bytes]]) -> Save | None:
        numbered = [(self._first_block + block_id, name) for block_id, name in evicted]
        return self._tier.begin_save(numbered)

    def now_s(self) -> float:
        return self._tier.now_s()

    @property
    def is_active(self) -> bool:
        return self._tier.is_active

    def settle(self) -> None:
        self._tier.settle()

    def look(self, hashes: Sequence[bytes]) -> list[HostBlock | DiskBlock]:
        return self._tier.look(hashes)

    def find(self, hashes: Sequence[bytes]) -> list[HostBlock | DiskBlock]:
        return self._tier.find(hashes)

    def num_on_disk(self, blocks: Sequence[HostBlock | DiskBlock]) -> int:
        return self._tier.num_on_disk(blocks)

    def load_seconds(self, blocks: Sequence[HostBlock | DiskBlock]) -> float:
        return self._tier.load_seconds(blocks)

    def load(self, blocks: Sequence[HostBlock | DiskBlock], block_ids: Sequence[int]) -> HostLoad:
        return self._tier.load(blocks, [self._first_block + block_id for block_id in block_ids])

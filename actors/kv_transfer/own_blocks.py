"""Pieces of a worker whose ranks have requests and blocks of their own (DP attention).

A block lies whole on one rank, and so does a piece, whose blocks are one request's. Others number
the blocks of all ranks as one worker's (engine/kv/rank_caches.py): neither channels nor the other
side, which may have any number of ranks, know of ranks here. Rank 0 maps the stores of all and
copies for them, as in rank_pieces.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.kv_transfer.contracts import (
    ArrivedBlocks,
    IncomingData,
    OutgoingData,
    PieceBytes,
    StagedPiece,
    StoredBlocks,
)
from actors.kv_transfer.kv_pieces import QueuedTake
from actors.kv_transfer.rank_pieces import RankPieces, Sources, copy_heads, whole_part
from engine.errors import HandoffError
from engine.kv.layout import KvLayout, KvPart
from engine.kv.rank_caches import find_rank
from engine.ranks.shared_stores import RankStore
from engine.ranks.step_counts import StepCounts


class OwnBlockSources:
    """The stores of all ranks of a sender, mapped here."""

    def __init__(self, stores: Sequence[Tensor], whole: KvLayout) -> None:
        """stores: each [num_blocks, *block_shape]."""
        self._stores = stores
        self._part = whole_part(whole)

    def __len__(self) -> int:
        return sum(map(len, self._stores))

    def copy_to(
        self, target: Tensor, part: KvPart, ids: Sequence[int], source_ids: Sequence[int]
    ) -> None:
        """target: a store [any, *block_shape] of `part`; overwritten at `ids`.

        Raises HandoffError for blocks of several ranks.
        """
        rank, own_ids = _find(source_ids, len(self._stores[0]), len(self._stores))
        copy_heads(target, part, ids, self._stores[rank], self._part, own_ids)


class OwnBlockPieces:
    """The pieces of each rank; ids are the worker's. HandoffError for blocks of several ranks."""

    def __init__(
        self,
        stores: Sequence[RankStore],
        steps: StepCounts,
        deadline_s: float,
        *,
        num_threads: int = 4,
    ) -> None:
        """As of `RankPieces`."""
        self.stores = stores
        self._num_blocks = stores[0].store.num_blocks
        self._of_rank = [
            RankPieces([one], steps, deadline_s, num_threads=num_threads, first_rank=rank)
            for rank, one in enumerate(stores)
        ]
        first = self._of_rank[0]
        self.whole, self.dtype, self.device = first.whole, first.dtype, first.device

    @property
    def is_on_gpu(self) -> bool:
        return self._of_rank[0].is_on_gpu

    @property
    def block_bytes(self) -> int:
        return self.whole.block_bytes

    def fence(self) -> None:
        """As `RankPieces.fence`."""
        for pieces in self._of_rank:
            pieces.fence()

    async def read(self, block_ids: Sequence[int]) -> StagedPiece[OutgoingData]:
        """As `RankPieces.read`."""
        pieces, own_ids = self._find(block_ids)
        piece = await pieces.read(own_ids)
        if not isinstance(piece.data, StoredBlocks):
            return piece
        named = StoredBlocks(block_ids=tuple(block_ids), nbytes=piece.data.nbytes)
        return StagedPiece(data=named, digests=piece.digests)

    async def write(self, block_ids: Sequence[int], piece: StagedPiece[IncomingData]) -> bool:
        """As `RankPieces.write`."""
        if isinstance(piece.data, ArrivedBlocks):
            return await piece.data.write(block_ids, piece.digests)
        pieces, own_ids = self._find(block_ids)
        return await pieces.write(own_ids, piece)

    async def to_host(self, blocks: StoredBlocks) -> PieceBytes:
        """A copy of blocks of one of these stores in host memory."""
        pieces, own_ids = self._find(blocks.block_ids)
        return await pieces.to_host(StoredBlocks(block_ids=tuple(own_ids), nbytes=blocks.nbytes))

    def empty(self, num_bytes: int) -> PieceBytes:
        """As `KvPieces.empty`."""
        return self._of_rank[0].empty(num_bytes)

    async def pull(
        self, source: Sources, source_ids: Sequence[int], ids: Sequence[int], digests: list[int]
    ) -> bool:
        """Copy blocks of another worker's ranks straight into `ids`, then check them."""
        pieces, own_ids = self._find(ids)
        return await pieces.pull(source, source_ids, own_ids, digests)

    def queue_load(self, block_ids: Sequence[int], staging: Tensor) -> torch.cuda.Event | None:
        """As `RankPieces.queue_load`."""
        pieces, own_ids = self._find(block_ids)
        return pieces.queue_load(own_ids, staging)

    def queue_take(self, staging: Tensor, block_ids: Sequence[int]) -> QueuedTake:
        """As `RankPieces.queue_take`."""
        pieces, own_ids = self._find(block_ids)
        return pieces.queue_take(staging, own_ids)

    def close(self) -> None:
        """As `RankPieces.close`."""
        for pieces in self._of_rank:
            pieces.close()

    def _find(self, block_ids: Sequence[int]) -> tuple[RankPieces, list[int]]:
        rank, own_ids = _find(block_ids, self._num_blocks, len(self.stores))
        return self._of_rank[rank], own_ids


def _find(block_ids: Sequence[int], num_blocks: int, num_ranks: int) -> tuple[int, list[int]]:
    """The rank that has these blocks, and their ids there."""
    found = find_rank(block_ids, num_blocks, num_ranks)
    if found is None:
        raise HandoffError(f"blocks {list(block_ids)} are not all of one rank")
    return found

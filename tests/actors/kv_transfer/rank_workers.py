"""Workers of any number of ranks on a CPU, whose stores are shared as processes share them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.kv_transfer.contracts import PieceStore
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.own_blocks import OwnBlockPieces
from actors.kv_transfer.rank_pieces import RankPieces
from engine.kv.layout import KvLayout, KvPart
from engine.kv.store import KvStore
from engine.ranks.rank import WHOLE_MODEL, Rank
from engine.ranks.shared_stores import RankStore, part_of
from engine.ranks.step_counts import StepCounts

CPU = torch.device("cpu")
NUM_BLOCKS = 13


@dataclass
class Worker:
    """One side: the ranks' own stores, and the pieces of their rank 0."""

    stores: list[KvStore]  # as each rank has its own
    whole: KvLayout
    pieces: PieceStore
    steps: StepCounts
    has_own_blocks: bool = False  # each rank has whole blocks, numbered after the rank before

    def heads(self, rank: int) -> slice:
        return _part(rank, len(self.stores), self.whole, self.has_own_blocks).heads

    def compute(self, block_ids: Sequence[int], blocks: torch.Tensor) -> None:
        """What steps do: every rank writes its heads, and keeps their digests.

        Of own blocks, which are all of one rank, only that one.
        """
        if self.has_own_blocks:
            rank, own = block_ids[0] // NUM_BLOCKS, [block % NUM_BLOCKS for block in block_ids]
            self.stores[rank].scatter(own, blocks)
            self.stores[rank].digests.keep(own, self.stores[rank].digest(own))
            return
        for rank, store in enumerate(self.stores):
            store.scatter(block_ids, blocks[..., self.heads(rank), :])
            store.digests.keep(block_ids, store.digest(block_ids))


def new_worker(
    size: int,
    whole: KvLayout,
    deadline_s: float = 5.0,
    *,
    num_blocks: int = NUM_BLOCKS,
    of_one: type[KvPieces] = KvPieces,
    of_ranks: type[RankPieces | OwnBlockPieces] = RankPieces,
) -> Worker:
    """of_ranks: with `OwnBlockPieces` each of several ranks has blocks of its own."""
    has_own_blocks = issubclass(of_ranks, OwnBlockPieces)
    steps = StepCounts()
    if size == 1:
        store = KvStore(whole, num_blocks=num_blocks, device=CPU)
        return Worker([store], whole, of_one(store, num_threads=1), steps)
    stores, mapped = [], []
    for index in range(size):
        part = _part(index, size, whole, has_own_blocks)
        own = KvStore(layout_of_part(whole, part.num_heads), num_blocks=num_blocks, device=CPU)
        offer = own.share(part)
        theirs = KvStore.attached(offer, part, own.layout) if index else own
        assert own.shared is not None
        own.shared.close_file()
        stores.append(own)
        mapped.append(RankStore(part=part, store=theirs))
    pieces = of_ranks(mapped, steps, deadline_s, num_threads=1)
    return Worker(stores, whole, pieces, steps, has_own_blocks)


def _part(rank: int, size: int, whole: KvLayout, has_own_blocks: bool) -> KvPart:
    return part_of(WHOLE_MODEL if has_own_blocks else Rank(rank, size), whole)


def layout_of_part(whole: KvLayout, num_heads: int) -> KvLayout:
    if num_heads == whole.block_shape[3]:
        return whole
    return KvLayout.with_heads(
        num_layers=whole.block_shape[0],
        block_size=whole.block_size,
        num_kv_heads=num_heads,
        head_dim=whole.block_shape[-1],
        dtype=whole.dtype,
    )

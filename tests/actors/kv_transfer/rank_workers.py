"""Workers of any number of ranks on a CPU, whose stores are shared as processes share them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.kv_transfer.contracts import PieceStore
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.rank_pieces import RankPieces
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.ranks.leading import StepCounts
from engine.ranks.rank import Rank
from engine.ranks.shared_stores import RankStore, part_of

CPU = torch.device("cpu")
NUM_BLOCKS = 13


@dataclass
class Worker:
    """One side: the ranks' own stores, and the pieces of their rank 0."""

    stores: list[KvStore]  # as each rank has its own
    whole: KvLayout
    pieces: PieceStore
    steps: StepCounts

    def heads(self, rank: int) -> slice:
        return part_of(Rank(rank, len(self.stores)), self.whole).heads

    def compute(self, block_ids: Sequence[int], blocks: torch.Tensor) -> None:
        """What steps do: every rank writes its heads, and keeps their digests."""
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
    of_ranks: type[RankPieces] = RankPieces,
) -> Worker:
    steps = StepCounts()
    if size == 1:
        store = KvStore(whole, num_blocks=num_blocks, device=CPU)
        return Worker([store], whole, of_one(store, num_threads=1), steps)
    stores, mapped = [], []
    for index in range(size):
        part = part_of(Rank(index, size), whole)
        own = KvStore(layout_of_part(whole, part.num_heads), num_blocks=num_blocks, device=CPU)
        offer = own.share(part)
        theirs = KvStore.attached(offer, part, own.layout) if index else own
        assert own.shared is not None
        own.shared.close_file()
        stores.append(own)
        mapped.append(RankStore(part=part, store=theirs))
    return Worker(stores, whole, of_ranks(mapped, steps, deadline_s, num_threads=1), steps)


def layout_of_part(whole: KvLayout, num_heads: int) -> KvLayout:
    return KvLayout.with_heads(
        num_layers=whole.block_shape[0],
        block_size=whole.block_size,
        num_kv_heads=num_heads,
        head_dim=whole.block_shape[-1],
        dtype=whole.dtype,
    )

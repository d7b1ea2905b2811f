"""The host tier of a worker whose ranks have blocks of their own (DP attention).

A block lies whole on one rank, in the arena as on its device. Rank 0 alone decides, for the caches
of all, and numbers blocks through all ranks (engine/kv/rank_caches.py). What it saves or loads at a
time is of one rank, which moves it: rank 0 itself, or the one that knows by the numbers that it is
meant. That one copies what it saves before its next step, as rank 0 does (block_parts.py).
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from engine.kv.host.movers import BlockMover, Copy
from engine.kv.rank_caches import find_rank
from engine.ranks.block_orders import (
    LoadParts,
    Order,
    SaveParts,
    decode_order,
    encode_digests,
    kind_of,
)
from engine.ranks.rank_tasks import RankTasks
from engine.ranks.step_counts import StepCounts


class OwnBlocks:
    """Which rank has a block."""

    num_parts = 1  # of a block in the arena

    def __init__(self, num_blocks: int, num_ranks: int) -> None:
        """num_blocks: of each rank."""
        self._num_blocks = num_blocks
        self._num_ranks = num_ranks

    def find(self, block_ids: Sequence[int]) -> tuple[int, list[int]]:
        """The rank that has these blocks, and their ids there."""
        found = find_rank(block_ids, self._num_blocks, self._num_ranks)
        assert found is not None, f"blocks {list(block_ids)} are of several ranks"
        return found

    def lead(self, own: BlockMover, tasks: RankTasks, steps: StepCounts) -> "LedOwnMover":
        """own: of rank 0's blocks. steps: of rank 0."""
        return LedOwnMover(own, self, tasks, steps)

    def follow(self, rank: int, mover: BlockMover) -> "OwnMoves":
        """mover: of this rank's blocks."""
        return OwnMoves(mover, self, rank)


class LedOwnMover:
    """Rank 0's `BlockMover`, of the blocks of all ranks."""

    def __init__(
        self, own: BlockMover, blocks: OwnBlocks, tasks: RankTasks, steps: StepCounts
    ) -> None:
        self._own = own
        self._blocks = blocks
        self._tasks = tasks
        self._steps = steps

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Callable[[], list[int]]:
        rank, own_ids = self._blocks.find(block_ids)
        if rank == 0:
            return self._own.save(own_ids, slots)
        return self._ask(rank, SaveParts(list(block_ids), list(slots)), self._steps.num_ended)

    def begin_load(self) -> Copy:
        copy, num_ended = self._own.begin_load(), self._steps.num_ended

        def load(slots: Sequence[int], block_ids: Sequence[int]) -> list[int]:
            rank, own_ids = self._blocks.find(block_ids)
            if rank == 0:
                return copy(slots, own_ids)
            return self._ask(rank, LoadParts(list(slots), list(block_ids)), num_ended)()

        return load

    def _ask(self, rank: int, order: Order, num_ended: int) -> Callable[[], list[int]]:
        """num_ended: steps whose blocks they may be; that rank may be a little behind rank 0."""
        others = self._tasks.begin(msgspec.msgpack.encode(order), kind_of(order), num_ended)

        def wait() -> list[int]:
            digests: list[int] = np.frombuffer(others()[rank - 1], np.int64).tolist()
            return digests

        return wait


class OwnMoves:
    """Another rank's side."""

    def __init__(self, mover: BlockMover, blocks: OwnBlocks, rank: int) -> None:
        self._mover = mover
        self._blocks = blocks
        self._rank = rank

    def begin(self, work: bytes) -> Callable[[], bytes]:
        """Begins what rank 0 asks for (see `Begin` of rank_tasks.py); nothing for other ranks."""
        order = decode_order(work)
        rank, own_ids = self._blocks.find(order.block_ids)
        if rank != self._rank:
            return bytes
        if isinstance(order, SaveParts):
            wait = self._mover.save(own_ids, order.slots)
            return lambda: encode_digests(wait())
        copy, slots = self._mover.begin_load(), order.slots
        return lambda: encode_digests(copy(slots, own_ids))

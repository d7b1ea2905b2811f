"""The host tier of a worker of several ranks: each stores and loads its own part of a block.

    a block of the arena     [part 0 | part 1 | ...]     a part is a rank's block, as on its device

Of fewer KV heads than ranks, and of latents, several ranks have the same part: the first of them
stores it, and all load it. Rank 0 alone decides, owns the arena and publishes; for the others it is
memory in which rank 0 tells them places. It asks them by the ring (rank_tasks.py):

    save     each copies its part before the next step, as rank 0 does, and answers with its digests
    load     each copies its part to its device, and answers with the digests of what lies there

A block's digest is a sum with one term a part (`KvStore.hold_part`), so one check binds all parts
to the block's name. A piece of a load is over when every rank has answered: a rank that stands
still holds up loads, and with them no request for longer than it waits (host_loads.py).
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from engine.kv.digests import add_terms
from engine.kv.host.arena import HostArena
from engine.kv.host.arena_blocks import ArenaOffer, Rows, attach_blocks
from engine.kv.host.movers import BlockMover, Copy, build_mover
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.layers.context import Comm
from engine.ranks.agreement import meet, value_of_first
from engine.ranks.block_orders import (
    LoadParts,
    Order,
    SaveParts,
    decode_order,
    encode_digests,
    kind_of,
)
from engine.ranks.own_moves import OwnBlocks
from engine.ranks.rank import Rank
from engine.ranks.rank_tasks import RankTasks
from engine.ranks.shared_stores import part_of
from engine.ranks.step_counts import StepCounts


class BlockParts:
    """Which part of a block each rank has."""

    def __init__(self, whole: KvLayout, num_ranks: int) -> None:
        self.of_ranks = [part_of(Rank(index, num_ranks), whole) for index in range(num_ranks)]
        firsts = [part.first_head for part in self.of_ranks]
        self._order = sorted(set(firsts))
        # The first rank of each part: it stores the part.
        self.keepers = [firsts.index(first) for first in self._order]

    @property
    def num_parts(self) -> int:
        return len(self._order)

    def place_of(self, rank: int) -> int:
        """Of a rank's part among a block's."""
        return self._order.index(self.of_ranks[rank].first_head)

    def lead(self, own: BlockMover, tasks: RankTasks, steps: StepCounts) -> "LedMover":
        """own: of rank 0's part. steps: of rank 0."""
        return LedMover(own, self, tasks, steps)

    def follow(self, rank: int, mover: BlockMover) -> "RankPart":
        """mover: of this rank's part."""
        return RankPart(mover, keeps=rank in self.keepers)


class PartMover:
    """One rank's `BlockMover`: of one part of each block."""

    def __init__(self, mover: BlockMover, place: int, num_parts: int) -> None:
        """mover: to and from parts, which it counts through all blocks."""
        self._mover = mover
        self._place = place
        self._num_parts = num_parts

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Callable[[], list[int]]:
        return self._mover.save(block_ids, self._parts(slots))

    def begin_load(self) -> Copy:
        copy = self._mover.begin_load()
        return lambda slots, block_ids: copy(self._parts(slots), block_ids)

    def _parts(self, slots: Sequence[int]) -> list[int]:
        return [slot * self._num_parts + self._place for slot in slots]


class LedMover:
    """Rank 0's `BlockMover`: all ranks move their parts; digests are those of whole blocks."""

    def __init__(
        self, own: BlockMover, parts: BlockParts, tasks: RankTasks, steps: StepCounts
    ) -> None:
        """own: of rank 0's part, which is always stored. steps: of rank 0."""
        self._own = own
        self._parts = parts
        self._tasks = tasks
        self._steps = steps

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Callable[[], list[int]]:
        order = SaveParts(list(block_ids), list(slots))
        others = self._ask(order, self._steps.num_ended)
        own, kept = self._own.save(block_ids, slots), self._parts.keepers
        return lambda: self._digests(own, others, kept)

    def begin_load(self) -> Copy:
        copy, num_ended = self._own.begin_load(), self._steps.num_ended

        def load(slots: Sequence[int], block_ids: Sequence[int]) -> list[int]:
            others = self._ask(LoadParts(list(slots), list(block_ids)), num_ended)
            own = partial(copy, slots, block_ids)
            return self._digests(own, others, range(len(self._parts.of_ranks)))

        return load

    def _ask(self, order: Order, num_ended: int) -> Callable[[], list[bytes]]:
        """num_ended: steps whose blocks they may be; the others may be a little behind rank 0."""
        return self._tasks.begin(msgspec.msgpack.encode(order), kind_of(order), num_ended)

    def _digests(
        self,
        own: Callable[[], list[int]],
        others: Callable[[], list[bytes]],
        ranks: Sequence[int],
    ) -> list[int]:
        """Waits for all; ranks: those that have answered with terms."""
        try:
            mine = own()
        finally:
            answers = others()  # whatever comes of it, nothing lands later
        terms = [np.array(mine, np.int64), *(np.frombuffer(one, np.int64) for one in answers)]
        found = [self._parts.of_ranks[rank] for rank in ranks]
        return add_terms(found, [terms[rank] for rank in ranks])


class RankPart:
    """Another rank's side."""

    def __init__(self, mover: BlockMover, *, keeps: bool) -> None:
        """keeps: whether this rank stores its part."""
        self._mover = mover
        self._keeps = keeps

    def begin(self, work: bytes) -> Callable[[], bytes]:
        """Begins what rank 0 asks for (see `Begin` of rank_tasks.py)."""
        match decode_order(work):
            case SaveParts(block_ids, slots):
                wait = self._mover.save(block_ids, slots) if self._keeps else list
                return lambda: encode_digests(wait())
            case LoadParts(slots, block_ids):
                copy = self._mover.begin_load()
                return lambda: encode_digests(copy(slots, block_ids))


def share_arena(
    comm: Comm,
    arena: HostArena | None,
    store: KvStore,
    parts: BlockParts | OwnBlocks,
    num_staged: int,
) -> BlockMover:
    """A mover of this rank's part of the blocks in rank 0's arena, or of its own blocks.

    arena: on rank 0. num_staged: see `build_mover`. Every rank calls it once, before its first
    step. Raises ConfigError, and WorkerError if rank 0's memory cannot be mapped.
    """
    if comm.rank.size == 1:
        assert arena is not None, "the only rank is the first"
        return build_mover(store, arena.blocks, num_staged)
    if isinstance(parts, BlockParts):
        store.hold_part(parts.of_ranks[comm.rank.index])
    nothing = ArenaOffer(pid=0, fd=0, blocks_at=0, num_blocks=0, block_bytes=0)
    offer = value_of_first(comm, nothing if arena is None else arena.offer)
    blocks: Rows = attach_blocks(offer) if arena is None else arena.blocks
    meet(comm)  # until all have mapped it
    mover = build_mover(store, blocks.reshape(-1, store.layout.block_bytes), num_staged)
    if isinstance(parts, OwnBlocks):
        return mover
    return PartMover(mover, parts.place_of(comm.rank.index), parts.num_parts)

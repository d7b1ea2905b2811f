"""Pieces in and out of the KV stores of all ranks of a worker, by rank 0.

A piece has whole blocks: the KV heads of all ranks, as a worker of one rank has them. So each side
may have any number of ranks, and channels, headers and books know nothing of them. Rank 0 maps the
stores of all ranks (engine/ranks/shared_stores.py) and copies heads by itself:

    read    of each head from the first rank that holds it; a block's digest is the sum of what the
            ranks' steps computed of their heads
    write   to every rank that holds the head; then the digests are computed where the blocks lie,
            of ranks that hold the same heads one by one, and their sum is compared

A rank may be behind rank 0. A read waits until every rank has ended the steps whose results rank 0
has; a write until each has ended all steps launched before the blocks were granted.

The cost: rank 0 copies all bytes. On GPUs it does so from GPU to GPU where a channel pulls them
(channels/rank_ipc.py), through a staging slot of its own GPU where one sends them
(channels/nccl_pair.py), and through host memory for all other channels.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.kv_transfer.contracts import (
    ArrivedBlocks,
    IncomingData,
    OutgoingData,
    PieceBytes,
    StagedPiece,
    StoredBlocks,
)
from actors.kv_transfer.kv_pieces import (
    GATHER_BYTES,
    KvPieces,
    QueuedTake,
    copy_blocks,
    empty_bytes,
)
from actors.kv_transfer.waits import to_the_end
from engine.errors import HandoffError
from engine.kv.layout import KvLayout, KvPart
from engine.kv.store import to_host
from engine.ranks.shared_stores import RankStore
from engine.ranks.step_counts import StepCounts

T = TypeVar("T")

LOOK_EVERY_S = 0.2e-3  # at the steps of other ranks, which end at nearly the same time


class Sources(Protocol):
    """The blocks of a sender, mapped here; the length is their number."""

    def __len__(self) -> int: ...

    def copy_to(
        self, target: Tensor, part: KvPart, ids: Sequence[int], source_ids: Sequence[int]
    ) -> None:
        """target: a store [any, *block_shape] of `part`; overwritten at `ids`."""
        ...


class RankSources:
    """The stores of all ranks of a sender, mapped here."""

    def __init__(self, stores: Sequence[tuple[KvPart, Tensor]]) -> None:
        """stores: each [any, *block_shape], with the part's heads."""
        # One for each part of the heads: ranks that hold the same ones have the same blocks.
        self.stores = list({part.first_head: (part, store) for part, store in stores}.values())

    def __len__(self) -> int:
        return min(len(store) for _, store in self.stores)

    def read(self, block_ids: list[int]) -> tuple["RankSources", list[int]]:
        """Stores that hold these blocks, and their ids there."""
        return self, block_ids

    def close(self) -> None:
        """Does nothing: a mapping ends with its last reference."""

    def copy_to(
        self, target: Tensor, part: KvPart, ids: Sequence[int], source_ids: Sequence[int]
    ) -> None:
        """target: a store [any, *block_shape] of `part`; overwritten at `ids`."""
        for source_part, tensor in self.stores:
            copy_heads(target, part, ids, tensor, source_part, source_ids)


class OneRank:
    """The pieces of a worker of one rank, which takes them from one of several."""

    def __init__(self, pieces: KvPieces) -> None:
        self._pieces = pieces
        self.whole = pieces.layout
        self.dtype, self.device = pieces.tensor.dtype, pieces.device

    @property
    def block_bytes(self) -> int:
        return self._pieces.block_bytes

    @property
    def parts(self) -> list[KvPart]:
        """What each rank holds."""
        return [whole_part(self.whole)]

    async def when_writable(self, work: Callable[[], T]) -> T:
        """As `RankPieces.when_writable`; the device orders copies after steps."""
        return await self._pieces.when_writable(work)

    async def pull(
        self, source: Sources, source_ids: Sequence[int], ids: Sequence[int], digests: list[int]
    ) -> bool:
        """Copy blocks of the other worker's ranks straight into `ids`, then check them."""
        [part] = self.parts

        def copy(some: slice) -> None:
            source.copy_to(self._pieces.tensor, part, ids[some], source_ids[some])

        return await self._pieces.pull_by(copy, ids, digests)


class RankPieces:
    """The pieces of all ranks' stores, copied in threads of rank 0."""

    def __init__(
        self,
        stores: Sequence[RankStore],
        steps: StepCounts,
        deadline_s: float,
        *,
        num_threads: int = 4,
        names_blocks: bool = False,
        first_rank: int = 0,
    ) -> None:
        """stores: of ranks that share blocks, in their order from `first_rank` on: of all of them,
        or of one that has blocks of its own. steps: of rank 0.

        deadline_s: so long another rank may take to end a step that rank 0 has ended.
        names_blocks: as of `KvPieces`.
        """
        self._names_blocks = names_blocks
        self._first_rank = first_rank
        self.stores = stores
        self._steps = steps
        self._deadline_s = deadline_s
        self._num_steps_before_writes = 0
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-copy")
        self.whole = stores[0].part.whole
        self.dtype, self.device = stores[0].store.dtype, stores[0].store.device
        is_cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def parts(self) -> list[KvPart]:
        """What each rank holds."""
        return [one.part for one in self.stores]

    @property
    def is_on_gpu(self) -> bool:
        return self._stream is not None

    @property
    def block_bytes(self) -> int:
        return self.whole.block_bytes

    def fence(self) -> None:
        """Makes later writes wait for all steps launched so far, on every rank."""
        self._num_steps_before_writes = self._steps.num_launched
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self.device))

    async def read(self, block_ids: Sequence[int]) -> StagedPiece[OutgoingData]:
        """A copy on a CPU; on GPUs, or if asked so, the ids, until a channel is known.

        Raises HandoffError if a rank does not end its steps in time.
        """
        num_steps = self._steps.num_ended
        return await self._run(lambda: self._read(block_ids, num_steps))

    async def write(self, block_ids: Sequence[int], piece: StagedPiece[IncomingData]) -> bool:
        """As `PieceStore.write`; blocks with other digests are written, too.

        Raises HandoffError if a rank does not end its steps in time.
        """
        data, num_steps = piece.data, self._num_steps_before_writes
        if isinstance(data, ArrivedBlocks):
            return await data.write(block_ids, piece.digests)
        return await self._run(lambda: self._write(block_ids, data, piece.digests, num_steps))

    async def to_host(self, blocks: StoredBlocks) -> PieceBytes:
        """A copy of blocks of these stores in host memory."""
        return await self._run(lambda: self._gather(blocks.block_ids))

    def empty(self, num_bytes: int) -> PieceBytes:
        """As `KvPieces.empty`."""
        return empty_bytes(num_bytes, self.device)

    async def pull(
        self, source: Sources, source_ids: Sequence[int], ids: Sequence[int], digests: list[int]
    ) -> bool:
        """Copy blocks of another worker's ranks straight into `ids` of these, then check them."""
        num_steps = self._num_steps_before_writes
        return await self._run(lambda: self._pull(source, source_ids, ids, digests, num_steps))

    async def when_writable(self, work: Callable[[], T]) -> T:
        """Does `work` in a thread, when it may write to all blocks that have been granted.

        On every rank, by streams that no `fence` holds back. Raises HandoffError if a rank does not
        end its steps in time.
        """
        num_steps = self._num_steps_before_writes

        def wait_and_work() -> T:
            self._wait_steps(num_steps, first_rank=0)
            return work()

        return await self._run(wait_and_work)

    # ---- from any thread: queued on rank 0's GPU, not waited for ---------------------------------

    def queue_load(self, block_ids: Sequence[int], staging: Tensor) -> torch.cuda.Event | None:
        """As `KvPieces.queue_load`, of whole blocks that `read` has named."""
        with self._queueing_work():
            blocks = staging.view(self.dtype).view(-1, *self.whole.block_shape)
            for one in self._holders():
                blocks[..., one.part.heads, :] = one.store.gather(block_ids)
            return self._copied_so_far()

    def queue_take(self, staging: Tensor, block_ids: Sequence[int]) -> QueuedTake:
        """As `KvPieces.queue_take`. Raises HandoffError if a rank does not end its steps in time.

        Waits for these steps, which have ended long before a piece has come.
        """
        self._wait_steps(self._num_steps_before_writes)
        with self._queueing_work():
            self._scatter(block_ids, staging)
            digests = to_host(self._digests(block_ids))
            return QueuedTake(digests=digests, over=self._copied_so_far())

    def close(self) -> None:
        """Wait for the copies under way; later ones fail."""
        self._threads.shutdown(wait=True)

    # ---- in a thread ----------------------------------------------------------------------------

    def _read(self, block_ids: Sequence[int], num_steps: int) -> StagedPiece[OutgoingData]:
        self._wait_steps(num_steps)
        digests = self._sum([one.store.digests.of(block_ids) for one in self._holders()])
        data: OutgoingData
        if self.is_on_gpu or self._names_blocks:
            nbytes = len(block_ids) * self.block_bytes
            data = StoredBlocks(block_ids=tuple(block_ids), nbytes=nbytes)
        else:
            data = self._gather(block_ids)
        return StagedPiece(data=data, digests=digests)

    def _gather(self, block_ids: Sequence[int]) -> PieceBytes:
        shape = len(block_ids), *self.whole.block_shape
        with self._on_stream():
            blocks = torch.empty(shape, dtype=self.dtype, device=self.device)
            for one in self._holders():
                blocks[..., one.part.heads, :] = one.store.gather(block_ids)
            staged = blocks.view(-1).view(torch.uint8)
            if self.device.type == "cpu":
                copied: PieceBytes = staged.numpy()
                return copied
            data = self.empty(staged.numel())
            torch.from_numpy(data).copy_(staged, non_blocking=True)
        return data

    def _write(
        self, block_ids: Sequence[int], data: PieceBytes, digests: list[int], num_steps: int
    ) -> bool:
        self._wait_steps(num_steps)
        with self._on_stream():
            self._scatter(block_ids, torch.from_numpy(data).to(self.device))
            return self._have(block_ids, digests)

    def _scatter(self, block_ids: Sequence[int], staged: Tensor) -> None:
        """staged: uint8 [n * block_bytes], whole blocks."""
        blocks = staged.view(self.dtype).view(len(block_ids), *self.whole.block_shape)
        for one in self.stores:
            one.store.scatter(block_ids, blocks[..., one.part.heads, :])

    def _pull(
        self,
        source: Sources,
        source_ids: Sequence[int],
        ids: Sequence[int],
        digests: list[int],
        num_steps: int,
    ) -> bool:
        self._wait_steps(num_steps)
        with self._on_stream():
            for one in self.stores:
                source.copy_to(one.store.tensor, one.part, ids, source_ids)
            return self._have(ids, digests)

    def _have(self, block_ids: Sequence[int], digests: list[int]) -> bool:
        """Whether the blocks on all ranks digest to `digests`, of whole blocks."""
        found: list[int] = self._digests(block_ids).tolist()
        return found == digests

    def _digests(self, block_ids: Sequence[int]) -> Tensor:
        """Of whole blocks, int64 [n], not waited for.

        Off by the number of ranks that have other bytes than the first one with their heads.
        """
        first: dict[int, Tensor] = {}
        others = torch.zeros(len(block_ids), dtype=torch.int64, device=self.device)
        for one in self.stores:
            found = one.store.queue_digests(one.store.index(block_ids))
            others += found != first.setdefault(one.part.first_head, found)
        return torch.stack([*first.values(), others]).sum(0)

    def _holders(self) -> list[RankStore]:
        """One store for each part of the heads."""
        return list({one.part.first_head: one for one in reversed(self.stores)}.values())

    def _sum(self, digests: list[list[int]]) -> list[int]:
        """Of all ranks, block by block, modulo 2^64."""
        terms: NDArray[np.int64] = np.array(digests, dtype=np.int64)
        total: list[int] = terms.sum(axis=0, dtype=np.int64).tolist()
        return total

    def _wait_steps(self, num_steps: int, first_rank: int = 1) -> None:
        """Until ranks from `first_rank` on have ended so many steps."""
        until_s = time.monotonic() + self._deadline_s
        for rank, one in enumerate(self.stores, start=self._first_rank):
            while rank >= first_rank and (num_ended := self._num_ended(rank, one)) < num_steps:
                if time.monotonic() > until_s:
                    raise HandoffError(
                        f"rank {rank} has ended {num_ended} steps, not {num_steps},"
                        f" within {self._deadline_s:g} s"
                    )
                time.sleep(LOOK_EVERY_S)

    def _num_ended(self, rank: int, one: RankStore) -> int:
        return one.num_ended_steps if rank else self._steps.num_ended

    def _current_stream(self) -> AbstractContextManager[object]:
        """Context whose work on a GPU is beside the steps."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _copied_so_far(self) -> torch.cuda.Event | None:
        """Returns an event for the end of what is queued; None = it has ended."""
        return None if self._stream is None else self._stream.record_event()

    @contextmanager
    def _queueing_work(self) -> Iterator[None]:
        """The same; waits for its end only after an exception, before others get the blocks."""
        try:
            with self._current_stream():
                yield
        except BaseException:
            if self._stream is not None:
                self._stream.synchronize()
            raise

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """The same, and waits for its end."""
        with self._current_stream():
            try:
                yield
            finally:
                if self._stream is not None:
                    self._stream.synchronize()

    async def _run(self, copy: Callable[[], T]) -> T:
        # A copy that has begun cannot be stopped, so it must be waited for.
        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._threads, copy))


def whole_part(whole: KvLayout) -> KvPart:
    """What a worker of one rank holds."""
    return KvPart(whole=whole, first_head=0, num_heads=whole.block_shape[3])


def copy_heads(
    target: Tensor,
    target_part: KvPart,
    target_ids: Sequence[int],
    source: Tensor,
    source_part: KvPart,
    source_ids: Sequence[int],
) -> None:
    """target[target_ids] = source[source_ids], of the heads that both have; distinct target ids.

    target, source: [any, *block_shape] of the parts, on the same device or mapped there.
    """
    if target_part == source_part:
        copy_blocks(target, target_ids, source, source_ids)
        return
    first = max(target_part.first_head, source_part.first_head)
    end = min(target_part.heads.stop, source_part.heads.stop)
    if first >= end:
        return
    # Checked here, because a GPU would copy to wrong places, or lose its whole context.
    for ids, blocks in ((target_ids, target), (source_ids, source)):
        assert 0 <= min(ids) <= max(ids) < len(blocks), f"blocks {list(ids)} of {len(blocks)}"
    heads, from_heads = (
        slice(first - part.first_head, end - part.first_head) for part in (target_part, source_part)
    )
    slab = max(1, GATHER_BYTES // (source[0].numel() * source.element_size()))
    for start in range(0, len(target_ids), slab):
        to_ids = torch.tensor(target_ids[start : start + slab], device=target.device)
        from_ids = torch.tensor(source_ids[start : start + slab], device=source.device)
        rows = source[..., from_heads, :].index_select(0, from_ids)
        target[..., heads, :].index_copy_(0, to_ids, rows)

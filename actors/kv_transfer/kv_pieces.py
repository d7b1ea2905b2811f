"""Pieces in and out of a KV store: through host memory, or from GPU to GPU.

On a CPU a piece is a copy. On a GPU it stays in the store until a channel is known: `read` only
names the blocks, and `to_host` copies them for a channel that carries host memory. The steps that
wrote the blocks have computed their digests.

Which thread and stream do what on a GPU: the engine steps on the default stream. All copies here
run on one stream beside it, queued by threads of our own, digests of what is pulled on another; a
call returns when its own work has ended on the device, while the next call's is queued already.
The thread of a pair queues its own copies and polls them itself, because with another thread each
call into torch would wait for the interpreter lock.
Blocks that are read were computed by steps whose results are on the host already. Blocks that are
written may still be targets of steps launched before they were granted: `fence` makes every later
copy wait for those.

Knows no requests, no reservations and no owners of blocks.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

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
from actors.kv_transfer.waits import to_the_end
from engine.errors import HandoffError
from engine.kv.digests import BlockDigests
from engine.kv.layout import KvLayout
from engine.kv.store import to_host

T = TypeVar("T")

# Runs of neighbouring blocks shorter than this are gathered by a kernel: queueing a copy takes the
# host about 1 us, in which a link between two GPUs moves 0.4 MB. Longer ones are plain copies: they
# run on the copy engines, where decode steps do not notice them.
MIN_COPY_BYTES = 2**18
GATHER_BYTES = 64 * 2**20  # gathered at a time, to bound the temporary memory
# Pulled in one call, which the host queues while the one before is copied; so the first is short.
FIRST_PULL_BYTES = 64 * 2**20
MAX_PULL_BYTES = 256 * 2**20  # the last one's digests are made when nothing is copied any more


class BlockStore(Protocol):
    """The tensor side of the KV cache (engine/kv/store.py)."""

    # [num_blocks, *block_shape]
    tensor: Tensor
    layout: KvLayout

    def gather(self, block_ids: Sequence[int]) -> Tensor:
        """A contiguous copy [n, *block_shape]."""
        ...

    def scatter(self, block_ids: Sequence[int], data: Tensor) -> None:
        """Overwrite blocks with `data`: uint8, as many bytes."""
        ...

    def index(self, block_ids: Sequence[int]) -> Tensor:
        """int64 [n] on the store's device, as soon as the current stream is there."""
        ...

    @property
    def digests(self) -> BlockDigests:
        """Digests of the blocks that this worker computed."""
        ...

    def queue_digests(self, block_ids: Tensor) -> Tensor:
        """Checksum of each `index`ed block where it lies, int64 [n]; not waited for."""
        ...

    def queue_write(self, block_ids: Tensor, data: Tensor) -> Tensor:
        """Overwrite `index`ed blocks with uint8 data; checksums of what was written, as above."""
        ...

    def digest_staged(self, data: Tensor) -> list[int]:
        """Checksum of each of the n blocks in `data`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedTake:
    """Blocks that are being overwritten on the device."""

    digests: Tensor  # int64 [n] on the host, of the written bytes; valid once `over`
    over: torch.cuda.Event | None  # None = it has happened

    def is_over(self) -> bool:
        return self.over is None or bool(self.over.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self.over is not None:
            self.over.synchronize()


class KvPieces:
    """The pieces of one store, copied in threads of its own."""

    def __init__(
        self, store: BlockStore, *, num_threads: int = 4, names_blocks: bool = False
    ) -> None:
        """names_blocks: `read` names them also where the store is in host memory."""
        self._store = store
        self._names_blocks = names_blocks
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-copy")
        self.device = store.tensor.device
        self._stream = _new_stream(self.device)
        self._checking = _new_stream(self.device)  # computes digests of pulled blocks
        self._queueing = threading.Lock()  # keeps the work of one call together on the streams

    @property
    def is_on_gpu(self) -> bool:
        return self._stream is not None

    @property
    def tensor(self) -> Tensor:
        """The store, [num_blocks, *block_shape]."""
        return self._store.tensor

    @property
    def layout(self) -> KvLayout:
        return self._store.layout

    @property
    def block_bytes(self) -> int:
        return self.tensor[0].numel() * self.tensor.element_size()

    def fence(self) -> None:
        """Makes later copies wait, on the device only, for all steps launched so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self.device))

    async def read(self, block_ids: Sequence[int]) -> StagedPiece[OutgoingData]:
        """Returns a copy on a CPU; on a GPU, or if asked so, the ids, at once.

        Digests come from the steps.
        """
        digests = self._store.digests.of(block_ids)
        data: OutgoingData
        if self.is_on_gpu or self._names_blocks:
            nbytes = len(block_ids) * self.block_bytes
            data = StoredBlocks(block_ids=tuple(block_ids), nbytes=nbytes)
        else:
            data = await self._run(lambda: self._gather(block_ids))
        return StagedPiece(data=data, digests=digests)

    async def write(self, block_ids: Sequence[int], piece: StagedPiece[IncomingData]) -> bool:
        data = piece.data
        if isinstance(data, ArrivedBlocks):
            return await data.write(block_ids, piece.digests)
        return await self._run(lambda: self._write(block_ids, data, piece.digests))

    async def to_host(self, blocks: StoredBlocks) -> PieceBytes:
        """A copy of blocks of this store in page-locked host memory."""
        return await self._run(lambda: self._to_host(blocks.block_ids))

    async def pull(
        self, source: Tensor, source_ids: Sequence[int], ids: Sequence[int], digests: list[int]
    ) -> bool:
        """Copy blocks of another store straight into `ids` of this one, then check them.

        source: [any, *block_shape], another GPU's memory mapped here; ids: one or more.
        """

        def copy(some: slice) -> None:
            copy_blocks(self.tensor, ids[some], source, source_ids[some])

        return await self.pull_by(copy, ids, digests)

    async def pull_by(
        self, copy: Callable[[slice], None], ids: Sequence[int], digests: list[int]
    ) -> bool:
        """`pull` by what queues the copies into some of `ids`, on the current stream.

        Without a deadline: a copy between two GPUs ends or the device is lost, and it must not be
        left running.
        """
        return await self._run(lambda: self.pull_digests(copy, ids) == digests)

    def empty(self, num_bytes: int) -> PieceBytes:
        """A buffer to receive into, page-locked if the store is on a GPU."""
        return empty_bytes(num_bytes, self.device)

    async def when_writable(self, work: Callable[[], T]) -> T:
        """Does `work` in a thread; what it copies after a `fence` comes after earlier steps."""
        return await self._run(work)

    # ---- from any thread: some heads of blocks, complete on return ------------------------------

    def copy_heads(self, block_ids: Sequence[int], heads: slice, device: torch.device) -> Tensor:
        """uint8 [n, bytes]: a copy of these heads of the store on its own device, or a CPU."""
        num_blocks = len(self.tensor)
        if not all(0 <= block_id < num_blocks for block_id in block_ids):
            raise HandoffError(f"blocks {list(block_ids)} of a store that has {num_blocks}")
        with self._on_streams():
            index = self._store.index(block_ids)
            rows = self.tensor[..., heads, :].index_select(0, index).contiguous()
            data = rows.view(len(block_ids), -1).view(torch.uint8)
            return data.to(device, non_blocking=device == self.device)

    def buffer(self, num_blocks: int, num_heads: int, device: torch.device) -> Tensor:
        """uint8 [n, bytes] to receive so many heads of blocks into."""
        *outer, _, width = self.tensor.shape[1:]
        block_bytes = math.prod(outer) * num_heads * width * self.tensor.element_size()
        with self._on_streams():  # memory that no step on another stream has just left
            return torch.empty(num_blocks, block_bytes, dtype=torch.uint8, device=device)

    def blocks_of(self, data: Tensor, num_heads: int) -> Tensor:
        """[n, *block_shape] of so many heads on the store's device, of uint8 [n, bytes]."""
        *outer, _, width = self.tensor.shape[1:]
        with self._on_streams():
            data = data.to(self.device)
        return data.view(self.tensor.dtype).view(len(data), *outer, num_heads, width)

    # ---- from any thread: queued on the device, not waited for ----------------------------------

    def queue_load(self, block_ids: Sequence[int], staging: Tensor) -> torch.cuda.Event | None:
        """Copy blocks of this store into `staging`: uint8 [n * block_bytes], on this device.

        Returns an event for its end; None = it has ended.
        """
        with self._queueing_work():
            # On one device by a kernel: copies take the host ten times as long to queue.
            blocks, index = self._blocks_in(staging), self._store.index(block_ids)
            torch.index_select(self.tensor, 0, index, out=blocks)
            return self._copied_so_far()

    def queue_take(self, staging: Tensor, block_ids: Sequence[int]) -> QueuedTake:
        """Overwrite blocks with `staging`, as above, and digest what is written."""
        with self._queueing_work():
            index = self._store.index(block_ids)
            digests = to_host(self._store.queue_write(index, staging))
            return QueuedTake(digests=digests, over=self._copied_so_far())

    def close(self) -> None:
        """Wait for the copies under way; later ones fail."""
        self._threads.shutdown(wait=True)

    # ---- in a thread ----------------------------------------------------------------------------

    def _gather(self, block_ids: Sequence[int]) -> PieceBytes:
        data: PieceBytes = self._store.gather(block_ids).view(-1).view(torch.uint8).numpy()
        return data

    def _write(self, block_ids: Sequence[int], data: PieceBytes, digests: list[int]) -> bool:
        with self._on_streams():
            staging = torch.from_numpy(data).to(self.device, non_blocking=True)
            if self._store.digest_staged(staging) != digests:
                return False
            self._store.scatter(block_ids, staging)
            return True

    def _to_host(self, block_ids: Sequence[int]) -> PieceBytes:
        data = self.empty(len(block_ids) * self.block_bytes)
        with self._on_streams():
            blocks = self._store.gather(block_ids).view(-1).view(torch.uint8)
            torch.from_numpy(data).copy_(blocks, non_blocking=True)
        return data

    def pull_digests(self, copy: Callable[[slice], None], ids: Sequence[int]) -> list[int]:
        """`pull_by`, here; returns the digests of what lies in `ids` then."""
        parts = parts_of(len(ids), self.block_bytes)
        last = parts[-1]
        copied: list[torch.cuda.Event | None] = []
        found: list[Tensor] = []
        with self._on_streams():
            for part in parts:
                copy(part)
                copied.append(self._copied_so_far())
            with self._on_checking_stream():
                index = self._store.index(ids)  # only now, so that no copy waits for it
                # Digests in two calls, after all copies: a call costs the host as much as many
                # copies.
                if last.start:
                    self._let_checks_wait(copied[-2])
                    found.append(to_host(self._store.queue_digests(index[: last.start])))
                self._let_checks_wait(copied[-1])
                found.append(to_host(self._store.queue_digests(index[last])))
        return [digest for part in found for digest in part.tolist()]

    def _blocks_in(self, staging: Tensor) -> Tensor:
        """[n, *block_shape] of the same memory: uint8 [n * block_bytes]."""
        return staging.view(self.tensor.dtype).view(-1, *self.tensor.shape[1:])

    def _copied_so_far(self) -> torch.cuda.Event | None:
        """Returns an event for the end of all queued copies; None = they have ended."""
        return None if self._stream is None else self._stream.record_event()

    @contextmanager
    def _on_checking_stream(self) -> Iterator[None]:
        """Context that queues work on the stream that checks copied blocks."""
        if self._checking is None:
            yield
            return
        with torch.cuda.stream(self._checking):
            yield

    def _let_checks_wait(self, copied: torch.cuda.Event | None) -> None:
        """Makes the checking stream wait until the copies up to an event have ended."""
        if copied is not None and self._checking is not None:
            self._checking.wait_event(copied)

    @contextmanager
    def _queueing_work(self) -> Iterator[None]:
        """Context that queues work on the copies' stream; waits for it only after an exception."""
        if self._stream is None:
            yield
            return
        with self._queueing, torch.cuda.stream(self._stream):
            try:
                yield
            except BaseException:
                self._stream.synchronize()  # only here is it known what is queued already
                raise

    @contextmanager
    def _on_streams(self) -> Iterator[None]:
        """Context that queues work on both streams; waits for its end, also after an error."""
        if self._stream is None or self._checking is None:
            yield
            return
        queued: list[torch.cuda.Event] = []
        try:
            with self._queueing_work():
                try:
                    yield
                finally:
                    queued += [s.record_event() for s in (self._stream, self._checking)]
        finally:
            for event in queued:
                event.synchronize()

    async def _run(self, copy: Callable[[], T]) -> T:
        # A copy that has begun cannot be stopped, so it must be waited for.
        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._threads, copy))


def empty_bytes(num_bytes: int, device: torch.device) -> PieceBytes:
    """A buffer in host memory, page-locked if it is for a GPU."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    data: PieceBytes = buffer.numpy()
    return data


def copy_blocks(
    target: Tensor, target_ids: Sequence[int], source: Tensor, source_ids: Sequence[int]
) -> None:
    """target[target_ids] = source[source_ids], on the current stream; distinct target ids.

    target, source: [any, *block_shape] on the same device or mapped there.
    """
    # Checked here, because a GPU would copy to wrong places, or lose its whole context.
    for ids, blocks in ((target_ids, target), (source_ids, source)):
        is_there = not ids or 0 <= min(ids) <= max(ids) < blocks.shape[0]
        assert is_there, f"blocks {list(ids)} of a store of {blocks.shape[0]}"
    runs = runs_of(target_ids, source_ids)
    block_bytes = target[0].numel() * target.element_size()
    if not runs or len(target_ids) * block_bytes >= len(runs) * MIN_COPY_BYTES:
        if target.is_cuda:
            from actors.kv_transfer.device_copies import queue_copies  # a CPU has no such library

            queue_copies(target, source, runs, torch.cuda.current_stream(target.device))
            return
        for to_block, from_block, num_blocks in runs:
            piece = source[from_block : from_block + num_blocks]
            target[to_block : to_block + num_blocks].copy_(piece)
        return
    slab = max(1, GATHER_BYTES // block_bytes)
    for start in range(0, len(target_ids), slab):
        to_ids = torch.tensor(target_ids[start : start + slab], device=target.device)
        from_ids = torch.tensor(source_ids[start : start + slab], device=target.device)
        target.index_copy_(0, to_ids, source.index_select(0, from_ids))


def parts_of(num_blocks: int, block_bytes: int) -> list[slice]:
    """Cuts a pull into parts, one a call; each is at most twice as long as the one before.

    All but the last end at an even number of blocks: a tensor of int64 that is sliced there keeps
    the alignment that Triton compiles for, and nothing must be compiled during a handoff.
    """
    parts: list[slice] = []
    start, size = 0, _even(FIRST_PULL_BYTES // block_bytes)
    while start < num_blocks:
        parts.append(slice(start, min(start + size, num_blocks)))
        start, size = start + size, min(2 * size, _even(MAX_PULL_BYTES // block_bytes))
    return parts


def _even(number: int) -> int:
    return max(2, number // 2 * 2)


def runs_of(target_ids: Sequence[int], source_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first target, first source, number) of each longest run that is consecutive in both."""
    runs: list[tuple[int, int, int]] = []
    for target_id, source_id in zip(target_ids, source_ids, strict=True):
        if runs:
            to_block, from_block, num_blocks = runs[-1]
            if (target_id, source_id) == (to_block + num_blocks, from_block + num_blocks):
                runs[-1] = (to_block, from_block, num_blocks + 1)
                continue
        runs.append((target_id, source_id, 1))
    return runs


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns a stream of high priority: a digest is short and must not wait for a step."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

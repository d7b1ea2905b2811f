"""Pieces in and out of a KV store: through host memory, or from GPU to GPU.

On a CPU a piece is a copy. On a GPU it is left where it is until a channel is known: `read` only
names and digests the blocks, and `to_host` copies them for a channel that carries host memory.

Which thread and stream do what on a GPU: the engine steps on the default stream. All copies here
run on one stream beside it, queued by threads of our own, and every call returns when its copy has
ended on the device. What is read was computed by steps whose results are on the host already. What
is written may still be a target of steps that were launched before the blocks were granted:
`fence` lets every later copy wait for those.

Knows no requests, no reservations and no owners of blocks.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from actors.handoff.contracts import (
    ArrivedBlocks,
    IncomingData,
    OutgoingData,
    PieceBytes,
    StagedPiece,
    StoredBlocks,
)
from actors.handoff.waits import to_the_end

T = TypeVar("T")

# Runs of neighbouring blocks shorter than this are gathered by a kernel: queueing a copy takes the
# host about 2 us, in which a link between two GPUs moves 0.8 MB. Longer ones are plain copies: they
# run on the copy engine, where decode steps do not notice them.
MIN_COPY_BYTES = 2**19
GATHER_BYTES = 64 * 2**20  # gathered at a time, which bounds the temporary
CHECKED_BYTES = 256 * 2**20  # pulled at a time: they are digested while the next ones are copied


class BlockStore(Protocol):
    """The tensor side of the KV cache (engine/kv/kv_store.py)."""

    # [num_blocks, *block_shape]
    tensor: Tensor

    def gather(self, block_ids: Sequence[int], out: Tensor | None = None) -> Tensor:
        """A contiguous copy [n, *block_shape], in `out` (uint8) if given."""
        ...

    def scatter(self, block_ids: Sequence[int], data: Tensor) -> None:
        """Overwrite blocks with `data`: uint8, as many bytes."""
        ...

    def digest(self, block_ids: Sequence[int]) -> list[int]:
        """Checksum of each block where it lies."""
        ...

    def index(self, block_ids: Sequence[int]) -> Tensor:
        """int64 [n] on the store's device."""
        ...

    def queue_digests(self, block_ids: Tensor) -> Tensor:
        """`digest` of `index`ed blocks as int64 [n], not waited for."""
        ...

    def digest_staged(self, data: Tensor) -> list[int]:
        """Checksum of each of the n blocks in `data`."""
        ...


class KvPieces:
    """The pieces of one store, copied in threads of its own."""

    def __init__(self, store: BlockStore, *, num_threads: int = 2) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-copy")
        self.device = store.tensor.device
        self._stream = _new_stream(self.device)
        self._checking = _new_stream(self.device)  # digests of what was pulled
        self._queueing = threading.Lock()  # one copy's work stays together on the stream

    @property
    def is_on_gpu(self) -> bool:
        return self._stream is not None

    @property
    def tensor(self) -> Tensor:
        """The store, [num_blocks, *block_shape]."""
        return self._store.tensor

    @property
    def block_bytes(self) -> int:
        return self.tensor[0].numel() * self.tensor.element_size()

    def fence(self) -> None:
        """Copies from here on wait for all steps launched so far, on the device only."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self.device))

    async def read(self, block_ids: Sequence[int]) -> StagedPiece[OutgoingData]:
        return await self._run(lambda: self._read(block_ids))

    async def write(self, block_ids: Sequence[int], piece: StagedPiece[IncomingData]) -> bool:
        data = piece.data
        if isinstance(data, ArrivedBlocks):
            return await data.write(block_ids, piece.digests)
        return await self._run(lambda: self._write(block_ids, data, piece.digests))

    async def to_host(self, blocks: StoredBlocks) -> PieceBytes:
        """A copy of blocks of this store in page-locked host memory."""
        return await self._run(lambda: self._to_host(blocks.block_ids))

    async def load(self, blocks: StoredBlocks, staging: Tensor) -> None:
        """Copy blocks of this store into `staging`: uint8 [blocks.nbytes], on this device."""
        await self._run(lambda: self._load(blocks.block_ids, staging))

    async def take(self, staging: Tensor, block_ids: Sequence[int], digests: list[int]) -> bool:
        """`write` from staging on this device: uint8 [n * block_bytes], checked before."""
        return await self._run(lambda: self._take(staging, block_ids, digests))

    async def pull(
        self, source: Tensor, source_ids: Sequence[int], ids: Sequence[int], digests: list[int]
    ) -> bool:
        """Copy blocks of another store straight into `ids` of this one, then check them.

        source: [any, *block_shape], another GPU's memory mapped here. Not bounded by a deadline:
        a copy between two GPUs ends, or the device is lost, and it must not be left under way.
        """
        return await self._run(lambda: self._pull(source, source_ids, ids, digests))

    def empty(self, num_bytes: int) -> PieceBytes:
        """A buffer to receive into, page-locked if the store is on a GPU."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_on_gpu)
        data: PieceBytes = buffer.numpy()
        return data

    def close(self) -> None:
        """Wait for the copies under way; later ones fail."""
        self._threads.shutdown(wait=True)

    # ---- in a thread ----------------------------------------------------------------------------

    def _read(self, block_ids: Sequence[int]) -> StagedPiece[OutgoingData]:
        if self.is_on_gpu:
            with self._on_stream():
                digests = self._store.digest(block_ids)
            named = StoredBlocks(
                block_ids=tuple(block_ids), nbytes=len(block_ids) * self.block_bytes
            )
            return StagedPiece(data=named, digests=digests)
        blocks = self._store.gather(block_ids)
        data: PieceBytes = blocks.view(-1).view(torch.uint8).numpy()
        return StagedPiece(data=data, digests=self._store.digest_staged(blocks))

    def _write(self, block_ids: Sequence[int], data: PieceBytes, digests: list[int]) -> bool:
        with self._on_stream():
            staging = torch.from_numpy(data).to(self.device, non_blocking=True)
            return self._check_and_scatter(staging, block_ids, digests)

    def _to_host(self, block_ids: Sequence[int]) -> PieceBytes:
        data = self.empty(len(block_ids) * self.block_bytes)
        with self._on_stream():
            blocks = self._store.gather(block_ids).view(-1).view(torch.uint8)
            torch.from_numpy(data).copy_(blocks, non_blocking=True)
        return data

    def _load(self, block_ids: Sequence[int], staging: Tensor) -> None:
        with self._on_stream():
            self._store.gather(block_ids, out=staging)

    def _take(self, staging: Tensor, block_ids: Sequence[int], digests: list[int]) -> bool:
        with self._on_stream():
            return self._check_and_scatter(staging, block_ids, digests)

    def _check_and_scatter(
        self, staging: Tensor, block_ids: Sequence[int], digests: list[int]
    ) -> bool:
        if self._store.digest_staged(staging) != digests:
            return False
        self._store.scatter(block_ids, staging)
        return True

    def _pull(
        self, source: Tensor, source_ids: Sequence[int], ids: Sequence[int], digests: list[int]
    ) -> bool:
        slab = max(1, CHECKED_BYTES // self.block_bytes)
        found: list[Tensor] = []
        with self._on_stream():
            with self._behind_copies():  # on the engine's stream it would wait for whole steps
                index = self._store.index(ids)
            for start in range(0, len(ids), slab):
                part = slice(start, start + slab)
                copy_blocks(self.tensor, ids[part], source, source_ids[part])
                with self._behind_copies():
                    found.append(self._store.queue_digests(index[part]))
            with self._behind_copies():
                arrived: list[int] = torch.cat(found).tolist()
        return arrived == digests

    @contextmanager
    def _behind_copies(self) -> Iterator[None]:
        """Queue what reads what was copied so far, beside the copies that follow."""
        if self._stream is None or self._checking is None:
            yield
            return
        self._checking.wait_stream(self._stream)
        with torch.cuda.stream(self._checking):
            yield

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Queue on our stream; at the end, also after an exception, nothing is under way on it."""
        if self._stream is None:
            yield
            return
        with self._queueing, torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    async def _run(self, copy: Callable[[], T]) -> T:
        # A copy that has begun cannot be stopped, so nobody may go on as if it were.
        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._threads, copy))


def copy_blocks(
    target: Tensor, target_ids: Sequence[int], source: Tensor, source_ids: Sequence[int]
) -> None:
    """target[target_ids] = source[source_ids], on the current stream; distinct target ids.

    target, source: [any, *block_shape] on the same device or mapped there.
    """
    runs = runs_of(target_ids, source_ids)
    block_bytes = target[0].numel() * target.element_size()
    if not runs or len(target_ids) * block_bytes >= len(runs) * MIN_COPY_BYTES:
        if target.is_cuda:
            from actors.handoff.device_copies import queue_copies  # a CPU has no such library

            queue_copies(target, source, runs)
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
    """Goes before the engine's: a digest takes a fraction of a step, and is not to wait for it."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

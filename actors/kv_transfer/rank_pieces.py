"""Pieces in and out of the KV stores of all ranks of a worker, by rank 0, through host memory.

A piece has whole blocks: the KV heads of all ranks, as a worker of one rank has them. So each side
may have any number of ranks, and channels, headers and books know nothing of them. Rank 0 maps the
stores of all ranks (engine/ranks/shared_stores.py) and copies heads by itself:

    read    of each head from the first rank that holds it; a block's digest is the sum of what the
            ranks' steps computed of their heads
    write   to every rank that holds the head; then the digests are computed where the blocks lie,
            of ranks that hold the same heads one by one, and their sum is compared

A rank may be behind rank 0. A read waits until every rank has ended the steps whose results rank 0
has; a write until each has ended all steps launched before the blocks were granted.

The cost: all bytes pass through rank 0 and host memory, also between GPUs.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from actors.kv_transfer.contracts import (
    ArrivedBlocks,
    IncomingData,
    OutgoingData,
    PieceBytes,
    StagedPiece,
)
from actors.kv_transfer.waits import to_the_end
from engine.errors import HandoffError
from engine.ranks.leading import StepCounts
from engine.ranks.shared_stores import RankStore

T = TypeVar("T")

LOOK_EVERY_S = 0.2e-3  # at the steps of other ranks, which end at nearly the same time


class RankPieces:
    """The pieces of all ranks' stores, copied in threads of rank 0."""

    is_on_gpu = False  # what moves is in host memory, wherever the stores are

    def __init__(
        self,
        stores: Sequence[RankStore],
        steps: StepCounts,
        deadline_s: float,
        *,
        num_threads: int = 4,
    ) -> None:
        """stores: of all ranks, rank 0's first. steps: of rank 0.

        deadline_s: so long another rank may take to end a step that rank 0 has ended.
        """
        self._stores = stores
        self._steps = steps
        self._deadline_s = deadline_s
        self._num_steps_before_writes = 0
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-copy")
        self._whole = stores[0].part.whole
        self._dtype, self._device = stores[0].store.dtype, stores[0].store.device
        is_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None  # type: ignore[no-untyped-call]

    def fence(self) -> None:
        """Makes later writes wait for all steps launched so far, on every rank."""
        self._num_steps_before_writes = self._steps.num_launched
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._device))

    async def read(self, block_ids: Sequence[int]) -> StagedPiece[OutgoingData]:
        """A copy. Raises HandoffError if a rank does not end its steps in time."""
        num_steps = self._steps.num_ended
        return await self._run(lambda: self._read(block_ids, num_steps))

    async def write(self, block_ids: Sequence[int], piece: StagedPiece[IncomingData]) -> bool:
        """As `PieceStore.write`; blocks with other digests are written, too.

        Raises HandoffError if a rank does not end its steps in time.
        """
        data, num_steps = piece.data, self._num_steps_before_writes
        assert not isinstance(data, ArrivedBlocks), "channels of a gang carry host memory"
        return await self._run(lambda: self._write(block_ids, data, piece.digests, num_steps))

    def close(self) -> None:
        """Wait for the copies under way; later ones fail."""
        self._threads.shutdown(wait=True)

    # ---- in a thread ----------------------------------------------------------------------------

    def _read(self, block_ids: Sequence[int], num_steps: int) -> StagedPiece[OutgoingData]:
        self._wait_steps(num_steps)
        digests = self._sum([one.store.digests.of(block_ids) for one in self._holders()])
        shape = len(block_ids), *self._whole.block_shape
        with self._on_stream():
            blocks = torch.empty(shape, dtype=self._dtype, device=self._device)
            for one in self._holders():
                blocks[..., one.part.heads, :] = one.store.gather(block_ids)
            data: PieceBytes = blocks.cpu().view(-1).view(torch.uint8).numpy()
        return StagedPiece(data=data, digests=digests)

    def _write(
        self, block_ids: Sequence[int], data: PieceBytes, digests: list[int], num_steps: int
    ) -> bool:
        self._wait_steps(num_steps)
        with self._on_stream():
            staged = torch.from_numpy(data).to(self._device).view(self._dtype)
            blocks = staged.view(len(block_ids), *self._whole.block_shape)
            for one in self._stores:
                one.store.scatter(block_ids, blocks[..., one.part.heads, :])
            found = {rank: one.store.digest(block_ids) for rank, one in enumerate(self._stores)}
        by_heads = {one.part.first_head: found[rank] for rank, one in enumerate(self._stores)}
        is_alike = all(
            found[rank] == by_heads[one.part.first_head] for rank, one in enumerate(self._stores)
        )
        return is_alike and self._sum(list(by_heads.values())) == digests

    def _holders(self) -> list[RankStore]:
        """One store for each part of the heads."""
        return list({one.part.first_head: one for one in reversed(self._stores)}.values())

    def _sum(self, digests: list[list[int]]) -> list[int]:
        """Of all ranks, block by block, modulo 2^64."""
        terms: NDArray[np.int64] = np.array(digests, dtype=np.int64)
        total: list[int] = terms.sum(axis=0, dtype=np.int64).tolist()
        return total

    def _wait_steps(self, num_steps: int) -> None:
        until_s = time.monotonic() + self._deadline_s
        for rank, one in enumerate(self._stores[1:], start=1):
            while one.num_ended_steps < num_steps:
                if time.monotonic() > until_s:
                    raise HandoffError(
                        f"rank {rank} has ended {one.num_ended_steps} steps, not {num_steps},"
                        f" within {self._deadline_s:g} s"
                    )
                time.sleep(LOOK_EVERY_S)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Context whose work on a GPU is beside the steps; waits for its end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    async def _run(self, copy: Callable[[], T]) -> T:
        # A copy that has begun cannot be stopped, so it must be waited for.
        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._threads, copy))

"""Copies host tensors to where a model lives; to a GPU through pinned buffers on several threads.

A copy from pageable memory (here: a mapped file) to a GPU is bound by one thread that faults pages
in and moves them to the driver's own buffer. Copying to pinned buffers on several threads
overlaps that with the transfers; the buffers are all the memory it takes on the host.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

NUM_LANES = 4
# Large enough that a transfer costs far more than starting it, small enough to share one tensor.
CHUNK_BYTES = 16 * 2**20


class TensorCopier(Protocol):
    """Copies tensors, converting their dtype; sources must stay valid until `wait_copied`."""

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Same shape, both contiguous; `source` is on the host."""
        ...

    def wait_copied(self) -> None:
        """Block until every copy so far has arrived; raises what any of them raised."""
        ...


class DirectCopier:
    """Copies at once, on the calling thread."""

    def copy(self, source: Tensor, destination: Tensor) -> None:
        destination.copy_(source)

    def wait_copied(self) -> None:
        """Every copy has arrived when `copy` returns."""


class PinnedCopier(AbstractContextManager["PinnedCopier"]):
    """Copies chunks on `NUM_LANES` threads; the first one back takes the next chunk."""

    def __init__(self, device: torch.device) -> None:
        self._lanes: SimpleQueue[_Lane] = SimpleQueue()
        for _ in range(NUM_LANES):
            self._lanes.put(_Lane(device))
        self._threads = ThreadPoolExecutor(NUM_LANES, thread_name_prefix="weights")
        self._copies: list[Future[None]] = []

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def copy(self, source: Tensor, destination: Tensor) -> None:
        for chunk, target in chunk_pairs(source, destination, CHUNK_BYTES):
            self._copies.append(self._threads.submit(self._copy_chunk, chunk, target))

    def wait_copied(self) -> None:
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.result()
        for _ in range(NUM_LANES):
            lane = self._lanes.get()
            lane.stream.synchronize()
            self._lanes.put(lane)

    def _copy_chunk(self, source: Tensor, destination: Tensor) -> None:
        lane = self._lanes.get()  # never waits: there are as many lanes as threads
        try:
            lane.copy(source, destination)
        finally:
            self._lanes.put(lane)


class _Lane:
    """A stream with two pinned buffers: one is filled while the other is on its way."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Destinations may be memory that earlier work on the caller's stream still uses.
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers = [
            torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._is_sent = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def copy(self, source: Tensor, destination: Tensor) -> None:
        buffer, is_sent = self._buffers[self._turn], self._is_sent[self._turn]
        self._turn = 1 - self._turn
        is_sent.synchronize()  # the copy before last has left this buffer
        staged = buffer[: source.nbytes].view(source.dtype)
        staged.copy_(source)
        with torch.cuda.stream(self.stream):
            # In two copies, so that a dtype is converted on the device and not by this thread.
            destination.copy_(staged.to(destination.device, non_blocking=True))
            is_sent.record(self.stream)


def copier_for(device: torch.device) -> AbstractContextManager[TensorCopier]:
    """How tensors get to `device`; leaving the context frees threads and buffers."""
    return PinnedCopier(device) if device.type == "cuda" else nullcontext(DirectCopier())


def chunk_pairs(
    source: Tensor, destination: Tensor, chunk_bytes: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors as flat pieces of at most `chunk_bytes` of the source each, side by side."""
    num_elements = chunk_bytes // source.element_size()
    sources = torch.split(source.view(-1), num_elements)
    return zip(sources, torch.split(destination.view(-1), num_elements), strict=True)

"""CUDA streams for `CudaMover` on a CPU: what is queued runs late, bit by bit, on a virtual clock.

Each stream is a thread of `VirtualTime`. A copy or a kernel takes a random time for each half of a
block, so that one that overlaps with what it must not overlap with moves parts of two contents.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv.host import movers
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from kernels.kv.digest import host_digest
from load_tests.testbed.virtual_time import Signal, VirtualLane, VirtualTime

Work = Callable[[], None]
Row = NDArray[np.uint8]
Rows = NDArray[np.uint8]


class LateEvent:
    def __init__(self, device: "LateDevice") -> None:
        self._device = device
        self.is_over = False
        self._waiting: list[Signal] = []

    def end(self) -> None:
        self.is_over = True
        for signal in self._waiting:
            signal.set()

    def synchronize(self) -> None:
        if not self.is_over:
            signal = Signal(self._device.time)
            self._waiting.append(signal)
            signal.wait()


class LateStream:
    def __init__(self, device: "LateDevice", slowness: float) -> None:
        self._device = device
        self._slowness = slowness
        self._lane = VirtualLane(device.time)

    def queue(self, work: Work) -> None:
        def run_late() -> None:
            self._device.take_time(self._slowness)
            work()

        self._lane.post(run_late)

    def record_event(self, event: LateEvent | None = None) -> LateEvent:
        event = LateEvent(self._device) if event is None else event
        self._lane.post(event.end)
        return event

    def wait_event(self, event: LateEvent) -> None:
        self._lane.post(event.synchronize)

    def synchronize(self) -> None:
        self.record_event(LateEvent(self._device)).synchronize()


class LateDevice:
    """Takes the place of `torch.cuda` and of the copies in movers.py."""

    def __init__(self, time: VirtualTime, rng: random.Random) -> None:
        self.time = time
        self._rng = rng
        self.steps = self.new_stream()
        self._threads = threading.local()

    def new_stream(self, priority: int = 0) -> LateStream:
        return LateStream(self, self._rng.choice([0.1, 1.0, 10.0]))

    def take_time(self, slowness: float = 1.0) -> None:
        self.time.wait_until(self.time.now_s() + slowness * self._rng.random())

    @property
    def current(self) -> LateStream:
        found: LateStream = getattr(self._threads, "current", self.steps)
        return found

    @contextmanager
    def use(self, stream: LateStream) -> Iterator[None]:
        before, self._threads.current = self.current, stream
        try:
            yield
        finally:
            self._threads.current = before

    def replace_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "Stream": self.new_stream,
            "Event": lambda blocking=False: LateEvent(self),
            "stream": self.use,
            "current_stream": lambda device: self.current,
            "device": lambda device: torch.inference_mode(False),
            "synchronize": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(movers, "_queue", self.queue_copies)
        monkeypatch.setattr(movers, "_lock_pages", lambda arena: None)
        monkeypatch.setattr(movers, "_unlock_pages", lambda address: None)

    def queue_copies(
        self, to: Tensor, places: Sequence[int], blocks: Tensor, numbers: Sequence[int]
    ) -> None:
        """As `_queue` of movers.py."""
        for place, number in zip(places, numbers, strict=True):
            self.queue_halves(to.numpy()[place], blocks.numpy()[number])

    def queue_halves(self, to: Row, block: Row) -> None:
        def copy(part: slice) -> None:
            to[part] = block[part]

        half = len(block) // 2
        for part in (slice(0, half), slice(half, None)):
            self.current.queue(partial(copy, part))


class LateDigests:
    """What a kernel will have written."""

    def __init__(self, device: LateDevice, number: int) -> None:
        self._device = device
        self.values: list[int | None] = [None] * number

    def tolist(self) -> list[int | None]:
        """As of a tensor: read when the current stream comes to it."""
        found: list[int | None] = []
        self._device.current.queue(lambda: found.extend(self.values))
        self._device.current.synchronize()
        return found


class LateStore(KvStore):
    """A store on a CPU whose kernels run late."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: LateDevice) -> None:
        super().__init__(layout, num_blocks=num_blocks, device=torch.device("cpu"))
        self._late = device
        self.bytes: Rows = self.tensor.view(-1).view(torch.uint8).view(num_blocks, -1).numpy()

    def queue_digests(self, block_ids: Tensor) -> LateDigests:  # type: ignore[override]
        return self._queue(block_ids, None)

    def queue_copies(  # type: ignore[override]
        self, block_ids: Tensor, copies: Tensor, rows: Tensor
    ) -> LateDigests:
        return self._queue(block_ids, [copies.numpy()[row] for row in rows.tolist()])

    def digest(self, block_ids: Sequence[int]) -> list[int]:
        found = self.queue_digests(self.index(block_ids)).tolist()
        assert None not in found, "a digest was read before it was there"
        return found  # type: ignore[return-value]

    def _queue(self, block_ids: Tensor, copies: list[Row] | None) -> LateDigests:
        """Digests blocks, and copies what was digested, one after the other."""
        digests = LateDigests(self._late, len(block_ids))

        def end(i: int, seen: Row) -> None:
            digests.values[i] = self._digest_of(seen)
            if copies is not None:
                copies[i][:] = seen

        for i, block_id in enumerate(block_ids.tolist()):
            seen = np.empty_like(self.bytes[block_id])
            self._late.queue_halves(seen, self.bytes[block_id])
            self._late.current.queue(partial(end, i, seen))
        return digests

    def _digest_of(self, block: Row) -> int:
        return host_digest(block.view(np.int64), self._weights.numpy())

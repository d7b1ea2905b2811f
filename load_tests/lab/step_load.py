"""A stand-in for decode steps: a CUDA graph that reads weights and a KV cache, replayed in a row.

What a decode step of Qwen3-8B does to the memory of a GPU, without the engine: 15 GB of weights
through small matrix products, and `kv_bytes` through a reduction.
"""

import threading

import torch
from torch import Tensor

NUM_ROWS = 64
WEIGHT_SHAPE = (28672, 4096)  # 235 MB in bf16
NUM_WEIGHTS = 62
KV_BYTES = 64 * 4160 * 147_456  # 64 rows at 4160 tokens
STEPS_AHEAD = 2  # queued at a time, as with overlapped scheduling
WARM_STEPS = 20


class StepLoad:
    """Steps on the default stream, in a thread of its own, between `start` and `stop`."""

    def __init__(self, device: torch.device, kv_bytes: int = KV_BYTES) -> None:
        self._device = device
        self._weights = [_zeros(WEIGHT_SHAPE, device).normal_() for _ in range(NUM_WEIGHTS)]
        self._rows = _zeros((NUM_ROWS, WEIGHT_SHAPE[1]), device).normal_()
        self._cache = _zeros((kv_bytes // 2**14, 2**13), device)
        self._graph = self._capture()
        self._is_stopping = threading.Event()
        self._events: list[torch.cuda.Event] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Step until `stop`."""
        self._is_stopping.clear()
        self._events = []
        self._thread = threading.Thread(target=self._run, name="steps")
        self._thread.start()

    def stop(self) -> list[float]:
        """End the steps; milliseconds of each, without the first ones."""
        assert self._thread is not None, "nothing was started"
        self._is_stopping.set()
        self._thread.join()
        torch.cuda.synchronize(self._device)
        pairs = zip(self._events, self._events[1:], strict=False)
        return [float(start.elapsed_time(end)) for start, end in pairs][WARM_STEPS:]

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while not self._is_stopping.is_set():
            self._graph.replay()
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
            if len(self._events) > STEPS_AHEAD:
                self._events[-1 - STEPS_AHEAD].synchronize()

    def _step(self) -> Tensor:
        product = self._rows @ self._weights[0].T
        for weight in self._weights[1:]:
            product = self._rows @ weight.T
        total: Tensor = product.sum() + self._cache.amax(dim=1).sum()
        return total

    def _capture(self) -> torch.cuda.CUDAGraph:
        self._step()  # cuBLAS and the allocator settle before anything is recorded
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph


def _zeros(shape: tuple[int, int], device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device=device)

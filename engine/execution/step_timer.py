"""How long a step keeps its device busy: from its first work, or the end of the step before it.

On a GPU by events in the stream, so that neither the host's launches nor its waiting count twice.
"""

import time

import torch


class StepTimer:
    """Times one step after the other. On a CPU, where a launch computes, by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._start = torch.cuda.Event(enable_timing=True) if is_cuda else None
        self._end = torch.cuda.Event(enable_timing=True) if is_cuda else None
        self._stream: torch.cuda.Stream | None = None  # asked for once a step: as dear as to record
        self._started_s = 0.0
        self._took_s = 0.0

    def start(self) -> None:
        """The step's first work comes now; the one timed before was waited for."""
        if self._start is not None:
            self._stream = torch.cuda.current_stream()
            self._start.record(self._stream)
        else:
            self._started_s = time.perf_counter()

    def stop(self) -> None:
        """All work of the step has been queued, in the stream in which it began."""
        if self._end is not None:
            self._end.record(self._stream)
        else:
            self._took_s = time.perf_counter() - self._started_s

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._end is None or self._end.query()

    def wait(self) -> float:
        """Block until the device has done the step; returns its seconds."""
        if self._start is None or self._end is None:
            return self._took_s
        self._end.synchronize()
        milliseconds: float = self._start.elapsed_time(self._end)
        return 1e-3 * milliseconds

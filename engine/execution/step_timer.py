"""How long a step keeps its device busy: from its first work, or the end of the step before it.

On a GPU by events in the stream, so that neither the host's launches nor its waiting count twice.
"""

import time

import torch


class StepTimer:
    """Starts when it is made. On a CPU, where a launch computes, the host's clock is used."""

    def __init__(self, device: torch.device) -> None:
        self._start: torch.cuda.Event | None = None
        self._end: torch.cuda.Event | None = None
        self._started_s = time.perf_counter()
        self._took_s = 0.0
        if device.type == "cuda":
            self._start = torch.cuda.Event(enable_timing=True)
            self._end = torch.cuda.Event(enable_timing=True)
            self._start.record()

    def stop(self) -> None:
        """All work of the step has been queued."""
        if self._end is not None:
            self._end.record()
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

"""Clocks as arguments, so that decisions can be replayed and tests never sleep."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a monotonic scale with an arbitrary origin."""
        ...


class MonotonicClock:
    """The process's own monotonic clock; comparable within one host process only."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"time runs forward, not by {seconds}"
        self._now_s += seconds

"""Notices an engine that hangs: it has work, and its thread stays in one turn for too long.

A thread of its own, because a hang in a kernel or a collective leaves the event loop answering
heartbeats. Time is counted in looks, not read from a clock: a process that was stopped as a whole
and goes on has not stalled.
"""

import threading
from collections.abc import Callable

LOOKS = 20  # in `stall_s`: a stall is noticed at most a twentieth late


class StallWatch:
    """Looks at a thread's turns; `None` = it waits for work."""

    def __init__(
        self, stall_s: float, turn: Callable[[], int | None], on_stall: Callable[[], None]
    ) -> None:
        """`on_stall()` is called once, on the watching thread; then the watch is over."""
        self._period_s = stall_s / LOOKS
        self._turn = turn
        self._on_stall = on_stall
        self._last: int | None = None
        self._num_looks = 0  # that found the same turn
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="stall watch", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def look(self) -> bool:
        """One look of the watch; True = the turn seen now has lasted for `stall_s`."""
        turn = self._turn()
        is_same = turn is not None and turn == self._last
        self._num_looks = self._num_looks + 1 if is_same else 0
        self._last = turn
        return self._num_looks >= LOOKS

    def _watch(self) -> None:
        while not self._stop.wait(self._period_s):
            if self.look():
                self._on_stall()
                return

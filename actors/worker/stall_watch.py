"""Notices an engine that hangs: it has work, and its thread stays in one turn for too long.

A thread of its own, because a hang in a kernel or a collective leaves the event loop answering
heartbeats. Time is counted in looks, not read from a clock, so that a process that was stopped as a
whole and resumes has not stalled. A worker that cannot be trusted any more writes one log line and
exits without cleanup, since what would clean up is what failed; Ray restarts the actor.
"""

import faulthandler
import logging
import os
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

logger = logging.getLogger(__name__)

EXIT_FAILED = 70  # EX_SOFTWARE
STDERR = 2  # the file descriptor, because `sys.stderr` may be replaced


def exit_failed(who: str, error: BaseException) -> NoReturn:
    """Exits after an error that no request is to blame for: CUDA, memory, a broken invariant.

    A device that failed once answers wrongly afterwards.
    """
    reason = "".join(traceback.format_exception(error))
    logger.critical("%s: the engine failed, exiting:\n%s", who, reason)
    _exit()


def exit_stalled(who: str, stall_s: float) -> NoReturn:
    """Exits because the engine hangs; writes every thread's stack to stderr."""
    logger.critical("%s: the engine made no progress for %.0f s, exiting", who, stall_s)
    faulthandler.dump_traceback(file=STDERR, all_threads=True)
    _exit()


def _exit() -> NoReturn:
    logging.shutdown()
    os._exit(EXIT_FAILED)


LOOKS = 20  # per `stall_s`: a stall is noticed at most a twentieth late


class StallWatch:
    """Watches the turns of a thread; `None` = it waits for work."""

    def __init__(
        self, stall_s: float, turn: Callable[[], int | None], on_stall: Callable[[], None]
    ) -> None:
        """`on_stall()` is called once, on the watching thread; then the watch is over."""
        self._period_s = stall_s / LOOKS
        self._turn = turn
        self._on_stall = on_stall
        self._last: int | None = None
        self._num_looks = 0  # consecutive looks that found the same turn
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="stall watch", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def look(self) -> bool:
        """Checks once; returns True if the present turn has lasted for `stall_s`."""
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

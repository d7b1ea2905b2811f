"""How long a thread of a process waits for the interpreter's lock, measured by a thread of its own.

The thread sleeps for a millisecond, again and again; how much later it goes on is the time that the
system and the interpreter's lock took. It is started inside an actor by a call of Ray's.
"""

import statistics
import threading
import time

import msgspec

PERIOD_S = 1e-3


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """Of a thread that wants to go on."""

    num_looks: int
    mean_s: float
    p99_s: float
    max_s: float


class LockProbe:
    """One measurement."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> Lateness:
        """Returns what was seen since the start."""
        self._is_ending.set()
        self._thread.join()
        late_s = sorted(self._late_s)
        return Lateness(
            num_looks=len(late_s),
            mean_s=statistics.fmean(late_s),
            p99_s=late_s[int(0.99 * (len(late_s) - 1))],
            max_s=late_s[-1],
        )

    def _look(self) -> None:
        while not self._is_ending.is_set():
            began_s = time.perf_counter()
            time.sleep(PERIOD_S)  # gives the lock away, and needs it back
            self._late_s.append(time.perf_counter() - began_s - PERIOD_S)


_probes: dict[str, LockProbe] = {}


def start_probe(_: object, name: str = "probe") -> None:
    """Starts a probe in the process of an actor."""
    _probes[name] = LockProbe()


def end_probe(_: object, name: str = "probe") -> Lateness:
    """Ends it."""
    return _probes.pop(name).end()

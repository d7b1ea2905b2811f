"""Notices a rank that stands still: its process lives, and does nothing at all.

A rank that is dead ends its socket, and one that hangs in a step is noticed by that step. One that
was stopped as a whole, or swapped out for good, does neither, and may be idle besides. So every
rank counts beats in the ring's memory, by a thread of its own, and looks at others' counts.

Time is counted in looks, not read from a clock: a process that itself stood still and goes on
blames nobody.
"""

import math
import threading
from collections.abc import Callable, Mapping

LOOKS = 20  # per `silence_s`: a silence is noticed at most a twentieth late
LOADING_S = 300.0  # longer than a library holds the interpreter's lock while a model loads


class Heartbeat:
    """This rank's beats, and a look at the others'."""

    def __init__(
        self,
        beat: Callable[[], object],
        others: Mapping[int, Callable[[], int]],
        silence_s: float,
        on_silence: Callable[[int], object],
    ) -> None:
        """others: rank -> reads its count. on_silence: called once, on the thread, with the first
        rank whose count did not change for `silence_s`, or LOADING_S before `loaded`.
        """
        self._beat = beat
        self._others = others
        self._period_s = silence_s / LOOKS
        self._on_silence = on_silence
        self._num_looks = max(LOOKS, math.ceil(LOADING_S / self._period_s))
        self._is_over = threading.Event()
        self._seen: dict[int, int] = {}
        self._num_same = dict.fromkeys(others, 0)  # consecutive looks that found the same count
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def loaded(self) -> None:
        """From now on a rank is silent after `silence_s`: all of them have loaded the model."""
        self._num_looks = LOOKS
        self._seen.clear()  # each is silent for the first time from here on

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def look(self) -> int | None:
        """Checks the others once; returns one that has been silent for too long."""
        for rank, read in self._others.items():
            count = read()
            self._num_same[rank] = self._num_same[rank] + 1 if self._seen.get(rank) == count else 0
            self._seen[rank] = count
            if self._num_same[rank] >= self._num_looks:
                return rank
        return None

    def _run(self) -> None:
        while not self._is_over.wait(self._period_s):
            self._beat()
            if (silent := self.look()) is not None:
                self._on_silence(silent)
                return

"""Threads on a virtual clock: they take turns, and time passes only while all of them wait.

Always the one runs that waits for the earliest moment; of those at one moment, who has waited
longest. So the code of several threads runs unchanged, and every run is alike.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Semaphore, Thread

from engine.kv.host.lane import Lane


@dataclass(slots=True, eq=False)
class _Turn:
    """Of one thread that waits."""

    may_run: Semaphore = field(default_factory=lambda: Semaphore(0))
    is_over: bool = False


class VirtualTime:
    """A `Clock` for the thread that made it and those that it starts."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._due: list[tuple[float, int, _Turn]] = []
        self._order = itertools.count()
        self._failure: BaseException | None = None

    def now_s(self) -> float:
        return self._now_s

    def start(self, work: Callable[[], None]) -> None:
        """Run `work`, which never returns, in a thread of its own."""
        turn = _Turn()
        self._queue(turn, self._now_s)

        def run() -> None:
            turn.may_run.acquire()
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - any, as the others would wait for ever
                self._failure = self._failure or error
                self._let_next_run()

        Thread(target=run, daemon=True).start()

    def wait_until(self, time_s: float) -> None:
        self._wait(_Turn(), time_s)

    def _wait(self, turn: _Turn, time_s: float) -> None:
        self._queue(turn, time_s)
        self._let_next_run()
        turn.may_run.acquire()
        if self._failure is not None:
            raise RuntimeError("a thread has failed") from self._failure

    def _let_next_run(self) -> None:
        while True:
            assert self._due, "all threads wait for each other"
            due_s, _, turn = heapq.heappop(self._due)
            if not turn.is_over:
                break
        self._now_s = max(self._now_s, due_s)
        turn.is_over = True
        turn.may_run.release()

    def _queue(self, turn: _Turn, time_s: float) -> None:
        if time_s < math.inf:
            heapq.heappush(self._due, (time_s, next(self._order), turn))


class Signal:
    """As `threading.Event`, for one thread that waits."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._is_set = False
        self._waiting: _Turn | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiting is not None:
            self._time._queue(self._waiting, self._time.now_s())
            self._waiting = None

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout_s: float = math.inf) -> None:
        if not self._is_set:
            self._waiting = turn = _Turn()
            self._time._wait(turn, self._time.now_s() + timeout_s)
            self._waiting = None


class VirtualLane(Lane):
    """A lane whose thread is one of `VirtualTime`."""

    def __init__(self, time: VirtualTime) -> None:
        self._posted: deque[Callable[[], None]] = deque()
        self._has_jobs = Signal(time)
        time.start(self._work)

    def post(self, job: Callable[[], None]) -> None:
        self._posted.append(job)
        self._has_jobs.set()

    def close(self) -> None:
        """The thread waits for jobs for as long as the process lives."""

    def _work(self) -> None:
        while True:
            self._has_jobs.wait()
            self._has_jobs.clear()
            while self._posted:
                self._posted.popleft()()

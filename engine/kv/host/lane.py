"""A thread beside the steps that runs jobs in order; it does not keep the process alive."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

_CLOSE_S = 5.0


class Lane:
    """Jobs raise nothing: an error ends the thread."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Ends the thread after the jobs posted so far; gives up on one that hangs."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

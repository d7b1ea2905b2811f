"""Tasks of all ranks beside their steps: rank 0 asks for them by the ring, the others answer.

    rank 0     RankTask: into the ring, then its own part, then waits for all answers
    another    RankTask: from the ring to the thread that steps, which waits for the steps that
               rank 0 had ended, begins the work and leaves the rest to a thread, which answers;
               steps go on meanwhile

Work that has begun is not stopped. So rank 0 waits for every answer as long as its gang lives: what
is asked may write, and whoever asks must know that nothing can land any more. A rank that stands
still, or dies, ends the gang, and with it the wait (heartbeat.py). Knows nothing of what the work
is, nor torch.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from engine.errors import HandoffError, WorkerError
from engine.ranks.plan_ring import PlanRingReader
from engine.ranks.ring_messages import RankTask, TaskAnswer, TaskKind, encode, split_report

logger = logging.getLogger(__name__)

NUM_THREADS = 4  # of each kind of work
MAX_ERROR_CHARS = 1000

Work = Callable[[bytes], bytes]  # what is asked -> what comes of it
# Called on the thread that steps; returns the rest of the work, which another thread calls.
Begin = Callable[[bytes], Callable[[], bytes]]


class TaskAnswers:
    """Puts the parts of answers together. One thread adds, any may wait."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], list[bytes]] = {}  # number, rank
        self._answers: dict[int, dict[int, bytes | HandoffError]] = {}  # number -> rank -> it

    def add(self, rank: int, answer: TaskAnswer) -> None:
        parts = self._parts.setdefault((answer.number, rank), [])
        parts.append(answer.data)
        if answer.goes_on:
            return
        data = b"".join(self._parts.pop((answer.number, rank)))
        found = HandoffError(f"rank {rank}: {answer.error}") if answer.error else data
        self._answers.setdefault(answer.number, {})[rank] = found

    def num_of(self, number: int) -> int:
        """How many ranks have answered."""
        return len(self._answers.get(number, {}))

    def take(self, number: int) -> list[bytes]:
        """All answers, by rank. Raises HandoffError if a rank could not do it."""
        found = self._answers.pop(number)
        answers = []
        for _, answer in sorted(found.items()):
            if isinstance(answer, HandoffError):
                raise answer
            answers.append(answer)
        return answers


class RankTasks:
    """Rank 0's side; from any thread."""

    def __init__(self, write: Callable[[bytes], None], wait: Callable[[int], list[bytes]]) -> None:
        """write: to all other ranks. wait: for the answers of all of them."""
        self._write = write
        self._wait = wait
        self._numbers = itertools.count()

    def ask(self, work: bytes, own: Work) -> list[bytes]:
        """What the work comes to on each rank, the first one's by `own`; waits for all of them.

        Raises WorkerError if a rank ends, HandoffError if one could not do it, what `own` raises.
        """
        wait = self.begin(work, "heads")
        try:
            answer = own(work)
        finally:
            others = wait()
        return [answer, *others]

    def begin(self, work: bytes, kind: TaskKind, num_ended: int = 0) -> Callable[[], list[bytes]]:
        """Asks the other ranks, which begin before any step that is launched later.

        num_ended: steps that each has to end first. The function returned waits for all answers,
        on any thread; it raises as `ask` does.
        """
        number = next(self._numbers)
        self._write(encode(RankTask(number, work, kind, num_ended)))
        return partial(self._wait, number)


class OneRankTasks:
    """Of a worker of one rank."""

    def ask(self, work: bytes, own: Work) -> list[bytes]:
        return [own(work)]


class TaskThreads:
    """Another rank's side: does what is asked in threads of its own."""

    def __init__(
        self,
        ring: PlanRingReader,
        works: Mapping[TaskKind, Begin],
        on_failure: Callable[[Exception], object],
    ) -> None:
        """works: of each kind that rank 0 asks for.

        on_failure: ends this rank when it cannot answer, or rank 0 would wait for ever.
        """
        self._ring = ring
        self._works = works
        self._on_failure = on_failure
        self._answering = threading.Lock()  # the parts of one answer after the other
        # Of each kind, so that a load does not wait until what was saved before it is copied.
        self._threads = {
            kind: ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=f"rank task {kind}")
            for kind in works
        }

    def begin(self, task: RankTask) -> None:
        """Called on the thread that steps; does not wait for the work."""
        try:
            rest = self._works[task.kind](task.work)
        except Exception as failure:  # noqa: BLE001 - as if the rest had failed
            rest = partial(_fail, failure)
        self._threads[task.kind].submit(self._do, task.number, rest)

    def _do(self, number: int, rest: Callable[[], bytes]) -> None:
        data, error = b"", ""
        try:
            data = rest()
        except WorkerError as failure:
            error = failure.message
        except Exception as failure:
            logger.exception("a task beside the steps")
            error = f"{type(failure).__name__}: {failure}"
        try:
            self._answer(number, data, error)
        except Exception as failure:  # noqa: BLE001 - any
            self._on_failure(failure)

    def _answer(self, number: int, data: bytes, error: str) -> None:
        with self._answering:
            for part_data, goes_on in split_report(data):
                part = TaskAnswer(number, part_data, goes_on, error[:MAX_ERROR_CHARS])
                self._ring.report_in_turn(encode(part))


def in_thread(work: Work) -> Begin:
    """A task whose work is all done in a thread of its own, and none on the thread that steps."""
    return lambda asked: partial(work, asked)


def _fail(error: Exception) -> bytes:
    raise error

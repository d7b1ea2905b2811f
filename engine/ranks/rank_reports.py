"""What the followers of a worker's rank 0 report: digests, results, answers and their own end.

One thread takes reports from the ring; any other waits here for those of a step or of a task.
Knows no torch and no Ray.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.errors import ConfigError, WorkerError
from engine.plan import StepResult
from engine.ranks.heartbeat import LOOKS
from engine.ranks.plan_ring import PlanRing
from engine.ranks.rank_tasks import TaskAnswers
from engine.ranks.ring_messages import (
    RankFailure,
    ResultPart,
    StepDigest,
    TaskAnswer,
    decode_report,
    decode_result,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
K = TypeVar("K", int, tuple[int, bool])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """A rank has ended, or is about to; the ranks cannot go on without it."""

    rank: int  # from 1
    reason: str = "its process is dead"
    is_config: bool = False
    is_dead: bool = False  # and said nothing

    def error(self) -> WorkerError | ConfigError:
        kind = ConfigError if self.is_config else WorkerError
        return kind(f"rank {self.rank}: {self.reason}")


class RankReports:
    """Takes what the followers say, on a thread of its own."""

    def __init__(self, ring: PlanRing, num_ranks: int, on_end: Callable[[RankEnd], object]) -> None:
        """`on_end` is called on the thread, once, with the first end of any follower."""
        self._ring = ring
        self._num_followers = num_ranks - 1
        self._on_end = on_end
        self._changed = threading.Condition()
        self._digests: dict[int, dict[int, bytes]] = {}  # step -> rank -> digest
        self._parts: dict[int, list[bytes]] = {}  # rank -> of a result that is not whole yet
        # (step, whether it is a pass of a model that drafts) -> rank -> result
        self._results: dict[tuple[int, bool], dict[int, StepResult]] = {}
        self._answers = TaskAnswers()
        self._end: RankEnd | None = None

    def start(self) -> None:
        """Call it once every follower is connected."""
        threading.Thread(target=self._take, name="rank reports", daemon=True).start()

    def wait_digests(self, step: int, timeout_s: float) -> dict[int, bytes]:
        """Rank -> its digest of a step. Raises WorkerError if one says nothing in time, or ends."""
        return self._wait(self._digests, step, range(1, self._num_followers + 1), timeout_s)

    def wait_results(
        self, step: int, is_draft: bool, ranks: Sequence[int], timeout_s: float
    ) -> dict[int, StepResult]:
        """Rank -> its result of a step. Raises WorkerError if one comes too late, or ends."""
        return self._wait(self._results, (step, is_draft), ranks, timeout_s) if ranks else {}

    def _wait(
        self, said: dict[K, dict[int, T]], step: K, ranks: Sequence[int], timeout_s: float
    ) -> dict[int, T]:
        """Takes what all `ranks` said of a step; said: step -> rank -> it."""
        with self._changed:

            def is_complete() -> bool:
                return len(said.get(step, {})) == len(ranks)

            for _ in range(LOOKS):  # each is cut short where all ranks are stopped and go on
                if self._changed.wait_for(lambda: is_complete() or self._end, timeout_s / LOOKS):
                    break
            if is_complete():
                return said.pop(step)
            if self._end is not None:
                raise self._end.error()
            heard = sorted(said.get(step, {}))
            number, is_draft = step if isinstance(step, tuple) else (step, False)
            raise WorkerError(
                f"{'pass' if is_draft else 'step'} {number}: only ranks {heard} of {list(ranks)}"
                f" followed within {timeout_s:.0f} s"
            )

    def wait_answers(self, number: int) -> list[bytes]:
        """What a task came to on each follower, however long it takes.

        Raises WorkerError if one ends, HandoffError if one could not do it.
        """
        with self._changed:

            def is_complete() -> bool:
                return self._answers.num_of(number) == self._num_followers

            self._changed.wait_for(lambda: is_complete() or self._end)
            if is_complete():
                return self._answers.take(number)
            assert self._end is not None, "nothing else ends the wait"
            raise self._end.error()

    def wait_end(self, timeout_s: float) -> RankEnd | None:
        """The first end of a follower; None = none has ended within `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._end, timeout_s)
            return self._end

    def _take(self) -> None:
        while self._end is None:
            for reader, report in self._ring.wait_reports():
                if report != b"":
                    self._take_one(reader + 1, report)
        self._on_end(self._end)

    def _take_one(self, rank: int, report: bytes | None) -> None:
        """What cannot be taken ends its rank, because others would wait for it for ever."""
        try:
            self._note(rank, report)
        except Exception as error:
            logger.exception("a report of rank %d", rank)
            with self._changed:
                reason = f"its report cannot be taken: {type(error).__name__}: {error}"
                self._end = self._end or RankEnd(rank=rank, reason=reason)
                self._changed.notify_all()

    def _note(self, rank: int, report: bytes | None) -> None:
        said = None if report is None else decode_report(report)
        with self._changed:
            match said:
                case StepDigest():
                    self._digests.setdefault(said.step, {})[rank] = said.digest
                case ResultPart():
                    self._parts.setdefault(rank, []).append(said.data)
                    if not said.goes_on:
                        result = decode_result(b"".join(self._parts.pop(rank)))
                        step = said.step, said.is_draft
                        self._results.setdefault(step, {})[rank] = result
                case TaskAnswer():
                    self._answers.add(rank, said)
                case RankFailure() if self._end is None:
                    self._end = RankEnd(rank=rank, reason=said.reason, is_config=said.is_config)
                case None if self._end is None:
                    self._end = RankEnd(rank=rank, is_dead=True)
            self._changed.notify_all()

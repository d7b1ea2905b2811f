"""Ranks in threads that take no steps, and do what the first asks by the real ring."""

import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from engine.ranks.following import Follower
from engine.ranks.leading import LeadingExecutor
from engine.ranks.plan_ring import PlanRing, PlanRingReader, RingError
from engine.ranks.rank_reports import RankEnd, RankReports
from engine.ranks.rank_tasks import Begin, RankTasks, TaskThreads, Work, in_thread
from engine.ranks.ring_messages import TaskKind

PATIENCE_S = 60.0
NO_STEPS: Any = None


class AskedRanks:
    """Ranks 1 and up, for as long as the context is open."""

    def __init__(self, works: Sequence[Begin], kinds: Sequence[TaskKind] = ("heads",)) -> None:
        """works: of these ranks, which are asked for these kinds alone."""
        self._kinds = kinds
        name = f"test-{uuid.uuid4().hex}"
        self.ends: list[RankEnd] = []
        self.failures: list[Exception] = []  # of ranks that could not answer
        self._ring = PlanRing(name, len(works), PATIENCE_S)
        self.readers: dict[int, PlanRingReader] = {}
        self._threads = [
            threading.Thread(target=self._follow, args=(name, rank, work))
            for rank, work in enumerate(works, start=1)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
            self._ring.accept(PATIENCE_S)
        reports = RankReports(self._ring, len(self._threads) + 1, self._note)
        reports.start()
        self._has_ended = threading.Event()
        self._leading = LeadingExecutor(
            NO_STEPS, self._ring, reports, compare_every=1, patience_s=PATIENCE_S
        )
        self.rank_tasks = RankTasks(self._ring.write, reports.wait_answers)
        return self

    def __exit__(self, *_: object) -> None:
        self._leading.stop()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for reader in self.readers.values():
            reader.close()
        assert self._has_ended.wait(PATIENCE_S)
        self._ring.close()

    def end(self, rank: int) -> None:
        """As if its process died, as far as the first rank sees."""
        self.readers[rank]._sock.shutdown(2)

    def _note(self, end: RankEnd) -> None:
        self.ends.append(end)
        self._has_ended.set()

    def _follow(self, name: str, rank: int, work: Begin) -> None:
        ring = self.readers[rank] = PlanRingReader(name, rank - 1, PATIENCE_S, PATIENCE_S)
        with suppress(RingError):  # of the rank that ends
            tasks = TaskThreads(ring, dict.fromkeys(self._kinds, work), self.failures.append)
            Follower(NO_STEPS, ring, print, None, tasks.begin).run()


def in_threads(*works: Work) -> list[Begin]:
    """Of ranks that do nothing of it on the thread that steps."""
    return [in_thread(work) for work in works]

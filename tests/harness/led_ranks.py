"""Ranks that follow the first by the real ring, as those of a worker do."""

import logging
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self

from engine.core import Executor
from engine.engine import Engine
from engine.layers.context import Comm
from engine.ranks.following import Follower
from engine.ranks.leading import LeadingExecutor
from engine.ranks.plan_ring import PlanRing, PlanRingReader, RingError
from engine.ranks.rank_reports import RankEnd, RankReports
from engine.ranks.rank_tasks import Begin, RankTasks, TaskThreads
from engine.ranks.ring_messages import TaskKind
from engine.ranks.step_counts import StepCounts
from tests.engine.ranks.exact_models import planted, snapped_mixtures
from tests.harness.rank_processes import TIMEOUT_S, RankProcesses


def follow(
    comm: Comm,
    name: str,
    is_exact: bool,
    fault: str | None,
    build: Callable[..., Executor | Engine],
    *args: object,
) -> str:
    """All that another rank does; returns how it ended."""
    with planted(fault), snapped_mixtures() if is_exact else nullcontext():
        built = build(comm, *args)
        executor, drafts, shared, part = built, None, None, None
        if isinstance(built, Engine):
            executor, drafts = built.executor, built.drafting_executor
            shared, part = built.kv_store.shared, built.below_device.part
        on_step_end = None if shared is None else shared.count_step
        ring = PlanRingReader(name, comm.rank.index - 1, TIMEOUT_S, TIMEOUT_S)
        works: dict[TaskKind, Begin] = {}
        if part is not None:
            works = {"host save": part.begin, "host load": part.begin}
        begin_task = TaskThreads(ring, works, _end).begin
        try:
            Follower(executor, ring, lambda _: None, on_step_end, begin_task, drafts).run()
        except RingError as error:
            return str(error)
        finally:
            ring.close()
    return "stopped"


class LedRanks:
    """The other ranks build and follow, for as long as the context is open."""

    def __init__(
        self,
        ranks: RankProcesses,
        build: Callable[..., Executor | Engine],
        *args: Any,
        is_exact: bool = False,
        fault: str | None = None,
    ) -> None:
        """build: of a rank's communication and `args`; an engine, if it drafts or moves blocks.

        fault: of theirs, see `planted`.
        is_exact: their mixtures compute as those of `exact_models`.
        """
        self.ranks = ranks
        self.ends: list[RankEnd] = []
        self.has_ended = threading.Event()
        self.steps = StepCounts()
        self._given = is_exact, fault, build, *args
        self._leading: LeadingExecutor | None = None
        self._ring: PlanRing

    def __enter__(self) -> Self:
        name = f"test-{uuid.uuid4().hex}"
        self._ring = PlanRing(name, self.ranks.comm.rank.size - 1, TIMEOUT_S)
        self.ranks.start(follow, name, *self._given)
        return self

    def lead(self, executor: Executor) -> LeadingExecutor:
        """executor: of the first rank, which built at the same time."""
        size = self.ranks.comm.rank.size
        for _ in range(size - 1):
            self._ring.accept(TIMEOUT_S)
        reports = RankReports(self._ring, size, self._note)
        reports.start()
        self.rank_tasks = RankTasks(self._ring.write, reports.wait_answers)
        self._leading = LeadingExecutor(
            executor,
            self._ring,
            reports,
            compare_every=1,
            patience_s=TIMEOUT_S,
            steps=self.steps,
        )
        return self._leading

    def lead_engine(self, engine: Engine) -> None:
        """As `lead`, with what drafts there, and what moves blocks to host memory."""
        engine.core.wrap_executor(self.lead)
        if engine.host_tier is not None and (parts := engine.below_device.parts) is not None:
            engine.host_tier.wrap_mover(
                lambda mover: parts.lead(mover, self.rank_tasks, self.steps)
            )
        if engine.draft_passes is not None:
            assert self._leading is not None, "it leads now"
            engine.draft_passes.wrap_executor(self._leading.lead_drafts)

    def _note(self, end: RankEnd) -> None:
        self.ends.append(end)
        self.has_ended.set()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._leading is not None and not self.has_ended.is_set():
            self._leading.stop()
            if kind is None:
                assert set(self.ranks.answers()) == {"stopped"}
        if self._leading is not None:
            assert self.has_ended.wait(TIMEOUT_S), "the reports' thread ends with its followers"
        self._ring.close()


def _end(error: Exception) -> None:
    """As a rank does that cannot answer."""
    logging.critical("a rank cannot answer", exc_info=error)
    os._exit(1)

"""DP attention: one scheduler a rank, and the rank that a new request goes to.

Every rank has requests, rows, blocks and a prefix index of its own. So each has a whole scheduler:
queue, reserve, preemption and conservation are those of one worker, and none knows of the others.
All are here, in rank 0's process: a step's plan holds the plans of all ranks, which every rank gets
(`StepPlan.of_ranks`), and no rank has to ask another what it does.

    add()     -> choose_rank -> that rank's scheduler, for good
    plan()    -> each scheduler's plan, or an empty one where it has none; none while the rows of
                 all ranks wait for those held for drafts
    commit()  -> each scheduler that had one, with its rank's result

A step takes as long as the rank with the most tokens. Only that rank's cost model learns from it.
Limits (rows, tokens of a step, the queue) are each rank's. Knows no tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, fields
from typing import Any, TypeVar

import msgspec

from engine.cost_model import StepCosts, StepWork
from engine.kv.rank_caches import RankCaches
from engine.messages import ShortLoad
from engine.plan import StepPlan, StepResult, empty_plan
from engine.rank_choice import RankLoad, choose_rank
from engine.request import Request, RequestKey
from engine.scheduling.contracts import BlockHasher, SchedulerStatistics, StepOutput
from engine.scheduling.drafting import Drafting
from engine.scheduling.host_loads import HostLoadStatistics
from engine.scheduling.prompt_scheduling import QueuedWork
from engine.scheduling.scheduler import Scheduler
from engine.turns import run_together

_NOT_PLANNED = -1  # the step of the empty plan of a rank whose scheduler has none


class DpScheduler:
    """To the step loop it is one `Scheduler`; engine thread only."""

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        caches: RankCaches,
        hasher: BlockHasher,
        block_size: int,
        launch_passes: Callable[[], None] = lambda: None,
    ) -> None:
        """schedulers: one a rank, each over its cache in `caches`.

        All have the same `Drafting`, whose books are of requests; or, where a model drafts on each
        rank, one each with the same policy and counts. What one rank's requests accept tells of the
        others', too. launch_passes: launches what such models have queued for all ranks.
        """
        assert len(schedulers) == len(caches.of_rank), "a scheduler and a cache for each rank"
        self.of_rank = schedulers
        self._caches = caches
        self._hasher = hasher
        self._block_size = block_size
        self._launch_passes = launch_passes
        self._num_steps = 0
        self._newest_ranks: list[int] = []  # those that the newest step has plans of
        self._is_deferred = False  # at the last `plan` no rank had anything to do yet

    # ---- entering and leaving -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request on a rank; CapacityError if the queue of each is full."""
        if self._caches.of_rank[0].keeps_prefixes and not request.needs_whole_prompt:
            self._hasher.extend(request)
        ranks = range(len(self.of_rank))
        rank = choose_rank([self._load(request, rank) for rank in ranks])
        self.of_rank[rank].add(request)

    def _load(self, request: Request, rank: int) -> RankLoad:
        scheduler, cache = self.of_rank[rank], self._caches.of_rank[rank]
        counts = scheduler.statistics()
        num_known, size = request.num_known_tokens, self._block_size
        num_hits = len(cache.match(request.block_hashes[: (num_known - 1) // size]))
        num_missing = -(-num_known // size) - num_hits
        return RankLoad(
            num_requests=counts.num_waiting + counts.num_running,
            is_full=scheduler.is_queue_full,
            num_tokens_before=counts.num_queued_tokens + num_known - num_hits * size,
            has_room=num_missing + counts.num_running <= cache.num_available,
            num_available_blocks=cache.num_available,
        )

    def abort(self, key: RequestKey) -> bool:
        """Remove a request and free what it holds; False if it is not here (any more)."""
        return any(scheduler.abort(key) for scheduler in self.of_rank)

    def requests_of(self, ingress_id: str) -> list[RequestKey]:
        """Keys of every request of one ingress, waiting or running."""
        return [key for scheduler in self.of_rank for key in scheduler.requests_of(ingress_id)]

    # ---- one step -------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step of all ranks; None when no rank can run anything now."""
        self._is_deferred = False
        if self._waits_for_held_rows():
            return None
        self.settle_drafts()  # of all ranks before the first one plans: their policy is the same
        plans = run_together([scheduler.planning(now_s) for scheduler in self.of_rank])
        self._launch_passes()
        planned = [rank for rank, plan in enumerate(plans) if plan is not None]
        self._is_deferred = not planned
        if not planned:
            return None
        step, self._num_steps = self._num_steps, self._num_steps + 1
        self._newest_ranks = planned
        return empty_plan(step, [plan or empty_plan(_NOT_PLANNED) for plan in plans])

    def _waits_for_held_rows(self) -> bool:
        """Whether all ranks' decodes wait for rows held for drafts, to share the next step.

        A step takes all ranks, whoever has rows in it. Without this, one rank's rows would be in
        every other step and another's in those between.
        """
        if any(scheduler.has_prompts for scheduler in self.of_rank):
            return False
        held = [scheduler.num_held_rows for scheduler in self.of_rank]
        # A rank whose rows are all held has none that could go on.
        going_on = [
            (scheduler, sum(held) - own)
            for scheduler, own in zip(self.of_rank, held, strict=True)
            if scheduler.num_running > own
        ]
        waits = [scheduler.waits_for_held_rows(elsewhere) for scheduler, elsewhere in going_on]
        return bool(waits) and all(waits)

    def catch_up(self) -> None:
        """As of each `Scheduler`."""
        for scheduler in self.of_rank:
            scheduler.catch_up()

    def settle_drafts(self) -> None:
        """As of each `Scheduler`."""
        for scheduler in self.of_rank:
            scheduler.settle_drafts()

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Commit the oldest step of every rank that had a part in it."""
        assert plan.step == result.step, f"plan {plan.step} got result {result.step}"
        most = max([one.num_tokens for one in plan.of_ranks])
        outputs = []
        ranks = zip(self.of_rank, plan.of_ranks, result.of_ranks, strict=True)
        for scheduler, its_plan, its_result in ranks:
            if its_plan.step == _NOT_PLANNED:
                continue
            if its_plan.num_tokens < most:
                its_result = msgspec.structs.replace(its_result, duration_s=None)
            outputs.append(scheduler.commit(its_plan, its_result))
        return _joined(outputs)

    def take_expired(self) -> StepOutput:
        """Failures of the requests that `plan` dropped because their deadline had passed."""
        return _joined([scheduler.take_expired() for scheduler in self.of_rank])

    # ---- observation ----------------------------------------------------------------------------

    @property
    def deferred_until_s(self) -> float | None:
        """Set if the last `plan` had nothing but ranks that wait for short prompts."""
        return _earliest(s.deferred_until_s for s in self.of_rank) if self._is_deferred else None

    @property
    def look_due_s(self) -> float | None:
        return _earliest(scheduler.look_due_s for scheduler in self.of_rank)

    @property
    def has_work(self) -> bool:
        return any(scheduler.has_work for scheduler in self.of_rank)

    @property
    def drafting(self) -> Drafting:
        """Of rank 0; policy and counts are those of all ranks."""
        return self.of_rank[0].drafting

    def count_idle(self, seconds: float) -> None:
        """As of each `Scheduler`."""
        for drafting in {id(one.drafting): one.drafting for one in self.of_rank}.values():
            drafting.count_idle(seconds)

    @property
    def waited_s(self) -> float:
        """As of a `Scheduler`; the ranks that have planned wait together."""
        return max(self.of_rank[rank].waited_s for rank in self._newest_ranks)

    def count_late(self, seconds: float) -> None:
        """As of each `Scheduler`."""
        for drafting in {id(one.drafting): one.drafting for one in self.of_rank}.values():
            drafting.count_late(seconds)

    @property
    def is_held_for_drafts(self) -> bool:
        """Whether every rank with rows waits for a step in flight, so that the device does."""
        running = [scheduler for scheduler in self.of_rank if scheduler.num_running > 0]
        return bool(running) and all(scheduler.is_held_for_drafts for scheduler in running)

    @property
    def num_running(self) -> int:
        return sum(scheduler.num_running for scheduler in self.of_rank)

    @property
    def num_free_rows(self) -> int:
        return sum(scheduler.num_free_rows for scheduler in self.of_rank)

    def owners(self) -> Iterator[tuple[str, list[int]]]:
        """Every holder of block references, by the ids of `RankCaches`."""
        for rank, scheduler in enumerate(self.of_rank):
            for name, block_ids in scheduler.owners():
                yield f"rank {rank} {name}", self._caches.numbered(rank, block_ids)

    def host_statistics(self) -> HostLoadStatistics | None:
        """Sums over the ranks; None = there is no host tier."""
        found = [s.host_statistics() for s in self.of_rank]
        known = [one for one in found if one is not None]
        return _sums(HostLoadStatistics, known) if known else None

    @property
    def costs(self) -> StepCosts:
        """As rank 0's cost model has them."""
        return self.of_rank[0].costs

    def learn(self, samples: Iterable[tuple[StepWork, float]]) -> None:
        """Fit every rank's cost model to steps measured before the first request."""
        measured = list(samples)
        for scheduler in self.of_rank:
            scheduler.learn(measured)

    @property
    def newest_step_s(self) -> float:
        """Predicted duration of the step launched last, which must be in flight."""
        return max(self.of_rank[rank].newest_step_s for rank in self._newest_ranks)

    def queued_work(self) -> QueuedWork:
        """Predicted work of the queues, which the ranks compute at the same time."""
        works = [scheduler.queued_work() for scheduler in self.of_rank]
        shorts = [work.short for work in works if work.short is not None]
        short = None
        if shorts:
            short = ShortLoad(
                num_waiting=sum(one.num_waiting for one in shorts),
                queued_tokens=sum(one.queued_tokens for one in shorts),
                queued_s=sum(one.queued_s or 0.0 for one in shorts) / len(shorts),
            )
        return QueuedWork(
            queued_s=sum(work.queued_s for work in works) / len(works),
            short=short,
            room_s=min(work.room_s for work in works),
        )

    def statistics(self) -> SchedulerStatistics:
        """Sums over the ranks; a step counts once for each rank that had a part in it."""
        return _sums(SchedulerStatistics, [s.statistics() for s in self.of_rank])


Counts = TypeVar("Counts", SchedulerStatistics, HostLoadStatistics)


def _sums(kind: type[Counts], counted: Sequence[Counts]) -> Counts:
    """Field by field; one or more."""
    columns = zip(*map(astuple, counted), strict=True)
    names = [field.name for field in fields(kind)]
    return kind(**dict(zip(names, map(_total, columns), strict=True)))


def _total(counts: Sequence[Any]) -> Any:  # noqa: ANN401 - numbers, or tuples of numbers
    if isinstance(counts[0], tuple):
        return tuple(map(sum, zip(*counts, strict=True)))
    return sum(counts)


def _joined(outputs: Sequence[StepOutput]) -> StepOutput:
    return StepOutput(
        num_scheduled_tokens=sum(output.num_scheduled_tokens for output in outputs),
        has_progressed=any(output.has_progressed for output in outputs),
        tokens=[token for output in outputs for token in output.tokens],
        failures=[failure for output in outputs for failure in output.failures],
        left=[key for output in outputs for key in output.left],
    )


def _earliest(times_s: Iterable[float | None]) -> float | None:
    return min((at_s for at_s in times_s if at_s is not None), default=None)

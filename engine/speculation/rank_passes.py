"""Passes of what drafts on ranks with requests of their own (DP attention), launched for all ranks.

Each rank has requests, rows and blocks of its own, so it has a `DraftModel` of its own, all of them
in rank 0's process. What drafts may have experts that the ranks share: no rank can run a pass
alone. So a pass that a rank launches is queued until one of them waits, or the step is planned.
Then the first pass of each rank is launched as one (`StepPlan.of_ranks`), then the second of each:

    rank 0    pass 0  pass 1 ........ wait    ->   [pass 0, pass 0]  [pass 1, nothing]
    rank 1    pass 0 ................ wait

Ranks propose in turns (engine/turns.py), so passes meet wherever several ranks have some.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core import DraftingExecutor, PendingStep
from engine.plan import StepPlan, StepResult, empty_plan

_NO_STEP = -1


@dataclass(slots=True, eq=False)
class _JoinedPass:
    """A pass of all ranks; it is waited for once."""

    pending: PendingStep
    result: StepResult | None = None

    def of_rank(self, rank: int) -> StepResult:
        if self.result is None:
            self.result = self.pending.wait()
        return self.result.of_ranks[rank]


@dataclass(slots=True, eq=False)
class _QueuedPass:
    """One rank's; a `PendingStep`."""

    passes: "JoinedPasses"
    rank: int
    plan: StepPlan
    place: int | None = None  # what it draws is given as this draft
    joined: _JoinedPass | None = None  # None = not launched yet

    @property
    def is_done(self) -> bool:
        return self.joined is not None and self.joined.pending.is_done

    def wait(self) -> StepResult:
        if self.joined is None:
            self.passes.flush()
        assert self.joined is not None, "it was queued"
        return self.joined.of_rank(self.rank)


@dataclass(slots=True, eq=False)
class RankPasses:
    """The `DraftingExecutor` of one rank's `DraftModel`."""

    passes: "JoinedPasses"
    rank: int
    queue: deque[_QueuedPass] = field(default_factory=deque)

    @property
    def max_in_flight(self) -> int:
        return self.passes.executor.max_in_flight

    def launch(self, plan: StepPlan) -> PendingStep:
        self.queue.append(_QueuedPass(self.passes, self.rank, plan))
        return self.queue[-1]

    def give_drafts(self, place: int) -> None:
        self.queue[-1].place = place


class JoinedPasses:
    """All ranks' passes; engine thread of rank 0 only."""

    def __init__(self, executor: DraftingExecutor, num_ranks: int) -> None:
        """executor: of plans of all ranks."""
        self._executor = executor
        self.of_rank = [RankPasses(self, rank) for rank in range(num_ranks)]
        self._in_flight: deque[_JoinedPass] = deque()
        self._num_passes = 0
        self.num_met = 0  # those that more than one rank took part in

    @property
    def executor(self) -> DraftingExecutor:
        return self._executor

    def wrap_executor(self, wrap: Callable[[DraftingExecutor], DraftingExecutor]) -> None:
        """Wrap the executor; call it before the first pass."""
        self._executor = wrap(self._executor)

    def flush(self) -> None:
        """Launch all that is queued."""
        while any(one.queue for one in self.of_rank):
            self._launch([one.queue.popleft() if one.queue else None for one in self.of_rank])

    def _launch(self, passes: list[_QueuedPass | None]) -> None:
        """passes: by rank; None = it has none."""
        while len(self._in_flight) >= self._executor.max_in_flight:
            self._in_flight.popleft().of_rank(0)
        plans = [empty_plan(_NO_STEP) if one is None else one.plan for one in passes]
        joined = _JoinedPass(self._executor.launch(empty_plan(self._num_passes, plans)))
        self._num_passes += 1
        self._in_flight.append(joined)
        queued = [one for one in passes if one is not None]
        self.num_met += len(queued) > 1
        for one in queued:
            one.joined = joined
        # Every rank's drafts ahead come first in its queue, so passes that meet have one place.
        places = {one.place for one in queued if one.place is not None}
        assert len(places) <= 1, f"one pass gives drafts number {sorted(places)}"
        for place in places:
            self._executor.give_drafts(place)


class OwnPasses:
    """A `DraftingExecutor` of plans of all ranks, of a model that each rank has whole.

    Each rank runs its own plan alone.
    """

    def __init__(self, executor: DraftingExecutor, rank: int) -> None:
        self._executor = executor
        self._rank = rank

    @property
    def max_in_flight(self) -> int:
        return self._executor.max_in_flight

    def launch(self, plan: StepPlan) -> PendingStep:
        return self._executor.launch(plan.of_ranks[self._rank])

    def give_drafts(self, place: int) -> None:
        self._executor.give_drafts(place)

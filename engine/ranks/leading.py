"""The executors of rank 0: the other ranks, its followers, launch the same plans in the same order.

    leader     plan n+1: into the ring, then launched     wait n     commit n
    follower   plan n+1: from the ring, then launched     (following.py)

The leader has the only scheduler. A follower decides nothing: what it computes, samples and keeps
follows from the plans alone, so its tokens are the leader's. That is checked: every so many steps
the followers report a digest of the plan and its tokens, and the leader gives the next step's
result out only when all agree. The reports come while that step computes, so nobody waits for them.
Where every step is compared, none is given out before.

Where a model drafts, its passes go the same way, between the steps (`LeadingPasses`). They are not
compared: other drafts would show in the tokens of the step that verifies them.

With DP attention a follower has rows that the leader has not. It reports the results of each step,
and the leader gives out those of all ranks together.

Reports, and the end of a rank, are taken by rank_reports.py. Knows no torch and no Ray.
"""

from engine.core import DraftingExecutor, Executor, PendingStep
from engine.errors import WorkerError
from engine.plan import StepPlan, StepResult
from engine.ranks.plan_ring import PlanRing
from engine.ranks.rank_reports import RankReports
from engine.ranks.ring_messages import (
    Compile,
    GiveDrafts,
    LaunchPass,
    LaunchStep,
    Stop,
    encode,
    step_digest,
)
from engine.ranks.step_counts import StepCounts
from engine.request import Constraint

COMPARE_EVERY = 64  # steps


class LeadingExecutor:
    """The `Executor` of rank 0: every plan goes to the followers, then to its own executor."""

    def __init__(
        self,
        executor: Executor,
        ring: PlanRing,
        reports: RankReports,
        *,
        compare_every: int,
        patience_s: float,
        steps: StepCounts | None = None,
    ) -> None:
        """compare_every: steps; 1 = no result is given out before all ranks agree on it.

        patience_s: so long followers may take to report a step. steps: kept here; None = nobody
        asks.
        """
        self._executor = executor
        self._ring = ring
        self._reports = reports
        self._compare_every = compare_every
        self._patience_s = patience_s
        self._steps = steps or StepCounts()
        self._num_launched = 0
        self._comparison: _Comparison | None = None  # of the step launched last, if it is compared

    def lead_drafts(self, executor: DraftingExecutor) -> "LeadingPasses":
        """The executor of rank 0 that drafts for this one's rows, led likewise."""
        return LeadingPasses(executor, self._ring, self._reports, self._patience_s, self._steps)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises WorkerError when a follower is dead or has been stuck for too long."""
        self._num_launched += 1
        is_compared = self._num_launched % self._compare_every == 0 and not plan.of_ranks
        message = encode(LaunchStep(plan, is_compared))
        self._ring.write(message)
        pending = _launch_counted(self._executor, plan, self._steps)
        if plan.of_ranks:
            return _JoinedStep(plan, pending, self._reports, self._patience_s)
        before, self._comparison = self._comparison, None
        if before is not None:
            pending = _StepAfter(pending, before)
        if not is_compared:
            return pending
        comparison = _Comparison(message, self._reports, self._patience_s)
        pending = _ComparedStep(pending, comparison)
        if self._compare_every == 1:
            return _StepAfter(pending, comparison)
        self._comparison = comparison
        return pending

    def compile(self, constraint: Constraint) -> None:
        """Tell the followers to compile a constraint in the background; on the launching thread."""
        self._ring.write(encode(Compile(constraint)))

    def stop(self) -> None:
        """Tell the followers that nothing comes any more."""
        self._ring.write(encode(Stop()))


class LeadingPasses:
    """The `DraftingExecutor` of rank 0: the followers launch its passes between the same steps."""

    def __init__(
        self,
        executor: DraftingExecutor,
        ring: PlanRing,
        reports: RankReports,
        patience_s: float,
        steps: StepCounts,
    ) -> None:
        self._executor = executor
        self._ring = ring
        self._reports = reports
        self._patience_s = patience_s
        self._steps = steps

    @property
    def max_in_flight(self) -> int:
        return self._executor.max_in_flight

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises WorkerError as `LeadingExecutor.launch` does."""
        self._ring.write(encode(LaunchPass(plan)))
        pending = _launch_counted(self._executor, plan, self._steps)
        if not plan.of_ranks:
            return pending
        return _JoinedStep(plan, pending, self._reports, self._patience_s, is_draft=True)

    def give_drafts(self, place: int) -> None:
        """Raises WorkerError as `launch` does."""
        self._ring.write(encode(GiveDrafts(place)))
        self._executor.give_drafts(place)


def _launch_counted(executor: Executor, plan: StepPlan, steps: StepCounts) -> PendingStep:
    steps.num_launched += 1
    return _CountedStep(executor.launch(plan), steps, steps.num_launched)


class _CountedStep:
    """A step that counts as ended, with all before it, once it was waited for."""

    def __init__(self, pending: PendingStep, steps: StepCounts, number: int) -> None:
        """number: among all that were launched, from 1."""
        self._pending = pending
        self._steps = steps
        self._number = number

    @property
    def is_done(self) -> bool:
        return self._pending.is_done

    def wait(self) -> StepResult:
        result = self._pending.wait()
        self._steps.num_ended = max(self._steps.num_ended, self._number)
        return result


class _Comparison:
    """Of what a step came to on every rank."""

    def __init__(self, message: bytes, reports: RankReports, patience_s: float) -> None:
        """message: the step's LaunchStep, as it was sent."""
        self._message = message
        self._reports = reports
        self._patience_s = patience_s
        self._own: StepResult | None = None  # None = the step has not ended

    def take(self, own: StepResult) -> None:
        self._own = own

    def check(self) -> None:
        """Raises WorkerError if a rank has other tokens, or says nothing in time."""
        assert self._own is not None, "steps are waited for in the order of their launches"
        step, digest = self._own.step, step_digest(self._message, self._own)
        found = self._reports.wait_digests(step, self._patience_s)
        others = sorted(rank for rank, other in found.items() if other != digest)
        if others:
            raise WorkerError(f"step {step}: ranks {others} have other tokens than rank 0")


class _ComparedStep:
    """A step whose result the other ranks report, too."""

    def __init__(self, pending: PendingStep, comparison: _Comparison) -> None:
        self._pending = pending
        self._comparison = comparison

    @property
    def is_done(self) -> bool:
        return self._pending.is_done

    def wait(self) -> StepResult:
        result = self._pending.wait()
        self._comparison.take(result)
        return result


class _StepAfter:
    """A step whose result is given out only after a comparison."""

    def __init__(self, pending: PendingStep, comparison: _Comparison) -> None:
        """comparison: of the step before, or of this one."""
        self._pending = pending
        self._comparison = comparison

    @property
    def is_done(self) -> bool:
        return self._pending.is_done

    def wait(self) -> StepResult:
        """Raises WorkerError as `_Comparison.check` does."""
        result = self._pending.wait()
        self._comparison.check()
        return result


class _JoinedStep:
    """A step of ranks that have rows of their own, each of which reports its results."""

    def __init__(
        self,
        plan: StepPlan,
        pending: PendingStep,
        reports: RankReports,
        patience_s: float,
        *,
        is_draft: bool = False,
    ) -> None:
        """pending: of rank 0. is_draft: a pass of a model that drafts."""
        self._plan = plan
        self._pending = pending
        self._reports = reports
        self._patience_s = patience_s
        self._is_draft = is_draft

    @property
    def is_done(self) -> bool:
        """Of rank 0: the ranks end a step at about the same time."""
        return self._pending.is_done

    def wait(self) -> StepResult:
        """Raises WorkerError if a rank ends, or says nothing in time."""
        own, plans = self._pending.wait(), self._plan.of_ranks
        busy = [rank for rank, plan in enumerate(plans) if plan.rows and rank > 0]
        found = self._reports.wait_results(self._plan.step, self._is_draft, busy, self._patience_s)
        others = [
            found.get(rank) or StepResult(step=plan.step, tokens=[], logprobs=[], is_finite=[])
            for rank, plan in enumerate(plans)
            if rank > 0
        ]
        return StepResult(
            step=self._plan.step,
            tokens=[],
            logprobs=[],
            is_finite=[],
            duration_s=own.duration_s,
            of_ranks=[own, *others],
        )

"""The step loop of one engine: plan, launch, wait, commit.

    overlap off     plan(n) launch(n) wait(n) commit(n)   plan(n + 1) ...
    overlap on      plan(n + 1) launch(n + 1) wait(n) commit(n)   plan(n + 2) ...

With overlap the host's work hides behind the device's: when step n ends, step n + 1 is queued.
Requests get the same tokens either way. `StepTimes` records the host's time in each of the four
phases. With overlap, a `wait` near zero means that the host is the bottleneck, unless `launch` has
waited: where a row with a constraint needs its newest token. Knows no torch (the executor is an
argument) and no Ray.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from engine.clock import Clock
from engine.cost_model import StepCosts, StepWork
from engine.plan import StepPlan, StepResult
from engine.request import Request, RequestKey
from engine.scheduling.contracts import SchedulerStatistics, StepOutput
from engine.scheduling.drafting import Drafting
from engine.scheduling.host_loads import HostLoadStatistics
from engine.scheduling.prompt_scheduling import QueuedWork
from engine.step_times import Phase, StepTimes, StepTimesStatistics

# Planning, metadata and first launch of a step take the host about 1 ms; the rest is for delays.
LEAD_S = 2.5e-3
_DELAYS_S = 0.5e-3  # where they take more than that, as with drafts: each ms keeps a prompt waiting
_MAX_TURN_S = 20e-3  # that counts to the mean: a pause of the host is none
_TURN_DECAY = 0.9  # of the mean, a step
_LOOK_EVERY_S = 0.05  # looking at the queue takes time linear in its length


class PendingStep(Protocol):
    """A step that was launched and may still be computing."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        ...


class Executor(Protocol):
    """Runs plans on a device, in the order they were launched."""

    def launch(self, plan: StepPlan) -> PendingStep: ...


class DraftingExecutor(Executor, Protocol):
    """Runs the passes of a model that drafts for another."""

    @property
    def max_in_flight(self) -> int:
        """Passes that may be launched and not waited for when another one is launched."""
        ...

    def give_drafts(self, place: int) -> None:
        """Queue that what the pass launched last drew is draft number `place` of those rows."""
        ...


class StepScheduler(Protocol):
    """Decides what runs: a `Scheduler`, or with DP attention the `DpScheduler` over several."""

    # For the step loop; see `Scheduler`.
    @property
    def deferred_until_s(self) -> float | None: ...
    @property
    def look_due_s(self) -> float | None: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def num_running(self) -> int: ...
    @property
    def drafting(self) -> Drafting: ...
    @property
    def is_held_for_drafts(self) -> bool: ...
    def count_idle(self, seconds: float) -> None: ...
    def count_late(self, seconds: float) -> None: ...
    @property
    def waited_s(self) -> float: ...
    @property
    def costs(self) -> StepCosts: ...
    @property
    def newest_step_s(self) -> float: ...
    def plan(self, now_s: float) -> StepPlan | None: ...
    def catch_up(self) -> None: ...
    def settle_drafts(self) -> None: ...
    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput: ...
    def take_expired(self) -> StepOutput: ...
    def queued_work(self) -> QueuedWork: ...

    # For those who bring requests, and who look.
    @property
    def num_free_rows(self) -> int: ...
    def add(self, request: Request) -> None: ...
    def abort(self, key: RequestKey) -> bool: ...
    def requests_of(self, ingress_id: str) -> list[RequestKey]: ...
    def owners(self) -> Iterator[tuple[str, list[int]]]: ...
    def learn(self, samples: Iterable[tuple[StepWork, float]]) -> None: ...
    def statistics(self) -> SchedulerStatistics: ...
    def host_statistics(self) -> HostLoadStatistics | None: ...


class EngineCore:
    """The step loop of one engine over its scheduler and executor."""

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: Executor,
        clock: Clock,
        *,
        overlap: bool,
        defers_planning: bool = False,
    ) -> None:
        """`overlap`: launch a step before waiting for the one in flight.

        `defers_planning`: plan a step as late as possible, see `defer_s`.
        """
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._overlap = overlap
        self._defers_planning = defers_planning
        self._queued: tuple[float, QueuedWork] | None = None
        self._busy_until_s = 0.0  # predicted end of the steps in flight, if `defers_planning`
        self._turn_s = 0.0  # mean of what planning and launching a step took
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._idle_since_s: float | None = None  # set if rows held for drafts leave it idle
        self._tokens_s: float | None = None  # when those of the step before came; None = no step
        self._times = StepTimes(clock)

    def wrap_executor(self, wrap: Callable[[Executor], Executor]) -> None:
        """Wrap the executor; call it before the first step."""
        self._executor = wrap(self._executor)

    @property
    def has_work(self) -> bool:
        """Whether another `step` may do something: requests are here, or a step is in flight."""
        return self.scheduler.has_work or bool(self._in_flight)

    def queued_work(self) -> QueuedWork:
        """Predicted work of the queued prompts, at most `_LOOK_EVERY_S` old."""
        now_s = self._clock.now_s()
        if self._queued is None or now_s - self._queued[0] >= _LOOK_EVERY_S:
            self._queued = now_s, self.scheduler.queued_work()
        return self._queued[1]

    def defer_s(self) -> float:
        """How long the next `step` may be put off so that requests arriving meanwhile join it.

        With a step in flight, until shortly before its predicted end: as long as planning and
        launching took lately, and some more. With none, until the end of the queue's window. 0 =
        call `step` now. Ask again whenever something has happened. While a step computes, what the
        last commit left for the next plan is done here.
        """
        now_s = self._clock.now_s()
        if self._in_flight:
            if not self._defers_planning or not self.scheduler.costs.is_fitted:
                return 0.0
            if self._in_flight[-1][1].is_done:
                return 0.0
            self.scheduler.settle_drafts()  # now it delays no token and no plan
            return max(0.0, self._busy_until_s - self._lead_s - self._clock.now_s())
        until_s = self.scheduler.deferred_until_s
        return 0.0 if until_s is None else max(0.0, until_s - now_s)

    @property
    def _lead_s(self) -> float:
        return max(LEAD_S, self._turn_s + _DELAYS_S)

    def _count_turn(self, seconds: float) -> None:
        """Planning and launching a step took so long.

        Waits for the device in it do not count: planned earlier, a step would only wait longer. For
        the same reason a step whose launch waits is not counted at all.
        """
        turn_s = min(max(0.0, seconds - self.scheduler.waited_s), _MAX_TURN_S)
        self._turn_s += (1 - _TURN_DECAY) * (turn_s - self._turn_s)

    def idle_s(self, at_most_s: float) -> float:
        """How long to wait for something to happen after a `step` in which nothing could run."""
        due_s = self.scheduler.look_due_s
        return at_most_s if due_s is None else min(at_most_s, max(0.0, due_s - self._clock.now_s()))

    @property
    def waits_for_others(self) -> bool:
        """Whether the last `step` launched nothing because the queue's window is open.

        If so, the next step is due at the window's end, or as soon as anything has happened.
        """
        return not self._in_flight and self.scheduler.deferred_until_s is not None

    def step(self) -> StepOutput:
        """Launch the next step and commit the one that is due; may wait for the device.

        Returns the output of the committed step. If none was committed because the first step of a
        series is in flight, only `has_progressed` is set; if nothing could run, not even that.
        """
        self._times.begin()
        began_s = self._clock.now_s()
        plan = self.scheduler.plan(began_s)
        planned_s = self._times.end(Phase.PLAN)
        if plan is not None and self._idle_since_s is not None:
            self.scheduler.count_idle(planned_s - self._idle_since_s)
        self._idle_since_s = None
        if plan is not None:
            if not self._in_flight:
                self._tokens_s = None  # what the device waited for is told otherwise, if at all
            start_s = max(self._clock.now_s(), self._busy_until_s)
            self._in_flight.append((plan, self._executor.launch(plan)))
            self._predict_end(start_s)
            if not plan.awaits_tokens:
                self._count_turn(self._clock.now_s() - began_s)
            self.scheduler.catch_up()  # while the device computes
            self._times.end(Phase.LAUNCH)
        elif not self._in_flight:
            self.scheduler.catch_up()  # the device has nothing to do
        stays_in_flight = self._overlap and plan is not None
        if len(self._in_flight) > int(stays_in_flight):
            output = self._commit_oldest()
        else:
            output = StepOutput(has_progressed=plan is not None)
        expired = self.scheduler.take_expired()
        output.failures.extend(expired.failures)
        output.left.extend(expired.left)
        return output

    def settle(self) -> StepOutput:
        """Wait for and commit the step in flight, if any, without launching another."""
        self._times.begin()
        return self._commit_oldest() if self._in_flight else StepOutput()

    def statistics(self) -> StepTimesStatistics:
        """Durations of the phases of the last steps."""
        return self._times.statistics()

    def _commit_oldest(self) -> StepOutput:
        plan, pending = self._in_flight.popleft()
        result = pending.wait()
        now_s = self._times.end(Phase.WAIT)
        self._predict_end(now_s)
        late_s = 0.0
        if self._tokens_s is not None and result.duration_s is not None:
            late_s = max(0.0, now_s - self._tokens_s - result.duration_s)
        self.scheduler.count_late(late_s)
        self._tokens_s = now_s
        is_idle = self._overlap and not self._in_flight and self.scheduler.is_held_for_drafts
        output = self.scheduler.commit(plan, result)
        if is_idle and self.scheduler.num_running > 0:  # else it has nothing to do
            self._idle_since_s = now_s
        self._times.end(Phase.COMMIT)
        return output

    def _predict_end(self, start_s: float) -> None:
        """Predict the end of the step launched last, started at `start_s`, if it is in flight."""
        if self._defers_planning and self._in_flight:
            self._busy_until_s = start_s + self.scheduler.newest_step_s

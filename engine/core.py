"""The step loop: plan, launch, wait, commit. Knows no torch (an executor is given) and no Ray."""

from typing import Protocol

from engine.clock import Clock
from engine.scheduling.contracts import StepOutput
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler


class PendingStep(Protocol):
    """A step that was launched and may still be computing."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        ...


class Executor(Protocol):
    """Runs plans on a device, in the order they were launched."""

    def launch(self, plan: StepPlan) -> PendingStep: ...


class EngineCore:
    """One model replica's loop over its scheduler and executor."""

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Clock) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock

    def step(self) -> StepOutput:
        """Run one step. Its output is empty when nothing could run."""
        plan = self.scheduler.plan(self._clock.now_s())
        expired = self.scheduler.take_expired()
        if plan is None:
            return expired
        pending = self._executor.launch(plan)
        result = pending.wait()
        output = self.scheduler.commit(plan, result)
        output.failures.extend(expired.failures)
        output.left.extend(expired.left)
        return output

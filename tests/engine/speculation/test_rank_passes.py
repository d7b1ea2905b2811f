"""Passes of ranks with requests of their own meet, whoever waits first."""

from dataclasses import dataclass, field

from engine.plan import StepPlan, StepResult, empty_plan
from engine.speculation.rank_passes import JoinedPasses, OwnPasses
from engine.turns import Turns, run_together


@dataclass
class _Pending:
    launched: "_Executor"
    plan: StepPlan
    is_done: bool = True

    def wait(self) -> StepResult:
        self.launched.log.append(f"wait {self.plan.step}")
        results = [_result(one.step) for one in self.plan.of_ranks]
        return StepResult(
            step=self.plan.step, tokens=[], logprobs=[], is_finite=[], of_ranks=results
        )


@dataclass
class _Executor:
    """Logs what it does; the step of a rank's plan stands for the plan, -1 for none."""

    max_in_flight: int = 4
    log: list[str] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> _Pending:
        self.log.append(f"launch {[one.step for one in plan.of_ranks] or plan.step}")
        return _Pending(self, plan)

    def give_drafts(self, place: int) -> None:
        self.log.append(f"give {place}")


def _result(step: int) -> StepResult:
    return StepResult(step=step, tokens=[], logprobs=[], is_finite=[])


def _passes(passes: JoinedPasses, rank: int, steps: list[int]) -> Turns[list[int]]:
    """One after the other, each waited for; as `DraftModel.proposing`."""
    found = []
    for step in steps:
        pending = passes.of_rank[rank].launch(empty_plan(step))
        yield
        found.append(pending.wait().step)
    return found


def test_passes_that_are_waited_for_one_by_one_are_launched_together() -> None:
    executor = _Executor()
    passes = JoinedPasses(executor, 3)
    works = [_passes(passes, rank, steps) for rank, steps in enumerate([[10, 11], [], [30]])]
    assert run_together(works) == [[10, 11], [], [30]]
    assert executor.log == ["launch [10, -1, 30]", "wait 0", "launch [11, -1, -1]", "wait 1"]
    assert passes.num_met == 1


def test_passes_that_nobody_waits_for_are_launched_with_the_step() -> None:
    """And their drafts are given once for all ranks; those of earlier steps are waited for."""
    executor = _Executor(max_in_flight=2)
    passes = JoinedPasses(executor, 2)
    for place in range(2):
        for rank in range(2 - place):
            passes.of_rank[rank].launch(empty_plan(10 * rank + place))
            passes.of_rank[rank].give_drafts(place)
    assert executor.log == []
    passes.flush()
    assert executor.log == ["launch [0, 10]", "give 0", "launch [1, -1]", "give 1"]
    passes.of_rank[1].launch(empty_plan(5))
    passes.flush()
    assert executor.log[4:] == ["wait 0", "launch [-1, 5]"]


def test_a_rank_whose_passes_are_its_own_launches_its_own_plan() -> None:
    executor = _Executor()
    own = OwnPasses(executor, 1)
    own.launch(empty_plan(0, [empty_plan(4), empty_plan(5)]))
    own.give_drafts(3)
    assert executor.log == ["launch 5", "give 3"]

"""The step loop: the clock it reads, what it launches, and what it passes on."""

import pytest

from engine.core import EngineCore
from engine.cost_model import CostModel
from engine.kv.cache import BlockCache, check_blocks, num_held
from engine.plan import StepPlan, StepResult
from tests.engine.scheduling.replica import Replica, params_of, prompt_of
from tests.harness.fakes import FakePendingStep


def test_a_step_without_work_launches_nothing() -> None:
    replica = Replica()
    output = replica.core.step()
    assert (output.num_scheduled_tokens, output.tokens, output.left) == (0, [], [])
    assert replica.executor.plans == []


def test_a_step_launches_its_plan_and_commits_its_result() -> None:
    replica = Replica()
    request = replica.add("a", prompt_of(5))
    output = replica.core.step()
    assert output.num_scheduled_tokens == 5
    assert [record.token_id for _, record in output.tokens] == replica.expected(request)[:1]
    assert [ingress_id for ingress_id, _ in output.tokens] == ["ingress-a"]


def test_requests_that_expired_are_reported_with_the_step_that_ran_beside_them() -> None:
    replica = Replica()
    late = replica.add("late", prompt_of(5), deadline_s=1.0)
    replica.clock.advance(2.0)
    replica.add("b", prompt_of(6))
    output = replica.core.step()
    assert output.num_scheduled_tokens == 6
    assert [failure.key for _, failure in output.failures] == [late.key]
    assert output.left == [late.key]
    assert replica.core.step().failures == []


def test_the_result_of_another_step_is_refused() -> None:
    replica = Replica()
    replica.add("a", prompt_of(5))

    class LateStep:
        is_done = True

        def wait(self) -> StepResult:
            return StepResult(step=7, tokens=[[1]], logprobs=[None], is_finite=[True])

    class LateExecutor:
        def launch(self, plan: StepPlan) -> LateStep:
            return LateStep()

    core = EngineCore(replica.scheduler, LateExecutor(), replica.clock, overlap=False)
    with pytest.raises(AssertionError, match="plan 0 got result 7"):
        core.step()


def test_the_step_in_flight_counts_as_work_and_can_be_settled_alone() -> None:
    replica = Replica(overlap=True)
    request = replica.add("a", prompt_of(5), params=params_of(1))
    launched = replica.core.step()
    assert (launched.has_progressed, launched.tokens) == (True, [])
    had_work = replica.core.has_work
    output = replica.core.settle()
    assert [record.token_id for _, record in output.tokens] == replica.expected(request)
    assert (had_work, replica.core.has_work) == (True, False)
    assert not replica.core.settle().has_progressed
    assert len(replica.executor.plans) == 1


def test_the_step_in_flight_is_committed_when_nothing_can_be_planned() -> None:
    replica = Replica(max_rows=1, overlap=True)
    replica.add("a", prompt_of(5), params=params_of(1))
    waiting = replica.add("b", prompt_of(5, 1), params=params_of(1))
    replica.core.step()
    assert [len(replica.core.step().tokens) for _ in range(3)] == [1, 0, 1]
    assert waiting.num_output_tokens == 1


def test_requests_that_expired_are_reported_while_the_first_step_is_in_flight() -> None:
    replica = Replica(overlap=True)
    late = replica.add("late", prompt_of(5), deadline_s=1.0)
    replica.clock.advance(2.0)
    replica.add("b", prompt_of(6))
    output = replica.core.step()
    assert (output.num_scheduled_tokens, output.has_progressed) == (0, True)
    assert output.left == [late.key]


def test_each_step_is_told_how_late_it_was_also_the_first_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would be taken for as late as the last one before the pause."""
    told: list[float] = []
    replica = Replica(overlap=True)
    replica.executor.step_s = 1.0
    monkeypatch.setattr(replica.scheduler, "count_late", told.append)
    for number in range(2):
        replica.add(f"{number}", prompt_of(5, number), params=params_of(3))
        while replica.core.has_work:
            replica.clock.advance(2.5)
            replica.core.step()
        replica.clock.advance(100.0)
    assert told == [0.0, 1.5, 1.5] * 2


@pytest.mark.parametrize("overlap", [False, True])
def test_step_times_are_fitted_while_a_step_computes_and_not_before_tokens_are_given_out(
    overlap: bool,
) -> None:
    """A fit takes as long as all else between a step's end and its tokens."""
    replica = Replica(overlap=overlap)
    replica.executor.step_s = 1.0
    replica.add("a", prompt_of(5), params=params_of(CostModel.MIN_SAMPLES + 3))
    num_given_out = 0
    fitted_after: dict[str, int] = {}  # so many steps had given their tokens out

    def look(where: str) -> None:
        if replica.scheduler.costs.is_fitted:
            fitted_after.setdefault(where, num_given_out)

    class SeenStep:
        def __init__(self, step: FakePendingStep) -> None:
            self.step = step
            self.is_done = False

        def wait(self) -> StepResult:
            look("as one computes")
            return self.step.wait()

    class SeenExecutor:
        def launch(self, plan: StepPlan) -> SeenStep:
            look("at a launch")
            return SeenStep(replica.executor.launch(plan))

    core = EngineCore(replica.scheduler, SeenExecutor(), replica.clock, overlap=overlap)
    while core.has_work:
        num_given_out += len(core.step().tokens)
        look("given out")
    at = CostModel.MIN_SAMPLES
    assert fitted_after == {"as one computes": at, "given out": at + 1, "at a launch": at + 1}


@pytest.mark.parametrize("overlap", [False, True])
def test_durations_of_each_phase_are_kept(overlap: bool) -> None:
    replica = Replica(overlap=overlap)
    clock = replica.clock

    class SlowStep:
        def __init__(self, step: FakePendingStep) -> None:
            self.step = step

        def wait(self) -> StepResult:
            clock.advance(8.0)
            return self.step.wait()

    class SlowExecutor:
        def launch(self, plan: StepPlan) -> SlowStep:
            clock.advance(2.0)
            return SlowStep(replica.executor.launch(plan))

    core = EngineCore(replica.scheduler, SlowExecutor(), clock, overlap=overlap)
    replica.add("a", prompt_of(5), params=params_of(3))
    while core.has_work:
        core.step()
    seen = core.statistics()
    assert (seen.plan.mean_s, seen.commit.mean_s) == (0.0, 0.0)
    assert (seen.launch.num_steps, seen.launch.mean_s, seen.launch.max_s) == (3, 2.0, 2.0)
    assert (seen.wait.num_steps, seen.wait.mean_s, seen.wait.max_s) == (3, 8.0, 8.0)
    assert (seen.plan.num_steps, seen.commit.num_steps) == (3 + int(overlap), 3)


def test_the_conservation_law_names_every_owner_it_was_given() -> None:
    cache = BlockCache(4, enable_prefix_caching=True, protected_share=0.5)
    held = cache.allocate(3)
    assert held is not None
    owners = [("a", held[:1]), ("b", held[1:]), ("c", [])]
    check_blocks(cache, owners)
    assert num_held(owners) == {"a": 1, "b": 2}
    check_blocks(cache, [("a", held[:1]), ("a", held[1:])])  # one name twice is one owner
    with pytest.raises(AssertionError, match=r"has 1 references, its owners 0.*'a': \[0\]"):
        check_blocks(cache, owners[:1])

"""The step loop: the clock it reads, what it launches, and what it passes on."""

import pytest

from engine.core import EngineCore
from engine.invariants import check_blocks, num_held
from engine.kv.block_cache import BlockCache
from engine.scheduling.plan import StepPlan
from tests.engine.scheduling.replica import Replica, prompt_of
from tests.fakes import FakePendingStep


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

    class LateExecutor:
        def launch(self, plan: StepPlan) -> FakePendingStep:
            step = replica.executor.launch(plan).result
            return FakePendingStep(
                type(step)(step=7, tokens=[[1]], logprobs=[None], is_finite=[True])
            )

    core = EngineCore(replica.scheduler, LateExecutor(), replica.clock)
    with pytest.raises(AssertionError, match="plan 0 got result 7"):
        core.step()


def test_the_conservation_law_names_every_owner_it_was_given() -> None:
    cache = BlockCache(4, enable_prefix_cache=True, protected_share=0.5)
    held = cache.allocate(3)
    assert held is not None
    owners = [("a", held[:1]), ("b", held[1:]), ("c", [])]
    check_blocks(cache, owners)
    assert num_held(owners) == {"a": 1, "b": 2}
    check_blocks(cache, [("a", held[:1]), ("a", held[1:])])  # one name twice is one owner
    with pytest.raises(AssertionError, match=r"has 1 references, its owners 0.*'a': \[0\]"):
        check_blocks(cache, owners[:1])

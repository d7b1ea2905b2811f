"""The scheduler with the length-aware queue: who computes in which step, what bounds a chunk."""

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from configs.schema import LapsConfig
from engine.core import Executor, PendingStep
from engine.cost_model import StepCosts, StepWork
from engine.messages import ShortLoad
from engine.plan import StepPlan
from engine.request import Constraint, ConstraintKind, Request
from engine.scheduling.drafting import Drafting
from engine.speculation.controller import StepDrafts, StepOffer
from engine.speculation.drafter import FixedDrafts
from tests.engine.scheduling.replica import Replica, params_of, prompt_of
from tests.harness.drafters import Guesser
from tests.harness.fakes import VOCAB_SIZE

SHORT_FIRST = LapsConfig(queue="laps", laps_length_threshold=10)
HELD = Constraint(ConstraintKind.REGEX, "a*")
FILL = msgspec.structs.replace(SHORT_FIRST, mix="fill")
# 1 ms a step and 0.1 ms a prompt token, fitted.
COSTS = StepCosts(
    floor_s=1e-3,
    slopes_s=(1e-4,) * 8,
    attended_s=0.0,
    history_s=0.0,
    decode_row_s=0.0,
    decode_key_s=0.0,
    num_samples=1,
)


def replica_of(laps: LapsConfig, **fields: object) -> Replica:
    sizes: dict[str, object] = {"num_blocks": 600, "max_rows": 8, "max_num_batched_tokens": 512}
    replica = Replica(**(sizes | {"max_model_len": 1200} | fields), laps=laps)  # type: ignore[arg-type]
    replica.scheduler._prompts.model.costs = COSTS
    return replica


def rows_of(plan: StepPlan) -> dict[int, int]:
    return dict(zip(plan.rows, plan.num_new_tokens, strict=True))


def test_a_short_prompt_overtakes_a_long_one_that_waits_and_one_that_runs() -> None:
    replica = replica_of(SHORT_FIRST)
    long = replica.add("long", prompt_of(900))
    replica.step()
    other = replica.add("other", prompt_of(800))
    short = replica.add("short", prompt_of(8))
    replica.step()
    assert rows_of(replica.last_plan) == {short.row: 8}  # exclusive: nobody's chunk beside it
    assert other.row is None
    assert long.num_computed_tokens < 900
    replica.run()
    for request in (long, other, short):
        assert replica.output(request) == replica.expected(request)
    replica.check_idle()


def test_a_long_chunk_keeps_its_step_within_the_limit() -> None:
    laps = msgspec.structs.replace(SHORT_FIRST, max_step_ms=11.05)
    replica = replica_of(laps)
    replica.add("long", prompt_of(350), params=params_of(1))
    replica.run()
    assert list(replica.chunks()) == [[100], [100], [100], [50]]


def test_a_limit_near_the_floor_does_not_cost_all_capacity() -> None:
    replica = replica_of(msgspec.structs.replace(SHORT_FIRST, max_step_ms=0.5))
    replica.add("long", prompt_of(64), params=params_of(1))
    replica.run()
    assert list(replica.chunks()) == [[64]]
    replica.add("longer", prompt_of(200), params=params_of(1))
    costs = msgspec.structs.replace(COSTS, floor_s=4e-3)
    replica.scheduler._prompts.model.costs = costs
    replica.step()
    assert replica.last_plan.num_new_tokens == [120]  # 4 * 4 ms are 4 ms and 120 tokens


def test_in_fill_a_long_chunk_takes_what_short_prompts_leave() -> None:
    laps = msgspec.structs.replace(FILL, max_step_ms=21.0)
    replica = replica_of(laps)
    replica.add("long", prompt_of(900), params=params_of(1))
    replica.step()
    replica.add("short", prompt_of(9), params=params_of(1))
    replica.step()
    assert sorted(replica.last_plan.num_new_tokens) == [9, 191]


def test_a_long_prompt_that_has_waited_gets_a_chunk_between_short_ones() -> None:
    laps = msgspec.structs.replace(SHORT_FIRST, max_step_ms=11.05, max_long_wait_s=1.0)
    replica = replica_of(laps)
    long = replica.add("long", prompt_of(200), params=params_of(1))
    widths = []
    for number in range(12):
        replica.add(f"short-{number}", prompt_of(9, seed=number), params=params_of(1))
        replica.step()
        widths.append(replica.last_plan.num_tokens)
        replica.clock.advance(0.3)
    assert widths.count(100) == 2
    assert widths.index(100) == 4  # not before it has waited for a second
    assert replica.output(long) == replica.expected(long)


def test_a_prompt_whose_prefix_is_cached_is_short() -> None:
    replica = replica_of(SHORT_FIRST)
    prompt = prompt_of(400)
    replica.add("first", prompt, params=params_of(1))
    replica.run()
    replica.add("long", prompt_of(500, seed=1), params=params_of(1))
    again = replica.add("again", [*prompt, 3, 4], params=params_of(1))
    replica.step()
    assert list(rows_of(replica.last_plan).values()) == [2]
    assert again.num_cached_tokens == 400


def test_the_queue_says_what_its_work_takes() -> None:
    replica = replica_of(SHORT_FIRST)
    assert replica.scheduler.queued_work().queued_s == 0.0
    replica.add("short", prompt_of(9))
    replica.add("long", prompt_of(100))
    work = replica.scheduler.queued_work()
    assert work.short == ShortLoad(num_waiting=1, queued_tokens=9, queued_s=pytest.approx(1.9e-3))
    assert work.queued_s == pytest.approx(1.9e-3 + 11e-3)
    plain = replica_of(LapsConfig())
    plain.add("short", prompt_of(9))
    plain.add("long", prompt_of(100))
    assert plain.scheduler.queued_work().short is None
    assert plain.scheduler.queued_work().queued_s == pytest.approx(1e-3 + 109e-4)


def test_steps_teach_the_cost_model_what_they_took() -> None:
    replica = Replica(
        laps=SHORT_FIRST, num_blocks=600, max_num_batched_tokens=512, max_model_len=1200
    )
    seen: list[tuple[StepWork, float]] = []
    replica.scheduler._prompts.model.observe = (  # type: ignore[method-assign]
        lambda work, seconds: seen.append((work, seconds))
    )
    replica.executor.step_s = 0.25
    replica.add("a", prompt_of(40), params=params_of(3))
    replica.run()
    works = [work for work, _ in seen]
    assert [seconds for _, seconds in seen] == [0.25] * 3
    assert works[0] == StepWork(num_prompt_tokens=40, num_attended=1600)
    assert works[1:] == [StepWork(num_decode_rows=1, num_decode_keys=keys) for keys in (41, 42)]


@pytest.mark.parametrize("overlap", [False, True])
def test_first_come_first_served_ignores_priorities(overlap: bool) -> None:
    for queue, expected in (("fcfs", ["low", "high"]), ("priority", ["high", "low"])):
        replica = Replica(max_rows=1, overlap=overlap, laps=LapsConfig(queue=queue))
        replica.add("low", prompt_of(5), priority=5)
        replica.add("high", prompt_of(5), priority=-5)
        replica.run()
        assert [key.request_id for key in replica.left] == expected


# ---- waiting on purpose --------------------------------------------------------------------------


def test_a_window_holds_a_short_prompt_back_until_it_is_over() -> None:
    laps = msgspec.structs.replace(SHORT_FIRST, window="fixed", fixed_window_s=0.5)
    replica = replica_of(laps)
    replica.add("short", prompt_of(8))
    assert not replica.step().has_progressed
    assert replica.core.defer_s() == pytest.approx(0.499)
    replica.add("another", prompt_of(9))
    replica.clock.advance(0.6)
    assert replica.core.defer_s() == 0.0
    replica.step()
    assert sorted(replica.last_plan.num_new_tokens) == [8, 9]


def test_a_long_prompt_or_a_full_window_ends_the_waiting() -> None:
    laps = msgspec.structs.replace(
        SHORT_FIRST, window="fixed", fixed_window_s=0.5, fixed_window_requests=3
    )
    replica = replica_of(laps)
    for number in range(3):
        assert not replica.step().has_progressed
        replica.add(f"short-{number}", prompt_of(8, seed=number))
    assert replica.step().num_scheduled_tokens == 24


def test_the_next_step_is_planned_shortly_before_the_device_needs_it() -> None:
    replica = replica_of(SHORT_FIRST, overlap=True, defers_planning=True)
    assert replica.core.defer_s() == 0.0
    replica.add("long", prompt_of(900))
    replica.step()  # 49 ms of predicted work are launched
    left_s = replica.core.defer_s()
    assert 0.03 < left_s < 0.0511 - 2e-3
    short = replica.add("short", prompt_of(8))  # arrives while the step computes
    replica.clock.advance(left_s)
    assert replica.core.defer_s() == 0.0
    replica.step()
    assert rows_of(replica.last_plan) == {short.row: 8}


def test_a_host_that_takes_longer_to_launch_plans_earlier() -> None:
    """As with drafts: planned 2.5 ms before the device needs it, each step would come too late."""
    replica = replica_of(SHORT_FIRST, overlap=True, defers_planning=True)
    launch_s = 8e-3

    class SlowToLaunch:
        def __init__(self, executor: Executor) -> None:
            self._executor = executor

        def launch(self, plan: StepPlan) -> PendingStep:
            replica.clock.advance(launch_s)
            return self._executor.launch(plan)

    replica.core.wrap_executor(SlowToLaunch)
    replica.add("decoding", prompt_of(8), params=params_of(60))
    for _ in range(40):
        replica.step()
    replica.add("long", prompt_of(900))
    replica.step()
    before_end_s = replica.core._busy_until_s - replica.clock.now_s() - replica.core.defer_s()
    assert launch_s < before_end_s < launch_s + 2e-3


def _guessing_anything() -> Guesser:
    return Guesser(lambda request: [1] * 60, vocab_size=VOCAB_SIZE)


def test_a_step_with_drafts_ends_later_by_what_they_cost_besides() -> None:
    """Their policy has learned that: without it the next step is planned that much too early."""

    class Dear(FixedDrafts):
        surcharge_s = 0.0

        def plan(self, offer: StepOffer, costs: StepCosts) -> StepDrafts:
            return replace(super().plan(offer, costs), surcharge_s=self.surcharge_s)

    def left_s(surcharge_s: float) -> float:
        policy = Dear(1)
        policy.surcharge_s = surcharge_s
        drafting = Drafting(_guessing_anything(), policy, holds=True)
        replica = replica_of(SHORT_FIRST, overlap=True, defers_planning=True, drafting=drafting)
        replica.scheduler._prompts.model.costs = msgspec.structs.replace(COSTS, floor_s=30e-3)
        replica.add("a", prompt_of(8), params=params_of(50))
        for _ in range(3):  # its prompt, nothing while that is in flight, a step with drafts
            replica.step()
        assert replica.last_plan.drafts
        return replica.core.defer_s()

    assert left_s(4e-3) - left_s(0.0) == pytest.approx(4e-3)


def test_the_policy_of_drafts_learns_while_the_host_waits_or_before_the_next_plan() -> None:
    """The tokens that a step gives are not kept waiting for that."""

    class Learning(FixedDrafts):
        def __init__(self) -> None:
            super().__init__(1)
            self.num_observed = 0

        def observe(self, *args: Sequence[object]) -> None:
            self.num_observed += 1

    for waits in (True, False):
        policy = Learning()
        drafting = Drafting(_guessing_anything(), policy, holds=True)
        for _ in range(60):
            drafting.count_idle(100.0)  # so no row waits for the held one
        replica = replica_of(SHORT_FIRST, overlap=True, defers_planning=waits, drafting=drafting)
        replica.scheduler._prompts.model.costs = msgspec.structs.replace(COSTS, floor_s=30e-3)
        replica.add("a", prompt_of(8), params=params_of(50))
        replica.add("b", prompt_of(8, 1), params=params_of(50), max_drafts=0)
        num_settled = 0  # steps of which it was told while nobody waited for a plan
        for _ in range(20):
            num_known = drafting.counts.num_verified
            replica.step()
            assert policy.num_observed <= num_known  # not of what this step committed
            num_observed = policy.num_observed
            replica.core.defer_s()
            num_settled += policy.num_observed - num_observed
        assert (num_settled > 5) == waits
        replica.run()
        assert policy.num_observed == drafting.counts.num_verified


def test_planning_that_waits_for_the_device_is_not_begun_ever_earlier() -> None:
    """A drafter's pass comes after the step in flight, whenever it is asked for."""

    class Waiting(Guesser):
        took_s = 0.0

        @property
        def spent_s(self) -> float:
            return self.took_s

        def propose(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
            until_s = replica.core._busy_until_s + 1e-3
            self.took_s = max(1e-3, until_s - replica.clock.now_s())
            replica.clock.advance(self.took_s)
            return super().propose(asked)

    guesser = Waiting(lambda request: [], vocab_size=VOCAB_SIZE, pass_s=1e-3)
    drafting = Drafting(guesser, FixedDrafts(1), holds=True)
    for _ in range(60):
        drafting.count_idle(100.0)  # so no row waits for the held one
    replica = replica_of(SHORT_FIRST, overlap=True, defers_planning=True, drafting=drafting)
    replica.scheduler._prompts.model.costs = msgspec.structs.replace(COSTS, floor_s=15e-3)
    replica.add("one", prompt_of(8), params=params_of(200))
    replica.step()
    replica.add("other", prompt_of(8, 1), params=params_of(200))  # takes turns with the first
    for _ in range(100):
        replica.clock.advance(replica.core.defer_s())
        replica.step()
    assert guesser.num_proposals > 20
    assert replica.core._lead_s < 3e-3


def test_launching_that_waits_for_the_device_is_not_begun_ever_earlier() -> None:
    """What a constrained row may draw depends on what the step in flight draws."""
    replica = replica_of(SHORT_FIRST, overlap=True, defers_planning=True)
    replica.scheduler._prompts.model.costs = msgspec.structs.replace(COSTS, floor_s=15e-3)
    num_waits = 0

    class Waiting:
        def __init__(self, executor: Executor) -> None:
            self._executor = executor

        def launch(self, plan: StepPlan) -> PendingStep:
            nonlocal num_waits
            if plan.awaited_rows:
                num_waits += 1
                until_s = replica.core._busy_until_s
                replica.clock.advance(max(0.0, until_s - replica.clock.now_s()))
            return self._executor.launch(plan)

    replica.core.wrap_executor(Waiting)
    replica.add("constrained", prompt_of(8), params=params_of(200, constraint=HELD))
    for _ in range(100):
        replica.clock.advance(replica.core.defer_s())
        replica.step()
    assert num_waits > 50
    assert replica.core._lead_s < 3e-3


def test_a_step_that_has_ended_early_is_not_waited_for() -> None:
    replica = replica_of(SHORT_FIRST, overlap=True, defers_planning=True)
    replica.add("long", prompt_of(900))
    replica.step()
    assert replica.core.defer_s() > 0.0
    replica.executor.is_idle = True
    assert replica.core.defer_s() == 0.0


def test_without_a_fitted_model_nothing_is_put_off() -> None:
    replica = replica_of(SHORT_FIRST, overlap=True, defers_planning=True)
    replica.scheduler._prompts.model.costs = msgspec.structs.replace(COSTS, num_samples=0)
    replica.add("long", prompt_of(900))
    replica.step()
    assert replica.core.defer_s() == 0.0
    assert math.isfinite(replica.scheduler.newest_step_s)

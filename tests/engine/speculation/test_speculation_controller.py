"""The gates, the budget and the purse of speculation, without an engine."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from engine.cost_model import PRIOR, StepCosts, StepWork
from engine.speculation.controller import (
    Purse,
    SpeculationController,
    StepDrafts,
    StepOffer,
    choose_drafts,
    verify_seconds,
    verify_work,
)
from engine.speculation.gates import RequestGates
from engine.speculation.rules import SpeculationRules
from engine.speculation.surcharge import StepKind

RULES = SpeculationRules()
FITTED = StepCosts(
    floor_s=4e-3,
    slopes_s=(5e-6, 8e-6, 15e-6, 20e-6, 21e-6, 22e-6, 22e-6, 22e-6),
    attended_s=5e-10,
    history_s=3e-8,
    decode_row_s=8e-6,
    decode_key_s=3e-8,
    num_samples=100,
)


def decodes(num_rows: int, num_keys: int = 200) -> StepWork:
    return StepWork(num_decode_rows=num_rows, num_decode_keys=num_rows * num_keys)


def offer(max_drafts: list[int], **changes: object) -> StepOffer:
    fields = {"keys": range(len(max_drafts)), "work": decodes(len(max_drafts)), **changes}
    return StepOffer(max_drafts=max_drafts, **fields)  # type: ignore[arg-type]


def most(
    controller: SpeculationController, key: object, temp: float, limit: int | None = None
) -> int:
    """The drafts that one request may have now."""
    (gate,) = controller.max_drafts([key])  # type: ignore[list-item]
    return min(gate, controller.bound(temp, limit))


def table(survivals: Sequence[Sequence[float]]) -> np.ndarray[Any, Any]:
    """[R, depth]  0 where a row has no draft."""
    depth = max(map(len, survivals), default=0)
    rows = [[*s, *[0.0] * (depth - len(s))] for s in survivals]
    return np.array(rows).reshape(len(rows), depth)


def attempts(
    controller: SpeculationController, num: int, accepted: int, costs: StepCosts = PRIOR
) -> None:
    """So many steps in which "a" tries all its drafts and `accepted` of them are right."""
    for _ in range(num):
        asked = most(controller, "a", 0.0)
        assert asked > 0
        controller.plan(offer([0], keys=["a"]), costs)
        controller.observe(["a"], [asked], [min(accepted, asked)])
        idle_steps(controller, 1)


def idle_steps(controller: SpeculationController, num: int) -> None:
    nothing = StepDrafts(num_drafts=[], expected_tokens=0, plain_s=1e-3, step_s=1e-3)
    for _ in range(num):
        controller.observe_step(nothing, 0, None)


# ---- gates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompt_tokens", [0, 700])
def test_where_nothing_is_asked_the_step_is_priced_as_any_other_without_drafts(
    num_prompt_tokens: int,
) -> None:
    work = decodes(37).with_work(StepWork(num_prompt_tokens=num_prompt_tokens))
    asked = offer([0] * 37, work=work, graph_tokens=(16, 64, 1024), num_plain_rows=40)
    planned = SpeculationController().plan(asked, FITTED)
    assert planned == choose_drafts(table([[]] * 37), asked, FITTED)
    assert planned.is_holding
    assert not planned.was_asked


def test_a_hot_request_never_speculates() -> None:
    controller = SpeculationController()
    assert most(controller, "a", 0.71) == 0
    assert most(controller, "a", 0.7) == 4
    warmer = SpeculationController(SpeculationRules(max_temperature=1.0))
    assert most(warmer, "a", 1.0) == 4


def test_a_request_may_bound_its_own_drafts() -> None:
    controller = SpeculationController()
    assert most(controller, "a", 0.0, limit=2) == 2
    assert most(controller, "b", 0.0, limit=0) == 0
    assert most(controller, "c", 0.0, limit=30) == 4


def test_without_fitted_costs_ten_bad_attempts_stop_it_and_it_tries_again_twice_as_late() -> None:
    controller = SpeculationController()
    attempts(controller, 10, accepted=0)
    assert most(controller, "a", 0.0) == 0
    idle_steps(controller, RULES.retry_steps - 1)
    assert most(controller, "a", 0.0) == 0
    idle_steps(controller, 1)
    assert most(controller, "a", 0.0) == RULES.retry_drafts
    attempts(controller, 10, accepted=0)
    idle_steps(controller, 2 * RULES.retry_steps - 1)
    assert most(controller, "a", 0.0) == 0
    idle_steps(controller, 1)
    attempts(controller, 10, accepted=2)  # now it is good again
    assert most(controller, "a", 0.0) == RULES.first_drafts + 1


def test_with_fitted_costs_the_budget_decides_unless_told_otherwise() -> None:
    controller = SpeculationController()
    attempts(controller, 12, accepted=0, costs=FITTED)
    assert most(controller, "a", 0.0) == 4
    strict = SpeculationController(SpeculationRules(stops_always=True))
    attempts(strict, 10, accepted=0, costs=FITTED)
    assert most(strict, "a", 0.0) == 0


def test_half_of_the_judged_drafts_is_enough_to_stay() -> None:
    controller = SpeculationController()
    attempts(controller, 12, accepted=1)  # one accepted, the second rejected, two not judged
    assert most(controller, "a", 0.0) == 4


def test_more_than_four_of_five_deepen_it() -> None:
    controller = SpeculationController()
    attempts(controller, 8, accepted=3)
    attempts(controller, 2, accepted=4)  # 32 of 40 judged
    assert most(controller, "a", 0.0) == 4
    attempts(controller, 1, accepted=4)  # 33 of 40 in the last ten
    assert most(controller, "a", 0.0) == 5


def test_good_attempts_deepen_it_to_eight_and_worse_ones_bring_it_back_to_four() -> None:
    controller = SpeculationController()
    attempts(controller, 10, accepted=8)
    assert most(controller, "a", 0.0) == 5
    attempts(controller, 10, accepted=8)
    assert most(controller, "a", 0.0) == 8
    depths = []
    for _ in range(60):
        attempts(controller, 1, accepted=1, costs=FITTED)
        depths.append(most(controller, "a", 0.0))
    assert sorted(set(depths), reverse=True) == [8, 7, 6, 5, 4]
    assert depths == sorted(depths, reverse=True)


def test_a_request_whose_drafts_do_not_pay_rests_and_is_tried_again() -> None:
    controller = SpeculationController()

    def planned(key: object) -> int:
        step = offer([most(controller, key, 0.0)], keys=[key], draft_pass_s=1e-3)
        return controller.plan(step, FITTED).num_drafts[0]

    assert planned("a") > 0
    for _ in range(10):
        controller.observe(["a"], [4], [0])
    for _ in range(4):
        assert most(controller, "a", 0.0) == 4
        assert planned("a") == 0
    assert most(controller, "a", 0.0) == 0  # so that nobody waits for its newest token
    idle_steps(controller, RULES.retry_steps + 1)
    assert planned("a") > 0


def test_a_step_with_prompts_makes_no_request_rest() -> None:
    """What drafts cost beside a prompt, such as a larger graph, says nothing of the next step."""
    controller = SpeculationController()
    work = decodes(1).with_prompt(2047, 0)
    for _ in range(RULES.retry_steps):
        assert most(controller, "a", 0.0) == 4
        step = offer([4], keys=["a"], work=work, graph_tokens=[2048, 4096])
        assert controller.plan(step, FITTED).num_drafts == [0]
        idle_steps(controller, 1)


def test_rows_held_back_must_earn_what_they_miss() -> None:
    survivals = [np.cumprod([0.5] * 4).tolist()] * 8
    free = choose_drafts(table(survivals), offer([4] * 8), FITTED)
    held = choose_drafts(table(survivals), offer([4] * 8, num_plain_rows=16), FITTED)
    assert free.has_drafts
    assert not held.has_drafts  # twice as many rows would sample in plain steps
    assert held.predicted_gain < 0.6
    purse = Purse(RULES)
    while purse.is_on:  # and even without drafts, holding them back is a loss
        purse.observe(held, 8, held.plain_s)
    assert purse.num_stops == 1


def test_few_are_tried_until_something_is_known() -> None:
    controller, keys = SpeculationController(), list(range(64))
    asked = controller.max_drafts(keys)
    assert sum(map(bool, asked)) == RULES.trial_rows
    drafts = controller.plan(offer(asked, keys=keys), FITTED)
    tried = [key for key, num in zip(keys, drafts.num_drafts, strict=True) if num]
    assert len(tried) == RULES.trial_rows
    controller.observe(tried, [2] * len(tried), [2] * len(tried))
    assert all(controller.max_drafts(keys))


def first_steps(**limits: object) -> list[StepDrafts]:
    """Of 16 requests that accept nothing."""
    controller = SpeculationController()
    steps, keys = [], range(16)
    for _ in range(6):
        drafts = controller.plan(offer(controller.max_drafts(keys), **limits), FITTED)
        steps.append(drafts)
        tried = [key for key in keys if drafts.num_drafts[key]]
        nums = [drafts.num_drafts[key] for key in tried]
        controller.observe(tried, nums, [0] * len(tried))
        idle_steps(controller, 1)
    return steps


@pytest.mark.parametrize("left", [3, 5, 8, 11])
def test_trials_take_no_more_tokens_than_a_step_has_left(left: int) -> None:
    nums = [sum(drafts.num_drafts) for drafts in first_steps(max_draft_tokens=left)]
    assert left - RULES.trial_drafts < max(nums) <= left


@pytest.mark.parametrize("added", [0.01, 0.02, 0.03, 0.04])
def test_trials_keep_a_step_with_prompts_within_its_time(added: float) -> None:
    work = decodes(16).with_prompt(256, 0)
    limit_s = (1 + added) * FITTED.step_seconds(work)
    steps = first_steps(work=work, max_step_s=limit_s)
    assert any(drafts.has_drafts for drafts in steps)
    assert max(drafts.step_s for drafts in steps) <= limit_s


def test_what_ended_requests_accepted_does_not_make_others_differ() -> None:
    gates, keys = RequestGates(RULES), list(range(8))
    slots, most = gates.slots_of(keys), np.full(8, 4)
    for step in range(4):
        gates.observe(slots, most, np.array([0, 4] * 4), step, may_stop=False)
    assert gates.do_differ
    for key in keys:
        gates.forget(key)
    gates.observe(gates.slots_of(["alone"]), most[:1], np.array([2]), 4, may_stop=False)
    assert not gates.do_differ


def test_trials_that_show_nothing_good_are_ever_rarer() -> None:
    controller, keys = SpeculationController(), list(range(256))
    at_steps: list[int] = []
    for step in range(1000):
        drafts = controller.plan(offer(controller.max_drafts(keys), keys=keys), FITTED)
        tried = [key for key in keys if drafts.num_drafts[key]]
        if tried:
            at_steps.append(step)
            nums = [drafts.num_drafts[key] for key in tried]
            assert max(nums) <= RULES.trial_drafts
            controller.observe(tried, nums, [0] * len(tried))
        idle_steps(controller, 1)
    begun = [step for step in at_steps if step - 1 not in at_steps]
    waits = [later - earlier for earlier, later in pairwise(begun)]
    assert len(waits) >= 3
    assert all(later > 3 * earlier for earlier, later in pairwise(waits))


def _always() -> bool:
    return True


def test_after_the_trial_of_very_many_the_next_one_comes_as_soon_as_after_any() -> None:
    """All are tried while they differ; of others that are alike later, some must be."""
    gates = RequestGates(RULES)
    gates.everyone.observe(np.full(16, 1), np.zeros(16, np.int64))  # so something is known
    gates.do_differ = True
    for step in range(2):
        gates.max_drafts(gates.slots_of([(step, number) for number in range(256)]), step, _always)
    gates.do_differ = False
    for step in range(2):
        for number in range(256):
            gates.forget((step, number))
    newcomers = gates.slots_of(range(4))
    gates.max_drafts(newcomers, 1 + RULES.max_retry_steps, _always)
    assert gates.is_tried(newcomers).all()


def test_the_trial_of_one_newcomer_hardly_delays_that_of_others() -> None:
    gates = RequestGates(RULES)
    slots = gates.slots_of(range(RULES.trial_rows))
    gates.everyone.observe(np.full(16, 1), np.zeros(16, np.int64))  # so something is known
    gates.max_drafts(slots[:1], 0, _always)
    gates.max_drafts(slots[1:], RULES.retry_steps // RULES.trial_rows, _always)
    assert gates.is_tried(slots).all()


@pytest.mark.parametrize(("num_rows", "is_asked"), [(1, True), (256, False)])
def test_unknown_requests_are_asked_where_drafts_pay_by_what_others_accept(
    num_rows: int, is_asked: bool
) -> None:
    """Whoever is asked is held for it, where steps overlap."""
    controller = SpeculationController()
    for key in range(10):
        controller.max_drafts([key])
        controller.observe([key], [1], [int(key < 4)])
        controller.forget(key)
    newcomers = [("new", number) for number in range(num_rows)]
    controller.plan(offer([0] * num_rows, keys=newcomers), FITTED)
    others = [("other", number) for number in range(257 - num_rows)]
    with_prompts = decodes(len(others)).with_prompt(512, 0)
    controller.plan(offer([0] * len(others), keys=others, work=with_prompts), FITTED)
    assert controller.max_drafts(newcomers) == [RULES.first_drafts * is_asked] * num_rows
    controller.plan(offer([0], keys=newcomers[:1]), FITTED)  # all others have ended
    if not is_asked:
        assert controller.max_drafts(newcomers[:1]) == [0], "what was refused rests"
    idle_steps(controller, RULES.retry_steps + 1)
    assert controller.max_drafts(newcomers[:1]) == [RULES.first_drafts]


def test_a_decision_says_whether_the_drafter_was_asked() -> None:
    controller = SpeculationController()
    assert controller.plan(offer([0, 2]), FITTED).was_asked
    assert not controller.plan(offer([0, 0]), FITTED).was_asked


@pytest.mark.parametrize("seed", range(10))
def test_requests_that_differ_by_chance_alone_are_alike(seed: int) -> None:
    """Most of 64 have all four drafts accepted, and an unlucky one none of its first."""
    rng, gates = random.Random(seed), RequestGates(RULES)
    slots, most = gates.slots_of(range(64)), np.full(64, 4)
    for step in range(3):
        accepted = [next((i for i in range(4) if rng.random() > 0.9), 4) for _ in range(64)]
        gates.observe(slots, most, np.array(accepted), step, may_stop=False)
        assert not gates.do_differ


def test_half_of_them_good_and_half_of_them_bad_differ() -> None:
    gates = RequestGates(RULES)
    slots, most = gates.slots_of(range(16)), np.full(16, 4)
    for step in range(2):
        gates.observe(slots, most, np.array([0, 4] * 8), step, may_stop=False)
    assert gates.do_differ


def test_requests_without_a_draft_make_room_for_others_to_be_tried() -> None:
    controller, keys = SpeculationController(), list(range(2 * RULES.trial_rows))
    first = controller.max_drafts(keys)
    idle_steps(controller, RULES.retry_steps)
    others = controller.max_drafts(keys)
    assert sum(map(bool, others)) == RULES.trial_rows
    assert not any(a and b for a, b in zip(first, others, strict=True))


def test_alike_rows_have_as_many_drafts_unless_that_gives_up_too_much() -> None:
    lucky = table([[0.6]] * 32 + [[0.4]] * 32)
    assert choose_drafts(lucky, offer([1] * 64), FITTED).num_drafts == [1] * 64
    unlike = table([[0.95, 0.9, 0.86]] * 64 + [[0.01, 1e-4, 1e-6]] * 64)
    assert choose_drafts(unlike, offer([3] * 128), FITTED).num_drafts == [3] * 64 + [0] * 64


# ---- budget --------------------------------------------------------------------------------------


def draw_survivals(rng: random.Random, num_rows: int, depth: int) -> list[list[float]]:
    return [
        np.cumprod([rng.random() for _ in range(rng.randrange(depth + 1))]).tolist()
        for _ in range(num_rows)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_no_other_prefixes_have_more_expected_tokens_per_second(seed: int) -> None:
    rng = random.Random(seed)
    num_rows = rng.randrange(1, 5)
    survivals = draw_survivals(rng, num_rows, 3)
    work = decodes(rng.choice([num_rows, 60, 250]))
    step = offer(
        [len(s) for s in survivals],
        work=work,
        draft_pass_s=rng.choice([0.0, 2e-4]),
        max_draft_tokens=rng.choice([None, 2, 5]),
        max_step_s=rng.choice([None, 1.01 * FITTED.step_seconds(work)]),
        graph_tokens=rng.choice([(), (2, 4, 8, 16, 64, 256)]),
    )
    rules = SpeculationRules(min_gain=1.0, fair_slack=0.0)
    chosen = choose_drafts(table(survivals), step, FITTED, rules)

    def seconds(counts: tuple[int, ...]) -> float:
        step_s = float(verify_seconds(FITTED, work, np.array([sum(counts)]), step.graph_tokens)[0])
        return step_s + max(counts) * step.draft_pass_s

    plain_s = seconds((0,) * num_rows)

    def rate(counts: tuple[int, ...]) -> float:
        tokens = num_rows + sum(sum(s[:n]) for s, n in zip(survivals, counts, strict=True))
        return tokens / (FITTED.step_seconds(work) + seconds(counts) - plain_s)

    def is_allowed(counts: tuple[int, ...]) -> bool:
        is_in_time = step.max_step_s is None or seconds(counts) <= step.max_step_s
        return is_in_time and sum(counts) <= (step.max_draft_tokens or 99)

    every = [
        c for c in product(*(range(len(s) + 1) for s in survivals)) if is_allowed(c) or not any(c)
    ]
    best = max(map(rate, every))
    counts = tuple(chosen.num_drafts)
    assert counts in every
    assert rate(counts) == pytest.approx(best, rel=1e-12)
    assert chosen.step_s == pytest.approx(seconds(counts))
    assert chosen.predicted_gain == pytest.approx(best / chosen.plain_rate)


def test_drafts_cost_what_the_cost_model_says_of_more_tokens() -> None:
    work = decodes(60).with_prompt(700, 100)
    nums = np.array([0, 1, 5, 70, 400, 5000])
    found = verify_seconds(FITTED, work, nums)
    assert found == pytest.approx([FITTED.step_seconds(verify_work(work, int(n))) for n in nums])


def test_a_draft_that_does_not_pay_is_not_verified() -> None:
    survivals = [[0.3]] * 256
    drafts = choose_drafts(table(survivals), offer([1] * 256), FITTED)
    assert not drafts.has_drafts
    assert drafts.predicted_gain == 1.0
    assert drafts.step_s == drafts.plain_s
    assert choose_drafts(table([[0.3]]), offer([1]), FITTED).num_drafts == [1]  # in one row it does


def test_short_prompts_that_wait_shrink_the_drafts() -> None:
    survivals = [np.cumprod([0.9] * 8).tolist()] * 64
    free = choose_drafts(table(survivals), offer([8] * 64), FITTED)
    waiting = choose_drafts(table(survivals), offer([8] * 64, is_short_waiting=True), FITTED)
    assert 0 < sum(waiting.num_drafts) < sum(free.num_drafts)
    assert waiting.step_s <= (1 + RULES.prompt_slack) * waiting.plain_s


@pytest.mark.parametrize("num_tokens", [64, 256, 1024])
def test_prompts_of_the_same_step_shrink_the_drafts(num_tokens: int) -> None:
    """They wait for all of the step, and so do those that come meanwhile."""
    survivals = table([np.cumprod([0.9] * 8).tolist()] * 64)
    free = choose_drafts(survivals, offer([8] * 64), FITTED)
    work = decodes(64).with_prompt(num_tokens, 0)
    beside = choose_drafts(survivals, offer([8] * 64, work=work, max_step_s=0.05), FITTED)
    assert 0 < sum(beside.num_drafts) < sum(free.num_drafts)
    assert beside.step_s <= (1 + RULES.prompt_slack) * beside.plain_s


def test_prompts_of_the_same_step_do_not_make_drafts_look_cheap() -> None:
    survivals = [[0.3]] * 256
    beside = decodes(256).with_prompt(4000, 0)
    assert not choose_drafts(table(survivals), offer([1] * 256, work=beside), FITTED).has_drafts


def test_places_that_a_graph_pads_are_filled() -> None:
    survivals = [[0.1, 0.001]] * 48
    rules = SpeculationRules(many_gain=1.0, fair_slack=0.0)
    step = offer([2] * 48, graph_tokens=[64, 128])
    padded = choose_drafts(table(survivals), step, FITTED, rules)
    assert sum(padded.num_drafts) == 16


def test_a_step_without_rows_or_without_drafts_is_planned_too() -> None:
    nobody = choose_drafts(table([]), offer([], work=StepWork.of_prompts([(100, 0)])), FITTED)
    assert nobody.num_drafts == []
    assert nobody.predicted_gain == 1.0
    assert choose_drafts(table([[], []]), offer([0, 0]), FITTED).num_drafts == [0, 0]


# ---- purse ---------------------------------------------------------------------------------------


def speculating(num_rows: int = 4) -> StepDrafts:
    return StepDrafts(
        num_drafts=[1] * num_rows,
        expected_tokens=6.0,
        rows_s=5e-3,
        plain_s=5e-3,
        step_s=5.5e-3,
        plain_rate=num_rows / 5e-3,
        num_tokens=2 * num_rows,
    )


def price_s(purse: Purse) -> float:
    """What the steps of `speculating` took beyond their prediction."""
    (seconds,) = purse.surcharge.seconds(StepKind(), np.array([8.0]))
    return float(seconds)


PLAIN = replace(speculating(), num_drafts=[0] * 4, expected_tokens=4.0, step_s=5e-3)


@pytest.mark.parametrize("seed", range(20))
def test_no_more_is_lost_than_the_purse_and_its_refill_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    purse = Purse(RULES)
    lost, worst_step, num_steps = 0.0, 0.0, 3000
    for _ in range(num_steps):
        if not purse.is_on:
            purse.observe(PLAIN, 4, 5e-3)
            continue
        num_tokens, seconds = rng.randrange(4, 9), 5e-3 * rng.uniform(1, 4)
        purse.observe(speculating(), num_tokens, seconds)
        loss = seconds / 5e-3 - num_tokens / 4
        lost, worst_step = lost + loss, max(worst_step, loss)
    assert purse.num_stops > 0
    assert lost <= RULES.refill * num_steps + RULES.purse_steps + worst_step


def test_speculation_that_loses_stops_and_starts_again_when_the_purse_is_half_full() -> None:
    controller = SpeculationController()
    assert most(controller, "a", 0.0) == 4
    while most(controller, "a", 0.0):
        controller.observe_step(speculating(), 4, 10e-3)
    num_off = 0
    while not most(controller, "a", 0.0):
        controller.observe_step(PLAIN, 4, 5e-3)
        num_off += 1
    assert num_off >= RULES.purse_steps / 2 / RULES.refill


def test_what_steps_with_drafts_take_beyond_their_prediction_is_learned_and_forgotten() -> None:
    purse = Purse(RULES)
    for _ in range(100):
        seconds = 5.5e-3 + 2e-3
        drafts = speculating()
        surcharge_s = price_s(purse)
        predicted_s = drafts.step_s + surcharge_s
        purse.observe(replace(drafts, step_s=predicted_s, surcharge_s=surcharge_s), 8, seconds)
    assert price_s(purse) == pytest.approx(2e-3, rel=1e-3)
    dear = choose_drafts(table([[0.3]]), offer([1]), FITTED, RULES, purse.surcharge)
    assert not dear.has_drafts
    for _ in range(2000):
        purse.observe(PLAIN, 4, 5e-3)
    assert price_s(purse) < 1e-4
    assert choose_drafts(table([[0.3]]), offer([1]), FITTED, RULES, purse.surcharge).has_drafts


def test_one_pause_of_the_machine_is_not_the_price_of_drafts() -> None:
    purse = Purse(RULES)
    for i in range(30):
        purse.observe(speculating(), 8, 5.5e-3 + (60e-3 if i == 20 else 0.0))
    assert price_s(purse) < 1e-6
    assert purse.is_on


def test_a_first_step_that_compiles_kernels_does_not_end_drafts_for_good() -> None:
    """A purse that owed all of a second would be half full again after 40,000 steps."""
    purse, num_steps = Purse(RULES), 0
    purse.observe(speculating(), 4, 1.0)
    assert not purse.is_on
    work, survivals = offer([4]), table([[0.9, 0.8, 0.7, 0.6]])
    while not (
        purse.is_on and choose_drafts(survivals, work, FITTED, RULES, purse.surcharge).has_drafts
    ):
        purse.observe(PLAIN, 4, 5e-3)
        num_steps += 1
        assert num_steps < 1000


def test_steps_that_a_coarse_clock_reports_as_zero_teach_nothing() -> None:
    controller = SpeculationController()
    for drafts in (PLAIN, PLAIN, speculating()):
        controller.observe_step(drafts, 4, 0.0)
    assert controller.statistics().measured_gain is None
    controller.observe_step(speculating(), 8, 5.5e-3)
    assert controller.statistics().measured_gain == pytest.approx(2 / 1.1)


def test_what_the_device_waits_before_plain_steps_too_is_no_loss_of_drafts() -> None:
    slow_host, slow_drafts = Purse(RULES), Purse(RULES)
    for purse in (slow_host, slow_drafts):
        for _ in range(9):
            purse.observe(PLAIN, 4, 5e-3, 4e-3 if purse is slow_host else 0.0)
        for _ in range(9):
            purse.observe(speculating(), 5, 5.5e-3, 4e-3)
    assert slow_host.is_on
    assert slow_host.surcharge.wait_s == 0.0
    assert slow_drafts.num_stops == 1
    assert slow_drafts.surcharge.wait_s == pytest.approx(4e-3)


def test_plain_steps_that_waited_for_refused_drafts_hide_no_wait_of_drafts() -> None:
    purse = Purse(RULES)
    for _ in range(9):
        purse.observe(PLAIN, 4, 5e-3)
        purse.observe(replace(PLAIN, was_asked=True), 4, 5e-3, 4e-3)
    for _ in range(9):
        purse.observe(speculating(), 5, 5.5e-3, 4e-3)
    assert purse.num_stops == 1


def test_steps_in_which_very_many_rows_begin_to_have_drafts_are_no_price_but_a_loss() -> None:
    purse, begins = Purse(RULES), replace(speculating(), num_beginning=Purse.MOST_BEGINNING + 1)
    for _ in range(4):
        purse.observe(begins, 4, 9e-3, 4e-3)
    assert (price_s(purse), purse.surcharge.wait_s, purse.num_stops) == (0.0, 0.0, 1)
    for _ in range(4):
        purse.observe(replace(begins, num_beginning=Purse.MOST_BEGINNING), 4, 9e-3, 4e-3)
    assert price_s(purse) > 1e-3


def test_gains_do_not_pay_for_unbounded_losses_later() -> None:
    purse = Purse(RULES)
    for _ in range(1000):
        purse.observe(speculating(), 8, 5.5e-3)
    assert purse.gain == pytest.approx(2 / 1.1)
    assert purse.balance == RULES.purse_steps + RULES.saved_steps


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_prompts_that_take_longer_than_predicted_are_not_the_doing_of_drafts(
    num_drafts: int,
) -> None:
    """A long prompt's prediction is wrong by more than the purse holds."""
    purse, added_s = Purse(RULES), 0.5e-3 * num_drafts
    beside = replace(
        speculating(),
        num_drafts=[num_drafts] * 4,
        plain_s=300e-3,
        step_s=300e-3 + added_s,
        kind=StepKind(has_prompts=True),
        is_holding=True,
    )
    purse.observe(beside, 4 + 4 * num_drafts, 312e-3)
    assert purse.is_on
    assert purse.surcharge.seconds(beside.kind, np.array([8.0]))[0] <= added_s + 1e-9


def test_what_drafts_cost_beside_prompts_does_not_grow_into_the_error_of_these() -> None:
    """Each step counts as at most twice what drafts were to add, and so do all of them."""
    purse, kind, added_s = Purse(RULES), StepKind(has_prompts=True), 0.5e-3
    for _ in range(40):
        (surcharge_s,) = purse.surcharge.seconds(kind, np.array([8.0])).tolist()
        beside = replace(
            speculating(),
            plain_s=300e-3,
            step_s=300e-3 + added_s + surcharge_s,
            surcharge_s=surcharge_s,
            kind=kind,
        )
        purse.observe(beside, 8, 312e-3)
    assert purse.surcharge.seconds(kind, np.array([8.0]))[0] <= added_s + 1e-9


def test_a_cost_model_that_is_wrong_by_a_factor_does_not_look_like_a_loss() -> None:
    purse = Purse(RULES)
    for _ in range(200):
        purse.observe(PLAIN, 4, 10e-3)  # every step takes twice the predicted time
    for _ in range(200):
        purse.observe(speculating(), 8, 11e-3)
    assert purse.is_on
    assert purse.gain == pytest.approx(2 / 1.1, rel=1e-3)


# ---- together ------------------------------------------------------------------------------------


def test_the_same_calls_give_the_same_decisions() -> None:
    def replay() -> list[list[int]]:
        rng = random.Random(3)
        controller, planned = SpeculationController(), []
        for step in range(300):
            keys = list(range(step // 40, step // 40 + 8))
            asked = [most(controller, key, 0.1 * (key % 9)) for key in keys]
            drafts = controller.plan(offer(asked, keys=keys), FITTED)
            planned.append(drafts.num_drafts)
            for key, num in zip(keys, drafts.num_drafts, strict=True):
                if num:
                    controller.observe([key], [num], [rng.randrange(num + 1)])
            controller.observe_step(drafts, 9, 5e-3)
            controller.forget(step // 40 - 1)
        return planned

    planned = replay()
    assert planned == replay()
    assert {len(p) for p in planned} == {8}
    assert any(map(any, planned))


def test_a_request_that_ended_meanwhile_still_counts_in_the_statistics() -> None:
    controller = SpeculationController()
    most(controller, "a", 0.0)
    controller.forget("a")
    controller.observe(["a"], [4], [2])
    found = controller.statistics()
    assert found.num_drafts == 4
    assert found.num_accepted == 2
    assert found.acceptance_by_position[:4] == [1.0, 1.0, 0.0, None]
    assert found.measured_gain is None

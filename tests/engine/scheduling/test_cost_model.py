"""The cost model against machines it was not made for, with noise, pauses and unseen loads."""

import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cost_model import (
    NO_WORK,
    PRIOR,
    CostModel,
    StepCosts,
    StepWork,
    solve_non_negative,
)

Machine = Callable[[StepWork], float]
COUNTS = st.integers(0, 20_000)
WORKS = st.builds(
    StepWork,
    num_prompt_tokens=COUNTS,
    num_attended=st.integers(0, 10**9),
    num_history_tokens=COUNTS,
    num_decode_rows=COUNTS,
    num_decode_keys=st.integers(0, 10**7),
)


def _roofline(*, floor_s: float, token_s: float, attended_s: float, key_s: float) -> Machine:
    """A smooth knee between reading weights and computing: no member of the model's family."""

    def seconds(work: StepWork) -> float:
        linear_s: float = (floor_s**4 + (token_s * work.num_new_tokens) ** 4) ** 0.25
        attention_s = attended_s * work.num_attended + 1.2 * key_s * work.num_history_tokens
        decode_s = key_s * work.num_decode_keys + 0.4 * token_s * work.num_decode_rows
        return 0.2 * floor_s + linear_s + attention_s + decode_s

    return seconds


MACHINES = {
    "large": _roofline(floor_s=4e-3, token_s=21e-6, attended_s=5e-10, key_s=3e-8),
    "small": _roofline(floor_s=8e-4, token_s=1.6e-6, attended_s=1.1e-10, key_s=1e-8),
    "cpu": _roofline(floor_s=5e-3, token_s=6e-4, attended_s=3e-8, key_s=4e-7),
}


def _works(
    rng: random.Random, *, num_rows: int, prompt_share: float, max_tokens: int
) -> Iterator[StepWork]:
    """Steps of a worker that decodes, with up to three prompts in some of them."""
    while True:
        num_decode_rows = rng.randrange(num_rows)
        num_keys = num_decode_rows * rng.randrange(50, 1500)
        work = StepWork(num_decode_rows=num_decode_rows, num_decode_keys=num_keys)
        if num_decode_rows == 0 or rng.random() < prompt_share:
            for _ in range(rng.randrange(1, 4)):
                num_new = int(max_tokens ** rng.uniform(0.3, 1.0))
                work = work.with_prompt(num_new, rng.choice([0, 0, rng.randrange(6000)]))
        yield work


def _fit(machine: Machine, seed: int, num_steps: int = 2000) -> CostModel:
    rng, model = random.Random(seed), CostModel()
    works = _works(rng, num_rows=60, prompt_share=0.3, max_tokens=2000)
    for work in itertools.islice(works, num_steps):
        pause = rng.uniform(3, 30) if rng.random() < 0.03 else 1.0
        model.observe(work, machine(work) * rng.gauss(1.0, 0.03) * pause)
        model.fit_if_due()
    return model


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("seed", range(3))
def test_steps_of_unseen_rates_and_lengths_are_predicted_within_a_tenth(
    machine: Machine, seed: int
) -> None:
    costs = _fit(machine, seed).costs
    for num_rows, prompt_share, max_tokens in [(120, 0.8, 2600), (8, 1.0, 700), (200, 0.05, 100)]:
        works = _works(
            random.Random(100 + seed),
            num_rows=num_rows,
            prompt_share=prompt_share,
            max_tokens=max_tokens,
        )
        errors = [
            abs(costs.step_seconds(work) / machine(work) - 1.0)
            for work in itertools.islice(works, 500)
        ]
        assert np.percentile(errors, 90) < 0.1, (num_rows, prompt_share, max_tokens)


def test_a_prompt_alone_is_predicted_from_steps_that_never_held_one_alone() -> None:
    machine = MACHINES["large"]
    costs = _fit(machine, seed=7).costs
    for num_new, num_cached in [(16, 0), (64, 3000), (256, 0), (300, 5000), (1500, 1000)]:
        true_s = machine(NO_WORK.with_prompt(num_new, num_cached))
        assert costs.seconds(num_new, num_cached) == pytest.approx(true_s, rel=0.1)


def test_a_prior_of_the_wrong_scale_is_scaled_where_nothing_was_seen() -> None:
    model = CostModel()
    for i in range(model.MIN_SAMPLES):
        work = StepWork(num_decode_rows=1 + i % 4, num_decode_keys=500)
        model.observe(work, 20.0 * PRIOR.step_seconds(work))
        model.fit_if_due()
    assert model.costs.is_fitted
    assert model.costs.seconds(8000, 0) == pytest.approx(20.0 * PRIOR.seconds(8000, 0), rel=0.05)


def test_before_the_first_fit_the_prior_stands_and_a_coarse_clock_teaches_nothing() -> None:
    model = CostModel()
    for _ in range(500):
        model.observe(StepWork(num_decode_rows=3), 0.0)
        model.observe(NO_WORK, 1.0)
    for _ in range(model.MIN_SAMPLES - 1):
        model.observe(StepWork(num_decode_rows=3), 1.0)
    model.fit_if_due()
    assert model.costs is PRIOR
    assert not model.costs.is_fitted
    with pytest.raises(AssertionError, match="nan"):
        model.observe(StepWork(num_decode_rows=3), float("nan"))


def test_thousands_of_decode_steps_do_not_push_the_prompts_out() -> None:
    machine = MACHINES["small"]
    model = _fit(machine, seed=1)
    rng = random.Random(2)
    for _ in range(6000):
        rows = rng.randrange(1, 30)
        work = StepWork(num_decode_rows=rows, num_decode_keys=rows * 300)
        model.observe(work, machine(work) * rng.gauss(1.0, 0.03))
        model.fit_if_due()
    true_s = machine(NO_WORK.with_prompt(1500, 0))
    assert model.costs.seconds(1500, 0) == pytest.approx(true_s, rel=0.1)


def test_equal_steps_are_fitted_without_a_division_by_zero() -> None:
    model = CostModel()
    for _ in range(200):
        model.observe(StepWork(num_decode_rows=1, num_decode_keys=10), 0.004)
        model.fit_if_due()
    work = StepWork(num_decode_rows=1, num_decode_keys=10)
    assert model.costs.step_seconds(work) == pytest.approx(0.004, rel=0.01)


def test_the_same_steps_give_the_same_fit() -> None:
    machine = MACHINES["large"]
    assert _fit(machine, seed=3, num_steps=300).costs == _fit(machine, seed=3, num_steps=300).costs


def test_a_snapshot_survives_encoding() -> None:
    costs = _fit(MACHINES["large"], seed=0, num_steps=200).costs
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(costs), type=StepCosts) == costs


@given(work=WORKS, more=WORKS, seed=st.integers(0, 2))
def test_more_work_never_costs_less(work: StepWork, more: StepWork, seed: int) -> None:
    costs = FITTED[seed]
    assert costs.step_seconds(work.with_work(more)) >= costs.step_seconds(work) >= 0.0


@given(
    num_cached=COUNTS,
    num_decode_rows=st.integers(0, 200),
    max_step_s=st.floats(0.0, 0.5),
    max_tokens=st.integers(0, 9000),
    seed=st.integers(0, 2),
)
def test_the_longest_chunk_keeps_the_step_and_one_token_more_would_not(
    num_cached: int, num_decode_rows: int, max_step_s: float, max_tokens: int, seed: int
) -> None:
    costs = FITTED[seed]
    beside = StepWork(num_decode_rows=num_decode_rows, num_decode_keys=900 * num_decode_rows)

    def seconds(num_new: int) -> float:
        return costs.step_seconds(beside.with_prompt(num_new, num_cached))

    chunk = costs.max_chunk_tokens(
        num_cached=num_cached, other_work=beside, max_step_s=max_step_s, max_tokens=max_tokens
    )
    assert 0 <= chunk <= max_tokens
    assert chunk == 0 or seconds(chunk) <= max_step_s
    assert chunk == max_tokens or seconds(chunk + 1) > max_step_s


@pytest.mark.parametrize("seed", range(20))
def test_non_negative_least_squares_meets_its_optimality_conditions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(30, 13)) + rng.normal(size=(30, 1))  # correlated columns
    goal = matrix @ np.maximum(rng.normal(size=13), 0.0) + 0.3 * rng.normal(size=30)
    gram, target = matrix.T @ matrix + 0.01 * np.eye(13), matrix.T @ goal
    x = solve_non_negative(gram, target, np.maximum(rng.normal(size=13), 0.0))
    from_nothing = solve_non_negative(gram, target, np.zeros(13))
    assert np.abs(x - from_nothing).max() < 1e-6
    descent = target - gram @ x
    assert (x >= 0).all()
    assert (descent <= 1e-6).all()
    assert np.abs(descent[x > 0]).max(initial=0.0) < 1e-6


FITTED = [_fit(machine, seed=5, num_steps=640).costs for machine in MACHINES.values()]


def test_many_prompts_are_the_same_work_as_one_after_the_other() -> None:
    pairs = [(5, 0), (1, 300), (4096, 17), (64, 64)]
    one_by_one = NO_WORK
    for num_new, num_cached in pairs:
        one_by_one = one_by_one.with_prompt(num_new, num_cached)
    assert StepWork.of_prompts(pairs) == one_by_one
    assert StepWork.of_prompts([]) == NO_WORK


def test_samples_of_before_the_first_request_are_fitted_at_once() -> None:
    """Fewer than the model waits for otherwise; a GPU half as fast as the prior's."""
    model = CostModel()
    works = [StepWork.of_prompts([(n, 0)]) for n in (16, 64, 256, 1024, 4096)]
    model.learn((work, 2.0 * PRIOR.step_seconds(work)) for work in works)
    assert model.costs.is_fitted
    assert model.costs.num_samples == len(works) < CostModel.MIN_SAMPLES
    for work in (*works, StepWork(num_decode_rows=16, num_decode_keys=4096)):
        expected_s = 2.0 * PRIOR.step_seconds(work)
        assert model.costs.step_seconds(work) == pytest.approx(expected_s, rel=0.02)


def test_no_samples_leave_the_prior() -> None:
    model = CostModel()
    model.learn(())
    assert model.costs == PRIOR


def test_a_fit_imports_nothing() -> None:
    """The first one runs between two steps of requests; an import may take as long as a step."""
    code = """
import sys
from engine.cost_model import CostModel, StepWork
model, before = CostModel(), set(sys.modules)
for n in range(CostModel.MIN_SAMPLES):
    model.observe(StepWork.of_prompts([(100 + n, 0)]), 0.01 + 1e-4 * n)
model.fit_if_due()
assert model.costs.num_samples == CostModel.MIN_SAMPLES
print(sorted(set(sys.modules) - before))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

"""Rows with a constraint in overlapped steps: each waits for its own token, and no other does."""

import random

import pytest

from engine.plan import StepPlan
from engine.request import Constraint, ConstraintKind, Request
from tests.engine.scheduling.replica import Replica, params_of, prompt_of

HELD = Constraint(ConstraintKind.REGEX, "a*")


def sampled_rows(replica: Replica, row: int | None) -> list[bool]:
    """Whether each plan so far has `row` sample a token."""
    return [
        row in plan.rows and plan.num_samples[plan.rows.index(row)] > 0 for plan in _plans(replica)
    ]


def _plans(replica: Replica) -> list[StepPlan]:
    return replica.executor.plans


def test_rows_without_a_constraint_go_on_in_every_step_beside_one_that_waits() -> None:
    replica = Replica(overlap=True)
    free = replica.add("free", prompt_of(3), params=params_of(12))
    held = replica.add("held", prompt_of(4), params=params_of(5, constraint=HELD))
    rows = []
    while replica.core.has_work:
        replica.step()
        rows.append((free.row, held.row))
    free_row, held_row = rows[0]
    num_steps = 12
    assert sampled_rows(replica, free_row)[:num_steps] == [True] * num_steps
    # A step is planned while the one before it is in flight: every other one is free for it.
    assert sampled_rows(replica, held_row)[:9] == [True, False] * 4 + [True]
    replica.check_idle()
    assert replica.output(free) == replica.expected(free)
    assert replica.output(held) == replica.expected(held)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mix", range(6))
def test_a_constraint_hears_every_token_before_the_row_samples_again(
    mix: int, overlap: bool
) -> None:
    draw = random.Random(mix)
    replica = Replica(num_blocks=18, max_rows=3, max_num_batched_tokens=9, overlap=overlap)
    requests = [_add(replica, str(i), draw) for i in range(10)]
    aborted = draw.choice(requests)
    for _ in range(draw.randint(1, 30)):
        replica.step()
    replica.scheduler.abort(aborted.key)
    replica.run(800)
    replica.check_idle()
    for request in requests:
        if request is not aborted:
            assert replica.output(request) == replica.expected(request)
    _check_heard(replica)


def _add(replica: Replica, name: str, draw: random.Random) -> Request:
    constraint = HELD if draw.random() < 0.6 else None
    params = params_of(
        draw.randint(1, 12), seed=draw.randrange(999), ignore_eos=False, constraint=constraint
    )
    return replica.add(name, prompt_of(draw.randint(1, 30), draw.randint(0, 9)), params=params)


def _check_heard(replica: Replica) -> None:
    """What rows heard, at admission and one by one, is what their requests sampled."""
    num_heard: dict[int, int] = {}  # row -> output tokens its constraint knows
    num_sampled: dict[int, int] = {}
    for plan in _plans(replica):
        for admission in plan.admissions:
            num_outputs = len(admission.token_ids) - admission.num_prompt_tokens
            is_held = admission.params.constraint is not None
            num_heard[admission.row] = num_outputs if is_held else -1
            num_sampled[admission.row] = num_outputs
        for row, _ in plan.accepted_tokens:
            num_heard[row] += 1
        for row, samples in zip(plan.rows, plan.num_samples, strict=True):
            if samples:
                assert num_heard[row] in (-1, num_sampled[row])
                num_sampled[row] += 1

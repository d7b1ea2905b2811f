"""Rows with a constraint in overlapped steps: planned like others, and told of every token."""

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


def test_rows_with_a_constraint_take_part_in_every_step() -> None:
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
    assert sampled_rows(replica, held_row)[:6] == [True] * 5 + [False]
    # A step is planned while the one before it, which draws the newest token, is in flight.
    assert [plan.awaited_rows for plan in _plans(replica)[:6]] == [[]] + [[held_row]] * 4 + [[]]
    assert not any(plan.accepted_tokens for plan in _plans(replica))
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
    assert any(plan.awaited_rows for plan in _plans(replica)) == overlap


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
    sampled_before: set[int] = set()
    for plan in _plans(replica):
        for admission in plan.admissions:
            num_outputs = len(admission.token_ids) - admission.num_prompt_tokens
            is_held = admission.params.constraint is not None
            num_heard[admission.row] = num_outputs if is_held else -1
            num_sampled[admission.row] = num_outputs
        for row, _ in plan.accepted_tokens:
            num_heard[row] += 1
        assert sampled_before.issuperset(plan.awaited_rows)
        for row in plan.awaited_rows:
            num_heard[row] += 1
        sampled_before = set()
        for row, samples in zip(plan.rows, plan.num_samples, strict=True):
            if samples:
                assert num_heard[row] in (-1, num_sampled[row])
                num_sampled[row] += 1
                sampled_before.add(row)

"""What a step with drafts gives each row, from the tokens that its lines drew."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.plan import StepPlan, StepResult
from engine.runner.inputs import InputBatch
from engine.runner.prompt_logprobs import PromptTensors
from engine.runner.results import PendingStep, StepSlots, StepTensors
from engine.speculation.acceptance import accepted, count_accepted

CPU = torch.device("cpu")


class BadPrompt:
    """Prompt log-probabilities of one row, some of which are not finite."""

    def __init__(self, plan_row: int) -> None:
        self._plan_row = plan_row

    def map(self, _: Callable[[Tensor], Tensor]) -> Self:
        return self

    def not_finite(self) -> list[int]:
        return [self._plan_row]

    def records(self) -> dict[int, Any]:
        return {}


def _result(
    drawn: list[list[int]], drafts: dict[int, list[int]], order: list[int], **left: Any
) -> StepResult:
    """drawn: by plan row. order: of plan rows in the batch."""
    sampling = np.repeat(np.arange(len(order)), [len(drawn[row]) for row in order])
    plan = StepPlan(
        step=0,
        rows=list(range(len(drawn))),
        num_new_tokens=[max(1, len(its)) for its in drawn],
        num_computed_tokens=[1] * len(drawn),
        num_samples=[len(its) for its in drawn],
        new_block_ids=[[] for _ in drawn],
        drafts=list(drafts.items()),
    )
    batch = SimpleNamespace(plan_rows=np.array(order), sampling=sampling, num_rows=len(order))
    lines = torch.tensor([token for row in order for token in drawn[row]], dtype=torch.int32)
    slots = StepSlots(len(lines), CPU)
    tensors = StepTensors(drawn=lines, is_finite_token=None, **left)
    return PendingStep(plan, cast("InputBatch", batch), slots, slots.take(), tensors).wait()


@pytest.mark.parametrize("seed", range(20))
def test_each_row_gets_its_samples_up_to_the_first_that_is_no_draft(seed: int) -> None:
    draw = random.Random(seed)
    drawn = [draw.choices((-3, -1, 5, 6), (1, 1, 9, 9), k=draw.randint(0, 4)) for _ in range(30)]
    drafts = {
        row: draw.choices((5, 6), k=len(its) - 1 + draw.randint(0, 2))  # some have more behind
        for row, its in enumerate(drawn)
        if its and (len(its) > 1 or draw.random() < 0.5)
    }
    order = draw.sample(range(len(drawn)), len(drawn))
    result = _result(drawn, drafts, order)
    expected = [accepted(its, drafts.get(row, ())) if its else [] for row, its in enumerate(drawn)]
    assert result.tokens == expected
    assert result.is_finite == [its[:1] != [-1] for its in drawn]
    assert result.allows_nothing == [row for row, its in enumerate(drawn) if its[:1] == [-3]]


def test_a_prompt_with_other_than_finite_numbers_ends_its_own_row_alone() -> None:
    prompt = cast("PromptTensors", BadPrompt(2))
    result = _result([[5, 6], [7], [8]], {0: [5]}, [1, 2, 0], prompt=prompt)
    assert result.is_finite == [True, True, False]
    assert result.tokens == [[5, 6], [7], []]


def test_many_rows_are_judged_as_one() -> None:
    samples, drafts = np.array([4, 5, 6, 9, -1, 3, 3]), np.array([4, 5, -1, -1, 8, 3, 0])
    starts, nums = np.array([0, 3, 4, 5]), np.array([3, 1, 1, 2])
    assert count_accepted(samples, drafts, starts, nums).tolist() == [3, 1, 0, 2]

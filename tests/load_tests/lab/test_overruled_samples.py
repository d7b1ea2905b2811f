"""As many drafts of each row count as were drawn, by torch and by the kernel alike."""

import random
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch

from kernels.guessed_steps import JUDGED, GuessedBatch, RowStates
from kernels.guesses import judge
from load_tests.lab.overruled_samples import OverruledSamples
from tests.harness.seeds import fresh_random, seed_of
from tests.kernels.interpreter import run_interpreted

SEED = seed_of(__name__)
MAX_ROWS, WIDTH = 9, 5


def _step(draw: random.Random) -> tuple[Any, list[int], torch.Tensor]:
    """A batch of rows of a prompt's token or two and drafts; the drafts of each; the table."""
    nums_drafts = [draw.randint(0, WIDTH - 1) for _ in range(draw.randint(1, MAX_ROWS))]
    nums_before = [draw.randint(0, 2) for _ in nums_drafts]
    ids: list[int] = []
    lines: list[int] = []
    for before, num in zip(nums_before, nums_drafts, strict=True):
        lines += range(len(ids) + before, len(ids) + before + num + 1)
        ids += [draw.randint(-20, 9) for _ in range(before + num + 1)]
    ends = [0, *accumulate(before + num + 1 for before, num in zip(nums_before, nums_drafts))]  # noqa: B905
    guessed = GuessedBatch(
        rows=_ints(draw.sample(range(MAX_ROWS), len(nums_drafts))),
        kinds=_ints([JUDGED if num else draw.choice((0, JUDGED)) for num in nums_drafts]),
        num_new=_ints([end - start for start, end in pairwise(ends)]),
        cu_tokens=_ints(ends),
        cu_lines=_ints([0, *accumulate(num + 1 for num in nums_drafts)]),
        num_lines=len(lines),
    )
    batch = SimpleNamespace(
        guessed=guessed,
        input_ids=_ints(ids),
        logit_indices=None if len(lines) == len(ids) else _ints(lines),
        num_rows=len(nums_drafts),
    )
    return batch, nums_drafts, _ints([draw.randint(0, 9) for _ in range(20)])


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_as_many_drafts_count_as_were_drawn() -> None:
    """Of what was sampled only the last of each row counts besides."""
    draw = random.Random(SEED)
    drawn_before: list[int] = []
    overruled = OverruledSamples(torch.device("cpu"))
    overruled.draw(lambda _: drawn_before.append(draw.randint(0, WIDTH)) or drawn_before[-1])
    num_rows_before = 0
    for _ in range(30):
        batch, nums_drafts, table = _step(draw)
        samples = _ints([draw.randint(0, 9) for _ in range(batch.guessed.num_lines)])
        overruled.overrule(samples, batch, table)
        states = RowStates(
            shortfalls=_ints([0] * (MAX_ROWS + 1)),
            samples=torch.zeros((WIDTH, MAX_ROWS + 1), dtype=torch.int32),
            newest=_ints([0] * (MAX_ROWS + 1)),
        )
        judge(samples, batch.input_ids, batch.logit_indices, table, batch.guessed, states)
        for row, num_drafts in enumerate(nums_drafts):
            asked = drawn_before[num_rows_before + row]
            if int(batch.guessed.kinds[row]) == JUDGED:
                shortfall = int(states.shortfalls[batch.guessed.rows[row]])
                assert shortfall == num_drafts - min(asked, num_drafts)
        num_rows_before += len(nums_drafts)


def check_the_kernel() -> None:
    from load_tests.lab.overruled_samples_triton import overrule

    draw = fresh_random()
    for _ in range(5):
        overruled = OverruledSamples(torch.device("cpu"))
        overruled.draw(lambda _: draw.randint(0, WIDTH))
        batch, _, table = _step(draw)
        samples = _ints([draw.randint(0, 9) for _ in range(batch.guessed.num_lines)])
        found = samples.clone()
        overrule(found, batch, table, overruled._nums_right, 0)
        overruled.overrule(samples, batch, table)
        assert torch.equal(found, samples)


def test_the_kernel_does_the_same_interpreted() -> None:
    run_interpreted("tests.load_tests.lab.test_overruled_samples:check_the_kernel")

"""The Triton form of `OverruledSamples.overrule`: one launch, a program for each row of a step."""

import triton
import triton.language as tl
from torch import Tensor

from engine.runner.inputs import InputBatch
from kernels.guessed_steps import JUDGED

_JUDGED = tl.constexpr(JUDGED)
_MOST_LINES = 32  # of a row


@triton.jit(do_not_specialize=["num_tokens", "first"])
def _overrule_kernel(
    drawn,  # [S], changed
    input_ids,  # [T], -1 - r = entry r of the table
    lines,  # [S], if HAS_LINES
    table,  # [entries]
    kinds,  # [R]
    cu_lines,  # [R + 1]
    nums_right,  # [NUM_DRAWN]
    num_tokens,
    first,  # of `nums_right`, for row 0
    HAS_LINES: tl.constexpr,
    NUM_DRAWN: tl.constexpr,
    N: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.load(cu_lines + row)
    place = tl.arange(0, N)
    has_draft = place < tl.load(cu_lines + row + 1) - start - 1
    has_draft &= (tl.load(kinds + row) & _JUDGED) > 0
    token = start + place
    if HAS_LINES:
        token = tl.load(lines + start + place, mask=has_draft, other=0)
    given = tl.load(input_ids + tl.minimum(token + 1, num_tokens - 1), mask=has_draft, other=0)
    looked_up = tl.load(table + (-1 - given), mask=has_draft & (given < 0), other=0)
    draft = tl.where(given >= 0, given, looked_up)
    is_right = place < tl.load(nums_right + (first + row) % NUM_DRAWN)
    sample = tl.where(is_right, draft, tl.abs(draft - 1))  # or another token
    tl.store(drawn + start + place, sample, mask=has_draft)


def overrule(
    drawn: Tensor, batch: InputBatch, table: Tensor, nums_right: Tensor, first: int
) -> None:
    """first: the rows' place in `nums_right`, which begins anew at its end."""
    guessed, lines = batch.guessed, batch.logit_indices
    assert guessed is not None, "its drafts are judged on the device"
    _overrule_kernel[(len(guessed.rows),)](
        drawn,
        batch.input_ids,
        batch.input_ids if lines is None else lines,
        table,
        guessed.kinds,
        guessed.cu_lines,
        nums_right,
        len(batch.input_ids),
        first % len(nums_right),
        HAS_LINES=lines is not None,
        NUM_DRAWN=len(nums_right),
        N=_MOST_LINES,
        num_warps=1,
    )

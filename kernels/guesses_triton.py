"""The Triton form of `kernels.guesses`: one launch for each operation, a program for each row.

Tensors are int32 unless stated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.guessed_steps import (
    AHEAD,
    JUDGED,
    OPEN_ENDED,
    GuessedBatch,
    PlannedStep,
    RowStates,
)

_JUDGED, _AHEAD, _OPEN_ENDED = map(tl.constexpr, (JUDGED, AHEAD, OPEN_ENDED))
_BLOCK = 32  # tokens or lines of a row that a program looks at together


@triton.jit(do_not_specialize=["num_lines", "num_rows"])
def _judge_kernel(
    drawn,  # [S]
    input_ids,  # [T], -1 - r = entry r of the table
    lines,  # [S], if HAS_LINES
    table,  # [entries]
    rows,  # [R], device rows
    kinds,  # [R]
    cu_lines,  # [R + 1]
    shortfalls,  # [num_rows], output
    samples,  # [WIDTH, num_rows], output
    newest,  # [num_rows], output
    left,  # [2, S], output
    num_lines,
    num_rows,
    HAS_LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,  # WIDTH or more
):
    in_step = tl.program_id(0)
    first = tl.load(cu_lines + in_step)
    count = tl.load(cu_lines + in_step + 1) - first
    place = tl.arange(0, N)
    is_line = place < count
    line = first + tl.minimum(place, count - 1)  # behind a row's last line that one again
    is_judged = (tl.load(kinds + in_step) & _JUDGED) > 0
    is_read = is_line | (is_judged & (place < WIDTH))
    sample = tl.load(drawn + line, mask=is_read, other=-1)
    has_draft = place < count - 1
    token = (tl.load(lines + line, mask=has_draft, other=0) if HAS_LINES else line) + 1
    given_id = tl.load(input_ids + token, mask=has_draft, other=0)
    looked_up = tl.load(table + (-1 - given_id), mask=has_draft & (given_id < 0), other=0)
    draft = tl.where(given_id >= 0, given_id, looked_up)
    tl.store(left + line, sample, mask=is_line)
    tl.store(left + num_lines + line, draft, mask=is_line)
    if is_judged:
        row = tl.load(rows + in_step)
        is_right = (sample >= 0) & (sample == draft) & has_draft
        num_right = tl.min(tl.where(is_right, N, place))  # the last one has no draft
        last = tl.sum(tl.where(place == num_right, sample, 0))
        before = tl.sum(tl.where(place == num_right - 1, sample, 0))
        num_given = tl.maximum(num_right + (last >= 0).to(tl.int32), 1)
        tl.store(shortfalls + row, count - num_given)
        tl.store(newest + row, tl.maximum(tl.where(last >= 0, last, before), 0))
        tl.store(samples + place * num_rows + row, tl.maximum(sample, 0), mask=place < WIDTH)


@triton.jit
def _move_kernel(
    num_keys,  # [R], changed
    positions,  # [T or more], changed
    slots,  # [T or more], changed
    lines,  # [S], changed
    cu_blocks,  # [R + 1]
    block_ids,  # [N]
    rows,  # [R], device rows
    kinds,  # [R]
    num_new,  # [R]
    cu_tokens,  # [R + 1]
    cu_lines,  # [R + 1]
    shortfalls,  # [max_rows + 1]
    behind,  # [S], output
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
):
    in_step = tl.program_id(0)
    kind = tl.load(kinds + in_step)
    is_moved = (kind & (_AHEAD + _OPEN_ENDED)) > 0
    shortfall = tl.load(shortfalls + tl.load(rows + in_step), mask=is_moved, other=0)
    end_line = tl.load(cu_lines + in_step + 1)
    for start in range(tl.load(cu_lines + in_step), end_line, N):
        line = start + tl.arange(0, N)
        is_line = line < end_line
        tl.store(behind + line, shortfall, mask=is_line)
        if (kind & _OPEN_ENDED) > 0:
            token = tl.load(lines + line, mask=is_line, other=0)
            tl.store(lines + line, token - shortfall, mask=is_line)
    if (kind & _AHEAD) > 0:
        tl.store(num_keys + in_step, tl.load(num_keys + in_step) - shortfall)
        own_blocks = block_ids + tl.load(cu_blocks + in_step)
        end = tl.load(cu_tokens + in_step + 1)
        for start in range(end - tl.load(num_new + in_step), end, N):
            place = start + tl.arange(0, N)
            is_token = place < end
            position = tl.load(positions + place, mask=is_token, other=0) - shortfall
            block = tl.load(own_blocks + position // BLOCK_SIZE, mask=is_token, other=0)
            tl.store(positions + place, position, mask=is_token)
            tl.store(slots + place, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=is_token)


def judge(
    drawn: Tensor,
    input_ids: Tensor,
    lines: Tensor | None,
    table: Tensor,
    guessed: GuessedBatch,
    states: RowStates,
) -> Tensor:
    """As `kernels.guesses.judge`, all on one GPU; no row has more lines than `samples` has."""
    num_lines, width = guessed.num_lines, len(states.samples)
    left = torch.empty((2, num_lines), dtype=torch.int32, device=drawn.device)
    _judge_kernel[(len(guessed.rows),)](
        drawn,
        input_ids,
        input_ids if lines is None else lines,
        table,
        guessed.rows,
        guessed.kinds,
        guessed.cu_lines,
        states.shortfalls,
        states.samples,
        states.newest,
        left,
        num_lines,
        len(states.shortfalls),
        HAS_LINES=lines is not None,
        WIDTH=width,
        N=triton.next_power_of_2(width),
        num_warps=1,
    )
    return left


def move(
    planned: PlannedStep, guessed: GuessedBatch, shortfalls: Tensor, block_size: int
) -> Tensor:
    """As `kernels.guesses.move`, all on one GPU."""
    behind = torch.empty(guessed.num_lines, dtype=torch.int32, device=shortfalls.device)
    _move_kernel[(len(guessed.rows),)](
        planned.num_keys,
        planned.positions,
        planned.slots,
        planned.lines,
        planned.cu_blocks,
        planned.block_ids,
        guessed.rows,
        guessed.kinds,
        guessed.num_new,
        guessed.cu_tokens,
        guessed.cu_lines,
        shortfalls,
        behind,
        BLOCK_SIZE=block_size,
        N=_BLOCK,
        num_warps=1,
    )
    return behind

"""The Triton form of `kernels.guesses`: one launch for each of its three operations.

Tensors are int32 unless stated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.guessed_steps import GuessedLines, PlannedStep, RowMoves, RowStates

_BLOCK = 128


@triton.jit(do_not_specialize=["num_tokens", "num_lines"])
def _following_kernel(
    input_ids,  # [T], -1 - r = entry r of the table
    lines,  # [S], if HAS_LINES
    table,  # [entries]
    found,  # [S], output
    num_tokens,
    num_lines,
    HAS_LINES: tl.constexpr,
    N: tl.constexpr,
):
    line = tl.program_id(0) * N + tl.arange(0, N)
    is_real = line < num_lines
    place = tl.load(lines + line, mask=is_real, other=0) if HAS_LINES else line
    token = tl.minimum(place + 1, num_tokens - 1)
    given = tl.load(input_ids + token, mask=is_real, other=0)
    looked_up = tl.load(table + (-1 - given), mask=is_real & (given < 0), other=0)
    tl.store(found + line, tl.where(given >= 0, given, looked_up), mask=is_real)


@triton.jit(do_not_specialize=["num_guessed", "num_rows"])
def _accept_kernel(
    drawn,  # [S]
    following,  # [S]
    rows,  # int64 [G]
    lines,  # int64 [G, WIDTH]
    counts,  # int64 [G]
    shortfalls,  # [num_rows], output
    samples,  # [WIDTH, num_rows], output
    newest,  # [num_rows], output
    num_guessed,
    num_rows,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
):
    guess = tl.program_id(0) * N + tl.arange(0, N)
    is_real = guess < num_guessed
    row = tl.load(rows + guess, mask=is_real, other=0)
    count = tl.load(counts + guess, mask=is_real, other=1).to(tl.int32)
    last = tl.zeros([N], dtype=tl.int32)
    given = tl.zeros([N], dtype=tl.int32)
    counts_on = is_real  # all drafts before are right
    for place in tl.static_range(WIDTH):
        line = tl.load(lines + guess * WIDTH + place, mask=is_real, other=0)
        sample = tl.load(drawn + line, mask=is_real, other=-1)
        draft = tl.load(following + line, mask=is_real, other=-1)
        tl.store(samples + place * num_rows + row, tl.maximum(sample, 0), mask=is_real)
        is_token = counts_on & (sample >= 0)
        last = tl.where(is_token, sample, last)
        given += is_token.to(tl.int32)
        counts_on = is_token & (sample == draft) & (place < count - 1)
    tl.store(shortfalls + row, count - tl.maximum(given, 1), mask=is_real)
    tl.store(newest + row, last, mask=is_real)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_lines"])
def _move_kernel(
    num_keys,  # [R], changed
    positions,  # [T or more], changed
    slots,  # [T or more], changed
    lines,  # [S], changed if MOVES_LINES
    cu_blocks,  # [R + 1]
    block_ids,  # [N]
    rows,  # int64 [R], device rows
    line_rows,  # int64 [S]
    ends,  # int64 [S]
    places,  # int64 [T]
    token_rows,  # int64 [T]
    shortfalls,  # [max_rows + 1]
    behind,  # [S], output
    num_rows,
    num_tokens,
    num_lines,
    MOVES_LINES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
):
    """Element i of the grid is row i, line i and token i; none of these reads what others write."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    is_row, is_line, is_token = at < num_rows, at < num_lines, at < num_tokens
    row = tl.load(rows + at, mask=is_row, other=0)
    keys = tl.load(num_keys + at, mask=is_row, other=0)
    tl.store(num_keys + at, keys - tl.load(shortfalls + row, mask=is_row, other=0), mask=is_row)
    line_row = tl.load(line_rows + at, mask=is_line, other=0)
    tl.store(behind + at, tl.load(shortfalls + line_row, mask=is_line, other=0), mask=is_line)
    if MOVES_LINES:
        end = tl.load(ends + at, mask=is_line, other=0)
        line = tl.load(lines + at, mask=is_line, other=0)
        line -= tl.load(shortfalls + end, mask=is_line, other=0)
        tl.store(lines + at, line, mask=is_line)
    place = tl.load(places + at, mask=is_token, other=0)
    in_step = tl.load(token_rows + at, mask=is_token, other=0)
    of_row = tl.load(rows + in_step, mask=is_token, other=0)
    position = tl.load(positions + place, mask=is_token, other=0)
    position -= tl.load(shortfalls + of_row, mask=is_token, other=0)
    first = tl.load(cu_blocks + in_step, mask=is_token, other=0)
    block = tl.load(block_ids + first + position // BLOCK_SIZE, mask=is_token, other=0)
    tl.store(positions + place, position, mask=is_token)
    tl.store(slots + place, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=is_token)


def following(input_ids: Tensor, lines: Tensor | None, num_lines: int, table: Tensor) -> Tensor:
    """As `kernels.guesses.following`, all on one GPU."""
    found = torch.empty(num_lines, dtype=torch.int32, device=input_ids.device)
    has_lines = lines is not None
    _following_kernel[(triton.cdiv(num_lines, _BLOCK),)](
        input_ids,
        lines if has_lines else input_ids,
        table,
        found,
        len(input_ids),
        num_lines,
        HAS_LINES=has_lines,
        N=_BLOCK,
    )
    return found


def accept(drawn: Tensor, following: Tensor, guessed: GuessedLines, states: RowStates) -> None:
    """As `kernels.guesses.accept`, all on one GPU."""
    num_guessed, width = guessed.lines.shape
    _accept_kernel[(triton.cdiv(num_guessed, _BLOCK),)](
        drawn,
        following,
        guessed.rows,
        guessed.lines,
        guessed.counts,
        states.shortfalls,
        states.samples,
        states.newest,
        num_guessed,
        len(states.shortfalls),
        WIDTH=width,
        N=_BLOCK,
    )


def move(planned: PlannedStep, moves: RowMoves, shortfalls: Tensor, block_size: int) -> Tensor:
    """As `kernels.guesses.move`, all on one GPU."""
    num_rows, num_places, num_lines = len(moves.rows), len(moves.places), len(moves.lines)
    behind = torch.empty(num_lines, dtype=torch.int32, device=shortfalls.device)
    lines = planned.lines
    most = max(num_rows, num_places, num_lines)
    _move_kernel[(triton.cdiv(most, _BLOCK),)](
        planned.num_keys,
        planned.positions,
        planned.slots,
        planned.num_keys if lines is None else lines,
        planned.cu_blocks,
        planned.block_ids,
        moves.rows,
        moves.lines,
        moves.ends,
        moves.places,
        moves.token_rows,
        shortfalls,
        behind,
        num_rows,
        num_places,
        num_lines,
        MOVES_LINES=lines is not None,
        BLOCK_SIZE=block_size,
        N=_BLOCK,
    )
    return behind

"""Decides on the device which drafts of a step count, and moves later steps to where rows then are.

    a row with drafts was planned as if all were right; it is `shortfall` tokens behind that

    judge   samples of the rows with drafts -> shortfalls, newest tokens       after a step
    move    positions, keys, slots, lines of rows that were planned ahead      before the next one

So a step can be launched before the host knows how many tokens the last one gave. The same rules on
the host: `engine.speculation.acceptance`, `write_input_batch` of the true lengths. Nothing here
waits for the device; on a GPU each is one kernel, as the device waits for them between two steps,
and what they read was sent with the step's inputs. All tensors are int32 unless stated.
"""

import torch
from torch import Tensor

from kernels.guessed_steps import (
    AHEAD,
    JUDGED,
    OPEN_ENDED,
    GuessedBatch,
    PlannedStep,
    RowStates,
)
from kernels.input_ids import resolve_input_ids


def judge(
    drawn: Tensor,
    input_ids: Tensor,
    lines: Tensor | None,
    table: Tensor,
    guessed: GuessedBatch,
    states: RowStates,
) -> Tensor:
    """Write the states of all rows with drafts.

    drawn: [S] a line's token, negative where nothing could be drawn. input_ids: [T] as of
    `resolve_input_ids`, looked up in `table`. lines: [S or more] the token after which each
    samples; None = S is T, all in order. Returns [2, S]: `drawn`, and the draft after each line's
    token; 0 behind a row's last line, which has none.

    A row that got nothing leaves as soon as the host knows. Until then it goes on as if it had got
    token 0, since a step computes a token of each of its rows.
    """
    if drawn.is_cuda:
        from kernels.guesses_triton import judge as on_gpu  # a CPU needs no Triton

        return on_gpu(drawn, input_ids, lines, table, guessed, states)
    num_lines = guessed.num_lines
    places = torch.arange(num_lines) if lines is None else lines[:num_lines].long()
    last_place = len(input_ids) - 1
    following = resolve_input_ids(input_ids[(places + 1).clamp(max=last_place)], table)
    following[guessed.cu_lines[1:].long() - 1] = 0
    is_guessed = (guessed.kinds & JUDGED) > 0
    rows = guessed.rows[is_guessed].long()
    starts = guessed.cu_lines[:-1][is_guessed, None]  # [G, 1]
    counts = guessed.cu_lines[1:][is_guessed, None] - starts
    within = torch.arange(len(states.samples))
    its_lines = (starts + torch.minimum(within, counts - 1)).long()  # [G, E]
    samples = drawn[its_lines]
    is_right = (samples >= 0) & (samples == following[its_lines]) & (within < counts - 1)
    num_right = is_right.long().cumprod(1).sum(1, keepdim=True)  # [G, 1]
    last = samples.gather(1, num_right)
    is_drawn = last >= 0
    before = samples.gather(1, (num_right - 1).clamp(min=0))
    newest = torch.where(is_drawn, last, before).clamp(min=0)
    given = (num_right + is_drawn).clamp(min=1)
    states.shortfalls[rows] = (counts - given)[:, 0].int()
    states.newest[rows] = newest[:, 0]
    states.samples[:, rows] = samples.clamp(min=0).T
    return torch.stack([drawn, following])


def move(
    planned: PlannedStep, guessed: GuessedBatch, shortfalls: Tensor, block_size: int
) -> Tensor:
    """Move each row back; returns by how many tokens each line's row is behind its plan, [S].

    shortfalls: as of `RowStates`.
    """
    if shortfalls.is_cuda:
        from kernels.guesses_triton import move as on_gpu

        return on_gpu(planned, guessed, shortfalls, block_size)
    behind = shortfalls[guessed.rows.long()]
    back = torch.where((guessed.kinds & AHEAD) > 0, behind, 0)  # [R]
    shorter = torch.where((guessed.kinds & OPEN_ENDED) > 0, behind, 0)
    num_rows, num_new = len(behind), guessed.num_new.long()
    planned.num_keys[:num_rows] -= back
    token_rows = torch.arange(num_rows).repeat_interleave(num_new)
    ends, counted = guessed.cu_tokens[1:].long(), num_new.cumsum(0)
    places = torch.arange(len(token_rows)) + (ends - counted)[token_rows]
    positions = planned.positions[places] - back[token_rows]
    in_row = positions.long()
    blocks = planned.block_ids[planned.cu_blocks[token_rows].long() + in_row // block_size]
    planned.positions[places] = positions
    planned.slots[places] = (blocks * block_size + in_row % block_size).int()
    nums_lines = guessed.cu_lines.diff().long()
    planned.lines[: guessed.num_lines] -= shorter.repeat_interleave(nums_lines)
    return (back + shorter).repeat_interleave(nums_lines)

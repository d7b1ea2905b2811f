"""Decides on the device which drafts of a step count, and moves later steps to where rows then are.

    a row with drafts was planned as if all were right; it is `shortfall` tokens behind that

    following  the token after each line of a step
    accept     samples of the rows with drafts -> shortfalls, newest tokens      after a step
    move       positions, keys, slots, lines of rows that were planned ahead     before the next one

So a step can be launched before the host knows how many tokens the last one gave. The same rules on
the host: `engine.speculation.acceptance`, `write_input_batch` of the true lengths. Nothing here
waits for the device; on a GPU each is one kernel, as the device waits for them between two steps.
All tensors are int32 unless stated.
"""

import torch
from torch import Tensor

from kernels.guessed_steps import GuessedLines, PlannedStep, RowMoves, RowStates
from kernels.input_ids import resolve_input_ids


def following(input_ids: Tensor, lines: Tensor | None, num_lines: int, table: Tensor) -> Tensor:
    """[S]  the token after the token of each line, which is a draft unless the line is a row's last

    input_ids: [T] as of `resolve_input_ids`, looked up in `table`. lines: [S] or more; None = S is
    T, all in order.
    """
    if input_ids.is_cuda:
        from kernels.guesses_triton import following as on_gpu  # a CPU needs no Triton

        return on_gpu(input_ids, lines, num_lines, table)
    places = torch.arange(num_lines) if lines is None else lines[:num_lines].long()
    last = len(input_ids) - 1
    return resolve_input_ids(input_ids[(places + 1).clamp(max=last)], table)


def accept(drawn: Tensor, following: Tensor, guessed: GuessedLines, states: RowStates) -> None:
    """Write the states of all rows with drafts.

    drawn: [S] a line's token, negative where nothing could be drawn. following: [S] as of
    `following`. A row that got nothing leaves as soon as the host knows. Until then it goes on as
    if it had got token 0, since a step computes a token of each of its rows.
    """
    if drawn.is_cuda:
        from kernels.guesses_triton import accept as on_gpu

        on_gpu(drawn, following, guessed, states)
        return
    samples = drawn[guessed.lines]  # [G, E]
    is_judged = torch.arange(samples.shape[1]) < guessed.counts[:, None] - 1
    is_right = (samples >= 0) & (samples == following[guessed.lines]) & is_judged
    num_right = is_right.long().cumprod(1).sum(1, keepdim=True)  # [G, 1]
    last = samples.gather(1, num_right)
    is_drawn = last >= 0
    before = samples.gather(1, (num_right - 1).clamp(min=0))
    newest = torch.where(is_drawn, last, before).clamp(min=0)
    given = (num_right + is_drawn)[:, 0].clamp(min=1)
    states.shortfalls[guessed.rows] = (guessed.counts - given).int()
    states.newest[guessed.rows] = newest[:, 0]
    states.samples[:, guessed.rows] = samples.clamp(min=0).T


def move(planned: PlannedStep, moves: RowMoves, shortfalls: Tensor, block_size: int) -> Tensor:
    """Move each row back; returns by how many tokens each line's row is behind its plan, [S].

    shortfalls: as of `RowStates`.
    """
    if shortfalls.is_cuda:
        from kernels.guesses_triton import move as on_gpu

        return on_gpu(planned, moves, shortfalls, block_size)
    behind, token_rows, places = shortfalls[moves.rows], moves.token_rows, moves.places
    planned.num_keys[: len(behind)] -= behind
    positions = planned.positions[places] - behind[token_rows]
    in_row = positions.long()
    blocks = planned.block_ids[planned.cu_blocks[token_rows].long() + in_row // block_size]
    planned.positions[places] = positions
    planned.slots[places] = (blocks * block_size + in_row % block_size).int()
    if planned.lines is not None:
        planned.lines[: len(moves.ends)] -= shortfalls[moves.ends]
    return shortfalls[moves.lines]

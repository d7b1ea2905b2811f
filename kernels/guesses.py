"""Decides on the device which drafts of a step count, and moves later steps to where rows then are.

    a row with drafts was planned as if all were right; it is `shortfall` tokens behind that

    accept   samples of the rows with drafts -> shortfalls, newest tokens      after a step
    move     positions, keys and slots of rows that were planned ahead         before the next one

So a step can be launched before the host knows how many tokens the last one gave. The same rules on
the host: `engine.speculation.acceptance`, `write_input_batch` of the true lengths. Nothing here
waits for the device. All tensors are int32 unless stated.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessedLines:
    """The lines of a step's rows with drafts, G of them with at most E lines each."""

    rows: Tensor  # int64 [G]  device rows, distinct
    lines: Tensor  # int64 [G, E]  a row's lines in order, then its last one again
    counts: Tensor  # int64 [G]  lines of each: one more than it has drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStates:
    """What the device knows of its rows; the last entry of each is for no row."""

    # [max_rows + 1]  tokens that the newest step with drafts did not give; of no row 0
    shortfalls: Tensor
    samples: Tensor  # [E, max_rows + 1]  what that step drew in each place, right or not
    newest: Tensor  # [max_rows + 1]


def accept(drawn: Tensor, following: Tensor, guessed: GuessedLines, states: RowStates) -> None:
    """Write the states of all rows with drafts.

    drawn: [S] a line's token, negative where nothing could be drawn. following: [S] the token after
    the line's in the step, which is a draft unless the line is its row's last.
    """
    samples = drawn[guessed.lines]  # [G, E]
    is_judged = torch.arange(samples.shape[1], device=drawn.device) < guessed.counts[:, None] - 1
    is_right = (samples >= 0) & (samples == following[guessed.lines]) & is_judged
    num_right = is_right.long().cumprod(1).sum(1, keepdim=True)  # [G, 1]
    last = samples.gather(1, num_right)
    is_drawn = last >= 0
    before = samples.gather(1, (num_right - 1).clamp(min=0))
    newest = torch.where(is_drawn, last, before).clamp(min=0)
    given = (num_right + is_drawn)[:, 0]
    states.shortfalls[guessed.rows] = (guessed.counts - given).int()
    states.newest[guessed.rows] = newest[:, 0]
    states.samples[:, guessed.rows] = samples.clamp(min=0).T


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTokens:
    """T tokens of R rows as a step was planned; `move` changes the first three in place."""

    num_keys: Tensor  # [R or more]
    positions: Tensor  # [T or more, with padding between]
    slots: Tensor  # likewise
    cu_blocks: Tensor  # [R + 1 or more]
    block_ids: Tensor


def move(
    planned: PlannedTokens, behind: Tensor, places: Tensor, of_rows: Tensor, block_size: int
) -> None:
    """Move each row back by behind[r] tokens, [R].

    places, of_rows: int64 [T]  where each token lies in `positions`, and its row in the step.
    """
    planned.num_keys[: len(behind)] -= behind
    positions = planned.positions[places] - behind[of_rows]
    in_row = positions.long()
    blocks = planned.block_ids[planned.cu_blocks[of_rows].long() + in_row // block_size]
    planned.positions[places] = positions
    planned.slots[places] = (blocks * block_size + in_row % block_size).int()

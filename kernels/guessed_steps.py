"""Records of steps whose drafts only the device has judged: what `guesses` and `ngrams` are given.

A row with drafts was planned as if all were right; its shortfall is how many tokens it is behind
that. Tensors are int32 unless stated.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """T tokens of R rows with S lines, as planned; `move` changes all but the blocks in place."""

    num_keys: Tensor  # [R or more]
    positions: Tensor  # [T or more, with padding between]
    slots: Tensor  # likewise
    lines: Tensor | None  # [S or more]; None = they stay
    cu_blocks: Tensor  # [R + 1 or more]
    block_ids: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMoves:
    """By whose shortfall rows, lines and tokens move back: device rows, or that of no row. int64"""

    rows: Tensor  # [R]
    lines: Tensor  # [S]  rows whose tokens moved, or that end earlier
    ends: Tensor  # [S]  only the latter
    places: Tensor  # [T]  where each token lies in `PlannedStep.positions`
    token_rows: Tensor  # [T]  its row in the step


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEnds:
    """The texts to look up, G of them."""

    rows: Tensor  # int64 [G]  device rows, distinct
    lengths: Tensor  # int64 [G]  tokens if nothing falls short; above every shortfall
    shortfalls: Tensor  # [max_rows + 1]

"""Records of steps whose drafts only the device has judged: what `guesses` and `ngrams` are given.

A row with drafts was planned as if all were right; its shortfall is how many tokens it is behind
that. Tensors are int32 unless stated.
"""

from dataclasses import dataclass

from torch import Tensor

# What a row of a step is: the first, one of the others, or the sum of both.
JUDGED = 1  # its samples are judged by its drafts
AHEAD = 2  # planned as if all drafts of the step in flight were right: it lies further back
OPEN_ENDED = 4  # likewise, and it begins where it was planned: it ends earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessedBatch:
    """The R rows of a step with S lines, in its order."""

    rows: Tensor  # [R]  device rows, distinct
    kinds: Tensor  # [R]  as above
    num_new: Tensor  # [R]  tokens
    cu_tokens: Tensor  # [R + 1]  a row's tokens are the last ones before its end
    cu_lines: Tensor  # [R + 1]
    num_lines: int


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
    lines: Tensor  # [S or more]  the token after which each samples
    cu_blocks: Tensor  # [R + 1 or more]
    block_ids: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChanges:
    """What the texts of G rows get before drafts are looked up behind them; one row of integers.

    heads   [G + 1, 4]  row, planned length, tokens in flight at its end, first of its pieces
    pieces  [P, 3]      place in the text, first of its tokens, their number
    tokens  [N]

    The last head has only the number of pieces. The tokens in flight are the row's first samples.
    """

    packed: Tensor
    num_rows: int
    num_pieces: int

    @property
    def heads(self) -> Tensor:
        return self.packed[: 4 * (self.num_rows + 1)].view(-1, 4)

    @property
    def pieces(self) -> Tensor:
        first = 4 * (self.num_rows + 1)
        return self.packed[first : first + 3 * self.num_pieces].view(-1, 3)

    @property
    def tokens(self) -> Tensor:
        return self.packed[4 * (self.num_rows + 1) + 3 * self.num_pieces :]

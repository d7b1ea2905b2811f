"""Where a step's batch is cut in two, so that one half computes while the other communicates.

    sequences   rows of equally many tokens: half of the rows each (decode, verify)
    balanced    rows of any length: at the row boundary with the least difference in tokens
    two chunks  where the balanced boundary is too uneven: one row is cut, half of the tokens each

        rows        [10] [20] [30] [........ 500 ........] [40]
        tokens                      A: 300  |  B: 300
        A           10, 20, 30, and the first 240 of the 500
        B           the last 260 of the 500, after 240 more of history, and 40

Pure arithmetic on numbers of tokens. The rules and their names are those of SGLang's two-batch
overlap (python/sglang/srt/batch_overlap/two_batch_overlap.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

# A share of the tokens below this (or above 1 - this) in the first half is too uneven.
TOKEN_DISTRIBUTION_THRESHOLD = 0.48


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """The first half is the rows before `row` and the first `row_tokens` tokens of that row."""

    row: int
    row_tokens: int = 0  # 0 = the boundary is between rows
    token: int  # the second half's first token, counted from the batch's first
    is_decode: bool = False  # every row decodes or verifies drafts; else some compute prompts

    @property
    def is_two_chunk(self) -> bool:
        return self.row_tokens > 0


def sequence_row(num_tokens: int, tokens_per_row: int = 1) -> int:
    """The second half's first row where every row has equally many tokens; 0 for an empty batch."""
    assert num_tokens % tokens_per_row == 0, f"{num_tokens} tokens in rows of {tokens_per_row}"
    return num_tokens // tokens_per_row // 2


def balanced_row(row_tokens: Sequence[int]) -> int:
    """The second half's first row for the least difference in tokens; of two such the later.

    Stops where the difference grows first. 0 for fewer than two rows.
    """
    total = sum(row_tokens)
    best, least, before = 0, total, 0
    for row in range(1, len(row_tokens)):
        before += row_tokens[row - 1]
        difference = abs(total - 2 * before)
        if difference > least:
            break
        best, least = row, difference
    return best


def is_too_uneven(row_tokens: Sequence[int], row: int, threshold: float) -> bool:
    """Whether the first half's share is outside [threshold, 1 - threshold]."""
    total, first = sum(row_tokens), sum(row_tokens[:row])
    return first < total * threshold or first > total * (1 - threshold)


def half_row(row_tokens: Sequence[int]) -> int:
    """The first row whose end is past half of all tokens, rounded down; 0 for an empty batch."""
    half, before = sum(row_tokens) // 2, 0
    for row, count in enumerate(row_tokens):
        before += count
        if before > half:
            return row
    return 0


def split_sequences(num_rows: int, tokens_per_row: int = 1) -> BatchSplit | None:
    """The split of rows of equally many tokens; None if a half would be empty."""
    row = sequence_row(num_rows * tokens_per_row, tokens_per_row)
    if row == 0:
        return None
    return BatchSplit(row=row, token=row * tokens_per_row, is_decode=True)


def split_verified(row_tokens: Sequence[int]) -> BatchSplit | None:
    """The split of rows that verify drafts, or decode; None if a half would be empty.

    Half of the rows each where all have equally many tokens, else the balanced boundary: a row
    that samples after each of its tokens is never cut.
    """
    if len(set(row_tokens)) == 1:
        return split_sequences(len(row_tokens), row_tokens[0])
    split = split_rows(row_tokens)
    return None if split is None else replace(split, is_decode=True)


def verifies_all(row_tokens: Sequence[int], row_samples: Sequence[int]) -> bool:
    """Whether every row has one token or samples after each of its tokens: none can be cut."""
    return max(row_tokens) == 1 or sum(row_samples) == sum(row_tokens)


def split_step(
    row_tokens: Sequence[int], row_samples: Sequence[int], threshold: float
) -> BatchSplit | None:
    """The split of a step's rows, those of one token first; None if a half would be empty.

    row_samples: how many of its last tokens each row samples after; all of them are in one half.
    """
    if verifies_all(row_tokens, row_samples):
        return split_verified(row_tokens)
    split = _without_single_ends(split_prompts(row_tokens, threshold))
    if split is None or not split.is_two_chunk:
        return split
    num_left = row_tokens[split.row] - split.row_tokens
    return split if num_left >= row_samples[split.row] else split_rows(row_tokens)


def _without_single_ends(split: BatchSplit | None) -> BatchSplit | None:
    """Rows of one token come first in a step, so a cut leaves none behind longer rows."""
    if split is None or split.row_tokens != 1:
        return split
    return BatchSplit(row=split.row, token=split.token - 1) if split.row > 0 else None


def split_rows(row_tokens: Sequence[int]) -> BatchSplit | None:
    """The balanced boundary between rows of one token or more; None if a half would be empty."""
    row = balanced_row(row_tokens)
    return BatchSplit(row=row, token=sum(row_tokens[:row])) if row > 0 else None


def split_prompts(
    row_tokens: Sequence[int], threshold: float = TOKEN_DISTRIBUTION_THRESHOLD
) -> BatchSplit | None:
    """The split of rows of one token or more; None if a half would be empty."""
    row = balanced_row(row_tokens)
    if is_too_uneven(row_tokens, row, threshold):
        row = half_row(row_tokens)
        token = sum(row_tokens) // 2
        if token == 0:
            return None
        # Where half of the tokens end with a row, nothing is cut.
        return BatchSplit(row=row, row_tokens=token - sum(row_tokens[:row]), token=token)
    return split_rows(row_tokens)

"""The Triton form of `kernels.ngrams`: one launch, a program for each text."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.guessed_steps import RowEnds

# Places that a program looks at together: each time it waits for memory at least twice.
_BLOCK, _NUM_WARPS = 4096, 8


@triton.jit(do_not_specialize=["max_length", "num_rows"])
def _look_up_kernel(
    texts,  # [num_rows, max_length]
    rows,  # int64 [G], device rows
    lengths,  # int64 [G]
    shortfalls,  # [num_rows]
    drafts,  # [NUM_DRAFTS, num_rows], output
    max_length,
    num_rows,
    MIN_MATCH: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    N: tl.constexpr,
):
    row = tl.load(rows + tl.program_id(0))
    length = tl.load(lengths + tl.program_id(0)).to(tl.int32) - tl.load(shortfalls + row)
    text = texts + row * max_length
    best = tl.full([N], -1, dtype=tl.int64)
    for start in range(0, length, N):
        place = start + tl.arange(0, N)
        alive = (place < length) & (place >= MIN_MATCH)
        num_equal = tl.zeros([N], dtype=tl.int32)
        back = 1
        while (back <= MAX_MATCH) & (tl.sum(alive.to(tl.int32)) > 0):
            last = tl.load(text + length - back, mask=length >= back, other=-1)
            token = tl.load(text + place - back, mask=alive & (place >= back), other=-2)
            alive = alive & (token == last)
            num_equal += alive.to(tl.int32)
            back += 1
        ranked = (num_equal.to(tl.int64) << 32) + place
        best = tl.maximum(best, tl.where(num_equal >= MIN_MATCH, ranked, -1))
    found = tl.max(best)
    place = tl.where(found < 0, length - 1, (found & 0x7FFFFFFF).to(tl.int32))
    for number in tl.static_range(NUM_DRAFTS):
        token = tl.load(text + place + number % (length - place))
        tl.store(drafts + number * num_rows + row, token)


def look_up(
    texts: Tensor, ends: RowEnds, drafts: Tensor, *, min_match: int, max_match: int
) -> None:
    """As `kernels.ngrams.look_up`."""
    assert texts.is_contiguous(), "rows of texts lie one after the other"
    assert drafts.is_contiguous(), "entries lie one after the other"
    _look_up_kernel[(len(ends.rows),)](
        texts, ends.rows, ends.lengths, ends.shortfalls, drafts,
        texts.shape[1], drafts.shape[1],
        MIN_MATCH=min_match, MAX_MATCH=max_match, NUM_DRAFTS=len(drafts), N=_BLOCK,
        num_warps=_NUM_WARPS,
    )  # fmt: skip

"""The Triton form of `kernels.ngrams`: one launch, a program for each text."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.guessed_steps import RowStates, TextChanges

# Places that a program looks at together: each time it waits for memory at least twice.
_BLOCK, _NUM_WARPS = 4096, 8


@triton.jit(do_not_specialize=["num_changed", "num_pieces", "max_length", "num_rows"])
def _look_up_kernel(
    texts,  # [num_rows, max_length], changed
    packed,  # as of `TextChanges`
    samples,  # [E, num_rows]
    shortfalls,  # [num_rows]
    drafts,  # [NUM_DRAFTS, num_rows], output
    num_changed,
    num_pieces,
    max_length,
    num_rows,
    MIN_MATCH: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    MOST_IN_FLIGHT: tl.constexpr,
    N: tl.constexpr,
):
    head = packed + 4 * tl.program_id(0)
    pieces = packed + 4 * (num_changed + 1)
    tokens = pieces + 3 * num_pieces
    row = tl.load(head)
    planned = tl.load(head + 1)
    text = texts + row.to(tl.int64) * max_length
    for index in range(tl.load(head + 3), tl.load(head + 7)):  # up to the next row's first
        piece = pieces + 3 * index
        start = tl.load(piece)
        first = tl.load(piece + 1)
        count = tl.load(piece + 2)
        for done in range(0, count, N):
            at = done + tl.arange(0, N)
            told = tl.load(tokens + first + at, mask=at < count, other=0)
            tl.store(text + start + at, told, mask=at < count)
    num_in_flight = tl.load(head + 2)
    number = tl.arange(0, MOST_IN_FLIGHT)
    is_sample = number < num_in_flight
    sample = tl.load(samples + number * num_rows + row, mask=is_sample, other=0)
    tl.store(text + planned - num_in_flight + number, sample, mask=is_sample)
    tl.debug_barrier()  # other threads of this program read what was written
    length = planned - tl.load(shortfalls + row)
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
    for draft in tl.static_range(NUM_DRAFTS):
        token = tl.load(text + place + draft % (length - place))
        tl.store(drafts + draft * num_rows + row, token)


def look_up(
    texts: Tensor,
    changes: TextChanges,
    states: RowStates,
    drafts: Tensor,
    *,
    min_match: int,
    max_match: int,
) -> None:
    """As `kernels.ngrams.look_up`."""
    assert texts.is_contiguous(), "rows of texts lie one after the other"
    assert drafts.is_contiguous(), "entries lie one after the other"
    _look_up_kernel[(changes.num_rows,)](
        texts, changes.packed, states.samples, states.shortfalls, drafts,
        changes.num_rows, changes.num_pieces, texts.shape[1], drafts.shape[1],
        MIN_MATCH=min_match, MAX_MATCH=max_match, NUM_DRAFTS=len(drafts),
        MOST_IN_FLIGHT=triton.next_power_of_2(len(states.samples)), N=_BLOCK, num_warps=_NUM_WARPS,
    )  # fmt: skip

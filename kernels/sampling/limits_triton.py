"""Computes the cuts of top_k, top_p and min_p for whole rows, on a GPU, without a sort.

In units of the row's temperature T, a token's depth below the row's best token is

    depth(t) = (max(x) - x[t]) / T           two fp32 operations, each rounded to nearest
    limit    = min(d_k, d_p, -log(min_p))    a token is kept if depth(t) <= limit
    d_k      = the k-th smallest depth
    d_p      = the smallest d with sum(exp(-depth) : depth <= d) >= top_p * sum(exp(-depth)), where
               both sums run over depth <= d_k

so equal logits are kept or dropped together. A depth is never negative, so its bits as an integer
have the same order, and limits are found by bisection on those bits.

Few tokens decide. With the maxima of all segments of 64 tokens known, each token at least as good
as the n-th largest maximum is in one of those n segments. Limits are searched there, and in the
whole row only if those segments do not determine them. Every row is searched by one program, and
every sum has a fixed order, so what a row keeps does not depend on what else is in the batch.
Torch twins: TopK, TopP and MinP of `engine.sampling.truncation`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.choices import Draws

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEGMENT = tl.constexpr(64)  # tokens
CHUNK = tl.constexpr(4096)  # tokens of one program where a row is split
SEGMENTS_PER_CHUNK = tl.constexpr(4096 // 64)
_MAX_LISTED = tl.constexpr(128)  # segments searched first
_WARPS = 4
_SEARCH_WARPS = 16
_HIGHEST = tl.constexpr(2**31 - 1)
_INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def load_logits(pointers, mask):  # noqa: ANN201
    """Logits as fp32; NaN becomes +inf, so that a maximum always shows it."""
    x = tl.load(pointers, mask=mask, other=-float("inf")).to(tl.float32)
    return tl.where(x != x, float("inf"), x)


@triton.jit
def _maxima_kernel(
    logits_ptr,  # [S, VOCAB], lines STRIDE apart
    lines_ptr,  # [P], which of the S
    maxima_ptr,  # fp32 [P, chunks * SEGMENTS_PER_CHUNK], the output
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """The largest logit of each segment, by chunks; grid (P, chunks)."""
    p, chunk = tl.program_id(0), tl.program_id(1)
    num_segments: tl.constexpr = SEGMENTS_PER_CHUNK
    segments = chunk * num_segments + tl.arange(0, num_segments)
    ids = segments[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    line_ptr = logits_ptr + tl.load(lines_ptr + p) * STRIDE
    maxima = tl.max(load_logits(line_ptr + ids, ids < VOCAB), axis=1)
    tl.store(maxima_ptr + p * tl.num_programs(1) * num_segments + segments, maxima)


@triton.jit
def _weigh(
    line_ptr, listed_ptr, num_listed, best, temperature, middle,
    BY_MASS: tl.constexpr, VOCAB: tl.constexpr,
):  # fmt: skip
    """Number (or mass, if BY_MASS) of the listed segments' tokens with depth bits <= `middle`.

    Also returns the bits of the deepest of these tokens and of the shallowest of the others.
    """
    weights = tl.zeros([_MAX_LISTED, SEGMENT], tl.float32)
    below = tl.full([_MAX_LISTED, SEGMENT], -1, tl.int32)
    above = tl.full([_MAX_LISTED, SEGMENT], _HIGHEST, tl.int32)
    for start in range(0, num_listed, _MAX_LISTED):
        places = start + tl.arange(0, _MAX_LISTED)
        is_listed = places < num_listed
        segments = tl.load(listed_ptr + places, mask=is_listed, other=0)
        ids = segments[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
        is_token = is_listed[:, None] & (ids < VOCAB)
        depths = tl.div_rn(best - load_logits(line_ptr + ids, is_token), temperature)
        bits = depths.to(tl.int32, bitcast=True)
        is_in = is_token & (bits <= middle)
        if BY_MASS:
            weights += tl.where(is_in, tl.exp(-depths), 0.0)
        else:
            weights += tl.where(is_in, 1.0, 0.0)
        below = tl.maximum(below, tl.where(is_in, bits, -1))
        above = tl.minimum(above, tl.where(is_token & (bits > middle), bits, _HIGHEST))
    return tl.sum(weights), tl.max(below), tl.min(above)


@triton.jit
def _search(
    line_ptr, listed_ptr, num_listed, best, temperature, wanted, high,
    BY_MASS: tl.constexpr, VOCAB: tl.constexpr,
):  # fmt: skip
    """Bits of the smallest depth whose weight reaches `wanted`; assumes that `high` reaches it."""
    low = tl.full([], -1, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        weight, below, above = _weigh(
            line_ptr, listed_ptr, num_listed, best, temperature, middle, BY_MASS, VOCAB
        )
        # Each bound moves on to the next token's own depth, so a search ends as soon as one
        # distinct depth is left: a dozen rounds for bf16 logits instead of 31.
        is_enough = weight >= wanted
        high = tl.where(is_enough, below, high)
        low = tl.where(is_enough, low, above - 1)
    return tl.maximum(high, 0)


@triton.jit
def _list_segments(listed_ptr, is_chosen, segments):
    """Write the chosen segments' numbers, ascending; returns how many."""
    # Other warps may still be reading the list, and it must be complete before they continue.
    tl.debug_barrier()
    chosen = is_chosen.to(tl.int32)
    tl.store(listed_ptr + tl.cumsum(chosen, axis=0) - 1, segments, mask=is_chosen)
    tl.debug_barrier()
    return tl.sum(chosen, axis=0)


@triton.jit
def _last_complete_depth(bits):
    """The largest integer that at most `_MAX_LISTED` of `bits` do not exceed."""
    low = tl.full([], -1, tl.int32)
    high = tl.full([], _INF_BITS + 1, tl.int32)
    for _ in range(32):
        middle = low + (high - low) // 2
        fits = tl.sum((bits <= middle).to(tl.int32), axis=0) <= _MAX_LISTED
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    return low


@triton.jit
def _limit_kernel(
    logits_ptr,  # [S, VOCAB], lines STRIDE apart
    lines_ptr,  # [P], which of the S
    temperatures_ptr,  # fp32 [P]
    top_ks_ptr,  # [P], 0 = no cut
    top_ps_ptr,  # fp32 [P], 1 = no cut
    max_depths_ptr,  # fp32 [P], by min_p
    maxima_ptr,  # fp32 [P, MAXIMA_STRIDE], of `_maxima_kernel`
    listed_ptr,  # int32 [P, segments], scratch
    bests_ptr,  # fp32 [P], output
    limits_ptr,  # int32 [P], output
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    MAXIMA_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best logit of each line and the bits of its `limit`; grid (P,)."""
    p = tl.program_id(0)
    num_segments: tl.constexpr = (VOCAB + SEGMENT - 1) // SEGMENT
    segments = tl.arange(0, BLOCK)
    is_segment = segments < num_segments
    maxima = tl.load(
        maxima_ptr + p * MAXIMA_STRIDE + segments, mask=is_segment, other=-float("inf")
    )
    best = tl.max(maxima, axis=0)
    limit = tl.load(max_depths_ptr + p).to(tl.int32, bitcast=True)
    top_k = tl.load(top_ks_ptr + p)
    top_p = tl.load(top_ps_ptr + p)
    is_finite = (best > -float("inf")) & (best < float("inf"))
    if is_finite & ((top_k > 0) | (top_p < 1.0)):
        line_ptr = logits_ptr + tl.load(lines_ptr + p) * STRIDE
        temperature = tl.load(temperatures_ptr + p)
        list_ptr = listed_ptr + p * num_segments
        bits = tl.div_rn(best - maxima, temperature).to(tl.int32, bitcast=True)
        bits = tl.where(is_segment, bits, _HIGHEST)
        # For depths up to `complete`, the listed segments hold all tokens of the row.
        complete = _last_complete_depth(bits)
        num_listed = _list_segments(list_ptr, bits <= complete, segments)
        cut = tl.full([], _INF_BITS, tl.int32)
        if top_k > 0:
            wanted = top_k.to(tl.float32)
            count, _, _ = _weigh(
                line_ptr, list_ptr, num_listed, best, temperature, complete, False, VOCAB
            )
            if count < wanted:
                num_listed = _list_segments(list_ptr, is_segment, segments)
                complete = tl.full([], _INF_BITS, tl.int32)
            cut = _search(
                line_ptr, list_ptr, num_listed, best, temperature, wanted, complete, False, VOCAB
            )
            complete = cut
        if top_p < 1.0:
            reached, _, _ = _weigh(
                line_ptr, list_ptr, num_listed, best, temperature, complete, True, VOCAB
            )
            wanted = reached * top_p
            if top_k == 0:
                if num_listed < num_segments:
                    wanted = top_p * _row_mass(line_ptr, best, temperature, VOCAB)
                if reached < wanted:
                    num_listed = _list_segments(list_ptr, is_segment, segments)
                    complete = tl.full([], _INF_BITS, tl.int32)
            cut = _search(
                line_ptr, list_ptr, num_listed, best, temperature, wanted, complete, True, VOCAB
            )
        limit = tl.minimum(limit, cut)
    tl.store(bests_ptr + p, best)
    tl.store(limits_ptr + p, limit)


@triton.jit
def _row_mass(line_ptr, best, temperature, VOCAB: tl.constexpr):
    """Sum of exp(-depth) over the whole line."""
    tile: tl.constexpr = _MAX_LISTED * SEGMENT
    masses = tl.zeros([tile], tl.float32)
    for start in range(0, VOCAB, tile):
        ids = start + tl.arange(0, tile)
        x = load_logits(line_ptr + ids, ids < VOCAB)
        masses += tl.exp(-tl.div_rn(best - x, temperature))
    return tl.sum(masses, axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """What P rows keep: the tokens whose depth bits are at most `max_bits`."""

    # [P, chunks * SEGMENTS_PER_CHUNK] fp32  the largest logit of each segment
    maxima: Tensor
    # [P] fp32
    bests: Tensor
    # [P] int32  the bits of the limit
    max_bits: Tensor


def row_limits(logits: Tensor, draws: Draws) -> RowLimits:
    """Limits of the rows in `draws`. logits: fp32, bf16 or fp16 [S, vocab]."""
    vocab_size, stride = logits.shape[1], row_stride(logits)
    num_draws = draws.lines.shape[0]
    num_chunks = triton.cdiv(vocab_size, CHUNK.value)
    num_segments = triton.cdiv(vocab_size, SEGMENT.value)
    maxima_stride = num_chunks * SEGMENTS_PER_CHUNK.value
    limits = RowLimits(
        maxima=logits.new_empty((num_draws, maxima_stride), dtype=torch.float32),
        bests=logits.new_empty(num_draws, dtype=torch.float32),
        max_bits=logits.new_empty(num_draws, dtype=torch.int32),
    )
    listed = logits.new_empty((num_draws, num_segments), dtype=torch.int32)
    _maxima_kernel[(num_draws, num_chunks)](
        logits, draws.lines, limits.maxima, VOCAB=vocab_size, STRIDE=stride, num_warps=_WARPS
    )
    _limit_kernel[(num_draws,)](
        logits,
        draws.lines,
        draws.temperatures,
        draws.top_ks,
        draws.top_ps,
        draws.max_depths,
        limits.maxima,
        listed,
        limits.bests,
        limits.max_bits,
        VOCAB=vocab_size,
        STRIDE=stride,
        MAXIMA_STRIDE=maxima_stride,
        BLOCK=triton.next_power_of_2(num_segments),
        num_warps=_SEARCH_WARPS,
    )
    return limits


def row_stride(logits: Tensor) -> int:
    """Elements from one row to the next; at least the vocabulary, even for a single row."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 or vocab_size == 1, f"logits with strides {logits.stride()}"
    assert logits.dtype in LOGIT_DTYPES, f"logits are {logits.dtype}"
    return logits.stride(0) if num_rows > 1 else max(logits.stride(0), vocab_size)

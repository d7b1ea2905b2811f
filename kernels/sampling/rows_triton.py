"""Argmax and draws of whole rows on a GPU, split over many programs.

    greedy = argmax over t of x[t]
    draw   = argmax over depth(t) <= limit of gumbel(seed, index, t) - depth(t)

with depth and limit of `kernels.sampling.limits_triton` and the noise of `kernels.sampling.noise`,
with identical bits; lowest id among equals. A row with NaN or +inf or nothing above -inf is not
finite. A program finds the best of one chunk of one row. A maximum has no rounding, so what a row
draws does not depend on the split or on what else is in the batch. Torch twins:
`kernels.sampling.rows.greedy`, `engine.sampling.draw.TorchDraw`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.choices import (
    HIGHEST,
    INF_KEY,
    LOWEST_KEY,
    MINUS_INF_KEY,
    Draws,
    GreedyChoice,
)
from kernels.sampling.limits_triton import (
    CHUNK,
    SEGMENTS_PER_CHUNK,
    load_logits,
    row_limits,
    row_stride,
)

_WARPS = 4
_LOWEST = tl.constexpr(LOWEST_KEY)
_HIGHEST = tl.constexpr(HIGHEST)
_INF_KEY = tl.constexpr(INF_KEY)
_MINUS_INF_KEY = tl.constexpr(MINUS_INF_KEY)

# The constants of `kernels.sampling.noise`, which defines and explains them.
_MULTIPLIER_1 = tl.constexpr(0x2C1B3C6D)
_MULTIPLIER_2 = tl.constexpr(0x297A2D39)
_SALT_K0 = tl.constexpr(0x9E3779B9)
_SALT_K1 = tl.constexpr(0x7F4A7C15)
_SALT_TOKEN = tl.constexpr(0x1B56C4E9)
_LARGEST_U = tl.constexpr(1.0 - 2.0**-24)


# ---- order ---------------------------------------------------------------------------------------


@triton.jit
def _order(x):
    """fp32 to int32 of the same order; NaN is the largest, -0 equals 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, _HIGHEST, key)


@triton.jit
def _store_best(keys_ptr, ids_ptr, place, keys, ids):
    """The largest of `keys` and the lowest id that has it."""
    best = tl.max(keys, axis=0)
    tl.store(keys_ptr + place, best)
    tl.store(ids_ptr + place, tl.min(tl.where(keys == best, ids, _HIGHEST), axis=0))


@triton.jit
def _greedy_kernel(
    logits_ptr,  # [S, VOCAB], lines STRIDE apart
    keys_ptr,  # int32 [S, chunks], output
    ids_ptr,  # int32 [S, chunks], output
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """The best of each chunk of each line; grid (S, chunks)."""
    line, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    is_token = ids < VOCAB
    x = tl.load(logits_ptr + line.to(tl.int64) * STRIDE + ids, mask=is_token, other=0.0)
    keys = tl.where(is_token, _order(x.to(tl.float32)), _LOWEST)
    _store_best(keys_ptr, ids_ptr, line * tl.num_programs(1) + chunk, keys, ids)


@triton.jit
def _best_chunk_kernel(
    keys_ptr,  # int32 [S, NUM_CHUNKS], of the best of each chunk
    ids_ptr,  # int32 [S, NUM_CHUNKS]
    token_ids_ptr,  # int64 [S], output
    is_finite_ptr,  # bool [S], output
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best chunk of each line; grid (S,)."""
    line = tl.program_id(0)
    chunks = tl.arange(0, BLOCK)
    is_chunk = chunks < NUM_CHUNKS
    keys = tl.load(keys_ptr + line * NUM_CHUNKS + chunks, mask=is_chunk, other=_LOWEST)
    ids = tl.load(ids_ptr + line * NUM_CHUNKS + chunks, mask=is_chunk, other=_HIGHEST)
    best = tl.max(keys, axis=0)
    token_id = tl.min(tl.where(keys == best, ids, _HIGHEST), axis=0)
    is_finite = (best > _MINUS_INF_KEY) & (best < _INF_KEY)
    tl.store(token_ids_ptr + line, tl.where(is_finite, token_id, 0).to(tl.int64))
    tl.store(is_finite_ptr + line, is_finite)


@triton.jit
def _best_word_kernel(
    keys_ptr,  # int32 [S, NUM_CHUNKS], of the best of each chunk
    ids_ptr,  # int32 [S, NUM_CHUNKS]
    words_ptr,  # int64 [S], output
    first_id,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The word of the best chunk of each line; grid (S,)."""
    line = tl.program_id(0)
    chunks = tl.arange(0, BLOCK)
    is_chunk = chunks < NUM_CHUNKS
    keys = tl.load(keys_ptr + line * NUM_CHUNKS + chunks, mask=is_chunk, other=_LOWEST)
    ids = tl.load(ids_ptr + line * NUM_CHUNKS + chunks, mask=is_chunk, other=0)
    # A chunk's key is above `_LOWEST`, which no logit has.
    words = (keys.to(tl.int64) << 32) | ((ids + first_id) ^ _HIGHEST)
    tl.store(words_ptr + line, tl.max(words, axis=0))


@triton.jit(do_not_specialize=["num_lines"])
def _best_rank_kernel(
    words_ptr,  # [NUM_RANKS, S]
    token_ids_ptr,  # int64 [S], output
    is_finite_ptr,  # bool [S], output
    num_lines,
    NUM_RANKS: tl.constexpr,
):
    """The best of all ranks' words of each line; grid (S,)."""
    line = tl.program_id(0)
    best = tl.load(words_ptr + line)
    for rank in tl.static_range(1, NUM_RANKS):
        best = tl.maximum(best, tl.load(words_ptr + rank * num_lines + line))
    key = best >> 32
    is_finite = (key > _MINUS_INF_KEY) & (key < _INF_KEY)
    token_id = (best & _HIGHEST) ^ _HIGHEST
    tl.store(token_ids_ptr + line, tl.where(is_finite, token_id, 0))
    tl.store(is_finite_ptr + line, is_finite)


# ---- noise ---------------------------------------------------------------------------------------


@triton.jit
def _half1(x):
    return (x ^ (x >> 15)) * _MULTIPLIER_1


@triton.jit
def _half2(x):
    y = (x ^ (x >> 12)) * _MULTIPLIER_2
    return y ^ (y >> 15)


@triton.jit
def _mix(x):
    return _half2(_half1(x))


@triton.jit
def noise_bits(seed, index, token_ids):  # noqa: ANN201
    """uint32 words; seed and index int64, token_ids int32 or int64."""
    seed_lo, seed_hi = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    counter = index.to(tl.uint32)
    k0 = _mix(_mix(_mix(seed_lo ^ _SALT_K0) ^ seed_hi) ^ counter)
    k1 = _mix(_mix(_mix(seed_hi ^ _SALT_K1) ^ seed_lo) ^ counter)
    return _half2(_half1(_mix(token_ids.to(tl.uint32) ^ _SALT_TOKEN) ^ k0) + k1)


@triton.jit
def gumbel(bits):  # noqa: ANN201
    u = tl.minimum((bits.to(tl.float32) + 0.5) * (2.0**-32), _LARGEST_U)
    # log1p(-u) is log(1 - u), corrected for the rounding of 1 - u (W. Kahan).
    rest = 1.0 - u
    is_tiny = rest == 1.0
    corrected = tl.log(rest) * tl.div_rn(u, tl.where(is_tiny, 1.0, 1.0 - rest))
    return -tl.log(-tl.where(is_tiny, -u, corrected))


# ---- draws ---------------------------------------------------------------------------------------


@triton.jit
def _score_kernel(
    logits_ptr,  # [S, VOCAB], lines STRIDE apart
    lines_ptr,  # [P], which of the S
    seeds_ptr,  # int64 [P]
    indices_ptr,  # int64 [P]
    temperatures_ptr,  # fp32 [P]
    maxima_ptr,  # fp32 [P, chunks * SEGMENTS_PER_CHUNK], of `row_limits`
    bests_ptr,  # fp32 [P]
    limits_ptr,  # int32 [P], bits
    keys_ptr,  # int32 [P, chunks], output
    ids_ptr,  # int32 [P, chunks], output
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """The best score of each chunk of each line; grid (P, chunks).

    A line whose best logit is not finite scores NaN or -inf everywhere.
    """
    p, chunk = tl.program_id(0), tl.program_id(1)
    num_segments: tl.constexpr = SEGMENTS_PER_CHUNK
    place = p * tl.num_programs(1) + chunk
    best, limit = tl.load(bests_ptr + p), tl.load(limits_ptr + p)
    temperature = tl.load(temperatures_ptr + p)
    maxima = tl.load(maxima_ptr + place * num_segments + tl.arange(0, num_segments))
    depth = tl.div_rn(best - tl.max(maxima, axis=0), temperature)
    if depth.to(tl.int32, bitcast=True) <= limit:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        is_token = ids < VOCAB
        line_ptr = logits_ptr + tl.load(lines_ptr + p) * STRIDE
        depths = tl.div_rn(best - load_logits(line_ptr + ids, is_token), temperature)
        noise = gumbel(noise_bits(tl.load(seeds_ptr + p), tl.load(indices_ptr + p), ids))
        is_kept = depths.to(tl.int32, bitcast=True) <= limit
        keys = _order(tl.where(is_kept, noise - depths, -float("inf")))
        _store_best(keys_ptr, ids_ptr, place, tl.where(is_token, keys, _LOWEST), ids)
    else:  # most chunks, after a cut: none of its tokens can be drawn
        tl.store(keys_ptr + place, _LOWEST)
        tl.store(ids_ptr + place, _HIGHEST)


# ---- launches ------------------------------------------------------------------------------------


def greedy(logits: Tensor) -> GreedyChoice:
    """logits: fp32, bf16 or fp16 [S, vocab]. Can be captured in a CUDA graph."""
    return _best_chunks(*_bests(logits))


def best_words(logits: Tensor, first_id: int) -> Tensor:
    """As `kernels.sampling.rows.best_words`, of one id or more. Can be captured."""
    keys, ids = _bests(logits)
    num_rows, num_chunks = keys.shape
    words = keys.new_empty(num_rows, dtype=torch.int64)
    if num_rows > 0:
        _best_word_kernel[(num_rows,)](
            keys,
            ids,
            words,
            first_id,
            NUM_CHUNKS=num_chunks,
            BLOCK=triton.next_power_of_2(num_chunks),
            num_warps=1,
        )
    return words


def greedy_of_words(words: Tensor) -> GreedyChoice:
    """As `kernels.sampling.rows.greedy_of_words`. Can be captured."""
    num_ranks, num_rows = words.shape
    assert words.is_contiguous(), f"words with strides {words.stride()}"
    token_ids = words.new_empty(num_rows)
    is_finite = words.new_empty(num_rows, dtype=torch.bool)
    if num_rows > 0:
        _best_rank_kernel[(num_rows,)](
            words, token_ids, is_finite, num_rows, NUM_RANKS=num_ranks, num_warps=1
        )
    return GreedyChoice(token_ids=token_ids, is_finite=is_finite)


def _bests(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best of each chunk of each row: orders and ids, int32 [S, chunks]."""
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK.value)
    keys = logits.new_empty((num_rows, num_chunks), dtype=torch.int32)
    ids = torch.empty_like(keys)
    if num_rows > 0:
        _greedy_kernel[(num_rows, num_chunks)](
            logits, keys, ids, VOCAB=vocab_size, STRIDE=row_stride(logits), num_warps=_WARPS
        )
    return keys, ids


def draw(logits: Tensor, draws: Draws) -> GreedyChoice:
    """Draws a token for each of the P rows in `draws`; does not wait for the GPU.

    logits: fp32, bf16 or fp16 [S, vocab]; not changed.
    """
    num_draws, vocab_size = draws.lines.shape[0], logits.shape[1]
    num_chunks = triton.cdiv(vocab_size, CHUNK.value)
    keys = logits.new_empty((num_draws, num_chunks), dtype=torch.int32)
    ids = torch.empty_like(keys)
    if num_draws > 0:
        limits = row_limits(logits, draws)
        _score_kernel[(num_draws, num_chunks)](
            logits,
            draws.lines,
            draws.seeds,
            draws.indices,
            draws.temperatures,
            limits.maxima,
            limits.bests,
            limits.max_bits,
            keys,
            ids,
            VOCAB=vocab_size,
            STRIDE=row_stride(logits),
            num_warps=_WARPS,
        )
    return _best_chunks(keys, ids)


def _best_chunks(keys: Tensor, ids: Tensor) -> GreedyChoice:
    """The best of each row's chunks; keys, ids: int32 [S, chunks]."""
    num_rows, num_chunks = keys.shape
    token_ids = keys.new_empty(num_rows, dtype=torch.int64)
    is_finite = keys.new_empty(num_rows, dtype=torch.bool)
    if num_rows > 0:
        _best_chunk_kernel[(num_rows,)](
            keys,
            ids,
            token_ids,
            is_finite,
            NUM_CHUNKS=num_chunks,
            BLOCK=triton.next_power_of_2(num_chunks),
            num_warps=1,
        )
    return GreedyChoice(token_ids=token_ids, is_finite=is_finite)

"""Attention over e4m3 numbers two at a time, for kernels that read them where they lie.

Two adjacent numbers of a key are one word of 16 bits, so that words are loaded as operands of the
matrix units are. A tile of words becomes two tiles of float16, of the even and of the odd numbers,
and every product two:

    q k = q_even k_even + q_odd k_odd        p v = (p v_even, p v_odd), interleaved at the end

Functions with IS_FP8 leave the odd part out where a store has no such numbers.

e4m3 numbers are float16 numbers, but queries in bfloat16 may be beyond them: `fit_half` multiplies
each by a power of two, which loses nothing that counts in a sum. Weights p are computed 2^14 times
too large, in their sums as well, so that small ones are not lost either.
"""

import triton
import triton.language as tl

# By which power of two weights are too large: the largest stays below float16's largest.
SHIFT = 14.0

_WIDEN_PAIRS = tl.constexpr(
    """
{
.reg .b32 bytes;
.reg .b16 even, odd;
prmt.b32 bytes, $2, 0, 0x3120;
mov.b32 {even, odd}, bytes;
cvt.rn.f16x2.e4m3x2 $0, even;
cvt.rn.f16x2.e4m3x2 $1, odd;
}
"""
)


@triton.jit
def _widen(words) -> tl.tensor:
    """The numbers of low bytes: put to the upper bits of a float16 they stand for 2^-8 of them."""
    half = ((words & 0x80) << 8) | ((words & 0x7F) << 7)
    numbers = half.to(tl.float16, bitcast=True) * 256.0
    return tl.where((words & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def widen_pairs(  # noqa: ANN201
    words, dtype: tl.constexpr, IS_FP8: tl.constexpr, KNOWS_E4M3: tl.constexpr
):
    """words: uint16 tile; returns what their low and their high bytes stand for, in `dtype`."""
    even, odd = words, words
    if IS_FP8:
        if KNOWS_E4M3:
            even, odd = tl.inline_asm_elementwise(
                _WIDEN_PAIRS,
                "=r,=r,r",
                [words],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            even, odd = _widen(words), _widen(words >> 8)
        even, odd = even.to(dtype), odd.to(dtype)
    return even, odd


@triton.jit
def fit_half(q):  # noqa: ANN201
    """q: tile of queries; returns it times a power of two for each, and the inverses, fp32.

    In float16, the largest number of a query between 2^14 and 2^15; in float32 if it was.
    """
    factor, inverse = fitting_powers(tl.max(tl.abs(q.to(tl.float32)), 1))
    fitted = q.to(tl.float32) * factor[:, None]
    if q.dtype != tl.float32:
        fitted = fitted.to(tl.float16)
    return fitted, inverse


@triton.jit
def fitting_powers(biggest):  # noqa: ANN201
    """biggest: fp32 [n]; the powers of two that bring it between 2^14 and 2^15, and inverses."""
    exponent = biggest.to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 15)  # of nothing but zeros: any power will do
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return factor, inverse


@triton.jit
def split_queries(  # noqa: ANN201
    q, score_scale, ROWS: tl.constexpr, WIDTH: tl.constexpr, IS_FP8: tl.constexpr
):
    """q: [ROWS, head_dim]; returns its even and odd columns, and the factor on their scores."""
    even, odd = q, q
    if IS_FP8:
        fitted, inverse = fit_half(q)
        even, odd = tl.split(tl.reshape(fitted, [ROWS, WIDTH, 2]))
        score_scale = (inverse * score_scale)[:, None]
    return even, odd, score_scale


@triton.jit
def dot_keys(q, q_odd, k, k_odd, IS_FP8: tl.constexpr, scores=None) -> tl.tensor:
    """Scores without their factor, [rows of q, rows of k], added to `scores` if given."""
    scores = tl.dot(q, tl.trans(k), scores)
    if IS_FP8:
        scores = tl.dot(q_odd, tl.trans(k_odd), scores)
    return scores


@triton.jit
def add_values(p, v, v_odd, acc, acc_odd, shrink, IS_FP8: tl.constexpr):  # noqa: ANN201
    """Both sums of weighted values, times `shrink`, and p v more."""
    p = p.to(v.dtype)
    acc = tl.dot(p, v, acc * shrink[:, None])
    if IS_FP8:
        acc_odd = tl.dot(p, v_odd, acc_odd * shrink[:, None])
    return acc, acc_odd


@triton.jit
def joined(acc, acc_odd, IS_FP8: tl.constexpr) -> tl.tensor:
    """[rows, head_dim]."""
    if IS_FP8:
        acc = tl.interleave(acc, acc_odd)
    return acc

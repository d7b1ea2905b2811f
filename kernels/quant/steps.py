"""One step of a product with coded weights, for kernels that walk over a weight's columns.

    acc[n, t] + s[n] * sum over k of w[n, k] x[t, k]          k: the columns of the step

Weights are the left operand, which the matrix units take from registers, where they were decoded. A
scale is applied to the sum over its group, or over a step where its group is wider. `codes` says
what bytes and scales stand for:

    FP8                e4m3; fp32 scales of tiles
    INT4, INT4_ZEROS   0 to 15 in runs (`kernels.quant.int4`); a scale and its zero point in a word
    MXFP4, NVFP4       e2m1 in runs; scales in e8m0, in e4m3 (and a factor for each row)
    MXFP4_SMALL        MXFP4 with scales of at most 2: numbers are scaled when they are decoded to
                       bfloat16, which is exact and takes no instruction more

So every step reads its own sums, and waits for its products. Sums that are handed on as they are
would let the next step decode to registers that Hopper's matrix units, which run beside the
program, have not read yet: Triton 3.6 and 3.7 do not wait for them. And sums are added by `fma`: of
two products that are added, a compiler fuses one or the other, and not the same for every token of
a tile, whose bits would depend on its place.
"""

from enum import IntEnum

import triton
import triton.language as tl

from kernels.quant.dequantize import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    e8m0_factors,
    scale_e2m1,
    subtract_zeros,
    take_apart,
)


class Codes(IntEnum):
    """How a weight is coded."""

    FP8 = 0
    INT4 = 1
    INT4_ZEROS = 2
    MXFP4 = 3
    NVFP4 = 4
    MXFP4_SMALL = 5


MAX_SMALL = 128  # of e8m0: 2
FP8 = tl.constexpr(int(Codes.FP8))
_INT4 = tl.constexpr(int(Codes.INT4))  # and up to INT4_ZEROS: integers
_INT4_ZEROS = tl.constexpr(int(Codes.INT4_ZEROS))
_NVFP4 = tl.constexpr(int(Codes.NVFP4))
_MXFP4_SMALL = tl.constexpr(int(Codes.MXFP4_SMALL))


@triton.jit
def add_tile(
    acc, x, codes, scale_pointers, column, TILE_COLUMNS: tl.constexpr, NUM_TILES: tl.constexpr,
    KNOWS_E4M3: tl.constexpr, USES_PTX: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """FP8: x [T, columns], codes [rows, columns], from `column` on and within one tile."""
    w = decode_e4m3(codes, x.dtype, KNOWS_E4M3, USES_PTX)
    index = tl.minimum(column // TILE_COLUMNS, NUM_TILES - 1)
    scales = tl.load(scale_pointers + index)
    return tl.fma(tl.dot(w, tl.trans(x), input_precision="ieee"), scales[:, None], acc)


@triton.jit
def load_scale(pointers, CODES: tl.constexpr):  # noqa: ANN201
    """Scales in fp32, and zero points, which only integers have."""
    word = tl.load(pointers)
    zero = tl.full(word.shape, 8, tl.int32)
    if CODES == _INT4_ZEROS:
        zero = word & 15
        scale = (word & -16).to(tl.float32, bitcast=True)
    elif CODES == _INT4:
        scale = word.to(tl.float32, bitcast=True)
    elif CODES != _NVFP4:
        scale = decode_e8m0(word)
    else:
        scale = decode_e4m3(word, tl.float32, False, False)
    return scale, zero


@triton.jit
def _group_of(column, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr):
    return tl.minimum(column // GROUP, NUM_GROUPS - 1)


@triton.jit
def _numbers(packed, dtype: tl.constexpr, CODES: tl.constexpr, USES_PTX: tl.constexpr):
    """Floats, or integers from which `_less` takes their zero points."""
    if CODES <= _INT4_ZEROS:
        low, high = take_apart(packed, dtype, USES_PTX)
    else:
        low, high = decode_e2m1(packed, dtype, USES_PTX)
    return low, high


@triton.jit
def _less(numbers, zero, CODES: tl.constexpr):
    if CODES <= _INT4_ZEROS:
        numbers = subtract_zeros(numbers, zero[:, None])
    return numbers


@triton.jit
def add_run(
    acc, low_x, high_x, packed, scale_pointers, column, CODES: tl.constexpr, HALF: tl.constexpr,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, USES_PTX: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """4 bits: a run [rows, HALF] of bytes from `column` on; low_x, high_x: [T, HALF]."""
    if CODES == _MXFP4_SMALL and USES_PTX and low_x.dtype == tl.bfloat16:
        low_factors = e8m0_factors(tl.load(scale_pointers + _group_of(column, GROUP, NUM_GROUPS)))
        high_factors = low_factors
        if GROUP == HALF:
            next_group = _group_of(column + HALF, GROUP, NUM_GROUPS)
            high_factors = e8m0_factors(tl.load(scale_pointers + next_group))
        acc += scaled_run(low_x, high_x, packed, low_factors, high_factors)
    else:
        acc = _add_unscaled(
            acc, low_x, high_x, packed, scale_pointers, column, CODES, HALF, GROUP, NUM_GROUPS,
            USES_PTX,
        )  # fmt: skip
    return acc


@triton.jit
def scaled_run(low_x, high_x, packed, low_factors, high_factors) -> tl.tensor:
    """MXFP4_SMALL in bfloat16 by PTX: the product of a run; factors [rows], of its halves."""
    low, high = scale_e2m1(packed, low_factors[:, None], high_factors[:, None])
    total = tl.dot(low, tl.trans(low_x), input_precision="ieee")
    return tl.dot(high, tl.trans(high_x), total, input_precision="ieee")


@triton.jit
def _add_unscaled(
    acc, low_x, high_x, packed, scale_pointers, column, CODES: tl.constexpr, HALF: tl.constexpr,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, USES_PTX: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scales are applied to sums."""
    scale, zero = load_scale(scale_pointers + _group_of(column, GROUP, NUM_GROUPS), CODES)
    low, high = _numbers(packed, low_x.dtype, CODES, USES_PTX)
    low = _less(low, zero, CODES)
    total = tl.dot(low, tl.trans(low_x), input_precision="ieee")
    if GROUP == HALF:
        acc = tl.fma(total, scale[:, None], acc)
        next_group = _group_of(column + HALF, GROUP, NUM_GROUPS)
        scale, zero = load_scale(scale_pointers + next_group, CODES)
        high = _less(high, zero, CODES)
        total = tl.dot(high, tl.trans(high_x), input_precision="ieee")
    else:
        high = _less(high, zero, CODES)
        total = tl.dot(high, tl.trans(high_x), total, input_precision="ieee")
    return tl.fma(total, scale[:, None], acc)

"""Inputs of a product coded in e4m3, by formulas of coded_tokens.py.

x may be silu(gate) * up, computed on the way: in fp32, rounded once to the inputs' dtype, so that
codes are those of `kernels.silu_mul`'s result. Lines of experts' blocks that have no route are
neither read nor written. Torch twin: `kernels.quant.coded_tokens.reference`.

The first of two pieces is rounded in its bits and not read back from its code: ptxas 12.8 lets that
conversion read another register where it merges codes in pairs.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.instructions import knows_e4m3
from kernels.moe.align import Blocks
from kernels.pdl import pdl_supported
from kernels.quant.coded_tokens import (
    LEAST_FIRST,
    SECOND_PIECE,
    WIDE_SCALE,
    WIDE_SECOND,
    CodedTokens,
    InputForm,
    empty_coded,
)

_LEAST_FIRST = tl.constexpr(LEAST_FIRST)
_SECOND_FACTOR = tl.constexpr(1 / SECOND_PIECE)
_WIDE_FACTOR = tl.constexpr(1 / WIDE_SCALE)
_WIDE_SECOND_FACTOR = tl.constexpr(1 / WIDE_SECOND)
_COLUMNS = 2048  # of a program, where groups are smaller than rows
_NUM_WARPS = 4


@triton.jit
def _round_e4m3(x):
    """The nearest e4m3 number, in fp32: for the interpreter, which cuts off instead."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    # The last place: three bits below the leading one, at least that of subnormal numbers, 2^-9.
    exponent = tl.maximum((bits >> 23) - 127, -6)
    place = ((exponent - 3 + 127) << 23).to(tl.float32, bitcast=True)
    # Adding and subtracting 1.5 * 2^23 places rounds to a multiple of the place, ties to even.
    shift = 12582912.0 * place
    rounded = tl.minimum((size + shift) - shift, 448.0)
    rounded = tl.where(x < 0, -rounded, rounded)
    # The interpreter makes e4m3's NaN of those with all upper places of the mantissa.
    nan = ((bits | 0x700000) & 0x7FF00000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, nan)


@triton.jit
def _nearest_e4m3(x, KNOWS_E4M3: tl.constexpr):
    return (x if KNOWS_E4M3 else _round_e4m3(x)).to(tl.float8e4nv)


@triton.jit
def code_groups(x, PIECES: tl.constexpr, KNOWS_E4M3: tl.constexpr):  # noqa: ANN201
    """x: fp32 [groups, columns].

    Returns scales [groups], and both pieces in e4m3; the second of one is the first.
    """
    largest = tl.max(tl.abs(x), axis=1)
    if PIECES == 1:
        scales = tl.where(largest > 0, largest / 448.0, 1.0)
        # At most 448 but for the rounding of the division. What is not a number must stay so.
        scaled = tl.maximum(x / scales[:, None], -448.0, propagate_nan=tl.PropagateNan.ALL)
        scaled = tl.minimum(scaled, 448.0, propagate_nan=tl.PropagateNan.ALL)
        first = _nearest_e4m3(scaled, KNOWS_E4M3)
        second = first
    else:
        exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 8)
        scales = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
        scales = tl.where(exponent < 255, scales, float("inf"))
        scaled = x * ((261 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        kept = (scaled.to(tl.int32, bitcast=True) + 0x80000) & -0x100000
        rounded = kept.to(tl.float32, bitcast=True)
        rounded = tl.where(tl.abs(scaled) < _LEAST_FIRST, 0.0, rounded)
        first = rounded.to(tl.float8e4nv)
        rest = (scaled - rounded) * _SECOND_FACTOR
        second = _nearest_e4m3(rest, KNOWS_E4M3)
    return scales, first, second


@triton.jit
def _nearest_e5m2(x):
    """x: fp32; returns it in e5m2, which is float16's upper byte, and what is left of x."""
    bits = x.to(tl.float16).to(tl.int16, bitcast=True)
    bits = tl.where(x == x, bits + 0x80, bits)
    kept = (bits & -256).to(tl.float16, bitcast=True).to(tl.float32)
    return (bits >> 8).to(tl.int8).to(tl.float8e5, bitcast=True), x - kept


@triton.jit
def wide_pieces(x):  # noqa: ANN201
    """x: fp32, any shape; returns its two pieces in e5m2."""
    first, rest = _nearest_e5m2(x * _WIDE_FACTOR)
    second, _ = _nearest_e5m2(rest * _WIDE_SECOND_FACTOR)
    return first, second


@triton.jit(do_not_specialize=["num_tokens"])
def _token_groups_kernel(
    x_ptr,  # [T, K], row stride `row_stride`; if IS_GATED [T, 2 K], gate's columns first
    routes_ptr,  # int32 [T] if BLOCK_M
    experts_ptr,  # int32 [T / BLOCK_M] if BLOCK_M
    codes_ptr,  # [PIECES, T, K] e4m3
    scales_ptr,  # [groups, num_tokens] fp32
    num_tokens,
    row_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a group, a power of two
    PIECES: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,  # lines of a block of routes; 0 = every line is coded
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_groups: tl.constexpr = (K + GROUP - 1) // GROUP
    token = tl.program_id(0).to(tl.int64)
    if BLOCK_M > 0:
        # Routes of a block without expert are anything.
        expert = tl.load(experts_ptr + token // BLOCK_M)
        route = tl.load(routes_ptr + token)
        if (expert < 0) | (route < 0):
            return
    groups = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    inside = tl.arange(0, BLOCK)
    columns = groups[:, None] * GROUP + inside[None, :]
    mask = (inside < GROUP)[None, :] & (columns < K)
    x = tl.load(x_ptr + token * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(x_ptr + token * row_stride + K + columns, mask=mask, other=0.0).to(tl.float32)
        x = x / (1.0 + tl.exp(-x)) * up
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    scales, first, second = code_groups(x, PIECES, KNOWS_E4M3)
    places = codes_ptr + token * K + columns
    tl.store(places, first, mask=mask)
    if PIECES == 2:
        second_places = places + num_tokens.to(tl.int64) * K
        tl.store(second_places, second, mask=mask)
    tl.store(scales_ptr + groups * num_tokens + token, scales, mask=groups < num_groups)


def quantize_tokens(x: Tensor, group: int, *, gated: bool = False) -> tuple[Tensor, Tensor]:
    """x: [T, K], rows may be strided; group: columns, a power of two, or K for whole rows.

    gated: x is [T, 2 K] = [gate | up]. Returns [T, K] e4m3 and [ceil(K / group), T] fp32, rounded.
    """
    coded = code_tokens(x, InputForm(pieces=1, group=group), gated=gated)
    return coded.codes[0], coded.scales


def code_tokens(
    x: Tensor, form: InputForm, *, gated: bool = False, blocks: Blocks | None = None
) -> CodedTokens:
    """x, gated, and the group of the form: as of `quantize_tokens`.

    blocks: whose lines x has; of those without a route the result is anything. None = all have one.
    """
    num_tokens, num_columns = x.shape
    assert blocks is None or blocks.routes.numel() == num_tokens, f"{num_tokens} lines"
    group = form.group
    if gated:
        assert num_columns % 2 == 0, f"{num_columns} columns are no two halves"
        num_columns //= 2
    assert x.stride(1) == 1, f"strides {x.stride()}: a row's elements must be adjacent"
    block = triton.next_power_of_2(group)
    assert group in (block, num_columns), f"groups of {group} in {num_columns} columns"
    num_groups = triton.cdiv(num_columns, group)
    block_groups = max(1, min(_COLUMNS // block, triton.next_power_of_2(num_groups)))
    coded = empty_coded(num_tokens, num_columns, form, x)
    if x.numel() == 0:
        return coded
    use_pdl = pdl_supported(x.device)
    _token_groups_kernel[(num_tokens, triton.cdiv(num_groups, block_groups))](
        x,
        None if blocks is None else blocks.routes,
        None if blocks is None else blocks.experts,
        coded.codes,
        coded.scales,
        num_tokens,
        x.stride(0),
        K=num_columns,
        GROUP=group,
        BLOCK_GROUPS=block_groups,
        BLOCK=block,
        PIECES=form.pieces,
        IS_GATED=gated,
        BLOCK_M=0 if blocks is None else blocks.routes.shape[1],
        KNOWS_E4M3=knows_e4m3(x.device),
        USE_PDL=use_pdl,
        num_warps=max(_NUM_WARPS, min(16, block * block_groups // 512)),
        launch_pdl=use_pdl,
    )
    return coded

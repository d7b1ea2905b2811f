"""Inputs of a product rounded to e4m3, with a scale for each token and group of columns.

    s[t, g] = max over the group of |x| / 448        q = round(x / s)        (1 where all are zero)

448 is e4m3's largest number; rounding is to the nearest, ties to even. A group is `group` columns,
or a whole row. Scales are written with the tokens of a group adjacent, as products read them. x may
be silu(gate) * up, computed on the way: in fp32, rounded once to the inputs' dtype, so that codes
are those of `kernels.silu_mul`'s result. Torch twin: `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.pdl import pdl_supported

MAX_E4M3 = 448.0
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
    return tl.where(x < 0, -rounded, rounded)


@triton.jit(do_not_specialize=["num_tokens"])
def _token_groups_kernel(
    x_ptr,  # [T, K], row stride `row_stride`; if IS_GATED [T, 2 K], gate's columns first
    codes_ptr,  # [T, K] e4m3
    scales_ptr,  # [groups, num_tokens] fp32
    num_tokens,
    row_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a group, a power of two
    IS_GATED: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_groups: tl.constexpr = (K + GROUP - 1) // GROUP
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    inside = tl.arange(0, BLOCK)
    columns = groups[:, None] * GROUP + inside[None, :]
    mask = (inside < GROUP)[None, :] & (columns < K)
    x = tl.load(x_ptr + token * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(x_ptr + token * row_stride + K + columns, mask=mask, other=0.0).to(tl.float32)
        x = x / (1.0 + tl.exp(-x)) * up
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    scales = tl.where(largest > 0, largest / 448.0, 1.0)
    # At most 448 but for the rounding of the division.
    scaled = tl.minimum(tl.maximum(x / scales[:, None], -448.0), 448.0)
    if IS_INTERPRETED:
        scaled = _round_e4m3(scaled)
    tl.store(codes_ptr + token * K + columns, scaled.to(tl.float8e4nv), mask=mask)
    tl.store(scales_ptr + groups * num_tokens + token, scales, mask=groups < num_groups)


def quantize_tokens(x: Tensor, group: int, *, gated: bool = False) -> tuple[Tensor, Tensor]:
    """x: [T, K], rows may be strided; group: columns, a power of two, or K for whole rows.

    gated: x is [T, 2 K] = [gate | up]. Returns [T, K] e4m3 and [ceil(K / group), T] fp32.
    """
    num_tokens, num_columns = x.shape
    if gated:
        assert num_columns % 2 == 0, f"{num_columns} columns are no two halves"
        num_columns //= 2
    assert x.stride(1) == 1, f"strides {x.stride()}: a row's elements must be adjacent"
    block = triton.next_power_of_2(group)
    assert group in (block, num_columns), f"groups of {group} in {num_columns} columns"
    num_groups = triton.cdiv(num_columns, group)
    block_groups = max(1, min(_COLUMNS // block, triton.next_power_of_2(num_groups)))
    codes = torch.empty((num_tokens, num_columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_groups, num_tokens), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return codes, scales
    use_pdl = pdl_supported(x.device)
    _token_groups_kernel[(num_tokens, triton.cdiv(num_groups, block_groups))](
        x,
        codes,
        scales,
        num_tokens,
        x.stride(0),
        K=num_columns,
        GROUP=group,
        BLOCK_GROUPS=block_groups,
        BLOCK=block,
        IS_GATED=gated,
        IS_INTERPRETED=x.device.type != "cuda",
        USE_PDL=use_pdl,
        num_warps=max(_NUM_WARPS, min(16, block * block_groups // 512)),
        launch_pdl=use_pdl,
    )
    return codes, scales


def reference(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """`quantize_tokens` in torch; K must be a multiple of `group`."""
    groups = x.float().reshape(x.shape[0], -1, group)
    largest = groups.abs().amax(dim=2)
    scales = torch.where(largest > 0, largest / MAX_E4M3, torch.ones_like(largest))
    scaled = (groups / scales[:, :, None]).clamp(-MAX_E4M3, MAX_E4M3)
    return scaled.to(torch.float8_e4m3fn).reshape(x.shape), scales.T.contiguous()

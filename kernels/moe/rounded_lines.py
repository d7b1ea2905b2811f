"""Inputs of experts rounded to e4m3, a scale a line, with what products of integers need of them.

    s[t] = max over the line of |x| / 448        q = round(x / s)
    sums[g, t] = 2^-9 times the sum of q over group g

as kernels.quant.coded_tokens rounds whole rows. A weight's zero point is multiplied with the sum of
a group's inputs; 2^-9 is what a number of four bits counts as e4m3 (rounded_int4.py). Lines without
a route, of which blocks of routes are padded with, are neither read nor written. Torch twin:
`reference`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.instructions import knows_e4m3
from kernels.moe.align import Blocks
from kernels.pdl import pdl_supported
from kernels.quant import coded_tokens
from kernels.quant.coded_tokens import InputForm
from kernels.quant.token_groups import code_groups

PLACE = 2.0**-9  # e4m3's least number
_PLACE = tl.constexpr(PLACE)
_COLUMNS_A_WARP = 512
_MAX_WARPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedLines:
    """Inputs [L, K] as products with integers of four bits take them."""

    codes: Tensor  # [L, K] e4m3
    scales: Tensor  # [L] fp32
    sums: Tensor  # [K / group, L] fp32, in places
    group: int  # columns of a sum

    @property
    def num_lines(self) -> int:
        return len(self.codes)


@triton.jit(do_not_specialize=["num_lines"])
def _rounded_lines_kernel(
    x_ptr,  # [num_lines, K]
    routes_ptr,  # int32 [num_lines] if BLOCK_M
    experts_ptr,  # int32 [num_lines / BLOCK_M] if BLOCK_M
    # outputs
    codes_ptr,  # [num_lines, K] e4m3
    scales_ptr,  # [num_lines] fp32
    sums_ptr,  # [K / GROUP, num_lines] fp32
    # constants
    num_lines,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,  # of a line, a power of two
    BLOCK_M: tl.constexpr,  # lines of a block of routes; 0 = each line is rounded
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if BLOCK_M > 0:
        # Routes of a block without expert are anything.
        expert = tl.load(experts_ptr + line // BLOCK_M)
        route = tl.load(routes_ptr + line)
        if (expert < 0) | (route < 0):
            return
    groups = tl.arange(0, BLOCK_GROUPS)
    columns = tl.arange(0, BLOCK_GROUPS * GROUP)[None, :]
    x = tl.load(x_ptr + line * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    scale, codes, _ = code_groups(x, 1, KNOWS_E4M3)
    tl.store(codes_ptr + line * K + columns, codes, mask=columns < K)
    tl.store(scales_ptr + line + tl.arange(0, 1), scale)
    sums = tl.sum(tl.reshape(codes.to(tl.float32), (BLOCK_GROUPS, GROUP)), axis=1)
    tl.store(sums_ptr + groups * num_lines + line, sums * _PLACE, mask=groups < K // GROUP)


def round_lines(x: Tensor, group: int, blocks: Blocks | None = None) -> RoundedLines:
    """x: [L, K] with rows that adjoin; group: columns of a sum, a power of two that divides K.

    blocks: whose lines x has; of those without a route the result is anything. None = all have one.
    """
    num_lines, num_columns = x.shape
    assert x.is_contiguous(), f"x has strides {x.stride()}"
    assert num_columns % group == 0, f"groups of {group} in {num_columns} columns"
    assert blocks is None or blocks.routes.numel() == num_lines, f"{num_lines} lines"
    num_groups = num_columns // group
    block_groups = triton.next_power_of_2(num_groups)
    lines = RoundedLines(
        codes=torch.empty_like(x, dtype=torch.float8_e4m3fn),
        scales=x.new_empty(num_lines, dtype=torch.float32),
        sums=x.new_empty((num_groups, num_lines), dtype=torch.float32),
        group=group,
    )
    if num_lines == 0:
        return lines
    use_pdl = pdl_supported(x.device)
    num_warps = max(4, min(_MAX_WARPS, block_groups * group // _COLUMNS_A_WARP))
    _rounded_lines_kernel[(num_lines,)](
        x,
        None if blocks is None else blocks.routes,
        None if blocks is None else blocks.experts,
        lines.codes,
        lines.scales,
        lines.sums,
        num_lines,
        K=num_columns,
        GROUP=group,
        BLOCK_GROUPS=block_groups,
        BLOCK_M=0 if blocks is None else blocks.routes.shape[1],
        KNOWS_E4M3=knows_e4m3(x.device),
        USE_PDL=use_pdl,
        num_warps=num_warps,
        launch_pdl=use_pdl,
    )
    return lines


def reference(x: Tensor, group: int) -> RoundedLines:
    """The same of all lines."""
    coded = coded_tokens.reference(x, InputForm(pieces=1, group=x.shape[1]))
    codes = coded.codes[0]
    sums = codes.float().unflatten(1, (-1, group)).sum(dim=2) * PLACE
    return RoundedLines(codes=codes, scales=coded.scales[0], sums=sums.T.contiguous(), group=group)

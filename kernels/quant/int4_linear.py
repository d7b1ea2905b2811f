"""Linear maps with 4-bit weights and inputs in 16 bits, at the speed of reading the weights.

    y[t, n] = f[n] * sum over groups j of s[n, j] * d[t, n, j]  +  b[n]
    d[t, n, j] = sum over k in group j of x[t, k] (q[n, k] - z[n, j])

and silu(gate) * up of two such products. q are integers, or floats (e2m1) without zero points; only
floats of NVFP4 have factors f. q - z is exact in the inputs' dtype, so nothing is rounded but the
sums, which are fp32. Torch twin: `engine.layers.quantized_weight.dequantize` and
`torch.nn.functional.linear`.

Bytes are in the order of `kernels.quant.int4`: a tile of them is two tiles of adjacent columns, for
two products. A scale and its zero point are one word: the numbers of a group wait for one load. The
rest is as in `kernels.quant.fp8_linear`, whose tilings these are with `block_k` not used.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import device_properties, stages_that_fit
from kernels.instructions import uses_ptx
from kernels.linear.small import (
    add_parts,
    load_tokens,
    prefetch_rows,
    store_rows,
    weight_rows,
)
from kernels.pdl import pdl_supported
from kernels.quant.fp8_linear import LINE_BYTES, QuantConfig, check_inputs, choose_config
from kernels.quant.sizes import MIN_HALF
from kernels.quant.steps import Codes, add_run

_SIZE_MULTIPLE = 16
_ZERO_BITS = 15


def supports_int4(packed: Tensor, half: int) -> bool:
    """Whether this kernel reads `packed` [N, K / 2] in runs of 2 * half."""
    return (
        packed.is_contiguous()
        and packed.data_ptr() % 16 == 0
        and packed.shape[0] % _SIZE_MULTIPLE == 0
        and half >= MIN_HALF
    )


def join_zeros(scales: Tensor, zeros: Tensor | None) -> Tensor | None:
    """scales: [N, groups] fp32, zeros: uint8 of 0 to 15; returns one int32 for both.

    The zero point takes the lowest bits of the scale, which are zero if the scale has been 16 bits
    wide. None = a scale has not, and its zero point is not 8.
    """
    words = scales.contiguous().view(torch.int32)
    if zeros is None:
        return words
    if bool((words & _ZERO_BITS).any()):
        return None
    return words | zeros


@triton.jit(do_not_specialize=["num_tokens"])
def _int4_linear_kernel(
    x_ptr,  # [num_tokens, K], row stride STRIDE_X
    packed_ptr,  # [N, K / 2] uint8
    scales_ptr,  # [N, NUM_GROUPS] as CODES says
    factors_ptr,  # [N] fp32 if HAS_FACTORS
    bias_ptr,  # [N] if HAS_BIAS
    y_ptr,  # [num_tokens, N], or N // 2 if IS_GATED
    partials_ptr,  # [tiles, SPLIT_K, num_tokens, BLOCK_N] fp32 if SPLIT_K > 1
    counters_ptr,  # [tiles] zeros, left as zeros
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART_K: tl.constexpr,  # columns of a part, a multiple of 2 * HALF
    NUM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    USES_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    MASK_K: tl.constexpr = PART_K * SPLIT_K != K
    tile = tl.program_id(0)
    part = tl.program_id(1)
    k_start = part * PART_K
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = weight_rows(columns, N, IS_GATED)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch_rows(packed_ptr, w_rows, k_start // 2, K // 2, PREFETCH, LINE_BYTES)
        tl.extra.cuda.gdc_wait()
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    offsets_k = tl.arange(0, HALF)
    x_pointers = x_ptr + tokens[:, None].to(tl.int64) * STRIDE_X + k_start + offsets_k[None, :]
    packed_pointers = packed_ptr + w_rows[:, None] * (K // 2) + k_start // 2 + offsets_k[None, :]
    scale_pointers = scales_ptr + w_rows * NUM_GROUPS
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # The number of stages is named, so that loads of scales are pipelined with the others.
    for k in tl.range(0, PART_K, 2 * HALF, num_stages=NUM_STAGES):
        num_left = K - k_start - k
        low_x = load_tokens(x_pointers + k, is_token, offsets_k, num_left, MASK_K)
        high_x = load_tokens(x_pointers + k + HALF, is_token, offsets_k, num_left - HALF, MASK_K)
        if MASK_K:
            packed = tl.load(packed_pointers + k // 2, mask=offsets_k[None, :] < num_left, other=0)
        else:
            packed = tl.load(packed_pointers + k // 2)
        acc = add_run(
            acc, low_x, high_x, packed, scale_pointers, k_start + k, CODES, HALF, GROUP, NUM_GROUPS,
            USES_PTX,
        )  # fmt: skip
    if HAS_FACTORS:
        acc *= tl.load(factors_ptr + w_rows)[:, None]
    acc = tl.trans(acc)
    is_last = True
    if SPLIT_K > 1:
        is_last, acc = add_parts(
            acc, partials_ptr, counters_ptr, tile, part, num_tokens, BLOCK_M, BLOCK_N, SPLIT_K
        )
    if is_last:
        store_rows(
            acc, bias_ptr, y_ptr, w_rows, tile * BLOCK_N, tokens, num_tokens, N, HAS_BIAS,
            BLOCK_M, BLOCK_N, IS_GATED,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitOperand:
    """A weight as these kernels take it."""

    packed: Tensor  # [N, K / 2] uint8 in runs of 2 * half
    scales: Tensor  # [N, groups]: int32 of a scale and its zero point, or uint8
    codes: Codes
    half: int
    group: int  # inputs that share a scale
    factors: Tensor | None = None  # [N] fp32; NVFP4
    bias: Tensor | None = None  # [N]


@cache
def fitted_config(config: QuantConfig, half: int, memory_bytes: int) -> QuantConfig:
    """`config` with as many stages as the shared memory holds."""
    stage_bytes = half * (config.block_n + 4 * config.block_m) + 8 * config.block_n
    num_stages = stages_that_fit(
        config.num_stages, stage_bytes=stage_bytes, shared_memory_bytes=memory_bytes
    )
    return replace(config, num_stages=max(2, num_stages))


def int4_linear(
    x: Tensor,
    weight: FourBitOperand,
    counters: Tensor,
    config: QuantConfig | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """x: [T, K], rows may be strided; counters: from `kernels.linear.small.tile_counters`.

    Returns [T, N]; gated: silu(gate) * up, [T, N / 2], with rows of gate first in the weight.
    """
    num_rows, num_columns = weight.packed.shape[0], 2 * weight.packed.shape[1]
    num_tokens = x.shape[0]
    y = x.new_empty((num_tokens, num_rows // 2 if gated else num_rows))
    if y.numel() == 0:
        return y
    check_inputs(x, num_columns)
    wanted = config or choose_config(num_tokens, num_rows, num_columns)
    memory_bytes = device_properties(x.device).shared_memory_per_block_bytes
    cut = fitted_config(wanted, weight.half, memory_bytes)
    num_tiles = triton.cdiv(num_rows, cut.block_n)
    num_token_tiles = triton.cdiv(num_tokens, cut.block_m)
    partials = y
    if cut.split_k > 1:
        assert num_token_tiles == 1, f"{num_tokens} tokens in parts of columns"
        assert num_tiles <= counters.numel(), f"{num_tiles} tiles, {counters.numel()} counters"
        partials = x.new_empty(
            (num_tiles, cut.split_k, num_tokens, cut.block_n), dtype=torch.float32
        )
    use_pdl = pdl_supported(x.device)
    run = 2 * weight.half
    _int4_linear_kernel[(num_tiles, cut.split_k, num_token_tiles)](
        x,
        weight.packed,
        weight.scales,
        weight.factors,
        y if weight.bias is None else weight.bias,
        y,
        partials,
        counters,
        num_tokens,
        N=num_rows,
        K=num_columns,
        STRIDE_X=x.stride(0),
        HALF=weight.half,
        GROUP=weight.group,
        NUM_GROUPS=weight.scales.shape[1],
        CODES=weight.codes,
        HAS_FACTORS=weight.factors is not None,
        HAS_BIAS=weight.bias is not None,
        IS_GATED=gated,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        SPLIT_K=cut.split_k,
        PART_K=triton.cdiv(num_columns, run * cut.split_k) * run,
        NUM_STAGES=cut.num_stages,
        PREFETCH=cut.prefetch_bytes,
        USES_PTX=uses_ptx(x.device),
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        launch_pdl=use_pdl,
    )
    return y

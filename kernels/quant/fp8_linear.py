"""Linear maps with FP8 weights and inputs in 16 bits, at the speed of reading the weights.

    y[t, n] = sum over tiles j of  s[n / rows, j] * sum over k in tile j of x[t, k] q[n, k]  +  b[n]

and silu(gate) * up of two such products. q are e4m3 numbers, turned into the inputs' dtype exactly,
so products are those of the inputs as they are; sums are fp32. Torch twin:
`engine.layers.quantized_weight.dequantize` and `torch.nn.functional.linear`.

A program owns BLOCK_N rows of the weight and BLOCK_M tokens. As in `kernels.linear.small`, a weight
of few rows is split by columns, parts are added in their order, and with programmatic dependent
launch the weight is prefetched while the kernel before still runs. The weight tile is the left
operand, which the matrix units take from registers, where it was decoded.

The tiling `INVARIANT` is for any number of tokens and adds no parts: with it a token's result does
not depend on its batch.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import device_properties, stages_that_fit
from kernels.instructions import knows_e4m3, uses_ptx
from kernels.linear.small import (
    add_parts,
    load_tokens,
    prefetch_rows,
    store_rows,
    weight_rows,
)
from kernels.pdl import pdl_supported
from kernels.quant.steps import add_tile

MAX_ONE_TILE = 64  # tokens; more are cut into tiles, and weights are read once for each
_SIZE_MULTIPLE = 16  # rows and columns
LINE_BYTES = tl.constexpr(128)  # of a cache line


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """The tiling of a product; sizes in elements."""

    block_m: int  # tokens of a program
    block_n: int = 64  # weight rows of a program, a multiple of 64
    block_k: int = 128  # columns of a pipeline stage; no more than share a scale
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 6
    prefetch_bytes: int = 512  # of each row before x is ready: 0 or a power of two >= 128
    starts_next_early: bool = True  # let the next kernel start at once, not after the last load


INVARIANT = QuantConfig(block_m=64, num_stages=5)
_MANY_TOKENS = QuantConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4)
_NARROW = QuantConfig(block_m=128, block_n=64, block_k=128, num_stages=4)
FEW_TILES = 256  # fewer tiles of 128 by 128 leave multiprocessors idle: then tiles are halved
# Chosen by what the compiler reports (registers, shared memory), and by one measurement on an H200:
# with twelve warps a multiprocessor, 64 weight rows and four warps a program, INT4 reached a third
# of the memory's rate at 1 and at 16 tokens, and its instructions less than half of what a
# multiprocessor issues. So few tokens have 24 warps: programs of 128 rows, which also read the
# inputs half as often, three a multiprocessor.
_PROGRAMS = 384
_FEW = QuantConfig(block_m=16, block_n=128, num_warps=8, num_stages=4)
_SOME = {32: QuantConfig(block_m=32, num_stages=4), 64: QuantConfig(block_m=64, num_stages=3)}
_LEAST_PART = 512  # columns
_MAX_PARTS = {16: 8, 32: 4, 64: 4}  # by block_m: parts are written and read again


def choose_config(num_tokens: int, num_rows: int, num_columns: int) -> QuantConfig:
    """The tiling for `num_tokens` tokens and a weight [num_rows, num_columns]."""
    if num_tokens > MAX_ONE_TILE:
        num_tiles = triton.cdiv(num_tokens, 128) * triton.cdiv(num_rows, 128)
        return _NARROW if num_tiles < FEW_TILES else _MANY_TOKENS
    config = _FEW if num_tokens <= _FEW.block_m else _SOME[triton.next_power_of_2(num_tokens)]
    most = min(_MAX_PARTS[config.block_m], num_columns // _LEAST_PART)
    split_k = 1
    while 2 * split_k <= most and split_k * triton.cdiv(num_rows, config.block_n) < _PROGRAMS:
        split_k *= 2
    return replace(config, split_k=split_k)


@cache
def fitted_config(config: QuantConfig, tile_columns: int, memory_bytes: int) -> QuantConfig:
    """`config` with stages that fit the shared memory, and columns that share a scale."""
    block_k = config.block_k
    while tile_columns % block_k:
        block_k //= 2
    stage_bytes = block_k * (config.block_n + 2 * config.block_m)
    num_stages = stages_that_fit(
        config.num_stages, stage_bytes=stage_bytes, shared_memory_bytes=memory_bytes
    )
    return replace(config, block_k=block_k, num_stages=max(2, num_stages))


def supports_fp8(weight: Tensor, tile_columns: int) -> bool:
    """Whether this kernel reads `weight` [N, K] with scales for `tile_columns` inputs."""
    return (
        weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and all(size % _SIZE_MULTIPLE == 0 for size in weight.shape)
        and (tile_columns >= weight.shape[1] or tile_columns % _SIZE_MULTIPLE == 0)
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_linear_kernel(
    x_ptr,  # [num_tokens, K], row stride STRIDE_X
    codes_ptr,  # [N, K] uint8
    scales_ptr,  # [ceil(N / TILE_ROWS), NUM_TILES] fp32
    bias_ptr,  # [N] if HAS_BIAS
    y_ptr,  # [num_tokens, N], or N // 2 if IS_GATED
    partials_ptr,  # [tiles, SPLIT_K, num_tokens, BLOCK_N] fp32 if SPLIT_K > 1
    counters_ptr,  # [tiles] zeros, left as zeros
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART_K: tl.constexpr,  # columns of a part, a multiple of BLOCK_K
    NUM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
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
            prefetch_rows(codes_ptr, w_rows, k_start, K, PREFETCH, LINE_BYTES)
        tl.extra.cuda.gdc_wait()
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    k_offsets = tl.arange(0, BLOCK_K)
    x_pointers = x_ptr + tokens[:, None].to(tl.int64) * STRIDE_X + k_start + k_offsets[None, :]
    codes_pointers = codes_ptr + w_rows[:, None] * K + k_start + k_offsets[None, :]
    scale_pointers = scales_ptr + w_rows // TILE_ROWS * NUM_TILES
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # The number of stages is named, so that loads of scales are pipelined with the others.
    for k in tl.range(0, PART_K, BLOCK_K, num_stages=NUM_STAGES):
        num_left = K - k_start - k
        x = load_tokens(x_pointers + k, is_token, k_offsets, num_left, MASK_K)
        if MASK_K:
            codes = tl.load(codes_pointers + k, mask=k_offsets[None, :] < num_left, other=0)
        else:
            codes = tl.load(codes_pointers + k)
        acc = add_tile(
            acc, x, codes, scale_pointers, k_start + k, TILE_COLUMNS, NUM_TILES, KNOWS_E4M3,
            USES_PTX,
        )  # fmt: skip
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
class Fp8Operand:
    """A weight as these kernels take it."""

    codes: Tensor  # [N, K] e4m3
    scales: Tensor  # [ceil(N / tile_rows), ceil(K / tile_columns)] fp32
    tile_rows: int
    tile_columns: int
    bias: Tensor | None = None  # [N]


def fp8_linear(
    x: Tensor,
    weight: Fp8Operand,
    counters: Tensor,
    config: QuantConfig | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """x: [T, K], rows may be strided; counters: from `kernels.linear.small.tile_counters`.

    Returns [T, N]; gated: silu(gate) * up, [T, N / 2], with rows of gate first in the weight.
    """
    num_rows, num_columns = weight.codes.shape
    num_tokens = x.shape[0]
    y = x.new_empty((num_tokens, num_rows // 2 if gated else num_rows))
    if y.numel() == 0:
        return y
    check_inputs(x, num_columns)
    wanted = config or choose_config(num_tokens, num_rows, num_columns)
    memory_bytes = device_properties(x.device).shared_memory_per_block_bytes
    tile_columns = min(weight.tile_columns, num_columns)
    num_scales = weight.scales.shape[1]
    cut = fitted_config(wanted, tile_columns if num_scales > 1 else wanted.block_k, memory_bytes)
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
    _fp8_linear_kernel[(num_tiles, cut.split_k, num_token_tiles)](
        x,
        weight.codes.view(torch.uint8),
        weight.scales,
        y if weight.bias is None else weight.bias,
        y,
        partials,
        counters,
        num_tokens,
        N=num_rows,
        K=num_columns,
        STRIDE_X=x.stride(0),
        TILE_ROWS=weight.tile_rows,
        TILE_COLUMNS=tile_columns,
        NUM_TILES=num_scales,
        HAS_BIAS=weight.bias is not None,
        IS_GATED=gated,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        SPLIT_K=cut.split_k,
        PART_K=triton.cdiv(num_columns, cut.block_k * cut.split_k) * cut.block_k,
        NUM_STAGES=cut.num_stages,
        PREFETCH=cut.prefetch_bytes,
        KNOWS_E4M3=knows_e4m3(x.device),
        USES_PTX=uses_ptx(x.device),
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        launch_pdl=use_pdl,
    )
    return y


def check_inputs(x: Tensor, num_columns: int) -> None:
    """Assert that kernels with 16-byte loads can read x [T, K]."""
    assert x.shape[1] == num_columns, f"{x.shape} against {num_columns} columns"
    assert x.stride(1) == 1, f"strides {x.stride()}: a row's elements must be adjacent"
    assert x.stride(0) % 8 == 0, f"strides {x.stride()}: every row must start on 16 bytes"
    assert x.data_ptr() % 16 == 0, "x must start on 16 bytes"

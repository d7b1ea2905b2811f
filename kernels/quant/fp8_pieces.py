"""Linear maps with FP8 weights and inputs in two pieces, at the speed of reading the weights.

    y[t, n] = sum over k of  (s w)[n, k] x[t, k]  +  b[n],       x = sx (q + r / 32)

and silu(gate) * up of two such products. Hopper's matrix units multiply e4m3 numbers as they lie in
shared memory, so no instruction is spent on a weight; inputs are coded as in
`kernels.quant.coded_tokens`, which loses nothing. The units add products in fewer bits than fp32:
sums of BLOCK_K columns are added to the others in fp32 registers. Torch twin:
`engine.layers.quantized_weight.dequantize` and `torch.nn.functional.linear`.

The gate may leave its result in pieces, too, for the product after it: of a tile's outputs each
token has one scale. The rest is as in `kernels.quant.fp8_linear`.
"""

from dataclasses import replace
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import device_properties
from kernels.linear.small import (
    add_parts,
    load_tokens,
    prefetch_rows,
    store_rows,
    weight_rows,
)
from kernels.pdl import pdl_supported
from kernels.quant.coded_tokens import SECOND_PIECE, CodedTokens, InputForm, empty_coded
from kernels.quant.decode import knows_e4m3
from kernels.quant.fp8_linear import (
    LINE_BYTES,
    Fp8Operand,
    QuantConfig,
    check_inputs,
    fitted_config,
)
from kernels.quant.token_groups import code_groups

MAX_TOKENS = 64
_SECOND_PIECE = tl.constexpr(SECOND_PIECE)
_SIZE_MULTIPLE = 16
# Measured on an H200 with Qwen3-8B's weights (load_tests/results/quantisation.md); those of 32
# tokens by arithmetic. Every program reads the inputs of its columns: with many tokens programs own
# more rows, else inputs, not weights, take the time. Of fewer than 16 tokens a tile the compiler
# makes no product of these matrix units.
_CONFIGS = {
    16: QuantConfig(block_m=16, block_n=64, num_warps=4, num_stages=6),
    32: QuantConfig(block_m=32, block_n=128, num_warps=8, num_stages=4),
    64: QuantConfig(block_m=64, block_n=128, num_warps=8, num_stages=3),
}
_SQUARE = QuantConfig(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=4)
_SQUARE_TO = 4096  # rows
_TALL = QuantConfig(block_m=64, block_n=256, num_warps=8, num_stages=4)
_TALL_FROM = 16384  # rows
# Inputs that the programs code themselves keep them longer.
_CODING = QuantConfig(block_m=16, block_n=128, num_warps=4, num_stages=4)
_PROGRAMS = {16: 384, 32: 192, 64: 128}  # all run at once
_PROGRAMS_CODING = 192
_LEAST_PART = 1024  # columns


def choose_config(
    num_tokens: int, num_rows: int, num_columns: int, *, is_coded: bool = True
) -> QuantConfig:
    """The tiling for `num_tokens` tokens and a weight [num_rows, num_columns].

    is_coded: whether the inputs are coded before.
    """
    bucket = max(16, int(triton.next_power_of_2(num_tokens)))
    config, programs = _CONFIGS[bucket], _PROGRAMS[bucket]
    if bucket == _CODING.block_m and not is_coded:
        config, programs = _CODING, _PROGRAMS_CODING
    elif bucket == _SQUARE.block_m and max(num_rows, num_columns) <= _SQUARE_TO:
        config = _SQUARE
    elif bucket == _TALL.block_m and num_rows >= _TALL_FROM:
        return _TALL
    most, split_k = num_columns // _LEAST_PART, 1
    while 2 * split_k <= most and split_k * triton.cdiv(num_rows, config.block_n) < programs:
        split_k *= 2
    return replace(config, split_k=split_k)


def supports_pieces(weight: Fp8Operand, dtype: torch.dtype) -> bool:
    """Whether this kernel computes with `weight` and inputs in `dtype`, on their device."""
    capability = device_properties(weight.codes.device).capability
    tile_columns = weight.tile_columns
    return (
        dtype is torch.bfloat16  # pieces of a float16 are not all of it
        and capability is not None
        and capability[0] == 9
        and weight.codes.is_contiguous()
        and weight.codes.data_ptr() % 16 == 0
        and all(size % _SIZE_MULTIPLE == 0 for size in weight.codes.shape)
        and (weight.scales.shape[1] == 1 or tile_columns % 64 == 0)
    )


@triton.jit
def load_codes(pointers, k_offsets, num_columns, MASK_K: tl.constexpr) -> tl.tensor:
    """Tile of the weight; its rows always exist."""
    if MASK_K:
        w = tl.load(pointers, mask=k_offsets[None, :] < num_columns, other=0.0)
    else:
        w = tl.load(pointers)
    return w


@triton.jit
def _multiply(w, first, second, KNOWS_E4M3: tl.constexpr) -> tl.tensor:
    """w x^T, [rows, tokens], of x in two pieces."""
    if not KNOWS_E4M3:  # the interpreter
        w, first, second = w.to(tl.float32), first.to(tl.float32), second.to(tl.float32)
    return tl.dot(w, tl.trans(first)) + tl.dot(w, tl.trans(second)) * _SECOND_PIECE


@triton.jit
def add_scaled(
    acc, total, scale_pointers, column, TILE_COLUMNS: tl.constexpr, NUM_TILES: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """acc + total, scaled where the weight has more than one scale a row."""
    if NUM_TILES > 1:
        index = tl.minimum(column // TILE_COLUMNS, NUM_TILES - 1)
        acc = tl.fma(total, tl.load(scale_pointers + index)[:, None], acc)
    else:
        acc += total
    return acc


@triton.jit
def _scaled(
    acc, scale_pointers, x_scale_pointers, NUM_TILES: tl.constexpr, X_GROUPS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """acc, by scales that are the same for all columns."""
    if NUM_TILES == 1:
        acc *= tl.load(scale_pointers)[:, None]
    if X_GROUPS == 1:
        acc *= tl.load(x_scale_pointers)[None, :]
    return acc


@triton.jit
def store_coded(
    acc, bias_ptr, codes_ptr, scales_ptr, w_rows, tile, tokens, num_tokens, N: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
) -> None:  # fmt: skip
    """silu(gate) * up of acc [BLOCK_M, BLOCK_N], coded; every column is in the weight."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + w_rows).to(tl.float32)[None, :]
    NUM_OUTPUTS: tl.constexpr = N // 2
    WIDTH: tl.constexpr = BLOCK_N // 2
    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, WIDTH, 2)))
    scales, first, second = code_groups(gate * tl.sigmoid(gate) * up, PIECES, KNOWS_E4M3)
    is_token = tokens < num_tokens
    columns = tile * WIDTH + tl.arange(0, WIDTH)
    places = codes_ptr + tokens[:, None].to(tl.int64) * NUM_OUTPUTS + columns[None, :]
    tl.store(places, first, mask=is_token[:, None])
    if PIECES == 2:
        places += num_tokens.to(tl.int64) * NUM_OUTPUTS
        tl.store(places, second, mask=is_token[:, None])
    tl.store(scales_ptr + tile * num_tokens + tokens, scales, mask=is_token)


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_pieces_kernel(
    x_ptr,  # [2, num_tokens, K] e4m3; if X_GROUPS is 0 [num_tokens, K], not coded
    x_scales_ptr,  # [X_GROUPS, num_tokens] fp32
    codes_ptr,  # [N, K] e4m3
    scales_ptr,  # [ceil(N / TILE_ROWS), NUM_TILES] fp32
    bias_ptr,  # [N] if HAS_BIAS
    y_ptr,  # [num_tokens, N], or N // 2 if IS_GATED; if IS_CODED [2, num_tokens, N // 2] e4m3
    y_scales_ptr,  # [tiles, num_tokens] fp32 if IS_CODED
    partials_ptr,  # [tiles, SPLIT_K, num_tokens, BLOCK_N] fp32 if SPLIT_K > 1
    counters_ptr,  # [tiles] zeros, left as zeros
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_CODED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART_K: tl.constexpr,  # columns of a part, a multiple of BLOCK_K
    NUM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
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
    tokens = tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    k_offsets = tl.arange(0, BLOCK_K)
    x_pointers = x_ptr + tokens[:, None].to(tl.int64) * STRIDE_X + k_start + k_offsets[None, :]
    second_offset = num_tokens.to(tl.int64) * K
    codes_pointers = codes_ptr + w_rows[:, None] * K + k_start + k_offsets[None, :]
    scale_pointers = scales_ptr + w_rows // TILE_ROWS * NUM_TILES
    x_scale_pointers = x_scales_ptr + tl.minimum(tokens, num_tokens - 1)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # The number of stages is named, so that loads of scales are pipelined with the others.
    for k in tl.range(0, PART_K, BLOCK_K, num_stages=NUM_STAGES):
        num_left = K - k_start - k
        w = load_codes(codes_pointers + k, k_offsets, num_left, MASK_K)
        x = load_tokens(x_pointers + k, is_token, k_offsets, num_left, MASK_K)
        if X_GROUPS == 0:
            x_scales, first, second = code_groups(x.to(tl.float32), 2, KNOWS_E4M3)
            total = _multiply(w, first, second, KNOWS_E4M3) * x_scales[None, :]
        else:
            second_pointers = x_pointers + second_offset + k
            second = load_tokens(second_pointers, is_token, k_offsets, num_left, MASK_K)
            total = _multiply(w, x, second, KNOWS_E4M3)
        if X_GROUPS > 1:
            group = tl.minimum((k_start + k) // X_GROUP, X_GROUPS - 1)
            total *= tl.load(x_scale_pointers + group * num_tokens)[None, :]
        acc = add_scaled(acc, total, scale_pointers, k_start + k, TILE_COLUMNS, NUM_TILES)
    acc = tl.trans(_scaled(acc, scale_pointers, x_scale_pointers, NUM_TILES, X_GROUPS))
    is_last = True
    if SPLIT_K > 1:
        is_last, acc = add_parts(
            acc, partials_ptr, counters_ptr, tile, part, num_tokens, BLOCK_M, BLOCK_N, SPLIT_K
        )
    if is_last:
        if IS_CODED:
            store_coded(
                acc, bias_ptr, y_ptr, y_scales_ptr, w_rows, tile, tokens, num_tokens, N, HAS_BIAS,
                BLOCK_M, BLOCK_N, 2, KNOWS_E4M3,
            )  # fmt: skip
        else:
            store_rows(
                acc, bias_ptr, y_ptr, w_rows, tile * BLOCK_N, tokens, num_tokens, N, HAS_BIAS,
                BLOCK_M, BLOCK_N, IS_GATED,
            )  # fmt: skip


def fp8_pieces_linear(
    x: CodedTokens | Tensor,
    weight: Fp8Operand,
    dtype: torch.dtype,
    counters: Tensor,
    config: QuantConfig | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """x: [T, K] in two pieces, or as they are: then every program codes what it reads.

    counters: from `kernels.linear.small.tile_counters`. Returns [T, N] in `dtype`; gated:
    silu(gate) * up, [T, N / 2], with rows of gate first in the weight.
    """
    num_rows = weight.codes.shape[0]
    num_outputs = num_rows // 2 if gated else num_rows
    y = counters.new_empty((_num_tokens(x), num_outputs), dtype=dtype)
    if y.numel() > 0:
        _launch(x, weight, y, None, counters, _cut(x, weight, config), is_gated=gated)
    return y


def fp8_pieces_gate(
    x: CodedTokens, weight: Fp8Operand, counters: Tensor, config: QuantConfig | None = None
) -> CodedTokens:
    """silu(gate) * up in two pieces, [T, N / 2], with a group for each tile of the weight.

    N must be a multiple of the tile's rows, as `codes_gate` says.
    """
    cut = _cut(x, weight, config)
    num_rows = weight.codes.shape[0]
    assert num_rows % cut.block_n == 0, f"{num_rows} rows in tiles of {cut.block_n}"
    form = InputForm(pieces=2, group=cut.block_n // 2)
    y = empty_coded(x.num_tokens, num_rows // 2, form, x.codes)
    if y.codes.numel() > 0:
        _launch(x, weight, y.codes, y.scales, counters, cut, is_gated=True)
    return y


def codes_gate(num_tokens: int, weight: Fp8Operand) -> bool:
    """Whether `fp8_pieces_gate` is the way for so many tokens and `weight`.

    Of few tokens tiles have few rows: products of groups so small take longer than coding again.
    """
    num_rows, num_columns = weight.codes.shape
    return (
        num_tokens > _CODING.block_m
        and num_rows % choose_config(num_tokens, num_rows, num_columns).block_n == 0
    )


def _num_tokens(x: CodedTokens | Tensor) -> int:
    return len(x) if isinstance(x, Tensor) else x.num_tokens


def _cut(x: CodedTokens | Tensor, weight: Fp8Operand, config: QuantConfig | None) -> QuantConfig:
    """The tiling, with steps of columns that share a scale."""
    num_rows, num_columns = weight.codes.shape
    is_coded = isinstance(x, CodedTokens)
    num_tokens = _num_tokens(x)
    wanted = config or choose_config(num_tokens, num_rows, num_columns, is_coded=is_coded)
    memory_bytes = device_properties(weight.codes.device).shared_memory_per_block_bytes
    block_k = wanted.block_k
    if isinstance(x, CodedTokens) and len(x.scales) > 1:
        block_k = gcd(block_k, x.group)
    if weight.scales.shape[1] > 1:
        block_k = gcd(block_k, weight.tile_columns)
    return fitted_config(replace(wanted, block_k=block_k), block_k, memory_bytes)


def _launch(
    x: CodedTokens | Tensor,
    weight: Fp8Operand,
    y: Tensor,
    y_scales: Tensor | None,
    counters: Tensor,
    cut: QuantConfig,
    *,
    is_gated: bool,
) -> None:
    num_rows, num_columns = weight.codes.shape
    num_tokens = _num_tokens(x)
    num_tiles = triton.cdiv(num_rows, cut.block_n)
    if isinstance(x, Tensor):
        check_inputs(x, num_columns)
        inputs, x_scales, groups, group = x, weight.scales, 0, cut.block_k
    else:
        inputs, x_scales, groups, group = x.codes, x.scales, len(x.scales), x.group
        assert inputs.shape == (2, num_tokens, num_columns), f"{inputs.shape}, {num_columns}"
    assert num_tokens <= cut.block_m, f"{num_tokens} tokens in a tile of {cut.block_m}"
    partials = x_scales
    if cut.split_k > 1:
        assert num_tiles <= counters.numel(), f"{num_tiles} tiles, {counters.numel()} counters"
        partials = x_scales.new_empty((num_tiles, cut.split_k, num_tokens, cut.block_n))
    use_pdl = pdl_supported(y.device)
    _fp8_pieces_kernel[(num_tiles, cut.split_k)](
        inputs,
        x_scales,
        weight.codes,
        weight.scales,
        weight.scales if weight.bias is None else weight.bias,
        y,
        x_scales if y_scales is None else y_scales,
        partials,
        counters,
        num_tokens,
        N=num_rows,
        K=num_columns,
        STRIDE_X=inputs.stride(-2),
        X_GROUP=group,
        X_GROUPS=groups,
        TILE_ROWS=weight.tile_rows,
        TILE_COLUMNS=weight.tile_columns,
        NUM_TILES=weight.scales.shape[1],
        HAS_BIAS=weight.bias is not None,
        IS_GATED=is_gated,
        IS_CODED=y_scales is not None,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        SPLIT_K=cut.split_k,
        PART_K=triton.cdiv(num_columns, cut.block_k * cut.split_k) * cut.block_k,
        NUM_STAGES=cut.num_stages,
        PREFETCH=cut.prefetch_bytes,
        KNOWS_E4M3=knows_e4m3(y.device),
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        launch_pdl=use_pdl,
    )

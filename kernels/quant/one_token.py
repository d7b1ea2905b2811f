"""A linear map of one token with FP8 weights, without matrix units.

    y[n] = sum over tiles j of  s[n / rows, j] * sum over k in tile j of x[k] q[n, k]  +  b[n]

and silu(gate) * up of two such products. A weight is used once, so matrix units, which want their
operands in shared memory and at least 8 tokens, save nothing. Here a thread loads 16 adjacent
weights, turns them into fp32 and adds their products with x in fp32, all in an order that the
tiling fixes; threads meet only at the end. The loop holds no exchange between threads, and all
programs are so small that no weight need be split by columns: there are no parts to add.

Torch twin: `engine.layers.quantized_weight.dequantize` and `torch.nn.functional.linear`.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.small import prefetch_rows, store_rows, weight_rows
from kernels.pdl import pdl_supported
from kernels.quant.decode import decode_e4m3, knows_e4m3
from kernels.quant.fp8_linear import LINE_BYTES, Fp8Operand, QuantConfig, check_inputs

_VECTOR = tl.constexpr(16)  # weights of one load
# Chosen by arithmetic and by what the compiler reports; not measured yet. A warp loads 512 columns
# at once. A thread of four rows executes 3.8 instructions a byte, of two 4.6, where 6.2 would take
# longer than an H200's memory. Weights of 4096 rows have two programs a multiprocessor, with 64 KiB
# on their way; smaller weights have programs of fewer rows.
_CONFIG = QuantConfig(block_m=1, block_n=16, block_k=512, num_warps=4, num_stages=5)
_FEW_ROWS = 4096


def choose_config(num_rows: int) -> QuantConfig:
    """The tiling for a weight of `num_rows` rows."""
    return _CONFIG if num_rows >= _FEW_ROWS else replace(_CONFIG, block_n=8)


@triton.jit
def _sums(codes, x, KNOWS_E4M3: tl.constexpr) -> tl.tensor:
    """codes [rows, columns], x [columns]; returns the sums of 16 columns, [rows, columns / 16]."""
    num_rows: tl.constexpr = codes.shape[0]
    num_vectors: tl.constexpr = codes.shape[1] // _VECTOR
    w = decode_e4m3(codes, tl.float16, KNOWS_E4M3, False).to(tl.float32)
    w = tl.reshape(w, (num_rows, num_vectors, _VECTOR))
    x = tl.reshape(x.to(tl.float32), (1, num_vectors, _VECTOR))
    return tl.sum(w * x, axis=2)


@triton.jit
def _fp8_one_token_kernel(
    x_ptr,  # [K]
    codes_ptr,  # [N, K] uint8
    scales_ptr,  # [ceil(N / TILE_ROWS), NUM_TILES] fp32
    bias_ptr,  # [N] if HAS_BIAS
    y_ptr,  # [N], or N // 2 if IS_GATED
    N: tl.constexpr,
    K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    NUM_VECTORS: tl.constexpr = BLOCK_K // _VECTOR
    tile = tl.program_id(0)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = weight_rows(columns, N, IS_GATED)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch_rows(codes_ptr, w_rows, 0, K, PREFETCH, LINE_BYTES)
        tl.extra.cuda.gdc_wait()
    k_offsets = tl.arange(0, BLOCK_K)
    codes_pointers = codes_ptr + w_rows[:, None] * K + k_offsets[None, :]
    scale_pointers = scales_ptr + w_rows // TILE_ROWS * NUM_TILES
    vectors = tl.arange(0, NUM_VECTORS) * _VECTOR
    acc = tl.zeros((BLOCK_N, NUM_VECTORS), dtype=tl.float32)
    # The number of stages is named: else only loads for matrix units are pipelined.
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptr + k + k_offsets)
            codes = tl.load(codes_pointers + k)
        else:
            is_column = k_offsets < K - k
            x = tl.load(x_ptr + k + k_offsets, mask=is_column, other=0.0)
            codes = tl.load(codes_pointers + k, mask=is_column[None, :], other=0)
        total = _sums(codes, x, KNOWS_E4M3)
        if NUM_TILES > 1:
            index = tl.minimum((k + vectors) // TILE_COLUMNS, NUM_TILES - 1)
            scales = tl.load(scale_pointers[:, None] + index[None, :])
            acc = tl.fma(total, scales, acc)
        else:
            acc += total
    y = tl.sum(acc, axis=1)
    if NUM_TILES == 1:
        y *= tl.load(scale_pointers)
    store_rows(
        y[None, :], bias_ptr, y_ptr, w_rows, tile * BLOCK_N, tl.arange(0, 1), 1, N, HAS_BIAS, 1,
        BLOCK_N, IS_GATED,
    )  # fmt: skip


def fp8_one_token(
    x: Tensor, weight: Fp8Operand, config: QuantConfig | None = None, *, gated: bool = False
) -> Tensor:
    """x: [1, K]; weight: as `kernels.quant.fp8_linear.supports_fp8` says.

    Returns [1, N]; gated: silu(gate) * up, [1, N / 2], with rows of gate first in the weight.
    """
    num_rows, num_columns = weight.codes.shape
    assert len(x) == 1, f"{len(x)} tokens"
    check_inputs(x, num_columns)
    cut = config or choose_config(num_rows)
    assert cut.split_k == 1, "columns are not split"
    y = x.new_empty((1, num_rows // 2 if gated else num_rows))
    use_pdl = pdl_supported(x.device)
    _fp8_one_token_kernel[(triton.cdiv(num_rows, cut.block_n),)](
        x,
        weight.codes.view(torch.uint8),
        weight.scales,
        y if weight.bias is None else weight.bias,
        y,
        N=num_rows,
        K=num_columns,
        TILE_ROWS=weight.tile_rows,
        TILE_COLUMNS=min(weight.tile_columns, num_columns),
        NUM_TILES=weight.scales.shape[1],
        HAS_BIAS=weight.bias is not None,
        IS_GATED=gated,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        NUM_STAGES=cut.num_stages,
        PREFETCH=cut.prefetch_bytes,
        KNOWS_E4M3=knows_e4m3(x.device),
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        launch_pdl=use_pdl,
    )
    return y

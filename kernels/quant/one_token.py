"""A linear map of one token with FP8 or 4-bit weights, without matrix units.

    FP8:    y[n] = b[n] + sum over tiles j of s[n / rows, j] * sum over k in j of x[k] q[n, k]
    4 bits: y[n] = b[n] + sum over groups j of s[n, j] * sum over k in j of x[k] (q[n, k] - z[n, j])

and silu(gate) * up of two such products. A weight is used once, so matrix units, which want their
operands in shared memory and at least 8 tokens, save nothing. Here a thread loads 16 bytes of
adjacent weights, turns them into fp32 and adds their products with x in fp32, all in an order that
the tiling fixes; threads meet only at the end. The loop holds no exchange between threads, and all
programs are so small that no weight need be split by columns: there are no parts to add.

Torch twin: `engine.layers.quantized_weight.dequantize` and `torch.nn.functional.linear`.

Four bits in the mantissa of a 1 in fp32 make f = 1 + q / 16 or, four places lower, 1 + q / 256: a
byte of two numbers (`kernels.quant.int4`) takes one shift and two masks. With sums of x f and of x

    sum of x (q - z) = 16 * sum of x f - (16 + z) * sum of x        (256 likewise)

which costs 4 or 8 of fp32's 24 bits: less than a float16 or a bfloat16 would show.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.instructions import knows_e4m3, uses_ptx
from kernels.linear.small import prefetch_rows, store_rows, weight_rows
from kernels.pdl import pdl_supported
from kernels.quant.dequantize import decode_e4m3, widen_int4
from kernels.quant.fp8_linear import LINE_BYTES, Fp8Operand, QuantConfig, check_inputs
from kernels.quant.int4_linear import FourBitOperand
from kernels.quant.steps import Codes, load_scale

_VECTOR = tl.constexpr(16)  # bytes of one load
# Chosen by arithmetic, by what the compiler reports and by a race on an H200, see
# load_tests/results. A warp loads 512 bytes of a row at once. With four rows a thread executes 3.8
# instructions a byte of FP8 (with two 4.6) and 7.7 a byte of 4 bits (with eight 6.8); an H200's
# memory takes as long as 6.2. Weights of 4096 rows have two programs a multiprocessor, with 64 KiB
# on their way; smaller ones have programs of fewer rows. Nothing is prefetched: in the chain of a
# layer's kernels it took longer.
_CONFIG = QuantConfig(
    block_m=1, block_n=16, block_k=512, num_stages=5, prefetch_bytes=0, starts_next_early=False
)
_INT4_BLOCK = 1024  # bytes
_FEW_ROWS = 4096


def choose_config(num_rows: int) -> QuantConfig:
    """The tiling for a weight of `num_rows` rows."""
    return _CONFIG if num_rows >= _FEW_ROWS else replace(_CONFIG, block_n=8)


def _begin(x: Tensor, num_rows: int, num_columns: int, cut: QuantConfig, *, gated: bool) -> Tensor:
    """Checks what is given; returns memory for the result."""
    assert len(x) == 1, f"{len(x)} tokens"
    check_inputs(x, num_columns)
    assert cut.split_k == 1, "columns are not split"
    return x.new_empty((1, num_rows // 2 if gated else num_rows))


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
    STARTS_NEXT_EARLY: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    NUM_VECTORS: tl.constexpr = BLOCK_K // _VECTOR
    tile = tl.program_id(0)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = weight_rows(columns, N, IS_GATED)
    if USE_PDL:
        if STARTS_NEXT_EARLY:
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
        # Of what is loaded last, the weights, the compiler takes how numbers lie in threads.
        if NUM_TILES > 1:
            index = tl.minimum((k + vectors) // TILE_COLUMNS, NUM_TILES - 1)
            scales = tl.load(scale_pointers[:, None] + index[None, :])
        if K % BLOCK_K == 0:
            x = tl.load(x_ptr + k + k_offsets)
            codes = tl.load(codes_pointers + k)
        else:
            is_column = k_offsets < K - k
            x = tl.load(x_ptr + k + k_offsets, mask=is_column, other=0.0)
            codes = tl.load(codes_pointers + k, mask=is_column[None, :], other=0)
        total = _sums(codes, x, KNOWS_E4M3)
        if NUM_TILES > 1:
            acc = tl.fma(total, scales, acc)
        else:
            acc += total
    if USE_PDL and not STARTS_NEXT_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
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
    cut = config or choose_config(num_rows)
    y = _begin(x, num_rows, num_columns, cut, gated=gated)
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
        STARTS_NEXT_EARLY=cut.starts_next_early,
        KNOWS_E4M3=knows_e4m3(x.device),
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        launch_pdl=use_pdl,
    )
    return y


def supports_one_token(weight: FourBitOperand) -> bool:
    """Whether `int4_one_token` computes with `weight`: integers alone."""
    return weight.codes in (Codes.INT4, Codes.INT4_ZEROS)


@triton.jit
def _less_zeros(f, x, zeros, FACTOR: tl.constexpr) -> tl.tensor:
    """The sums of x (q - z) over 16 numbers, zeros' shape [rows, vectors].

    f: 1 + q / FACTOR, [rows, columns]; x [columns].
    """
    num_rows: tl.constexpr = zeros.shape[0]
    num_vectors: tl.constexpr = zeros.shape[1]
    f = tl.reshape(f, (num_rows, num_vectors, _VECTOR))
    x = tl.reshape(x.to(tl.float32), (1, num_vectors, _VECTOR))
    # Of all rows, although they are the same: so x gets the layout of f, and a thread adds it once.
    x = tl.broadcast_to(x, f.shape)
    return tl.fma(-(zeros + FACTOR), tl.sum(x, axis=2), tl.sum(f * x, axis=2) * FACTOR)


@triton.jit
def _int4_one_token_kernel(
    x_ptr,  # [K]
    packed_ptr,  # [N, K / 2] uint8 in runs of 2 * HALF
    scales_ptr,  # [N, NUM_GROUPS] as CODES says
    bias_ptr,  # [N] if HAS_BIAS
    y_ptr,  # [N], or N // 2 if IS_GATED
    N: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    STARTS_NEXT_EARLY: tl.constexpr,
    USES_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    ROW_BYTES: tl.constexpr = K // 2
    NUM_VECTORS: tl.constexpr = BLOCK_BYTES // _VECTOR
    tile = tl.program_id(0)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = weight_rows(columns, N, IS_GATED)
    if USE_PDL:
        if STARTS_NEXT_EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch_rows(packed_ptr, w_rows, 0, ROW_BYTES, PREFETCH, LINE_BYTES)
        tl.extra.cuda.gdc_wait()
    byte_offsets = tl.arange(0, BLOCK_BYTES)
    packed_pointers = packed_ptr + w_rows[:, None] * ROW_BYTES + byte_offsets[None, :]
    scale_pointers = scales_ptr + w_rows[:, None] * NUM_GROUPS
    vectors = tl.arange(0, NUM_VECTORS) * _VECTOR
    acc = tl.zeros((BLOCK_N, NUM_VECTORS), dtype=tl.float32)
    # The number of stages is named: else only loads for matrix units are pipelined.
    for start in tl.range(0, ROW_BYTES, BLOCK_BYTES, num_stages=NUM_STAGES):
        # As above, weights are loaded last.
        column = (start + vectors) // HALF * (2 * HALF)
        group = tl.minimum(column // GROUP, NUM_GROUPS - 1)
        scale, zero = load_scale(scale_pointers + group[None, :], CODES)
        group = tl.minimum((column + HALF) // GROUP, NUM_GROUPS - 1)
        next_scale, next_zero = load_scale(scale_pointers + group[None, :], CODES)
        at = start + byte_offsets
        x_pointers = x_ptr + at // HALF * (2 * HALF) + at % HALF
        if ROW_BYTES % BLOCK_BYTES == 0:
            low_x = tl.load(x_pointers)
            high_x = tl.load(x_pointers + HALF)
            packed = tl.load(packed_pointers + start)
        else:
            is_byte = at < ROW_BYTES
            low_x = tl.load(x_pointers, mask=is_byte, other=0.0)
            high_x = tl.load(x_pointers + HALF, mask=is_byte, other=0.0)
            packed = tl.load(packed_pointers + start, mask=is_byte[None, :], other=0)
        low, high = widen_int4(packed, USES_PTX)
        total = _less_zeros(low, low_x, zero.to(tl.float32), 256.0)
        if GROUP == HALF:
            acc = tl.fma(total, scale, acc)
            scale, zero = next_scale, next_zero
            total = tl.zeros_like(total)
        total += _less_zeros(high, high_x, zero.to(tl.float32), 16.0)
        acc = tl.fma(total, scale, acc)
    if USE_PDL and not STARTS_NEXT_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    store_rows(
        tl.sum(acc, axis=1)[None, :], bias_ptr, y_ptr, w_rows, tile * BLOCK_N, tl.arange(0, 1), 1,
        N, HAS_BIAS, 1, BLOCK_N, IS_GATED,
    )  # fmt: skip


def int4_one_token(
    x: Tensor, weight: FourBitOperand, config: QuantConfig | None = None, *, gated: bool = False
) -> Tensor:
    """x: [1, K]; weight: as `supports_one_token` says; config: its `block_k` counts bytes.

    Returns [1, N]; gated: silu(gate) * up, [1, N / 2], with rows of gate first in the weight.
    """
    num_rows, row_bytes = weight.packed.shape
    assert supports_one_token(weight), f"{weight.codes}: floats of four bits"
    cut = config or replace(choose_config(num_rows), block_k=_INT4_BLOCK)
    y = _begin(x, num_rows, 2 * row_bytes, cut, gated=gated)
    use_pdl = pdl_supported(x.device)
    _int4_one_token_kernel[(triton.cdiv(num_rows, cut.block_n),)](
        x,
        weight.packed,
        weight.scales,
        y if weight.bias is None else weight.bias,
        y,
        N=num_rows,
        K=2 * row_bytes,
        HALF=weight.half,
        GROUP=weight.group,
        NUM_GROUPS=weight.scales.shape[1],
        CODES=weight.codes,
        HAS_BIAS=weight.bias is not None,
        IS_GATED=gated,
        BLOCK_N=cut.block_n,
        BLOCK_BYTES=cut.block_k,
        NUM_STAGES=cut.num_stages,
        PREFETCH=cut.prefetch_bytes,
        STARTS_NEXT_EARLY=cut.starts_next_early,
        USES_PTX=uses_ptx(x.device),
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        launch_pdl=use_pdl,
    )
    return y

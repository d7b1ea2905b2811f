"""Quantised weights made a matrix in the inputs' dtype, for products of many tokens.

    w[n, k] = (q[n, k] - z[n, j]) * s[n / rows, j] * f[n],  j = k / columns

in fp32, rounded once. Torch twin, equal in every bit: `engine.layers.quantized_weight.dequantize`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.instructions import knows_e4m3
from kernels.pdl import pdl_supported
from kernels.quant.dequantize import decode_e4m3, widen_e2m1
from kernels.quant.fp8_linear import Fp8Operand
from kernels.quant.int4_linear import FourBitOperand
from kernels.quant.steps import Codes, load_scale

_BLOCK = 2048  # bytes of a program


@triton.jit
def _fp8_matrix_kernel(
    codes_ptr,  # [N, K] uint8
    scales_ptr,  # [ceil(N / TILE_ROWS), NUM_TILES] fp32
    matrix_ptr,  # [N, K]
    K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < K
    codes = tl.load(codes_ptr + row * K + columns, mask=mask, other=0)
    scale_row = scales_ptr + row // TILE_ROWS * NUM_TILES
    scales = tl.load(scale_row + tl.minimum(columns // TILE_COLUMNS, NUM_TILES - 1))
    w = decode_e4m3(codes, tl.float32, KNOWS_E4M3, False) * scales
    tl.store(matrix_ptr + row * K + columns, w.to(matrix_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_runs"])
def _int4_matrix_kernel(
    packed_ptr,  # [num_runs, HALF] uint8
    scales_ptr,  # [N, NUM_GROUPS] as CODES says
    factors_ptr,  # [N] fp32 if HAS_FACTORS
    matrix_ptr,  # [num_runs, 2 * HALF]
    num_runs,
    RUNS_A_ROW: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Runs of all rows, one after the other; half a run has one scale."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    run = tl.program_id(0) * BLOCK_RUNS + tl.arange(0, BLOCK_RUNS)
    mask = (run < num_runs)[:, None]
    row = tl.minimum(run, num_runs - 1) // RUNS_A_ROW
    first_column = run % RUNS_A_ROW * (2 * HALF)
    offsets = run.to(tl.int64)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    packed = tl.load(packed_ptr + offsets, mask=mask, other=0)
    matrix_at = matrix_ptr + run.to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    for i in tl.static_range(2):
        group = tl.minimum((first_column + i * HALF) // GROUP, NUM_GROUPS - 1)
        scale, zero = load_scale(scales_ptr + row * NUM_GROUPS + group, CODES)
        numbers = ((packed >> (4 * i)) & 15).to(tl.int32)
        if IS_E2M1:
            w = widen_e2m1(numbers, tl.float32) * scale[:, None]
        else:
            w = (numbers - zero[:, None]).to(tl.float32) * scale[:, None]
        if HAS_FACTORS:
            w *= tl.load(factors_ptr + row)[:, None]
        tl.store(matrix_at + i * HALF, w.to(matrix_ptr.dtype.element_ty), mask=mask)


def fp8_matrix(weight: Fp8Operand, dtype: torch.dtype) -> Tensor:
    """Returns the weight as [N, K] in `dtype`."""
    num_rows, num_columns = weight.codes.shape
    matrix = torch.empty((num_rows, num_columns), dtype=dtype, device=weight.codes.device)
    use_pdl = pdl_supported(matrix.device)
    _fp8_matrix_kernel[(num_rows, triton.cdiv(num_columns, _BLOCK))](
        weight.codes.view(torch.uint8),
        weight.scales,
        matrix,
        K=num_columns,
        TILE_ROWS=weight.tile_rows,
        TILE_COLUMNS=weight.tile_columns,
        NUM_TILES=weight.scales.shape[1],
        BLOCK=_BLOCK,
        KNOWS_E4M3=knows_e4m3(matrix.device),
        USE_PDL=use_pdl,
        launch_pdl=use_pdl,
    )
    return matrix


def int4_matrix(weight: FourBitOperand, dtype: torch.dtype) -> Tensor:
    """Returns the weight as [N, K] in `dtype`, columns in the order of its bytes."""
    num_rows, num_columns = weight.packed.shape[0], 2 * weight.packed.shape[1]
    matrix = torch.empty((num_rows, num_columns), dtype=dtype, device=weight.packed.device)
    use_pdl = pdl_supported(matrix.device)
    num_runs = weight.packed.numel() // weight.half
    block_runs = _BLOCK // weight.half
    _int4_matrix_kernel[(triton.cdiv(num_runs, block_runs),)](
        weight.packed,
        weight.scales,
        weight.factors,
        matrix,
        num_runs,
        RUNS_A_ROW=num_columns // (2 * weight.half),
        HALF=weight.half,
        GROUP=weight.group,
        NUM_GROUPS=weight.scales.shape[1],
        CODES=weight.codes,
        IS_E2M1=weight.codes in (Codes.MXFP4, Codes.MXFP4_SMALL, Codes.NVFP4),
        HAS_FACTORS=weight.factors is not None,
        BLOCK_RUNS=block_runs,
        USE_PDL=use_pdl,
        launch_pdl=use_pdl,
    )
    return matrix

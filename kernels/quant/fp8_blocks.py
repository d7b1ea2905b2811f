"""Products of e4m3 inputs and e4m3 weights with scales of tiles, on Hopper's matrix units.

    y[t, n] = sum over j of  sx[j, t] * sw[n / rows, j] * sum over k in tile j of qx[t, k] qw[n, k]
              + b[n]

A tile has 128 columns. The matrix units add products of e4m3 in fewer bits than fp32, so the sum of
every tile is added to the others in fp32 registers. Operands are loaded by TMA; one program per
multiprocessor iterates over tiles of y. Torch twin: `reference`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.device import device_properties
from kernels.linear.large import num_multiprocessors
from kernels.pdl import pdl_supported
from kernels.quant.fp8_linear import FEW_TILES, Fp8Operand

TILE_COLUMNS = 128
_SIZE_MULTIPLE = 16
_LEAST_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksConfig:
    """The tiling of one product; sizes in elements."""

    block_m: int = 128  # tokens of a tile
    block_n: int = 128  # weight rows of a tile: no more than share a scale
    num_warps: int = 8
    num_stages: int = 4
    group_m: int = 16  # token tiles that share weight tiles in the L2 cache
    programs_per_sm: int = 1


_NARROW = BlocksConfig(block_n=64, num_warps=4, programs_per_sm=2)


def choose_config(num_tokens: int, num_rows: int, tile_rows: int) -> BlocksConfig:
    """The tiling; not measured yet, but chosen so that few tiles occupy more multiprocessors."""
    wide = BlocksConfig(block_n=min(tile_rows, TILE_COLUMNS))
    num_tiles = triton.cdiv(num_tokens, wide.block_m) * triton.cdiv(num_rows, wide.block_n)
    return _NARROW if num_tiles < FEW_TILES else wide


def supports_blocks(weight: Fp8Operand) -> bool:
    """Whether this kernel computes with `weight`, on its device."""
    device = device_properties(weight.codes.device)
    rows = min(weight.tile_rows, TILE_COLUMNS)
    return (
        device.capability is not None
        and device.capability[0] == 9
        and weight.tile_columns == TILE_COLUMNS
        and weight.codes.is_contiguous()
        and weight.codes.data_ptr() % 16 == 0
        and all(size % _SIZE_MULTIPLE == 0 for size in weight.codes.shape)
        and rows >= _LEAST_ROWS
        and weight.tile_rows % rows == 0
        and rows & (rows - 1) == 0
    )


@triton.jit
def _tile_start(
    tile, num_tiles_m, num_tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """First token and row; concurrent tiles form a square, so operands stay in L2."""
    group_size = GROUP_M * num_tiles_n
    first_m = (tile // group_size) * GROUP_M
    height = tl.minimum(num_tiles_m - first_m, GROUP_M)
    inside = tile % group_size
    return (first_m + inside % height) * BLOCK_M, (inside // height) * BLOCK_N


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_blocks_kernel(
    x_desc,  # [num_tokens, K] e4m3 by [BLOCK_M, BLOCK_K]
    weight_desc,  # [N, K] e4m3 by [BLOCK_N, BLOCK_K]
    x_scales_ptr,  # [NUM_TILES, num_tokens] fp32
    scales_ptr,  # [ceil(N / TILE_ROWS), NUM_TILES] fp32
    bias_ptr,  # [N] if HAS_BIAS
    y_ptr,  # [num_tokens, N]
    num_tokens,
    N: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    num_tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    num_tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, NUM_PROGRAMS):
        m, n = _tile_start(tile, num_tiles_m, num_tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        tokens = m + tl.arange(0, BLOCK_M)
        x_scale_pointers = x_scales_ptr + tl.minimum(tokens, num_tokens - 1)
        scale_pointer = scales_ptr + n // TILE_ROWS * NUM_TILES
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        scale = tl.load(scale_pointer)
        for j in tl.range(0, NUM_TILES, num_stages=NUM_STAGES):
            # A number alone is not pipelined by the compiler: it is loaded one tile ahead.
            next_scale = tl.load(scale_pointer + tl.minimum(j + 1, NUM_TILES - 1))
            x = x_desc.load([m, j * BLOCK_K])
            w = weight_desc.load([n, j * BLOCK_K])
            x_scales = tl.load(x_scale_pointers + j * num_tokens)
            if IS_INTERPRETED:
                x, w = x.to(tl.float32), w.to(tl.float32)
            acc += tl.dot(x, tl.trans(w)) * (x_scales * scale)[:, None]
            scale = next_scale
        columns = n + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        offsets = tokens[:, None].to(tl.int64) * N + columns[None, :]
        mask = (tokens < num_tokens)[:, None] & (columns < N)[None, :]
        tl.store(y_ptr + offsets, acc.to(y_ptr.dtype.element_ty), mask=mask)


def fp8_blocks(
    x_codes: Tensor,
    x_scales: Tensor,
    weight: Fp8Operand,
    dtype: torch.dtype,
    config: BlocksConfig | None = None,
) -> Tensor:
    """x_codes [T, K], x_scales [K / 128, T]: from `quantize_tokens`; returns [T, N] in `dtype`."""
    num_tokens, num_columns = x_codes.shape
    num_rows = weight.codes.shape[0]
    assert weight.tile_columns == TILE_COLUMNS, f"tiles of {weight.tile_columns} columns"
    assert weight.codes.shape[1] == num_columns, f"{x_codes.shape}, {weight.codes.shape}"
    y = torch.empty((num_tokens, num_rows), dtype=dtype, device=x_codes.device)
    if y.numel() == 0:
        return y
    cut = config or choose_config(num_tokens, num_rows, weight.tile_rows)
    assert weight.tile_rows % cut.block_n == 0, f"{weight.tile_rows} rows, {cut.block_n} a tile"
    num_tiles = triton.cdiv(num_tokens, cut.block_m) * triton.cdiv(num_rows, cut.block_n)
    num_programs = cut.programs_per_sm * num_multiprocessors(x_codes.device)
    use_pdl = pdl_supported(x_codes.device)
    _fp8_blocks_kernel[(min(num_programs, num_tiles),)](
        TensorDescriptor.from_tensor(x_codes, [cut.block_m, TILE_COLUMNS]),
        TensorDescriptor.from_tensor(weight.codes, [cut.block_n, TILE_COLUMNS]),
        x_scales,
        weight.scales,
        y if weight.bias is None else weight.bias,
        y,
        num_tokens,
        N=num_rows,
        NUM_TILES=weight.scales.shape[1],
        TILE_ROWS=weight.tile_rows,
        HAS_BIAS=weight.bias is not None,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=TILE_COLUMNS,
        GROUP_M=cut.group_m,
        NUM_PROGRAMS=num_programs,
        NUM_STAGES=cut.num_stages,
        IS_INTERPRETED=x_codes.device.type != "cuda",
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        launch_pdl=use_pdl,
    )
    return y


def reference(x_codes: Tensor, x_scales: Tensor, weight: Fp8Operand) -> Tensor:
    """`fp8_blocks` in float64, [T, N]."""
    num_rows, num_columns = weight.codes.shape
    spread = weight.scales.double().repeat_interleave(weight.tile_rows, dim=0)[:num_rows]
    matrix = weight.codes.float().double()
    matrix *= spread.repeat_interleave(TILE_COLUMNS, dim=1)[:, :num_columns]
    x = x_codes.float().double()
    x *= x_scales.double().T.repeat_interleave(TILE_COLUMNS, dim=1)[:, :num_columns]
    product = x @ matrix.T
    return product if weight.bias is None else product + weight.bias.double()

"""Quantised experts as the grouped kernels take them, and their product with a block of routes.

A program decodes BLOCK_N rows of an expert's weight in registers, a step of columns at a time, and
multiplies inputs as they are: `kernels.quant.steps` says by which formula, `Codes` which formats
there are. For many tokens all experts of 4 bits may be made matrices instead.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import DeviceProperties, stages_that_fit
from kernels.moe.tiles import Tile
from kernels.quant.int4_linear import FourBitOperand
from kernels.quant.sizes import MIN_HALF
from kernels.quant.steps import FP8, Codes, add_run, add_tile
from kernels.quant.to_matrix import int4_matrix

_SIZE_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedExperts:
    """The weights of all experts, each [N, K]."""

    codes: Codes
    data: Tensor  # [experts, N, K] uint8; 4 bits: [experts, N, K / 2] in runs of 2 * half
    # [experts, ceil(N / tile_rows), ceil(K / tile_columns)] fp32; 4 bits: as in `FourBitOperand`
    scales: Tensor
    tile_rows: int
    tile_columns: int
    half: int = 0  # 4 bits
    factors: Tensor | None = None  # [experts, N] fp32; NVFP4
    rounds_inputs: bool = False  # whether inputs may be rounded to FP8

    @property
    def can_be_matrices(self) -> bool:
        return self.half > 0

    @property
    def shape(self) -> torch.Size:
        """[experts, N, K]."""
        *others, width = self.data.shape
        return torch.Size((*others, 2 * width if self.half else width))

    def fit(self, tile: Tile, device: DeviceProperties) -> Tile:
        """The tile with columns that share a scale, and stages that fit the shared memory."""
        block_k, bytes_a_number = self.half, 0.5
        if not self.half:
            block_k, bytes_a_number = tile.block_k, 1.0
            while self.scales.shape[2] > 1 and self.tile_columns % block_k:
                block_k //= 2
        num_columns = 2 * self.half or block_k
        unroll = tile.unroll
        while unroll > 1 and self.shape[2] % (num_columns * unroll):
            unroll -= 1
        num_stages = stages_that_fit(
            tile.num_stages,
            stage_bytes=int(
                unroll * num_columns * (tile.block_n * bytes_a_number + 2 * tile.block_m)
            ),
            shared_memory_bytes=device.shared_memory_per_block_bytes,
        )
        return replace(tile, block_k=block_k, num_stages=max(2, num_stages), unroll=unroll)

    def matrices(self, dtype: torch.dtype) -> Tensor:
        """[experts, N, K] in `dtype`; of weights of 4 bits."""
        assert self.can_be_matrices, "numbers of 8 bits are not made matrices"
        num_experts, num_rows, num_columns = self.shape
        operand = FourBitOperand(
            packed=self.data.flatten(0, 1),
            scales=self.scales.flatten(0, 1),
            codes=self.codes,
            half=self.half,
            group=self.tile_columns,
            factors=None if self.factors is None else self.factors.flatten(),
        )
        return int4_matrix(operand, dtype).view(num_experts, num_rows, num_columns)


def supports_coded(weight: CodedExperts) -> bool:
    """Whether the grouped kernels read the weight."""
    _, num_rows, num_columns = weight.shape
    is_one_scale = weight.scales.shape[2] == 1
    has_columns = is_one_scale or weight.tile_columns % _SIZE_MULTIPLE == 0
    return (
        weight.data.is_contiguous()
        and weight.data.data_ptr() % 16 == 0
        and num_rows % _SIZE_MULTIPLE == 0
        and num_columns % _SIZE_MULTIPLE == 0
        and (weight.half >= MIN_HALF if weight.codes is not Codes.FP8 else has_columns)
    )


@triton.jit
def _load_columns(pointers, is_row, k_offsets, k, K: tl.constexpr, STEP: tl.constexpr):
    """Columns from `k` on of gathered rows; zeros for those that are not there."""
    if K % STEP == 0:
        rows = tl.load(pointers + k, mask=is_row, other=0.0)
    else:
        rows = tl.load(pointers + k, mask=is_row & (k_offsets < K - k)[None, :], other=0.0)
    return rows


@triton.jit
def coded_product(
    x_pointers, is_row, data_ptr, scales_ptr, factors_ptr, expert, w_rows, N: tl.constexpr,
    K: tl.constexpr, CODES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    NUM_TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, HAS_FACTORS: tl.constexpr, KNOWS_E4M3: tl.constexpr,
    USES_PTX: tl.constexpr, UNROLL: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[BLOCK_M, BLOCK_N]: gathered rows times the rows `w_rows` of an expert.

    4 bits: BLOCK_K bytes are a run of 2 * BLOCK_K columns.
    """
    IS_FP8: tl.constexpr = CODES == FP8
    WIDTH: tl.constexpr = K if IS_FP8 else K // 2
    STEP: tl.constexpr = BLOCK_K if IS_FP8 else 2 * BLOCK_K
    NUM_TILE_ROWS: tl.constexpr = (N + TILE_ROWS - 1) // TILE_ROWS
    offsets = tl.arange(0, BLOCK_K)
    rows = expert.to(tl.int64) * N + w_rows
    data_pointers = data_ptr + rows[:, None] * WIDTH + offsets[None, :]
    tile_rows = expert.to(tl.int64) * NUM_TILE_ROWS + w_rows // TILE_ROWS
    scale_pointers = scales_ptr + tile_rows * NUM_TILES
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # The number of stages is named, so that loads of scales are pipelined with the others.
    for k in tl.range(0, K, STEP, num_stages=NUM_STAGES, loop_unroll_factor=UNROLL):
        x = _load_columns(x_pointers, is_row, offsets, k, K, STEP)
        if IS_FP8:
            if K % STEP == 0:
                codes = tl.load(data_pointers + k)
            else:
                codes = tl.load(data_pointers + k, mask=(offsets < K - k)[None, :], other=0)
            acc = add_tile(
                acc, x, codes, scale_pointers, k, TILE_COLUMNS, NUM_TILES, KNOWS_E4M3, USES_PTX
            )
        else:
            tl.static_assert(K % STEP == 0, "runs fill the columns")
            high_x = tl.load(x_pointers + k + BLOCK_K, mask=is_row, other=0.0)
            packed = tl.load(data_pointers + k // 2)
            acc = add_run(
                acc, x, high_x, packed, scale_pointers, k, CODES, BLOCK_K, TILE_COLUMNS, NUM_TILES,
                USES_PTX,
            )  # fmt: skip
    if HAS_FACTORS:
        acc *= tl.load(factors_ptr + rows)[:, None]
    return tl.trans(acc)

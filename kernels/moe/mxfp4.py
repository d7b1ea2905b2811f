"""Experts in MXFP4 as a product of few tokens reads them: pair of groups after pair of groups.

A program multiplies BLOCK_N rows of an expert with a block of routes, 64 columns at a time. Rows
have their words of one group side by side, so that a program reads one piece of memory a group, and
their scales likewise. Where gate and up are one weight, their rows alternate. How numbers lie in
words and are decoded is said in `kernels.quant.e2m1_words`; weights are the left operand of the
matrix units, decoded in the registers from which those take it.

For many tokens all experts are made matrices instead. Torch twin: the weight that they were made
from, by `engine.layers.quantized_weight.dequantize`.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import DeviceProperties, stages_that_fit
from kernels.instructions import uses_ptx
from kernels.linear.small import prefetch_rows
from kernels.moe.tiles import Tile
from kernels.pdl import pdl_supported
from kernels.quant.e2m1_words import GROUP, WORDS, decode_words, pack_scales, pack_words
from kernels.quant.int4 import unpack_int4

STEP = 2 * GROUP  # columns, with scales in one word
_MAX_WARPS = 2
_MAX_SUMS = 4096  # of a program
_MATRIX_ROWS = 64  # of a program
_LINE_WORDS = tl.constexpr(32)  # of a cache line
_GROUP, _STEP, _WORDS = tl.constexpr(GROUP), tl.constexpr(STEP), tl.constexpr(WORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Experts:
    """The weights of all experts, each [N, K], for inputs in bfloat16."""

    data: Tensor  # [experts, K / 32, N, 4] int32
    scales: Tensor  # [experts, K / 64, N] int32
    is_gated: bool  # whether rows of gate and up alternate

    can_be_matrices = True

    @property
    def shape(self) -> torch.Size:
        """[experts, N, K]."""
        num_experts, num_groups, num_rows, _ = self.data.shape
        return torch.Size((num_experts, num_rows, num_groups * GROUP))

    def fit(self, tile: Tile, device: DeviceProperties) -> Tile:
        """The tile with sums that fit the registers and stages that fit the shared memory."""
        block_n, unroll = min(tile.block_n, _MAX_SUMS // tile.block_m), tile.unroll
        while self.shape[2] % (STEP * unroll):
            unroll -= 1
        step_bytes = block_n * (STEP // 2 + self.scales.element_size())
        num_stages = stages_that_fit(
            tile.num_stages,
            stage_bytes=unroll * (step_bytes + 2 * STEP * tile.block_m),
            shared_memory_bytes=device.shared_memory_per_block_bytes,
        )
        return replace(
            tile,
            block_n=block_n,
            block_k=GROUP,
            num_warps=min(tile.num_warps, _MAX_WARPS),
            num_stages=max(2, num_stages),
            unroll=unroll,
        )

    def check(self, tile: Tile, *, is_gated: bool) -> None:
        """That a tile is one for a product with this weight."""
        assert is_gated == self.is_gated, "rows of gate and up alternate in the first weight alone"
        # Other kernels of matrix units take a row's numbers in another order.
        assert tile.num_warps <= _MAX_WARPS, f"{tile.num_warps} warps"
        assert tile.block_k == GROUP, f"{tile.block_k} columns a product"

    def matrices(self, dtype: torch.dtype) -> Tensor:
        """[experts, N, K] in `dtype`, rows of gate first."""
        num_experts, num_rows, num_columns = self.shape
        matrix = torch.empty(self.shape, dtype=dtype, device=self.data.device)
        use_pdl = pdl_supported(matrix.device)
        tiles = (triton.cdiv(num_rows, _MATRIX_ROWS), num_columns // STEP, num_experts)
        _mxfp4_matrix_kernel[tiles](
            self.data,
            self.scales,
            matrix,
            N=num_rows,
            K=num_columns,
            IS_GATED=self.is_gated,
            BLOCK_N=_MATRIX_ROWS,
            USES_PTX=uses_ptx(matrix.device) and dtype is torch.bfloat16,
            USE_PDL=use_pdl,
            num_warps=_MAX_WARPS,
            launch_pdl=use_pdl,
        )
        return matrix


def supports_mxfp4(scales: Tensor, half: int, dtype: torch.dtype) -> bool:
    """Whether `mxfp4_experts` can be made: Codes.MXFP4_SMALL, and inputs in `dtype`.

    scales: uint8 [experts, N, groups]; half: of the runs in which the numbers lie.
    """
    _, num_rows, num_groups = scales.shape
    return (
        uses_ptx(scales.device)
        and dtype is torch.bfloat16
        and half == GROUP
        and num_groups % 2 == 0
        and num_rows % 16 == 0
    )


def mxfp4_experts(packed: Tensor, scales: Tensor, *, is_gated: bool) -> Mxfp4Experts:
    """The experts in the memory of `packed`, which is overwritten: both would take twice as much.

    packed: uint8 [experts, N, K / 2] in runs of 64; scales: uint8 [experts, N, K / 32].
    """
    num_experts, num_rows, num_groups = scales.shape
    data = packed.view(-1).view(torch.int32).view(num_experts, num_groups, num_rows, WORDS)
    for expert, rows in enumerate(packed):  # one by one: all at once would take much memory
        words = pack_words(unpack_int4(_gathered(rows, is_gated=is_gated), GROUP))
        data[expert] = words.transpose(0, 1)
    factors = torch.stack([_gathered(rows, is_gated=is_gated) for rows in pack_scales(scales)])
    return Mxfp4Experts(data=data, scales=factors.transpose(1, 2).contiguous(), is_gated=is_gated)


def _gathered(rows: Tensor, *, is_gated: bool) -> Tensor:
    """rows: [N, ...], of gate and then of up if gated; these alternate in the result."""
    return rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if is_gated else rows


@triton.jit
def prefetch_tile(
    words_ptr, expert, tile_n, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    PREFETCH_K: tl.constexpr,
) -> None:  # fmt: skip
    """Prefetch the words of a tile's first PREFETCH_K columns, a power of two, to the L2 cache."""
    groups = tl.minimum(tl.arange(0, PREFETCH_K // _GROUP), K // _GROUP - 1)
    lines = expert.to(tl.int64) * (K // _GROUP) + groups
    prefetch_rows(
        words_ptr, lines, tile_n * BLOCK_N * _WORDS, N * _WORDS, BLOCK_N * _WORDS, _LINE_WORDS
    )


@triton.jit
def mxfp4_product(
    x_pointers, is_row, words_ptr, scales_ptr, expert, tile_n, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, UNROLL: tl.constexpr,
    USES_PTX: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[BLOCK_M, BLOCK_N]: gathered rows, of which `x_pointers` has 32 columns, times tile `tile_n`.

    Sums are handed on from product to product: up to two warps wait for each.
    """
    # Rows past the end repeat the last and are not stored.
    rows = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    first = expert.to(tl.int64) * (K // _STEP)
    word_pointers = (
        words_ptr + (2 * first * N + rows[:, None]) * _WORDS + tl.arange(0, _WORDS)[None, :]
    )
    scale_pointers = scales_ptr + first * N + rows
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in tl.range(0, K // _STEP, num_stages=NUM_STAGES, loop_unroll_factor=UNROLL):
        low_x = tl.load(x_pointers + step * _STEP, mask=is_row, other=0.0)
        high_x = tl.load(x_pointers + step * _STEP + _GROUP, mask=is_row, other=0.0)
        low = tl.load(word_pointers + 2 * step * (_WORDS * N))
        high = tl.load(word_pointers + (2 * step + 1) * (_WORDS * N))
        scales = tl.load(scale_pointers + step * N)
        w = decode_words(low, scales & 0xFFFF, low_x.dtype, BLOCK_N, USES_PTX)
        acc = tl.dot(w, tl.trans(low_x), acc, input_precision="ieee")
        w = decode_words(high, (scales >> 16) & 0xFFFF, low_x.dtype, BLOCK_N, USES_PTX)
        acc = tl.dot(w, tl.trans(high_x), acc, input_precision="ieee")
    return tl.trans(acc)


@triton.jit
def _mxfp4_matrix_kernel(
    words_ptr,  # [experts, K / 32, N, 4] int32
    scales_ptr,  # [experts, K / 64, N] int32
    matrix_ptr,  # [experts, N, K]
    N: tl.constexpr,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USES_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = rows < N
    step = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    pair = expert * (K // _STEP) + step
    words_at = words_ptr + (2 * pair * N + rows[:, None]) * _WORDS + tl.arange(0, _WORDS)[None, :]
    scales = tl.load(scales_ptr + pair * N + rows, mask=mask, other=0)
    targets = (rows % 2) * (N // 2) + rows // 2 if IS_GATED else rows
    columns = step * _STEP + tl.arange(0, _GROUP)
    matrix_at = matrix_ptr + (expert * N + targets[:, None]) * K + columns[None, :]
    dtype: tl.constexpr = matrix_ptr.dtype.element_ty
    for half in tl.static_range(2):
        words = tl.load(words_at + half * (_WORDS * N), mask=mask[:, None], other=0)
        factors = (scales >> 16 * half) & 0xFFFF
        w = decode_words(words, factors, dtype, BLOCK_N, USES_PTX)
        tl.store(matrix_at + half * _GROUP, w, mask=mask[:, None])

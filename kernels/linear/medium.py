"""Linear maps of 33 to 128 tokens: each weight byte is read once, in evenly distributed tiles.

    y = x W^T + b            silu(g) * u,  [g | u] = x W^T + b,  silu(g) = g / (1 + exp(-g))

With so few tokens a product is bound by reading its operands: the weight from memory, and x from
the L2 cache once for each tile of weight rows. So tiles should be tall, and their number should be
that of the multiprocessors or just under a multiple of it. Powers of two do not give both. So a
tile may have two parts, `first` + `second` weight rows, each with its own product with the same
piece of x: 24,576 rows are 128 tiles of 128 + 64 for 132 multiprocessors.

A program computes one tile from all columns, so the same operands give the same bits in every run.
Operands are loaded by TMA, which writes zeros for rows past the end. It does so more slowly than it
loads rows that exist, and the weight waits meanwhile: so x is loaded by pointers where more than an
eighth of a tile's tokens is missing. Gated weights, descriptors and the early start of the next
kernel are as in `kernels.linear.large`.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.linear.small import Shape, check_operands, load_tokens, prefetch_rows, shape_of
from kernels.pdl import pdl_supported


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumConfig:
    """The tiling of one product; sizes in elements."""

    block_m: int  # tokens of a tile: 64 or 128; 256 with 8 warps
    first: int  # weight rows of a tile's first part, of gate and up together; a power of two
    second: int  # of its second part: 0 or a power of two
    block_k: int
    num_warps: int
    num_stages: int
    prefetch_k: int  # columns prefetched before x is ready: 0 or a power of two >= 64
    x_by_tma: bool = True  # else by pointers


# Measured on an H200 with Qwen3-8B's weights, each kind in a graph over more weights than the L2
# cache holds. Microseconds, ours | cuBLAS (gated: and SiLU) | floor (weight bytes at 4.29 TB/s), 64
# tokens: 51.2 | 54.4 | 46.9 gated, 28.4 | 31.1 | 23.5 deep, 11.0 | 12.6 | 7.8 square, 15.4 | 16.3 |
# 11.7 narrow; 36 layers of these and their norms 3.94 ms, with tiles of 64 rows each 4.42. Columns
# in two parts: 29.4 deep, 12.2 square, 17.5 narrow. 128 tokens: 57.2 | 61.4 gated; left to the
# library: deep 34.4 | 34.5, square 14.5 | 14.3, narrow 20.9 | 17.0. 256 tokens: 93.2 | 91.6 gated;
# on a later card (load_tests.lab.bench_linear) 82.4 | 80.6, ours in tiles of 256 tokens by 192
# rows. x by pointers | by TMA, Qwen3-8B's four products with pauses for the rest of a layer: 33
# tokens 125.3 | 149.8, 40 125.0 | 143.4, 48 125.8 | 133.1, 56 125.2 | 126.2, 64 126.5 | 125.5;
# gated 72 52.6 | 57.8, 96 52.8 | 54.1, 127 53.7 | 52.3.
_FASTER_UP_TO = {
    Shape.GATED: 128,
    Shape.DEEP: 64,
    Shape.SQUARE: 64,
    Shape.NARROW: 64,
    Shape.WIDE: 0,
}
_LEAST_TOKENS = 33  # fewer were not measured
# Weight rows of a tile: one part, or two of which the second is half as tall.
_HEIGHTS = (16, 32, 48, 64, 96, 128, 192)
_STAGES_BYTES = 200 * 1024  # of 227 KiB of shared memory; more was not faster
_MAX_STAGES = 8


# Share of a tile's tokens from which loading x by TMA is as fast as if none were missing.
_LEAST_FILLED = Fraction(7, 8)
# Weights of 5,120 rows are 107 tiles for 132 multiprocessors: with x by pointers the library is
# faster by 1 to 3 us of 14 to 38, with x by TMA it is as fast.
_LEAST_BUSY = Fraction(5, 6)


def faster_for(weight: Tensor, num_multiprocessors: int, *, gated: bool) -> range:
    """The numbers of tokens for which these kernels are faster than the library; may be empty."""
    num_rows, num_columns = weight.shape
    most = _FASTER_UP_TO.get(shape_of(num_rows, num_columns, gated), 0)
    cut = choose_config(most, num_rows, num_multiprocessors)
    num_tiles = math.ceil(num_rows / (cut.first + cut.second))
    num_places = math.ceil(num_tiles / num_multiprocessors) * num_multiprocessors
    needs_tma = not gated and num_tiles < _LEAST_BUSY * num_places
    least = math.ceil(_LEAST_FILLED * cut.block_m) if needs_tma else _LEAST_TOKENS
    return range(least, most + 1)


def choose_config(num_tokens: int, num_rows: int, num_multiprocessors: int) -> MediumConfig:
    """The tiling of a product with `num_rows` weight rows, two bytes per element.

    Chooses the height with which the busiest multiprocessor reads least, weight and x together.
    """
    block_m = 64 if num_tokens <= 64 else 128

    def rows_read(height: int) -> int:
        num_tiles = math.ceil(num_rows / height)
        return math.ceil(num_tiles / num_multiprocessors) * (height + block_m)

    height = min(_HEIGHTS, key=rows_read)
    second = height // 3 if height % 3 == 0 else 0
    block_k = 8192 // block_m
    stage_bytes = 2 * block_k * (block_m + height)
    return MediumConfig(
        block_m=block_m,
        first=height - second,
        second=second,
        block_k=block_k,
        num_warps=4,
        num_stages=min(_MAX_STAGES, _STAGES_BYTES // stage_bytes),
        prefetch_k=512,
        x_by_tma=num_tokens >= _LEAST_FILLED * block_m,
    )


@triton.jit
def _load_rows(desc, row, k, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, IS_GATED: tl.constexpr):
    """[ROWS, BLOCK_K] of the weight; if gated, rows of gate before those of up."""
    return tl.reshape(desc.load([0, row, k] if IS_GATED else [row, k]), (ROWS, BLOCK_K))


@triton.jit
def _prefetch_part(
    weight_ptr, row, NUM_OUTPUTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, IS_GATED: tl.constexpr, PREFETCH_K: tl.constexpr,
):  # fmt: skip
    inside = tl.arange(0, ROWS)
    WIDTH: tl.constexpr = ROWS // 2 if IS_GATED else ROWS
    rows = inside // WIDTH * NUM_OUTPUTS + row + inside % WIDTH
    prefetch_rows(weight_ptr, tl.minimum(rows, N - 1).to(tl.int64), 0, K, PREFETCH_K)


@triton.jit
def _finish_part(
    acc, bias_ptr, y_ptr, tokens, column, num_tokens, NUM_OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Apply bias and gate in fp32, round once, store only valid tokens and columns."""
    WIDTH: tl.constexpr = ROWS // 2 if IS_GATED else ROWS
    if HAS_BIAS:
        inside = tl.arange(0, ROWS)
        biased = column + inside % WIDTH
        places = bias_ptr + inside // WIDTH * NUM_OUTPUTS + biased
        acc += tl.load(places, mask=biased < NUM_OUTPUTS, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, WIDTH)), (0, 2, 1))
        gate, up = tl.split(halves)
        y = gate * tl.sigmoid(gate) * up
    else:
        y = acc
    columns = column + tl.arange(0, WIDTH)
    mask = (tokens < num_tokens)[:, None] & (columns < NUM_OUTPUTS)[None, :]
    offsets = tokens[:, None].to(tl.int64) * NUM_OUTPUTS + columns[None, :]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["bias_ptr"])
def _medium_linear_kernel(
    x,  # [num_tokens, K], row stride STRIDE_X, or if X_BY_TMA by [BLOCK_M, BLOCK_K]
    first_desc,  # [N, K] by [FIRST, BLOCK_K], or [2, N // 2, K] by [2, FIRST // 2, BLOCK_K]
    second_desc,  # the same by SECOND rows; not read if there are none
    weight_ptr,  # the same weight [N, K], for the prefetch
    bias_ptr,  # [N] if HAS_BIAS
    y_ptr,  # [num_tokens, N, or N // 2 if IS_GATED]
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    X_BY_TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    NUM_OUTPUTS: tl.constexpr = N // 2 if IS_GATED else N
    FIRST_WIDTH: tl.constexpr = FIRST // 2 if IS_GATED else FIRST
    WIDTH: tl.constexpr = (FIRST + SECOND) // 2 if IS_GATED else FIRST + SECOND
    num_tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    tile = tl.program_id(0)
    # Programs of the same weight rows start together, so the weight comes from memory once.
    token = tile % num_tiles_m * BLOCK_M
    row = tile // num_tiles_m * WIDTH
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH_K > 0:
            _prefetch_part(weight_ptr, row, NUM_OUTPUTS, N, K, FIRST, IS_GATED, PREFETCH_K)
            if SECOND > 0:
                _prefetch_part(
                    weight_ptr, row + FIRST_WIDTH, NUM_OUTPUTS, N, K, SECOND, IS_GATED,
                    PREFETCH_K,
                )  # fmt: skip
        tl.extra.cuda.gdc_wait()
    tokens = token + tl.arange(0, BLOCK_M)
    k_offsets = tl.arange(0, BLOCK_K)
    if not X_BY_TMA:
        x_pointers = x + tokens[:, None] * STRIDE_X + k_offsets[None, :]
    first = tl.zeros((BLOCK_M, FIRST), dtype=tl.float32)
    if SECOND > 0:
        second = tl.zeros((BLOCK_M, SECOND), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if X_BY_TMA:
            x_tile = x.load([token, k])
        else:
            x_tile = load_tokens(
                x_pointers + k, tokens < num_tokens, k_offsets, K - k, K % BLOCK_K != 0
            )
        w = _load_rows(first_desc, row, k, FIRST, BLOCK_K, IS_GATED)
        first = tl.dot(x_tile, tl.trans(w), first)
        if SECOND > 0:
            v = _load_rows(second_desc, row + FIRST_WIDTH, k, SECOND, BLOCK_K, IS_GATED)
            second = tl.dot(x_tile, tl.trans(v), second)
    _finish_part(
        first, bias_ptr, y_ptr, tokens, row, num_tokens, NUM_OUTPUTS, HAS_BIAS, IS_GATED, BLOCK_M,
        FIRST,
    )  # fmt: skip
    if SECOND > 0:
        _finish_part(
            second, bias_ptr, y_ptr, tokens, row + FIRST_WIDTH, num_tokens, NUM_OUTPUTS, HAS_BIAS,
            IS_GATED, BLOCK_M, SECOND,
        )  # fmt: skip


def medium_linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: MediumConfig) -> Tensor:
    """x: [T, K], rows may be strided; weight: [N, K]; bias: [N] or None.

    Returns [T, N]. config: from `choose_config`. Torch twin: `torch.nn.functional.linear`.
    """
    y = x.new_empty((x.shape[0], weight.shape[0]))
    if y.numel() > 0:
        _launch(x, weight, bias, y, config)
    return y


def medium_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: MediumConfig
) -> Tensor:
    """silu(gate) * up of [gate | up] = x W^T + b; weight: [2 n, K], rows of gate first.

    Returns [T, n]; otherwise as `medium_linear`.
    """
    y = x.new_empty((x.shape[0], weight.shape[0] // 2))
    if y.numel() > 0:
        _launch(x, weight, bias, y, config)
    return y


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    cut: MediumConfig,
) -> None:
    num_rows, num_columns = weight.shape
    num_tokens = x.shape[0]
    check_operands(x, weight)
    gated = y.shape[1] != num_rows
    tile_rows = cut.first + cut.second
    width = tile_rows // 2 if gated else tile_rows
    num_tiles = triton.cdiv(num_tokens, cut.block_m) * triton.cdiv(y.shape[1], width)
    pieces = weight.view(2, num_rows // 2, num_columns) if gated else weight
    first_desc = TensorDescriptor.from_tensor(pieces, _piece(cut.first, cut.block_k, gated))
    second_desc = first_desc
    if cut.second > 0:
        second_desc = TensorDescriptor.from_tensor(pieces, _piece(cut.second, cut.block_k, gated))
    use_pdl = pdl_supported(x.device)
    _medium_linear_kernel[(num_tiles,)](
        TensorDescriptor.from_tensor(x, [cut.block_m, cut.block_k]) if cut.x_by_tma else x,
        first_desc,
        second_desc,
        weight,
        y if bias is None else bias,
        y,
        num_tokens,
        N=num_rows,
        K=num_columns,
        STRIDE_X=0 if cut.x_by_tma else x.stride(0),
        X_BY_TMA=cut.x_by_tma,
        HAS_BIAS=bias is not None,
        IS_GATED=gated,
        BLOCK_M=cut.block_m,
        FIRST=cut.first,
        SECOND=cut.second,
        BLOCK_K=cut.block_k,
        PREFETCH_K=cut.prefetch_k,
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        launch_pdl=use_pdl,
    )


def _piece(num_rows: int, num_columns: int, gated: bool) -> list[int]:
    return [2, num_rows // 2, num_columns] if gated else [num_rows, num_columns]

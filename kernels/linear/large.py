"""Linear maps of many tokens at the speed of the matrix units, with fused gate and residual.

    y = x W^T + b + r            silu(g) * u,  [g | u] = x W^T + b,  silu(g) = g / (1 + exp(-g))

(arXiv:2002.05202 for the gate.) One program per multiprocessor iterates over tiles of y. Operands
are loaded by TMA, which reads zeros past the end and writes nothing there, so sizes need not be
multiples of a tile.

A gated weight [2 n, K] is read as [2, n, K]: one load reads the same rows of both halves, one
product computes gate and up of the same columns, and each thread then holds both numbers of a pair.
Neither gate and up nor a product before its residual are rounded. Columns are never split: the same
operands give the same bits in every run.

Descriptors are made on the host for each call and passed by value: no memory is allocated for them,
and a CUDA graph keeps its own copy. A kernel's compilation does not depend on them.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.linear.small import Shape, shape_of
from kernels.pdl import pdl_supported

# Rows must start at multiples of 16 bytes, also those of half the outputs.
_SIZE_MULTIPLE = 16
_MIN_SIZE = 128
_ROW_MULTIPLE = 8
_NUM_PROGRAMS_INTERPRETED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeConfig:
    """The tiling of one product; sizes in elements."""

    block_m: int = 128  # tokens of a tile
    block_n: int = 256  # weight rows of a tile, of gate and up together
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 4
    group_m: int = 16  # token tiles that share weight tiles in the L2 cache
    num_stores: int = 1  # 1 or 2: pieces in which a tile is written, each of a buffer's size
    is_flat: bool = False  # one pipeline over all tiles: a store overlaps the next tile's loads


# For an H200: of 227 KiB of shared memory a stage takes 48 KiB and a store 32 KiB.
_GATED = LargeConfig(num_stages=3, is_flat=True)
_PLAIN = LargeConfig(num_stores=2, is_flat=True)
# Residual loads would be part of the single pipeline and take the memory of another store.
_PLAIN_WITH_RESIDUAL = LargeConfig(num_stores=2)

# Measured on an H200 with Qwen3-8B's weights, ours | cuBLAS (gated: and SiLU). 16,384 tokens on a
# card at its power limit, ms: 4.93 | 5.19 gated, 2.42 | 2.51 deep, 0.83 | 0.85 square, 1.25 | 1.23
# narrow. 256, us: 88.9 | 79.1 gated, 46.6 | 44.3 deep, 17.0 | 17.3 square, 27.1 | 20.7 narrow.
_FASTER_FROM = {Shape.GATED: 1024, Shape.DEEP: 1024, Shape.SQUARE: 1024}


def supports_large(weight: Tensor) -> bool:
    """Whether these kernels can read `weight` [out, in], and it is large enough for them."""
    return (
        weight.device.type == "cuda"
        and torch.cuda.get_device_capability(weight.device)[0] == 9
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and all(size % _SIZE_MULTIPLE == 0 and size >= _MIN_SIZE for size in weight.shape)
    )


def faster_from(weight: Tensor, *, gated: bool) -> int | None:
    """The smallest number of tokens from which on these kernels are faster; None: never."""
    num_rows, num_columns = weight.shape
    return _FASTER_FROM.get(shape_of(num_rows, num_columns, gated))


@triton.jit
def _tile_start(
    tile, num_tiles_m, num_tiles_n, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """First token and column; concurrent tiles form a square, so operands stay in L2."""
    group_size = GROUP_M * num_tiles_n
    first_m = (tile // group_size) * GROUP_M
    height = tl.minimum(num_tiles_m - first_m, GROUP_M)
    inside = tile % group_size
    return (first_m + inside % height) * BLOCK_M, (inside // height) * WIDTH


@triton.jit
def _product(
    x_desc, weight_desc, m, n, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N]; if gated, columns of gate before those of up."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = x_desc.load([m, k])
        if IS_GATED:
            w = tl.reshape(weight_desc.load([0, n, k]), (BLOCK_N, BLOCK_K))
        else:
            w = weight_desc.load([n, k])
        acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def _halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and right half of the columns; no data moves, because a thread has whole rows."""
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def _store(y, residual_desc, y_desc, m, n, HAS_RESIDUAL: tl.constexpr):
    if HAS_RESIDUAL:
        y += residual_desc.load([m, n]).to(tl.float32)
    y_desc.store([m, n], y.to(y_desc.dtype))


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["bias_ptr"])
def _large_linear_kernel(
    x_desc,  # [num_tokens, K] by [BLOCK_M, BLOCK_K]
    weight_desc,  # [N, K] by [BLOCK_N, BLOCK_K], or [2, N // 2, K] by [2, BLOCK_N // 2, BLOCK_K]
    bias_ptr,  # [N] if HAS_BIAS
    residual_desc,  # as y if HAS_RESIDUAL
    y_desc,  # [num_tokens, N, or N // 2 if IS_GATED] by [BLOCK_M, WIDTH // NUM_STORES]
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_STORES: tl.constexpr,
    IS_FLAT: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    NUM_OUTPUTS: tl.constexpr = N // 2 if IS_GATED else N
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    num_tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    num_tiles_n: tl.constexpr = (NUM_OUTPUTS + WIDTH - 1) // WIDTH
    num_tiles = num_tiles_m * num_tiles_n
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS, flatten=IS_FLAT):
        m, n = _tile_start(tile, num_tiles_m, num_tiles_n, BLOCK_M, WIDTH, GROUP_M)
        acc = _product(x_desc, weight_desc, m, n, K, BLOCK_M, BLOCK_N, BLOCK_K, IS_GATED)
        if HAS_BIAS:
            inside = tl.arange(0, BLOCK_N)
            columns = n + inside % WIDTH
            places = bias_ptr + inside // WIDTH * NUM_OUTPUTS + columns
            bias = tl.load(places, mask=columns < NUM_OUTPUTS, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if IS_GATED:
            gate, up = _halves(acc, BLOCK_M, BLOCK_N)
            y_desc.store([m, n], (gate * tl.sigmoid(gate) * up).to(y_desc.dtype))
        elif NUM_STORES == 2:
            left, right = _halves(acc, BLOCK_M, BLOCK_N)
            _store(left, residual_desc, y_desc, m, n, HAS_RESIDUAL)
            _store(right, residual_desc, y_desc, m, n + WIDTH // 2, HAS_RESIDUAL)
        else:
            _store(acc, residual_desc, y_desc, m, n, HAS_RESIDUAL)


def large_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    config: LargeConfig | None = None,
) -> Tensor:
    """x: [T, K], rows may be strided; weight: [N, K]; bias: [N] or None.

    residual: [T, N] or None, rows may be strided; added in fp32 before the single rounding.
    Returns [T, N]. config: default from the table. Torch twin:
    `torch.nn.functional.linear`, plus the residual.
    """
    config = config or (_PLAIN if residual is None else _PLAIN_WITH_RESIDUAL)
    y = x.new_empty((x.shape[0], weight.shape[0]))
    if residual is not None:
        assert residual.shape == y.shape, f"{residual.shape} against {y.shape}"
        _check_rows(residual, weight)
    if y.numel() > 0:
        _launch(x, weight, bias, residual, y, config)
    return y


def large_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: LargeConfig | None = None
) -> Tensor:
    """silu(gate) * up of [gate | up] = x W^T + b; weight: [2 n, K], rows of gate first.

    Returns [T, n]; otherwise as `large_linear`.
    """
    y = x.new_empty((x.shape[0], weight.shape[0] // 2))
    if y.numel() > 0:
        _launch(x, weight, bias, None, y, config or _GATED)
    return y


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    cut: LargeConfig,
) -> None:
    num_rows, num_columns = weight.shape
    assert x.shape[1] == num_columns, f"{x.shape} against {weight.shape}"
    assert weight.is_contiguous(), f"weight has strides {weight.stride()}"
    _check_rows(x, weight)
    gated = y.shape[1] != num_rows
    width = cut.block_n // 2 if gated else cut.block_n
    pieces = weight.view(2, num_rows // 2, num_columns) if gated else weight
    piece_block = [2, width, cut.block_k] if gated else [width, cut.block_k]
    y_block = [cut.block_m, width if gated else width // cut.num_stores]
    num_tiles = triton.cdiv(x.shape[0], cut.block_m) * triton.cdiv(y.shape[1], width)
    num_programs = num_multiprocessors(x.device)
    use_pdl = pdl_supported(x.device)
    y_desc = TensorDescriptor.from_tensor(y, y_block)
    _large_linear_kernel[(min(num_programs, num_tiles),)](
        TensorDescriptor.from_tensor(x, [cut.block_m, cut.block_k]),
        TensorDescriptor.from_tensor(pieces, piece_block),
        y if bias is None else bias,
        y_desc if residual is None else TensorDescriptor.from_tensor(residual, y_block),
        y_desc,
        x.shape[0],
        N=num_rows,
        K=num_columns,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        IS_GATED=gated,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        GROUP_M=cut.group_m,
        NUM_STORES=cut.num_stores,
        IS_FLAT=cut.is_flat,
        NUM_PROGRAMS=num_programs,
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        launch_pdl=use_pdl,
    )


@cache
def num_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; a small number for the interpreter on a CPU."""
    if device.type != "cuda":
        return _NUM_PROGRAMS_INTERPRETED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check_rows(rows: Tensor, weight: Tensor) -> None:
    assert rows.dtype == weight.dtype, f"{rows.dtype} against {weight.dtype}"
    assert rows.stride(1) == 1, f"strides {rows.stride()}: a row's elements must be adjacent"
    assert rows.stride(0) % _ROW_MULTIPLE == 0, f"strides {rows.stride()}: rows start on 16 bytes"
    assert rows.data_ptr() % 16 == 0, "the first row must start on 16 bytes"

"""Products of many tokens with FP8 experts, inputs rounded to e4m3, on Hopper's matrix units.

    inner[r] = silu(x[t] Wg_e^T) * (x[t] Wu_e^T)        out[r] = weight_r  inner[r] Wd_e^T

as grouped.py, whose blocks and orders these are, of inputs s[t, g] q[t, g] (coded_tokens.py): in
groups of 128 columns where weights have scales of tiles, in whole rows where a row has one.

    tiles   the sum of each tile is added to the others in fp32, times both of its scales
    rows    the matrix units add, in fewer bits than fp32, and scales come last

Weights are loaded by TMA, gate's rows before up's. The result is rounded once, to the dtype of the
model. Not measured yet: the engine takes them where asked (`execution.round_expert_inputs_from`),
`load_tests.lab.bench_moe` times them. `reference` has the weights in float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.device import device_properties
from kernels.moe.align import Blocks
from kernels.moe.coded import CodedExperts
from kernels.moe.grouped import tile_of
from kernels.moe.rounded_outputs import store_results
from kernels.moe.routes import Routes
from kernels.moe.tiles import Tile
from kernels.pdl import pdl_supported
from kernels.quant.coded_tokens import CodedTokens, InputForm
from kernels.quant.steps import Codes

TILE_COLUMNS = 128
_SIZE_MULTIPLE = 16
_HOPPER = 9
_TILES = Tile(128, 128, TILE_COLUMNS, 16, 8, 4, by_tma=True)
_ROWS = Tile(128, 256, TILE_COLUMNS, 16, 8, 4, by_tma=True)


def supports_rounded(weight: CodedExperts) -> bool:
    """Whether these kernels compute with the weight, on its device."""
    capability = device_properties(weight.data.device).capability
    has_tiles = weight.scales.shape[2] == 1 or weight.tile_columns == TILE_COLUMNS
    return (
        weight.rounds_inputs
        and capability is not None
        and capability[0] == _HOPPER
        and weight.codes is Codes.FP8
        and has_tiles
        and weight.data.is_contiguous()
        and weight.shape[2] % _SIZE_MULTIPLE == 0
    )


def input_form(weight: CodedExperts) -> InputForm:
    """How the inputs of a weight are coded."""
    has_rows = weight.scales.shape[2] == 1
    return InputForm(pieces=1, group=weight.shape[2] if has_rows else TILE_COLUMNS)


def choose_tile(weight: CodedExperts) -> Tile:
    """The tiling of a weight's products; block_m is that of all."""
    return _ROWS if weight.scales.shape[2] == 1 else _TILES


@triton.jit
def _weight_rows(
    tile_n, N: tl.constexpr, IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """Rows of a tile, at most the last: of gate, then of up, if gated."""
    lanes = tl.arange(0, BLOCK_N)
    if IS_GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        inside = tl.minimum(tile_n * HALF + lanes % HALF, N // 2 - 1)
        rows = lanes // HALF * (N // 2) + inside
    else:
        rows = tl.minimum(tile_n * BLOCK_N + lanes, N - 1)
    return rows


@triton.jit(do_not_specialize=["num_blocks", "num_lines"])
def _moe_rounded_kernel(
    x_ptr,  # e4m3 [num_lines, K]: tokens if IS_GATED, else lines of blocks
    x_scales_ptr,  # fp32 [groups, num_lines]
    weight_desc,  # e4m3, pieces of [1, 2, BLOCK_N / 2, BLOCK_K] of rows by halves, if IS_GATED;
    # else of [1, BLOCK_N, BLOCK_K]
    scales_ptr,  # fp32 [experts, ceil(N / TILE_ROWS), NUM_TILES]
    routes_ptr,  # int32 [num_blocks, BLOCK_M]
    experts_ptr,  # int32 [num_blocks]
    route_weights_ptr,  # fp32 [routes] unless IS_GATED
    # outputs
    y_ptr,  # [num_blocks BLOCK_M, N // 2] if IS_GATED, else [routes, N]
    # constants
    num_blocks,
    num_lines,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    NUM_TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    NUM_TILE_ROWS: tl.constexpr = (N + TILE_ROWS - 1) // TILE_ROWS
    block, tile_n = tile_of(tl.program_id(0), num_blocks, NUM_TILES_N, GROUP_M)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + block)
    if expert < 0:
        return
    lines = block * BLOCK_M + tl.arange(0, BLOCK_M)
    routes = tl.load(routes_ptr + lines)
    is_route = (routes >= 0)[:, None]
    x_rows = tl.maximum(routes, 0) // TOP_K if IS_GATED else lines
    columns = tl.arange(0, BLOCK_K)
    x_pointers = x_ptr + x_rows[:, None].to(tl.int64) * K + columns[None, :]
    x_scale_pointers = x_scales_ptr + x_rows
    w_rows = _weight_rows(tile_n, N, IS_GATED, BLOCK_N)
    first_tile = expert.to(tl.int64) * NUM_TILE_ROWS
    scale_pointers = scales_ptr + (first_tile + w_rows // TILE_ROWS) * NUM_TILES
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for j in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=NUM_STAGES):
        k = j * BLOCK_K
        if K % BLOCK_K == 0:
            x = tl.load(x_pointers + k, mask=is_route, other=0.0)
        else:
            x = tl.load(x_pointers + k, mask=is_route & (columns < K - k)[None, :], other=0.0)
        if IS_GATED:
            piece = weight_desc.load([expert, 0, tile_n * WIDTH, k])
        else:
            piece = weight_desc.load([expert, tile_n * BLOCK_N, k])
        w = tl.reshape(piece, (BLOCK_N, BLOCK_K))
        if IS_INTERPRETED:
            x, w = x.to(tl.float32), w.to(tl.float32)
        if NUM_TILES == 1:
            acc = tl.dot(x, tl.trans(w), acc)
        else:
            x_scales = tl.load(x_scale_pointers + j * num_lines)
            scales = tl.load(scale_pointers + j)
            acc += tl.dot(x, tl.trans(w)) * x_scales[:, None] * scales[None, :]
    if NUM_TILES == 1:
        acc = acc * tl.load(x_scale_pointers)[:, None] * tl.load(scale_pointers)[None, :]
    store_results(
        acc, lines, routes, route_weights_ptr, y_ptr, tile_n, N, IS_GATED, True, BLOCK_M, BLOCK_N
    )


def rounded_gate_up(
    x: CodedTokens,
    weight: CodedExperts,
    routes: Routes,
    blocks: Blocks,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """x: tokens in `input_form`; dtype: of the result; otherwise as `grouped_gate_up`."""
    size = (blocks.routes.numel(), weight.shape[1] // 2)
    y = torch.empty(size, dtype=dtype, device=x.codes.device)
    _launch(x, weight, routes, blocks, y, tile, is_gated=True)
    return y


def rounded_down(
    inner: CodedTokens,
    weight: CodedExperts,
    routes: Routes,
    blocks: Blocks,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """inner: lines of blocks in `input_form`, those without a route may be anything; otherwise as
    `grouped_down`.
    """
    assert inner.num_tokens == blocks.routes.numel(), f"{inner.num_tokens} lines"
    size = (*routes.ids.shape, weight.shape[1])
    y = torch.empty(size, dtype=dtype, device=inner.codes.device)
    _launch(inner, weight, routes, blocks, y, tile, is_gated=False)
    return y


def _launch(
    x: CodedTokens,
    weight: CodedExperts,
    routes: Routes,
    blocks: Blocks,
    y: Tensor,
    tile: Tile | None,
    *,
    is_gated: bool,
) -> None:
    num_blocks, block_m = blocks.routes.shape
    _, num_rows, num_columns = weight.shape
    cut = tile or choose_tile(weight)
    assert block_m == cut.block_m, f"blocks of {block_m} for tiles of {cut.block_m}"
    assert cut.block_k == TILE_COLUMNS, f"steps of {cut.block_k} columns"
    assert x.is_rounded, "inputs in pieces"
    assert x.codes.shape[2] == num_columns, f"{x.codes.shape} against {weight.shape}"
    assert x.group == input_form(weight).group, f"groups of {x.group}"
    use_pdl = pdl_supported(x.codes.device)
    _moe_rounded_kernel[(num_blocks * triton.cdiv(num_rows, cut.block_n),)](
        x.codes[0],
        x.scales,
        _pieces(weight, cut, is_gated=is_gated),
        weight.scales,
        blocks.routes,
        blocks.experts,
        routes.weights,
        y,
        num_blocks,
        x.num_tokens,
        N=num_rows,
        K=num_columns,
        TOP_K=routes.ids.shape[1],
        IS_GATED=is_gated,
        TILE_ROWS=weight.tile_rows,
        NUM_TILES=weight.scales.shape[2],
        BLOCK_M=block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        GROUP_M=cut.group_m,
        NUM_STAGES=cut.num_stages,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        USE_PDL=use_pdl,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        launch_pdl=use_pdl,
    )


def _pieces(weight: CodedExperts, tile: Tile, *, is_gated: bool) -> TensorDescriptor:
    """The weight by pieces of one expert; if gated, of the same rows of gate and up."""
    numbers = weight.data.view(torch.float8_e4m3fn)
    if not is_gated:
        return TensorDescriptor.from_tensor(numbers, [1, tile.block_n, tile.block_k])
    num_experts, num_rows, num_columns = weight.shape
    halves = numbers.view(num_experts, 2, num_rows // 2, num_columns)
    return TensorDescriptor.from_tensor(halves, [1, 2, tile.block_n // 2, tile.block_k])


def reference(weight: CodedExperts) -> Tensor:
    """What the weights stand for, [experts, N, K] in float64."""
    _, num_rows, num_columns = weight.shape
    spread = weight.scales.double().repeat_interleave(weight.tile_rows, dim=1)[:, :num_rows]
    spread = spread.repeat_interleave(weight.tile_columns, dim=2)[:, :, :num_columns]
    return weight.data.view(torch.float8_e4m3fn).float().double() * spread

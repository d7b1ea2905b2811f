"""Products of many tokens with experts of four bits, inputs rounded to e4m3, on Hopper.

    inner[r] = silu(x[t] Wg_e^T) * (x[t] Wu_e^T)        out[r] = weight_r  inner[r] Wd_e^T

as grouped.py, whose blocks and orders these are, of inputs s[t] q[t] (rounded_lines.py) and

    x[t] w[n]^T = s[t] * sum over groups j of  f[n, j] * (sum over k in j of b[n, k] q[t, k]
                                                          - z[n, j] * sum over k in j of q[t, k])

b are the numbers 0 to 15, f their scales, z their zero points. Read as e4m3, the bytes 0 to 15 are
0 to 15 times 2^-9, so a byte of two numbers takes a shift and two masks to become two operands of
the FP8 units, which take them from registers. The units add in fewer bits than fp32: the sums of a
run (128 columns at most) are added to the others in fp32. A route's sums have one order for one
tiling, whatever is beside it and on whichever rank its expert is.

Not measured yet: `load_tests.lab.bench_moe` times them. `reference` has the weights in float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import device_properties
from kernels.instructions import knows_e4m3, uses_ptx
from kernels.moe.align import Blocks
from kernels.moe.coded import CodedExperts
from kernels.moe.grouped import tile_of, weight_rows
from kernels.moe.rounded_lines import PLACE, RoundedLines
from kernels.moe.rounded_outputs import store_results
from kernels.moe.routes import Routes
from kernels.moe.tiles import ALWAYS, ExpertShape, Tile, tiles_by_tokens
from kernels.pdl import pdl_supported
from kernels.quant.dequantize import nibbles_e4m3
from kernels.quant.int4 import unpack_int4
from kernels.quant.steps import Codes, load_scale

_HOPPER = 9
_LEAST_HALF = 32  # columns of a product of the FP8 units
_INTEGERS = (Codes.INT4, Codes.INT4_ZEROS)
_ONE = tl.constexpr(1.0 / PLACE)
# Routes an expert, at most -> tile. Weights are the left operand, of which the units take 64 rows.
BY_ROUTES = (
    (64, Tile(64, 64, 64, 8, 4, 4)),
    (ALWAYS, Tile(128, 64, 64, 16, 4, 4)),
)


def supports_rounded_int4(weight: CodedExperts) -> bool:
    """Whether these kernels compute with the weight, on its device."""
    capability = device_properties(weight.data.device).capability
    return capability is not None and capability[0] == _HOPPER and reads_runs(weight)


def reads_runs(weight: CodedExperts) -> bool:
    """Whether the weight has integers in runs whose halves the FP8 units multiply."""
    return weight.codes in _INTEGERS and weight.half >= _LEAST_HALF


def sum_columns(weight: CodedExperts) -> int:
    """The columns of a sum of inputs, as the weight's products take them: those of one scale."""
    return weight.half if weight.tile_columns == weight.half else 2 * weight.half


def choose_tile(shape: ExpertShape, num_tokens: int) -> Tile:
    """Of both products; `block_k` is not used."""
    return next(tile for most, tile in tiles_by_tokens(shape, BY_ROUTES) if num_tokens <= most)


@triton.jit
def _multiply(w, x, KNOWS_E4M3: tl.constexpr) -> tl.tensor:
    """w x^T; w: bytes that are e4m3."""
    w = w.to(tl.float8e4nv, bitcast=True)
    if not KNOWS_E4M3:  # the interpreter
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, tl.trans(x))


@triton.jit
def _operand(
    low, high, part: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr, SUM: tl.constexpr
) -> tl.tensor:
    """One of the halves of a run, or all of it where SUM is as long."""
    if SUM == HALF:
        w = low if part == 0 else high
    else:
        w = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (BLOCK_N, SUM))
    return w


@triton.jit(do_not_specialize=["num_blocks", "num_lines"])
def _moe_rounded_int4_kernel(
    x_ptr,  # e4m3 [num_lines, K]: tokens if IS_GATED, else lines of blocks
    x_scales_ptr,  # fp32 [num_lines]
    x_sums_ptr,  # fp32 [K / SUM, num_lines]
    packed_ptr,  # uint8 [experts, N, K / 2] in runs
    scales_ptr,  # int32 [experts, N, NUM_GROUPS] as CODES says
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
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USES_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    NUM_TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block, tile_n = tile_of(tl.program_id(0), num_blocks, NUM_TILES_N, GROUP_M)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + block)
    if expert < 0:
        return
    lines = block * BLOCK_M + tl.arange(0, BLOCK_M)
    routes = tl.load(routes_ptr + lines)
    is_route = routes >= 0
    x_rows = tl.maximum(routes, 0) // TOP_K if IS_GATED else lines
    x_pointers = x_ptr + x_rows[:, None].to(tl.int64) * K + tl.arange(0, SUM)[None, :]
    sum_pointers = x_sums_ptr + x_rows
    rows = expert.to(tl.int64) * N + weight_rows(tile_n, N, IS_GATED, BLOCK_N)
    packed_pointers = packed_ptr + rows[:, None] * (K // 2) + tl.arange(0, HALF)[None, :]
    scale_pointers = scales_ptr + rows * NUM_GROUPS
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # The number of stages is named, so that loads of scales are pipelined with the others.
    for k in tl.range(0, K, 2 * HALF, num_stages=NUM_STAGES):
        low, high = nibbles_e4m3(tl.load(packed_pointers + k // 2), USES_PTX)
        for part in tl.static_range(2 * HALF // SUM):
            column = k + part * SUM
            x = tl.load(x_pointers + column, mask=is_route[:, None], other=0.0)
            total = _multiply(_operand(low, high, part, BLOCK_N, HALF, SUM), x, KNOWS_E4M3)
            sums = tl.load(sum_pointers + column // SUM * num_lines)
            group = tl.minimum(column // GROUP, NUM_GROUPS - 1)
            scale, zero = load_scale(scale_pointers + group, CODES)
            total = tl.fma(sums[None, :], -zero.to(tl.float32)[:, None], total)
            acc = tl.fma(total, (scale * _ONE)[:, None], acc)
    acc = tl.trans(acc) * tl.load(x_scales_ptr + x_rows)[:, None]
    store_results(
        acc, lines, routes, route_weights_ptr, y_ptr, tile_n, N, IS_GATED, False, BLOCK_M, BLOCK_N
    )


def rounded_int4_gate_up(
    x: RoundedLines,
    weight: CodedExperts,
    routes: Routes,
    blocks: Blocks,
    dtype: torch.dtype,
    tile: Tile,
) -> Tensor:
    """x: the tokens, with sums of `sum_columns`; dtype: of the result; else `grouped_gate_up`."""
    size = (blocks.routes.numel(), weight.shape[1] // 2)
    y = torch.empty(size, dtype=dtype, device=x.codes.device)
    _launch(x, weight, routes, blocks, y, tile, is_gated=True)
    return y


def rounded_int4_down(
    inner: RoundedLines,
    weight: CodedExperts,
    routes: Routes,
    blocks: Blocks,
    dtype: torch.dtype,
    tile: Tile,
) -> Tensor:
    """inner: the lines of blocks, with sums of `sum_columns`; otherwise as `grouped_down`."""
    assert inner.num_lines == blocks.routes.numel(), f"{inner.num_lines} lines"
    size = (*routes.ids.shape, weight.shape[1])
    y = torch.empty(size, dtype=dtype, device=inner.codes.device)
    _launch(inner, weight, routes, blocks, y, tile, is_gated=False)
    return y


def _launch(
    x: RoundedLines,
    weight: CodedExperts,
    routes: Routes,
    blocks: Blocks,
    y: Tensor,
    tile: Tile,
    *,
    is_gated: bool,
) -> None:
    num_blocks, block_m = blocks.routes.shape
    _, num_rows, num_columns = weight.shape
    assert block_m == tile.block_m, f"blocks of {block_m} for tiles of {tile.block_m}"
    assert reads_runs(weight), f"{weight.codes.name} in runs of {weight.half}"
    assert x.codes.shape[1] == num_columns, f"{x.codes.shape} against {weight.shape}"
    assert x.group == sum_columns(weight), f"sums of {x.group} columns"
    device = weight.data.device
    use_pdl = pdl_supported(device)
    _moe_rounded_int4_kernel[(num_blocks * triton.cdiv(num_rows, tile.block_n),)](
        x.codes,
        x.scales,
        x.sums,
        weight.data,
        weight.scales,
        blocks.routes,
        blocks.experts,
        routes.weights,
        y,
        num_blocks,
        x.num_lines,
        N=num_rows,
        K=num_columns,
        TOP_K=routes.ids.shape[1],
        IS_GATED=is_gated,
        CODES=weight.codes,
        GROUP=weight.tile_columns,
        NUM_GROUPS=weight.scales.shape[2],
        HALF=weight.half,
        SUM=x.group,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        GROUP_M=tile.group_m,
        NUM_STAGES=tile.num_stages,
        KNOWS_E4M3=knows_e4m3(device),
        USES_PTX=uses_ptx(device),
        USE_PDL=use_pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=use_pdl,
    )


def reference(weight: CodedExperts) -> Tensor:
    """What the weights stand for, [experts, N, K] in float64."""
    numbers = unpack_int4(weight.data.flatten(0, 1), weight.half).view(weight.shape).double()
    words = weight.scales
    has_zeros = weight.codes is Codes.INT4_ZEROS
    zeros = (words & 15 if has_zeros else torch.full_like(words, 8)).double()
    scales = words & -16 if has_zeros else words
    parts = [scales.contiguous().view(torch.float32).double(), zeros]
    spread, middle = (
        part.repeat_interleave(weight.tile_columns, dim=2)[:, :, : weight.shape[2]]
        for part in parts
    )
    return (numbers - middle) * spread

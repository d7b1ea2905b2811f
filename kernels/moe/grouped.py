"""Products of many tokens with their experts on a GPU, one expert a tile.

    inner[r] = silu(x[t] Wg_e^T) * (x[t] Wu_e^T)        t = r // k, the token of route r
    out[r]   = weight_r  inner[r] Wd_e^T                e = the expert of route r

Routes come sorted by expert in blocks (align.py); a program computes one block with BLOCK_N rows of
the expert's weight, from all columns. So a route's sums have one order for one tiling, whatever
else is in its block. The first product gathers tokens and leaves its results in the order of the
blocks, where the second reads them one after the other and puts its own in the order of routes.

A tile has the same rows of gate and up, so that the gate is applied before anything is written:
they alternate, or, where the copy engine (TMA) loads them, gate's come first. Lines and rows of
routes without expert are not written. A grid holds as many blocks as there can be; programs of
unused ones end at once. The parts of an expert that all tokens pass can be experts after the
others, of weight 1 (`JoinedExperts`). What may be prefetched before the product before is complete
is as in `kernels.moe.few`. Quantised experts are decoded on their way (coded.py). Torch twins:
`gate_up_reference` and `down_reference`, both by route.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.instructions import knows_e4m3, uses_ptx
from kernels.linear.small import prefetch_rows
from kernels.moe.align import Blocks
from kernels.moe.coded import CodedExperts, coded_product
from kernels.moe.form import PLAIN, ExpertForm, bias_of
from kernels.moe.gate import gate_factor, up_factor
from kernels.moe.mxfp4 import Mxfp4Experts, mxfp4_product, prefetch_tile
from kernels.moe.reference import ExpertMatrices, routes_by_expert
from kernels.moe.routes import Routes
from kernels.moe.shared import JoinedExperts
from kernels.moe.tiles import Tile
from kernels.pdl import pdl_supported

ExpertWeight = Tensor | CodedExperts | Mxfp4Experts


@triton.jit
def tile_of(  # noqa: ANN201
    program, num_blocks, NUM_TILES_N: tl.constexpr, GROUP_M: tl.constexpr
):
    """Block and tile of weight rows; programs that run together form a square, for the L2 cache."""
    group_size = GROUP_M * NUM_TILES_N
    first = program // group_size * GROUP_M
    height = tl.minimum(num_blocks - first, GROUP_M)
    inside = program % group_size
    return first + inside % height, inside // height


@triton.jit
def _prefetch(
    weight_ptr, expert_ptr, tile_n, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    PREFETCH_K: tl.constexpr, IS_MXFP4: tl.constexpr,
):  # fmt: skip
    """Prefetch the first columns of a tile to the L2 cache."""
    expert = tl.load(expert_ptr)
    if expert >= 0:
        if IS_MXFP4:
            prefetch_tile(weight_ptr, expert, tile_n, N, K, BLOCK_N, PREFETCH_K)
        else:
            rows = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
            prefetch_rows(weight_ptr, expert.to(tl.int64) * N + rows, 0, K, PREFETCH_K)


@triton.jit
def _load_rows(pointers, is_row, k_offsets, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns [k, k + BLOCK_K) of gathered rows; zeros for those that are not there."""
    if K % BLOCK_K == 0:
        rows = tl.load(pointers + k, mask=is_row, other=0.0)
    else:
        rows = tl.load(pointers + k, mask=is_row & (k_offsets < K - k)[None, :], other=0.0)
    return rows


@triton.jit
def weight_rows(
    tile_n, N: tl.constexpr, IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """Rows of a tile; if gated, gate's and up's alternate."""
    # Rows past the end repeat the last and are not stored: cheaper than masking every load.
    w_rows = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    if IS_GATED:
        w_rows = (w_rows % 2) * (N // 2) + w_rows // 2
    return w_rows


@triton.jit
def _rows_of(
    weight_ptr, shared_ptr, expert, tile_n, N: tl.constexpr, K: tl.constexpr,
    IS_GATED: tl.constexpr, NUM_EXPERTS: tl.constexpr, SHARED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Pointers to the first columns of an expert's rows, or a shared part's, [BLOCK_N, 1]."""
    rows = weight_rows(tile_n, N, IS_GATED, BLOCK_N)[:, None]
    own = weight_ptr + (expert.to(tl.int64) * N + rows) * K
    if SHARED > 0:
        part = tl.maximum(expert - NUM_EXPERTS, 0).to(tl.int64)
        if IS_GATED:
            # Gate's rows of all parts come before up's.
            behind = tl.where(rows >= N // 2, (SHARED - 1) * (N // 2), 0)
            shared = shared_ptr + (part * (N // 2) + rows + behind) * K
        else:
            shared = shared_ptr + part * K + rows.to(tl.int64) * (SHARED * K)
        own = tl.where(expert >= NUM_EXPERTS, shared, own)
    return own


@triton.jit
def _product(
    x_pointers, is_row, first_columns, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N]; if gated, columns of gate and up alternate. See `_rows_of`."""
    k_offsets = tl.arange(0, BLOCK_K)
    w_pointers = first_columns + k_offsets[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = _load_rows(x_pointers, is_row, k_offsets, k, K, BLOCK_K)
        if K % BLOCK_K == 0:
            w = tl.load(w_pointers + k)
        else:
            w = tl.load(w_pointers + k, mask=(k_offsets < K - k)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _product_by_tma(
    x, x_pointers, is_row, first_line, weight_desc, expert, tile_n, K: tl.constexpr,
    IS_GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N]; if gated, columns of gate before those of up.

    If gated, rows are gathered by `x_pointers`; else `x` is a descriptor of [BLOCK_M, BLOCK_K].
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if IS_GATED:
            rows = _load_rows(x_pointers, is_row, tl.arange(0, BLOCK_K), k, K, BLOCK_K)
            piece = weight_desc.load([expert, 0, tile_n * (BLOCK_N // 2), k])
        else:
            rows = x.load([first_line, k])
            piece = weight_desc.load([expert, tile_n * BLOCK_N, k])
        w = tl.reshape(piece, (BLOCK_N, BLOCK_K))
        acc = tl.dot(rows, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _quantised_product(
    x_pointers, is_row, data_ptr, scales_ptr, factors_ptr, expert, tile_n, N: tl.constexpr,
    K: tl.constexpr, IS_GATED: tl.constexpr, CODES: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    HAS_FACTORS: tl.constexpr, KNOWS_E4M3: tl.constexpr, USES_PTX: tl.constexpr,
    UNROLL: tl.constexpr, IS_MXFP4: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N]; if gated, columns of gate and up alternate."""
    if IS_MXFP4:
        acc = mxfp4_product(
            x_pointers, is_row, data_ptr, scales_ptr, expert, tile_n, N, K, BLOCK_M, BLOCK_N,
            NUM_STAGES, UNROLL, USES_PTX,
        )  # fmt: skip
    else:
        w_rows = weight_rows(tile_n, N, IS_GATED, BLOCK_N)
        acc = coded_product(
            x_pointers, is_row, data_ptr, scales_ptr, factors_ptr, expert, w_rows, N, K, CODES,
            TILE_ROWS, TILE_COLUMNS, NUM_TILES, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, HAS_FACTORS,
            KNOWS_E4M3, USES_PTX, UNROLL,
        )  # fmt: skip
    return acc


@triton.jit
def gated(  # noqa: ANN201
    acc, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BY_TMA: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """acc: [BLOCK_M, 2 WIDTH], gate and up."""
    if BY_TMA:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, WIDTH)), (0, 2, 1)))
    else:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, WIDTH, 2)))
    return gate_factor(gate, ALPHA, LIMIT) * up_factor(up, LIMIT)


@triton.jit
def _weights_of(scales_ptr, routes, TOP_K: tl.constexpr, SHARED: tl.constexpr):
    """What outputs of routes are multiplied by; shared parts' by 1."""
    routes = tl.maximum(routes, 0)
    if SHARED > 0:
        place = routes % (TOP_K + SHARED)
        own = routes // (TOP_K + SHARED) * TOP_K + place
        scales = tl.load(scales_ptr + own, mask=place < TOP_K, other=1.0)
    else:
        scales = tl.load(scales_ptr + routes)
    return scales


@triton.jit
def _bias_of(
    bias_ptr, expert, tile_n, N: tl.constexpr, IS_GATED: tl.constexpr, BY_TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N] in fp32, of the columns as `_product` and `_product_by_tma` have them."""
    lane = tl.arange(0, BLOCK_N)
    rows = tile_n * BLOCK_N + lane
    mask = rows < N
    if IS_GATED:
        if BY_TMA:
            half = tile_n * (BLOCK_N // 2) + lane % (BLOCK_N // 2)
            rows = lane // (BLOCK_N // 2) * (N // 2) + half
            mask = half < N // 2
        else:
            rows = (rows % 2) * (N // 2) + rows // 2
    return tl.load(bias_ptr + expert.to(tl.int64) * N + rows, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_blocks"])
def _moe_grouped_kernel(
    x,  # [tokens, K] if IS_GATED, else [num_blocks BLOCK_M, K], or a descriptor of it if BY_TMA
    weight,  # [experts, N, K]; if BY_TMA, a descriptor of pieces as `_pieces` cuts them; or coded
    code_scales_ptr,  # those of `CodedExperts` if CODES is not None, or of `Mxfp4Experts`
    factors_ptr,  # those of `CodedExperts` if HAS_FACTORS
    routes_ptr,  # int32 [num_blocks, BLOCK_M]
    experts_ptr,  # int32 [num_blocks]
    scales_ptr,  # fp32 [routes] unless IS_GATED
    prefetched_ptr,  # the weight if PREFETCH_K
    bias_ptr,  # [experts, N] or None
    shared_ptr,  # [SHARED N, K] if IS_GATED, else [N, SHARED K], if SHARED > 0
    # outputs
    y_ptr,  # [num_blocks BLOCK_M, N // 2] if IS_GATED, else [routes, N], shared parts' too
    # constants
    num_blocks,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BY_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    USE_PDL: tl.constexpr,
    # quantised experts
    CODES: tl.constexpr = None,
    TILE_ROWS: tl.constexpr = 1,
    TILE_COLUMNS: tl.constexpr = 1,
    NUM_TILES: tl.constexpr = 1,
    NUM_STAGES: tl.constexpr = 1,
    HAS_FACTORS: tl.constexpr = False,
    KNOWS_E4M3: tl.constexpr = False,
    USES_PTX: tl.constexpr = False,
    UNROLL: tl.constexpr = 1,
    IS_MXFP4: tl.constexpr = False,  # `Mxfp4Experts`
    # `JoinedExperts`
    NUM_EXPERTS: tl.constexpr = 0,
    SHARED: tl.constexpr = 0,  # parts
):
    NUM_TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    NUM_OUTPUTS: tl.constexpr = N // 2 if IS_GATED else N
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    block, tile_n = tile_of(tl.program_id(0), num_blocks, NUM_TILES_N, GROUP_M)
    if USE_PDL:
        if PREFETCH_K > 0:
            _prefetch(
                prefetched_ptr, experts_ptr + block, tile_n, N, K, BLOCK_N, PREFETCH_K, IS_MXFP4
            )
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + block)
    if expert < 0:
        return
    lines = block * BLOCK_M + tl.arange(0, BLOCK_M)
    routes = tl.load(routes_ptr + lines)
    is_route = (routes >= 0)[:, None]
    x_pointers = x
    if IS_GATED:
        tokens = (tl.maximum(routes, 0) // (TOP_K + SHARED))[:, None].to(tl.int64)
        x_pointers = x + tokens * K + tl.arange(0, BLOCK_K)[None, :]
    elif not BY_TMA:
        x_pointers = x + lines[:, None].to(tl.int64) * K + tl.arange(0, BLOCK_K)[None, :]
    if BY_TMA:
        acc = _product_by_tma(
            x, x_pointers, is_route, block * BLOCK_M, weight, expert, tile_n, K, IS_GATED, BLOCK_M,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
    elif CODES is not None or IS_MXFP4:
        acc = _quantised_product(
            x_pointers, is_route, weight, code_scales_ptr, factors_ptr, expert, tile_n, N, K,
            IS_GATED, CODES, TILE_ROWS, TILE_COLUMNS, NUM_TILES, BLOCK_M, BLOCK_N, BLOCK_K,
            NUM_STAGES, HAS_FACTORS, KNOWS_E4M3, USES_PTX, UNROLL, IS_MXFP4,
        )  # fmt: skip
    else:
        first_columns = _rows_of(
            weight, shared_ptr, expert, tile_n, N, K, IS_GATED, NUM_EXPERTS, SHARED, BLOCK_N
        )
        acc = _product(x_pointers, is_route, first_columns, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
    if bias_ptr is not None:
        acc += _bias_of(bias_ptr, expert, tile_n, N, IS_GATED, BY_TMA, BLOCK_N)[None, :]
    if IS_GATED:
        y = gated(acc, ALPHA, LIMIT, BY_TMA, BLOCK_M, WIDTH)
        y_lines = lines
    else:
        y = acc * _weights_of(scales_ptr, routes, TOP_K, SHARED)[:, None]
        y_lines = routes
    outputs = tile_n * WIDTH + tl.arange(0, WIDTH)
    offsets = y_lines[:, None].to(tl.int64) * NUM_OUTPUTS + outputs[None, :]
    mask = is_route & (outputs < NUM_OUTPUTS)[None, :]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


def grouped_gate_up(
    x: Tensor,
    weight: ExpertWeight | JoinedExperts,
    routes: Routes,
    blocks: Blocks,
    tile: Tile,
    form: ExpertForm = PLAIN,
) -> Tensor:
    """x: [T, hidden], weight: [experts, 2 n, hidden], gate's rows first.

    blocks: the routes in blocks of `tile.block_m`. Returns [blocks block_m, n], a line for each
    place of a block; those without a route are not written.
    """
    y = x.new_empty((blocks.routes.numel(), weight.shape[1] // 2))
    _launch(x, weight, routes, blocks, y, tile, form, is_gated=True)
    return y


def grouped_down(
    inner: Tensor,
    weight: ExpertWeight | JoinedExperts,
    routes: Routes,
    blocks: Blocks,
    tile: Tile,
    form: ExpertForm = PLAIN,
) -> Tensor:
    """inner: as `grouped_gate_up` returns it, weight: [experts, hidden, n].

    Returns [T, k, hidden], weighted, of joined experts [T, k + parts, hidden]; rows of routes
    without expert are not written.
    """
    num_tokens, num_active = routes.ids.shape
    num_places = num_active + (weight.num_parts if isinstance(weight, JoinedExperts) else 0)
    assert inner.shape[0] == blocks.routes.numel(), f"{inner.shape} for {blocks.routes.shape}"
    y = inner.new_empty((num_tokens, num_places, weight.shape[1]))
    _launch(inner, weight, routes, blocks, y, tile, form, is_gated=False)
    return y


def _launch(
    x: Tensor,
    weight: ExpertWeight | JoinedExperts,
    routes: Routes,
    blocks: Blocks,
    y: Tensor,
    tile: Tile,
    form: ExpertForm,
    *,
    is_gated: bool,
) -> None:
    num_blocks, block_m = blocks.routes.shape
    _, num_rows, num_columns = weight.shape
    assert block_m == tile.block_m, f"blocks of {block_m} for tiles of {tile.block_m}"
    assert x.shape[1] == num_columns, f"{x.shape} against {weight.shape}"
    assert x.is_contiguous(), f"x has strides {x.stride()}"
    use_pdl = pdl_supported(x.device)
    rows: Tensor | TensorDescriptor = x
    if tile.by_tma and not is_gated:
        rows = TensorDescriptor.from_tensor(x, [block_m, tile.block_k])
    shared: Tensor | None = None
    joining: dict[str, int] = {}
    if isinstance(weight, JoinedExperts):
        _check_joined(weight, tile, form)
        joining = {"NUM_EXPERTS": weight.shape[0], "SHARED": weight.num_parts}
        shared, weight = weight.shared, weight.own
    operand, coding = _operand(x, weight, tile, is_gated=is_gated)
    _moe_grouped_kernel[(num_blocks * triton.cdiv(num_rows, tile.block_n),)](
        rows,
        *operand,
        blocks.routes,
        blocks.experts,
        routes.weights,
        weight if isinstance(weight, Tensor) else weight.data,
        form.gate_up_bias if is_gated else form.down_bias,
        shared,
        y,
        num_blocks,
        N=num_rows,
        K=num_columns,
        TOP_K=routes.ids.shape[1],
        IS_GATED=is_gated,
        **form.gate_constants,
        BY_TMA=tile.by_tma,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        PREFETCH_K=0 if is_gated else tile.prefetch_k,
        USE_PDL=use_pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=use_pdl,
        **coding,
        **joining,
    )


def _check_joined(weight: JoinedExperts, tile: Tile, form: ExpertForm) -> None:
    assert not tile.by_tma, "the copy engine loads no shared expert"
    assert tile.prefetch_k == 0, "no columns of a shared expert are prefetched"
    assert form.gate_up_bias is None, "a shared expert has no biases"
    assert form.down_bias is None, "a shared expert has no biases"
    own, shared = weight.own, weight.shared
    assert shared.numel() == weight.num_parts * own[0].numel(), f"{shared.shape} by {own.shape}"
    assert shared.dtype == own.dtype, f"{shared.dtype} beside {own.dtype}"
    assert shared.is_contiguous(), f"a shared weight with strides {shared.stride()}"


def _operand(
    x: Tensor, weight: ExpertWeight, tile: Tile, *, is_gated: bool
) -> tuple[tuple[Any, Tensor | None, Tensor | None], dict[str, Any]]:
    """The kernel's arguments for the weight, its scales and factors; and constants."""
    if isinstance(weight, Tensor):
        assert x.dtype == weight.dtype, f"{x.dtype} against {weight.dtype}"
        assert weight.is_contiguous(), f"the weight has strides {weight.stride()}"
        pieces = _pieces(weight, tile, is_gated=is_gated) if tile.by_tma else weight
        return (pieces, None, None), {}
    assert not tile.by_tma, "the copy engine does not load quantised experts"
    coding = {
        "NUM_STAGES": tile.num_stages,
        "USES_PTX": uses_ptx(x.device),
        "UNROLL": tile.unroll,
    }
    if isinstance(weight, Mxfp4Experts):
        weight.check(tile, is_gated=is_gated)
        return (weight.data, weight.scales, None), coding | {"IS_MXFP4": True}
    assert tile.prefetch_k == 0, "only MXFP4's words are prefetched"
    assert weight.half in (0, tile.block_k), f"runs of {weight.half}, {tile.block_k} a tile"
    coding |= {
        "CODES": weight.codes,
        "TILE_ROWS": weight.tile_rows,
        "TILE_COLUMNS": weight.tile_columns,
        "NUM_TILES": weight.scales.shape[2],
        "HAS_FACTORS": weight.factors is not None,
        "KNOWS_E4M3": knows_e4m3(x.device),
    }
    return (weight.data, weight.scales, weight.factors), coding


def _pieces(weight: Tensor, tile: Tile, *, is_gated: bool) -> TensorDescriptor:
    """The weight by pieces of one expert; if gated, of the same rows of gate and up."""
    if not is_gated:
        return TensorDescriptor.from_tensor(weight, [1, tile.block_n, tile.block_k])
    num_experts, num_rows, num_columns = weight.shape
    halves = weight.view(num_experts, 2, num_rows // 2, num_columns)
    return TensorDescriptor.from_tensor(halves, [1, 2, tile.block_n // 2, tile.block_k])


def by_block(of_routes: Tensor, blocks: Blocks) -> Tensor:
    """Rows of routes, [T k, n], in the order of the blocks; those without a route are NaN."""
    routes = blocks.routes.flatten()
    is_used = (blocks.experts >= 0).repeat_interleave(blocks.routes.shape[1]) & (routes >= 0)
    lines = torch.full_like(of_routes[:1].expand(len(routes), -1), torch.nan)
    lines[is_used] = of_routes[routes[is_used].long()]
    return lines


def gate_up_reference(
    x: Tensor, weight: ExpertMatrices, routes: Routes, form: ExpertForm = PLAIN
) -> Tensor:
    """Gate and up of each route, gated, [T k, n]; zeros where a route has no expert."""
    num_active = routes.ids.shape[1]
    y = x.new_zeros((routes.ids.numel(), weight.shape[1] // 2))
    for expert, indices in routes_by_expert(routes.ids):
        bias = bias_of(form.gate_up_bias, expert)
        y[indices] = form.gated(F.linear(x[indices // num_active], weight[expert], bias))
    return y


def down_reference(
    inner: Tensor, weight: ExpertMatrices, routes: Routes, form: ExpertForm = PLAIN
) -> Tensor:
    """inner: [T k, n]; returns [T, k, hidden], weighted; zeros where a route has no expert."""
    y = inner.new_zeros((routes.ids.numel(), weight.shape[1]))
    scales = routes.weights.flatten()
    for expert, indices in routes_by_expert(routes.ids):
        out = F.linear(inner[indices], weight[expert], bias_of(form.down_bias, expert))
        out = out * scales[indices, None]
        y[indices] = out.to(y.dtype)
    return y.view(*routes.ids.shape, -1)

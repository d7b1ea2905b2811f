"""Products of a few tokens with their experts on a GPU, at the speed of reading the weights.

    inner[r] = silu(x[t] Wg_e^T) * (x[t] Wu_e^T)             t = r // k, the token of route r
    y[t]     = sum over r of  weight_r  inner[r] Wd_e^T  (+ sigmoid(gate) * shared)

With so few tokens hardly two share an expert, so routes are not sorted: a program reads BLOCK_N
rows of one expert for one route, and in the second product those of all experts of a token, one
after the other, which saves the sum's kernel. Sums in fp32, in one order, rounded once.

The second kernel may start while the first still runs (kernels/pdl.py). The first lets it start
only when the router's results are there, so it can prefetch weights of the right experts. Torch
twins: `kernels.moe.grouped.gate_up_reference`, and `down_reference` with `reference.combine`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.small import prefetch_rows
from kernels.moe.form import PLAIN, ExpertForm
from kernels.moe.gate import gate_factor, up_factor
from kernels.moe.routes import Routes
from kernels.moe.tiles import FewTile
from kernels.pdl import pdl_supported

# Steps over the columns whose loads are under way together.
_UNROLLED = tl.constexpr(4)


@triton.jit
def _moe_few_gate_up_kernel(
    x_ptr,  # [tokens, K]
    weight_ptr,  # [experts, 2 N, K]
    ids_ptr,  # int32 [routes]
    bias_ptr,  # [experts, 2 N] or None
    # outputs
    y_ptr,  # [routes, N]
    # constants
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    route = tl.program_id(1)
    expert = tl.load(ids_ptr + route)
    if expert < 0:
        return
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = expert.to(tl.int64) * 2 * N + tl.minimum(columns, N - 1)
    k_offsets = tl.arange(0, BLOCK_K)
    gate_pointers = weight_ptr + rows[:, None] * K + k_offsets[None, :]
    gate = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, loop_unroll_factor=_UNROLLED):
        is_column = k_offsets < K - k
        x = tl.load(x_ptr + route // TOP_K * K + k + k_offsets, mask=is_column, other=0.0)
        x = x.to(tl.float32)[None, :]
        mask = is_column[None, :]
        gate += tl.load(gate_pointers + k, mask=mask, other=0.0).to(tl.float32) * x
        up += tl.load(gate_pointers + N * K + k, mask=mask, other=0.0).to(tl.float32) * x
    gate_sum = tl.sum(gate, axis=1)
    if bias_ptr is not None:
        gate_sum += tl.load(bias_ptr + rows).to(tl.float32)
    y = gate_factor(gate_sum, ALPHA, LIMIT)
    up_sum = tl.sum(up, axis=1)
    if bias_ptr is not None:
        up_sum += tl.load(bias_ptr + rows + N).to(tl.float32)
    y = y * up_factor(up_sum, LIMIT)
    tl.store(y_ptr + route * N + columns, y.to(y_ptr.dtype.element_ty), mask=columns < N)


@triton.jit
def _moe_few_down_kernel(
    inner_ptr,  # [tokens, TOP_K, K]
    weight_ptr,  # [experts, N, K]
    ids_ptr,  # int32 [tokens, TOP_K]
    scales_ptr,  # fp32 [tokens, TOP_K]
    shared_ptr,  # [tokens, N] if HAS_SHARED
    gate_ptr,  # [tokens] if HAS_GATE
    bias_ptr,  # [experts, N] or None
    # outputs
    y_ptr,  # [tokens, N]
    # constants
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    token = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = columns < N
    rows = tl.minimum(columns, N - 1)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH_K > 0:
            for i in tl.static_range(TOP_K):
                early = tl.maximum(tl.load(ids_ptr + token * TOP_K + i), 0).to(tl.int64)
                prefetch_rows(weight_ptr, early * N + rows, 0, K, PREFETCH_K)
        tl.extra.cuda.gdc_wait()
    k_offsets = tl.arange(0, BLOCK_K)
    # Neither a branch nor a sum over threads between one expert's loads and the next one's: so many
    # loads are under way at a time.
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        route = token * TOP_K + i
        expert = tl.load(ids_ptr + route)
        scale = tl.where(expert >= 0, tl.load(scales_ptr + route), 0.0)
        first_row = tl.maximum(expert, 0).to(tl.int64) * N
        pointers = weight_ptr + (first_row + rows[:, None]) * K + k_offsets[None, :]
        for k in tl.range(0, K, BLOCK_K, loop_unroll_factor=_UNROLLED):
            mask = (k_offsets < K - k) & (expert >= 0)
            x = tl.load(inner_ptr + route * K + k + k_offsets, mask=mask, other=0.0)
            w = tl.load(pointers + k, mask=mask[None, :], other=0.0)
            acc += w.to(tl.float32) * (scale * x.to(tl.float32))[None, :]
    total = tl.sum(acc, axis=1)
    if bias_ptr is not None:
        for i in tl.static_range(TOP_K):
            biased = tl.load(ids_ptr + token * TOP_K + i)
            weight = tl.where(biased >= 0, tl.load(scales_ptr + token * TOP_K + i), 0.0)
            at = bias_ptr + tl.maximum(biased, 0).to(tl.int64) * N + rows
            total += weight * tl.load(at).to(tl.float32)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * N + columns, mask=is_output, other=0.0).to(tl.float32)
        if HAS_GATE:
            shared = tl.sigmoid(tl.load(gate_ptr + token).to(tl.float32)) * shared
        total += shared
    tl.store(y_ptr + token * N + columns, total.to(y_ptr.dtype.element_ty), mask=is_output)


def few_gate_up(
    x: Tensor, weight: Tensor, routes: Routes, tile: FewTile, form: ExpertForm = PLAIN
) -> Tensor:
    """x: [T, hidden], weight: [experts, 2 n, hidden], gate's rows first; returns [T k, n]."""
    num_tokens, num_active = routes.ids.shape
    _, num_rows, num_columns = weight.shape
    _check(x, weight)
    assert num_tokens == x.shape[0], f"{num_tokens} tokens have routes, {x.shape[0]} are there"
    y = x.new_empty((num_tokens * num_active, num_rows // 2))
    use_pdl = pdl_supported(x.device)
    _moe_few_gate_up_kernel[(triton.cdiv(num_rows // 2, tile.block_n), num_tokens * num_active)](
        x,
        weight,
        routes.ids,
        form.gate_up_bias,
        y,
        N=num_rows // 2,
        K=num_columns,
        TOP_K=num_active,
        **form.gate_constants,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        USE_PDL=use_pdl,
        num_warps=tile.num_warps,
        launch_pdl=use_pdl,
    )
    return y


def few_down(
    inner: Tensor,
    weight: Tensor,
    routes: Routes,
    tile: FewTile,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
    form: ExpertForm = PLAIN,
) -> Tensor:
    """inner: [T k, n], weight: [experts, hidden, n]; returns [T, hidden], summed over experts.

    shared: [T, hidden], of an expert that all tokens share, or None; gate: [T, 1], its factor
    before the sigmoid, or None for a factor of 1.
    """
    num_tokens, num_active = routes.ids.shape
    _, num_rows, num_columns = weight.shape
    _check(inner, weight)
    y = inner.new_empty((num_tokens, num_rows))
    use_pdl = pdl_supported(inner.device)
    _moe_few_down_kernel[(triton.cdiv(num_rows, tile.block_n), num_tokens)](
        inner,
        weight,
        routes.ids,
        routes.weights,
        y if shared is None else shared,
        y if gate is None else gate,
        form.down_bias,
        y,
        N=num_rows,
        K=num_columns,
        TOP_K=num_active,
        HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PREFETCH_K=tile.prefetch_k,
        USE_PDL=use_pdl,
        num_warps=tile.num_warps,
        launch_pdl=use_pdl,
    )
    return y


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.shape[1] == weight.shape[2], f"{x.shape} against {weight.shape}"
    assert x.dtype == weight.dtype, f"{x.dtype} against {weight.dtype}"
    assert x.is_contiguous(), f"x has strides {x.stride()}"
    assert weight.is_contiguous(), f"the weight has strides {weight.stride()}"

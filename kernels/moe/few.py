"""Products of a few tokens with their experts on a GPU, at the speed of reading the weights.

    inner[r] = silu(x[t] Wg_e^T) * (x[t] Wu_e^T)             t = r // k, the token of route r
    y[t]     = sum over r of  weight_r  inner[r] Wd_e^T  (+ sigmoid(gate) * shared)

With so few tokens hardly two share an expert, so routes are not sorted: a program reads BLOCK_N
rows of one expert for one route, and in the second product those of all experts of a token, one
after the other, which saves the sum's kernel. Sums in fp32, in one order, rounded once.

An expert that all tokens pass can be computed along with the others (`SharedMatrices`): of their
size, or several times as large, it is as many routes more. It needs no router, so its weight is
prefetched while the kernels before still run.

The second kernel may start while the first still runs (kernels/pdl.py). The first lets it start
only when the router's results are there, so it can prefetch weights of the right experts. Torch
twins: `kernels.moe.grouped.gate_up_reference`, and `down_reference` with `reference.combine`; of
shared matrices the same with them as experts of weight 1.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.small import prefetch_rows
from kernels.moe.form import PLAIN, ExpertForm
from kernels.moe.gate import gate_factor, up_factor
from kernels.moe.routes import Routes
from kernels.moe.shared import SharedMatrices
from kernels.moe.tiles import FewTile
from kernels.pdl import pdl_supported

# Steps over the columns whose loads are under way together.
_UNROLLED = tl.constexpr(4)


@triton.jit
def _gate_up_sums(
    x_ptr, weight_ptr, rows, UP: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """x W^T of `rows`, and of those UP rows further down: [BLOCK_N] fp32 each."""
    k_offsets = tl.arange(0, BLOCK_K)
    gate_pointers = weight_ptr + rows[:, None] * K + k_offsets[None, :]
    gate = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, loop_unroll_factor=_UNROLLED):
        is_column = k_offsets < K - k
        x = tl.load(x_ptr + k + k_offsets, mask=is_column, other=0.0).to(tl.float32)[None, :]
        mask = is_column[None, :]
        gate += tl.load(gate_pointers + k, mask=mask, other=0.0).to(tl.float32) * x
        up += tl.load(gate_pointers + UP * K + k, mask=mask, other=0.0).to(tl.float32) * x
    return tl.sum(gate, axis=1), tl.sum(up, axis=1)


@triton.jit
def _moe_few_gate_up_kernel(
    x_ptr,  # [tokens, K]
    weight_ptr,  # [experts, 2 N, K]
    ids_ptr,  # int32 [tokens, TOP_K]
    bias_ptr,  # [experts, 2 N] or None
    shared_ptr,  # [2 SHARED N, K] if SHARED > 0
    # outputs
    y_ptr,  # [tokens, TOP_K + SHARED, N]
    # constants
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    # Programs of the shared expert come first: only those that run can prefetch.
    token = tl.program_id(1) // (TOP_K + SHARED)
    place = (tl.program_id(1) + TOP_K) % (TOP_K + SHARED)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    units = tl.minimum(columns, N - 1)
    x_row_ptr = x_ptr + token * K
    y_pointers = y_ptr + (token * (TOP_K + SHARED) + place) * N + columns
    if SHARED > 0 and place >= TOP_K:
        shared_rows = (place - TOP_K).to(tl.int64) * N + units
        if USE_PDL:
            prefetch_rows(shared_ptr, shared_rows, 0, K, PREFETCH_K)
            prefetch_rows(shared_ptr, shared_rows + SHARED * N, 0, K, PREFETCH_K)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        shared_gate, shared_up = _gate_up_sums(
            x_row_ptr, shared_ptr, shared_rows, SHARED * N, K, BLOCK_N, BLOCK_K
        )
        shared_y = gate_factor(shared_gate, ALPHA, LIMIT) * up_factor(shared_up, LIMIT)
        tl.store(y_pointers, shared_y.to(y_ptr.dtype.element_ty), mask=columns < N)
        return
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(ids_ptr + token * TOP_K + place)
    if expert < 0:
        return
    rows = expert.to(tl.int64) * 2 * N + units
    gate_sum, up_sum = _gate_up_sums(x_row_ptr, weight_ptr, rows, N, K, BLOCK_N, BLOCK_K)
    if bias_ptr is not None:
        gate_sum += tl.load(bias_ptr + rows).to(tl.float32)
        up_sum += tl.load(bias_ptr + rows + N).to(tl.float32)
    y = gate_factor(gate_sum, ALPHA, LIMIT) * up_factor(up_sum, LIMIT)
    tl.store(y_pointers, y.to(y_ptr.dtype.element_ty), mask=columns < N)


@triton.jit
def _add_products(
    acc, x_ptr, weight_ptr, rows, scale, is_used, K: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """acc [BLOCK_N, BLOCK_K] plus scale * x * W of `rows`, still to be summed over the columns.

    STRIDE: from one row of W to the next.
    """
    k_offsets = tl.arange(0, BLOCK_K)
    pointers = weight_ptr + rows[:, None] * STRIDE + k_offsets[None, :]
    for k in tl.range(0, K, BLOCK_K, loop_unroll_factor=_UNROLLED):
        mask = (k_offsets < K - k) & is_used
        x = tl.load(x_ptr + k + k_offsets, mask=mask, other=0.0)
        w = tl.load(pointers + k, mask=mask[None, :], other=0.0)
        acc += w.to(tl.float32) * (scale * x.to(tl.float32))[None, :]
    return acc


@triton.jit
def _biases(
    bias_ptr, ids_ptr, scales_ptr, token, rows, N: tl.constexpr, TOP_K: tl.constexpr
) -> tl.tensor:
    """The weighted sum of a token's experts' biases of `rows`."""
    total = tl.zeros_like(rows).to(tl.float32)
    for i in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + i)
        weight = tl.where(expert >= 0, tl.load(scales_ptr + token * TOP_K + i), 0.0)
        at = bias_ptr + tl.maximum(expert, 0).to(tl.int64) * N + rows
        total += weight * tl.load(at).to(tl.float32)
    return total


@triton.jit
def _moe_few_down_kernel(
    inner_ptr,  # [tokens, TOP_K + SHARED, K]
    weight_ptr,  # [experts, N, K]
    ids_ptr,  # int32 [tokens, TOP_K]
    scales_ptr,  # fp32 [tokens, TOP_K]
    shared_ptr,  # [tokens, N] if HAS_SHARED; [N, SHARED K] if SHARED > 0
    gate_ptr,  # [tokens] if HAS_GATE
    bias_ptr,  # [experts, N] or None
    # outputs
    y_ptr,  # [tokens, N]
    # constants
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
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
    lines_ptr = inner_ptr + token * (TOP_K + SHARED) * K
    gate = 1.0
    if HAS_GATE:
        gate = tl.sigmoid(tl.load(gate_ptr + token).to(tl.float32))
    # Neither a branch nor a sum over threads between one expert's loads and the next one's: so many
    # loads are under way at a time.
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + i)
        scale = tl.where(expert >= 0, tl.load(scales_ptr + token * TOP_K + i), 0.0)
        expert_rows = tl.maximum(expert, 0).to(tl.int64) * N + rows
        acc = _add_products(
            acc, lines_ptr + i * K, weight_ptr, expert_rows, scale, expert >= 0, K, K, BLOCK_K
        )
    for i in tl.static_range(SHARED):
        acc = _add_products(
            acc, lines_ptr + (TOP_K + i) * K, shared_ptr + i * K, rows.to(tl.int64), gate, True, K,
            SHARED * K, BLOCK_K,
        )  # fmt: skip
    total = tl.sum(acc, axis=1)
    if bias_ptr is not None:
        total += _biases(bias_ptr, ids_ptr, scales_ptr, token, rows, N, TOP_K)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * N + columns, mask=is_output, other=0.0)
        total += gate * shared.to(tl.float32)
    tl.store(y_ptr + token * N + columns, total.to(y_ptr.dtype.element_ty), mask=is_output)


def few_gate_up(
    x: Tensor,
    weight: Tensor,
    routes: Routes,
    tile: FewTile,
    form: ExpertForm = PLAIN,
    shared: SharedMatrices | None = None,
) -> Tensor:
    """x: [T, hidden], weight: [experts, 2 n, hidden], gate's rows first; returns [T k, n].

    shared: computed too, with the same gate and without biases: [T (k + its parts), n].
    """
    num_tokens, num_active = routes.ids.shape
    _, num_rows, num_columns = weight.shape
    _check(x, weight)
    assert num_tokens == x.shape[0], f"{num_tokens} tokens have routes, {x.shape[0]} are there"
    num_parts = _num_parts(shared, num_rows // 2)
    num_lines = num_tokens * (num_active + num_parts)
    y = x.new_empty((num_lines, num_rows // 2))
    use_pdl = pdl_supported(x.device)
    _moe_few_gate_up_kernel[(triton.cdiv(num_rows // 2, tile.block_n), num_lines)](
        x,
        weight,
        routes.ids,
        form.gate_up_bias,
        weight if shared is None else shared.gate_up,
        y,
        N=num_rows // 2,
        K=num_columns,
        TOP_K=num_active,
        SHARED=num_parts,
        **form.gate_constants,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PREFETCH_K=triton.next_power_of_2(num_columns),
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
    shared: Tensor | SharedMatrices | None = None,
    gate: Tensor | None = None,
    form: ExpertForm = PLAIN,
) -> Tensor:
    """inner: [T k, n], weight: [experts, hidden, n]; returns [T, hidden], summed over experts.

    shared: [T, hidden], of an expert that all tokens share, or None; or its matrices, and then
    `inner` has its lines as `few_gate_up` left them. gate: [T, 1], its factor before the sigmoid,
    or None for a factor of 1.
    """
    num_tokens, num_active = routes.ids.shape
    _, num_rows, num_columns = weight.shape
    _check(inner, weight)
    y = inner.new_empty((num_tokens, num_rows))
    matrices = shared if isinstance(shared, SharedMatrices) else None
    output = shared if isinstance(shared, Tensor) else None
    num_parts = _num_parts(matrices, num_columns)
    assert len(inner) == num_tokens * (num_active + num_parts), f"{len(inner)} lines"
    use_pdl = pdl_supported(inner.device)
    _moe_few_down_kernel[(triton.cdiv(num_rows, tile.block_n), num_tokens)](
        inner,
        weight,
        routes.ids,
        routes.weights,
        _shared_operand(shared, y),
        y if gate is None else gate,
        form.down_bias,
        y,
        N=num_rows,
        K=num_columns,
        TOP_K=num_active,
        SHARED=num_parts,
        HAS_SHARED=output is not None,
        HAS_GATE=gate is not None,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PREFETCH_K=tile.prefetch_k,
        USE_PDL=use_pdl,
        num_warps=tile.num_warps,
        launch_pdl=use_pdl,
    )
    return y


def _shared_operand(shared: Tensor | SharedMatrices | None, unused: Tensor) -> Tensor:
    if shared is None:
        return unused
    return shared.down if isinstance(shared, SharedMatrices) else shared


def _num_parts(shared: SharedMatrices | None, inner: int) -> int:
    if shared is None:
        return 0
    num_parts = shared.num_parts(inner)
    assert num_parts > 0, f"a shared expert of {shared.down.shape} beside experts of {inner} units"
    assert shared.gate_up.is_contiguous(), f"strides {shared.gate_up.stride()}"
    assert shared.down.is_contiguous(), f"strides {shared.down.stride()}"
    return num_parts


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.shape[1] == weight.shape[2], f"{x.shape} against {weight.shape}"
    assert x.dtype == weight.dtype, f"{x.dtype} against {weight.dtype}"
    assert x.is_contiguous(), f"x has strides {x.stride()}"
    assert weight.is_contiguous(), f"the weight has strides {weight.stride()}"

"""The sum over a token's experts on a GPU, in fp32 and in the order of its routes.

    y[t] = sum over i of  outputs[t, i]  (+ sigmoid(gate[t]) * shared[t], or + shared[t])

The output of the expert that all tokens pass may also be the places of `outputs` after a token's
own, as `grouped_down` leaves it. The sum may go on with the residual and the norm after it
(`ExpertOutputs.add_norm`), bitwise as the kernels of both would.

Routes without expert are not read: nothing was written for them. A program sums a tile of tokens
and columns: narrow ones of one token for few tokens, whole rows for more, several tokens for many.
Torch twin: `kernels.moe.reference.combine`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.routes import Routes
from kernels.pdl import pdl_supported
from kernels.rms_norm import added, check_norm, normalised, num_warps_of

# Tokens, at most -> tokens and columns of a program, and its warps.
_TILES = ((128, (1, 512, 1)), (1024, (1, 2048, 4)), (2**30, (2, 2048, 8)))
TOKEN_SIZES = tuple(most for most, _ in _TILES[:-1])


@triton.jit
def _summed(
    outputs_ptr, ids_ptr, shared_ptr, gate_ptr, tokens, columns, is_token, mask, N: tl.constexpr,
    TOP_K: tl.constexpr, PARTS: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sums of a tile, fp32, as large as `mask`; tokens, is_token: [T, 1], or of one token."""
    total = tl.zeros(mask.shape, dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        has_expert = tl.load(ids_ptr + tokens * TOP_K + i, mask=is_token, other=-1) >= 0
        places = (tokens * (TOP_K + PARTS) + i) * N + columns
        part = tl.load(outputs_ptr + places, mask=mask & has_expert, other=0.0)
        total += part.to(tl.float32)
    if HAS_SHARED or PARTS > 0:
        shared = tl.zeros(mask.shape, dtype=tl.float32)
        if HAS_SHARED:
            places = tokens * N + columns
            shared += tl.load(shared_ptr + places, mask=mask, other=0.0).to(tl.float32)
        for i in tl.static_range(PARTS):
            places = (tokens * (TOP_K + PARTS) + TOP_K + i) * N + columns
            shared += tl.load(outputs_ptr + places, mask=mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            gate = tl.load(gate_ptr + tokens, mask=is_token, other=0.0).to(tl.float32)
            shared = tl.sigmoid(gate) * shared
        total += shared
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _moe_combine_kernel(
    outputs_ptr,  # [num_tokens, TOP_K + PARTS, N]
    ids_ptr,  # int32 [num_tokens, TOP_K]
    shared_ptr,  # [num_tokens, N] if HAS_SHARED
    gate_ptr,  # [num_tokens] if HAS_GATE
    # outputs
    y_ptr,  # [num_tokens, N]
    # constants
    num_tokens,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tokens = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    columns = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    is_token = tokens < num_tokens
    mask = is_token & (columns < N)
    total = _summed(
        outputs_ptr, ids_ptr, shared_ptr, gate_ptr, tokens, columns, is_token, mask, N, TOP_K,
        PARTS, HAS_SHARED, HAS_GATE,
    )  # fmt: skip
    tl.store(y_ptr + tokens * N + columns, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _moe_combine_norm_kernel(
    outputs_ptr,  # [T, TOP_K + PARTS, N]
    ids_ptr,  # int32 [T, TOP_K]
    shared_ptr,  # [T, N] if HAS_SHARED
    gate_ptr,  # [T] if HAS_GATE
    weight_ptr,  # [N]
    residual_ptr,  # [T, N], rows strided; the sum is added to it
    # outputs
    y_ptr,  # [T, N]
    # constants
    eps: tl.constexpr,
    N: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    total = _summed(
        outputs_ptr, ids_ptr, shared_ptr, gate_ptr, token, columns, True, mask, N, TOP_K, PARTS,
        HAS_SHARED, HAS_GATE,
    )  # fmt: skip
    x = total.to(y_ptr.dtype.element_ty)
    x = added(x, residual_ptr + token * RESIDUAL_STRIDE + columns, mask)
    tl.store(y_ptr + token * N + columns, normalised(x, weight, eps, N), mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertOutputs:
    """What the experts of a step's tokens have computed, to be summed for each token."""

    outputs: Tensor  # [T, k + parts, hidden], those of the expert that all tokens pass in parts
    routes: Routes
    shared: Tensor | None = None  # [T, hidden], of that expert where it is not in parts
    gate: Tensor | None = None  # [T, 1]

    def sum(self) -> Tensor:
        """[T, hidden]."""
        return combine(self.outputs, self.routes, self.shared, self.gate)

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """residual: [T, hidden], written; returns (rms_norm(sum + residual), sum + residual)."""
        return combine_and_norm(self, residual, weight, eps), residual


def combine(
    outputs: Tensor, routes: Routes, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """outputs: [T, k + parts, hidden], those of the expert that all tokens pass in parts or not.

    shared: [T, hidden] or None; gate: [T, 1] or None. Returns [T, hidden].
    """
    num_tokens, num_places, num_columns = outputs.shape
    num_active = routes.ids.shape[1]
    _check(outputs, routes, shared, gate)
    y = outputs.new_empty((num_tokens, num_columns))
    if num_tokens == 0:
        return y
    block_t, block_n, num_warps = next(tile for most, tile in _TILES if num_tokens <= most)
    use_pdl = pdl_supported(outputs.device)
    _moe_combine_kernel[(triton.cdiv(num_columns, block_n), triton.cdiv(num_tokens, block_t))](
        outputs,
        routes.ids,
        y if shared is None else shared,
        y if gate is None else gate,
        y,
        num_tokens,
        N=num_columns,
        TOP_K=num_active,
        PARTS=num_places - num_active,
        HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        USE_PDL=use_pdl,
        num_warps=num_warps,
        launch_pdl=use_pdl,
    )
    return y


def combine_and_norm(
    experts: ExpertOutputs, residual: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """residual += sum; returns rms_norm(residual), [T, hidden].

    residual: [T, hidden], rows may be strided, hidden <= 16384; weight: [hidden].
    """
    outputs, routes, shared, gate = experts.outputs, experts.routes, experts.shared, experts.gate
    num_tokens, num_places, num_columns = outputs.shape
    num_active = routes.ids.shape[1]
    _check(outputs, routes, shared, gate)
    check_norm(residual, weight)
    assert residual.shape == (num_tokens, num_columns), f"{residual.shape} and {outputs.shape}"
    assert residual.dtype == outputs.dtype, f"{residual.dtype} and outputs in {outputs.dtype}"
    y = outputs.new_empty((num_tokens, num_columns))
    if num_tokens == 0:
        return y
    block = triton.next_power_of_2(num_columns)
    use_pdl = pdl_supported(outputs.device)
    _moe_combine_norm_kernel[(num_tokens,)](
        outputs,
        routes.ids,
        y if shared is None else shared,
        y if gate is None else gate,
        weight,
        residual,
        y,
        eps=eps,
        N=num_columns,
        RESIDUAL_STRIDE=residual.stride(0),
        TOP_K=num_active,
        PARTS=num_places - num_active,
        HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None,
        BLOCK=block,
        USE_PDL=use_pdl,
        num_warps=num_warps_of(block),
        launch_pdl=use_pdl,
    )
    return y


def _check(outputs: Tensor, routes: Routes, shared: Tensor | None, gate: Tensor | None) -> None:
    num_tokens, num_places, _ = outputs.shape
    num_active = routes.ids.shape[1]
    assert num_places >= num_active, f"outputs {outputs.shape} of {num_active} experts"
    assert shared is None or num_places == num_active, "a shared output, whole and in parts"
    assert outputs.is_contiguous(), f"outputs have strides {outputs.stride()}"
    if shared is not None:
        assert shared.is_contiguous(), f"the shared output has strides {shared.stride()}"
    assert gate is None or gate.shape == (num_tokens, 1), f"gates {gate}"

"""The sum over a token's experts on a GPU, in fp32 and in the order of its routes.

    y[t] = sum over i of  outputs[t, i]  (+ sigmoid(gate[t]) * shared[t], or + shared[t])

The output of the expert that all tokens pass may also be the places of `outputs` after a token's
own, as `grouped_down` leaves it.

Routes without expert are not read: nothing was written for them. A program sums a tile of tokens
and columns: narrow ones of one token for few tokens, whole rows for more, several tokens for many.
Torch twin: `kernels.moe.reference.combine`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.routes import Routes
from kernels.pdl import pdl_supported

# Tokens, at most -> tokens and columns of a program, and its warps.
_TILES = ((128, (1, 512, 1)), (1024, (1, 2048, 4)), (2**30, (2, 2048, 8)))
TOKEN_SIZES = tuple(most for most, _ in _TILES[:-1])


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
    tokens = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (columns < N)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        has_expert = tl.load(ids_ptr + tokens * TOP_K + i, mask=is_token, other=-1) >= 0
        offsets = (tokens * (TOP_K + PARTS) + i)[:, None] * N + columns[None, :]
        part = tl.load(outputs_ptr + offsets, mask=mask & has_expert[:, None], other=0.0)
        total += part.to(tl.float32)
    offsets = tokens[:, None] * N + columns[None, :]
    if HAS_SHARED or PARTS > 0:
        shared = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
        if HAS_SHARED:
            shared += tl.load(shared_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        for i in tl.static_range(PARTS):
            places = (tokens * (TOP_K + PARTS) + TOP_K + i)[:, None] * N + columns[None, :]
            shared += tl.load(outputs_ptr + places, mask=mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            gate = tl.load(gate_ptr + tokens, mask=is_token, other=0.0).to(tl.float32)
            shared = tl.sigmoid(gate)[:, None] * shared
        total += shared
    tl.store(y_ptr + offsets, total.to(y_ptr.dtype.element_ty), mask=mask)


def combine(
    outputs: Tensor, routes: Routes, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """outputs: [T, k + parts, hidden], those of the expert that all tokens pass in parts or not.

    shared: [T, hidden] or None; gate: [T, 1] or None. Returns [T, hidden].
    """
    num_tokens, num_places, num_columns = outputs.shape
    num_active = routes.ids.shape[1]
    assert num_places >= num_active, f"outputs {outputs.shape} of {num_active} experts"
    assert shared is None or num_places == num_active, "a shared output, whole and in parts"
    assert outputs.is_contiguous(), f"outputs have strides {outputs.stride()}"
    if shared is not None:
        assert shared.is_contiguous(), f"the shared output has strides {shared.stride()}"
    assert gate is None or gate.shape == (num_tokens, 1), f"gates {gate}"
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

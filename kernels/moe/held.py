"""The routes of a step that go to the experts of one rank, on a GPU.

    held[r] = ids[r] - first   where first <= ids[r] < first + num_held,   else -1

Every rank routes all tokens alike and computes the experts that it holds; the ranks' sums are then
added. Weights stay with their routes. Torch twin: `kernels.moe.reference.held_routes`.
"""

import torch
import triton
import triton.language as tl

from kernels.moe.routes import Routes

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_routes"])
def _moe_held_kernel(
    ids_ptr,  # int32 [num_routes]
    # outputs
    held_ptr,  # int32 [num_routes]
    # constants
    num_routes,
    FIRST: tl.constexpr,
    NUM_HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    routes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = routes < num_routes
    own = tl.load(ids_ptr + routes, mask=mask, other=-1) - FIRST
    is_held = (own >= 0) & (own < NUM_HELD)
    tl.store(held_ptr + routes, tl.where(is_held, own, -1), mask=mask)


def held_routes(routes: Routes, held: range) -> Routes:
    """The routes with indices among the experts `held`, -1 for all others."""
    ids = routes.ids
    assert ids.is_contiguous(), f"ids have strides {ids.stride()}"
    own = torch.empty_like(ids)
    if ids.numel() > 0:
        _moe_held_kernel[(triton.cdiv(ids.numel(), _BLOCK),)](
            ids,
            own,
            ids.numel(),
            FIRST=held.start,
            NUM_HELD=len(held),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return Routes(ids=own, weights=routes.weights)

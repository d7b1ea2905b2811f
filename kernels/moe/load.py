"""Counts how many routes every expert got, on a GPU, without the host.

    counts[e] += number of routes r with ids[r] = e

Whole numbers: the order of additions does not show. A program counts a chunk of the routes and adds
what it found. Torch twin: `kernels.moe.reference.count_routes`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.routes import Routes

_CHUNK = 1024


@triton.jit(do_not_specialize=["num_routes"])
def _moe_load_kernel(
    ids_ptr,  # int32 [num_routes]
    # outputs
    counts_ptr,  # int64 [E]
    # constants
    num_routes,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
):
    routes = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + routes, mask=routes < num_routes, other=-1)
    found = tl.histogram(tl.maximum(ids, 0), BLOCK_E, mask=ids >= 0)
    experts = tl.arange(0, BLOCK_E)
    tl.atomic_add(counts_ptr + experts, found.to(tl.int64), mask=(experts < E) & (found > 0))


def count_routes(routes: Routes, counts: Tensor) -> None:
    """Adds to counts, int64 [experts]; routes without expert (-1) do not count."""
    ids, num_experts = routes.ids, counts.shape[0]
    assert ids.is_contiguous(), f"ids have strides {ids.stride()}"
    assert counts.is_contiguous(), f"counts have strides {counts.stride()}"
    if ids.numel() == 0:
        return
    _moe_load_kernel[(triton.cdiv(ids.numel(), _CHUNK),)](
        ids,
        counts,
        ids.numel(),
        E=num_experts,
        BLOCK_E=max(32, int(triton.next_power_of_2(num_experts))),
        CHUNK=_CHUNK,
        num_warps=4,
    )

"""Inputs of experts that each have an order of inputs of their own: a row for every route.

    y[t k + j, c] = x[t, order[ids[t, j], c]]

Rows of routes without expert are not written. Torch twin: `route_rows_torch`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _route_rows_kernel(
    # inputs
    x_ptr,  # [T, hidden], row stride `row_stride`
    ids_ptr,  # int32 [T, NUM_ACTIVE]
    order_ptr,  # int32 [experts, hidden]
    # output
    y_ptr,  # [T NUM_ACTIVE, hidden]
    row_stride,
    # constants
    HIDDEN: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    route = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + route).to(tl.int64)
    mask = (columns < HIDDEN) & (expert >= 0)
    places = tl.load(order_ptr + expert * HIDDEN + columns, mask=mask, other=0)
    row = tl.load(x_ptr + (route // NUM_ACTIVE) * row_stride + places, mask=mask)
    tl.store(y_ptr + route * HIDDEN + columns, row, mask=mask)


def route_rows(x: Tensor, ids: Tensor, order: Tensor) -> Tensor:
    """x: [T, hidden], rows may be strided; ids: int32 [T, k]; order: int32 [experts, hidden].

    Returns [T k, hidden].
    """
    num_tokens, hidden = x.shape
    assert x.stride(1) == 1, f"strides {x.stride()}: a row's elements must be adjacent"
    assert order.is_contiguous(), f"an order of strides {order.stride()}"
    assert order.shape[1] == hidden, f"an order of {order.shape[1]} for {hidden} inputs"
    assert ids.is_contiguous(), f"ids of strides {ids.stride()}"
    assert len(ids) == num_tokens, f"routes of {len(ids)} tokens for {num_tokens}"
    y = x.new_empty((ids.numel(), hidden))
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    _route_rows_kernel[(ids.numel(), triton.cdiv(hidden, block))](
        x, ids, order, y, x.stride(0), HIDDEN=hidden, NUM_ACTIVE=ids.shape[1], BLOCK=block
    )
    return y


def route_rows_torch(x: Tensor, ids: Tensor, order: Tensor) -> Tensor:
    """As `route_rows`; rows of routes without expert are zero."""
    rows = x.repeat_interleave(ids.shape[1], 0)
    experts = ids.view(-1).long()
    found = rows.gather(1, order.long()[experts.clamp(min=0)])
    return torch.where((experts >= 0)[:, None], found, torch.zeros_like(found))

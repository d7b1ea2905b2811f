"""The end of products with rounded inputs: a tile's results go where the next step reads them.

    gated   silu(gate) * up      [blocks block_m, N / 2]   a line for each place of a block
    else    weight_r acc[r]      [T, k, N]                 a row for each route

as in grouped.py. Lines and rows of places without a route are not written.
"""

import triton
import triton.language as tl

from kernels.moe.grouped import gated


@triton.jit
def store_results(
    acc, lines, routes, route_weights_ptr, y_ptr, tile_n, N: tl.constexpr, IS_GATED: tl.constexpr,
    BY_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """acc: fp32 [BLOCK_M, BLOCK_N]; BY_TMA: gate's columns come before up's, else they alternate.

    lines: places of the block; routes: of those places, -1 = none.
    """
    NUM_OUTPUTS: tl.constexpr = N // 2 if IS_GATED else N
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    if IS_GATED:
        y = gated(acc, 0.0, 0.0, BY_TMA, BLOCK_M, WIDTH)
        y_lines = lines
    else:
        y = acc * tl.load(route_weights_ptr + tl.maximum(routes, 0))[:, None]
        y_lines = routes
    outputs = tile_n * WIDTH + tl.arange(0, WIDTH)
    offsets = y_lines[:, None].to(tl.int64) * NUM_OUTPUTS + outputs[None, :]
    mask = (routes >= 0)[:, None] & (outputs < NUM_OUTPUTS)[None, :]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)

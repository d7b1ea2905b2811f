"""Sorts routes by expert into blocks of equal size, so that a tile of a product has one expert.

    routes    [blocks, block_m]  for each expert the indices of its routes, ascending, then -1 up
                                 to a whole number of blocks
    experts   [blocks]           the block's expert; -1 = the block is not used

Routes without expert (-1) are in no block. An expert that all tokens pass can be given blocks too,
the first ones: its parts are experts after all others, and places of a token after its own, so that
route t (k + parts) + j is the j-th of token t. The order is that of a stable counting sort, found
without atomics on places. Few routes take one kernel: the program of an expert counts the routes of
the experts before it, and then writes its own one after the other. Many take three: the routes of
each chunk are counted; the program of an expert finds where its routes of each chunk begin; and the
program of a chunk compares all its routes with each other and writes them. The number of blocks is
the most that so many routes can fill, so that nothing has to be read on the host. Torch twin:
`align_reference`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.reference import routes_by_expert
from kernels.pdl import pdl_supported

_CHUNK = 2048
_SMALL_CHUNK = 512
_COUNTED_CHUNK = 256
_COUNTS_AT_ONCE = 4096  # of chunks and experts, that a program reads together
# Up to so many routes one kernel is faster than three.
_MAX_UNCOUNTED = 2 * _CHUNK
# Numbers of routes up to which one kernel, or one way of calling it, is used.
ROUTE_SIZES = (_SMALL_CHUNK, _MAX_UNCOUNTED)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Routes by expert."""

    # int32 [blocks, block_m]
    routes: Tensor
    # int32 [blocks]
    experts: Tensor


def max_blocks(num_routes: int, num_experts: int, block_m: int) -> int:
    """The most blocks that `num_routes` routes can fill: every expert has one that is not full."""
    most_used = min(num_experts, num_routes)
    return (num_routes + most_used * (block_m - 1)) // block_m


def can_join(num_routes: int) -> bool:
    """Whether so many routes are sorted by the kernel that also writes those of a shared expert."""
    return num_routes <= _MAX_UNCOUNTED


@triton.jit
def _count_chunk(ids_ptr, start, num_routes, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr):
    """Routes of each expert in one chunk, int32 [BLOCK_E]."""
    places = start + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + places, mask=places < num_routes, other=-1)
    return tl.histogram(tl.maximum(ids, 0), BLOCK_E, mask=ids >= 0)


@triton.jit(do_not_specialize=["num_routes"])
def _moe_count_kernel(
    ids_ptr,  # int32 [num_routes]
    counts_ptr,  # int32 [chunks, BLOCK_E]
    num_routes,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    counts = _count_chunk(ids_ptr, chunk * CHUNK, num_routes, BLOCK_E, CHUNK)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit
def _write_routes(
    ids_ptr, routes_ptr, start, place, expert, num_routes, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the expert's routes of one chunk from `place` on; returns the place after them."""
    routes = start + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + routes, mask=routes < num_routes, other=-1)
    is_mine = (ids == expert).to(tl.int32)
    places = place + tl.cumsum(is_mine, axis=0) - 1
    if SHARED > 0:
        routes += routes // TOP_K * SHARED
    tl.store(routes_ptr + places, routes, mask=is_mine == 1)
    return place + tl.sum(is_mine, axis=0)


@triton.jit
def _write_expert(experts_ptr, expert, num_blocks):
    """Write the expert of its `num_blocks` blocks."""
    for start in range(0, num_blocks, 128):
        blocks = start + tl.arange(0, 128)
        value = tl.zeros((128,), dtype=tl.int32) + expert
        tl.store(experts_ptr + blocks, value, mask=blocks < num_blocks)


@triton.jit
def _write_shared(
    routes_ptr, experts_ptr, part, num_tokens, blocks_a_part, E: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the blocks of one part of the expert that all tokens pass: a route of each token."""
    first = part * blocks_a_part
    _write_expert(experts_ptr + first, E + part, blocks_a_part)
    for start in range(0, blocks_a_part * BLOCK_M, CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        routes = tl.where(tokens < num_tokens, tokens * (TOP_K + SHARED) + TOP_K + part, -1)
        places = routes_ptr + first * BLOCK_M + tokens
        tl.store(places, routes, mask=tokens < blocks_a_part * BLOCK_M)


@triton.jit
def _blocks_of(
    counts, expert, experts_ptr, num_blocks, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """First block and number of blocks of an expert, of which it writes the expert.

    counts: int32 [BLOCK_E], routes of each. Expert E stands for the blocks that are not used.
    """
    experts = tl.arange(0, BLOCK_E)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(experts < expert, blocks, 0), axis=0)
    mine = tl.sum(tl.where(experts == expert, blocks, 0), axis=0)
    mine = tl.where(expert < E, mine, num_blocks - first)
    _write_expert(experts_ptr + first, tl.where(expert < E, expert, -1), mine)
    return first, mine


@triton.jit
def _fill_last_block(routes_ptr, place, end, BLOCK_M: tl.constexpr):
    rest = place + tl.arange(0, BLOCK_M)
    tl.store(routes_ptr + rest, -1, mask=rest < end)


@triton.jit(do_not_specialize=["num_routes", "num_blocks"])
def _moe_align_kernel(
    ids_ptr,  # int32 [num_routes]
    # outputs
    routes_ptr,  # int32 [num_blocks, BLOCK_M]
    experts_ptr,  # int32 [num_blocks]
    # constants
    num_routes,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,  # only if SHARED > 0, else 1
    SHARED: tl.constexpr,  # parts of the expert that all tokens pass
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program an expert, one for the blocks that are not used, and one a shared part."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    if SHARED > 0:
        num_tokens = num_routes // TOP_K
        blocks_a_part = (num_tokens + BLOCK_M - 1) // BLOCK_M
        if expert > E:
            _write_shared(
                routes_ptr, experts_ptr, expert - E - 1, num_tokens, blocks_a_part, E, TOP_K,
                SHARED, BLOCK_M, CHUNK,
            )  # fmt: skip
            return
        experts_ptr += SHARED * blocks_a_part
        routes_ptr += SHARED * blocks_a_part * BLOCK_M
        num_blocks -= SHARED * blocks_a_part
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for start in range(0, num_routes, CHUNK):
        counts += _count_chunk(ids_ptr, start, num_routes, BLOCK_E, CHUNK)
    first, mine = _blocks_of(counts, expert, experts_ptr, num_blocks, E, BLOCK_E, BLOCK_M)
    if expert < E:
        place = first * BLOCK_M
        for start in range(0, num_routes, CHUNK):
            place = _write_routes(
                ids_ptr, routes_ptr, start, place, expert, num_routes, TOP_K, SHARED, CHUNK
            )
        _fill_last_block(routes_ptr, place, (first + mine) * BLOCK_M, BLOCK_M)


@triton.jit(do_not_specialize=["num_chunks", "num_blocks"])
def _moe_offsets_kernel(
    counts_ptr,  # int32 [num_chunks, BLOCK_E]
    # outputs
    offsets_ptr,  # int32 [num_chunks, BLOCK_E]  place of an expert's first route of each chunk
    routes_ptr,  # int32 [num_blocks, BLOCK_M]  only what no route takes
    experts_ptr,  # int32 [num_blocks]
    # constants
    num_chunks,
    num_blocks,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,  # read together
    USE_PDL: tl.constexpr,
):
    """One program an expert, and one for the blocks that are not used."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for start in range(0, num_chunks, CHUNKS):
        chunks = (start + tl.arange(0, CHUNKS))[:, None]
        places = counts_ptr + chunks * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
        counts += tl.sum(tl.load(places, mask=chunks < num_chunks, other=0), axis=0)
    first, mine = _blocks_of(counts, expert, experts_ptr, num_blocks, E, BLOCK_E, BLOCK_M)
    if expert < E:
        place = first * BLOCK_M
        for start in range(0, num_chunks, 256):
            chunks = start + tl.arange(0, 256)
            lines = chunks * BLOCK_E + expert
            of_chunks = tl.load(counts_ptr + lines, mask=chunks < num_chunks, other=0)
            before = place + tl.cumsum(of_chunks, axis=0) - of_chunks
            tl.store(offsets_ptr + lines, before, mask=chunks < num_chunks)
            place += tl.sum(of_chunks, axis=0)
        _fill_last_block(routes_ptr, place, (first + mine) * BLOCK_M, BLOCK_M)


@triton.jit(do_not_specialize=["num_routes"])
def _moe_place_kernel(
    ids_ptr,  # int32 [num_routes]
    offsets_ptr,  # int32 [chunks, BLOCK_E]
    # outputs
    routes_ptr,  # int32 [blocks, BLOCK_M]
    # constants
    num_routes,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a chunk."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    inside = tl.arange(0, CHUNK)
    routes = chunk * CHUNK + inside
    ids = tl.load(ids_ptr + routes, mask=routes < num_routes, other=-1)
    is_before = (inside[None, :] < inside[:, None]) & (ids[None, :] == ids[:, None])
    rank = tl.sum(is_before.to(tl.int32), axis=1)
    offsets = tl.load(offsets_ptr + chunk * BLOCK_E + tl.maximum(ids, 0))
    tl.store(routes_ptr + offsets + rank, routes, mask=ids >= 0)


def align(ids: Tensor, num_experts: int, block_m: int, num_shared: int = 0) -> Blocks:
    """ids: int32 [T, k], contiguous, -1 = no expert; T k >= 1.

    num_shared: parts of an expert that all tokens pass; of no more routes than `can_join` allows.
    """
    num_routes = ids.numel()
    assert ids.is_contiguous(), f"ids have strides {ids.stride()}"
    assert num_routes > 0, "no routes"
    num_blocks = max_blocks(num_routes, num_experts, block_m)
    num_blocks += num_shared * triton.cdiv(len(ids), block_m)
    routes = torch.empty((num_blocks, block_m), dtype=torch.int32, device=ids.device)
    experts = torch.empty(num_blocks, dtype=torch.int32, device=ids.device)
    blocks = Blocks(routes=routes, experts=experts)
    if num_routes > _MAX_UNCOUNTED:
        assert num_shared == 0, f"a shared expert beside {num_routes} routes"
        _align_many(ids, blocks, num_experts)
        return blocks
    is_small = num_routes <= _SMALL_CHUNK
    use_pdl = pdl_supported(ids.device)
    _moe_align_kernel[(num_experts + 1 + num_shared,)](
        ids,
        routes,
        experts,
        num_routes,
        num_blocks,
        E=num_experts,
        TOP_K=ids.shape[1] if num_shared else 1,
        SHARED=num_shared,
        BLOCK_E=_num_bins(num_experts),
        BLOCK_M=block_m,
        # Few routes would pay for a whole chunk.
        CHUNK=_SMALL_CHUNK if is_small else _CHUNK,
        USE_PDL=use_pdl,
        num_warps=4 if is_small else 8,
        launch_pdl=use_pdl,
    )
    return blocks


def _align_many(ids: Tensor, blocks: Blocks, num_experts: int) -> None:
    num_routes, block_e = ids.numel(), _num_bins(num_experts)
    num_blocks, block_m = blocks.routes.shape
    num_chunks = triton.cdiv(num_routes, _COUNTED_CHUNK)
    counts = torch.empty((num_chunks, block_e), dtype=torch.int32, device=ids.device)
    offsets = torch.empty_like(counts)
    use_pdl = pdl_supported(ids.device)
    _moe_count_kernel[(num_chunks,)](
        ids,
        counts,
        num_routes,
        BLOCK_E=block_e,
        CHUNK=_COUNTED_CHUNK,
        USE_PDL=use_pdl,
        num_warps=4,
        launch_pdl=use_pdl,
    )
    _moe_offsets_kernel[(num_experts + 1,)](
        counts,
        offsets,
        blocks.routes,
        blocks.experts,
        num_chunks,
        num_blocks,
        E=num_experts,
        BLOCK_E=block_e,
        BLOCK_M=block_m,
        CHUNKS=max(1, _COUNTS_AT_ONCE // block_e),
        USE_PDL=use_pdl,
        num_warps=8,
        launch_pdl=use_pdl,
    )
    _moe_place_kernel[(num_chunks,)](
        ids,
        offsets,
        blocks.routes,
        num_routes,
        BLOCK_E=block_e,
        CHUNK=_COUNTED_CHUNK,
        USE_PDL=use_pdl,
        num_warps=8,
        launch_pdl=use_pdl,
    )


def _num_bins(num_experts: int) -> int:
    """Sizes of a histogram: a power of two, at least a bin a thread of a warp."""
    return max(32, int(triton.next_power_of_2(num_experts)))


def one_each(num_routes: int, block_m: int, device: torch.device) -> Tensor:
    """The routes of blocks that have one each, for `blocks_of_one_token`."""
    routes = torch.full((num_routes, block_m), -1, dtype=torch.int32, device=device)
    routes[:, 0] = torch.arange(num_routes, dtype=torch.int32, device=device)
    return routes


def blocks_of_one_token(ids: Tensor, routes: Tensor) -> Blocks:
    """ids: int32 [1, k]. Each route has a block of its own, and nothing has to be sorted."""
    assert ids.shape == (1, len(routes)), f"routes {ids.shape} in {len(routes)} blocks"
    return Blocks(routes=routes, experts=ids[0])


def align_reference(ids: Tensor, num_experts: int, block_m: int, num_shared: int = 0) -> Blocks:
    """The same on any device; places of blocks that are not used hold -1."""
    num_tokens, num_active = ids.shape
    blocks_a_part = -(-num_tokens // block_m)
    num_blocks = max_blocks(ids.numel(), num_experts, block_m) + num_shared * blocks_a_part
    routes = torch.full((num_blocks, block_m), -1, dtype=torch.int32)
    experts = torch.full((num_blocks,), -1, dtype=torch.int32)
    places = torch.arange(num_tokens * (num_active + num_shared)).view(num_tokens, -1)
    first = 0
    for part in range(num_shared):
        end = first + blocks_a_part
        experts[first:end] = num_experts + part
        routes[first:end].view(-1)[:num_tokens] = places[:, num_active + part].int()
        first = end
    own = places[:, :num_active].flatten()
    for expert, found in routes_by_expert(ids.cpu()):
        indices = own[found]
        end = first + -(-len(indices) // block_m)
        experts[first:end] = expert
        routes[first:end].view(-1)[: len(indices)] = indices.int()
        first = end
    return Blocks(routes=routes.to(ids.device), experts=experts.to(ids.device))

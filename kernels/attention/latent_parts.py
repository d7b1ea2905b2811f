"""Joins the parts of a row's keys: the mean of latents that each part found, weighted by its sum.

Of many rows with few lines the last part to arrive joins them all (`join_if_last`), otherwise a
kernel that follows does (`combine_parts`). Both take the parts in their order, so no result depends
on the order of programs.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.latent_chunks import add_part, no_sums, store_means
from kernels.attention.latent_work import LatentWork

_PART_TILE = 4  # parts combined at once


@triton.jit
def row_tokens(cu_tokens_ptr, row, has_work):  # noqa: ANN201
    """The first token of a row, int64, and how many it has."""
    first_token, num_queries = row, 1
    if cu_tokens_ptr is not None:
        first_token = tl.load(cu_tokens_ptr + row, mask=has_work, other=0).to(tl.int64)
        num_queries = tl.load(cu_tokens_ptr + row + 1, mask=has_work, other=0) - first_token
    return first_token, num_queries


@triton.jit
def finite_maximum(biggest, HAS_DRAFTS: tl.constexpr):  # noqa: ANN201
    """What is taken off scores: their maximum, where a query has seen any."""
    finite = biggest
    if HAS_DRAFTS:
        finite = tl.where(biggest == float("-inf"), 0.0, biggest)
    return finite


@triton.jit
def divisor_of(total, HAS_DRAFTS: tl.constexpr):  # noqa: ANN201
    """A sum of weights, or 1 where a query has seen no key."""
    divisor = total
    if HAS_DRAFTS:
        divisor = tl.where(total > 0, total, 1.0)
    return divisor


@triton.jit
def join_if_last(
    num_arrived_ptr, partial_ptr, log_sums_ptr, out_pointers, row_tile, first_slot, num_parts,
    member, is_line, SLOT_STRIDE: tl.constexpr, RANK: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """Where this is the last part of its row and tile to arrive, the mean of all, in their order.

    out_pointers: [lines, 1]. num_arrived_ptr: None = a kernel that follows joins them.
    """
    if num_arrived_ptr is not None:
        # Order: all threads' stores, the barrier, one thread's release; the last's acquire, loads.
        tl.debug_barrier()
        arrived_ptr = num_arrived_ptr + row_tile
        ticket = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
        if ticket == num_parts - 1:
            width: tl.constexpr = RANK // CHUNKS
            biggest = tl.full([member.shape[0]], float("-inf"), tl.float32)
            total = tl.zeros([member.shape[0]], tl.float32)
            sums = no_sums(member.shape[0], width, CHUNKS)
            for part in range(num_parts):
                lines = first_slot + part * SLOT_STRIDE + member
                # Load from L2: another SM wrote these, and this SM's L1 may hold stale data.
                log_sums = tl.load(
                    log_sums_ptr + lines, mask=is_line, other=0.0, cache_modifier=".cg"
                )
                bigger = tl.maximum(biggest, log_sums)
                weight = tl.exp2(log_sums - bigger)
                shrink = tl.exp2(biggest - bigger)
                total = total * shrink + weight
                sums = add_part(
                    sums, partial_ptr + lines[:, None] * RANK, is_line[:, None], shrink, weight,
                    width, CHUNKS,
                )  # fmt: skip
                biggest = bigger
            factor = (1.0 / total)[:, None]
            store_means(out_pointers, sums, sums, factor, is_line[:, None], width, CHUNKS, False)
            tl.store(arrived_ptr, 0)


@triton.jit
def _latent_combine_kernel(
    partial_ptr,  # fp32 [items, NUM_LINES, RANK]
    log_sums_ptr,  # fp32 [items, NUM_LINES]
    row_parts_ptr,  # int32 [R, 2], first item and number of parts
    cu_tokens_ptr,  # of rows of several tokens, or None
    out_ptr,  # [T, heads, RANK]
    NUM_HEADS: tl.constexpr,
    NUM_LINES: tl.constexpr,  # of all tiles
    RANK: tl.constexpr,
    PART_TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Weighted mean of a row's parts for one line, with the parts in order."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    line = tl.program_id(1)
    first_item = tl.load(row_parts_ptr + row * 2)
    num_parts = tl.load(row_parts_ptr + row * 2 + 1)
    if num_parts < 2:
        return
    HAS_DRAFTS: tl.constexpr = cu_tokens_ptr is not None
    first_token, num_queries = row_tokens(cu_tokens_ptr, row, True)
    if HAS_DRAFTS:  # noqa: SIM102 - decided while compiling
        if line >= num_queries * NUM_HEADS:
            return
    rank = tl.arange(0, RANK)
    biggest = float("-inf")
    total = 0.0
    out = tl.zeros([RANK], tl.float32)
    for start in range(0, num_parts, PART_TILE):
        part = start + tl.arange(0, PART_TILE)
        is_part = part < num_parts
        slot = (first_item + part).to(tl.int64) * NUM_LINES + line
        log_sums = tl.load(log_sums_ptr + slot, mask=is_part, other=float("-inf"))
        values = tl.load(
            partial_ptr + slot[:, None] * RANK + rank[None, :], mask=is_part[:, None], other=0.0
        )
        bigger = tl.maximum(biggest, tl.max(log_sums, 0))
        finite = finite_maximum(bigger, HAS_DRAFTS)
        weights = tl.exp2(log_sums - finite)
        shrink = tl.exp2(biggest - finite)
        total = total * shrink + tl.sum(weights, 0)
        out = out * shrink + tl.sum(weights[:, None] * values, 0)
        biggest = bigger
    place = out_ptr + (first_token * NUM_HEADS + line) * RANK + rank
    tl.store(place, (out / divisor_of(total, HAS_DRAFTS)).to(out_ptr.dtype.element_ty))


def combine_parts(
    work: LatentWork, cu_tokens: Tensor | None, out: Tensor, *, use_pdl: bool
) -> None:
    """Joins the parts of every row that has several; `join_if_last` did not.

    cu_tokens: of rows of several tokens, or None. out: [T, heads, rank], contiguous.
    """
    shape, split = work.shape, work.split
    _latent_combine_kernel[(len(work.row_parts), work.max_queries * shape.num_heads)](
        split.partial,
        split.log_sums,
        work.row_parts,
        cu_tokens,
        out,
        NUM_HEADS=shape.num_heads,
        NUM_LINES=split.shape.num_heads,
        RANK=shape.rank,
        PART_TILE=_PART_TILE,
        USE_PDL=use_pdl,
        num_warps=4,
        launch_pdl=use_pdl,
    )

"""All ranks' shares side by side, and each rank's share of a sum, through memory that they share.

    gather    out = [x_0 | x_1 | ...]                     bits are copied
    scatter   out = share `rank` of x_0 + x_1 + ...       in rank order, in fp32, rounded once

Both write to the others, then one barrier, then each reads what is its own: see kernels.comm.sums.
Torch twins: `torch.cat`, and `kernels.comm.reference.sum_over_ranks` of the shares.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.comm.peer_memory import (
    SUM_DTYPES,
    PeerMemory,
    add_parts,
    columns_of,
    grid_of,
    piece_of,
    width_of,
    write_to_ranks,
)
from kernels.comm.signals import begin, data_of, end, meet, slot_of
from kernels.pdl import pdl_supported


@triton.jit(do_not_specialize=["num_rows", "numel"])
def _gather_kernel(
    x_ptr,  # [numel]
    out_ptr,  # [WORLD, numel]
    memories,
    count_ptr,  # int64 [MAX_BLOCKS], barriers so far
    num_rows,
    numel,  # by WIDTH
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOT: tl.constexpr,  # elements
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    before = begin(count_ptr)
    stride = tl.zeros((), tl.int64) + numel * WIDTH
    zero = tl.zeros((), tl.int64)  # places are 64 bits wide
    slot = slot_of(before) * SLOT
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places, mask = columns_of(zero + row, numel, ROW, ROW, WIDTH)
        x = tl.load(x_ptr + places, mask=mask, other=0)
        write_to_ranks(memories, slot + RANK * stride + places, x, mask, RANK, WORLD)
        tl.store(out_ptr + RANK * stride + places, x, mask=mask)
    meet(memories, before + 1, RANK, WORLD)
    mine = data_of(memories[RANK], x_ptr.dtype.element_ty)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places, mask = columns_of(zero + row, numel, ROW, ROW, WIDTH)
        for peer in tl.static_range(WORLD):
            if peer != RANK:
                there = peer * stride + places
                x = tl.load(mine + slot + there, mask=mask, other=0, cache_modifier=".cg")
                tl.store(out_ptr + there, x, mask=mask)
    end(count_ptr, before)


@triton.jit(do_not_specialize=["num_rows", "numel"])
def _scatter_kernel(
    x_ptr,  # [WORLD, numel]
    out_ptr,  # [numel]
    memories,
    count_ptr,  # int64 [MAX_BLOCKS], barriers so far
    num_rows,
    numel,  # of a share, by WIDTH
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOT: tl.constexpr,  # elements
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    before = begin(count_ptr)
    stride = tl.zeros((), tl.int64) + numel * WIDTH
    zero = tl.zeros((), tl.int64)  # places are 64 bits wide
    slot = slot_of(before) * SLOT
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places, mask = columns_of(zero + row, numel, ROW, ROW, WIDTH)
        for owner in tl.static_range(WORLD):
            if owner != RANK:
                x = tl.load(x_ptr + owner * stride + places, mask=mask, other=0)
                into = data_of(memories[owner], dtype) + slot + RANK * stride
                tl.store(into + places, x, mask=mask)
    meet(memories, before + 1, RANK, WORLD)
    mine = data_of(memories[RANK], dtype)
    own_ptr = x_ptr + RANK * stride
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places, mask = columns_of(zero + row, numel, ROW, ROW, WIDTH)
        there = slot + places
        total = add_parts(own_ptr, mine, there, stride, places, mask, RANK, WORLD, SUM_DTYPE)
        tl.store(out_ptr + places, total.to(dtype), mask=mask)
    end(count_ptr, before)


def gather_shares(x: Tensor, memory: PeerMemory) -> Tensor:
    """x: [T, ...] contiguous; returns [n T, ...], the ranks' tensors in rank order."""
    assert x.is_contiguous(), f"strides {x.stride()}"
    out = x.new_empty((memory.num_ranks * x.shape[0], *x.shape[1:]))
    if x.numel() > 0:
        _gather_kernel[_grid(x, memory)](x, out, **_launch(x, memory))
    return out


def scatter_sum(x: Tensor, memory: PeerMemory) -> Tensor:
    """x: [n T, ...] contiguous; returns [T, ...], this rank's part of the sum over the ranks."""
    assert x.is_contiguous(), f"strides {x.stride()}"
    assert x.shape[0] % memory.num_ranks == 0, f"{list(x.shape)} for {memory.num_ranks} ranks"
    out = x.new_empty((x.shape[0] // memory.num_ranks, *x.shape[1:]))
    if x.numel() > 0:
        launch = _launch(out, memory)
        _scatter_kernel[_grid(out, memory)](x, out, SUM_DTYPE=SUM_DTYPES[x.dtype], **launch)
    return out


def _grid(share: Tensor, memory: PeerMemory) -> tuple[int]:
    return (grid_of(triton.cdiv(share.numel(), piece_of(share)), memory.max_blocks),)


def _launch(share: Tensor, memory: PeerMemory) -> dict[str, Any]:
    needed = share.nbytes * memory.num_ranks
    assert needed <= memory.slot_bytes, f"{needed} bytes in a slot of {memory.slot_bytes}"
    width, use_pdl = width_of(share), pdl_supported(share.device)
    return {
        "memories": memory.memories,
        "count_ptr": memory.count,
        "num_rows": triton.cdiv(share.numel(), piece_of(share)),
        "numel": share.numel() // width,
        "ROW": piece_of(share),
        "WIDTH": width,
        "SLOT": memory.slot_bytes // share.element_size(),
        "RANK": memory.rank,
        "WORLD": memory.num_ranks,
        "USE_PDL": use_pdl,
        "num_warps": 8,
        "launch_pdl": use_pdl,
    }

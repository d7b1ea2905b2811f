"""Sums over ranks through memory that they share, alone or with the residual and norm after them.

    y = x_0 + x_1 + ...                        in rank order, in fp32, rounded once
    residual += y;  out = rms_norm(residual)   as `kernels.rms_norm.rms_norm_add`

Every rank adds the same numbers in the same order, so all have the same bits, and those of one call
in any size, with the norm or without.

    one shot    each rank writes its x to all others, one barrier, each adds all
    two shots   each rank writes to the owner of a row, a barrier, the owner adds and writes the
                sum to all others, a barrier; less is sent where ranks are more than two

Writing to others' memory, not reading from it: a store waits for nobody, and what is read is local.
Between two ranks, with a norm, of more rows than multiprocessors, two blocks share one: one writes
while the other waits. Blocks wait for those of their own number alone, and start in the order of
numbers: so all get on, even if not all run at once.
A row is a line of the tensor with a norm, else a piece of `PIECE_BYTES`. Block b takes rows b,
b + grid, ...; in two shots, groups of as many rows as ranks, of which each rank owns one.
Torch twins: `kernels.comm.reference`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.comm.peer_memory import (
    SUM_DTYPES,
    PeerMemory,
    add_parts,
    check_lines,
    columns_of,
    grid_of,
    piece_of,
    width_of,
    write_to_ranks,
)
from kernels.comm.signals import MAX_BLOCKS, begin, data_of, end, meet, slot_of
from kernels.pdl import pdl_supported
from kernels.rms_norm import num_warps_of

# Measured on two H200s, us of a sum with norm, one | two: 14.8 | 14.0 of 256 x 5120,
# 46.5 | 42.5 of 1,024 x 5120, 20.1 | 19.1 of 256 x 8192. On four, in two shots: 72.4 | 80.8
# of 1,024 x 5120, 108.3 | 122.2 of 1,024 x 8192; so many parts leave registers for one block alone.
_BLOCKS_PER_SM = 2


@triton.jit
def weight_of(  # noqa: ANN201 - Triton's
    weight_ptr, ROW: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr
):
    """In fp32; read before earlier kernels have ended, as nobody writes it."""
    weight = tl.zeros((BLOCK,), tl.float32)
    if HAS_NORM:
        columns = tl.arange(0, BLOCK)
        weight = tl.load(weight_ptr + columns, mask=columns < ROW, other=0.0).to(tl.float32)
    return weight


@triton.jit
def finish(
    total,
    places,
    mask,
    weight,
    residual_ptr,
    out_ptr,
    eps: tl.constexpr,
    ROW: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """Store a row's sum, or what comes of it. The formula and its order are of kernels.rms_norm."""
    dtype = out_ptr.dtype.element_ty
    out = total.to(dtype)
    if HAS_NORM:
        residual = tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
        x = (out.to(tl.float32) + residual).to(dtype)
        tl.store(residual_ptr + places, x, mask=mask)
        x = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / ROW + eps)
        out = (x * scale * weight).to(dtype)
    tl.store(out_ptr + places, out, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "numel"])
def _one_shot_kernel(
    x_ptr,  # [numel]
    residual_ptr,  # [rows, ROW]
    weight_ptr,  # [ROW]
    out_ptr,  # [numel]; may be x
    memories,
    count_ptr,  # int64 [MAX_BLOCKS], barriers so far
    num_rows,
    numel,  # by WIDTH
    eps: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOT: tl.constexpr,  # elements
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    weight = weight_of(weight_ptr, ROW, BLOCK, HAS_NORM)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    before = begin(count_ptr)
    zero = tl.zeros((), tl.int64)  # places are 64 bits wide
    slot = slot_of(before) * SLOT
    # Each sender has its own part of a slot.
    stride = (zero + num_rows) * ROW
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places, mask = columns_of(zero + row, numel, ROW, BLOCK, WIDTH)
        x = tl.load(x_ptr + places, mask=mask, other=0.0)
        into = slot + RANK * stride + (zero + row) * ROW + columns
        write_to_ranks(memories, into, x, mask, RANK, WORLD)
    meet(memories, before + 1, RANK, WORLD)
    mine = data_of(memories[RANK], dtype)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places, mask = columns_of(zero + row, numel, ROW, BLOCK, WIDTH)
        there = slot + (zero + row) * ROW + columns
        total = add_parts(x_ptr, mine, there, stride, places, mask, RANK, WORLD, SUM_DTYPE)
        finish(total, places, mask, weight, residual_ptr, out_ptr, eps, ROW, HAS_NORM)
    end(count_ptr, before)


@triton.jit(do_not_specialize=["num_rows", "numel"])
def _two_shot_kernel(
    x_ptr,  # [numel]
    residual_ptr,  # [rows, ROW]
    weight_ptr,  # [ROW]
    out_ptr,  # [numel]; may be x
    memories,
    count_ptr,  # int64 [MAX_BLOCKS], barriers so far
    num_rows,
    numel,  # by WIDTH
    eps: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOT: tl.constexpr,  # elements
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    weight = weight_of(weight_ptr, ROW, BLOCK, HAS_NORM)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    before = begin(count_ptr)
    zero = tl.zeros((), tl.int64)  # places are 64 bits wide
    slot = slot_of(before) * SLOT
    num_groups = tl.cdiv(num_rows, WORLD)
    # A slot: parts of own rows by sender and group, then sums by row.
    stride = (zero + num_groups) * ROW
    sums = slot + WORLD * stride
    for group in range(tl.program_id(0), num_groups, tl.num_programs(0)):
        into = slot + RANK * stride + (zero + group) * ROW + columns
        for owner in tl.static_range(WORLD):
            if owner != RANK:
                row = (zero + group) * WORLD + owner
                places, mask = columns_of(row, numel, ROW, BLOCK, WIDTH)
                mask = mask & (row < num_rows)
                x = tl.load(x_ptr + places, mask=mask, other=0.0)
                tl.store(data_of(memories[owner], dtype) + into, x, mask=mask)
    meet(memories, before + 1, RANK, WORLD)
    mine = data_of(memories[RANK], dtype)
    for group in range(tl.program_id(0), num_groups, tl.num_programs(0)):
        row = (zero + group) * WORLD + RANK
        places, mask = columns_of(row, numel, ROW, BLOCK, WIDTH)
        mask = mask & (row < num_rows)
        there = slot + (zero + group) * ROW + columns
        total = add_parts(x_ptr, mine, there, stride, places, mask, RANK, WORLD, SUM_DTYPE)
        write_to_ranks(memories, sums + row * ROW + columns, total.to(dtype), mask, -1, WORLD)
    meet(memories, before + 2, RANK, WORLD)
    for group in range(tl.program_id(0), num_groups, tl.num_programs(0)):
        for owner in range(WORLD):
            row = (zero + group) * WORLD + owner
            if row < num_rows:
                places, mask = columns_of(row, numel, ROW, BLOCK, WIDTH)
                there = mine + sums + row * ROW + columns
                total = tl.load(there, mask=mask, other=0.0, cache_modifier=".cg")
                finish(total, places, mask, weight, residual_ptr, out_ptr, eps, ROW, HAS_NORM)
    end(count_ptr, before)


def needed_bytes(x: Tensor, num_ranks: int, *, two_shots: bool, has_norm: bool) -> int:
    """Of a slot, for a sum of `x`."""
    row = x.shape[1] if has_norm else piece_of(x)
    num_rows = -(-x.numel() // row)
    num_groups = -(-num_rows // num_ranks) if two_shots else num_rows
    return row * x.element_size() * num_groups * num_ranks * (2 if two_shots else 1)


def sum_over_ranks(x: Tensor, memory: PeerMemory, *, two_shots: bool = False) -> Tensor:
    """x: contiguous; overwritten by the sum and returned. Every rank calls it with equal shapes."""
    assert x.is_contiguous(), f"strides {x.stride()}"
    if x.numel() > 0:
        _launch(x, None, None, 0.0, memory, two_shots)
    return x


def sum_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    memory: PeerMemory,
    *,
    two_shots: bool = False,
) -> tuple[Tensor, Tensor]:
    """residual += the sum of x, then x = rms_norm(residual); returns (x, residual), both in place.

    x, residual: [T, n] contiguous, in one float type; weight: [n], in that or fp32.
    """
    check_lines(x, residual, weight)
    if x.numel() > 0:
        _launch(x, residual, weight, eps, memory, two_shots)
    return x, residual


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    memory: PeerMemory,
    two_shots: bool,
) -> None:
    has_norm = residual is not None
    row = x.shape[1] if has_norm else piece_of(x)
    block, num_rows = triton.next_power_of_2(row), -(-x.numel() // row)
    num_units = -(-num_rows // memory.num_ranks) if two_shots else num_rows
    needed = needed_bytes(x, memory.num_ranks, two_shots=two_shots, has_norm=has_norm)
    assert needed <= memory.slot_bytes, f"{needed} bytes in a slot of {memory.slot_bytes}"
    width = width_of(x)
    use_pdl = pdl_supported(x.device)
    kernel = _two_shot_kernel if two_shots else _one_shot_kernel
    blocks_per_sm = _BLOCKS_PER_SM if has_norm and memory.num_ranks == 2 else 1
    most = min(MAX_BLOCKS, blocks_per_sm * memory.max_blocks)
    kernel[(grid_of(num_units, most),)](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        x,
        memory.memories,
        memory.count,
        num_rows,
        x.numel() // width,
        eps=eps,
        ROW=row,
        BLOCK=block,
        WIDTH=width,
        SLOT=memory.slot_bytes // x.element_size(),
        RANK=memory.rank,
        WORLD=memory.num_ranks,
        HAS_NORM=has_norm,
        SUM_DTYPE=SUM_DTYPES[x.dtype],
        USE_PDL=use_pdl,
        num_warps=num_warps_of(block),  # the order of a norm's sum follows from it
        launch_pdl=use_pdl,
    )

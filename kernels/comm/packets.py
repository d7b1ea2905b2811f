"""Sums of few rows over ranks, without a barrier: every number that is written says that it is new.

    packet    int32: 16 bits of a number, and above them a mark; 0 = not here yet

A rank writes its rows as packets to all other ranks and looks at its own memory until every packet
has its mark. Four bytes are written and read whole, so the number is there with its mark: no order
between writes is needed, and nobody waits until writes have arrived before signalling that. Twice
as many bytes are sent as there are: for few rows that costs less than the barrier does.

Whoever has read a packet writes 0 over it. The place is used again two calls later at the earliest,
which another rank begins when it has this rank's packets, or barrier, of the call between; that was
begun after this call had ended (see kernels.comm.signals, whose slots and count it shares; packets
have a part of memory of their own, which nothing else writes to).

The sum, and what comes after it, are those of kernels.comm.sums, to the bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.comm.peer_memory import PeerMemory, columns_of, grid_of, piece_of, width_of
from kernels.comm.signals import PACKET_BYTES, PATIENCE, begin, end, packets_of, slot_of, trap
from kernels.comm.sums import finish, weight_of
from kernels.pdl import pdl_supported
from kernels.rms_norm import num_warps_of

BITS = 16
_MARK = tl.constexpr(1 << BITS)


@triton.jit
def _receive(place, mask, dtype: tl.constexpr):
    """Numbers of a row that another rank writes, once all are here; their places are free again."""
    packets = tl.load(place, mask=mask, other=_MARK, volatile=True)
    looks = 0
    while (tl.min(packets, axis=0) == 0) & (looks < PATIENCE):
        packets = tl.load(place, mask=mask, other=_MARK, volatile=True)
        looks += 1
    if looks == PATIENCE:
        trap()
    tl.store(place, tl.zeros(place.shape, tl.int32), mask=mask)
    return (packets & (_MARK - 1)).to(tl.int16).to(dtype, bitcast=True)


@triton.jit(do_not_specialize=["num_rows", "numel"])
def _packets_kernel(
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
    SLOT: tl.constexpr,  # packets
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weight = weight_of(weight_ptr, ROW, BLOCK, HAS_NORM)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    before = begin(count_ptr)
    slot = slot_of(before) * SLOT
    stride = (SLOT // WORLD) // 4 * 4  # each sender has its own part of a slot
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places, mask = columns_of(row, numel, ROW, BLOCK, WIDTH)
        x = tl.load(x_ptr + places, mask=mask, other=0.0)
        packets = (x.to(tl.int16, bitcast=True).to(tl.int32) & (_MARK - 1)) | _MARK
        for peer in tl.static_range(WORLD):
            if peer != RANK:
                into = packets_of(memories[peer]) + slot + RANK * stride
                tl.store(into + places, packets, mask=mask)
    mine = packets_of(memories[RANK]) + slot
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places, mask = columns_of(row, numel, ROW, BLOCK, WIDTH)
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(WORLD):
            if peer == RANK:
                part = tl.load(x_ptr + places, mask=mask, other=0.0)
            else:
                part = _receive(mine + peer * stride + places, mask, dtype)
            total = part.to(tl.float32) if peer == 0 else total + part.to(tl.float32)
        finish(total, places, mask, weight, residual_ptr, out_ptr, eps, ROW, HAS_NORM)
    end(count_ptr, before)


def fits_packets(x: Tensor, num_ranks: int) -> bool:
    """Whether `x` is of 16-bit numbers, and few enough for a slot."""
    return x.element_size() == BITS // 8 and x.numel() <= _numbers_of(num_ranks)


def sum_by_packets(x: Tensor, memory: PeerMemory) -> Tensor:
    """As `kernels.comm.sums.sum_over_ranks`, of an `x` that `fits_packets`."""
    if x.numel() > 0:
        _launch(x, None, None, 0.0, memory)
    return x


def sum_by_packets_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: PeerMemory
) -> tuple[Tensor, Tensor]:
    """As `kernels.comm.sums.sum_add_norm`, of an `x` that `fits_packets`."""
    if x.numel() > 0:
        _launch(x, residual, weight, eps, memory)
    return x, residual


def _numbers_of(num_ranks: int) -> int:
    """That a sender has place for, in whole vectors."""
    return PACKET_BYTES // 4 // num_ranks // 4 * 4


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, memory: PeerMemory
) -> None:
    assert x.is_contiguous(), f"strides {x.stride()}"
    assert fits_packets(x, memory.num_ranks), f"{list(x.shape)} in {x.dtype}"
    has_norm = residual is not None
    row, width = x.shape[1] if has_norm else piece_of(x), width_of(x)
    block, num_rows = triton.next_power_of_2(row), -(-x.numel() // row)
    use_pdl = pdl_supported(x.device)
    _packets_kernel[(grid_of(num_rows, memory.max_blocks),)](
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
        SLOT=PACKET_BYTES // 4,
        RANK=memory.rank,
        WORLD=memory.num_ranks,
        HAS_NORM=has_norm,
        USE_PDL=use_pdl,
        num_warps=num_warps_of(block),
        launch_pdl=use_pdl,
    )

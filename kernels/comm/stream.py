"""Sums of many rows over ranks with the residual and norm after them: others' rows come meanwhile.

    block b      write 0 | signal 0 | write 1  add 0  signal 1 | write 2  add 1  signal 2 | ...

A block of every rank takes the same rows, in pieces. It writes the next piece of its x to all
others, and only then adds the piece before, which the others have sent by now: so the link between
the GPUs and their memory are busy at the same time, while in kernels.comm.sums one waits for the
other. What it signals says, too, that it has added the piece before that: `DEPTH` pieces have a
place each, and piece p overwrites p - DEPTH. So a sum of any size needs the same memory.

Every rank sends its x to all others: as many bytes as two shots send between two ranks, more
between more. The sum and what comes after it are those of kernels.comm.sums, to the bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.comm.peer_memory import (
    SUM_DTYPES,
    PeerMemory,
    add_parts,
    check_lines,
    grid_of,
    write_to_ranks,
)
from kernels.comm.signals import MAX_BLOCKS, begin, data_of, end, signal, slot_of, wait
from kernels.comm.sums import finish, weight_of
from kernels.pdl import pdl_supported
from kernels.rms_norm import num_warps_of

# Before a block writes piece p it has seen the signal of p - 2, sent after p - 3 was added.
DEPTH = 3
PIECE_BYTES = 32 * 2**10  # of a block's piece, about
MAX_REGISTERS = 64  # of a thread, so that a multiprocessor has room for two blocks of 512 threads


@triton.jit(do_not_specialize=["num_rows", "num_pieces"])
def _stream_kernel(
    x_ptr,  # [num_rows, ROW]; overwritten by the result
    residual_ptr,  # [num_rows, ROW]
    weight_ptr,  # [ROW]
    memories,
    count_ptr,  # int64 [MAX_BLOCKS], barriers so far
    num_rows,
    num_pieces,
    eps: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,  # rows of a block's piece
    DEPTH: tl.constexpr,
    SLOT: tl.constexpr,  # elements
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weight = weight_of(weight_ptr, ROW, BLOCK, True)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    columns = tl.arange(0, BLOCK)
    mask = columns < ROW
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    before = begin(count_ptr)
    zero = tl.zeros((), tl.int64)  # places are 64 bits wide
    mine = data_of(memories[RANK], dtype)
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    # Places of a piece in a slot: by sender, block and row.
    stride = (zero + num_blocks) * (PIECE * ROW)
    place = slot_of(before) * SLOT + block * (PIECE * ROW)
    for piece in range(num_pieces + 1):
        if piece < num_pieces:
            first = ((zero + piece) * num_blocks + block) * PIECE
            into = place + (piece % DEPTH * WORLD + RANK) * stride + columns
            for row in range(first, tl.minimum(first + PIECE, num_rows)):
                x = tl.load(x_ptr + row * ROW + columns, mask=mask, other=0.0)
                write_to_ranks(memories, into + (row - first) * ROW, x, mask, RANK, WORLD)
        if piece > 0:
            wait(memories, before + piece, RANK, WORLD)
            first = ((zero + piece - 1) * num_blocks + block) * PIECE
            there = place + (piece - 1) % DEPTH * WORLD * stride + columns
            for row in range(first, tl.minimum(first + PIECE, num_rows)):
                places, own = row * ROW + columns, there + (row - first) * ROW
                total = add_parts(x_ptr, mine, own, stride, places, mask, RANK, WORLD, SUM_DTYPE)
                finish(total, places, mask, weight, residual_ptr, x_ptr, eps, ROW, True)
        if piece < num_pieces:
            signal(memories, before + piece + 1, RANK, WORLD)
    end(count_ptr, before, num_calls_of(num_pieces))


@triton.jit
def num_calls_of(num_pieces):  # noqa: ANN201 - Triton's
    """As how many calls it counts, which have a number for each piece."""
    return tl.cdiv(num_pieces, 2) | 1


def _rows_of_piece(x: Tensor) -> int:
    return max(1, PIECE_BYTES // (x.shape[1] * x.element_size()))


def _blocks_that_fit(x: Tensor, memory: PeerMemory) -> int:
    piece_bytes = _rows_of_piece(x) * x.shape[1] * x.element_size()
    return memory.slot_bytes // (DEPTH * memory.num_ranks * piece_bytes)


def fits_stream(x: Tensor, memory: PeerMemory) -> bool:
    """Whether a slot has room for the pieces of an `x` that `fits_norm`."""
    return x.dtype in SUM_DTYPES and _blocks_that_fit(x, memory) > 0


def stream_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: PeerMemory
) -> tuple[Tensor, Tensor]:
    """As `kernels.comm.sums.sum_add_norm`, of any number of rows."""
    check_lines(x, residual, weight)
    if x.numel() == 0:
        return x, residual
    num_rows, row = x.shape
    piece, most = _rows_of_piece(x), _blocks_that_fit(x, memory)
    assert most > 0, f"{list(x.shape)} in {x.dtype} with slots of {memory.slot_bytes} bytes"
    # Two on a multiprocessor: one writes while the other adds (see kernels.comm.sums).
    num_blocks = min(most, MAX_BLOCKS, 2 * memory.max_blocks)
    grid = grid_of(-(-num_rows // piece), num_blocks)
    use_pdl = pdl_supported(x.device)
    block = triton.next_power_of_2(row)
    _stream_kernel[(grid,)](
        x,
        residual,
        weight,
        memory.memories,
        memory.count,
        num_rows,
        -(-num_rows // (grid * piece)),
        eps=eps,
        ROW=row,
        BLOCK=block,
        PIECE=piece,
        DEPTH=DEPTH,
        SLOT=memory.slot_bytes // x.element_size(),
        RANK=memory.rank,
        WORLD=memory.num_ranks,
        SUM_DTYPE=SUM_DTYPES[x.dtype],
        USE_PDL=use_pdl,
        num_warps=num_warps_of(block),  # the order of a norm's sum follows from it
        maxnreg=MAX_REGISTERS,
        launch_pdl=use_pdl,
    )
    return x, residual

"""Each rank's share of a sum of many rows, with the residual and norm after it, in a stream.

    share r = rows r * S, ... of x          y = share `rank` of x_0 + x_1 + ...  in rank order
    residual += y;  out = rms_norm(residual)

As kernels.comm.stream, but a row goes to its owner alone, so less is sent where ranks are more than
two; and the residual is the share's. Of S rows, block b of every rank takes the same ones of each
owner, in pieces: it writes the next piece of all owners, and then adds the one before of its own.
The sum and what comes after it are those of kernels.comm.sums, to the bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.comm.peer_memory import (
    SUM_DTYPES,
    PeerMemory,
    add_parts,
    check_lines,
    fits_norm,
    grid_of,
)
from kernels.comm.signals import MAX_BLOCKS, begin, data_of, end, signal, slot_of, wait
from kernels.comm.stream import DEPTH, MAX_REGISTERS, PIECE_BYTES, num_calls_of
from kernels.comm.sums import finish, weight_of
from kernels.pdl import pdl_supported
from kernels.rms_norm import num_warps_of


@triton.jit
def _write_to_owners(
    x_ptr,
    memories,
    there,
    row,
    num_rows,
    num_shared,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
) -> None:
    """Row `row` of every other rank's share to place `there` of its data, if it has so many.

    Each rank begins with the one after it, so that not all write to one at once.
    """
    columns = tl.arange(0, BLOCK)
    for step in tl.static_range(1, WORLD):
        theirs = tl.full((), (RANK + step) % WORLD, tl.int64) * num_shared + row
        mask = (columns < ROW) & (theirs < num_rows)
        x = tl.load(x_ptr + theirs * ROW + columns, mask=mask, other=0.0)
        tl.store(data_of(memories[(RANK + step) % WORLD], x.dtype) + there, x, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_shared", "num_pieces"])
def _share_stream_kernel(
    x_ptr,  # [num_rows, ROW]
    residual_ptr,  # [num_shared, ROW]
    weight_ptr,  # [ROW]
    out_ptr,  # [num_shared, ROW]
    memories,
    count_ptr,  # int64 [MAX_BLOCKS], barriers so far
    num_rows,
    num_shared,  # rows of a share; the last ones may have fewer, or none
    num_pieces,
    eps: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,  # rows of a block's piece, of each owner
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
    own = (zero + RANK) * num_shared
    num_own = tl.minimum(num_shared, num_rows - own)
    for piece in range(num_pieces + 1):
        if piece < num_pieces:
            first = ((zero + piece) * num_blocks + block) * PIECE
            into = place + (piece % DEPTH * WORLD + RANK) * stride + columns
            for row in range(first, tl.minimum(first + PIECE, num_shared)):
                there = into + (row - first) * ROW
                _write_to_owners(
                    x_ptr, memories, there, row, num_rows, num_shared, ROW, BLOCK, RANK, WORLD
                )
        if piece > 0:
            wait(memories, before + piece, RANK, WORLD)
            first = ((zero + piece - 1) * num_blocks + block) * PIECE
            there = place + (piece - 1) % DEPTH * WORLD * stride + columns
            for row in range(first, tl.minimum(first + PIECE, num_own)):
                places, from_others = (own + row) * ROW + columns, there + (row - first) * ROW
                total = add_parts(
                    x_ptr, mine, from_others, stride, places, mask, RANK, WORLD, SUM_DTYPE
                )
                places = row * ROW + columns
                finish(total, places, mask, weight, residual_ptr, out_ptr, eps, ROW, True)
        if piece < num_pieces:
            signal(memories, before + piece + 1, RANK, WORLD)
    end(count_ptr, before, num_calls_of(num_pieces))


def rows_of_piece(x: Tensor, num_ranks: int) -> int:
    """Which a block sends to every other rank before it waits."""
    return max(1, PIECE_BYTES // (x.shape[1] * x.element_size()) // (num_ranks - 1))


def blocks_that_fit(x: Tensor, memory: PeerMemory) -> int:
    """Whose pieces a slot has room for."""
    piece_bytes = rows_of_piece(x, memory.num_ranks) * x.shape[1] * x.element_size()
    return memory.slot_bytes // (DEPTH * memory.num_ranks * piece_bytes)


def fits_share_stream(x: Tensor, memory: PeerMemory) -> bool:
    """Whether a slot has room for the pieces of an `x` that `fits_norm`."""
    return x.dtype in SUM_DTYPES and blocks_that_fit(x, memory) > 0


def share_stream_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: PeerMemory
) -> tuple[Tensor, Tensor]:
    """x: [T, n], of which this rank has rows rank * S, ...; residual: [S, n], S = ceil(T / ranks).

    residual += this rank's rows of the sum of x; returns (rms_norm(residual), residual), the first
    a new tensor. Lines of a share that has fewer rows are not written. weight: as of
    `kernels.comm.sums.sum_add_norm`.
    """
    (num_rows, row), num_shared = x.shape, residual.shape[0]
    assert num_shared == -(-num_rows // memory.num_ranks), f"{num_shared} of {num_rows} rows"
    assert x.is_contiguous(), f"strides {x.stride()}"
    assert fits_norm(x), f"{list(x.shape)} in {x.dtype} are no lines of whole vectors"
    out = residual.new_empty(residual.shape)
    check_lines(out, residual, weight)
    if x.numel() == 0:
        return out, residual
    piece, most = rows_of_piece(x, memory.num_ranks), blocks_that_fit(x, memory)
    assert most > 0, f"{list(x.shape)} in {x.dtype} with slots of {memory.slot_bytes} bytes"
    num_blocks = min(most, MAX_BLOCKS, 2 * memory.max_blocks)  # as in kernels.comm.stream
    grid = grid_of(-(-num_shared // piece), num_blocks)
    use_pdl = pdl_supported(x.device)
    block = triton.next_power_of_2(row)
    _share_stream_kernel[(grid,)](
        x,
        residual,
        weight,
        out,
        memory.memories,
        memory.count,
        num_rows,
        num_shared,
        -(-num_shared // (grid * piece)),
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
    return out, residual

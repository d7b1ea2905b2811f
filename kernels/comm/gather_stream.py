"""All ranks' shares of many rows side by side: others' rows come while earlier ones are put away.

    out = [x_0 | x_1 | ...]            bits are copied

As kernels.comm.stream: block b writes the next piece of its rows to all others, and then copies the
piece before, which the others have sent by now, from its slot to the output. Torch twin:
`torch.cat`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.comm.peer_memory import SUM_DTYPES, PeerMemory, fits_norm, grid_of
from kernels.comm.share_stream import blocks_that_fit, rows_of_piece
from kernels.comm.signals import MAX_BLOCKS, begin, data_of, end, signal, slot_of, wait
from kernels.comm.stream import DEPTH, MAX_REGISTERS, num_calls_of
from kernels.pdl import pdl_supported
from kernels.rms_norm import num_warps_of


@triton.jit(do_not_specialize=["num_rows", "num_pieces"])
def _gather_stream_kernel(
    x_ptr,  # [num_rows, ROW]
    out_ptr,  # [WORLD, num_rows, ROW]
    memories,
    count_ptr,  # int64 [MAX_BLOCKS], barriers so far
    num_rows,
    num_pieces,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,  # rows of a block's piece
    DEPTH: tl.constexpr,
    SLOT: tl.constexpr,  # elements
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    columns = tl.arange(0, BLOCK)
    mask = columns < ROW
    before = begin(count_ptr)
    zero = tl.zeros((), tl.int64)  # places are 64 bits wide
    mine = data_of(memories[RANK], x_ptr.dtype.element_ty)
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    # Places of a piece in a slot: by sender, block and row.
    stride = (zero + num_blocks) * (PIECE * ROW)
    place = slot_of(before) * SLOT + block * (PIECE * ROW)
    for piece in range(num_pieces + 1):
        if piece < num_pieces:
            first = ((zero + piece) * num_blocks + block) * PIECE
            into = place + (piece % DEPTH * WORLD + RANK) * stride + columns
            for row in range(first, tl.minimum(first + PIECE, num_rows)):
                x = tl.load(x_ptr + row * ROW + columns, mask=mask, other=0)
                for step in tl.static_range(1, WORLD):  # not all to one rank at once
                    data = data_of(memories[(RANK + step) % WORLD], x.dtype)
                    tl.store(data + into + (row - first) * ROW, x, mask=mask)
                there = ((zero + RANK) * num_rows + row) * ROW + columns
                tl.store(out_ptr + there, x, mask=mask)
        if piece > 0:
            wait(memories, before + piece, RANK, WORLD)
            first = ((zero + piece - 1) * num_blocks + block) * PIECE
            come = place + (piece - 1) % DEPTH * WORLD * stride + columns
            for row in range(first, tl.minimum(first + PIECE, num_rows)):
                _put_away(
                    mine + come + (row - first) * ROW, stride, out_ptr + row * ROW + columns,
                    num_rows, mask, ROW, RANK, WORLD,
                )  # fmt: skip
        if piece < num_pieces:
            signal(memories, before + piece + 1, RANK, WORLD)
    end(count_ptr, before, num_calls_of(num_pieces))


@triton.jit
def _put_away(
    come,
    stride,
    there,
    num_rows,
    mask,
    ROW: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
) -> None:
    """A row of every other rank; come, there: pointers to rank 0's, in the slot and the output."""
    share = tl.zeros((), tl.int64) + num_rows
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            x = tl.load(come + peer * stride, mask=mask, other=0, cache_modifier=".cg")
            tl.store(there + peer * share * ROW, x, mask=mask)


def fits_gather_stream(x: Tensor, memory: PeerMemory) -> bool:
    """Whether `gather_stream` takes such a share."""
    is_known = x.is_contiguous() and x.dtype in SUM_DTYPES and fits_norm(x)
    return is_known and blocks_that_fit(x, memory) > 0


def gather_stream(x: Tensor, memory: PeerMemory) -> Tensor:
    """x: [S, n] that `fits_gather_stream`; returns [ranks * S, n], all ranks' in their order."""
    assert fits_gather_stream(x, memory), f"{list(x.shape)} in {x.dtype}, strides {x.stride()}"
    num_rows, row = x.shape
    out = x.new_empty((memory.num_ranks * num_rows, row))
    if x.numel() == 0:
        return out
    piece = rows_of_piece(x, memory.num_ranks)
    most = min(blocks_that_fit(x, memory), MAX_BLOCKS, 2 * memory.max_blocks)
    grid = grid_of(-(-num_rows // piece), most)
    use_pdl = pdl_supported(x.device)
    block = triton.next_power_of_2(row)
    _gather_stream_kernel[(grid,)](
        x,
        out,
        memory.memories,
        memory.count,
        num_rows,
        -(-num_rows // (grid * piece)),
        ROW=row,
        BLOCK=block,
        PIECE=piece,
        DEPTH=DEPTH,
        SLOT=memory.slot_bytes // x.element_size(),
        RANK=memory.rank,
        WORLD=memory.num_ranks,
        USE_PDL=use_pdl,
        num_warps=num_warps_of(block),
        maxnreg=MAX_REGISTERS,
        launch_pdl=use_pdl,
    )
    return out

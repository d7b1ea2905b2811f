"""How blocks of the same number on all ranks wait for each other, by words in memory they share.

    a rank's memory:   signals  int64 [MAX_BLOCKS, MAX_RANKS]   word (b, r) is written by rank r
                       packets  2 slots, in turns               of kernels.comm.packets
                       data     2 slots, in turns
    its own besides:   count    int64 [MAX_BLOCKS]              equal words: barriers so far

`meet` is a barrier of block b of every rank: it writes the number of the barrier to word (b, own
rank) of every other rank's signals (`signal`), and waits until the others have written theirs to
its own line b (`wait`). Numbers only grow, and do so on the device: a replayed graph goes on
counting, and nothing is ever reset. A call takes `BARRIERS` numbers whether or not it needs them,
so that `count` tells calls, too; one that needs more counts as several. 64 bits do not run out.
`>=`, because another rank may be in its next call already. It cannot be further ahead: that call
waits for this rank.

Why one barrier a call is enough. A rank writes data of call k to slot k % 2, before it signals. So
others' slot must be free of call k - 2. This rank has ended call k - 1 (one stream), in which it
waited for every other rank to begin k - 1; a rank that begins k - 1 has ended k - 2. Sizes and
grids may differ from call to call: `count` has an equal word for every block that a grid may have.

Memory order. All threads of a block write, then meet at a block's barrier; then one thread for each
rank signals with release, at system scope, which covers what it saw of the other threads. A waiting
thread reads with acquire, then the block's barrier holds the others back. Data is read with `.cg`,
from the L2 cache of the GPU that has the memory, where other GPUs' writes arrive: never from an L1
that kept the line of an earlier call.

Blocks wait for blocks, so grids are at most a block for each multiprocessor, where not said
otherwise. Kernels that run beside end by themselves. After `PATIENCE` looks (minutes) a
kernel traps, and the process has an error instead of a hang without end.
"""

import triton
import triton.language as tl

MAX_RANKS = 8
MAX_BLOCKS = 256
SIGNAL_BYTES = 8 * MAX_BLOCKS * MAX_RANKS
NUM_SLOTS = 2
PACKET_BYTES = 4 * 2**20  # of a slot of packets
DATA_BEGINS = SIGNAL_BYTES + NUM_SLOTS * PACKET_BYTES  # bytes
BARRIERS = tl.constexpr(2)  # of a call, at most
_NUM_SLOTS = tl.constexpr(NUM_SLOTS)
PATIENCE = tl.constexpr(2**30)
_MAX_RANKS = tl.constexpr(MAX_RANKS)
_MAX_BLOCKS = tl.constexpr(MAX_BLOCKS)
_SIGNAL_WORDS = tl.constexpr(SIGNAL_BYTES // 8)
_DATA_BEGINS = tl.constexpr(DATA_BEGINS // 8)


@triton.jit
def trap() -> None:
    """End the kernel, and the process's use of the GPU, with an error."""
    tl.inline_asm_elementwise(
        "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def data_of(memory, dtype: tl.constexpr):  # noqa: ANN201 - Triton's
    """memory: a rank's, as int64 pointer; returns a pointer to its data."""
    pointer = (memory + _DATA_BEGINS).to(tl.pointer_type(dtype), bitcast=True)
    return tl.multiple_of(pointer, 16)


@triton.jit
def packets_of(memory):  # noqa: ANN201 - Triton's
    """memory: a rank's, as int64 pointer; returns a pointer to its packets."""
    pointer = (memory + _SIGNAL_WORDS).to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.multiple_of(pointer, 16)


@triton.jit
def begin(count_ptr):  # noqa: ANN201 - Triton's
    """The number of barriers before this call; call it once a kernel."""
    return tl.load(count_ptr + tl.program_id(0))


@triton.jit
def slot_of(before):  # noqa: ANN201 - Triton's
    """The slot of the call that `before` barriers came before."""
    return before // BARRIERS % _NUM_SLOTS


@triton.jit
def _wait(word, number):
    looks = 0
    while (tl.atomic_add(word, 0, sem="acquire", scope="sys") < number) & (looks < PATIENCE):
        looks += 1
    if looks == PATIENCE:
        trap()


@triton.jit
def signal(memories, number, RANK: tl.constexpr, WORLD: tl.constexpr) -> None:
    """Tell block `program_id(0)` of every other rank that all before this is done here.

    memories: every rank's, as int64 pointers.
    """
    tl.debug_barrier()
    line = tl.program_id(0) * _MAX_RANKS
    ranks = tl.arange(0, WORLD)
    addresses = tl.zeros((WORLD,), tl.int64)
    for rank in tl.static_range(WORLD):
        addresses = tl.where(ranks == rank, memories[rank].to(tl.int64), addresses)
    words = addresses.to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(words + (line + RANK), number, mask=ranks != RANK, sem="release", scope="sys")


@triton.jit
def wait(memories, number, RANK: tl.constexpr, WORLD: tl.constexpr) -> None:
    """Wait until block `program_id(0)` of every other rank has signalled `number`, or more."""
    line = tl.program_id(0) * _MAX_RANKS
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            _wait(memories[RANK] + (line + rank), number)
    tl.debug_barrier()


@triton.jit
def meet(memories, number, RANK: tl.constexpr, WORLD: tl.constexpr) -> None:
    """Wait until block `program_id(0)` of every rank is at barrier `number`."""
    signal(memories, number, RANK, WORLD)
    wait(memories, number, RANK, WORLD)


@triton.jit
def end(count_ptr, before, num_calls=1) -> None:
    """Count this call's barriers. Blocks share the words out, so that all are equal afterwards.

    num_calls: as how many calls this one counts; odd, as calls take turns at the slots.
    """
    blocks = tl.arange(0, _MAX_BLOCKS)
    is_own = blocks % tl.num_programs(0) == tl.program_id(0)
    after = tl.full((_MAX_BLOCKS,), 0, tl.int64) + before + num_calls * BARRIERS
    tl.store(count_ptr + blocks, after, is_own)

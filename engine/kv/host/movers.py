"""Copies whole blocks between a KV store and the host arena.

On a CPU both are memory. A save is a copy on the thread that steps, because the blocks may be
overwritten by the next step. Each block's digest follows its copy, while its bytes are in the
processor's cache: later, on another thread, it would take twice the time.

On a GPU the arena is page-locked. A kernel copies and digests saved blocks into staging rows on the
device (staging.py), and copy engines take them from there to the arena; blocks that find no free
row go there directly. All of that is beside the steps, on streams of its own. Nothing is read that
may be overwritten by then:

    saved blocks    are idle, so no step in flight writes them: reading them waits for nothing
    the next step   may overwrite them: the steps' stream waits until all of a save have been read
    staging rows    are taken again after the host has seen the end of the copy out of them
    loaded blocks   are used by no step in flight, but may just have been saved: loads wait until
                    all saves before them have been read
    a step          reads loaded blocks after `load` has returned
    the arena       a block's bytes are there when the function that `save` returned has returned;
                    nobody is told of the block before that

What was staged and what is loaded crosses the bus in bursts of a fifth of a millisecond, and the
host waits for each: what a step copies, be it a few bytes, goes after all that is queued. On an
H200 steps of 1.4 ms took 12.3 beside 256 blocks queued at once, and 1.8 beside bursts. Blocks
without a row are queued at once, as the next step waits for all of them.

Knows no owners of blocks and no hashes.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kv.host.arena_blocks import Rows
from engine.kv.host.shared_file import KEY
from engine.kv.host.staging import StagingRows
from engine.kv.store import KvStore, to_device

_BURST_BYTES = 10 * 2**20

Copy = Callable[[Sequence[int], Sequence[int]], list[int]]


class BlockMover(Protocol):
    """Moves blocks; slots are blocks of the arena, block ids those of the device."""

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Callable[[], list[int]]:
        """Copy to the arena, on the thread that steps; later steps may overwrite the blocks.

        The function returned waits for the copies and returns the digests; any thread.
        """
        ...

    def begin_load(self) -> Copy:
        """Called on the thread that steps, when the blocks to load to have been allocated.

        The function returned copies (slots, block ids), waits, and returns the digests of what the
        device's blocks hold then, which the store keeps; any thread, one at a time.
        """
        ...


def build_mover(store: KvStore, blocks: Rows, num_staged: int = 0) -> BlockMover:
    """blocks: the arena's, uint8 [num_blocks, block_bytes]. num_staged: staging rows on a GPU.

    Raises ConfigError on a GPU that cannot lock the arena, or has no room for the rows.
    """
    arena = torch.from_numpy(blocks)
    if store.device.type == "cuda":
        return CudaMover(store, arena, num_staged)
    return CpuMover(store, arena)


class CpuMover:
    """A `BlockMover` from memory to memory."""

    def __init__(self, store: KvStore, arena: Tensor) -> None:
        self._store = store
        self._digest = store.digests_in(arena)
        # As arrays: a copy of one row takes less time than torch's.
        self._on_host, self._on_device = arena.numpy(), _bytes_of(store).numpy()

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Callable[[], list[int]]:
        digests = []
        for slot, block_id in zip(slots, block_ids, strict=True):
            self._on_host[slot] = self._on_device[block_id]
            digests.append(self._digest(slot))
        return lambda: digests

    def begin_load(self) -> Copy:
        return self._load

    def _load(self, slots: Sequence[int], block_ids: Sequence[int]) -> list[int]:
        for slot, block_id in zip(slots, block_ids, strict=True):
            self._on_device[block_id] = self._on_host[slot]
        digests = self._store.digest(block_ids)
        self._store.digests.keep(block_ids, digests)
        return digests


class CudaMover:
    """A `BlockMover` over streams of its own."""

    def __init__(self, store: KvStore, arena: Tensor, num_staged: int) -> None:
        self._store = store
        self._arena = arena
        self._blocks = _bytes_of(store)
        num_staged = min(num_staged, store.num_blocks)
        with torch.cuda.device(store.device):
            self._staged = _staging(store, num_staged)
            self._rows = StagingRows(num_staged)
            _lock_pages(arena)
            # Else the next mapping at this address could not be locked.
            weakref.finalize(self, _unlock_pages, arena.data_ptr()).atexit = False
            # Their short kernels go before the rest of a step's: the next step waits for the first,
            # and every piece of a load for the second.
            self._saves, self._loads = (torch.cuda.Stream(priority=-1) for _ in range(2))
            self._drains = torch.cuda.Stream()
            self._warm_up()

    def _warm_up(self) -> None:
        """Does on each stream what it is for: it may compile, and a stream's first tensor is taken
        from the GPU, which waits for the steps that it runs.
        """
        rows = self._rows.take(1)
        with torch.cuda.stream(self._saves):
            self._queue_reads([0], rows)
        for stream in (self._drains, self._loads):
            with torch.cuda.stream(stream):
                self._store.digest([0])
        torch.cuda.synchronize()
        self._rows.give_back(rows)

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Callable[[], list[int]]:
        rows = self._rows.take(len(block_ids))
        num_staged, steps = len(rows), torch.cuda.current_stream(self._store.device)
        with torch.cuda.stream(self._saves):
            digests = self._queue_reads(block_ids, rows)
            _queue(self._arena, slots[num_staged:], self._blocks, block_ids[num_staged:])
            are_read = self._saves.record_event(torch.cuda.Event(blocking=True))
        steps.wait_event(are_read)

        def wait() -> list[int]:
            are_read.synchronize()  # what is queued before may run before the steps that wait
            with torch.cuda.stream(self._drains):
                for burst in self._bursts(num_staged):
                    _queue(self._arena, slots[burst], self._staged, rows[burst])
                    self._drains.record_event(torch.cuda.Event(blocking=True)).synchronize()
                    self._rows.give_back(rows[burst])
                return [value for part in digests for value in part.tolist()]

        return wait

    def _queue_reads(self, block_ids: Sequence[int], rows: Sequence[int]) -> list[Tensor]:
        """Copies the first blocks to the staging rows; returns digests of all, in order.

        They are of the device's blocks: a copy that goes wrong is noticed when it is loaded.
        """
        store, digests = self._store, []
        if rows:
            staged = store.index(block_ids[: len(rows)])
            to = to_device(rows, store.device)
            digests.append(store.queue_copies(staged, self._staged, to))
        if direct := block_ids[len(rows) :]:
            digests.append(store.queue_digests(store.index(direct)))
        return digests

    def begin_load(self) -> Copy:
        are_read = self._saves.record_event()

        def load(slots: Sequence[int], block_ids: Sequence[int]) -> list[int]:
            with torch.cuda.stream(self._loads), torch.inference_mode():
                are_read.synchronize()
                for burst in self._bursts(len(slots)):
                    _queue(self._blocks, block_ids[burst], self._arena, slots[burst])
                    self._loads.synchronize()
                digests = self._store.digest(block_ids)
            self._store.digests.keep(block_ids, digests)
            return digests

        return load

    def _bursts(self, num_blocks: int) -> Iterator[slice]:
        """Blocks to be queued at a time; the host waits for them before it queues the next ones."""
        size = max(1, _BURST_BYTES // self._store.layout.block_bytes)
        return (slice(i, min(i + size, num_blocks)) for i in range(0, num_blocks, size))


def _queue(to: Tensor, places: Sequence[int], blocks: Tensor, numbers: Sequence[int]) -> None:
    """Queues to[place] = blocks[number] for each; what lies side by side in both is one copy."""
    for place, number, n in runs(places, numbers):
        to[place : place + n].copy_(blocks[number : number + n], non_blocking=True)


def runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Joins pairs that both count on: (first, second, how many)."""
    begin = 0
    for end in range(1, len(first) + 1):
        if end < len(first):
            steps = first[end] - first[end - 1], second[end] - second[end - 1]
            if steps == (1, 1):
                continue
        yield first[begin], second[begin], end - begin
        begin = end


def _bytes_of(store: KvStore) -> Tensor:
    """The store's memory as uint8 [num_blocks, block_bytes]."""
    return store.tensor.view(-1).view(torch.uint8).view(store.num_blocks, -1)


def _staging(store: KvStore, num_rows: int) -> Tensor:
    """uint8 [num_rows, block_bytes] on the store's device. Raises ConfigError."""
    try:
        shape = num_rows, store.layout.block_bytes
        return torch.empty(shape, dtype=torch.uint8, device=store.device)
    except torch.OutOfMemoryError as error:
        num_bytes = num_rows * store.layout.block_bytes
        raise ConfigError(
            f"{KEY}: the GPU has no {num_bytes / 2**30:.1f} GiB left for blocks on their way to the"
            " host; lower cache.num_blocks, or set this to 0"
        ) from error


def _lock_pages(arena: Tensor) -> None:
    """Lets the GPU copy from and to the arena by itself. Raises ConfigError."""
    num_bytes = arena.numel() * arena.element_size()
    status = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), num_bytes, 0)
    if int(status) != 0:
        raise ConfigError(
            f"{KEY}: CUDA cannot lock {num_bytes / 2**30:.1f} GiB of host memory ({status}); lower"
            " it"
        )


def _unlock_pages(address: int) -> None:
    """While the memory is still mapped."""
    torch.cuda.cudart().cudaHostUnregister(address)

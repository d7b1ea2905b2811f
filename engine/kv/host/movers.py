"""Copies whole blocks between a KV store and the host arena.

On a CPU both are memory. A save is a copy on the thread that steps, because the blocks may be
overwritten by the next step. Each block's digest follows its copy, while its bytes are in the
processor's cache: later, on another thread, it would take twice the time.

On a GPU the arena is page-locked, and copies run on the copy engines, on two streams beside the
steps'. Which waits for which:

    saved blocks    are idle, so the steps that wrote them have been waited for: nothing to wait for
    the next step   may overwrite them: the steps' stream waits for the save
    loaded blocks   are used by no step in flight, but may just have been saved: loads wait for the
                    saves before them
    a step          reads loaded blocks after `load` has returned

Knows no owners of blocks and no hashes.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kv.host.arena_blocks import Rows
from engine.kv.host.shared_file import KEY
from engine.kv.store import KvStore, to_host

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


def build_mover(store: KvStore, blocks: Rows) -> BlockMover:
    """blocks: the arena's, uint8 [num_blocks, block_bytes]. Raises ConfigError on a GPU that cannot
    lock them.
    """
    arena = torch.from_numpy(blocks)
    return CudaMover(store, arena) if store.device.type == "cuda" else CpuMover(store, arena)


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

    def __init__(self, store: KvStore, arena: Tensor) -> None:
        self._store = store
        self._arena = arena
        self._blocks = _bytes_of(store)
        with torch.cuda.device(store.device):
            _lock_pages(arena)
            # Else the next mapping at this address could not be locked.
            weakref.finalize(self, _unlock_pages, arena.data_ptr()).atexit = False
            self._saves = torch.cuda.Stream()
            self._loads = torch.cuda.Stream()

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Callable[[], list[int]]:
        steps = torch.cuda.current_stream(self._store.device)
        with torch.cuda.stream(self._saves):
            # Of the device's blocks: a copy that goes wrong is noticed when it is loaded.
            digests = to_host(self._store.queue_digests(self._store.index(block_ids)))
            for block_id, slot in zip(block_ids, slots, strict=True):
                self._arena[slot].copy_(self._blocks[block_id], non_blocking=True)
            is_saved = self._saves.record_event()
        steps.wait_event(is_saved)

        def wait() -> list[int]:
            is_saved.synchronize()
            values: list[int] = digests.tolist()
            return values

        return wait

    def begin_load(self) -> Copy:
        is_saved = self._saves.record_event()

        def load(slots: Sequence[int], block_ids: Sequence[int]) -> list[int]:
            with torch.cuda.stream(self._loads), torch.inference_mode():
                self._loads.wait_event(is_saved)
                for slot, block_id in zip(slots, block_ids, strict=True):
                    self._blocks[block_id].copy_(self._arena[slot], non_blocking=True)
                digests = to_host(self._store.queue_digests(self._store.index(block_ids)))
                self._loads.synchronize()
            values: list[int] = digests.tolist()
            self._store.digests.keep(block_ids, values)
            return values

        return load


def _bytes_of(store: KvStore) -> Tensor:
    """The store's memory as uint8 [num_blocks, block_bytes]."""
    return store.tensor.view(-1).view(torch.uint8).view(store.num_blocks, -1)


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

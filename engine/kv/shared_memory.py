"""Memory of one rank that rank 0 of the same worker maps: so KV gets in and out of all ranks.

    word 0              steps that this rank has finished
    a word a block      its digest, as of the step that wrote it last
    a byte a block      1 = the digest is known
    from a page on      the blocks, if they lie in host memory

The memory has no name (memfd): the kernel frees it with the last process that maps it. The rank
says which of its files it is, and rank 0 opens that through /proc, as a process of the same user
may. Words are written before the count of steps, and read after it (see plan_ring.py on the order
of stores).
"""

import mmap
import os
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import WorkerError
from engine.kv.digests import BlockDigests

_WORD = 8


class MemoryOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Tells another process of this machine where the memory is; good until `close_file`."""

    pid: int
    fd: int
    num_blocks: int
    kv_bytes: int  # 0 = the blocks are on a GPU


class SharedMemory:
    """The words and blocks; see the module's docstring."""

    def __init__(self, fd: int, num_blocks: int, kv_bytes: int) -> None:
        self._fd = fd
        self._offer = MemoryOffer(pid=os.getpid(), fd=fd, num_blocks=num_blocks, kv_bytes=kv_bytes)
        memory = mmap.mmap(fd, _size(num_blocks, kv_bytes))
        self._finished: NDArray[np.int64] = np.frombuffer(memory, np.int64, 1)
        self.digests = BlockDigests(
            num_blocks,
            values=np.frombuffer(memory, np.int64, num_blocks, _WORD),
            is_known=np.frombuffer(memory, np.uint8, num_blocks, _WORD * (1 + num_blocks)),
        )
        data: NDArray[Any] = np.frombuffer(memory, np.uint8, kv_bytes, _kv_start(num_blocks))
        self.kv: Tensor = torch.from_numpy(data)  # uint8 [kv_bytes]

    @classmethod
    def create(cls, num_blocks: int, kv_bytes: int) -> "SharedMemory":
        """All zero."""
        fd = os.memfd_create("kv", os.MFD_CLOEXEC)
        os.ftruncate(fd, _size(num_blocks, kv_bytes))
        return cls(fd, num_blocks, kv_bytes)

    @classmethod
    def attach(cls, offer: MemoryOffer) -> "SharedMemory":
        """That of another process. Raises WorkerError if it cannot be opened."""
        path = f"/proc/{offer.pid}/fd/{offer.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WorkerError(
                f"{path}, the KV of another rank of this worker, cannot be mapped: {error}"
            ) from error
        attached = cls(fd, offer.num_blocks, offer.kv_bytes)
        attached.close_file()
        return attached

    @property
    def offer(self) -> MemoryOffer:
        return self._offer

    @property
    def num_finished_steps(self) -> int:
        return int(self._finished[0])

    def count_step(self) -> None:
        """One more step has ended: what it wrote is here. One thread of one process calls it."""
        self._finished[0] += 1

    def close_file(self) -> None:
        """Nobody can attach any more; the memory stays as long as somebody maps it."""
        os.close(self._fd)


def _kv_start(num_blocks: int) -> int:
    words = _WORD * (1 + num_blocks) + num_blocks
    return -(-words // mmap.PAGESIZE) * mmap.PAGESIZE


def _size(num_blocks: int, kv_bytes: int) -> int:
    return _kv_start(num_blocks) + kv_bytes

"""The bytes of an arena's blocks in memory, also in that of a worker's other ranks.

Knows nothing of who owns a block: another rank writes to those that rank 0 has taken.
"""

import mmap
import os

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import WorkerError

Rows = NDArray[np.uint8]  # [blocks, bytes of each]


class ArenaOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Tells another rank where the blocks of its rank 0's arena are; good while that has it."""

    pid: int
    fd: int
    blocks_at: int  # bytes from the file's start
    num_blocks: int
    block_bytes: int


def attach_blocks(offer: ArenaOffer) -> Rows:
    """The blocks of another process. Raises WorkerError if they cannot be mapped."""
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = offer.blocks_at + offer.num_blocks * offer.block_bytes
            memory = memoryview(mmap.mmap(fd, size))
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"{path}, the host tier of this worker, cannot be mapped: {error}"
        ) from error
    touch_pages(memory)
    return blocks_in(memory, offer)


def blocks_in(memory: memoryview, offer: ArenaOffer) -> Rows:
    """memory: of the whole file."""
    shape = offer.num_blocks, offer.block_bytes
    found = np.frombuffer(memory, np.uint8, offset=offer.blocks_at, count=shape[0] * shape[1])
    return found.reshape(shape)


def touch_pages(memory: memoryview) -> None:
    """Maps all pages now: the first touch of one takes longer than writing it.

    Reading suffices, and may run beside others' writing.
    """
    np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE].max()

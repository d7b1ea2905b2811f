"""GPU memory that pieces of all pairs of one worker are staged in: two slots, made when needed.

No two workers can wait for each other in a circle: a sender has its slot before the header goes,
a receiver takes its slot when the header has come and the piece is next, so a receiver's slot is
always held for bytes that are ready to move.
"""

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from actors.handoff.contracts import ArrivedBlocks
from actors.handoff.kv_pieces import KvPieces
from engine.errors import HandoffError

NUM_SLOTS = 2  # one is copied out of or into the store while the other moves


class StagingRing:
    """Slots of `slot_bytes` each beside one KV store. Belongs to the event loop."""

    def __init__(self, pieces: KvPieces, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._pieces = pieces
        self._slots: asyncio.Queue[Tensor] = asyncio.Queue()
        self._is_made = False

    @property
    def num_free(self) -> int:
        return self._slots.qsize() if self._is_made else NUM_SLOTS

    async def acquire(self, num_bytes: int, deadline_s: float) -> "RingPiece":
        """A slot for a piece. Raises HandoffError when none becomes free within `deadline_s`."""
        if num_bytes > self.slot_bytes:
            raise HandoffError(f"a piece of {num_bytes} bytes; the staging takes {self.slot_bytes}")
        self._make()
        try:
            async with asyncio.timeout(deadline_s):
                slot = await self._slots.get()
        except TimeoutError as error:
            raise HandoffError(f"no staging memory was free within {deadline_s} s") from error
        return RingPiece(self._pieces, slot, num_bytes, self._slots)

    def _make(self) -> None:
        if self._is_made:
            return
        try:
            slots = [self._new_slot() for _ in range(NUM_SLOTS)]
        except torch.OutOfMemoryError as error:
            raise HandoffError(
                f"no GPU memory for {NUM_SLOTS} x {self.slot_bytes} bytes of staging: lower"
                " handoff.device_piece_bytes or cache.gpu_memory_share"
            ) from error
        self._is_made = True
        for slot in slots:
            self._slots.put_nowait(slot)

    def _new_slot(self) -> Tensor:
        return torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._pieces.device)


class RingPiece(ArrivedBlocks):
    """A piece in a slot, until it is written or discarded."""

    def __init__(
        self, pieces: KvPieces, slot: Tensor, num_bytes: int, slots: asyncio.Queue[Tensor]
    ) -> None:
        self.staging = slot[:num_bytes]
        self._pieces = pieces
        self._slot = slot
        self._slots = slots
        self._is_held = True

    @property
    def nbytes(self) -> int:
        return self.staging.numel()

    async def write(self, block_ids: Sequence[int], digests: list[int]) -> bool:
        assert self._is_held, "the piece was written or discarded before"
        try:
            return await self._pieces.take(self.staging, block_ids, digests)
        finally:
            self.discard()

    def discard(self) -> None:
        if self._is_held:
            self._is_held = False
            self._slots.put_nowait(self._slot)

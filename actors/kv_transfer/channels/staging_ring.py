"""GPU memory in which the pieces of all pairs of one worker are staged; allocated when needed.

Two workers cannot deadlock: a sender has its slot before the header goes, and a receiver takes its
slot when the header has come and the piece is next. So a receiver's slot is always held for bytes
that are ready to move.

A slot that NCCL may still write to is lost, and another one takes its place.
"""

import asyncio
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from actors.kv_transfer.channels.kept_memory import keep_for_good
from actors.kv_transfer.contracts import ArrivedBlocks
from engine.errors import HandoffError

logger = logging.getLogger(__name__)

NUM_SLOTS = 3  # one moves, the next waits, one is copied out of or into the store


class StagingRing:
    """Slots of `slot_bytes` each on one device. Belongs to the event loop."""

    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._device = device
        self._slots: asyncio.Queue[Tensor] = asyncio.Queue()
        self._making = asyncio.Lock()
        self._num_missing = NUM_SLOTS  # not made yet, or lost

    @property
    def num_free(self) -> int:
        return self._slots.qsize() + self._num_missing

    async def acquire(
        self, num_bytes: int, deadline_s: float, block_ids: Sequence[int] | None = None
    ) -> "RingPiece":
        """Returns a slot for a piece. Raises HandoffError if none is free by `deadline_s`."""
        if num_bytes > self.slot_bytes:
            raise HandoffError(f"a piece of {num_bytes} bytes; the staging takes {self.slot_bytes}")
        await self._make()
        try:
            async with asyncio.timeout(deadline_s):
                slot = await self._slots.get()
        except TimeoutError as error:
            raise HandoffError(f"no staging memory was free within {deadline_s} s") from error
        return RingPiece(self, slot, num_bytes, block_ids)

    def give_back(self, slot: Tensor) -> None:
        """Frees what `acquire` took."""
        self._slots.put_nowait(slot)

    def lose(self, slot: Tensor) -> None:
        """Gives up what `acquire` took: something may still be written there."""
        keep_for_good(slot)
        self._num_missing += 1

    async def _make(self) -> None:
        """Allocates what is missing. Raises HandoffError if there is no slot at all."""
        async with self._making:
            if (number := self._num_missing) == 0:
                return
            try:
                slots = await asyncio.to_thread(self._new_slots, number)
            except HandoffError as error:
                if number == NUM_SLOTS:
                    raise
                logger.warning("%d of %d slots are lost: %s", number, NUM_SLOTS, error.message)
                return
            self._num_missing -= number
            for slot in slots:
                self._slots.put_nowait(slot)

    def _new_slots(self, number: int) -> list[Tensor]:
        """Allocates slots. Runs in a thread, because it may wait for a step.

        Raises HandoffError if the GPU has no memory for them.
        """
        try:
            slots = [self._new_slot() for _ in range(number)]
        except torch.OutOfMemoryError as error:
            raise HandoffError(
                f"no GPU memory for {number} x {self.slot_bytes} bytes of staging: lower"
                " handoff.device_piece_bytes or cache.gpu_memory_utilization"
            ) from error
        if self._device.type == "cuda":
            # Steps launched earlier may still use this memory, and no pair waits for them.
            torch.cuda.default_stream(self._device).synchronize()
        return slots

    def _new_slot(self) -> Tensor:
        return torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._device)


class RingPiece(ArrivedBlocks):
    """A piece in a slot, until it is written or discarded.

    What is received is written by the pair itself, to the blocks that were named before.
    """

    def __init__(
        self, ring: StagingRing, slot: Tensor, num_bytes: int, block_ids: Sequence[int] | None
    ) -> None:
        """block_ids: the blocks to send, or to write when the piece has come; None: none."""
        self.staging = slot[:num_bytes]
        self.block_ids = block_ids
        self.digests: list[int] = []  # one per written block
        self._ring = ring
        self._slot = slot
        self._is_held = True
        self._is_lost = False

    @property
    def nbytes(self) -> int:
        return self.staging.numel()

    async def write(self, block_ids: Sequence[int], digests: list[int]) -> bool:
        assert self._is_held, "the piece was written or discarded before"
        assert block_ids == self.block_ids, "it was received for other blocks"
        self.discard()
        return self.digests == digests

    def lose(self) -> None:
        """Something may be written to the slot for ever: it is not free when this is discarded.

        May be called from any thread.
        """
        self._is_lost = True

    def discard(self) -> None:
        if self._is_held:
            self._is_held = False
            if self._is_lost:
                self._ring.lose(self._slot)
            else:
                self._ring.give_back(self._slot)

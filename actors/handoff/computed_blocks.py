"""What a sender knows of one prompt's blocks: which are computed, and how far they were sent.

    [0 .... num_hit)   D had them
    [num_hit .. next)  sent, all under one epoch; some pieces may be under way
    [next ... end)     computed: may be sent
    [end ..........)   computes; after the prompt's end there is nothing here

D commits with the last piece, so that one goes when all others are acknowledged. A transfer that
goes on under another epoch starts over at `num_hit`: D forgets what came by an older channel, since
it cannot know what else of that channel may still land. A prompt that computes again, after a
preemption on P, goes on at `next`: what D has is the KV of the same tokens.

On the event loop only. Knows no channels and no D.
"""

import asyncio
from dataclasses import dataclass

from engine.errors import HandoffError
from engine.kv.handoff import HandoffReady
from engine.messages import Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPiece:
    """Blocks [first_block, first_block + len(block_ids)) of a prompt; none if D has them all."""

    first_block: int
    block_ids: list[int]
    first_token_id: int | None  # with the prompt's last block; until then D cannot commit
    is_early: bool  # the prompt still computes


class ComputedBlocks:
    """Follows one prompt from its first chunk to its last block."""

    def __init__(self) -> None:
        self.reading = asyncio.Lock()  # held while pieces are read: their blocks must stay
        self._block_ids: list[int] = []
        self._ready: HandoffReady | None = None
        self._changed = asyncio.Event()
        self._num_blocks = 0
        self._num_hit_blocks = 0
        self._epoch = 0
        self._next = 0
        self._num_under_way = 0

    # ---- from the engine ------------------------------------------------------------------------

    def advance(self, block_ids: list[int]) -> None:
        """These leading blocks are full."""
        self._block_ids = block_ids
        self._changed.set()

    def retract(self) -> None:
        """No block is to be read any more: the prompt computes again, in other ones."""
        self._block_ids = []

    def complete(self, ready: HandoffReady) -> None:
        """The prompt is computed."""
        self._ready = ready
        self.advance(ready.block_ids)

    # ---- to the transfer ------------------------------------------------------------------------

    def expect(self, reservation: Reservation) -> None:
        """D has room for all of the prompt, and its first blocks."""
        self._num_blocks = reservation.num_blocks
        self._next = self._num_hit_blocks = reservation.num_hit_blocks

    def go_on_under(self, epoch: int) -> None:
        """Pieces go by this epoch's channel; if it is another than before, all start over."""
        if epoch != self._epoch:
            self._epoch = epoch
            self.start_over()

    def start_over(self) -> None:
        """What was sent counts for nothing, and no piece is under way."""
        self._next, self._num_under_way = self._num_hit_blocks, 0

    async def wait_sendable(self) -> None:
        """Wait until there is a next piece.

        Raises HandoffError when D reserved another number of blocks than were computed.
        """
        while not self._can_send:
            self._changed.clear()
            await self._changed.wait()
        if self._ready is not None and len(self._ready.block_ids) != self._num_blocks:
            raise HandoffError(
                f"{len(self._ready.block_ids)} blocks computed, {self._num_blocks} reserved"
            )

    def next_piece(self, max_blocks: int) -> NextPiece | None:
        """What goes now, at most `max_blocks` (>= 1); it is under way until `acknowledged`.

        None until more is computed, or before the last piece until all others are acknowledged.
        """
        if not self._can_send:
            return None
        ready, end = self._ready, min(self._next + max_blocks, len(self._block_ids))
        is_last = ready is not None and end == self._num_blocks
        if is_last and self._num_under_way:
            return None
        first_block, self._next = self._next, end
        self._num_under_way += 1
        return NextPiece(
            first_block=first_block,
            block_ids=self._block_ids[first_block:end],
            first_token_id=ready.first_token_id if ready is not None and is_last else None,
            is_early=ready is None,
        )

    def acknowledged(self) -> None:
        """D has a piece that was under way."""
        self._num_under_way -= 1

    @property
    def _can_send(self) -> bool:
        """A block may go; or the prompt is complete: then its last piece may be one without any."""
        return self._ready is not None or self._next < len(self._block_ids)

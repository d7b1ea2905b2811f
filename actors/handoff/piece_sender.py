"""Sends what is computed of a prompt over an open channel, a few pieces at a time.

While one piece moves the next is read and digested, and D checks and writes the one before.
"""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import msgspec

from actors.handoff.channel_choice import piece_bytes_of
from actors.handoff.computed_blocks import ComputedBlocks, NextPiece
from actors.handoff.contracts import OutgoingData, Peer, PieceStore, SendChannel
from actors.handoff.piece_bundles import PieceBundles
from actors.handoff.waits import EndedError
from configs.schema import HandoffConfig
from engine.errors import HandoffError
from engine.messages import PieceHeader, PieceReply, Reservation, WorkerIdentity
from engine.request import RequestKey

# Of one prompt: one is staged, one moves and one waits behind it, one is checked and written.
MAX_PIECES_UNDER_WAY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One prompt on its way to where room is reserved for it."""

    key: RequestKey
    blocks: ComputedBlocks
    ended: asyncio.Future[None]  # cancelled, or dropped by the scheduler
    peer: Peer
    reservation: Reservation


class PieceSender:
    """The pieces of all prompts of one worker. Belongs to the event loop."""

    def __init__(self, identity: WorkerIdentity, config: HandoffConfig, store: PieceStore) -> None:
        self._identity = identity
        self._config = config
        self._store = store
        self._bundles = PieceBundles(identity.layout.block_bytes)
        self.counts: Counter[str] = Counter()  # "pieces", "bytes", "early blocks"

    @property
    def num_calls(self) -> int:
        """That carried pieces, one or several each."""
        return self._bundles.num_calls

    async def send_computed(self, transfer: Transfer, channel: SendChannel) -> PieceReply | None:
        """Send what is computed so far; None if more is to come, else D's answer that ends it.

        On return, also by an exception, no piece is under way. Raises HandoffError when the
        transfer may start over on another channel, EndedError, WorkerError when D is dead.
        """
        blocks = transfer.blocks
        max_bytes = piece_bytes_of(self._config, channel.kind)
        max_blocks = max(1, max_bytes // self._identity.layout.block_bytes)
        sending: deque[asyncio.Task[PieceReply | None]] = deque()  # in the order of their blocks
        async with blocks.reading:
            blocks.go_on_under(channel.epoch)
            try:
                while True:
                    if transfer.ended.done():
                        raise EndedError
                    has_room = len(sending) < MAX_PIECES_UNDER_WAY
                    piece = blocks.next_piece(max_blocks) if has_room else None
                    if piece is not None:
                        sending.append(asyncio.create_task(self._send(transfer, channel, piece)))
                    elif sending:
                        reply = await sending[0]
                        sending.popleft()
                        if reply is not None:
                            return reply
                    else:
                        return None
            finally:
                await asyncio.gather(*sending, return_exceptions=True)

    async def _send(
        self, transfer: Transfer, channel: SendChannel, piece: NextPiece
    ) -> PieceReply | None:
        """None when D took the piece, else its answer that ends the transfer."""
        reply = await self._read_and_send(transfer, channel, piece)
        if reply.outcome == "failed" and reply.is_retryable:
            raise HandoffError(f"D did not take a piece: {reply.reason}")
        if reply.outcome != "accepted":
            return reply
        if piece.first_token_id is not None:
            raise HandoffError("D did not commit with the last piece")
        transfer.blocks.acknowledged()
        self.counts["early blocks"] += len(piece.block_ids) * piece.is_early
        return None

    async def _read_and_send(
        self, transfer: Transfer, channel: SendChannel, piece: NextPiece
    ) -> PieceReply:
        """Wait for the piece's acknowledgement."""
        header = self._header(transfer, channel.epoch, piece)
        data: OutgoingData | None = None
        if piece.block_ids:
            read = await self._store.read(piece.block_ids)
            data = read.data
            header = msgspec.structs.replace(header, digests=read.digests)

        async def deliver(seq: int, payload: list[Any]) -> PieceReply:
            numbered = msgspec.structs.replace(header, seq=seq)
            return await self._bundles.deliver(transfer.peer, numbered, payload)

        reply = await channel.send(data, deliver)
        self.counts["pieces"] += 1
        self.counts["bytes"] += 0 if data is None else data.nbytes
        return reply

    def _header(self, transfer: Transfer, epoch: int, piece: NextPiece) -> PieceHeader:
        return PieceHeader(
            transfer_id=transfer.reservation.transfer_id,
            key=transfer.key,
            sender=self._identity.name,
            sender_incarnation=self._identity.incarnation,
            epoch=epoch,
            seq=0,  # known when the channel takes the piece
            first_block=piece.first_block,
            num_blocks=len(piece.block_ids),
            digests=[],  # known when the blocks are read
            first_token_id=piece.first_token_id,
        )

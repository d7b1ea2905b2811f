"""Sends what is computed of a prompt over an open channel, a few pieces at a time.

While one piece moves the next is read and digested, and the decode side checks and writes the one
before. `ComputedBlocks` knows how far a prompt's blocks are computed and sent:

    [0 .... num_hit)   the decode side had them
    [num_hit .. next)  sent, all under one epoch; some pieces may be under way
    [next ... end)     computed: may be sent
    [end ..........)   computes; after the prompt's end there is nothing here

The decode side commits with the last piece, so that one goes when all others are acknowledged. A
transfer that continues under another epoch starts over at `num_hit`: the decode side forgets what
came by an older channel, since it cannot know what else of that channel may still land. A prompt
that computes again, after a preemption on the prefill side, goes on at `next`: what the decode side
has is the KV of the same tokens.

`PieceBundles` puts the small pieces that leave for one decode worker at the same moment into one
call. A step that ends many short prompts has one small piece of each, and a call costs both
processes more than such a piece. A large piece goes by itself, or the small ones would wait for its
acknowledgement. Unlike the batches of a DynamicBatcher, calls do not wait for each other.

On the event loop only.
"""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from actors.kv_transfer.channel_choice import piece_bytes_of
from actors.kv_transfer.contracts import (
    OutgoingData,
    Payload,
    Peer,
    PieceStore,
    PieceTaker,
    SendChannel,
)
from actors.kv_transfer.waits import EndedError
from configs.schema import HandoffConfig
from engine.errors import HandoffError
from engine.kv.transfer import HandoffReady
from engine.messages import PieceHeader, PieceReply, Reservation, WorkerIdentity
from engine.request import RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPiece:
    """Blocks [first_block, first_block + len(block_ids)) of a prompt.

    There are none if the decode side has them all.
    """

    first_block: int
    block_ids: list[int]
    # Sampled with the prompt's last block; without it the decode side cannot commit. None = this
    # piece is not the last.
    first_token_id: int | None
    num_drafter_tokens: int  # likewise, as of `PieceHeader`
    is_early: bool  # the prompt still computes


class ComputedBlocks:
    """Follows one prompt from its first chunk to its last block."""

    def __init__(self) -> None:
        self.reading = asyncio.Lock()  # held while pieces are read, so that their blocks stay
        self._block_ids: list[int] = []
        self._ready: HandoffReady | None = None
        self._changed = asyncio.Event()
        self._num_blocks = 0
        self.num_hit_blocks = 0  # that the decode side had
        self._epoch = 0
        self._next = 0
        self._num_under_way = 0

    # ---- from the engine ------------------------------------------------------------------------

    def advance(self, block_ids: list[int]) -> None:
        """Notes that these leading blocks are full."""
        self._block_ids = block_ids
        self._changed.set()

    def retract(self) -> None:
        """Takes all blocks back: the prompt is computed again in other ones."""
        self._block_ids = []

    def complete(self, ready: HandoffReady) -> None:
        """Notes that the prompt is computed."""
        self._ready = ready
        self.advance(ready.block_ids)

    # ---- to the transfer ------------------------------------------------------------------------

    def expect(self, reservation: Reservation) -> None:
        """Notes that the decode side has reserved blocks, and how many need no transfer."""
        self._num_blocks = reservation.num_blocks
        self._next = self.num_hit_blocks = reservation.num_hit_blocks

    def go_on_under(self, epoch: int) -> None:
        """Sends pieces by this epoch's channel; a new epoch starts the transfer over."""
        if epoch != self._epoch:
            self._epoch = epoch
            self.start_over()

    def start_over(self) -> None:
        """Forgets what was sent; no piece is in flight."""
        self._next, self._num_under_way = self.num_hit_blocks, 0

    async def wait_sendable(self) -> None:
        """Wait until there is a next piece.

        Raises HandoffError when the decode side reserved another number of blocks than were
        computed.
        """
        while not self._can_send:
            self._changed.clear()
            await self._changed.wait()
        if self._ready is not None and len(self._ready.block_ids) != self._num_blocks:
            raise HandoffError(
                f"{len(self._ready.block_ids)} blocks computed, {self._num_blocks} reserved"
            )

    def next_piece(self, max_blocks: int) -> NextPiece | None:
        """Returns the next piece, of at most `max_blocks` (>= 1); in flight until `acknowledged`.

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
        end_of_all = ready if is_last else None
        return NextPiece(
            first_block=first_block,
            block_ids=self._block_ids[first_block:end],
            first_token_id=None if end_of_all is None else end_of_all.first_token_id,
            num_drafter_tokens=0 if end_of_all is None else end_of_all.num_drafter_tokens,
            is_early=ready is None,
        )

    def acknowledged(self) -> None:
        """Notes that the decode side has taken a piece that was in flight."""
        self._num_under_way -= 1

    @property
    def _can_send(self) -> bool:
        """Whether a block can be sent, or the last piece, which may have no block."""
        return self._ready is not None or self._next < len(self._block_ids)


BUNDLED_BYTES = 32 * 2**20  # of one piece: 0.1 ms between two GPUs


@dataclass(slots=True, kw_only=True, eq=False)
class _Bundle:
    call: asyncio.Task[list[PieceReply]]
    pieces: list[tuple[PieceHeader, Payload]] = field(default_factory=list)
    num_waiting: int = 0


class PieceBundles:
    """The calls of one sender; a call takes all pieces of one turn of the event loop."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._open: dict[PieceTaker, _Bundle] = {}
        self.num_calls = 0

    async def deliver(self, peer: PieceTaker, header: PieceHeader, payload: Payload) -> PieceReply:
        """Delivers a piece; returns the peer's answer. Raises WorkerError if it is dead."""
        piece = (header, payload)
        if header.num_blocks * self._block_bytes > BUNDLED_BYTES:
            self.num_calls += 1
            [reply] = await peer.receive_pieces([piece])
            return reply
        bundle = self._open.get(peer)
        if bundle is None:
            # The task starts after this turn, so the pieces of one turn go together.
            bundle = self._open[peer] = _Bundle(call=asyncio.ensure_future(self._send(peer)))
        place = len(bundle.pieces)
        bundle.pieces.append(piece)
        bundle.num_waiting += 1
        try:
            # Shielded: a cancelled caller must not cancel the call of the others.
            replies = await asyncio.shield(bundle.call)
        finally:
            bundle.num_waiting -= 1
            if not bundle.num_waiting:
                bundle.call.cancel()  # else the call would stay as long as the peer is silent
        return replies[place]

    async def _send(self, peer: PieceTaker) -> list[PieceReply]:
        bundle = self._open.pop(peer)
        self.num_calls += 1
        return await peer.receive_pieces(bundle.pieces)


# Pieces of one prompt: one is staged, one moves, one waits behind it, one is checked and written.
MAX_PIECES_UNDER_WAY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One prompt's transfer to the decode worker that reserved blocks for it."""

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
        """Calls made so far; each carried one or several pieces."""
        return self._bundles.num_calls

    async def send_computed(self, transfer: Transfer, channel: SendChannel) -> PieceReply | None:
        """Sends what is computed so far.

        Returns None if more will come, else the decode worker's answer that ends the transfer.

        On return, also by an exception, no piece is in flight. Raises HandoffError when the
        transfer may start over on another channel, EndedError, WorkerError when the decode side is
        dead.
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
        """Sends a piece; returns None if it was taken, else the reply that ends the transfer."""
        reply = await self._read_and_send(transfer, channel, piece)
        if reply.outcome == "failed" and reply.is_retryable:
            raise HandoffError(f"the decode side did not take a piece: {reply.reason}")
        if reply.outcome != "accepted":
            return reply
        if piece.first_token_id is not None:
            raise HandoffError("the decode side did not commit with the last piece")
        transfer.blocks.acknowledged()
        self.counts["early blocks"] += len(piece.block_ids) * piece.is_early
        return None

    async def _read_and_send(
        self, transfer: Transfer, channel: SendChannel, piece: NextPiece
    ) -> PieceReply:
        """Reads a piece, sends it and waits for its acknowledgement."""
        header = self._header(transfer, channel.epoch, piece)
        data: OutgoingData | None = None
        if piece.block_ids:
            read = await self._store.read(piece.block_ids)
            data = read.data
            header = msgspec.structs.replace(header, digests=read.digests)

        async def deliver(seq: int, payload: Payload) -> PieceReply:
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
            num_drafter_tokens=piece.num_drafter_tokens,
        )

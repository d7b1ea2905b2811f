"""The decode side of a handoff on its event loop: reserves blocks, takes pieces, checks, commits.

Reservations are granted in the order of the `ReservationQueue` (reservations.py).

A piece's epoch and place are checked at once, it is received, and other threads check its digests
before or while it is written to the reserved blocks, which stay reserved until that is over. The
reply to a piece is its acknowledgement, the reply to the last one says that the request runs here.

One channel per sender: opening a newer epoch closes the older one and returns only when no write of
it can land any more. One that is still opening is left alone: no piece went over it, and a sender
may have died in the middle. A sender counts its epochs from 1 in every incarnation; a late call of
an earlier incarnation must not end the channel of its successor (`NewestEpochs`).

All state here belongs to the event loop; `IncomingHandoffs` is touched through `EngineCalls`. Only
whether a piece may be written is asked directly, without waiting for a step. Knows no tensors.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actors.kv_transfer.channel_choice import piece_bytes_of
from actors.kv_transfer.contracts import (
    ArrivedBlocks,
    Channels,
    EngineCalls,
    IncomingData,
    Payload,
    PieceStore,
    ReceiveChannel,
    StagedPiece,
    UnfitError,
)
from actors.kv_transfer.reservations import Answer, ReservationQueue
from actors.kv_transfer.waits import EndedError, close_when_open, settle, unless_ended
from configs.schema import HandoffConfig
from engine.errors import HandoffError, WorkerError
from engine.kv.transfer import BlockWrite, IncomingHandoffs
from engine.messages import (
    CancelReply,
    CancelTransfer,
    PairReply,
    PairRequest,
    PieceHeader,
    PieceReply,
    Refused,
    RenewLease,
    Reservation,
    ReserveRequest,
    WorkerIdentity,
)
from engine.request import RequestKey

logger = logging.getLogger(__name__)

CHECKS_PER_LEASE = 4  # a lease ends at most a quarter of its length late


@dataclass(frozen=True, slots=True, kw_only=True)
class _Newest:
    incarnation: str
    epoch: int
    earlier_incarnation: str  # "" = none
    superseded: asyncio.Future[None]


class NewestEpochs:
    """The newest epoch of each sender that this receiver has met. Belongs to the event loop."""

    def __init__(self) -> None:
        self._newest: dict[str, _Newest] = {}  # by sender's name

    def ask(self, sender: WorkerIdentity, epoch: int) -> asyncio.Future[None]:
        """Makes this epoch the newest; the future ends when a newer one replaces it.

        Raises HandoffError if a newer one was asked for before.
        """
        before = self._newest.get(sender.name)
        earlier = "" if before is None else before.earlier_incarnation
        if before is not None:
            if sender.incarnation == before.earlier_incarnation:
                raise HandoffError(f"{sender.name} has been replaced since")
            if sender.incarnation != before.incarnation:
                earlier = before.incarnation
            elif epoch <= before.epoch:
                raise HandoffError(f"epoch {epoch} is not newer than {before.epoch}")
            settle(before.superseded, None)
        newest = _Newest(
            incarnation=sender.incarnation,
            epoch=epoch,
            earlier_incarnation=earlier,
            superseded=asyncio.get_running_loop().create_future(),
        )
        self._newest[sender.name] = newest
        return newest.superseded


@dataclass(slots=True, kw_only=True, eq=False)
class _Pair:
    """The channel from one sender."""

    sender: WorkerIdentity
    channel: ReceiveChannel
    max_blocks: int  # in a piece
    pieces: set[asyncio.Task[PieceReply]] = field(default_factory=set)  # under way

    def carries(self, header: PieceHeader) -> bool:
        is_sender = header.sender_incarnation == self.sender.incarnation
        return is_sender and header.epoch == self.channel.epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStatistics:
    """Sizes now, then counters since start."""

    num_waiting: int  # reservations in line
    num_channels: int
    num_pieces_under_way: int
    num_pieces: int  # verified and written
    num_bytes: int  # of them
    num_epochs: int  # channels opened
    failures: dict[str, int] = field(default_factory=dict)  # reason -> pieces not taken


class HandoffReceiver:
    """Takes over requests from prefill workers. Created on the event loop."""

    def __init__(
        self,
        identity: WorkerIdentity,
        config: HandoffConfig,
        *,
        engine: EngineCalls,
        incoming: IncomingHandoffs,
        channels: Channels,
        store: PieceStore,
        on_grant: Callable[[], None] = lambda: None,
        refusal: Callable[[RequestKey], str | None] = lambda _: None,
    ) -> None:
        """`refusal(key)` says why a request is not taken at all; None if it is.

        `on_grant()` is called on the event loop when blocks were reserved, before the sender gets
        them: steps launched earlier may still write to them.
        """
        self._identity = identity
        self._config = config
        self._engine = engine
        self._incoming = incoming
        self._channels = channels
        self._store = store
        self._block_bytes = identity.layout.block_bytes
        self._on_grant = on_grant
        self._refusal = refusal
        self._queue = ReservationQueue(engine, incoming)
        self._pairs: dict[str, _Pair] = {}  # by sender's name
        self._opening: dict[str, asyncio.Lock] = {}  # by sender's name
        self._draining: dict[str, set[asyncio.Task[None]]] = {}  # by sender's name
        self._epochs = NewestEpochs()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._expiring = self._spawn(self._keep_expiring())

    # ---- reservations ---------------------------------------------------------------------------

    async def reserve(self, request: ReserveRequest) -> Answer:
        """Grants, refuses, or waits up to `request.wait_s` in the queue and then returns NotNow."""
        reason = self._refusal(request.key)
        if reason is not None:
            return Refused(reason=reason)
        answer = await self._queue.reserve(request)
        if isinstance(answer, Reservation):
            self._on_grant()
        return answer

    def on_step(self) -> None:
        """Serves the queue, because blocks or rows may be free now. On the event loop."""
        self._queue.look_again()

    async def renew(self, request: RenewLease) -> None:
        """Extend a lease. Raises HandoffError if the reservation is gone."""
        await self._engine.call(lambda: self._incoming.renew(request.key, request.transfer_id))

    async def cancel_transfer(self, request: CancelTransfer) -> CancelReply:
        """Cancels a request that its sender gave up, in any phase."""
        self._queue.withdraw(request.key)
        outcome = await self._engine.call(lambda: self._incoming.cancel(request.key))
        self.on_step()
        logger.debug("%s: %s by its sender (%s)", request.key, outcome, request.reason)
        return CancelReply(outcome=outcome)

    def cancel(self, key: RequestKey) -> None:
        """Forgets a request that its ingress gave up, also in the scheduler if it just joined."""
        self._spawn(self._forget([key]))

    def cancel_ingress(self, ingress_id: str) -> None:
        """Forgets everything of one ingress that has not been committed."""
        self._spawn(self._forget(self._queue.keys_of(ingress_id), ingress_id))

    # ---- pieces ---------------------------------------------------------------------------------

    async def open_pair(self, request: PairRequest) -> PairReply:
        """Open this end of a channel, after the sender's older one is closed and drained."""
        name = request.sender.name
        try:
            self._check_sender(request.sender)
            superseded = self._epochs.ask(request.sender, request.epoch)
            async with self._opening.setdefault(name, asyncio.Lock()):
                self._check_sender(request.sender)  # again, because a shutdown may have begun
                if not superseded.done():
                    await self._close_pair(name)
                channel = await self._open_receive(request, superseded)
                piece_bytes = piece_bytes_of(self._config, request.channel)
                max_blocks = max(1, piece_bytes // self._block_bytes)
                pair = _Pair(sender=request.sender, channel=channel, max_blocks=max_blocks)
                self._pairs[name] = pair
                self._counts["epochs"] += 1
                if self._is_closing:
                    await self._close_pair(name)
        except EndedError:
            return PairReply(reason=f"epoch {request.epoch} is not the newest any more")
        except WorkerError as error:
            return PairReply(reason=error.message, is_unfit=isinstance(error, UnfitError))
        return PairReply(receiver=self._identity)

    async def receive_piece(self, header: PieceHeader, payload: Payload) -> PieceReply:
        """Take a piece; the reply acknowledges it. Nothing of a piece that fails is kept."""
        pair = self._pairs.get(header.sender)
        if pair is None or not pair.carries(header):
            return self._failed("epoch", f"epoch {header.epoch} is not open", is_retryable=True)
        if not pair.channel.claim(header.seq):
            return self._failed("duplicate", f"piece {header.seq} came before", is_retryable=True)
        # A task of its own, which completes even if the caller stops waiting.
        piece = asyncio.create_task(self._take(pair, header, payload))
        pair.pieces.add(piece)
        piece.add_done_callback(pair.pieces.discard)
        return await asyncio.shield(piece)

    # ---- life and observation -------------------------------------------------------------------

    async def close(self) -> None:
        """Refuses everything, lets pieces in flight end, closes channels, frees reservations."""
        self._is_closing = True
        await self._queue.close(f"{self._identity.name} is shutting down")
        for name in list(self._opening):
            async with self._opening[name]:
                await self._close_pair(name)
        self._expiring.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engine.call(self._cancel_all)

    def statistics(self) -> ReceiverStatistics:
        return ReceiverStatistics(
            num_waiting=len(self._queue),
            num_channels=len(self._pairs),
            num_pieces_under_way=sum(len(pair.pieces) for pair in self._pairs.values()),
            num_pieces=self._counts["pieces"],
            num_bytes=self._counts["bytes"],
            num_epochs=self._counts["epochs"],
            failures=dict(self._failures),
        )

    # ---- parts of a piece -----------------------------------------------------------------------

    async def _take(self, pair: _Pair, header: PieceHeader, payload: Payload) -> PieceReply:
        """Receives a piece if it may be written, verifies it, writes it and ends it."""
        if not 0 <= header.num_blocks <= pair.max_blocks:
            self._break(pair)
            return self._failed("size", f"a piece of {header.num_blocks} blocks", is_retryable=True)
        num_bytes = header.num_blocks * self._block_bytes
        leave: BlockWrite | PieceReply | None = None
        try:
            leave = self._begin(header)
            into = leave.block_ids if isinstance(leave, BlockWrite) else None
            data = await pair.channel.receive(header.seq, num_bytes, payload, into)
        except BaseException as error:
            self._break(pair)
            if isinstance(leave, BlockWrite):
                await self._engine.call(partial(self._end, header, leave, is_verified=False))
                self.on_step()  # it may have been the last write of an orphan
            if not isinstance(error, WorkerError):
                raise
            return self._failed("channel", error.message, is_retryable=True)
        try:
            if isinstance(leave, PieceReply):
                self._failures["reservation"] += leave.outcome == "failed"
                return leave
            return await self._write(pair, header, leave, data)
        finally:
            if isinstance(data, ArrivedBlocks):
                data.discard()

    async def _write(
        self, pair: _Pair, header: PieceHeader, leave: BlockWrite, data: IncomingData
    ) -> PieceReply:
        is_verified = False
        failure: HandoffError | None = None
        piece: StagedPiece[IncomingData] = StagedPiece(data=data, digests=header.digests)
        try:
            if leave.block_ids:
                is_verified = await self._store.write(leave.block_ids, piece)
            else:
                is_verified = not piece.digests
        except HandoffError as error:  # of this piece alone: others came in the same call
            failure = error
        finally:
            reply = await self._engine.call(
                partial(self._end, header, leave, is_verified=is_verified)
            )
        if reply.outcome == "failed":
            self.on_step()  # it may have been the last write of an orphan
        if failure is not None:
            self._break(pair)
            return self._failed("channel", failure.message, is_retryable=reply.is_retryable)
        if not is_verified:
            logger.error("%s: a piece from %s has wrong digests", header.key, header.sender)
            self._failures["digest"] += 1
            self._break(pair)
        elif reply.outcome == "failed":
            self._failures["reservation"] += 1
        else:
            self._counts["pieces"] += 1
            self._counts["bytes"] += data.nbytes
        return reply

    def _begin(self, header: PieceHeader) -> BlockWrite | PieceReply:
        """Begins the write of a piece; returns the reply instead if the piece ends here."""
        try:
            return self._incoming.begin_write(header)
        except HandoffError as error:
            if self._incoming.is_committed(header.key):
                return PieceReply(outcome="committed")  # sent again because the answer was lost
            is_live = self._incoming.is_live(header.key)
            return PieceReply(outcome="failed", reason=error.message, is_retryable=is_live)

    def _end(self, header: PieceHeader, leave: BlockWrite, *, is_verified: bool) -> PieceReply:
        """Ends the write of a piece and commits if it was the last; runs on the engine thread."""
        if not self._incoming.end_write(header.key, leave, is_verified=is_verified):
            return PieceReply(outcome="failed", reason="the reservation ended")
        if not is_verified:
            return PieceReply(outcome="failed", reason="wrong bytes", is_retryable=True)
        if header.first_token_id is None:
            return PieceReply(outcome="accepted")
        try:
            self._incoming.commit(header)
        except HandoffError as error:
            return PieceReply(outcome="failed", reason=error.message, is_retryable=True)
        return PieceReply(outcome="committed")

    def _failed(self, kind: str, reason: str, *, is_retryable: bool) -> PieceReply:
        self._failures[kind] += 1
        return PieceReply(outcome="failed", reason=reason, is_retryable=is_retryable)

    # ---- parts of a channel's life --------------------------------------------------------------

    def _check_sender(self, sender: WorkerIdentity) -> None:
        mine = self._identity
        if self._is_closing:
            raise HandoffError(f"{mine.name} is shutting down")
        if sender.model != mine.model or sender.layout != mine.layout:
            raise HandoffError(
                f"{mine.name} holds another model or another KV layout than {sender.name}"
            )

    async def _open_receive(
        self, request: PairRequest, superseded: asyncio.Future[None]
    ) -> ReceiveChannel:
        """Raises EndedError if a newer epoch is asked for meanwhile, or WorkerError."""
        if superseded.done():
            raise EndedError
        opening = asyncio.ensure_future(self._channels.open_receive(request))
        try:
            return await unless_ended(opening, superseded)
        except (EndedError, asyncio.CancelledError):
            self._spawn(close_when_open(opening))
            raise

    async def _close_pair(self, sender: str) -> None:
        """Close the channel from `sender`; on return no write of its pieces can land any more."""
        pair = self._pairs.get(sender)
        if pair is not None:
            self._break(pair)
        await asyncio.gather(*self._draining.get(sender, ()))

    def _break(self, pair: _Pair) -> None:
        """Gives up a channel and closes it in a task of its own."""
        name = pair.sender.name
        if self._pairs.get(name) is not pair:
            return
        del self._pairs[name]
        draining = self._draining.setdefault(name, set())
        task = self._spawn(_drain(pair))
        draining.add(task)
        task.add_done_callback(draining.discard)

    # ---- parts of a reservation's life ----------------------------------------------------------

    async def _forget(self, keys: list[RequestKey], ingress_id: str | None = None) -> None:
        for key in keys:
            self._queue.withdraw(key)
        await self._engine.call(partial(self._abort, keys, ingress_id))
        self.on_step()

    def _abort(self, keys: list[RequestKey], ingress_id: str | None) -> None:
        """Aborts reservations and their requests; runs on the engine thread."""
        reserved = [] if ingress_id is None else self._incoming.keys_of(ingress_id)
        for key in (*keys, *reserved):
            self._incoming.abort(key)

    def _cancel_all(self) -> None:
        for key in self._incoming.live_keys():
            self._incoming.cancel(key)

    async def _keep_expiring(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / CHECKS_PER_LEASE)
            expired = await self._engine.call(self._incoming.expire)
            if expired:
                logger.warning("leases of %s ended: their senders are silent", expired)
                self.on_step()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s: %r", self._identity.name, task.exception())


async def _drain(pair: _Pair) -> None:
    """Close a channel and wait for its pieces: afterwards none of their writes can land."""
    await pair.channel.close()
    await asyncio.gather(*pair.pieces, return_exceptions=True)

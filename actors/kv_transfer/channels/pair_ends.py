"""The two ends of a pair: pieces in one order over a connection without tags.

A piece's header goes by a call, its bytes over the connection. Headers may overtake each other,
bytes may not, so each end counts. Knows no kind of connection, nor what a piece is staged in.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from actors.kv_transfer.contracts import Deliver, IncomingData, OutgoingData, Payload
from actors.kv_transfer.waits import acknowledged, to_the_end
from engine.errors import HandoffError, WorkerError
from engine.messages import ChannelKind, PieceReply

Staged = TypeVar("Staged", bound=IncomingData)

ANSWERED_S = 0.5  # by then the bytes of an answered piece have left


class PairConnection(Protocol[Staged]):
    """One end of a connected pair."""

    @property
    def kind(self) -> ChannelKind: ...

    @property
    def epoch(self) -> int: ...

    @property
    def deadline_s(self) -> float: ...

    @property
    def is_open(self) -> bool: ...

    async def load(self, data: OutgoingData) -> Staged:
        """Returns the piece, or memory for it, to send from. Raises HandoffError without any."""
        ...

    async def room(self, num_bytes: int, into: Sequence[int] | None) -> Staged:
        """Reserves memory to receive a piece. Raises HandoffError if none is free in time.

        into: the blocks it is for, see `ReceiveChannel.receive`.
        """
        ...

    def release(self, staged: Staged) -> None:
        """Frees what `load` or `room` returned; idempotent."""
        ...

    def start_send(self, staged: Staged) -> "asyncio.Future[None]":
        """Queues a send; done when `staged` may be overwritten. Its failure breaks the connection.

        Operations run in the order in which they are queued. Raises HandoffError, here or from the
        future, when the connection is closed or breaks; the same is true of all three.
        """
        ...

    def start_receive(self, staged: Staged) -> "asyncio.Future[None]":
        """Queues a receive; done when the bytes are in `staged`, or also in its blocks."""
        ...

    def start_nothing(self) -> "asyncio.Future[None]":
        """Queues a piece without bytes, to keep the order."""
        ...

    async def close(self) -> None: ...


class PairSender(Generic[Staged]):
    """The sending end: a piece's header is sent while the bytes of earlier pieces still move."""

    def __init__(self, connection: PairConnection[Staged]) -> None:
        self._connection = connection
        self._next_seq = 0
        self._newest: asyncio.Future[None] | None = None  # the newest queued send

    @property
    def kind(self) -> ChannelKind:
        return self._connection.kind

    @property
    def epoch(self) -> int:
        return self._connection.epoch

    async def send(self, data: OutgoingData | None, deliver: Deliver) -> PieceReply:
        # Staging is acquired before the header goes, so a receiver's is held only for a piece that
        # can move.
        staged = None if data is None else await self._connection.load(data)
        try:
            reply = await self._send(staged, deliver)
        finally:
            if staged is not None:
                self._connection.release(staged)
        return await acknowledged(reply, self._connection.deadline_s)

    async def _send(self, staged: Staged | None, deliver: Deliver) -> "asyncio.Future[PieceReply]":
        """Numbers the piece and queues its bytes at once, so that both have the same order."""
        connection = self._connection
        if not connection.is_open:
            raise HandoffError(f"the channel of epoch {self.epoch} is closed")
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        # The receiver posts its receive when it has the header, so both must run at the same time.
        reply = asyncio.ensure_future(deliver(seq, []))
        try:
            if staged is not None:
                sending = connection.start_send(staged)
                before, self._newest = self._newest, sending
                await self._until_sent(sending, before, reply)
        except WorkerError as failure:
            raise _reason(reply, failure) from None
        except BaseException:
            reply.cancel()
            raise
        return reply

    async def _until_sent(
        self,
        sending: "asyncio.Future[None]",
        before: "asyncio.Future[None] | None",
        reply: "asyncio.Future[PieceReply]",
    ) -> None:
        """Waits for the send, unless the receiver answers first: it is dead or refuses."""
        try:
            either: list[asyncio.Future[Any]] = [sending, reply]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if before is not None:
                await asyncio.wait([before])  # bounded by its own deadline
            await asyncio.wait([sending], timeout=ANSWERED_S)
            if not sending.done() and reply.done():
                await self._connection.close()
        finally:
            await to_the_end(asyncio.ensure_future(asyncio.wait([sending])))
        await sending

    async def close(self) -> None:
        await self._connection.close()


class PairReceiver(Generic[Staged]):
    """The receiving end."""

    def __init__(self, connection: PairConnection[Staged]) -> None:
        self._connection = connection
        self._next_seq = 0
        self._claimed: set[int] = set()  # numbers from _next_seq on
        self._early: dict[int, asyncio.Future[None]] = {}

    @property
    def epoch(self) -> int:
        return self._connection.epoch

    def claim(self, seq: int) -> bool:
        if seq < self._next_seq or seq in self._claimed:
            return False
        self._claimed.add(seq)
        return True

    async def receive(
        self,
        seq: int,
        num_bytes: int,
        payload: Payload,
        into: Sequence[int] | None = None,
    ) -> IncomingData:
        assert seq in self._claimed, f"piece {seq} of epoch {self.epoch} was not claimed"
        if payload:
            raise HandoffError("a piece of a pair came with an object reference")
        if seq > self._next_seq:
            await self._wait_for_turn(seq)
        try:
            staged = await self._connection.room(num_bytes, into)
            received = self._start(staged, num_bytes)
        except WorkerError as error:
            self._fail_early(error.message)
            raise
        self._claimed.remove(seq)
        self._next_seq += 1
        self._wake(self._next_seq)
        try:
            await to_the_end(received)
        except BaseException as error:
            self._connection.release(staged)
            if isinstance(error, WorkerError):
                self._fail_early(error.message)
            raise
        return staged

    async def close(self) -> None:
        self._fail_early("it is closing")
        await self._connection.close()

    def _start(self, staged: Staged, num_bytes: int) -> "asyncio.Future[None]":
        try:
            if num_bytes:
                return self._connection.start_receive(staged)
            return self._connection.start_nothing()
        except BaseException:
            self._connection.release(staged)
            raise

    async def _wait_for_turn(self, seq: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._early[seq] = turn
        try:
            async with asyncio.timeout(self._connection.deadline_s):
                await turn
        except TimeoutError as error:
            raise HandoffError(f"piece {self._next_seq} never came, {seq} did") from error
        finally:
            del self._early[seq]

    def _wake(self, seq: int) -> None:
        turn = self._early.get(seq)
        if turn is not None and not turn.done():
            turn.set_result(None)

    def _fail_early(self, reason: str) -> None:
        for turn in self._early.values():
            if not turn.done():
                turn.set_exception(HandoffError(f"channel of epoch {self.epoch}: {reason}"))


def _reason(reply: "asyncio.Future[PieceReply]", failure: WorkerError) -> BaseException:
    """Returns why a piece was not sent: the receiver's death rather than the broken connection."""
    if not reply.done():
        reply.cancel()
        return failure
    return (None if reply.cancelled() else reply.exception()) or failure

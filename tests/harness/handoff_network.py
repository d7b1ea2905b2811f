"""A network between two workers that fails on demand."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from actors.kv_transfer.contracts import Deliver, PieceBytes
from actors.kv_transfer.receiver import HandoffReceiver
from actors.kv_transfer.waits import bounded
from configs.schema import HandoffConfig
from engine.errors import HandoffError, WorkerError
from engine.messages import (
    CancelReply,
    CancelTransfer,
    ChannelKind,
    NotNow,
    PairReply,
    PairRequest,
    PieceHeader,
    PieceReply,
    Refused,
    RenewLease,
    Reservation,
    ReserveRequest,
    decode,
    encode,
)
from tests.engine.kv.handoff_world import LAYOUT, LEASE_S

T = TypeVar("T")

CONFIG = HandoffConfig(
    lease_s=LEASE_S,
    transfer_deadline_s=2.0,
    piece_bytes=2 * LAYOUT.block_bytes,
    reserve_timeout_s=20.0,
)


# ---- a network that fails on demand -------------------------------------------------------------


@dataclass
class Faults:
    """What goes wrong. Pieces are counted over all epochs, in the order they are sent."""

    drop: set[int] = field(default_factory=set)  # pieces whose bytes never come
    corrupt: set[int] = field(default_factory=set)  # pieces with one flipped bit
    lose_reply: set[int] = field(default_factory=set)  # pieces whose acknowledgement is lost
    duplicate: set[int] = field(default_factory=set)  # pieces whose header comes twice
    break_channel: set[int] = field(default_factory=set)  # the connection closes under them
    fail_write: set[int] = field(default_factory=set)  # writes, in their order, that a rank fails
    die_at: set[int] = field(default_factory=set)  # D dies when this piece's header comes
    refuse_kinds: set[ChannelKind] = field(default_factory=set)  # channels that do not open
    dead_senders: set[str] = field(default_factory=set)  # incarnations that D waits for in vain
    refuse_own_end: set[ChannelKind] = field(default_factory=set)  # P's end does not open, D waits
    num_pieces: int = 0
    num_writes: int = 0


class Wire:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.data: dict[int, asyncio.Future[PieceBytes]] = {}
        self.closed: asyncio.Future[None] = loop.create_future()

    def box(self, seq: int) -> asyncio.Future[PieceBytes]:
        if seq not in self.data:
            self.data[seq] = asyncio.get_running_loop().create_future()
        return self.data[seq]

    def close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class FakeChannel:
    """Both ends of a wire."""

    def __init__(self, wire: Wire, request: PairRequest, faults: Faults) -> None:
        self._wire = wire
        self._faults = faults
        self.kind = request.channel
        self.epoch = request.epoch
        self._next_seq = 0
        self._seen: set[int] = set()

    async def send(self, data: PieceBytes | None, deliver: Deliver) -> PieceReply:
        if self._wire.closed.done():
            raise HandoffError("closed")
        number, self._faults.num_pieces = self._faults.num_pieces, self._faults.num_pieces + 1
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        if data is None:
            data = np.zeros(0, dtype=np.uint8)
        if number in self._faults.corrupt and data.nbytes:
            data = data.copy()
            data[number % data.nbytes] ^= 1 << (number % 8)
        if number in self._faults.break_channel:
            self._wire.close()
        elif number not in self._faults.drop:
            self._wire.box(seq).set_result(data)
        reply = await bounded(deliver(seq, [number]), CONFIG.transfer_deadline_s)
        if number in self._faults.lose_reply:
            await asyncio.sleep(CONFIG.transfer_deadline_s)
            raise HandoffError("no acknowledgement")
        return reply

    def claim(self, seq: int) -> bool:
        is_new = seq not in self._seen
        self._seen.add(seq)
        return is_new

    async def receive(
        self,
        seq: int,
        num_bytes: int,
        payload: list[Any],
        into: Sequence[int] | None = None,
    ) -> PieceBytes:
        assert seq in self._seen
        box = self._wire.box(seq)
        await asyncio.wait(
            [box, self._wire.closed],
            timeout=CONFIG.transfer_deadline_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not box.done():
            self._wire.close()
            raise HandoffError("closed or too late")
        assert box.result().nbytes == num_bytes
        return box.result()

    async def close(self) -> None:
        self._wire.close()
        await asyncio.sleep(0)


class FakeChannels:
    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.wires: dict[str, Wire] = {}

    @property
    def num_open(self) -> int:
        return sum(not wire.closed.done() for wire in self.wires.values())

    async def _open(self, request: PairRequest) -> FakeChannel:
        await asyncio.sleep(0)
        if request.channel in self._faults.refuse_kinds:
            raise HandoffError(f"no {request.channel}")
        wire = self.wires.setdefault(request.rendezvous_key, Wire())
        return FakeChannel(wire, request, self._faults)

    async def open_send(self, request: PairRequest) -> FakeChannel:
        if request.channel in self._faults.refuse_own_end:
            raise HandoffError(f"no room for {request.channel}")
        return await self._open(request)

    async def open_receive(self, request: PairRequest) -> FakeChannel:
        is_dead = request.sender.incarnation in self._faults.dead_senders
        if is_dead or request.channel in self._faults.refuse_own_end:
            await asyncio.sleep(CONFIG.transfer_deadline_s)
            raise HandoffError("nobody came")
        return await self._open(request)


class FakePeer:
    """D's remote surface: every message is encoded and decoded, as between processes."""

    def __init__(self, receiver: HandoffReceiver, faults: Faults) -> None:
        self.receiver = receiver
        self._faults = faults
        self.is_dead = False
        self.is_hung = False
        self.num_duplicates_refused = 0

    async def _answer(self, call: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(0)
        if self.is_hung:
            await asyncio.sleep(10**6)
        if self.is_dead:
            raise WorkerError("decode-0 died")
        answer = await call()
        if self.is_dead:
            raise WorkerError("decode-0 died")
        return answer

    async def reserve(self, request: ReserveRequest) -> Reservation | NotNow | Refused:
        sent = decode(encode(request), ReserveRequest)
        return await self._answer(lambda: self.receiver.reserve(sent))

    async def open_pair(self, request: PairRequest) -> PairReply:
        sent = decode(encode(request), PairRequest)
        return await self._answer(lambda: self.receiver.open_pair(sent))

    async def receive_pieces(
        self, pieces: Sequence[tuple[PieceHeader, list[Any]]]
    ) -> list[PieceReply]:
        return list(await asyncio.gather(*(self._receive(*piece) for piece in pieces)))

    async def _receive(self, header: PieceHeader, payload: list[Any]) -> PieceReply:
        sent = decode(encode(header), PieceHeader)
        if not payload or not isinstance(payload[0], int):  # of a channel without faults
            return await self._answer(lambda: self.receiver.receive_piece(sent, payload))
        number = payload[0]
        if number in self._faults.die_at:
            self.is_dead = True
        if number in self._faults.duplicate:
            return await self._send_twice(sent)
        return await self._answer(lambda: self.receiver.receive_piece(sent, []))

    async def _send_twice(self, sent: PieceHeader) -> PieceReply:
        first = asyncio.ensure_future(self._answer(lambda: self.receiver.receive_piece(sent, [])))
        await asyncio.sleep(0)
        old = msgspec.structs.replace(sent, epoch=sent.epoch - 1)
        try:
            for again in (sent, old):
                reply = await self._answer(lambda: self.receiver.receive_piece(again, []))  # noqa: B023
                assert reply.outcome == "failed", reply
            self.num_duplicates_refused += 1
        finally:
            await asyncio.gather(first, return_exceptions=True)
        return first.result()

    async def cancel_transfer(self, request: CancelTransfer) -> CancelReply:
        sent = decode(encode(request), CancelTransfer)
        return await self._answer(lambda: self.receiver.cancel_transfer(sent))

    async def renew(self, request: RenewLease) -> None:
        sent = decode(encode(request), RenewLease)
        await self._answer(lambda: self.receiver.renew(sent))

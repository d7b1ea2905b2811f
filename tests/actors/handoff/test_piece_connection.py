"""Pieces by a connection of their own: answers find their callers, and every end is noticed."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from actors.handoff import piece_connection
from actors.handoff.piece_connection import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    SECRET_BYTES,
    PieceAddress,
    PieceAnswer,
    PieceConnection,
    PieceServer,
    connect,
)
from engine.errors import HandoffError
from engine.messages import PieceHeader, PieceReply, decode, encode
from engine.request import RequestKey

LOOPBACK = "127.0.0.1"
DEADLINE_S = 10.0  # nothing here is meant to reach it


def header(seq: int, digests: list[int] | None = None) -> PieceHeader:
    return PieceHeader(
        transfer_id="t",
        key=RequestKey("r"),
        sender="prefill-0",
        sender_incarnation="1",
        epoch=1,
        seq=seq,
        first_block=0,
        num_blocks=3,
        digests=digests or [],
    )


@dataclass
class Taker:
    """Answers each piece with its number, when it may."""

    taken: list[tuple[PieceHeader, list[Any]]] = field(default_factory=list)
    held: dict[int, asyncio.Event] = field(default_factory=dict)  # by number: answered when set
    came: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    async def take(self, header: PieceHeader, payload: list[Any]) -> PieceReply:
        self.taken.append((header, payload))
        self.came.set()
        if header.seq in self.held:
            await self.held[header.seq].wait()
        if self.error is not None:
            raise self.error
        return PieceReply(outcome="accepted", reason=str(header.seq))


@dataclass
class World:
    taker: Taker
    server: PieceServer

    async def address(self) -> PieceAddress:
        return decode(await self.server.address(), PieceAddress)

    async def connect(self) -> PieceConnection:
        return await connect(await self.server.address(), DEADLINE_S)

    async def say(self, data: bytes) -> bytes:
        """All that the server says to a stranger's `data`, until it hangs up."""
        at = await self.address()
        reader, writer = await asyncio.open_connection(at.host, at.port)
        try:
            writer.write(data)
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


def in_world(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        taker = Taker()
        world = World(taker, PieceServer(LOOPBACK, taker.take))
        async with asyncio.timeout(30):
            try:
                await scenario(world)
            finally:
                await world.server.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"

    asyncio.run(main())


async def reason_of(connection: PieceConnection, seq: int) -> str:
    [reply] = await connection.receive_pieces([(header(seq), [])])
    return reply.reason


def test_pieces_of_one_call_are_answered_in_their_order() -> None:
    async def scenario(world: World) -> None:
        connection = await world.connect()
        pieces = [(header(seq, [-(2**63), seq, 2**63 - 1]), [[seq, 7]]) for seq in range(5)]
        replies = await connection.receive_pieces(pieces)
        assert [reply.reason for reply in replies] == ["0", "1", "2", "3", "4"]
        assert world.taker.taken == pieces
        await connection.close()

    in_world(scenario)


def test_a_late_answer_holds_up_nobody_and_finds_its_caller() -> None:
    async def scenario(world: World) -> None:
        world.taker.held[0] = asyncio.Event()
        connection = await world.connect()
        first = asyncio.create_task(reason_of(connection, 0))
        assert [await reason_of(connection, seq) for seq in (1, 2)] == ["1", "2"]
        assert not first.done()
        world.taker.held[0].set()
        assert await first == "0"
        await connection.close()

    in_world(scenario)


def test_who_gives_up_takes_nobody_along_and_its_answer_goes_nowhere() -> None:
    async def scenario(world: World) -> None:
        world.taker.held = {0: asyncio.Event(), 1: asyncio.Event()}
        connection = await world.connect()
        first, second = (asyncio.create_task(reason_of(connection, seq)) for seq in (0, 1))
        await world.taker.came.wait()
        first.cancel()
        for event in world.taker.held.values():
            event.set()
        assert await second == "1"
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await reason_of(connection, 2) == "2"
        await connection.close()

    in_world(scenario)


def test_a_piece_of_very_many_blocks_fits() -> None:
    async def scenario(world: World) -> None:
        connection = await world.connect()
        digests = [2**62 + number for number in range(200_000)]
        [reply] = await connection.receive_pieces([(header(9, digests), [digests])])
        assert reply.reason == "9"
        [(taken, payload)] = world.taker.taken
        assert taken.digests == digests
        assert payload == [digests]
        await connection.close()

    in_world(scenario)


def test_calls_fail_at_once_when_the_other_end_goes_and_so_do_later_ones() -> None:
    async def scenario(world: World) -> None:
        world.taker.held[0] = asyncio.Event()
        connection = await world.connect()
        call = asyncio.create_task(reason_of(connection, 0))
        await world.taker.came.wait()
        await world.server.close()
        with pytest.raises(HandoffError, match="has ended"):
            await call
        assert not connection.is_open
        with pytest.raises(HandoffError, match="has ended"):
            await reason_of(connection, 1)
        await connection.close()

    in_world(scenario)


def test_closing_fails_the_calls_under_way() -> None:
    async def scenario(world: World) -> None:
        world.taker.held[0] = asyncio.Event()
        connection = await world.connect()
        call = asyncio.create_task(reason_of(connection, 0))
        await world.taker.came.wait()
        await connection.close()
        await connection.close()
        with pytest.raises(HandoffError, match="has ended"):
            await call

    in_world(scenario)


def test_an_unexpected_error_cuts_the_connection_instead_of_leaving_a_caller_waiting() -> None:
    async def scenario(world: World) -> None:
        connection = await world.connect()
        world.taker.error = RuntimeError("a bug")
        with pytest.raises(HandoffError, match="has ended"):
            await reason_of(connection, 0)
        world.taker.error = None
        again = await world.connect()
        assert await reason_of(again, 1) == "1"
        await again.close()
        await connection.close()

    in_world(scenario)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        bytes(SECRET_BYTES),
        bytes(SECRET_BYTES) + encode(header(0)),
    ],
)
def test_who_does_not_know_the_secret_is_not_heard(data: bytes) -> None:
    async def scenario(world: World) -> None:
        assert await world.say(data) == b""
        assert not world.taker.taken

    in_world(scenario)


def test_who_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_connection, "GREETING_S", 0.01)

    async def scenario(world: World) -> None:
        assert await world.say(b"") == b""

    in_world(scenario)


@pytest.mark.parametrize(
    "frame",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(LENGTH_BYTES, "big"),
        (3).to_bytes(LENGTH_BYTES, "big") + b"\xc1\xc1\xc1",
        (1).to_bytes(LENGTH_BYTES, "big") + b"\x07",
    ],
)
def test_what_is_no_message_cuts_the_connection(frame: bytes) -> None:
    async def scenario(world: World) -> None:
        secret = (await world.address()).secret
        assert await world.say(secret + frame) == b""
        assert not world.taker.taken

    in_world(scenario)


def test_no_connection_is_made_where_nobody_listens_or_with_another_secret() -> None:
    async def scenario(world: World) -> None:
        at = await world.address()
        with socket.socket() as unused:
            unused.bind((LOOPBACK, 0))  # and does not listen
            nobody = msgspec.structs.replace(at, port=unused.getsockname()[1])
            with pytest.raises(HandoffError, match="no connection to"):
                await connect(encode(nobody), DEADLINE_S)
        stranger = msgspec.structs.replace(at, secret=bytes(SECRET_BYTES))
        with pytest.raises(HandoffError, match="has ended"):
            await connect(encode(stranger), DEADLINE_S)
        with pytest.raises(HandoffError, match="no address"):
            await connect(b"\x07", DEADLINE_S)

    in_world(scenario)


def test_a_server_that_may_not_listen_says_so() -> None:
    async def main() -> None:
        server = PieceServer("192.0.2.1", Taker().take)  # nobody's address, by RFC 5737
        with pytest.raises(HandoffError, match="no port"):
            await server.address()
        await server.close()

    asyncio.run(main())


def test_an_answer_to_fewer_pieces_than_were_sent_is_refused() -> None:
    async def answer_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(SECRET_BYTES)
        for number in range(2):
            await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big"))
            data = encode(PieceAnswer(number=number, replies=[]))
            writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
        await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer_nothing, LOOPBACK, 0)
        port = server.sockets[0].getsockname()[1]
        address = PieceAddress(host=LOOPBACK, port=port, secret=bytes(SECRET_BYTES))
        connection = await connect(encode(address), DEADLINE_S)
        with pytest.raises(HandoffError, match="0 of 1 pieces"):
            await reason_of(connection, 0)
        await connection.close()
        server.close()
        await server.wait_closed()

    asyncio.run(main())

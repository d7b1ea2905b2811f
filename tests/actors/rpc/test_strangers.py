"""Who may call, and what becomes of those who may not."""

import asyncio
import socket

import msgspec
import pytest

from actors.rpc import server
from actors.rpc.connection import connect
from actors.rpc.frames import (
    HELLO,
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    SECRET_BYTES,
    Answer,
    Call,
    frame_of,
)
from actors.rpc.server import MAX_STRANGERS, CallServer
from engine.errors import WorkerError
from engine.messages import encode
from tests.actors.rpc.call_world import DEADLINE_S, LOOPBACK, World, in_world


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        bytes(SECRET_BYTES),
        bytes(SECRET_BYTES) + encode(Call(number=0, method="echo")),
    ],
)
def test_who_does_not_know_the_secret_is_not_heard(data: bytes) -> None:
    async def scenario(world: World) -> None:
        assert await world.say(data) == b""
        assert not world.actor.heard

    in_world(scenario)


def test_who_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GREETING_S", 0.01)

    async def scenario(world: World) -> None:
        assert await world.say(b"") == b""

    in_world(scenario)


def test_more_silent_strangers_than_there_is_room_for_are_turned_away_and_no_caller_is_lost() -> (
    None
):
    async def scenario(world: World) -> None:
        calls = await world.connect()
        at = await world.address()
        silent = [await asyncio.open_connection(at.host, at.port) for _ in range(MAX_STRANGERS)]
        assert await world.say(b"") == b"", "turned away at once: nobody waits here"
        assert await calls.call("echo", b"goes on") == b"goes on"
        for _, writer in silent:
            writer.close()
        await calls.close()

    in_world(scenario)


@pytest.mark.parametrize(
    "frame",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(LENGTH_BYTES, "big"),
        (3).to_bytes(LENGTH_BYTES, "big") + b"\xc1\xc1\xc1",
        (1).to_bytes(LENGTH_BYTES, "big") + b"\x07",
        (23).to_bytes(LENGTH_BYTES, "big") + b"\x82\xa6number\x01\xa6method\xa6\xff\xfeecho",
        (5000).to_bytes(LENGTH_BYTES, "big") + b"\x81\xa1x" + b"\x91" * 4996 + b"\xc0",
    ],
)
def test_what_is_no_message_cuts_the_connection(frame: bytes) -> None:
    async def scenario(world: World) -> None:
        secret = (await world.address()).secret
        said = await world.say(secret + frame)
        assert said in (b"", frame_of(Answer(number=HELLO)))
        assert not world.actor.heard

    in_world(scenario)


def test_no_connection_is_made_where_nobody_listens_or_with_another_secret() -> None:
    async def scenario(world: World) -> None:
        at = await world.address()
        with socket.socket() as unused:
            unused.bind((LOOPBACK, 0))  # and does not listen
            nobody = msgspec.structs.replace(at, port=unused.getsockname()[1])
            with pytest.raises(WorkerError, match="worker-0 is not reached"):
                await connect("worker-0", encode(nobody), DEADLINE_S)
        stranger = msgspec.structs.replace(at, secret=bytes(SECRET_BYTES))
        with pytest.raises(WorkerError, match="worker-0 is not reached"):
            await connect("worker-0", encode(stranger), DEADLINE_S)
        with pytest.raises(WorkerError, match="another version"):
            await connect("worker-0", b"\x07", DEADLINE_S)

    in_world(scenario)


def test_a_server_that_may_not_listen_says_so_and_logs_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Callers ask until it can, and print nothing: a start would wait without a word."""

    async def main() -> None:
        server = CallServer("192.0.2.1", {})  # nobody's address, by RFC 5737
        for _ in range(3):
            with pytest.raises(WorkerError, match="no port"):
                await server.address()
        await server.close()

    asyncio.run(main())
    (record,) = (one for one in caplog.records if one.name == "actors.rpc.server")
    assert record.levelname == "ERROR"
    assert "no port on 192.0.2.1 for calls" in record.getMessage()
    assert "handoff.address" in record.getMessage()

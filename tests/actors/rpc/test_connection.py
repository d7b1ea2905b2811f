"""Calls by a connection: answers find callers, errors arrive as themselves, ends are noticed."""

import asyncio
import logging
import socket
import struct
from contextlib import aclosing
from typing import Any

import pytest

from actors.kv_transfer.contracts import UnfitError
from actors.rpc import frames
from actors.rpc.connection import ConnectionEndedError, connect
from actors.rpc.frames import (
    HELLO,
    LENGTH_BYTES,
    SECRET_BYTES,
    Address,
    Answer,
    Failure,
    error_of,
    frame_of,
)
from engine.errors import CapacityError, EngineError, HandoffError, RequestError, WorkerError
from engine.messages import encode
from tests.actors.rpc.call_world import DEADLINE_S, LOOPBACK, World, in_world, loops, read_on

# ---- calls --------------------------------------------------------------------------------------


@loops
def test_a_late_answer_holds_up_nobody_and_finds_its_caller(new_loop: Any) -> None:
    async def scenario(world: World) -> None:
        world.actor.held[b"0"] = asyncio.Event()
        calls = await world.connect()
        first = asyncio.create_task(calls.call("echo", b"0"))
        await world.actor.came.wait()
        assert [await calls.call("echo", data) for data in (b"1", b"", b"2")] == [b"1", b"", b"2"]
        assert not first.done()
        world.actor.held[b"0"].set()
        assert await first == b"0"
        assert world.actor.heard == [b"0", b"1", b"", b"2"], "they begin in the order they came"
        await calls.close()

    in_world(scenario, new_loop)


def test_who_gives_up_takes_nobody_along_and_its_answer_goes_nowhere() -> None:
    async def scenario(world: World) -> None:
        world.actor.held = {b"0": asyncio.Event(), b"1": asyncio.Event()}
        calls = await world.connect()
        first, second = (asyncio.create_task(calls.call("echo", data)) for data in (b"0", b"1"))
        await world.actor.came.wait()
        first.cancel()
        for event in world.actor.held.values():
            event.set()
        assert await second == b"1"
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await calls.call("echo", b"2") == b"2"
        await calls.close()

    in_world(scenario)


@loops
def test_a_large_call_and_its_answer_fit(new_loop: Any) -> None:
    async def scenario(world: World) -> None:
        calls = await world.connect()
        data = bytes(range(256)) * 40_000
        assert await calls.call("echo", data) == data
        await calls.close()

    in_world(scenario, new_loop)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (
            RequestError("no", param="n", code="bad", status=422),
            RequestError("no", param="n", code="bad", status=422),
        ),
        (
            CapacityError("full", retry_after_s=2.5, status=429),
            CapacityError("full", retry_after_s=2.5, status=429),
        ),
        (HandoffError("gone"), HandoffError("gone")),
        (UnfitError("another host"), HandoffError("another host")),  # the nearest that all know
        (KeyError("a secret of ours"), WorkerError("worker-0 failed: KeyError")),
    ],
)
def test_an_error_arrives_as_itself_and_a_bug_as_a_failed_worker(
    raised: Exception, expected: EngineError
) -> None:
    async def scenario(world: World) -> None:
        calls = await world.connect()
        world.actor.error = raised
        with pytest.raises(EngineError) as called:
            await calls.call("echo", b"")
        with pytest.raises(EngineError) as streamed:
            [item async for item in calls.stream("numbers", b"2")]
        for caught in (called, streamed):
            assert type(caught.value) is type(expected)
            assert vars(caught.value) == vars(expected)
        world.actor.error = None
        assert await calls.call("echo", b"goes on") == b"goes on"
        await calls.close()

    in_world(scenario)


@pytest.mark.parametrize(
    "failure",
    [
        Failure(kind="", message="KeyError"),
        Failure(kind="NewError", message="KeyError"),
        Failure(kind="RequestError", message="no", details={"unheard_of": 1}),
    ],
)
def test_a_failure_that_this_version_does_not_know_is_a_failed_worker(failure: Failure) -> None:
    assert type(error_of("worker-0", failure)) is WorkerError


def test_a_call_whose_work_is_cancelled_is_answered() -> None:
    async def scenario(world: World) -> None:
        calls = await world.connect()
        world.actor.error = asyncio.CancelledError()  # of something that it awaited
        with pytest.raises(WorkerError, match="CancelledError"):
            await calls.call("echo", b"")
        with pytest.raises(WorkerError, match="CancelledError"):
            await read_on(calls.stream("numbers", b"1"))
        world.actor.error = None
        assert await calls.call("echo", b"goes on") == b"goes on"
        await calls.close()

    in_world(scenario)


def test_what_is_too_large_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1000)

    async def scenario(world: World) -> None:
        calls = await world.connect()
        with pytest.raises(WorkerError, match="a message of"):
            await calls.call("echo", bytes(1000))
        with pytest.raises(WorkerError, match="a message of"):
            await calls.call("echo", bytes(980))  # the call is not, its answer with a field more is
        assert await calls.call("echo", b"goes on") == b"goes on"
        await calls.close()

    in_world(scenario)


@loops
def test_a_connection_that_is_cut_fails_its_calls_though_nobody_reads_them(new_loop: Any) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say what is no message, and read no more."""
        await reader.readexactly(SECRET_BYTES)
        writer.write(frame_of(Answer(number=HELLO)))
        await reader.readexactly(1)
        writer.write((1).to_bytes(LENGTH_BYTES, "big") + b"\x07")
        writers.append(writer)

    writers: list[asyncio.StreamWriter] = []

    async def scenario(_: World) -> None:
        server = await asyncio.start_server(babble, LOOPBACK, 0, limit=1)
        port = server.sockets[0].getsockname()[1]
        address = encode(Address(host=LOOPBACK, port=port, secret=bytes(SECRET_BYTES)))
        calls = await connect("worker-0", address, DEADLINE_S)
        with pytest.raises(ConnectionEndedError):
            await calls.call("echo", bytes(24 * 2**20))
        await calls.close()
        writers[0].transport.abort()
        server.close()

    in_world(scenario, new_loop)


def test_a_call_that_is_not_there_says_so() -> None:
    async def scenario(world: World) -> None:
        calls = await world.connect()
        with pytest.raises(WorkerError, match="no call shout here"):
            await calls.call("shout", b"")
        await calls.close()

    in_world(scenario)


# ---- streams ------------------------------------------------------------------------------------


@loops
def test_streams_run_side_by_side_and_end_by_themselves(new_loop: Any) -> None:
    async def scenario(world: World) -> None:
        calls = await world.connect()

        async def read(number: int) -> list[bytes]:
            return [item async for item in calls.stream("numbers", str(number).encode())]

        read_by_each = await asyncio.gather(*map(read, (0, 1, 500)))
        assert read_by_each == [[str(i).encode() for i in range(n)] for n in (0, 1, 500)]
        assert world.actor.num_streams == 0
        await calls.close()

    in_world(scenario, new_loop)


@loops
def test_a_stream_that_is_not_wanted_any_more_ends_at_the_actor(new_loop: Any) -> None:
    async def scenario(world: World) -> None:
        calls = await world.connect()
        async with aclosing(calls.stream("numbers", b"")) as items:
            assert [await anext(items) for _ in range(3)] == [b"0", b"1", b"2"]
            assert world.actor.num_streams == 1
        await world.actor.stopped.wait()
        assert await calls.call("echo", b"goes on") == b"goes on"
        await calls.close()

    in_world(scenario, new_loop)


def test_a_stream_whose_reader_is_gone_ends_at_the_actor() -> None:
    async def scenario(world: World) -> None:
        calls = await world.connect()
        items = calls.stream("numbers", b"")
        assert await anext(items) == b"0"
        await calls.close()
        await world.actor.stopped.wait()
        with pytest.raises(ConnectionEndedError):
            await read_on(items)

    in_world(scenario)


# ---- ends ---------------------------------------------------------------------------------------


@loops
def test_everything_fails_at_once_when_the_actor_goes_and_so_do_later_calls(new_loop: Any) -> None:
    async def scenario(world: World) -> None:
        world.actor.held[b"0"] = asyncio.Event()
        calls = await world.connect()
        under_way = [asyncio.create_task(calls.call("echo", b"0"))]
        items = calls.stream("numbers", b"1")
        assert await anext(items) == b"0"
        assert [item async for item in items] == []
        endless = calls.stream("numbers", b"")
        await anext(endless)
        await world.actor.came.wait()
        await world.server.close()
        for call in under_way:
            with pytest.raises(ConnectionEndedError, match="worker-0 died"):
                await call
        with pytest.raises(ConnectionEndedError):
            await read_on(endless)
        assert not calls.is_open
        for _ in range(3):
            with pytest.raises(ConnectionEndedError):
                await calls.call("echo", b"1")
        await calls.close()

    in_world(scenario, new_loop)


@loops
def test_a_reset_under_a_flood_of_calls_is_an_end_like_any_other(new_loop: Any) -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Die with what was sent unread."""
        await reader.readexactly(SECRET_BYTES)
        writer.write(frame_of(Answer(number=HELLO)))
        await reader.readexactly(1)
        writer.transport.abort()

    async def scenario(_: World) -> None:
        server = await asyncio.start_server(reset, LOOPBACK, 0)
        port = server.sockets[0].getsockname()[1]
        address = encode(Address(host=LOOPBACK, port=port, secret=bytes(SECRET_BYTES)))
        calls = await connect("worker-0", address, DEADLINE_S)
        assert calls.is_open, "there is nothing to reset"
        while calls.is_open:
            with pytest.raises(ConnectionEndedError):
                await calls.call("echo", bytes(100_000))
        await calls.close()
        server.close()

    in_world(scenario, new_loop)


@loops
@pytest.mark.parametrize(("answers", "num_lines"), [(True, 1), (False, 0)], ids=["hello", "none"])
def test_the_end_of_a_connection_is_logged_once_and_of_one_that_never_was_not_at_all(
    answers: bool, num_lines: int, new_loop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(SECRET_BYTES)
        if answers:
            writer.write(frame_of(Answer(number=HELLO)))
            await reader.readexactly(1)
        linger = struct.pack("ii", 1, 0)  # closing resets
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async def scenario(_: World) -> None:
        server = await asyncio.start_server(reset, LOOPBACK, 0)
        port = server.sockets[0].getsockname()[1]
        address = encode(Address(host=LOOPBACK, port=port, secret=bytes(SECRET_BYTES)))

        async def use() -> None:
            calls = await connect("worker-0", address, DEADLINE_S)
            endless = [calls.stream("numbers", b"") for _ in range(3)]
            await asyncio.gather(calls.call("echo", b"0"), *map(read_on, endless))

        with pytest.raises(ConnectionEndedError):
            await use()
        server.close()

    with caplog.at_level(logging.INFO, "actors.rpc.connection"):
        in_world(scenario, new_loop)
    lines = [line for line in caplog.messages if "the connection to worker-0 has ended" in line]
    assert len(lines) == num_lines, caplog.messages


def test_closing_fails_the_calls_under_way() -> None:
    async def scenario(world: World) -> None:
        world.actor.held[b"0"] = asyncio.Event()
        calls = await world.connect()
        call = asyncio.create_task(calls.call("echo", b"0"))
        await world.actor.came.wait()
        await calls.close()
        await calls.close()
        with pytest.raises(ConnectionEndedError):
            await call
        world.actor.held[b"0"].set()

    in_world(scenario)

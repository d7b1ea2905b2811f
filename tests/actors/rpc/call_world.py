"""An actor that takes calls, in one process with its callers, on either kind of event loop."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from actors.rpc.connection import CallConnection, connect
from actors.rpc.frames import (
    Address,
)
from actors.rpc.server import CallServer
from engine.messages import decode

LOOPBACK = "127.0.0.1"
DEADLINE_S = 10.0  # nothing here is meant to reach it

Scenario = Callable[["World"], Awaitable[None]]


@dataclass
class Actor:
    """Answers "echo" with what it is told, when it may; counts in "numbers"."""

    heard: list[bytes] = field(default_factory=list)
    held: dict[bytes, asyncio.Event] = field(default_factory=dict)  # answered when set
    came: asyncio.Event = field(default_factory=asyncio.Event)
    error: BaseException | None = None
    num_streams: int = 0  # that run
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def echo(self, data: bytes) -> bytes:
        self.heard.append(data)
        self.came.set()
        if data in self.held:
            await self.held[data].wait()
        if self.error is not None:
            raise self.error
        return data

    async def numbers(self, data: bytes) -> AsyncGenerator[bytes, None]:
        """As many as it is told, then an error if there is one; without a number, for ever."""
        self.num_streams += 1
        try:
            number = 0
            while not data or number < int(data):
                yield str(number).encode()
                number += 1
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        finally:
            self.num_streams -= 1
            self.stopped.set()


@dataclass
class World:
    actor: Actor
    server: CallServer

    async def address(self) -> Address:
        return decode(await self.server.address(), Address)

    async def connect(self) -> CallConnection:
        return await connect("worker-0", await self.server.address(), DEADLINE_S)

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


LOOPS: list[Any] = [asyncio.new_event_loop, uvloop.new_event_loop]
loops = pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])  # Ray takes either


def in_world(scenario: Scenario, new_loop: Any = asyncio.new_event_loop) -> None:
    """Run a scenario; fails if it leaves a task or an error that nobody took."""
    problems: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(str(context)))
        actor = Actor()
        server = CallServer(LOOPBACK, {"echo": actor.echo}, {"numbers": actor.numbers})
        async with asyncio.timeout(30):
            try:
                await scenario(World(actor, server))
            finally:
                await server.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert not problems, problems


async def read_on(items: AsyncGenerator[bytes, None]) -> None:
    async for _ in items:
        pass

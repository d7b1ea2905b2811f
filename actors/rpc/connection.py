"""Calls another actor by a TCP connection to its `CallServer`.

A connection that ends fails all calls on it at once; it is unknown then which of them ran, as with
a Ray call whose actor dies. Has no task of its own: answers are read as they come.
"""

import asyncio
import logging
from itertools import count
from typing import cast

import msgspec

from actors.rpc.frames import (
    HELLO,
    STOP,
    Address,
    Answer,
    Call,
    decoded,
    error_of,
    frame_of,
    probe,
    take_frame,
)
from actors.rpc.tls import client_tls
from configs.errors import ConfigFileError
from engine.errors import EngineError, WorkerError
from engine.messages import decode

logger = logging.getLogger(__name__)


class ConnectionEndedError(WorkerError):
    """The connection ended during a call, which may have run or not, or could not be made."""


class CallConnection(asyncio.Protocol):
    """Calls of one actor, as many at a time as there are callers; made by `connect`."""

    def __init__(self, name: str) -> None:
        """name: of the actor, for messages."""
        loop = asyncio.get_running_loop()
        self._name = name
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()  # received bytes that are not a whole frame yet
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._streams: dict[int, asyncio.Queue[Answer | None]] = {}  # None = the connection ended
        self._hello: asyncio.Future[Answer] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def say_hello(self, secret: bytes) -> None:
        """Sends the secret and waits for HELLO. Raises ConnectionEndedError if it was wrong."""
        assert self._transport is not None, "`connect` makes connections"
        probe(self._transport)
        self._transport.write(secret)
        await asyncio.wait((self._hello, self._lost), return_when=asyncio.FIRST_COMPLETED)
        if not self._hello.done():
            raise self._ended()

    async def call(self, method: str, data: bytes) -> bytes:
        """Returns the answer. Raises the call's EngineError, or ConnectionEndedError."""
        return await self.begin(method, data)

    def begin(self, method: str, data: bytes) -> asyncio.Future[bytes]:
        """Makes the call at once; returns what becomes its answer, or the error of `call`.

        Raises ConnectionEndedError, or WorkerError for what is too large.
        """
        number = next(self._numbers)
        self._send(Call(number=number, method=method, data=data))
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = waiting
        return waiting

    def stream(self, method: str, data: bytes) -> "CallStream":
        """Returns the stream of what the call yields; close it. Raises ConnectionEndedError."""
        return CallStream(self, Call(number=next(self._numbers), method=method, data=data))

    def open_stream(self, call: Call) -> asyncio.Queue[Answer | None]:
        """Make a call whose answers come through the queue; None = the connection ended."""
        self._send(call)
        self._streams[call.number] = asyncio.Queue()
        return self._streams[call.number]

    def close_stream(self, number: int) -> None:
        """Stop a call that may still yield; idempotent."""
        if self._streams.pop(number, None) is not None and self.is_open:
            self._send(Call(number=number, method=STOP))

    def failure(self, answer: Answer | None) -> WorkerError | EngineError | None:
        """The error that an answer stands for, if it is one."""
        if answer is None:
            return self._ended()
        return None if answer.failure is None else error_of(self._name, answer.failure)

    async def close(self) -> None:
        """End the connection; calls under way fail."""
        self.abandon()
        await asyncio.wait((self._lost,))

    def abandon(self) -> None:
        """The same, without waiting for it; on the event loop."""
        if self._transport is not None:
            self._transport.abort()  # do not wait for data that the other end may not read

    # ---- from the event loop --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # of TCP; uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while (frame := take_frame(self._received)) is not None:
                self._dispatch(decoded(frame, Answer))
        except WorkerError as error:
            logger.warning("the connection to %s is cut: %s", self._name, error)
            self.abandon()

    def connection_lost(self, exc: Exception | None) -> None:
        # Without an error one end closed it. Before HELLO there was no connection yet: a worker
        # that loads refuses again and again, and `connect` raises that.
        level = logging.INFO if exc is not None and self._hello.done() else logging.DEBUG
        logger.log(level, "the connection to %s has ended: %s", self._name, exc)
        self._lost.set_result(None)
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(self._ended())
        for items in self._streams.values():
            items.put_nowait(None)

    # ---- parts ----------------------------------------------------------------------------------

    def _send(self, call: Call) -> None:
        if self._transport is None or not self.is_open:
            raise self._ended()
        self._transport.write(frame_of(call))

    def _dispatch(self, answer: Answer) -> None:
        if answer.number in self._streams:
            self._streams[answer.number].put_nowait(answer)
            return
        if answer.number == HELLO:
            if not self._hello.done():
                self._hello.set_result(answer)
            return
        waiting = self._answers.pop(answer.number, None)
        if waiting is None or waiting.done():  # the caller has gone
            return
        if answer.failure is not None:
            waiting.set_exception(error_of(self._name, answer.failure))
        elif answer.data is not None:
            waiting.set_result(answer.data)
        else:
            waiting.set_exception(WorkerError(f"{self._name} runs another version: no stream"))

    def _ended(self) -> ConnectionEndedError:
        return ConnectionEndedError(f"{self._name} died or is restarting, or cannot be reached")


class CallStream:
    """The items that one call yields, in order."""

    def __init__(self, connection: CallConnection, call: Call) -> None:
        self._connection = connection
        self._number = call.number
        self._items = connection.open_stream(call)

    def __aiter__(self) -> "CallStream":
        return self

    async def __anext__(self) -> bytes:
        """Raises the EngineError that the call raised, or ConnectionEndedError."""
        answer = await self._items.get()
        if answer is not None and answer.data is not None:
            return answer.data
        await self.aclose()
        raise self._connection.failure(answer) or StopAsyncIteration

    async def aclose(self) -> None:
        """Stops the call. Idempotent."""
        self._connection.close_stream(self._number)


async def connect(name: str, address: bytes, seconds: float) -> CallConnection:
    """Connects to an actor's `CallServer`. Raises ConnectionEndedError or WorkerError."""
    try:
        at = decode(address, Address)
    except msgspec.DecodeError as error:
        raise WorkerError(f"{name} runs another version: {error}") from error
    loop, made = asyncio.get_running_loop(), CallConnection(name)
    try:
        async with asyncio.timeout(seconds):
            await loop.create_connection(lambda: made, at.host, at.port, ssl=client_tls())
            await made.say_hello(at.secret)
    except (TimeoutError, OSError, ConfigFileError, ConnectionEndedError) as error:
        made.abandon()
        where = f"{at.host}:{at.port}"
        raise ConnectionEndedError(f"{name} is not reached at {where}: {error!r}") from error
    except BaseException:
        made.abandon()
        raise
    return made

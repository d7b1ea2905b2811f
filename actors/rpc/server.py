"""Takes an actor's calls by TCP connections beside Ray's: 0.1 ms there and back, not 1.3.

The actor tells its address and the secret by a Ray call, so only processes that may call it may
connect. Knows no messages but its own: called functions take and return bytes.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

from ray.util import get_node_ip_address

from actors.rpc.frames import (
    HELLO,
    LENGTH_BYTES,
    SECRET_BYTES,
    STOP,
    Address,
    Answer,
    Call,
    decoded,
    failure_of,
    frame_of,
    num_bytes_of,
    probe,
)
from actors.rpc.tls import server_tls
from configs.errors import ConfigFileError
from configs.schema import AppConfig
from engine.errors import WorkerError
from engine.messages import encode

logger = logging.getLogger(__name__)

GREETING_S = 5.0
MAX_STRANGERS = 64  # connections that have not sent the secret yet

Handler = Callable[[bytes], Awaitable[bytes]]
Streamer = Callable[[bytes], AsyncGenerator[bytes, None]]


def listen_address(config: AppConfig) -> str:
    """Returns the configured address, or this node's in its Ray cluster."""
    return config.handoff.address or str(get_node_ip_address())  # type: ignore[no-untyped-call]


class CallServer:
    """Takes calls of processes that know the secret, concurrently."""

    def __init__(
        self, host: str, calls: Mapping[str, Handler], streams: Mapping[str, Streamer] | None = None
    ) -> None:
        """host: the address to listen on. Called functions may raise EngineError."""
        self._host = host
        self._calls = calls
        self._streams = streams or {}
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._starting = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # one a connection, one a call
        self._num_strangers = 0
        self._is_told = False  # why nothing can listen
        self._is_closed = False

    async def address(self) -> bytes:
        """Returns the encoded Address; starts to listen at the first call. Raises WorkerError."""
        async with self._starting:
            if self._server is None:
                try:
                    tls = server_tls()
                    self._server = await asyncio.start_server(
                        self._accept,
                        self._host,
                        0,
                        ssl=tls,
                        ssl_handshake_timeout=GREETING_S if tls else None,
                    )
                except (OSError, ConfigFileError) as error:
                    raise WorkerError(self._why_not(error)) from error
        host, port = self._server.sockets[0].getsockname()[:2]
        return encode(Address(host=host, port=port, secret=self._secret))

    def _why_not(self, error: Exception) -> str:
        """Returns why nothing can listen; logs it once, as callers ask on and print nothing."""
        why = f"no port on {self._host} for calls: {error}"
        if not self._is_told:
            self._is_told = True
            logger.error("%s; handoff.address has to be one of this machine's, or left out", why)
        return why

    async def close(self) -> None:
        """Stops listening and ends all connections; unfinished answers are not sent."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closed or self._num_strangers >= MAX_STRANGERS:
            writer.close()
        else:
            self._num_strangers += 1
            self._spawn(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until its other end closes it."""
        caller = writer.get_extra_info("peername")
        streams: dict[int, asyncio.Task[None]] = {}
        try:
            await self._greet(reader, writer)
            while True:
                num_bytes = num_bytes_of(await reader.readexactly(LENGTH_BYTES))
                call = decoded(await reader.readexactly(num_bytes), Call)
                if call.method == STOP:
                    if call.number in streams:
                        streams.pop(call.number).cancel()
                elif call.method in self._streams:
                    streams[call.number] = self._spawn(self._stream(writer, call))
                else:
                    self._spawn(self._answer(writer, call))
        except (asyncio.IncompleteReadError, ConnectionError):
            logger.debug("the connection from %s has ended", caller)
        except (TimeoutError, OSError, WorkerError) as error:
            logger.warning("the connection from %s is cut: %s", caller, error or "it is silent")
        finally:
            writer.close()
            for stream in streams.values():
                stream.cancel()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Checks a caller's secret. Raises WorkerError if it is wrong, TimeoutError without one."""
        try:
            probe(writer.transport)
            async with asyncio.timeout(GREETING_S):
                secret = await reader.readexactly(SECRET_BYTES)
        finally:
            self._num_strangers -= 1
        if not hmac.compare_digest(secret, self._secret):
            raise WorkerError("it does not know the secret")
        self._tell(writer, Answer(number=HELLO))

    async def _answer(self, writer: asyncio.StreamWriter, call: Call) -> None:
        """Runs a call to its end, even if its caller has gone."""
        try:
            handler = self._calls.get(call.method)
            if handler is None:
                raise WorkerError(f"there is no call {call.method} here: it runs another version")
            self._tell(writer, Answer(number=call.number, data=await handler(call.data)))
        except BaseException as error:
            self._fail(writer, call, error)
            if not isinstance(error, Exception):
                raise  # the called function, or this task, was cancelled

    async def _stream(self, writer: asyncio.StreamWriter, call: Call) -> None:
        try:
            async with aclosing(self._streams[call.method](call.data)) as items:
                async for data in items:
                    self._tell(writer, Answer(number=call.number, data=data))
                    await writer.drain()  # a slow reader must not fill this process's memory
            self._tell(writer, Answer(number=call.number))
        except ConnectionError:
            return
        except BaseException as error:
            self._fail(writer, call, error)
            if not isinstance(error, Exception):
                raise  # as above, or the caller has stopped it

    def _fail(self, writer: asyncio.StreamWriter, call: Call, error: BaseException) -> None:
        if isinstance(error, Exception) or not self._is_closed:  # else the connection ends, too
            self._tell(writer, Answer(number=call.number, failure=failure_of(call.method, error)))

    def _tell(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        if not writer.is_closing():  # to a closed one uvloop raises, and asyncio does nothing
            writer.write(frame_of(answer))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

"""A client that takes little time of its own: streamed answers, and when each piece came.

Reads no JSON: what the pieces say is looked at when time no longer matters. Connections are kept
and used again. Knows nothing of the server.
"""

import asyncio
import time
from dataclasses import dataclass, field
from http import HTTPStatus

import httptools

from load_tests.http_load.client import RefusedError, Server, refusal_of

Piece = tuple[float, bytes]  # when it was read, by time.perf_counter(); of the body


@dataclass(slots=True, eq=False)
class _Connection(asyncio.Protocol):
    """One connection, one answer at a time. Its parser calls the functions without arguments."""

    transport: asyncio.Transport | None = None
    pieces: list[Piece] = field(default_factory=list)
    retry_after: str = ""  # of the answer; "" = it says nothing of it
    is_kept: bool = False  # by the server, behind the answer
    ended: asyncio.Future[None] | None = None
    parser: httptools.HttpResponseParser = field(init=False)

    def __post_init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), f"{transport!r}"
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.connection_lost(ConnectionError(f"no HTTP: {error}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self.retry_after = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def on_message_complete(self) -> None:
        self.is_kept = self.parser.should_keep_alive()  # it forgets what the headers said
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_exception(exc or ConnectionResetError("the server hung up"))


class StreamClient:
    """Asks one server, over as many connections as there are requests at once."""

    def __init__(self, server: Server) -> None:
        """Raises UnreachableError for something that is no URL."""
        place = server.connection()
        self._host, self._port = place.host, place.port
        self._server = server
        self._idle: list[_Connection] = []

    def request(self, path: str, body: bytes) -> bytes:
        """Returns what `post` sends, which may be made ahead of its time."""
        headers = self._server.headers | {"Host": self._host, "Content-Length": str(len(body))}
        lines = [f"POST {self._server.path(path)} HTTP/1.1", *map(": ".join, headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def post(self, request: bytes) -> list[Piece]:
        """Returns the pieces of the answer to a `request`.

        Raises RefusedError, or OSError when there is no connection or it ends before the answer.
        """
        connection = self._kept() or await self._connect()
        assert connection.transport is not None, "it is connected"
        connection.pieces, connection.retry_after = [], ""
        connection.ended = asyncio.get_running_loop().create_future()
        connection.transport.write(request)
        try:
            await connection.ended
        except BaseException:
            connection.transport.abort()
            raise
        status = connection.parser.get_status_code()
        if connection.is_kept:
            self._idle.append(connection)
        else:
            connection.transport.abort()
        if status != HTTPStatus.OK:
            raise _refusal(status, connection)
        return connection.pieces

    def close(self) -> None:
        """Ends the connections that are idle."""
        for connection in self._idle:
            assert connection.transport is not None, "it is connected"
            connection.transport.abort()
        self._idle.clear()

    def _kept(self) -> _Connection | None:
        """One that is idle, and that the server has not closed since."""
        while self._idle:
            connection = self._idle.pop()
            assert connection.transport is not None, "it was connected"
            if not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(_Connection, self._host, self._port))[1]


def _refusal(status: int, connection: _Connection) -> RefusedError:
    body = b"".join(piece for _, piece in connection.pieces)
    return refusal_of(status, body, connection.retry_after, reason=HTTPStatus(status).phrase)

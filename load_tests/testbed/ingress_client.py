"""A client that costs little: completions over keep-alive connections, read as raw bytes.

Parses no JSON while it measures: an answer is over when its last HTTP chunk is, and its tokens are
its events. Knows nothing of the server.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

EVENT = b"data: {"
LAST_CHUNK = b"\r\n0\r\n\r\n"
HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer as it came over the wire."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes  # without the marks of HTTP chunks
    first_event_s: float | None  # from the request's first byte; None = there was no event
    took_s: float

    @property
    def num_events(self) -> int:
        return self.body.count(EVENT)

    @property
    def token_ids(self) -> list[int]:
        """Of the stream's first choice, if the request asked for `return_token_ids`."""
        events = [line[6:] for line in self.body.split(b"\n") if line.startswith(EVENT)]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return [token_id for choice in choices for token_id in choice["token_ids"]]

    @property
    def is_complete(self) -> bool:
        """A stream that ended as it should."""
        return self.status == 200 and b"data: [DONE]" in self.body


@dataclass(slots=True)
class _Connection(asyncio.Protocol):
    """One connection, one answer at a time."""

    transport: asyncio.Transport | None = None
    received: bytearray = field(default_factory=bytearray)
    started_s: float = 0.0
    first_event_s: float | None = None
    ended: asyncio.Future[float] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), f"{transport!r}"
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        received = self.received
        received += data
        if self.first_event_s is None and EVENT in received:
            self.first_event_s = time.perf_counter() - self.started_s
        if self.ended is not None and not self.ended.done() and _is_whole(received):
            self.ended.set_result(time.perf_counter() - self.started_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_exception(exc or ConnectionResetError("the server hung up"))


def _is_whole(received: bytearray) -> bool:
    if received.endswith(LAST_CHUNK):
        return True
    end = received.find(HEAD_END)
    if end < 0:
        return False
    length = _headers(bytes(received[:end])).get("content-length")
    return length is not None and len(received) - end - len(HEAD_END) >= int(length)


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {
        name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
    }


def _without_chunks(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        num_bytes = int(size, 16)
        parts.append(rest[:num_bytes])
        body = rest[num_bytes + 2 :]
    return b"".join(parts)


class Client:
    """A connection to a server, opened at the first request and kept."""

    def __init__(self, host: str, port: int, prefix: str = "") -> None:
        """`prefix` comes before `/v1/completions`."""
        self._host, self._port, self._prefix = host, port, prefix
        self._connection: _Connection | None = None

    async def complete(self, body: Mapping[str, object]) -> Reply:
        """POST a completion. Raises OSError when the server hangs up before the answer's end."""
        loop = asyncio.get_running_loop()
        if self._connection is None:
            _, self._connection = await loop.create_connection(_Connection, self._host, self._port)
        connection = self._connection
        assert connection.transport is not None, "it is connected"
        connection.received.clear()
        connection.first_event_s = None
        connection.ended = loop.create_future()
        connection.started_s = time.perf_counter()
        connection.transport.write(self._request(body))
        try:
            took_s = await connection.ended
        except BaseException:
            self.close()
            raise
        reply = _reply(bytes(connection.received), connection.first_event_s, took_s)
        if reply.headers.get("connection") == "close":
            self.close()
        return reply

    def _request(self, body: Mapping[str, object]) -> bytes:
        data = json.dumps(body).encode()
        head = (
            f"POST {self._prefix}/v1/completions HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    def close(self) -> None:
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.abort()
        self._connection = None


def _reply(received: bytes, first_event_s: float | None, took_s: float) -> Reply:
    head, _, body = received.partition(HEAD_END)
    headers = _headers(head)
    is_chunked = headers.get("transfer-encoding") == "chunked"
    return Reply(
        status=int(head.split(b" ", 2)[1]),
        headers=headers,
        body=_without_chunks(body) if is_chunked else body,
        first_event_s=first_event_s,
        took_s=took_s,
    )

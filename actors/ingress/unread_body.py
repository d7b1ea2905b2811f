"""Ends connections on which the body of an answered request still comes.

An answer may be ready before the body of its request has come, such as a refusal of its key or of
its length. A client reads it when it has sent everything: if the server closed the connection at
once, most clients would see a lost connection and no answer. If the server kept it, it would have
to read and drop whatever comes, without an end. So the rest has the time that every body has, and
may be a few times as long as one may be; then the connection is closed.

Meanwhile the request counts as one under way, of which Serve gives a replica only so many. So that
nobody takes all of them without a key, a small share may wait; others' connections end at once.
"""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLOSE = (b"connection", b"close")
WAITING_SHARE = 16  # of the requests that may be under way, 1/16 may wait for bodies
READ_TIMES = 8  # how much longer than allowed a body may be for its client to find the answer


class UnreadBody:
    """An ASGI application around another one."""

    def __init__(
        self, app: ASGIApp, *, limit_s: float, limit_bytes: int, max_requests: int
    ) -> None:
        """limit_s: from the headers of a request to the end of its body; limit_bytes: of that.

        max_requests: that may be under way at a time.
        """
        self._app = app
        self._limit_s = limit_s
        self._limit_bytes = READ_TIMES * limit_bytes
        self._max_waiting = max(1, max_requests // WAITING_SHARE)
        self._num_waiting = 0  # answered requests, for their bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        began_s = asyncio.get_running_loop().time()
        exchange = _Exchange(receive, send, self._limit_bytes)
        await self._app(scope, exchange.receive, exchange.send)
        if exchange.owes_end:
            may_wait = self._num_waiting < self._max_waiting
            self._num_waiting += 1
            try:
                await exchange.end(began_s + self._limit_s if may_wait else began_s)
            finally:
                self._num_waiting -= 1


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


class _Exchange:
    """One request with a body, and its answer; the answer's end is kept until the body has come."""

    def __init__(self, receive: Receive, send: Send, limit_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._num_bytes_left = limit_bytes
        self._has_come = False  # the whole body, or the client has gone
        self.owes_end = False  # the answer is whole but for its end

    async def receive(self) -> Message:
        message = await self._receive()
        self._has_come |= not message.get("more_body", False)
        self._num_bytes_left -= len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if self._has_come:
            await self._send(message)
            return
        if message["type"] == "http.response.start":
            kept = [header for header in message.get("headers", ()) if header[0] != CLOSE[0]]
            message = {**message, "headers": [*kept, CLOSE]}
        elif not message.get("more_body", False):
            message = {**message, "more_body": True}
            self.owes_end = True
        await self._send(message)

    async def end(self, until_s: float) -> None:
        """Ends the answer when the body has come, or is too long, at `until_s` at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                while not self._has_come and self._num_bytes_left > 0:
                    await self.receive()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

"""Stops one ingress replica: refuses new requests, drains, then ends the rest with an error.

An operator's signal (actors/ingress/graceful_stop.py) calls `stop`. From then on new requests get
503, and those in progress may continue for a while. The rest then end with an error, which is the
last event of a stream, and not with a cut connection.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.openai.response_objects import error_reply
from engine.errors import CapacityError

RETRY_S = 5.0  # by then another server, or this one restarted, may answer
LAST_WORDS_S = 2.0  # until the errors of the ended requests have been sent
STILL_ANSWERED = ("/health", "/ping", "/metrics")


def stopping_error() -> CapacityError:
    """Returns the error of a request that cannot be finished because the server stops."""
    return CapacityError("the server is stopping", retry_after_s=RETRY_S)


class Stopping:
    """Counts the HTTP requests in progress, and ends them."""

    def __init__(self, end_all: Callable[[], None]) -> None:
        """end_all: ends every request that waits for tokens, with `stopping_error`."""
        self._end_all = end_all
        self._is_on = False
        self._num_under_way = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_on(self) -> bool:
        """Whether new requests are refused."""
        return self._is_on

    async def stop(self, drain_s: float) -> int:
        """Waits until no request is in progress, or nothing more can be done.

        Returns the number of requests that had not ended after `drain_s`.
        """
        self._is_on = True
        if await self._is_idle_within(drain_s):
            return 0
        num_left = self._num_under_way
        self._end_all()
        await self._is_idle_within(LAST_WORDS_S)
        return num_left

    def entered(self) -> None:
        """Counts a request that has come in."""
        self._num_under_way += 1
        self._is_idle.clear()

    def left(self) -> None:
        """Notes that a request has left: its answer was sent, or its client has gone."""
        self._num_under_way -= 1
        if self._num_under_way == 0:
            self._is_idle.set()

    async def _is_idle_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_idle.wait()
        return self._is_idle.is_set()


class StoppingGate:
    """An ASGI application around another one: refuses new requests once the stop has begun."""

    def __init__(self, app: ASGIApp, *, stopping: Stopping) -> None:
        self._app = app
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].endswith(STILL_ANSWERED):
            await self._app(scope, receive, send)
            return
        if self._stopping.is_on:
            await _refuse(send)
            return
        self._stopping.entered()
        try:
            await self._app(scope, receive, send)
        finally:
            self._stopping.left()


async def _refuse(send: Send) -> None:
    reply = error_reply(stopping_error())
    headers = reply.headers | {
        "Content-Type": "application/json",
        "Content-Length": str(len(reply.body)),
        "Connection": "close",  # the next one goes to another server
    }
    start: Message = {
        "type": "http.response.start",
        "status": reply.status,
        "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
    }
    await send(start)
    await send({"type": "http.response.body", "body": reply.body})

"""A client of an ASGI application in this event loop, who may hang up at any time."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message

from load_tests.http_load.sse import EventParser

Json = dict[str, Any]
DONE = "[DONE]"


class ClientCall:
    """One POST and what came back of it so far."""

    def __init__(self, app: ASGIApp, path: str, body: Mapping[str, object]) -> None:
        """The request is on its way at once."""
        self._upload: list[Message] = [
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        ]
        self._has_left = asyncio.Event()
        self.status: int | None = None
        self.body = b""
        self.is_whole = False  # the last byte came
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def wait(self) -> None:
        """Until the application has nothing more to say."""
        with suppress(asyncio.CancelledError):
            await self.task

    async def leave(self) -> None:
        """Hang up, as Serve tells it: a message, and its task is cancelled."""
        self._has_left.set()
        await asyncio.sleep(0)
        self.task.cancel()
        await self.wait()

    @property
    def events(self) -> list[str]:
        """Data of the server-sent events so far."""
        return EventParser().feed(self.body)

    @property
    def error(self) -> Json | None:
        """Of the whole answer, or of the event that ended its stream."""
        texts = self.events or ([self.body.decode()] if self.is_whole and self.body else [])
        found = json.loads(texts[-1]) if texts and texts[-1] != DONE else {}
        return found.get("error")

    @property
    def is_done(self) -> bool:
        """Whether a stream came to its end mark."""
        return self.events[-1:] == [DONE]

    def token_ids(self, choice: int = 0) -> list[int]:
        """Of one choice so far, streamed or not."""
        texts = [event for event in self.events if event != DONE]
        if not texts and self.is_whole:
            texts = [self.body.decode()]
        choices = [c for text in texts for c in json.loads(text).get("choices", [])]
        return [i for c in choices if c["index"] == choice for i in c["token_ids"]]

    async def _receive(self) -> Message:
        if self._upload:
            return self._upload.pop()
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._has_left.is_set():
            raise OSError("the client is gone")
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
            self.is_whole = not message.get("more_body", False)

"""A small server of OpenAI's protocol in a thread of the test, which does what its script says."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What becomes of one request."""

    status: int = 200
    headers: tuple[str, ...] = ()
    message: str = "no"
    first_s: float = 0.0  # until the first token
    waits_for: Callable[[], bool] = lambda: True  # before the first token
    gap_s: float = 0.0  # between tokens
    num_tokens: int | None = None  # None = as many as were asked for
    cut_after: int | None = None  # closes the connection after so many tokens
    error_after: int | None = None  # an error event after so many tokens


@dataclass(slots=True)
class Seen:
    """One completion request as the server saw it."""

    at_s: float
    body: dict[str, Any]
    is_hung_up: bool = False


Script = Callable[[int, dict[str, Any]], Reply]  # number of the request, its body
# It takes one request a connection: a router must not send another on it.
CLOSES = b"Connection: close\r\n"


@dataclass(slots=True)
class FakeOpenAI:
    script: Script = lambda number, body: Reply()
    model: str = "fake"
    ready: Reply = field(default_factory=Reply)
    ready_page: dict[str, Any] = field(default_factory=lambda: {"status": "ready"})
    max_model_len: int | None = None
    tells_ids: bool = True
    pages: dict[str, dict[str, Any]] = field(default_factory=dict)  # other paths, as JSON
    url: str = ""
    seen: list[Seen] = field(default_factory=list)

    @property
    def load(self) -> list[Seen]:
        """What was asked after the probe."""
        return self.seen[1:]

    def wait_until(self, holds: Callable[[], bool], within_s: float = 20.0) -> None:
        """Raises TimeoutError if it does not come to hold."""
        until_s = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > until_s:
                raise TimeoutError
            time.sleep(0.005)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = (ConnectionError, asyncio.IncompleteReadError)
        with contextlib.suppress(*gone), contextlib.ExitStack() as stack:
            stack.callback(writer.close)
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            lengths = [
                int(line.split(":")[1])
                for line in head.splitlines()
                if line.lower().startswith("content-length:")
            ]
            body = await reader.readexactly(lengths[0]) if lengths else b""
            await self._route(path, body, writer)
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _route(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path in ("/ready", "/health"):
            await _whole(writer, self.ready, self.ready_page)
        elif path in self.pages:
            await _whole(writer, Reply(), self.pages[path])
        elif path == "/v1/models":
            model = {"id": self.model, "max_model_len": self.max_model_len}
            await _whole(writer, Reply(), {"object": "list", "data": [model]})
        else:
            seen = Seen(time.perf_counter(), json.loads(body))
            self.seen.append(seen)
            reply = self.script(len(self.seen) - 2, seen.body)  # -1 = the probe
            if reply.status != 200:
                await _whole(writer, reply, {"error": {"message": reply.message}})
                return
            try:
                await self._stream(writer, reply, seen.body)
            except ConnectionError:
                seen.is_hung_up = True

    async def _stream(
        self, writer: asyncio.StreamWriter, reply: Reply, body: dict[str, Any]
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + CLOSES)
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(reply.first_s)
        while not reply.waits_for():  # noqa: ASYNC110  # the test knows of no loop
            await asyncio.sleep(0.005)
        num_tokens = body["max_tokens"] if reply.num_tokens is None else reply.num_tokens
        for index in range(num_tokens):
            if index == reply.cut_after:
                return
            if index == reply.error_after:
                await _event(writer, {"error": {"message": "the worker died", "code": "worker"}})
                await _end(writer)
                return
            await _event(writer, {"choices": [self._choice(index, body)]})
            await asyncio.sleep(reply.gap_s)
        usage = {"prompt_tokens": _num_tokens(body), "completion_tokens": num_tokens}
        await _event(writer, {"choices": [], "usage": usage})
        await _piece(writer, b"data: [DONE]\n\n")
        await _end(writer)

    def _choice(self, index: int, body: dict[str, Any]) -> dict[str, Any]:
        text = f" t{index}"
        choice = {"delta": {"content": text}} if "messages" in body else {"text": text}
        return choice | ({"token_ids": [100 + index]} if self.tells_ids else {})


def _num_tokens(body: dict[str, Any]) -> int:
    prompt = body.get("prompt", body.get("messages"))
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


async def _whole(writer: asyncio.StreamWriter, reply: Reply, fields: dict[str, Any]) -> None:
    data = json.dumps(fields).encode()
    head = [f"HTTP/1.1 {reply.status} Status", f"Content-Length: {len(data)}", *reply.headers]
    writer.write("\r\n".join(head).encode() + b"\r\n" + CLOSES + b"\r\n" + data)
    await writer.drain()


async def _event(writer: asyncio.StreamWriter, fields: dict[str, Any]) -> None:
    await _piece(writer, b"data: " + json.dumps(fields).encode() + b"\n\n")


async def _piece(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.write(b"0\r\n\r\n")
    await writer.drain()


@contextlib.contextmanager
def running(fake: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """Serves until the block ends."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.answer, "127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(_end_connections())
        loop.close()


async def _end_connections() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # a round of the loop, in which closed transports let go

"""Event streams whose client leaves: nothing is raised for it, and nothing goes on behind it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest
from starlette.types import Message

from actors.ingress.answering import EventStream
from actors.ingress.pipeline import ChoiceDelta
from engine.text.output_text import TextDelta

WHOLE_NUM_EVENTS = 5
NUM_SENT = 3  # before the client leaves


class Stream:
    """A response of a few events, and what became of its generators."""

    def __init__(self, *, close_fails: bool = False) -> None:
        self.closed: list[str] = []
        self.sent: list[Message] = []
        self.has_left = asyncio.Event()
        self._close_fails = close_fails
        self._deltas = self._make_deltas()
        self.response = EventStream(
            self._make_events(), self._deltas, {}, on_close=lambda _: self.closed.append("accounts")
        )

    async def run(self, send: Any, spec_version: str = "2.3") -> None:
        scope = {"type": "http", "asgi": {"spec_version": spec_version}}
        await asyncio.wait_for(self.response(scope, self.receive, send), timeout=30)

    async def receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _make_deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        try:
            for _ in range(WHOLE_NUM_EVENTS):
                yield ChoiceDelta(choice=0, delta=TextDelta(text="x"))
        finally:
            self.closed.append("deltas")

    async def send_until_gone(self, message: Message) -> None:
        self.sent.append(message)
        if len(self.sent) == NUM_SENT:
            raise OSError("the connection is gone")

    async def _make_events(self) -> AsyncGenerator[bytes, None]:
        try:
            async for item in self._deltas:
                yield item.delta.text.encode()
        finally:
            self.closed.append("events")
            if self._close_fails:
                raise ValueError("the events cannot be closed")


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
def test_a_send_that_fails_ends_the_stream_quietly(spec_version: str) -> None:
    async def leave() -> None:
        stream = Stream()
        await stream.run(stream.send_until_gone, spec_version)
        assert len(stream.sent) == NUM_SENT
        assert stream.closed == ["events", "deltas", "accounts"]

    asyncio.run(leave())


def test_the_first_event_leaves_before_any_other_task_has_a_turn() -> None:
    async def send_all() -> None:
        stream = Stream()
        sent_at_first_turn: list[int] = []
        asyncio.get_running_loop().call_soon(lambda: sent_at_first_turn.append(len(stream.sent)))

        async def send(message: Message) -> None:
            stream.sent.append(message)

        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await stream.response(scope, stream.receive, send)  # no task of its own: no turn of others
        assert sent_at_first_turn == [2]  # the status and the first event
        bodies = [m["body"] for m in stream.sent if m["type"] == "http.response.body"]
        assert bodies == [b"x"] * WHOLE_NUM_EVENTS + [b""]

    asyncio.run(send_all())


def test_a_client_that_leaves_in_mid_send_ends_it_too() -> None:
    async def leave() -> None:
        stream = Stream()

        async def send(message: Message) -> None:
            stream.sent.append(message)
            if len(stream.sent) == NUM_SENT:
                stream.has_left.set()
                await asyncio.Event().wait()  # nobody reads

        await stream.run(send)
        assert stream.closed == ["events", "deltas", "accounts"]

    asyncio.run(leave())


def test_a_stream_that_is_cancelled_before_its_first_event_closes_what_it_would_read() -> None:
    async def leave() -> None:
        stream = Stream()
        await anext(stream._deltas)  # the ingress waits for the first before it answers
        is_sending = asyncio.Event()

        async def send(message: Message) -> None:
            is_sending.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(stream.run(send))
        await is_sending.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert stream.closed == ["deltas", "accounts"], "the events never began"

    asyncio.run(leave())


def test_deltas_are_closed_although_closing_the_events_fails() -> None:
    async def leave() -> None:
        stream = Stream(close_fails=True)
        with pytest.raises(ValueError, match="cannot be closed"):
            await stream.run(stream.send_until_gone)
        assert stream.closed == ["events", "deltas", "accounts"]

    asyncio.run(leave())


def test_a_whole_stream_is_sent_whole() -> None:
    async def stay() -> None:
        stream = Stream()

        async def send(message: Message) -> None:
            stream.sent.append(message)

        await stream.run(send)
        bodies = [message["body"] for message in stream.sent if "body" in message]
        assert bodies == [b"x"] * WHOLE_NUM_EVENTS + [b""]

    asyncio.run(stay())

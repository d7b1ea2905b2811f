"""The end of an ingress replica: what is refused, what goes on, and what is ended with a word."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.ingress.mailbox import STOPPING, AttemptFailed, Mailbox
from actors.ingress.stopping import Stopping, StoppingGate
from tests.actors.ingress.edge_app import edge_app

LONG_S = 60.0  # never waited for


class Slow:
    """An ASGI application that answers when it is told to."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.num_ended = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.has_begun.set()
        await self.may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        self.num_ended += 1


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x")


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


def test_what_is_under_way_goes_on_and_nothing_new_comes_in() -> None:
    async def scenario() -> None:
        slow = Slow()
        stopping = Stopping(end_all=lambda: pytest.fail("nothing has to be ended"))
        async with client_of(StoppingGate(slow, stopping=stopping)) as client:
            under_way = asyncio.create_task(client.get("/a"))
            await slow.has_begun.wait()
            stopped = asyncio.create_task(stopping.stop(LONG_S))
            await asyncio.sleep(0)
            refused = await client.post("/v1/completions")
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            assert refused.headers["connection"] == "close"
            assert "stopping" in refused.json()["error"]["message"]
            assert not stopped.done()
            slow.may_end.set()
            assert (await under_way).status_code == 200
            assert await stopped == 0

    run(scenario)


def test_what_has_not_ended_in_time_is_ended_and_waited_for() -> None:
    async def scenario() -> None:
        slow = Slow()
        stopping = Stopping(end_all=slow.may_end.set)
        async with client_of(StoppingGate(slow, stopping=stopping)) as client:
            under_way = [asyncio.create_task(client.get("/a")) for _ in range(2)]
            await slow.has_begun.wait()
            await asyncio.sleep(0)
            assert await stopping.stop(0.01) == 2
            assert slow.num_ended == 2
            await asyncio.gather(*under_way)

    run(scenario)


def test_with_nothing_under_way_it_ends_at_once() -> None:
    async def scenario() -> None:
        assert await Stopping(end_all=lambda: None).stop(LONG_S) == 0

    run(scenario)


def test_a_request_that_fails_or_is_cut_is_not_waited_for() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("no")

    async def scenario() -> None:
        stopping = Stopping(end_all=lambda: None)
        async with client_of(StoppingGate(failing, stopping=stopping)) as client:
            with pytest.raises(RuntimeError):
                await client.get("/a")
        slow = Slow()
        async with client_of(StoppingGate(slow, stopping=stopping)) as client:
            cut = asyncio.create_task(client.get("/a"))
            await slow.has_begun.wait()
            cut.cancel()
            await asyncio.gather(cut, return_exceptions=True)
        assert await stopping.stop(LONG_S) == 0

    run(scenario)


def test_an_ingress_that_stops_is_not_ready_but_tells_how_it_is() -> None:
    app = edge_app()

    async def send(client: httpx.AsyncClient) -> dict[str, int]:
        await app.edge.stopping.stop(LONG_S)
        paths = ("/ready", "/v1/models", "/health", "/ping", "/metrics")
        return {path: (await client.get(path)).status_code for path in paths}

    found = app.ask(send)
    good = {"/health": 200, "/ping": 200, "/metrics": 200}
    assert found == {"/ready": 503, "/v1/models": 503} | good
    assert isinstance(app.app, FastAPI)


def test_a_reader_of_tokens_hears_of_the_end_behind_those_that_came() -> None:
    async def scenario() -> None:
        mailbox = Mailbox(prefill_worker="p", decode_worker=None, next_index=0)
        mailbox.stop()
        with pytest.raises(AttemptFailed) as caught:
            await mailbox.wait_tokens()
        assert (caught.value.code, caught.value.is_retryable) == (STOPPING, False)

    run(scenario)


def test_the_refusal_is_an_error_object_of_openais() -> None:
    app = edge_app()

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        await app.edge.stopping.stop(LONG_S)
        return await client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})

    error = json.loads(app.ask(send).content)["error"]
    assert set(error) == {"message", "type", "param", "code"}

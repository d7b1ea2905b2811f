"""A client that stops in the middle of its request's body."""

import asyncio
import logging
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.types import Message, Scope

from load_tests.testbed.deployed import metric_sum
from tests.actors.ingress.edge_app import EdgeApp, edge_app


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_that_does_not_come_is_given_up_and_holds_no_place(path: str) -> None:
    app = edge_app({"edge.upload_timeout_s": 0.05})

    async def half_a_body() -> AsyncIterator[bytes]:
        yield b'{"model": '
        await asyncio.Event().wait()

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        headers = {"content-type": "application/json"}
        async with asyncio.timeout(20):
            return await client.post(path, content=half_a_body(), headers=headers)

    answer = app.ask(send)
    assert answer.status_code == 408
    assert answer.headers["connection"] == "close"
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "did not come in time" in error["message"]
    assert app.post({"max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/detokenize"])
def test_a_client_that_leaves_before_its_body_is_whole_is_no_failure(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = edge_app()

    messages: list[Message] = [
        {"type": "http.request", "body": b'{"max_to', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(_: Message) -> None:
        """Nobody reads it, and no server raises for that."""

    with caplog.at_level(logging.INFO, logger="actors"):
        asyncio.run(app.app(_posting(path), receive, send))
    assert not caplog.records
    text = app.ask(lambda client: client.get("/metrics")).text
    assert metric_sum(text, "laps_requests_failed_total") == 0
    assert metric_sum(text, "laps_clients_left_total") == 1


def _posting(path: str) -> Scope:
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "server": ("127.0.0.1", 8000),
    }


async def _no_body() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def _ask_without_body(app: EdgeApp, headers: dict[str, str]) -> httpx.Response:
    """The answer to a request whose body never comes."""

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        whole = {"content-type": "application/json"} | headers
        return await client.post("/v1/completions", content=_no_body(), headers=whole)

    response: httpx.Response = app.ask(send)
    return response


def test_a_body_that_says_that_it_is_too_long_is_refused_before_it_comes() -> None:
    app = edge_app({"edge.max_body_bytes": 1000, "edge.upload_timeout_s": 0.05})
    for length in ("1001", "9" * 40):
        answer = _ask_without_body(app, {"content-length": length})
        assert answer.status_code == 413
        assert "1000 bytes" in answer.json()["error"]["message"]
    assert app.post({"max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd, gzip"])
def test_a_packed_body_is_refused_with_what_to_do_instead(encoding: str) -> None:
    app = edge_app({"edge.upload_timeout_s": 0.05})
    answer = _ask_without_body(app, {"content-encoding": encoding})
    assert answer.status_code == 415
    error = answer.json()["error"]
    assert error["code"] == "unsupported_content_encoding"
    assert "without the header" in error["message"]
    assert app.post({"max_tokens": 1}, content_encoding="identity").status_code == 200

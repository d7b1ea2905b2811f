"""A client that stops in the middle of its request's body."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

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


async def _no_body() -> AsyncIterator[bytes]:
    raise AssertionError("a body was read that is refused by its headers")
    yield b""


def _ask_without_reading(app: EdgeApp, headers: dict[str, str]) -> httpx.Response:
    async def send(client: httpx.AsyncClient) -> httpx.Response:
        whole = {"content-type": "application/json"} | headers
        return await client.post("/v1/completions", content=_no_body(), headers=whole)

    response: httpx.Response = app.ask(send)
    return response


def test_a_body_that_says_that_it_is_too_long_is_refused_before_it_comes() -> None:
    app = edge_app({"edge.max_body_bytes": 1000})
    for length in ("1001", "9" * 40):
        answer = _ask_without_reading(app, {"content-length": length})
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"
        assert "1000 bytes" in answer.json()["error"]["message"]
    assert app.post({"max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd, gzip"])
def test_a_packed_body_is_refused_with_what_to_do_instead(encoding: str) -> None:
    app = edge_app()
    answer = _ask_without_reading(app, {"content-encoding": encoding})
    assert answer.status_code == 415
    error = answer.json()["error"]
    assert error["code"] == "unsupported_content_encoding"
    assert "without the header" in error["message"]
    assert app.post({"max_tokens": 1}, content_encoding="identity").status_code == 200

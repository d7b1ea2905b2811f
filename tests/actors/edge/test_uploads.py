"""A client that stops in the middle of its request's body."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.actors.edge.edge_app import edge_app


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
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "did not come in time" in error["message"]
    assert app.post({"max_tokens": 1}).status_code == 200

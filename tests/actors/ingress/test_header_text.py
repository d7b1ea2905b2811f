"""Headers that Serve reads by itself: it can decode them, and clients cannot steer it by them."""

import asyncio
from collections.abc import Iterable, MutableMapping
from typing import Any

import pytest
from ray.serve._private import constants
from ray.serve._private.http_util import validate_http_proxy_callback_return
from ray.serve._private.utils import call_function_from_import_path
from starlette.types import Receive, Scope, Send

from actors.ingress.header_text import FOR_OPERATORS, HeaderText, middlewares
from configs.process_environment import MIDDLEWARES

Headers = Iterable[tuple[bytes, bytes]]


def passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    seen: list[tuple[bytes, bytes]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nobody reads")

    async def send(message: MutableMapping[str, Any]) -> None:
        raise AssertionError("nobody answers")

    asyncio.run(HeaderText(app)({"type": "http", "headers": headers}, receive, send))
    return seen


@pytest.mark.parametrize(
    "name", [b"x-request-id", b"serve_multiplexed_model_id", b"serve-multiplexed-model-id"]
)
def test_bytes_that_are_not_utf8_are_taken_as_latin_1(name: bytes) -> None:
    assert passed_on([(name, b"caf\xe9")]) == [(name, "café".encode())]
    assert passed_on([(name, "日本".encode())]) == [(name, "日本".encode())]


def test_a_client_cannot_tell_serve_how_long_its_request_lives() -> None:
    kept = (b"x-request-id", b"1")
    told = [(name, b"?1") for name in FOR_OPERATORS]
    assert passed_on([*told, kept]) == [kept]
    assert set(FOR_OPERATORS) == {
        constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER.encode(),
        constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER.encode(),
    }


def test_other_headers_are_left_as_they_are() -> None:
    headers = [(b"authorization", b"Bearer \xe9"), (b"x-foo", b"\xff")]
    assert passed_on(headers) == headers


def test_serve_takes_what_its_setting_names() -> None:
    assert validate_http_proxy_callback_return(call_function_from_import_path(MIDDLEWARES))
    assert [middleware.cls for middleware in middlewares()] == [HeaderText]

"""Headers that Serve reads by itself: it can decode them, and clients cannot steer it by them."""

import asyncio
import inspect
import os
from collections.abc import Iterable, MutableMapping
from typing import Any

import pytest
from ray.serve._private import constants
from ray.serve._private.http_util import validate_http_proxy_callback_return
from ray.serve._private.utils import call_function_from_import_path
from starlette.types import Receive, Scope, Send

from actors.ingress.header_text import FOR_OPERATORS, HeaderText, middlewares
from configs.process_environment import (
    GCS_AWAY,
    HTTP_CALLBACK,
    MIDDLEWARES,
    MIN_DRAINING,
    PROXY_READY,
    set_serve_environment,
)

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


def test_serve_is_told_of_it_unless_the_operator_says_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (HTTP_CALLBACK, MIN_DRAINING, PROXY_READY, GCS_AWAY):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    set_serve_environment()
    assert GCS_AWAY not in os.environ  # it is for the cluster's operator to say
    assert validate_http_proxy_callback_return(call_function_from_import_path(MIDDLEWARES))
    assert [middleware.cls for middleware in middlewares()] == [HeaderText]
    monkeypatch.setenv(HTTP_CALLBACK, "their.own:callback")
    monkeypatch.delenv("RAY_ADDRESS")
    set_serve_environment()
    assert os.environ[HTTP_CALLBACK] == "their.own:callback"
    assert float(os.environ[MIN_DRAINING]) < 5.0
    assert float(os.environ[GCS_AWAY]) < 10.0
    # The first proxy may take as long to start as `serve run` waits for it.
    assert f'"{PROXY_READY}"' in inspect.getsource(constants)
    num_tries = constants.PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD
    assert num_tries * float(os.environ[PROXY_READY]) >= constants.HTTP_PROXY_TIMEOUT

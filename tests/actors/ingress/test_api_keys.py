"""Who may ask: every route behind the gate, keys compared, nothing of them or of prompts logged."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import pytest
from starlette.routing import Route
from starlette.types import Message, Scope

from actors.ingress.auth import ApiKeys, KeyGate, sent_key
from configs.errors import ConfigFileError
from configs.load import load_config
from configs.schema import EdgeConfig, OpenPath
from tests.actors.ingress.edge_app import EdgeApp, edge_app

KEY = f"sk-{secrets.token_hex(16)}"
OTHER = f"sk-{secrets.token_hex(16)}"
OPEN = ("/", "/health", "/laps")  # the default of api.open_paths
BEARER = {"Authorization": f"Bearer {KEY}"}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(scope="module")
def guarded() -> EdgeApp:
    return edge_app({"api.keys": {"alice": digest(KEY), "bob": digest(OTHER)}})


def routes(app: EdgeApp) -> Iterator[tuple[str, str]]:
    """(method, path) of the application's own table, and of what is not in it."""
    for route in app.app.routes:
        assert isinstance(route, Route), f"{route} is of a kind this test does not know"
        path = route.path.replace("{name:path}", "tiny")
        for method in [*(route.methods or ()), "HEAD", "OPTIONS", "DELETE"]:
            yield method, path
    for path in ("/docs", "/redoc", "/v2/models", "//v1/models", "//health", "/health/"):
        yield "GET", path
    for path in ("/HEALTH", "/health/../v1/models", "/v1/models?x=/health", "/health%2f"):
        yield "GET", path


def test_every_route_but_the_open_ones_answers_401_without_a_key(guarded: EdgeApp) -> None:
    is_open = {(method, path) for method in ("GET", "HEAD") for path in OPEN}
    asked = [pair for pair in routes(guarded) if pair not in is_open]
    assert len({path for _, path in asked}) > 20

    async def ask(client: httpx.AsyncClient) -> None:
        for method, path in asked:
            for headers in ({}, {"Host": "health"}, {"X-Forwarded-Prefix": "/health"}):
                url = f"http://127.0.0.1{path}"  # whole, or //health would name a host
                answer = await client.request(method, url, headers=headers)
                assert answer.status_code == 401, f"{method} {path} {headers}"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        for method, path in sorted(is_open):
            answer = await client.request(method, path)
            assert answer.status_code == 200, f"{method} {path}"

    guarded.ask(ask)


def test_the_configuration_opens_paths_for_reading_and_for_nothing_else() -> None:
    made = edge_app({"api.keys": {"alice": digest(KEY)}, "api.open_paths": ["/ping", "/ready"]})

    async def ask(client: httpx.AsyncClient) -> dict[tuple[str, str], int]:
        asked = [(m, p) for m in ("GET", "HEAD", "POST") for p in ("/ping", "/ready", "/health")]
        return {(m, p): (await client.request(m, p)).status_code for m, p in asked}

    statuses = made.ask(ask)
    assert {pair: status for pair, status in statuses.items() if status != 401} == {
        ("GET", "/ping"): 200,
        ("HEAD", "/ping"): 200,
        ("GET", "/ready"): 503,  # no worker has come
        ("HEAD", "/ready"): 503,
    }


def test_what_generates_cannot_be_opened(guarded: EdgeApp) -> None:
    readable = {path for method, path in routes(guarded) if method == "GET"}
    for path in {path for method, path in routes(guarded) if method == "POST"} - readable:
        with pytest.raises(ConfigFileError, match=r"api\.open_paths.*/health") as error:
            load_config(None, {"api.open_paths": [path]})
        assert path in str(error.value)
    for path in get_args(OpenPath):
        assert path in readable, f"{path} can be opened and is not there"
        assert load_config(None, {"api.open_paths": [path]}).api.open_paths == (path,)


def test_a_ping_is_empty_by_either_method(guarded: EdgeApp) -> None:
    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.request(m, "/ping", headers=BEARER) for m in ("GET", "POST", "HEAD")]

    for answer in guarded.ask(ask):
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], None),
        ([("Authorization", KEY)], None),
        ([("Authorization", f"Basic {KEY}")], None),
        ([("Authorization", "Bearer ")], None),
        ([("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {KEY}")], None),
        ([("Authorization", "Bearer none")], "invalid_api_key"),
        ([("Authorization", f"Bearer {KEY[:-1]}")], "invalid_api_key"),
        ([("Authorization", f"Bearer {KEY}x")], "invalid_api_key"),
        ([("Authorization", f"Bearer {digest(KEY)}")], "invalid_api_key"),
        ([("Authorization", f"Bearer {KEY} {OTHER}")], "invalid_api_key"),
    ],
)
def test_a_request_without_a_known_key_gets_openais_object(
    guarded: EdgeApp, headers: list[tuple[str, str]], code: str | None
) -> None:
    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.get("/v1/models", headers=headers)

    answer: httpx.Response = guarded.ask(ask)
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, code)
    assert KEY not in answer.text


@pytest.mark.parametrize(
    "value",
    [f"Bearer {KEY}", f"bearer {OTHER}", f"BEARER  {KEY} "],
    ids=["as OpenAI's client", "another key", "with spaces"],
)
def test_a_known_key_is_served(guarded: EdgeApp, value: str) -> None:
    answer = guarded.post({"max_tokens": 2}, Authorization=value)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2


def test_the_name_is_found_whatever_is_before_it() -> None:
    given = {f"name-{i}": secrets.token_hex(8) for i in range(9)}
    keys = ApiKeys({name: digest(key) for name, key in given.items()})
    assert {name: keys.name_of(key.encode()) for name, key in given.items()} == {
        name: name for name in given
    }
    assert keys.name_of(b"") is None
    assert keys.name_of(b"\xff\x00") is None


def test_a_sent_key_is_what_follows_the_scheme() -> None:
    assert sent_key([(b"authorization", b"Bearer a b")]) == b"a b"
    assert sent_key([(b"x", b"Bearer a")]) is None


def run_gate(gate: KeyGate, scope: Scope) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nobody reads the body of a refused request")

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(gate(scope, receive, send))
    return sent


async def passed(scope: Scope, receive: Any, send: Any) -> None:
    await send({"type": "passed"})


def gate(refused: list[int], keys: ApiKeys | None) -> KeyGate:
    return KeyGate(
        passed, keys=keys, limits=EdgeConfig(), on_refused=refused.append, open_paths=OPEN
    )


def test_a_websocket_is_closed_and_a_prefix_counts_where_the_router_counts_it() -> None:
    refused: list[int] = []
    guard = gate(refused, ApiKeys({"a": digest(KEY)}))
    scope: Scope = {"type": "websocket", "path": "/health", "headers": []}
    assert run_gate(guard, scope) == [{"type": "websocket.close", "code": 1008}]
    assert refused == [401]
    http: dict[str, Any] = {"type": "http", "method": "GET", "headers": []}
    http["root_path"] = "/app"
    assert run_gate(guard, http | {"path": "/app/health"}) == [{"type": "passed"}]
    for path in ("/application/health", "/app/app/health", "/app"):
        assert run_gate(guard, http | {"path": path})[0]["status"] == 401
    assert run_gate(guard, {"type": "lifespan"}) == [{"type": "passed"}]


@pytest.mark.parametrize(
    ("num_headers", "num_bytes", "status"),
    [(100, 16_384, None), (101, 16_000, 431), (2, 16_385, 431)],
)
def test_headers_are_bounded_before_anything_is_read(
    num_headers: int, num_bytes: int, status: int | None
) -> None:
    refused: list[int] = []
    filler = [(b"a", b"")] * (num_headers - 1)
    headers = [*filler, (b"b", b"x" * (num_bytes - num_headers))]
    sent = run_gate(gate(refused, None), {"type": "http", "path": "/x", "headers": headers})
    assert refused == ([] if status is None else [status])
    assert sent[0] == {"type": "passed"} if status is None else sent[0]["status"] == 431


def test_an_open_server_that_others_reach_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = gate([], None)
    logging.getLogger("actors").propagate = True
    for host in ("127.0.0.1", "::1", "localhost", "/tmp/socket", "10.1.2.3", "10.1.2.3"):
        run_gate(guard, {"type": "http", "path": "/", "headers": [], "server": (host, 8000)})
        assert ("no API keys" in caplog.text) == (host == "10.1.2.3")
    assert len(caplog.records) == 1
    assert "LAPS_API_KEYS" in caplog.text


@pytest.mark.parametrize("is_logged", [False, True])
def test_prompts_and_keys_are_not_logged_unless_asked_for(
    caplog: pytest.LogCaptureFixture, is_logged: bool
) -> None:
    app = edge_app({"edge.log_prompts": is_logged, "api.keys": {"alice": digest(KEY)}})
    word = f"zebra{secrets.token_hex(6)}"
    logging.getLogger("actors").propagate = True
    with caplog.at_level(logging.DEBUG):
        assert app.post({"prompt": word}, Authorization=f"Bearer {KEY}").status_code == 200
        for body in (
            {"prompt": word, "temperature": word},
            {"prompt": [word, 3]},
            {"prompt": word, word: 1},
            {"prompt": word, "stop": [word] * 99},
            {"model": word},
            {"prompt": word * 4000},
        ):
            assert app.post(body, Authorization=f"Bearer {KEY}").status_code in (400, 404)
        app.workers.error = RuntimeError("a defect")
        assert app.post({"prompt": word}, Authorization=f"Bearer {KEY}").status_code == 500
        assert app.post({"prompt": word}, Authorization=f"Bearer {OTHER}").status_code == 401
    assert "a defect" in caplog.text
    logged = caplog.text + "".join(str(record.__dict__) for record in caplog.records)
    assert (word in logged) == is_logged
    assert KEY not in logged
    assert OTHER not in logged

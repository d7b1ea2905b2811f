"""What `/openapi.json` allows, and what it does not, sent to every route: never a 5xx."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, BaseSchema, Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from actors.ingress.openapi import GETS
from actors.ingress.prompt_tokens import Batchers
from actors.rpc.handles import BatcherHandle
from actors.tokenizer_batcher import PromptTokenizer
from configs.schema import TokenizerConfig
from engine.clock import MonotonicClock
from engine.messages import ConstraintVerdict, TokenizeReply, TokenizeRequest
from engine.request import Constraint
from tests.actors.ingress.edge_app import MODEL_FOLDER, EdgeApp, edge_app

pytestmark = pytest.mark.slow

# Per route and kind. Drawing a body takes 25 times as long as answering it.
NUM_EXAMPLES = 4
NUM_AT_NIGHT = 60
PATIENCE_S = 200.0  # with one answer, for a busy machine's sake
MAX_OPTIONAL = 3  # fields of a sensible body: of very many one is always wrong
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
# 503 in this process, which has neither supervisor nor allocator.
UNREADY = ("/ready", "/laps_status")

TEXT = st.text(max_size=20)  # NUL is among its characters
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT})
# Values that get a request beyond the first look at it.
SENSIBLE: Mapping[str, st.SearchStrategy[Any]] = {
    "model": st.just("tiny"),
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "prompt": TEXT.map(lambda text: "a" + text),
    "tokens": st.lists(st.integers(0, 255), max_size=9),
    "max_tokens": st.integers(1, 9),
    "max_output_tokens": st.integers(1, 9),
    "input": TEXT.map(lambda text: "a" + text),
    "query": TEXT.map(lambda text: "a" + text),
    "items": st.lists(TEXT, min_size=1, max_size=3),
    "documents": st.lists(TEXT, min_size=1, max_size=3),
    "label_token_ids": st.lists(st.integers(0, 255), min_size=2, max_size=2, unique=True),
    "stream": st.booleans(),
}
# The routes, but for second names of some, and what a body must have to be answered, beyond what
# its schema requires.
NEEDED = {
    "/v1/chat/completions": {"model", "messages", "max_tokens", "stream"},
    "/v1/completions": {"model", "prompt", "max_tokens", "stream"},
    "/v1/responses": {"input", "max_output_tokens", "stream"},
    "/v1/messages": {"messages", "max_tokens", "stream"},
    "/v1/messages/count_tokens": {"messages"},
    "/v1/score": {"model", "query", "items", "label_token_ids"},
    "/v1/rerank": {"model", "query", "documents", "label_token_ids"},
    "/tokenize": {"prompt"},
    "/detokenize": {"tokens"},
}

Operation = APIOperation[Any, Any, Any, Any]
Change = Callable[[Case, st.DataObject], None]


class LocalBatcher:
    """A tokenizer batcher in this process. Takes every constraint for one that can be compiled."""

    def __init__(self) -> None:
        self._tokenizer = PromptTokenizer(str(MODEL_FOLDER), TokenizerConfig())

    async def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        (reply,) = self._tokenizer.encode_batch([request])
        return reply

    async def check(self, constraint: Constraint) -> ConstraintVerdict:
        return ConstraintVerdict(error=None)


@pytest.fixture(scope="module")
def made() -> EdgeApp:
    batcher = cast("BatcherHandle", LocalBatcher())

    async def find(name: str) -> BatcherHandle:
        return batcher

    batchers = Batchers(find, patience_s=1.0, clock=MonotonicClock())
    batchers.update(["batcher-0"])
    return edge_app(batchers=batchers)


@pytest.fixture(scope="module")
def schema(made: EdgeApp) -> BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", made.app, timeout=PATIENCE_S)


def as_it_comes(case: Case, data: st.DataObject) -> None:
    """Nothing is changed."""


def know_the_model(case: Case, data: st.DataObject) -> None:
    """So that a wrong body is not refused for its model alone."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "tiny"


def be_plain(case: Case, data: st.DataObject) -> None:
    """The needed fields alone, with values that can be answered."""
    case.body = {name: data.draw(SENSIBLE[name]) for name in sorted(NEEDED[case.operation.path])}


def be_sensible(case: Case, data: st.DataObject) -> None:
    """A plain body with few of the other fields, whose values may be refused."""
    others = sorted(case.body.keys() - NEEDED[case.operation.path])
    kept = data.draw(st.lists(st.sampled_from(others), max_size=MAX_OPTIONAL)) if others else []
    optional = {name: case.body[name] for name in kept}
    be_plain(case, data)
    case.body = optional | case.body


def send_many(
    operation: Operation,
    mode: GenerationMode,
    change: Change = as_it_comes,
    num_examples: int = NUM_EXAMPLES,
) -> Counter[int]:
    """Fresh cases at each run, all of them judged. Returns the statuses of the answers."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), st.data())
    def send(case: Case, data: st.DataObject) -> None:
        assert case.meta is not None
        assert case.meta.generation.mode is mode
        change(case, data)
        response = case.call(timeout=PATIENCE_S)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    send()
    return statuses


by_day_and_night = pytest.mark.parametrize(
    "num_examples", [NUM_EXAMPLES, pytest.param(NUM_AT_NIGHT, marks=pytest.mark.nightly)]
)


@by_day_and_night
@pytest.mark.parametrize("path", NEEDED)
def test_no_allowed_body_makes_the_server_fail(
    path: str, num_examples: int, schema: BaseSchema
) -> None:
    operation = schema[path]["POST"]
    statuses = send_many(operation, GenerationMode.POSITIVE, know_the_model, num_examples)
    assert statuses.total() >= num_examples


@by_day_and_night
@pytest.mark.parametrize("path", NEEDED)
def test_sensible_bodies_are_answered(path: str, num_examples: int, schema: BaseSchema) -> None:
    operation = schema[path]["POST"]
    statuses = send_many(operation, GenerationMode.POSITIVE, be_plain, num_examples)
    assert set(statuses) == {200}, statuses
    send_many(operation, GenerationMode.POSITIVE, be_sensible, num_examples)


@by_day_and_night
@pytest.mark.parametrize("path", NEEDED)
def test_every_body_that_is_not_allowed_is_refused(
    path: str, num_examples: int, schema: BaseSchema
) -> None:
    operation = schema[path]["POST"]
    statuses = send_many(operation, GenerationMode.NEGATIVE, know_the_model, num_examples)
    assert statuses.total() >= num_examples, "what was not sent proves nothing"
    assert all(400 <= status < 500 for status in statuses), statuses


@pytest.mark.parametrize("path", sorted(GETS.keys() - set(UNREADY)))
def test_what_is_asked_without_a_body_is_answered(path: str, schema: BaseSchema) -> None:
    statuses = send_many(schema[path]["GET"], GenerationMode.POSITIVE)
    assert set(statuses) <= ({200, 404} if "{" in path else {200}), statuses


@pytest.mark.parametrize("path", UNREADY)
def test_what_is_not_ready_says_so_as_documented(path: str, schema: BaseSchema) -> None:
    case = schema[path]["GET"].Case()
    response = case.call(timeout=PATIENCE_S)
    assert response.status_code == 503
    checks = [status_code_conformance, content_type_conformance, response_schema_conformance]
    case.validate_response(response, checks=checks)


# Lone surrogates are characters of JSON's escapes and of no encoding.
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
ODD_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
)


@pytest.mark.parametrize("path", NEEDED)
def test_no_bytes_make_the_server_fail(path: str, made: EdgeApp) -> None:
    """What no document describes: broken JSON, characters that are none, numbers beyond all."""

    @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None)
    @given(st.binary() | ODD_JSON.map(lambda value: json.dumps(value).encode()))
    def send(body: bytes) -> None:
        assert 400 <= post(made, path, body).status_code < 500

    send()


@pytest.mark.parametrize("path", NEEDED)
def test_no_text_makes_the_server_fail(path: str, made: EdgeApp) -> None:
    @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None)
    @given(ANY_TEXT, st.data())
    def send(text: str, data: st.DataObject) -> None:
        body = {name: data.draw(SENSIBLE[name]) for name in sorted(NEEDED[path])}
        field = data.draw(st.sampled_from(sorted(TEXT_FIELDS)))
        body |= {field: TEXT_FIELDS[field](text)}
        response = post(made, path, json.dumps(body).encode())
        assert response.status_code < 500, response.text

    send()


TEXT_FIELDS: Mapping[str, Callable[[str], object]] = {
    "prompt": str,
    "messages": lambda text: [{"role": "user", "content": text}],
    "stop": lambda text: [text],
    "model": str,
    "user": str,
    "cache_salt": str,
    "metadata": lambda text: {text: text},
    "chat_template_kwargs": lambda text: {text: text},
}


def post(made: EdgeApp, path: str, body: bytes) -> httpx.Response:
    async def send(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, content=body, headers={"Content-Type": "application/json"})

    response: httpx.Response = made.ask(send)
    return response

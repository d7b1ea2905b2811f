"""Errors and the models list, as the `openai` client meets them."""

import json

import httpx2 as httpx  # what the openai client speaks through
import openai
import pytest
from openai.types import Model

from actors.openai.response_objects import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    error_reply,
    model_list,
    sse_error,
    sse_event,
    to_json,
)
from actors.openai.served_model import ServedModel
from engine.errors import (
    CapacityError,
    ConfigError,
    NumericsError,
    PoisonedError,
    RequestError,
    WorkerError,
)


def test_the_models_list_is_the_clients_object() -> None:
    model = ServedModel(
        name="tiny", max_model_len=100, vocab_size=5, created_s=12, aliases=("small",)
    )
    listed = json.loads(to_json(model_list(model)))
    assert [card["id"] for card in listed["data"]] == ["tiny", "small"]
    assert {card["root"] for card in listed["data"]} == {"tiny"}
    assert listed["object"] == "list"
    read = Model.model_validate(listed["data"][0])
    assert (read.id, read.object, read.created, read.owned_by) == ("tiny", "model", 12, "laps")
    assert listed["data"][0]["max_model_len"] == 100


ERRORS: list[tuple[Exception, int, str, str | None, type[openai.APIStatusError]]] = [
    (
        RequestError("m", param="p", code="c"),
        400,
        "invalid_request_error",
        "c",
        openai.BadRequestError,
    ),
    (
        RequestError("m", code="invalid_api_key", status=401),
        401,
        "invalid_request_error",
        "invalid_api_key",
        openai.AuthenticationError,
    ),
    (
        RequestError("m", code="model_not_found", status=404),
        404,
        "invalid_request_error",
        "model_not_found",
        openai.NotFoundError,
    ),
    (
        CapacityError("m", status=429),
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
        openai.RateLimitError,
    ),
    (CapacityError("m"), 503, "service_unavailable", "overloaded", openai.InternalServerError),
    (WorkerError("m"), 500, "server_error", None, openai.InternalServerError),
    (NumericsError("m"), 500, "server_error", None, openai.InternalServerError),
    (PoisonedError("m"), 500, "server_error", "poisoned", openai.InternalServerError),
    (TimeoutError("/secret"), 504, "server_error", "timeout", openai.InternalServerError),
    (ConfigError("/secret"), 500, "server_error", None, openai.InternalServerError),
    (KeyError("/secret"), 500, "server_error", None, openai.InternalServerError),
]


@pytest.mark.parametrize(("error", "status", "kind", "code", "client_type"), ERRORS, ids=repr)
def test_errors_reach_the_client_as_its_own_exceptions(
    error: Exception,
    status: int,
    kind: str,
    code: str | None,
    client_type: type[openai.APIStatusError],
) -> None:
    reply = error_reply(error)

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(reply.status, content=reply.body, headers=reply.headers)

    http = httpx.Client(transport=httpx.MockTransport(answer))
    with (
        openai.OpenAI(
            api_key="k", base_url="http://test", max_retries=0, http_client=http
        ) as client,
        pytest.raises(client_type) as caught,
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    assert (caught.value.status_code, caught.value.type, caught.value.code) == (status, kind, code)
    detail = json.loads(reply.body)["error"]
    assert set(detail) == {"message", "type", "param", "code"}
    assert "secret" not in detail["message"]
    assert json.loads(sse_error(error).removeprefix(b"data: ")) == {"error": detail}


@pytest.mark.parametrize(("after_s", "header"), [(0.01, "1"), (1.0, "1"), (1.2, "2"), (30.0, "30")])
def test_retry_after_is_whole_seconds_rounded_up(after_s: float, header: str) -> None:
    reply = error_reply(CapacityError("m", retry_after_s=after_s))
    assert reply.headers == {"Retry-After": header}
    assert error_reply(WorkerError("m")).headers == {}


def test_the_client_library_raises_on_an_error_event() -> None:
    role = ChatChunkChoice(index=0, delta=ChatDelta(role="assistant", content=""))
    first = sse_event(ChatChunk(id="c", created=1, model="m", choices=[role]))
    sent = b"".join([first, sse_error(WorkerError("a worker was lost"))])

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=sent, headers={"content-type": "text/event-stream"})

    http = httpx.Client(transport=httpx.MockTransport(answer))
    with openai.OpenAI(api_key="k", base_url="http://test", http_client=http) as client:
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        )
        with pytest.raises(openai.APIError, match="a worker was lost"):
            list(stream)

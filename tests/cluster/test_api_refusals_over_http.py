"""What the running application refuses: status, parameter and code, before any byte is sent."""

from typing import Any

import httpx
import pytest

from load_tests.testbed.deployed import PATIENCE_S, Application

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT = "import os"
MESSAGES = [{"role": "user", "content": "def main():"}]
TOKENS = 24
VOCAB_SIZE = 3072
MAX_MODEL_LEN = 2048
TOOL = {"type": "function", "function": {"name": "add"}}  # the shipped template knows none
TOO_LONG = [5] * MAX_MODEL_LEN
# (fields over a good body, status, param, code)
SHARED_ROWS: list[tuple[dict[str, Any], int, str | None, str | None]] = [
    ({"model": "other"}, 404, "model", "model_not_found"),
    ({"temperature": 2.1}, 400, "temperature", "decimal_above_max_value"),
    ({"top_p": "x"}, 400, "top_p", "invalid_type"),
    ({"max_tokens": 0}, 400, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": MAX_MODEL_LEN}, 400, "prompt", "context_length_exceeded"),
    ({"n": 17}, 400, "n", "integer_above_max_value"),
    ({"stop": ["a", ""]}, 400, "stop[1]", "empty_string"),
    ({"logit_bias": {"3072": 1}}, 400, "logit_bias", "invalid_value"),
    ({"min_tokens": 30}, 400, "min_tokens", "invalid_value"),
    ({"nonsense": 1}, 400, "nonsense", "unknown_parameter"),
]
COMPLETION_ROWS: list[tuple[dict[str, Any], int, str | None, str | None]] = [
    ({"prompt": ""}, 400, "prompt", "empty_string"),
    ({"prompt": []}, 400, "prompt", "empty_array"),
    ({"prompt": [VOCAB_SIZE]}, 400, "prompt[0]", "invalid_value"),
    ({"prompt": [[1], "a"]}, 400, "prompt[1]", "invalid_type"),
    ({"prompt": TOO_LONG}, 400, "prompt", "context_length_exceeded"),
    ({"prompt": "a b " * MAX_MODEL_LEN}, 400, "prompt", "context_length_exceeded"),
    ({"prompt": ["ok", "a b " * MAX_MODEL_LEN]}, 400, "prompt", "context_length_exceeded"),
    ({"logprobs": 21}, 400, "logprobs", "integer_above_max_value"),
    ({"prompt_logprobs": 21}, 400, "prompt_logprobs", "integer_above_max_value"),
]
CHAT_ROWS: list[tuple[dict[str, Any], int, str | None, str | None]] = [
    ({"messages": []}, 400, "messages", "empty_array"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "x", "content": "x"}]}, 400, "messages[0].role", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": "a b " * MAX_MODEL_LEN}]},
        400,
        "messages",
        "context_length_exceeded",
    ),
    ({"top_logprobs": 2}, 400, "top_logprobs", "invalid_value"),
    ({"tools": [TOOL]}, 400, "tools", "unsupported_parameter"),
    ({"tool_choice": "auto"}, 400, "tool_choice", "invalid_value"),
]
ROWS = [
    *(("completions", *row) for row in (*SHARED_ROWS, *COMPLETION_ROWS)),
    *(("chat/completions", *row) for row in (*SHARED_ROWS, *CHAT_ROWS)),
]


def check_error(answer: httpx.Response, status: int, param: str | None, code: str | None) -> None:
    """OpenAI's error object, whole, and nothing else."""
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)


@pytest.mark.parametrize(("path", "fields", "status", "param", "code"), ROWS)
def test_a_bad_request_is_refused_before_any_byte_unary_and_streamed(
    disaggregated: Application,
    path: str,
    fields: dict[str, Any],
    status: int,
    param: str | None,
    code: str | None,
) -> None:
    good = {"messages": MESSAGES} if path.startswith("chat") else {"prompt": PROMPT}
    if path.startswith("chat") and param == "prompt":
        param = "messages"
    body = {"model": disaggregated.model, "max_tokens": TOKENS} | good | fields
    url = f"{disaggregated.url}/v1/{path}"
    unary = httpx.post(url, json=body, timeout=PATIENCE_S)
    check_error(unary, status, param, code)
    streamed = httpx.post(url, json=body | {"stream": True}, timeout=PATIENCE_S)
    assert (streamed.status_code, streamed.content) == (unary.status_code, unary.content)


def test_a_body_that_is_no_json_or_too_large_is_refused(disaggregated: Application) -> None:
    url = f"{disaggregated.url}/v1/completions"
    for body in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000):
        answer = httpx.post(url, content=body, timeout=PATIENCE_S)
        assert answer.status_code == 400, (body[:10], answer.text[:300])
        assert answer.json()["error"]["type"] == "invalid_request_error"
    limit = disaggregated.config.edge.max_body_bytes
    padded = b'{"model": "m", "prompt": "' + b"x" * limit + b'"}'
    answer = httpx.post(url, content=padded, timeout=PATIENCE_S)
    check_error(answer, 413, None, None)
    pieces = (b"x" * 2**16 for _ in range(limit // 2**16 + 1))  # of a length that nobody claims
    check_error(httpx.post(url, content=pieces, timeout=PATIENCE_S), 413, None, None)


def test_unknown_routes_and_methods_are_error_objects(disaggregated: Application) -> None:
    answer = httpx.get(f"{disaggregated.url}/v1/nothing", timeout=PATIENCE_S)
    check_error(answer, 404, None, "unknown_url")
    answer = httpx.get(f"{disaggregated.url}/v1/completions", timeout=PATIENCE_S)
    check_error(answer, 405, None, "unknown_url")
    assert answer.headers["allow"] == "POST"


def test_a_body_that_says_it_is_no_json_is_refused(disaggregated: Application) -> None:
    body = b'{"model": "' + disaggregated.model.encode() + b'", "prompt": "x"}'
    url = f"{disaggregated.url}/v1/completions"
    headers = {"content-type": "text/plain"}
    answer = httpx.post(url, content=body, headers=headers, timeout=PATIENCE_S)
    check_error(answer, 400, None, "unsupported_content_type")

"""What other servers' users get wrong, one row each: refused before any byte, in OpenAI's words.

From the bytes and the content type of a request to the error object; no HTTP, no workers.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from actors.openai.protocol import parse_chat, parse_completion, resolve_sampling
from actors.openai.request_rules import check_content_type
from actors.openai.response_objects import error_reply
from actors.openai.served_model import ServedModel
from actors.openai.token_requests import parse_detokenize, parse_tokenize
from configs.schema import EdgeConfig
from engine.errors import RequestError
from tests.actors.openai.dialects import DIALECT

MODEL = ServedModel(
    name="tiny", aliases=("small",), max_model_len=100, vocab_size=500, dialect=DIALECT
)
LIMITS = EdgeConfig(max_n=4, max_prompts=3, max_stop=2)
CHAT: dict[str, object] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, object] = {"model": "tiny", "prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "add"}}
WORDY = {"type": "function", "function": {"name": "f", "description": "x" * 1601}}
STRICT: dict[str, Any] = {"type": "function", "function": {"name": "add", "strict": True}}
UNKEPT = {"type": "object", "minProperties": 2}
PROMPT_TOKENS = 60
INVALID = "invalid_request_error"


def chat(body: bytes) -> None:
    resolve_sampling(parse_chat(body, LIMITS, MODEL), PROMPT_TOKENS, MODEL.max_model_len)


def completion(body: bytes) -> None:
    resolve_sampling(parse_completion(body, LIMITS, MODEL), PROMPT_TOKENS, MODEL.max_model_len)


def tokenize(body: bytes) -> None:
    parse_tokenize(body, MODEL)


def detokenize(body: bytes) -> None:
    parse_detokenize(body, MODEL)


Reader = Callable[[bytes], None]
Fields = dict[str, object]
GOOD: dict[Reader, Fields] = {chat: CHAT, completion: TEXT, tokenize: {}, detokenize: {}}
# (what is wrong, who reads it, fields over a good body, param, code)
ROWS: list[tuple[str, Reader, Fields, str, str]] = [
    ("unknown model", chat, {"model": "gone"}, "model", "model_not_found"),
    ("unknown adapter", completion, {"model": "tiny:lora"}, "model", "model_not_found"),
    ("prompt too long", completion, {"prompt": [1] * 100}, "prompt", "context_length_exceeded"),
    (
        "prompt too long, streamed",
        completion,
        {"prompt": [1] * 100, "stream": True},
        "prompt",
        "context_length_exceeded",
    ),
    (
        "prompt and output too long",
        chat,
        {"max_completion_tokens": 41},
        "messages",
        "context_length_exceeded",
    ),
    ("tools too long", chat, {"tools": [WORDY]}, "messages", "context_length_exceeded"),
    ("empty prompt", completion, {"prompt": ""}, "prompt", "empty_string"),
    ("no prompts", completion, {"prompt": []}, "prompt", "empty_array"),
    ("empty ids", completion, {"prompt": [[]]}, "prompt[0]", "empty_array"),
    ("no messages", chat, {"messages": []}, "messages", "empty_array"),
    ("n too big", chat, {"n": 5}, "n", "integer_above_max_value"),
    ("n too small", chat, {"n": 0}, "n", "integer_below_min_value"),
    ("too many prompts", completion, {"prompt": ["a"] * 4}, "prompt", "array_above_max_length"),
    ("too many stops", chat, {"stop": ["a", "b", "c"]}, "stop", "array_above_max_length"),
    ("temperature", chat, {"temperature": -1.5}, "temperature", "decimal_below_min_value"),
    ("top_p", chat, {"top_p": 0.0}, "top_p", "decimal_below_min_value"),
    ("min_p", chat, {"min_p": 1.5}, "min_p", "decimal_above_max_value"),
    ("top_k", chat, {"top_k": -2}, "top_k", "integer_below_min_value"),
    ("penalty", chat, {"presence_penalty": 2.5}, "presence_penalty", "decimal_above_max_value"),
    (
        "repetition",
        chat,
        {"repetition_penalty": 2.5},
        "repetition_penalty",
        "decimal_above_max_value",
    ),
    ("bias beyond the vocabulary", chat, {"logit_bias": {"500": 1}}, "logit_bias", "invalid_value"),
    ("no output", chat, {"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ("no output, no echo", completion, {"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    (
        "fewer than none of each prompt token",
        chat,
        {"prompt_logprobs": -1},
        "prompt_logprobs",
        "integer_below_min_value",
    ),
    (
        "too many of each prompt token",
        completion,
        {"prompt_logprobs": 21},
        "prompt_logprobs",
        "integer_above_max_value",
    ),
    ("unknown field", chat, {"nonsense": 1}, "nonsense", "unknown_parameter"),
    ("top_logprobs alone", chat, {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ("too many tools", chat, {"tools": [TOOL] * 129}, "tools", "array_above_max_length"),
    (
        "a tool of another type",
        chat,
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        "tools[0].type",
        "invalid_value",
    ),
    (
        "a tool without a function",
        chat,
        {"tools": [{"type": "function"}]},
        "tools[0].function",
        "missing_required_parameter",
    ),
    (
        "a tool without a name",
        chat,
        {"tools": [{"type": "function", "function": {}}]},
        "tools[0].function.name",
        "missing_required_parameter",
    ),
    (
        "a name with a space",
        chat,
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "invalid_value",
    ),
    (
        "parameters that are no schema",
        chat,
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}]},
        "tools[0].function.parameters",
        "invalid_type",
    ),
    (
        "a promise about arguments that nothing keeps",
        chat,
        {"tools": [TOOL, STRICT | {"function": STRICT["function"] | {"parameters": UNKEPT}}]},
        "tools[1].function.parameters.minProperties",
        "invalid_value",
    ),
    (
        "bad tool choice",
        chat,
        {"tools": [TOOL], "tool_choice": "maybe"},
        "tool_choice",
        "invalid_value",
    ),
    ("tool choice without tools", chat, {"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    (
        "tools and a regular expression",
        chat,
        {"tools": [TOOL], "structured_outputs": {"regex": "a+"}},
        "structured_outputs",
        "invalid_value",
    ),
    (
        "named call without an end",
        chat,
        {"tools": [TOOL], "tool_choice": TOOL, "ignore_eos": True},
        "ignore_eos",
        "invalid_value",
    ),
    (
        "named call of nothing",
        chat,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "tool_choice",
        "invalid_value",
    ),
    (
        "allowed tools",
        chat,
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.allowed_tools.tools",
        "missing_required_parameter",
    ),
    (
        "an answer to no call",
        chat,
        {"messages": [{"role": "tool", "tool_call_id": "c", "content": "4"}]},
        "messages[0].role",
        "invalid_value",
    ),
    (
        "an answer without its call",
        chat,
        {"messages": [{"role": "tool", "content": "4"}]},
        "messages[0].tool_call_id",
        "missing_required_parameter",
    ),
    (
        "functions of old",
        chat,
        {"functions": [{"name": "f"}]},
        "functions",
        "unsupported_parameter",
    ),
    (
        "a schema without a schema",
        chat,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    (
        "prompt log-probabilities, streamed",
        completion,
        {"prompt_logprobs": 1, "stream": True},
        "prompt_logprobs",
        "invalid_value",
    ),
    (
        "stream options without a stream",
        completion,
        {"stream_options": {"include_usage": True}},
        "stream_options",
        "invalid_value",
    ),
    ("nothing to tokenize", tokenize, {}, "prompt", "missing_required_parameter"),
    (
        "two things to tokenize",
        tokenize,
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "x"},
        "prompt",
        "invalid_value",
    ),
    (
        "tokenize, unknown model",
        tokenize,
        {"model": "gone", "prompt": "hi"},
        "model",
        "model_not_found",
    ),
    (
        "a text is no chat",
        tokenize,
        {"model": "tiny", "prompt": "hi", "add_generation_prompt": True},
        "add_generation_prompt",
        "invalid_value",
    ),
    (
        "far too long to tokenize",
        tokenize,
        {"model": "tiny", "prompt": "x" * 1601},
        "prompt",
        "context_length_exceeded",
    ),
    ("ids of no token", detokenize, {"tokens": [1, 500]}, "tokens[1]", "invalid_value"),
    ("ids that are none", detokenize, {"tokens": ["a"]}, "tokens[0]", "invalid_type"),
    ("too many ids", detokenize, {"tokens": [1] * 101}, "tokens", "array_above_max_length"),
]


def refusal(reader: Reader, body: bytes) -> tuple[int, str, str | None, str | None]:
    """Status, type, param and code of the error object."""
    with pytest.raises(RequestError) as caught:
        reader(body)
    reply = error_reply(caught.value)
    detail = json.loads(reply.body)["error"]
    assert 10 < len(detail["message"]) < 400
    return reply.status, detail["type"], detail["param"], detail["code"]


@pytest.mark.parametrize(
    ("reader", "fields", "param", "code"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_a_wrong_request_is_refused_with_status_parameter_and_code(
    reader: Reader, fields: Fields, param: str, code: str
) -> None:
    status = 404 if code == "model_not_found" else 400
    refused = refusal(reader, json.dumps(GOOD[reader] | fields).encode())
    assert refused == (status, INVALID, param, code)


@pytest.mark.parametrize("reader", GOOD)
def test_a_body_that_is_no_json_is_refused_wherever_it_is_sent(reader: Reader) -> None:
    assert refusal(reader, b'{"model": "tiny",') == (400, INVALID, None, None)


@pytest.mark.parametrize("sent", ["text/plain", "application/x-www-form-urlencoded", "a" * 9000])
def test_a_body_that_says_it_is_something_else_is_refused(sent: str) -> None:
    with pytest.raises(RequestError, match="Content-Type: application/json") as caught:
        check_content_type(sent)
    assert (caught.value.status, caught.value.code) == (400, "unsupported_content_type")
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("sent", [None, "application/json", "Application/JSON; charset=utf-8"])
def test_a_body_that_says_it_is_json_or_nothing_is_read(sent: str | None) -> None:
    check_content_type(sent)


def test_what_the_table_changes_was_right_before() -> None:
    chat(json.dumps(CHAT).encode())
    chat(json.dumps(CHAT | {"tools": [TOOL], "tool_choice": "auto", "model": "small"}).encode())
    completion(json.dumps(TEXT).encode())
    tokenize(json.dumps(CHAT | {"tools": [TOOL]}).encode())
    tokenize(json.dumps(TEXT).encode())
    detokenize(b'{"tokens": [1]}')

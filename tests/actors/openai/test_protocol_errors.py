"""Every way a request can be wrong: status, parameter and code, one row each."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.openai.chat_dialect import ChatDialect, ToolFormat
from actors.openai.protocol import ParsedRequest, parse_chat, parse_completion
from actors.openai.request_bodies import UNSUPPORTED, ChatBody
from actors.openai.response_objects import error_reply
from actors.openai.responses.bodies import ResponsesBody
from actors.openai.served_model import ServedModel
from configs.schema import EdgeConfig
from engine.errors import RequestError

DIALECT = ChatDialect(knows_tools=True, tool_format=ToolFormat.HERMES)
MODEL = ServedModel(name="tiny", max_model_len=100, vocab_size=500, dialect=DIALECT)
LIMITS = EdgeConfig(max_n=4, max_prompts=3, max_stop=2, max_stop_chars=5, max_logit_bias=2)
USER = {"role": "user", "content": "hi"}
BIG = 10**30
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def call(arguments: str) -> dict[str, object]:
    tool_calls = [{"id": "c", "function": {"name": "f", "arguments": arguments}}]
    return {"messages": [{"role": "assistant", "tool_calls": tool_calls}]}


def message(**fields: object) -> dict[str, object]:
    return {"messages": [USER | fields]}


# (fields over a good body, param, code)
SHARED_ROWS: list[tuple[dict[str, object], str | None, str | None]] = [
    ({"model": "other"}, "model", "model_not_found"),
    ({"model": 3}, "model", "invalid_type"),
    ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
    ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": [1]}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "decimal_below_min_value"),
    ({"top_p": 1.01}, "top_p", "decimal_above_max_value"),
    ({"top_k": -2}, "top_k", "integer_below_min_value"),
    ({"top_k": BIG}, "top_k", "integer_above_max_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"min_p": -0.1}, "min_p", "decimal_below_min_value"),
    ({"min_p": 1.1}, "min_p", "decimal_above_max_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    ({"repetition_penalty": 1e-308}, "repetition_penalty", "decimal_below_min_value"),
    ({"repetition_penalty": 2.5}, "repetition_penalty", "decimal_above_max_value"),
    ({"presence_penalty": -2.1}, "presence_penalty", "decimal_below_min_value"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "decimal_above_max_value"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": -5}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": BIG}, "max_tokens", "integer_above_max_value"),
    ({"min_tokens": -1}, "min_tokens", "integer_below_min_value"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 5}, "n", "integer_above_max_value"),
    ({"seed": 2**63}, "seed", "integer_above_max_value"),
    ({"seed": -(2**63) - 1}, "seed", "integer_below_min_value"),
    ({"seed": 0.5}, "seed", "invalid_type"),
    ({"priority": 2**31}, "priority", "integer_above_max_value"),
    ({"stop": 3}, "stop", "invalid_type"),
    ({"stop": ""}, "stop", "empty_string"),
    ({"stop": ["a", ""]}, "stop[1]", "empty_string"),
    ({"stop": ["a", 3]}, "stop[1]", "invalid_type"),
    ({"stop": "123456"}, "stop", "string_above_max_length"),
    ({"stop": ["a", "b", "c"]}, "stop", "array_above_max_length"),
    ({"stop_token_ids": [500]}, "stop_token_ids[0]", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
    ({"stop_token_ids": [1] * 200}, "stop_token_ids", "array_above_max_length"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "decimal_above_max_value"),
    ({"logit_bias": {"1": -101}}, "logit_bias.1", "decimal_below_min_value"),
    ({"logit_bias": {"500": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"01": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": None}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias", "object_above_max_properties"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"stream": True, "stream_options": 1}, "stream_options", "invalid_type"),
    ({"cache_salt": ""}, "cache_salt", "empty_string"),
    ({"cache_salt": "x" * 2000}, "cache_salt", "string_above_max_length"),
    ({"extra_key": ""}, "extra_key", "empty_string"),
    ({"extra_key": "x" * 2000}, "extra_key", "string_above_max_length"),
    ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
    ({"nonsense": 1}, "nonsense", "unknown_parameter"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "invalid_type"),
    ({"prompt_logprobs": BIG}, "prompt_logprobs", "integer_above_max_value"),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
]
CHAT_ROWS: list[tuple[dict[str, object], str | None, str | None]] = [
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [USER] * 3000}, "messages", "array_above_max_length"),
    (message(role="robot"), "messages[0].role", "invalid_value"),
    (message(role=""), "messages[0].role", "invalid_value"),
    (message(content=3), "messages[0].content", "invalid_type"),
    (message(content=None), "messages[0].content", "invalid_type"),
    (message(content=[]), "messages[0].content", "empty_array"),
    (message(content=[7]), "messages[0].content[0]", "invalid_type"),
    (message(content=[{"text": "x"}]), "messages[0].content[0].type", "missing_required_parameter"),
    (
        message(content=[{"type": "text"}]),
        "messages[0].content[0].text",
        "missing_required_parameter",
    ),
    (
        message(content=[{"type": "image_url", "image_url": {"url": "http://x"}}]),
        "messages[0].content[0].type",
        "invalid_value",
    ),
    (message(audio={"id": "a"}), "messages[0].audio", "unsupported_parameter"),
    (message(function_call={}), "messages[0].function_call.name", "missing_required_parameter"),
    (
        message(tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}"}}]),
        "messages[0].tool_calls",
        "invalid_value",
    ),
    (call("not json"), ARGUMENTS, "invalid_value"),
    (call("[1]"), ARGUMENTS, "invalid_value"),
    (call('{"a": NaN}'), ARGUMENTS, "invalid_value"),
    (call('{"a": ' + nested(64) + "}"), ARGUMENTS, "invalid_value"),
    (call('{"a": ' + nested(100_000) + "}"), "messages", "context_length_exceeded"),
    (call(f'{{"a": [{BIG}]}}'), ARGUMENTS, "invalid_value"),
    (message(content="x" * 1601), "messages", "context_length_exceeded"),
    ({"messages": [USER | {"content": "x" * 801}] * 2}, "messages", "context_length_exceeded"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "integer_below_min_value"),
    ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "invalid_value",
    ),
    ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs", "invalid_type"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"x": BIG}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"x": "y" * 2000}}, "chat_template_kwargs", "invalid_value"),
    (
        {"chat_template_kwargs": {f"x{i}": 1 for i in range(40)}},
        "chat_template_kwargs",
        "invalid_value",
    ),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
    ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    ({"functions": []}, "functions", "unsupported_parameter"),
    ({"function_call": "auto"}, "function_call", "unsupported_parameter"),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
        "response_format.json_schema",
        "invalid_value",
    ),
    ({"audio": {}}, "audio", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"prediction": {}}, "prediction.type", "missing_required_parameter"),
    ({"prediction": {"type": "x", "content": "x"}}, "prediction.type", "invalid_value"),
    ({"service_tier": "gold"}, "service_tier", "invalid_value"),
    ({"metadata": {f"k{i}": "v" for i in range(17)}}, "metadata", "object_above_max_properties"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k", "string_above_max_length"),
    ({"include_reasoning": "no"}, "include_reasoning", "invalid_type"),
    ({"reasoning_effort": "endless"}, "reasoning_effort", "invalid_value"),
    ({"verbosity": "low"}, "verbosity", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"moderation": {}}, "moderation", "unsupported_parameter"),
    ({"metadata": {"a": 1}}, "metadata", "invalid_type"),
    ({"store": "x"}, "store", "invalid_type"),
    ({"prompt": "x"}, "prompt", "unknown_parameter"),
]
COMPLETION_ROWS: list[tuple[dict[str, object], str | None, str | None]] = [
    ({"prompt": ""}, "prompt", "empty_string"),
    ({"prompt": []}, "prompt", "empty_array"),
    ({"prompt": [""]}, "prompt[0]", "empty_string"),
    ({"prompt": [[]]}, "prompt[0]", "empty_array"),
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": {}}, "prompt", "invalid_type"),
    ({"prompt": 3}, "prompt", "invalid_type"),
    ({"prompt": [True]}, "prompt[0]", "invalid_type"),
    ({"prompt": [1.5]}, "prompt[0]", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    ({"prompt": ["a", 1]}, "prompt[1]", "invalid_type"),
    ({"prompt": ["a", [1]]}, "prompt[1]", "invalid_type"),
    ({"prompt": [[1], 1]}, "prompt[1]", "invalid_type"),
    ({"prompt": [[1, "a"]]}, "prompt[0][1]", "invalid_type"),
    ({"prompt": [500]}, "prompt[0]", "invalid_value"),
    ({"prompt": [1, -1]}, "prompt[1]", "invalid_value"),
    ({"prompt": [[1], [BIG]]}, "prompt[1][0]", "invalid_value"),
    ({"prompt": ["a"] * 4}, "prompt", "array_above_max_length"),
    ({"prompt": ["a"] * 101}, "prompt", "array_above_max_length"),
    ({"prompt": [1] * 100}, "prompt", "context_length_exceeded"),
    ({"prompt": [1] * 101}, "prompt", "context_length_exceeded"),
    ({"prompt": [[1], [1] * 100]}, "prompt", "context_length_exceeded"),
    ({"prompt": "x" * 1601}, "prompt", "context_length_exceeded"),
    ({"prompt": ["x", "x" * 1601]}, "prompt", "context_length_exceeded"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"logprobs": 21}, "logprobs", "integer_above_max_value"),
    ({"logprobs": -1}, "logprobs", "integer_below_min_value"),
    ({"echo": 1}, "echo", "invalid_type"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"n": 2, "best_of": 1}, "best_of", "invalid_value"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"messages": [USER]}, "messages", "unknown_parameter"),
    ({"tools": []}, "tools", "unknown_parameter"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
]


def parse(endpoint: str, body: bytes) -> ParsedRequest:
    parser = parse_chat if endpoint == "chat" else parse_completion
    return parser(body, LIMITS, MODEL)


def good(endpoint: str) -> dict[str, object]:
    prompt: dict[str, object] = {"messages": [USER]} if endpoint == "chat" else {"prompt": "hi"}
    return {"model": "tiny"} | prompt


def refusal(endpoint: str, body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(endpoint, body)
    return caught.value


def parsed_or_refused(endpoint: str, body: bytes) -> ParsedRequest | RequestError:
    try:
        return parse(endpoint, body)
    except RequestError as error:
        return error


def test_anything_after_the_body_is_refused() -> None:
    for endpoint in ("chat", "completion"):
        body = json.dumps(good(endpoint)).encode()
        assert isinstance(parsed_or_refused(endpoint, body + b" \n"), ParsedRequest)
        assert "could not parse" in refusal(endpoint, body + b" x").message


ROWS = [
    *(("chat", *row) for row in SHARED_ROWS + CHAT_ROWS),
    *(("completion", *row) for row in SHARED_ROWS + COMPLETION_ROWS),
]


@pytest.mark.parametrize(
    ("endpoint", "fields", "param", "code"), ROWS, ids=lambda value: str(value)[:60]
)
def test_a_bad_field_is_refused_by_name(
    endpoint: str, fields: dict[str, object], param: str | None, code: str | None
) -> None:
    error = refusal(endpoint, json.dumps(good(endpoint) | fields).encode())
    assert error.status == (404 if code == "model_not_found" else 400)
    assert (error.param, error.code) == (param, code)
    assert len(error.message) < 500, "a client's own long text must not come back"
    detail = json.loads(error_reply(error).body)["error"]
    assert detail["type"] == "invalid_request_error"
    assert (detail["param"], detail["code"]) == (param, code)


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nul",
        b'{"model": "tiny", "temperature": 1]',
        b'{"model": "tiny", "temperature": NaN}',
        b'{"model": "tiny", "temperature": Infinity}',
        b'{"model": "tiny", "user": "\\ud800"}',
        b'{"model": "tiny", "user": "\\udc00\\ud800"}',
        b'{"model": "tiny", "user": "\xff"}',
        b'{"model": "tiny", "user": "\xed\xa0\x80"}',
        b'{"model": "tiny", "user": "a\x00b"}',
        b"\xef\xbb\xbf{}",
        b"\x00",
    ],
)
def test_a_body_that_is_no_json_is_refused(endpoint: str, body: bytes) -> None:
    error = refusal(endpoint, body)
    assert (error.status, error.param, error.code) == (400, None, None)
    assert error.message.startswith("We could not parse the JSON body of your request")


@pytest.mark.parametrize(
    "text", ["\\ud800", "ab\\uD83D", "\\ud83d is cut", "\\ude00", "\\ud83d\\u0041"]
)
@pytest.mark.parametrize("field", ["user", "early_stopping"])  # the second is read later
def test_half_of_a_surrogate_pair_is_said_to_be_one(field: str, text: str) -> None:
    error = refusal("completion", b'{"prompt": "a", "%s": "%s"}' % (field.encode(), text.encode()))
    assert error.status == 400
    assert "half of a surrogate pair" in error.message
    assert "both halves, or send it as UTF-8" in error.message


def test_a_body_that_is_cut_short_is_not_said_to_have_half_a_pair() -> None:
    assert "truncated" in refusal("completion", b'{"prompt": "\\u00e4').message


@pytest.mark.parametrize("body", [b"[]", b"null", b"3", b'"text"'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    error = refusal("chat", body)
    assert (error.status, error.code) == (400, "invalid_type")
    assert "'body': expected an object" in error.message


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400])
def test_numbers_beyond_floats_are_refused(number: str) -> None:
    body = json.dumps(good("chat"))[:-1] + f', "temperature": {number}}}'
    error = refusal("chat", body.encode())
    assert (error.status, error.param) == (400, "temperature")


@pytest.mark.parametrize(("depth", "is_fine"), [(63, True), (64, False), (300_000, False)])
def test_a_tool_calls_arguments_may_be_64_levels_deep(depth: int, is_fine: bool) -> None:
    body = json.dumps(good("chat") | call('{"a": ' + nested(depth) + "}")).encode()
    roomy = replace(MODEL, max_model_len=100_000)
    if is_fine:
        assert parse_chat(body, LIMITS, roomy).num_choices == 1
        return
    with pytest.raises(RequestError) as caught:
        parse_chat(body, LIMITS, roomy)
    assert caught.value.param == ARGUMENTS


@pytest.mark.parametrize("where", ["model", "messages", "tools", "prompt", "user", "nonsense"])
@pytest.mark.parametrize("depth", [65, 1000, 200_000])
def test_deep_nesting_is_refused_wherever_it_stands(where: str, depth: int) -> None:
    for endpoint in ("chat", "completion"):
        body = good(endpoint) | {where: "DEEP"}
        text = json.dumps(body).replace('"DEEP"', nested(depth))
        assert refusal(endpoint, text.encode()).status == 400


def test_a_missing_field_is_named() -> None:
    error = refusal("chat", b'{"model": "tiny"}')
    assert error.message == "Missing required parameter: 'messages'."
    assert (error.param, error.code) == ("messages", "missing_required_parameter")
    assert refusal("completion", b'{"model": "tiny"}').param == "prompt"


def test_every_unsupported_parameter_is_refused_with_a_foreign_value() -> None:
    for name in UNSUPPORTED:
        if name not in ChatBody.__struct_fields__:
            assert name in ResponsesBody.__struct_fields__
            continue
        error = refusal("chat", json.dumps(good("chat") | {name: {"made": "up"}}).encode())
        assert (error.param, error.code) == (name, "unsupported_parameter")
        error = refusal("chat", json.dumps(good("chat") | {name: "x" * 100_000}).encode())
        assert (error.param, error.code) == (name, "unsupported_parameter")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(
    endpoint=st.sampled_from(["chat", "completion"]),
    fields=st.dictionaries(st.sampled_from(sorted(ChatBody.__struct_fields__)), json_values),
)
def test_any_json_is_either_parsed_or_refused(endpoint: str, fields: dict[str, object]) -> None:
    outcome = parsed_or_refused(endpoint, json.dumps(good(endpoint) | fields).encode())
    if isinstance(outcome, RequestError):
        assert outcome.status in (400, 404)
    else:
        assert outcome.num_choices >= 1


@settings(max_examples=300)
@given(body=st.binary(max_size=40))
def test_any_bytes_are_refused_without_a_crash(body: bytes) -> None:
    assert refusal("chat", body).status == 400

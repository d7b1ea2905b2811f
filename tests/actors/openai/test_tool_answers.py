"""Answers with tool calls and reasoning, judged by the `openai` client's types and accumulator."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import httpx2 as httpx  # what the openai client speaks through
import openai
import pytest
import tokenizers
from openai.types.chat import ChatCompletion
from pydantic import ConfigDict

from actors.openai.chat_dialect import ChatDialect, ToolFormat, build_dialect
from actors.openai.protocol import ParsedRequest, parse_chat
from actors.openai.response_objects import SSE_DONE
from actors.openai.response_parts import ResponseIdentity
from actors.openai.response_writers import build_output_text, build_writer
from actors.openai.served_model import ServedModel
from configs.schema import ApiConfig, EdgeConfig
from engine.messages import TokenizeRequest, TokenRecord
from engine.request import RequestKey
from engine.text.tokenizing import Tokenizing
from tests.harness.tokenizer_folders import byte_level_folder

IDENTITY = ResponseIdentity(request_id="cd" * 16, created_s=1_700_000_000, model="tiny")
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
NOW = {"type": "function", "function": {"name": "now", "description": "what time it is"}}
ARGUMENTS = '{"a": 1, "text": "häuser 鬱"}'
SPECIALS = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"]
TEMPLATES = {
    ToolFormat.HERMES: "{% if tools %}<tool_call>{% endif %}<think>",
    ToolFormat.LLAMA3_JSON: "{% if tools %}<|python_tag|>{% endif %}",
    ToolFormat.MISTRAL: "{% if tools %}[AVAILABLE_TOOLS]{% endif %}",
}
CALLS = {
    ToolFormat.HERMES: (
        f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    ToolFormat.LLAMA3_JSON: (
        f'<|python_tag|>{{"name": "add", "parameters": {ARGUMENTS}}}; {{"name": "now"}}'
    ),
    ToolFormat.MISTRAL: f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
}


class StrictCompletion(ChatCompletion):
    """The client's type, but with wrong types refused instead of coerced."""

    model_config = ConfigDict(strict=True)


@pytest.fixture(scope="module")
def tokenizing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizing:
    """Every marker is one special token, which plain output would hide."""
    folder = byte_level_folder(tmp_path_factory.mktemp("model"))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIALS)
    return Tokenizing(tokenizer, "test")


def dialect(tokenizing: Tokenizing, tool_format: ToolFormat) -> ChatDialect:
    return build_dialect(TEMPLATES[tool_format], ApiConfig(), tokenizing)


def parse(
    tokenizing: Tokenizing, tool_format: ToolFormat = ToolFormat.HERMES, **fields: Any
) -> ParsedRequest:
    model = ServedModel(
        name="tiny",
        max_model_len=5000,
        vocab_size=tokenizing.vocab_size,
        dialect=dialect(tokenizing, tool_format),
    )
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]} | fields
    return parse_chat(json.dumps(body).encode(), EdgeConfig(), model, lambda: 1)


def ids_of(tokenizing: Tokenizing, text: str) -> list[int]:
    (ids,) = tokenizing.encode_batch([text], add_special_tokens=False)
    assert isinstance(ids, list)
    return ids


def respond(
    parsed: ParsedRequest,
    tokenizing: Tokenizing,
    outputs: Sequence[str],
    *,
    prompt: str = "x",
    finish: Literal["stop", "length"] = "stop",
) -> list[bytes]:
    """The whole response to choices whose tokens are those of `outputs`, then the end."""
    writer = build_writer(parsed, IDENTITY, tokenizing)
    sent = writer.start([ids_of(tokenizing, prompt)])
    for child, output in enumerate(outputs):
        text = build_output_text(parsed, tokenizing)
        ids = [*ids_of(tokenizing, output), min(tokenizing.token_bytes.special_ids)]
        for index, token_id in enumerate(ids):
            is_last = index == len(ids) - 1
            record = TokenRecord(
                key=RequestKey(request_id="cd" * 16, child=child),
                index=index,
                token_id=token_id,
                finish=finish if is_last else None,
                stop_token_id=token_id if is_last and finish == "stop" else None,
            )
            sent += writer.delta(child, text.push(record))
    return sent + writer.finish()


def unary(parsed: ParsedRequest, tokenizing: Tokenizing, *outputs: str, **how: Any) -> Any:
    (body,) = respond(replace(parsed, stream=False), tokenizing, outputs, **how)
    return StrictCompletion.model_validate_json(body)


def streamed(parsed: ParsedRequest, tokenizing: Tokenizing, *outputs: str, **how: Any) -> Any:
    """What the client's own accumulator makes of the stream."""
    sent = b"".join(respond(replace(parsed, stream=True), tokenizing, outputs, **how))

    def answer(_: httpx.Request) -> httpx.Response:
        headers = {"content-type": "text/event-stream; charset=utf-8"}
        return httpx.Response(200, content=sent, headers=headers)

    http = httpx.Client(transport=httpx.MockTransport(answer))
    messages: Any = [{"role": "user", "content": "x"}]
    with (
        openai.OpenAI(api_key="k", base_url="http://test", http_client=http) as client,
        client.chat.completions.stream(model="m", messages=messages) as stream,
    ):
        for _ in stream:
            pass
        return stream.get_final_completion()


def events(sent: Sequence[bytes]) -> list[dict[str, Any]]:
    lines = b"".join(sent).decode().split("\n\n")
    assert lines[-2:] == [SSE_DONE.decode().strip(), ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def essence(choice: Any) -> tuple[Any, ...]:
    """A choice without its random ids, the same for both modes."""
    message = choice.message
    calls = [(c.type, c.function.name, c.function.arguments) for c in message.tool_calls or []]
    reasoning = (message.model_extra or {}).get("reasoning_content")
    return message.content or "", reasoning, calls, choice.finish_reason


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_calls_of_every_format_are_the_clients_objects_in_both_modes(
    tokenizing: Tokenizing, tool_format: ToolFormat
) -> None:
    parsed = parse(tokenizing, tool_format, tools=[ADD, NOW])
    assert parsed.tool_format is tool_format
    (choice,) = unary(parsed, tokenizing, CALLS[tool_format]).choices
    expected = [("function", "add", ARGUMENTS), ("function", "now", "{}")]
    assert essence(choice) == ("", None, expected, "tool_calls")
    assert choice.message.content is None
    (seen,) = streamed(parsed, tokenizing, CALLS[tool_format]).choices
    assert essence(seen) == essence(choice)
    for calls in (choice.message.tool_calls, seen.message.tool_calls):
        ids = [call.id for call in calls]
        assert len(set(ids)) == 2
        pattern = "[a-zA-Z0-9]{9}" if tool_format is ToolFormat.MISTRAL else "call_[0-9a-f]{24}"
        assert all(re.fullmatch(pattern, call_id) for call_id in ids)


def test_an_answer_can_be_sent_back_with_the_calls_results(tokenizing: Tokenizing) -> None:
    parsed = parse(tokenizing, tools=[ADD, NOW])
    output = "<think>\nhm</think>\n\nSee:" + CALLS[ToolFormat.HERMES]
    for answer in (unary(parsed, tokenizing, output), streamed(parsed, tokenizing, output)):
        message = answer.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls
        ]
        sent = message.model_dump(exclude={"parsed", "tool_calls"})
        calls = [call.to_dict() for call in message.tool_calls]
        for call in calls:
            call["function"].pop("parsed_arguments", None)  # the accumulator's own
        back = parse(tokenizing, messages=[sent | {"tool_calls": calls}, *results])
        (prompt,) = back.prompts
        assert isinstance(prompt, TokenizeRequest)
        assert prompt.messages is not None
        first = prompt.messages[0]
        assert (first["content"], first["reasoning_content"]) == ("See:", "hm")
        assert prompt.messages[1]["tool_call_id"] == message.tool_calls[0].id


def test_a_streamed_call_has_its_name_first_and_its_arguments_in_pieces(
    tokenizing: Tokenizing,
) -> None:
    parsed = parse(tokenizing, tools=[ADD, NOW], stream=True)
    output = "See:\n" + CALLS[ToolFormat.HERMES]
    deltas = [e["choices"][0]["delta"] for e in events(respond(parsed, tokenizing, [output]))]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == "See:"
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    firsts = [piece for piece in pieces if "id" in piece]
    assert [(p["index"], p["type"], p["function"]["name"]) for p in firsts] == [
        (0, "function", "add"),
        (1, "function", "now"),
    ]
    assert [piece["function"]["arguments"] for piece in firsts] == ["", ""]
    assert pieces.index(firsts[0]) == 0
    others = [piece for piece in pieces if "id" not in piece]
    assert all(set(piece) == {"index", "function"} for piece in others)
    assert all(set(piece["function"]) == {"arguments"} for piece in others)
    assert len([piece for piece in others if piece["index"] == 0]) > 5
    text = "".join(p["function"]["arguments"] for p in others if p["index"] == 0)
    assert text == ARGUMENTS


def test_every_choice_has_calls_of_its_own(tokenizing: Tokenizing) -> None:
    parsed = parse(tokenizing, tools=[ADD, NOW], n=3)
    outputs = [CALLS[ToolFormat.HERMES], "no call", '<tool_call>{"name": "now"}</tool_call>']
    whole = unary(parsed, tokenizing, *outputs)
    assert [c.finish_reason for c in whole.choices] == ["tool_calls", "stop", "tool_calls"]
    assert whole.choices[1].message.tool_calls is None
    seen = streamed(parsed, tokenizing, *outputs)
    assert [essence(c) for c in seen.choices] == [essence(c) for c in whole.choices]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_call_cut_short_is_told_as_far_as_it_went_and_not_as_a_call_to_make(
    tokenizing: Tokenizing, finish: Literal["stop", "length"]
) -> None:
    parsed = parse(tokenizing, tools=[ADD])
    output = '<tool_call>{"name": "add", "arguments": {"a": 1'
    (choice,) = unary(parsed, tokenizing, output, finish=finish).choices
    assert essence(choice) == ("", None, [("function", "add", '{"a": 1')], finish)
    sent = events(respond(replace(parsed, stream=True), tokenizing, [output], finish=finish))
    pieces = [p for e in sent for p in e["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"a": 1'
    assert sent[-1]["choices"][0]["finish_reason"] == finish


def test_calls_after_the_first_are_left_out_when_the_client_wants_one(
    tokenizing: Tokenizing,
) -> None:
    parsed = parse(tokenizing, tools=[ADD, NOW], parallel_tool_calls=False)
    for choice in (
        unary(parsed, tokenizing, CALLS[ToolFormat.HERMES]).choices[0],
        streamed(parsed, tokenizing, CALLS[ToolFormat.HERMES]).choices[0],
    ):
        assert essence(choice) == ("", None, [("function", "add", ARGUMENTS)], "tool_calls")


@pytest.mark.parametrize("fields", [{}, {"tools": [ADD, NOW], "tool_choice": "none"}])
def test_without_tools_the_text_of_a_call_is_text(
    tokenizing: Tokenizing, fields: dict[str, Any]
) -> None:
    text = CALLS[ToolFormat.HERMES]
    parsed = parse(tokenizing, **fields)
    (choice,) = unary(parsed, tokenizing, text).choices
    assert essence(choice) == (text, None, [], "stop")


@pytest.mark.parametrize(
    ("prompt", "output", "reasoning", "content"),
    [
        ("x", "<think>\nso 鬱\n\nyes</think>\n\nFour.", "so 鬱\n\nyes", "Four."),
        ("x<think>\n", "so</think>Four.", "so", "Four."),
        ("x<think>\n\n</think>\n\n", "Four.", None, "Four."),
        ("x", "Four <think>no</think>.", None, "Four <think>no</think>."),
        ("x", "<think>for ever", "for ever", ""),
        ("x", "<think></think>Four.", None, "Four."),
        ("x", " <thi", None, " <thi"),
    ],
)
def test_reasoning_is_a_field_of_its_own_in_both_modes(
    tokenizing: Tokenizing, prompt: str, output: str, reasoning: str | None, content: str
) -> None:
    parsed = parse(tokenizing)
    (choice,) = unary(parsed, tokenizing, output, prompt=prompt).choices
    assert essence(choice) == (content, reasoning, [], "stop")
    assert (choice.message.content is None) == (not content)
    deltas = [
        event["choices"][0]["delta"]
        for event in events(
            respond(replace(parsed, stream=True), tokenizing, [output], prompt=prompt)
        )
    ]
    assert "".join(delta.get("content", "") for delta in deltas) == content
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (reasoning or "")
    assert not any("<think>" in delta.get("reasoning_content", "") for delta in deltas)
    silent = replace(parsed, include_reasoning=False)
    (choice,) = unary(silent, tokenizing, output, prompt=prompt).choices
    assert essence(choice)[:2] == (content, None)


def test_a_model_may_think_and_then_call(tokenizing: Tokenizing) -> None:
    parsed = parse(tokenizing, tools=[ADD, NOW])
    output = "<think>\n<tool_call> is how</think>\n\n" + CALLS[ToolFormat.HERMES]
    (choice,) = unary(parsed, tokenizing, output).choices
    expected = [("function", "add", ARGUMENTS), ("function", "now", "{}")]
    assert essence(choice) == ("", "<tool_call> is how", expected, "tool_calls")


def test_tokens_are_reported_once_each_though_their_text_is_held_back(
    tokenizing: Tokenizing,
) -> None:
    parsed = parse(tokenizing, tools=[ADD, NOW], stream=True, return_token_ids=True)
    output = "See:\n" + CALLS[ToolFormat.HERMES]
    sent = events(respond(parsed, tokenizing, [output]))
    ids = [i for event in sent for i in event["choices"][0].get("token_ids", ())]
    assert ids == [*ids_of(tokenizing, output), min(tokenizing.token_bytes.special_ids)]


def test_other_special_tokens_stay_hidden(tokenizing: Tokenizing) -> None:
    parsed = parse(tokenizing, ToolFormat.MISTRAL, tools=[ADD, NOW])
    assert set(parsed.markers.values()) == {"[TOOL_CALLS]", "[ARGS]"}
    (choice,) = unary(parsed, tokenizing, "a<|im_start|>b<|python_tag|>c").choices
    assert choice.message.content == "abc"
    plain = parse(tokenizing, ToolFormat.MISTRAL)
    (choice,) = unary(plain, tokenizing, "a[TOOL_CALLS]b").choices
    assert choice.message.content == "ab"

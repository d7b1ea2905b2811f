"""/v1/messages, read back through the types of the `anthropic` client."""

import json
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from actors.anthropic.reading import parse_count_tokens, parse_messages
from actors.openai.protocol import ParsedRequest
from actors.openai.served_model import ServedModel
from configs.schema import EdgeConfig
from engine.errors import RequestError
from engine.messages import TokenizeRequest
from engine.text.tokenizing import Tokenizing, load_tokenizer
from tests.actors.ingress.edge_app import MODEL_FOLDER, EdgeApp, edge_app
from tests.actors.openai.dialects import DIALECT
from tests.actors.openai.saying import say

MODEL = ServedModel(name="tiny", max_model_len=400, vocab_size=3000, dialect=DIALECT)
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "now", "description": "d", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>'
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def tokenizing() -> Tokenizing:
    return load_tokenizer(MODEL_FOLDER)


def parse(**fields: Any) -> ParsedRequest:
    body = json.dumps({"messages": [USER], "max_tokens": 50} | fields).encode()
    return parse_messages(body, EdgeConfig(), MODEL, lambda: 1)


def messages(**fields: Any) -> list[dict[str, object]]:
    (prompt,) = parse(**fields).prompts
    assert isinstance(prompt, TokenizeRequest)
    assert prompt.messages is not None
    return prompt.messages


# ---- requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["The answer is (", [{"type": "text", "text": "The"}]])
def test_an_answer_goes_on_in_a_last_message_of_the_assistant(content: object) -> None:
    sent = {"messages": [USER, {"role": "assistant", "content": content}]}
    (prompt,) = parse(**sent).prompts
    counted = parse_count_tokens(json.dumps(sent).encode(), MODEL)
    for asked in (prompt, counted):
        assert isinstance(asked, TokenizeRequest)
        assert asked.continue_final_message
        assert not asked.add_generation_prompt


@pytest.mark.parametrize(
    "answer",
    [
        "",
        " \n",
        [{"type": "thinking", "thinking": "hm", "signature": "s"}],
        [
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "t", "name": "now", "input": {}},
        ],
    ],
)
def test_a_last_message_without_text_to_go_on_in_is_one_of_many(answer: object) -> None:
    (prompt,) = parse(messages=[USER, {"role": "assistant", "content": answer}]).prompts
    assert isinstance(prompt, TokenizeRequest)
    assert prompt.add_generation_prompt
    assert not prompt.continue_final_message


def test_blocks_become_messages() -> None:
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "now", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "1", "is_error": False},
                {"type": "tool_result", "tool_use_id": "t2"},
                {"type": "text", "text": "c"},
            ],
        },
    ]
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "now", "arguments": {"x": 1}}},
        {"id": "t2", "type": "function", "function": {"name": "now", "arguments": {}}},
    ]
    system = [{"type": "text", "text": "x", "cache_control": {}}, {"type": "text", "text": "y"}]
    assert messages(messages=sent, system=system) == [
        {"role": "system", "content": "x\ny"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "t1"},
        {"role": "tool", "content": "", "tool_call_id": "t2"},
        {"role": "user", "content": "c"},
    ]


def test_options_become_those_of_a_chat() -> None:
    parsed = parse(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x"], stream=True)
    assert (parsed.max_tokens, parsed.stops, parsed.stream) == (50, ("x",), True)
    params = parsed.sampling
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    (prompt,) = parse(thinking={"type": "enabled", "budget_tokens": 1024}).prompts
    assert isinstance(prompt, TokenizeRequest)
    assert prompt.chat_template_kwargs == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("choice", "must_call", "parallel"),
    [
        (None, False, True),
        ({"type": "auto"}, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "now"}, True, True),
    ],
)
def test_tools_are_read(choice: object, must_call: bool, parallel: bool) -> None:
    parsed = parse(tools=[TOOL], tool_choice=choice)
    assert parsed.tool_names == {"now"}
    assert parsed.holds_calls == must_call
    assert parsed.parallel_tool_calls == parallel
    assert not parse(tools=[TOOL], tool_choice={"type": "none"}).tool_names


def test_a_format_holds_the_text() -> None:
    output_format = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": output_format}}, {"output_format": output_format}):
        assert parse(**fields).sampling.constraint is not None


def test_what_agents_add_is_ignored() -> None:
    added = {"context_management": {"edits": []}, "metadata": {"user_id": "u"}, "betas": ["x"]}
    assert parse(**added) == parse()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        (
            # No call came before it; where it stands among a chat's messages says nothing.
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}
                ]
            },
            "messages",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert "'stop" not in caught.value.message.replace("'stop_sequences'", "")


def test_the_prompt_that_is_counted_is_the_one_that_is_asked() -> None:
    fields = {"tools": [TOOL], "system": "s", "messages": [USER]}
    counted = parse_count_tokens(json.dumps(fields).encode(), MODEL)
    assert [counted] == parse(**fields).prompts


# ---- answers ------------------------------------------------------------------------------------


def test_an_answer_is_the_clients_object(tokenizing: Tokenizing) -> None:
    (body,) = say(parse(tools=[TOOL]), tokenizing, f"text{CALL}", finish="stop")
    read = Message.model_validate_json(body)
    assert (read.type, read.role, read.model, read.stop_reason) == (
        "message",
        "assistant",
        "tiny",
        "tool_use",
    )
    text, call = read.content
    assert text.type == "text"
    assert text.text == "text"
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("now", {"x": 1})
    assert (read.usage.input_tokens, read.usage.cache_read_input_tokens) == (1, 2)


@pytest.mark.parametrize(
    ("fields", "finish", "reason", "sequence"),
    [
        ({}, "stop", "end_turn", None),
        ({}, "length", "max_tokens", None),
        ({"stop_sequences": ["wor"]}, "stop", "stop_sequence", "wor"),
    ],
)
def test_an_answer_says_why_it_ended(
    fields: dict[str, Any], finish: Any, reason: str, sequence: str | None, tokenizing: Tokenizing
) -> None:
    (body,) = say(parse(**fields), tokenizing, "some words", finish=finish)
    read = Message.model_validate_json(body)
    assert (read.stop_reason, read.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize("text", [f"text{CALL}", f"a{CALL}\n{CALL}", "words only", CALL, ""])
def test_a_streams_events_build_the_same_message(text: str, tokenizing: Tokenizing) -> None:
    whole = json.loads(say(parse(tools=[TOOL]), tokenizing, text, finish="stop")[0])
    sent = say(parse(tools=[TOOL], stream=True), tokenizing, text, finish="stop")
    built: list[dict[str, Any]] = []
    is_open = False
    kinds = []
    for event in sent:
        name, _, line = event.decode().partition("\n")
        data = json.loads(line.removeprefix("data: "))
        EVENT.validate_python(data)
        assert name == f"event: {data['type']}"
        kinds.append(data["type"])
        match data["type"]:
            case "content_block_start":
                assert data["index"] == len(built)
                assert not is_open
                built.append(data["content_block"] | {"pieces": []})
                is_open = True
            case "content_block_delta":
                assert is_open
                delta = data["delta"]
                built[data["index"]]["pieces"].append(delta.get("text", delta.get("partial_json")))
            case "content_block_stop":
                is_open = False
            case "message_delta":
                assert data["delta"]["stop_reason"] == whole["stop_reason"]
                assert data["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert not is_open
    assert len(built) == len(whole["content"])
    for block, expected in zip(built, whole["content"], strict=True):
        joined = "".join(block["pieces"])
        if expected["type"] == "tool_use":
            assert json.loads(joined) == expected["input"]
        else:
            assert joined == expected["text"]


def test_thinking_is_a_block_of_its_own(tokenizing: Tokenizing) -> None:
    thinking = replace(parse(), splits_reasoning=True)
    (body,) = say(thinking, tokenizing, "<think>hm</think>so", finish="stop")
    first, second = Message.model_validate_json(body).content
    assert first.type == "thinking"
    assert first.thinking == "hm"
    assert second.type == "text"
    assert second.text == "so"


# ---- over the application -----------------------------------------------------------------------


def client_of(app: EdgeApp, key: str = "none") -> anthropic.AsyncAnthropic:
    transport = httpx2.ASGITransport(app=app.app, raise_app_exceptions=False)
    return anthropic.AsyncAnthropic(
        api_key=key,
        base_url="http://127.0.0.1:8000",
        http_client=httpx2.AsyncClient(transport=transport),
        max_retries=0,
    )


def test_the_client_gets_answers_streams_counts_and_errors() -> None:
    app = edge_app()
    client = client_of(app)

    async def main(_: httpx.AsyncClient) -> None:
        asked: dict[str, Any] = {"model": "tiny", "messages": [USER]}
        answer = await client.messages.create(**asked, max_tokens=4)
        assert answer.stop_reason == "max_tokens"
        assert answer.usage.output_tokens == 4
        async with client.messages.stream(**asked, max_tokens=4) as stream:
            streamed = await stream.get_final_message()
        said = [block.to_dict() for block in answer.content]
        assert [{"citations": None} | block.to_dict() for block in streamed.content] == [
            {"citations": None} | block for block in said
        ]
        counted = await client.messages.count_tokens(**asked)
        assert counted.input_tokens == answer.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(**asked | {"model": "gone"}, max_tokens=1)
        assert caught.value.body == {
            "type": "error",
            "error": {"type": "not_found_error", "message": "The model `gone` does not exist"},
        }

    app.ask(main)


def test_the_clients_own_header_holds_the_key() -> None:
    digest = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"  # SHA-256 of "key"
    app = edge_app({"api.keys": {"somebody": digest}})

    async def main(_: httpx.AsyncClient) -> None:
        asked: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 1}
        await client_of(app, "key").messages.create(**asked)
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client_of(app, "other").messages.create(**asked)
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]

    app.ask(main)


def test_a_thread_is_refused_so_that_the_client_sends_the_whole_conversation() -> None:
    app = edge_app()
    client = client_of(app)

    async def main(_: httpx.AsyncClient) -> None:
        thread = client.beta.messages.thread(
            model="tiny", max_tokens=4, unsupported_request_behavior="continue_unthreaded"
        )
        first = await thread.send({"role": "user", "content": "hi"})
        second = await thread.send({"role": "user", "content": "and again"})
        assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
        asked: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 1}
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**asked, extra_body={"thread": {"type": "create"}})
        assert caught.value.body["error"]["details"] == {  # type: ignore[index]
            "error_code": "thread_unsupported_request"
        }

    app.ask(main)

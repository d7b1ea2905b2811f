"""/v1/responses, read back through the types of the `openai` client."""

import json
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.responses import Response
from pydantic import TypeAdapter

from actors.openai.chat_dialect import ToolFormat
from actors.openai.protocol import ParsedRequest
from actors.openai.request_bodies import Message
from actors.openai.responses.reading import parse_responses
from actors.openai.responses.stored import StoredResponse, StoredResponses
from actors.openai.served_model import ServedModel
from configs.schema import EdgeConfig
from engine.errors import RequestError
from engine.messages import TokenizeRequest
from engine.text.tokenizing import Tokenizing, load_tokenizer
from tests.actors.ingress.edge_app import MODEL_FOLDER, edge_app
from tests.actors.openai.clients import client_of
from tests.actors.openai.dialects import DIALECT
from tests.actors.openai.saying import say

MODEL = ServedModel(name="tiny", max_model_len=400, vocab_size=3000, dialect=DIALECT)
TOOL = {"type": "function", "name": "now", "parameters": {"type": "object"}}
EVENT: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)
CALL = '<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizing() -> Tokenizing:
    return load_tokenizer(MODEL_FOLDER)


def parse(stored: StoredResponses | None = None, **fields: Any) -> ParsedRequest:
    body = json.dumps({"input": "hi"} | fields).encode()
    own = (stored or StoredResponses(0)).of("")
    return parse_responses(body, EdgeConfig(), MODEL, own, lambda: 1)


def messages(stored: StoredResponses | None = None, **fields: Any) -> list[dict[str, object]]:
    (prompt,) = parse(stored, **fields).prompts
    assert isinstance(prompt, TokenizeRequest)
    assert prompt.messages is not None
    return prompt.messages


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    return caught.value


def read_events(sent: list[bytes]) -> list[Any]:
    """Events through the client's types; their order is checked by number and by name."""
    events = []
    for number, event in enumerate(sent):
        name, _, data = event.decode().partition("\n")
        decoded = json.loads(data.removeprefix("data: "))
        assert decoded["sequence_number"] == number
        assert name == f"event: {decoded['type']}"
        events.append(EVENT.validate_python(decoded))
    return events


# ---- requests -----------------------------------------------------------------------------------


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "2"}],
        },
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {}}},
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {"x": 1}}},
    ]
    assert messages(input=items, instructions="first") == [
        {"role": "system", "content": "first"},
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
    ]


def test_options_become_those_of_a_chat() -> None:
    parsed = parse(max_output_tokens=7, temperature=0.5, top_p=0.9, stream=True, seed=3)
    assert parsed.max_tokens == 7
    assert parsed.stream
    params = parsed.sampling
    assert (params.temperature, params.top_p, params.seed) == (0.5, 0.9, 3)
    logged = parse(include=["message.output_text.logprobs"], top_logprobs=2)
    assert logged.sampling.logprobs == 2
    (cut,) = parse(truncation="auto", max_output_tokens=100).prompts
    assert isinstance(cut, TokenizeRequest)
    assert cut.max_tokens == 300


def test_a_choice_among_no_tools_is_neutral_unless_it_asks_for_one() -> None:
    for choice in ("auto", "none"):
        assert parse(tool_choice=choice).tool_format is None
    assert refusal(tool_choice="required").param == "tool_choice"


def test_tools_are_read() -> None:
    parsed = parse(tools=[TOOL], tool_choice={"type": "function", "name": "now"})
    assert parsed.tool_names == {"now"}
    assert parsed.holds_calls
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [TOOL]}
    assert parse(tools=[TOOL], tool_choice=allowed).holds_calls
    assert not parse(tools=[TOOL]).holds_calls


def test_a_format_holds_the_text() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    held = parse(text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
    assert held.sampling.constraint is not None
    assert parse(text={"format": {"type": "text"}}).sampling.constraint is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["everything"]}, "include[0]"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"nonsense": 1}, "nonsense"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    error = refusal(**fields)
    if param is not None:
        assert error.param == param
        assert "messages[" not in error.message
        assert "max_completion_tokens" not in error.message


# ---- answers ------------------------------------------------------------------------------------


def test_what_is_no_id_is_told_from_what_is_gone() -> None:
    assert (
        refusal(previous_response_id="resp_1").status,
        refusal(previous_response_id="1").status,
    ) == (404, 400)


def test_an_answer_is_the_clients_object(tokenizing: Tokenizing) -> None:
    parsed = parse(metadata={"a": "b"}, tools=[TOOL], max_output_tokens=9)
    (body,) = say(parsed, tokenizing, f"text{CALL}", finish="stop")
    read = Response.model_validate_json(body)
    assert read.output_text == "text"
    assert (read.status, read.model, read.metadata) == ("completed", "tiny", {"a": "b"})
    message, call = read.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("now", {"x": 1}, "completed")
    assert message.type == "message"
    assert read.usage is not None
    assert read.usage.total_tokens == read.usage.input_tokens + read.usage.output_tokens
    assert read.usage.input_tokens_details.cached_tokens == 2
    assert json.loads(body)["max_output_tokens"] == 9


def test_an_answer_shows_its_tokens_if_asked(tokenizing: Tokenizing) -> None:
    for asked, stream in ((True, False), (True, True), (False, False)):
        parsed = parse(input="hi", enable_response_messages=asked, stream=stream)
        sent = say(parsed, tokenizing, "hello", finish="stop")
        last = json.loads(sent[-1].partition(b"data: ")[2] if stream else sent[-1])
        answer = last["response"] if stream else last
        if not asked:
            assert "input_messages" not in answer
            continue
        (read,), (written,) = answer["input_messages"], answer["output_messages"]
        assert (read["type"], read["tokens"]) == ("raw_message_tokens", [1, 2, 3])
        assert read["message"] == tokenizing.decode([1, 2, 3], skip_special_tokens=False)
        assert written["message"].startswith("hello")
        assert written["message"] == tokenizing.decode(written["tokens"], skip_special_tokens=False)


def test_a_cut_answer_is_incomplete(tokenizing: Tokenizing) -> None:
    (body,) = say(parse(), tokenizing, "tex", finish="length")
    read = Response.model_validate_json(body)
    assert read.status == "incomplete"
    assert read.incomplete_details is not None
    assert read.incomplete_details.reason == "max_output_tokens"


def test_an_answer_without_text_has_an_empty_message(tokenizing: Tokenizing) -> None:
    (body,) = say(parse(), tokenizing, "", finish="stop")
    assert Response.model_validate_json(body).output_text == ""


@pytest.mark.parametrize("text", [f"text{CALL}", f"a{CALL}\n{CALL}", "words only", CALL])
def test_a_streams_events_are_in_order_and_say_what_the_answer_says(
    text: str, tokenizing: Tokenizing
) -> None:
    whole = json.loads(say(parse(tools=[TOOL]), tokenizing, text, finish="stop")[0])
    events = read_events(say(parse(tools=[TOOL], stream=True), tokenizing, text, finish="stop"))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    last = events[-1].response
    assert [item.type for item in last.output] == [item["type"] for item in whole["output"]]
    open_items: set[int] = set()
    said: dict[int, str] = {}
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            open_items.add(event.output_index)
            said[event.output_index] = ""
        else:
            assert event.output_index in open_items
        if event.type.endswith(".delta"):
            said[event.output_index] += event.delta
        if event.type == "response.output_item.done":
            open_items.remove(event.output_index)
            item = event.item
            done = item.arguments if item.type == "function_call" else item.content[0].text
            assert said[event.output_index] == done
            assert event.item.model_dump() == last.output[event.output_index].model_dump()
    assert not open_items


def test_thinking_is_an_item_of_its_own(tokenizing: Tokenizing) -> None:
    parsed = parse(stream=True)
    thinking = replace(parsed, splits_reasoning=True)
    events = read_events(say(thinking, tokenizing, "<think>hm</think>so", finish="stop"))
    reasoning, message = events[-1].response.output
    assert reasoning.content[0].text == "hm"
    assert message.content[0].text == "so"
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens > 0
    assert "response.reasoning_text.delta" in [event.type for event in events]


def test_logprobs_are_of_the_text(tokenizing: Tokenizing) -> None:
    parsed = parse(include=["message.output_text.logprobs"], top_logprobs=1)
    (body,) = say(parsed, tokenizing, "some words", finish="stop")
    (part,) = json.loads(body)["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == "some words"


# ---- over the application -----------------------------------------------------------------------


def test_a_conversation_goes_on_from_a_stored_response() -> None:
    app = edge_app()
    client = client_of(app)

    async def main(_: httpx.AsyncClient) -> None:
        first = await client.responses.create(model="tiny", input="one", max_output_tokens=3)
        assert first.store
        again = await client.responses.retrieve(first.id)
        assert again == first
        second = await client.responses.create(
            model="tiny", input="two", previous_response_id=first.id, max_output_tokens=3
        )
        assert second.previous_response_id == first.id
        alone = await client.responses.create(model="tiny", input="two", store=False)
        assert second.usage is not None
        assert alone.usage is not None
        assert second.usage.input_tokens > alone.usage.input_tokens
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(alone.id)
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="never stored"):
            await client.responses.create(input="x", previous_response_id=first.id)

    app.ask(main)


def test_a_stream_over_the_application_ends_as_it_should() -> None:
    app = edge_app()
    client = client_of(app)

    async def main(_: httpx.AsyncClient) -> None:
        stream = await client.responses.create(input="one", max_output_tokens=3, stream=True)
        kinds = [event.type async for event in stream]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.incomplete"

    app.ask(main)


def test_a_stored_response_travels_as_it_is() -> None:
    stored = StoredResponses(max_bytes=10_000)
    said = [
        {"role": "user", "content": [{"type": "text", "text": "hé"}], "name": "x"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": []},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    messages = msgspec.json.decode(json.dumps(said), type=list[Message])
    stored.keep("", "resp_1", b'{"id": "resp_1"}', messages)
    found = stored.find("", "resp_1")
    assert found is not None
    again = StoredResponse.decoded(found.encoded())
    assert again.encoded() == found.encoded()
    assert again.body == found.body
    assert [bytes(one.reasoning) for one in again.messages] == [b"", b'"hm"', b""]
    assert [one.content for one in again.messages] == [one.content for one in messages]


def test_stored_responses_are_bounded_by_bytes() -> None:
    stored = StoredResponses(max_bytes=1000)
    own = stored.of("alice")
    for number in range(50):
        own.keep(f"resp_{number}", b"x" * 150, [])
        assert stored.num_bytes <= 1000
    assert own.body("resp_49") == b"x" * 150
    with pytest.raises(RequestError, match="not found"):
        own.body("resp_0")
    own.keep("large", b"x" * 2000, [])
    with pytest.raises(RequestError):
        own.body("large")
    with pytest.raises(RequestError, match="stores none"):
        StoredResponses(0).of("alice").conversation("resp_0")


def test_every_format_of_calls_is_read(tokenizing: Tokenizing) -> None:
    parsed = parse(tools=[TOOL])
    llama = replace(parsed, tool_format=ToolFormat.LLAMA3_JSON)
    said = '{"name": "now", "parameters": {"x": 1}}'
    (call,) = json.loads(say(llama, tokenizing, said, finish="stop")[0])["output"]
    assert (call["type"], call["name"]) == ("function_call", "now")


def test_no_client_chooses_the_id_of_a_response() -> None:
    assert parse(request_id="known").request_id is None

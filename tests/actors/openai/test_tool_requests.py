"""Requests with tools and with OpenAI's smaller fields: what of them reaches prompt and answer."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.openai.chat_dialect import ChatDialect, ToolFormat
from actors.openai.protocol import ParsedRequest, parse_chat, parse_completion
from actors.openai.request_rules import MAX_SALT_CHARS, read_cache_identity
from actors.openai.served_model import ServedModel
from configs.schema import EdgeConfig
from engine.errors import RequestError
from engine.messages import TokenizeRequest, decode, encode
from tests.actors.openai.dialects import DIALECT

MODEL = ServedModel(
    name="tiny", aliases=("small",), max_model_len=100, vocab_size=500, dialect=DIALECT
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FULL = {"type": "function", "function": {"name": "a-b_1", "description": "d", "parameters": SCHEMA}}
BARE = {"type": "function", "function": {"name": "now", "strict": False}}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"x": 1}'}}


def chat(model: ServedModel = MODEL, **fields: Any) -> ParsedRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat(json.dumps(body).encode(), EdgeConfig(), model, lambda: 1)


def variables(parsed: ParsedRequest) -> dict[str, object]:
    (prompt,) = parsed.prompts
    assert isinstance(prompt, TokenizeRequest)
    assert decode(encode(prompt), TokenizeRequest) == prompt
    return prompt.chat_template_kwargs


def refusal(model: ServedModel = MODEL, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat(model, **fields)
    return caught.value


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}])
def test_tools_reach_the_template_and_the_answers_parser(choice: dict[str, Any]) -> None:
    parsed = chat(tools=[FULL, BARE], **choice)
    bare = {"name": "now", "parameters": {"type": "object", "properties": {}}}
    assert variables(parsed) == {"tools": [FULL, {"type": "function", "function": bare}]}
    assert parsed.tool_names == {"a-b_1", "now"}
    assert parsed.tool_format is ToolFormat.HERMES
    assert parsed.parallel_tool_calls


def test_tool_choice_none_tells_the_model_of_no_tools() -> None:
    assert chat(tools=[FULL], tool_choice="none") == chat()
    assert chat(tool_choice="none") == chat()


def test_only_one_call_may_be_asked_for() -> None:
    assert not chat(tools=[FULL], parallel_tool_calls=False).parallel_tool_calls


def test_a_model_whose_template_knows_no_tools_refuses_them_and_their_messages() -> None:
    plain = replace(MODEL, dialect=ChatDialect())
    error = refusal(plain, tools=[FULL])
    assert (error.param, error.code) == ("tools", "unsupported_parameter")
    assert "chat template knows no tools" in error.message
    user = {"role": "user", "content": "x"}
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert refusal(plain, messages=[user, calling]).param == "messages[1]"
    chat(messages=[user, calling, {"role": "tool", "tool_call_id": "c1", "content": "4"}])


def test_a_model_whose_calls_nothing_reads_refuses_tools() -> None:
    error = refusal(replace(MODEL, dialect=ChatDialect(knows_tools=True)), tools=[FULL])
    assert error.code == "unsupported_parameter"
    assert "api.tool_parser" in error.message


def test_an_answer_belongs_to_a_call_before_it() -> None:
    calling = {"role": "assistant", "tool_calls": [CALL]}
    error = refusal(messages=[calling, {"role": "tool", "tool_call_id": "c2", "content": "4"}])
    assert error.param == "messages[1].tool_call_id"


def test_reasoning_can_be_left_out_of_the_answer() -> None:
    thinking = replace(
        MODEL, dialect=ChatDialect(splits_reasoning=True, reasoning_markers={7: "x"})
    )
    assert chat(thinking).splits_reasoning
    assert chat(thinking).include_reasoning
    assert chat(thinking).markers == {7: "x"}
    assert not chat(thinking, include_reasoning=False).include_reasoning
    assert not chat().splits_reasoning


def test_effort_reaches_a_template_that_knows_it() -> None:
    knowing = replace(MODEL, dialect=ChatDialect(knows_reasoning_effort=True))
    assert variables(chat(knowing, reasoning_effort="low")) == {"reasoning_effort": "low"}
    assert variables(chat(knowing, chat_template_kwargs={"enable_thinking": False})) == {
        "enable_thinking": False
    }


def test_effort_without_a_place_for_it_switches_thinking_or_has_no_effect() -> None:
    switching = replace(MODEL, dialect=ChatDialect(knows_enable_thinking=True))
    for effort, thinks in (("none", False), ("low", True), ("max", True)):
        assert variables(chat(switching, reasoning_effort=effort)) == {"enable_thinking": thinks}
    own = {"enable_thinking": True}
    assert variables(chat(switching, reasoning_effort="none", chat_template_kwargs=own)) == own
    assert variables(chat(reasoning_effort="high")) == {}


def test_a_client_cannot_set_tools_past_the_checks() -> None:
    assert refusal(chat_template_kwargs={"tools": "x"}).param == "chat_template_kwargs"


def test_a_request_may_use_any_served_name() -> None:
    assert chat(model=MODEL).model == "tiny"
    body = json.dumps({"model": "small", "prompt": "x"}).encode()
    assert parse_completion(body, EdgeConfig(), MODEL).model == "small"


salts = st.none() | st.text(min_size=1, max_size=4) | st.sampled_from(["\0", "\x001:a", "1:a"])


@given(first=st.tuples(salts, salts), second=st.tuples(salts, salts))
def test_prefixes_are_shared_only_by_requests_with_the_same_salt_and_key(
    first: tuple[str | None, str | None], second: tuple[str | None, str | None]
) -> None:
    same = [(salt or "", key or "") for salt, key in (first, second)]
    equal = read_cache_identity(*first) == read_cache_identity(*second)
    assert equal == (same[0] == same[1])


def test_a_salt_alone_stays_what_it_was() -> None:
    assert chat(cache_salt="tenant").spec.salt == "tenant"
    assert chat().spec.salt == ""
    assert chat(extra_key="k" * MAX_SALT_CHARS).spec.salt not in ("", "k" * MAX_SALT_CHARS)

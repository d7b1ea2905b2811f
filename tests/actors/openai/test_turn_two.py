"""What clients send back on turn two: messages as other servers and libraries write them."""

import json
from typing import Any

import pytest

from actors.openai.protocol import ParsedRequest, parse_chat, parse_completion
from actors.openai.served_model import ServedModel
from configs.schema import EdgeConfig
from engine.errors import RequestError
from engine.messages import TokenizeRequest
from tests.actors.openai.dialects import DIALECT

MODEL = ServedModel(name="tiny", max_model_len=100, vocab_size=500, dialect=DIALECT)
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"x": 1}'}}
READ_CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"x": 1}}}


def chat(limits: EdgeConfig | None = None, **fields: Any) -> ParsedRequest:
    body = {"messages": [USER]} | fields
    return parse_chat(json.dumps(body).encode(), limits or EdgeConfig(), MODEL, lambda: 1)


def read(*messages: dict[str, object]) -> list[dict[str, object]]:
    (prompt,) = chat(messages=[*messages]).prompts
    assert isinstance(prompt, TokenizeRequest)
    assert prompt.messages is not None
    return prompt.messages


def test_an_answer_as_litellm_keeps_it_can_be_sent_back() -> None:
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL | {"provider_specific_fields": {"a": 1}, "cache_control": None}],
        "function_call": None,
        "provider_specific_fields": {"refusal": None},
        "reasoning_content": "hm",
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
        "id": "msg_1",
        "annotations": [],
        "audio": None,
    }
    result = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": "4",
        "name": "now",
        "is_error": False,
    }
    assert read(USER, answer, result) == [
        USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [READ_CALL],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4", "name": "now"},
    ]


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": []}, ""),
        ({"content": None, "refusal": "I will not"}, "I will not"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": [{"type": "output_text", "text": "yes", "annotations": []}]}, "yes"),
        ({"content": ["a", {"type": "text", "text": "b", "cache_control": {}}]}, "a\nb"),
        ({"content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "b"}]}, "b"),
    ],
)
def test_an_assistants_content_may_take_any_of_its_shapes(
    answer: dict[str, object], content: str
) -> None:
    assert read(USER, {"role": "assistant"} | answer) == [
        USER,
        {"role": "assistant", "content": content},
    ]


@pytest.mark.parametrize(
    ("reasoning", "expected"),
    [("hm", {"reasoning_content": "hm"}), ({"effort": 1}, {}), (None, {})],
)
def test_reasoning_under_vllms_name_reaches_the_template(
    reasoning: object, expected: dict[str, object]
) -> None:
    sent = {"role": "assistant", "content": "a", "reasoning": reasoning}
    assert read(USER, sent)[1] == {"role": "assistant", "content": "a"} | expected


@pytest.mark.parametrize("arguments", ["", "null", None, "{}", {}])
def test_a_call_without_arguments_has_none(arguments: object) -> None:
    call = {"id": "c1", "function": {"name": "now", "arguments": arguments}}
    (_, message) = read(USER, {"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {}}}
    ]


@pytest.mark.parametrize("arguments", ["[1]", "{", "7", "x"])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    call = {"id": "c1", "function": {"name": "now", "arguments": arguments}}
    with pytest.raises(RequestError) as caught:
        read(USER, {"role": "assistant", "tool_calls": [call]})
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_a_function_call_of_old_is_a_tool_call() -> None:
    calling = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    answer = {"role": "function", "name": "now", "content": "4"}
    first, second = read(USER, calling, answer)[1:]
    assert first["tool_calls"] == [READ_CALL | {"id": "call_1"}]
    assert second == {"role": "tool", "tool_call_id": "call_1", "content": "4", "name": "now"}
    with pytest.raises(RequestError):
        read(USER, answer)


def test_a_field_beside_the_messages_stays_unknown() -> None:
    with pytest.raises(RequestError) as caught:
        chat(provider_specific_fields={})
    assert caught.value.code == "unknown_parameter"


# ---- vLLM's fields of bodies --------------------------------------------------------------------


def test_no_model_means_the_served_one() -> None:
    assert chat().model == "tiny"
    assert parse_completion(b'{"prompt": "x"}', EdgeConfig(), MODEL).model == "tiny"


NEUTRAL: list[dict[str, object]] = [
    {"length_penalty": 1.0, "early_stopping": False, "use_beam_search": False},
    {"logits_processors": [], "kv_transfer_params": {}, "vllm_xargs": {}, "documents": []},
    {"spaces_between_special_tokens": True, "guided_json": None, "tools": []},
    {"mm_processor_kwargs": {}, "return_token_offsets": False, "parallel_tool_calls": True},
    {"top_logprobs": 0, "logprobs": False},
]


@pytest.mark.parametrize("fields", NEUTRAL)
def test_neutral_values_change_nothing(fields: dict[str, object]) -> None:
    assert chat(**fields) == chat()


def test_old_names_of_constraints_say_the_new_one() -> None:
    with pytest.raises(RequestError) as caught:
        chat(guided_json={"type": "object"})
    assert "use 'structured_outputs.json' instead" in caught.value.message


def test_fields_reach_the_engine() -> None:
    parsed = chat(
        allowed_token_ids=[7, 3, 7],
        logprobs=True,
        logprob_token_ids=[9, 2, 9],
        bad_words=["no", "no"],
        skip_special_tokens=False,
        return_tokens_as_token_ids=True,
        request_id="mine",
        echo=True,
    )
    assert parsed.sampling.allowed_token_ids == (7, 3)
    assert parsed.sampling.logprob_token_ids == (9, 2)
    assert parsed.sampling.is_constrained
    assert parsed.bad_words == ("no",)
    assert not parsed.skips_special_tokens
    assert parsed.names_tokens_by_id
    assert parsed.request_id == "mine"
    assert parsed.echo


@pytest.mark.parametrize(
    ("fields", "cut"),
    [
        ({"truncate_prompt_tokens": 5}, (5, False)),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, (5, True)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 30}, (70, False)),
        ({"truncate_prompt_tokens": -1}, (99, False)),
    ],
)
def test_a_long_prompt_can_be_cut(fields: dict[str, object], cut: tuple[int, bool]) -> None:
    (prompt,) = chat(**fields).prompts
    assert isinstance(prompt, TokenizeRequest)
    assert (prompt.max_tokens, prompt.cuts_end) == cut
    ids = list(range(200))
    body = json.dumps({"prompt": ids, "max_tokens": 1} | fields).encode()
    (kept,) = parse_completion(body, EdgeConfig(), MODEL).prompts
    assert isinstance(kept, list)
    assert kept == (ids[: cut[0]] if cut[1] else ids[-cut[0] :])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 100}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [500]}, "allowed_token_ids[0]"),
        ({"logprob_token_ids": [7]}, "logprob_token_ids"),
        ({"logprob_token_ids": [500], "logprobs": True}, "logprob_token_ids[0]"),
        ({"logprob_token_ids": [7] * 129, "logprobs": True}, "logprob_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"request_id": ""}, "request_id"),
    ],
)
def test_a_value_that_cannot_be_is_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_all_logprobs_are_for_servers_that_allow_them() -> None:
    for num_allowed in (-1, 500):  # of 500 in the vocabulary
        limits = EdgeConfig(max_logprobs=num_allowed)
        assert chat(limits, prompt_logprobs=-1).sampling.prompt_logprobs == 500
        assert chat(limits, logprobs=True, top_logprobs=-1).sampling.logprobs == 500

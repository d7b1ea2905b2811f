"""Requests: what is accepted and what it becomes. Refusals are in test_protocol_errors.py."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.openai.chat_dialect import ChatDialect, ToolFormat
from actors.openai.protocol import (
    Endpoint,
    ParsedRequest,
    child_seed,
    draw_seed,
    parse_chat,
    parse_completion,
    resolve_sampling,
)
from actors.openai.served_model import ServedModel
from configs.schema import EdgeConfig
from engine.errors import RequestError
from engine.messages import TokenizeRequest, decode, encode
from engine.request import RequestSpec, SamplingParams

DIALECT = ChatDialect(knows_tools=True, tool_format=ToolFormat.HERMES)
MODEL = ServedModel(name="tiny", max_model_len=100, vocab_size=500, dialect=DIALECT)
LIMITS = EdgeConfig()
USER: dict[str, object] = {"role": "user", "content": "hi"}


def chat(**fields: object) -> ParsedRequest:
    body = {"model": "tiny", "messages": [USER]} | fields
    return parse_chat(json.dumps(body).encode(), LIMITS, MODEL, lambda: 7)


def completion(**fields: object) -> ParsedRequest:
    body = {"model": "tiny", "prompt": "hi"} | fields
    return parse_completion(json.dumps(body).encode(), LIMITS, MODEL, lambda: 7)


def test_the_shortest_chat_takes_openais_defaults() -> None:
    assert chat() == ParsedRequest(
        endpoint=Endpoint.CHAT,
        model="tiny",
        prompts=[TokenizeRequest(messages=[USER], add_special_tokens=False)],
        n=1,
        max_tokens=None,
        spec=RequestSpec(params=SamplingParams(max_tokens=1, seed=7)),
    )


def test_the_shortest_completion_takes_openais_defaults() -> None:
    assert completion() == ParsedRequest(
        endpoint=Endpoint.COMPLETION,
        model="tiny",
        prompts=[TokenizeRequest(text="hi", add_special_tokens=True)],
        n=1,
        max_tokens=None,
        spec=RequestSpec(params=SamplingParams(max_tokens=1, seed=7)),
    )


def test_every_sampling_field_arrives() -> None:
    parsed = chat(
        max_completion_tokens=9,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"0": -100, "499": 100},
        seed=12,
        ignore_eos=True,
        stop_token_ids=[4, 4, 5],
        min_tokens=2,
        logprobs=True,
        top_logprobs=20,
    )
    assert resolve_sampling(parsed, 10, 100) == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias={0: -100.0, 499: 100.0},
        seed=12,
        ignore_eos=True,
        stop_token_ids=(4, 5),
        logprobs=20,
    )


def test_everything_else_arrives() -> None:
    parsed = chat(
        n=3,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        stop=["a", "b", "a"],
        include_stop_str_in_output=True,
        return_token_ids=True,
        cache_salt="tenant",
        priority=-4,
        add_special_tokens=True,
        chat_template_kwargs={"enable_thinking": False, "style": "x", "level": 2},
    )
    assert (parsed.n, parsed.num_choices, parsed.stops) == (3, 3, ("a", "b"))
    assert parsed.stream
    assert parsed.include_usage
    assert parsed.continuous_usage
    assert parsed.include_stop
    assert parsed.return_token_ids
    assert (parsed.spec.salt, parsed.spec.priority) == ("tenant", -4)
    (prompt,) = parsed.prompts
    assert isinstance(prompt, TokenizeRequest)
    assert prompt.add_special_tokens
    assert prompt.chat_template_kwargs == {"enable_thinking": False, "style": "x", "level": 2}


@pytest.mark.parametrize("stop", [None, "x", ["x"], []])
def test_stop_may_be_absent_one_string_or_a_list(stop: object) -> None:
    assert chat(stop=stop).stops == (("x",) if stop else ())


@pytest.mark.parametrize(
    ("logprobs", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_chat_logprobs_are_a_switch_and_a_number(
    logprobs: dict[str, object], expected: int | None
) -> None:
    assert chat(**logprobs).sampling.logprobs == expected


def test_completion_logprobs_are_one_number() -> None:
    assert [completion(logprobs=k).sampling.logprobs for k in (None, 0, 5)] == [None, 0, 5]


@pytest.mark.parametrize("top_k", [None, 0, -1, 500, 10**15])
def test_every_way_to_say_all_tokens_is_top_k_zero(top_k: int | None) -> None:
    assert chat(top_k=top_k).sampling.top_k == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one", [TokenizeRequest(text="one")]),
        (["one", "two"], [TokenizeRequest(text="one"), TokenizeRequest(text="two")]),
        ([1, 0, 499], [[1, 0, 499]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("nul\x00 and \U0001f600", [TokenizeRequest(text="nul\x00 and \U0001f600")]),
    ],
)
def test_a_prompt_has_four_forms(prompt: object, expected: list[object]) -> None:
    parsed = completion(prompt=prompt, n=2)
    assert parsed.prompts == expected
    assert parsed.num_choices == 2 * len(expected)


def test_null_means_absent_for_every_optional_field() -> None:
    from actors.openai.request_bodies import ChatBody, CompletionBody

    chat_fields = set(ChatBody.__struct_fields__) - {"model", "messages"}
    assert chat(**dict.fromkeys(chat_fields)) == chat()
    completion_fields = set(CompletionBody.__struct_fields__) - {"model", "prompt"}
    assert completion(**dict.fromkeys(completion_fields)) == completion()


def test_fields_openai_accepts_without_effect_here_change_nothing() -> None:
    without_effect = {
        "user": "u",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prediction": {"type": "content", "content": "maybe this"},
        "verbosity": "medium",
    }
    assert chat(**without_effect) == chat()


@pytest.mark.parametrize(
    "neutral",
    [
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"tool_choice": "none"},
        {"use_beam_search": False},
    ],
)
def test_unsupported_parameters_may_ask_for_what_happens_anyway(
    neutral: dict[str, object],
) -> None:
    assert chat(**neutral) == chat()


def test_completion_extras_may_stand_at_their_defaults() -> None:
    assert completion(echo=False, best_of=1, suffix=None) == completion()
    assert completion(echo=True).echo
    assert completion(n=2, best_of=2) == completion(n=2)


def test_every_role_is_read_and_developer_is_the_templates_system() -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"x": [1, {"y": null}]}'},
    }
    parsed = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "system", "content": ""},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "content": "4", "name": "f"},
            {"role": "assistant", "content": "done", "annotations": [], "audio": None},
        ]
    )
    (prompt,) = parsed.prompts
    assert isinstance(prompt, TokenizeRequest)
    arguments = {"x": [1, {"y": None}]}
    assert prompt.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": ""},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
            ],
        },
        {"role": "tool", "content": "4", "name": "f", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done"},
    ]
    assert decode(encode(prompt), TokenizeRequest) == prompt


def test_a_message_of_the_openai_clients_own_reply_can_be_sent_back() -> None:
    from openai.types.chat import ChatCompletionMessage

    message = ChatCompletionMessage(role="assistant", content="before").model_dump()
    assert set(message) > {"role", "content"}
    assert chat(messages=[USER, message, USER]).num_choices == 1


def test_continuing_the_final_message_leaves_out_the_generation_prompt() -> None:
    parsed = chat(
        messages=[USER, {"role": "assistant", "content": "so"}], continue_final_message=True
    )
    (prompt,) = parsed.prompts
    assert isinstance(prompt, TokenizeRequest)
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    (prompt,) = chat(add_generation_prompt=False).prompts
    assert isinstance(prompt, TokenizeRequest)
    assert not prompt.add_generation_prompt


def test_max_tokens_has_two_names_in_chat() -> None:
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=6).max_tokens == 6
    assert chat(max_tokens=6, max_completion_tokens=6).max_tokens == 6


@pytest.mark.parametrize(
    ("requested", "prompt_tokens", "expected"),
    [(None, 10, 90), (None, 99, 1), (90, 10, 90), (1, 99, 1)],
)
def test_a_chat_may_use_the_rest_of_the_context(
    requested: int | None, prompt_tokens: int, expected: int
) -> None:
    assert resolve_sampling(chat(max_tokens=requested), prompt_tokens, 100).max_tokens == expected


@pytest.mark.parametrize(
    ("requested", "prompt_tokens", "expected"), [(None, 10, 16), (None, 95, 5), (90, 10, 90)]
)
def test_a_completion_without_max_tokens_has_sixteen_if_they_fit(
    requested: int | None, prompt_tokens: int, expected: int
) -> None:
    parsed = completion(max_tokens=requested)
    assert resolve_sampling(parsed, prompt_tokens, 100).max_tokens == expected


@pytest.mark.parametrize(
    ("fields", "prompt_tokens", "message"),
    [
        (
            {},
            100,
            "This model's maximum context length is 100 tokens. However, your messages resulted in"
            " 100 tokens. Please reduce the length of the messages.",
        ),
        (
            {"max_tokens": 91},
            10,
            "This model's maximum context length is 100 tokens. However, you requested 101 tokens"
            " (10 in the messages, 91 in the completion). Please reduce the length of the messages"
            " or completion.",
        ),
    ],
)
def test_what_cannot_fit_is_refused_in_openais_words(
    fields: dict[str, object], prompt_tokens: int, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        resolve_sampling(chat(**fields), prompt_tokens, 100)
    error = caught.value
    assert (error.status, error.code, error.message) == (400, "context_length_exceeded", message)
    assert error.param == "messages"
    with pytest.raises(RequestError) as caught:
        resolve_sampling(completion(**fields), prompt_tokens, 100)
    assert caught.value.param == "prompt"
    assert caught.value.message == message.replace("messages", "prompt")


def test_a_prompt_without_tokens_and_more_min_than_max_tokens_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        resolve_sampling(completion(), 0, 100)
    assert (caught.value.param, caught.value.code) == ("prompt", "empty_prompt")
    with pytest.raises(RequestError) as caught:
        resolve_sampling(completion(min_tokens=17), 1, 100)
    assert caught.value.param == "min_tokens"
    assert resolve_sampling(completion(min_tokens=16), 1, 100).min_tokens == 16


@settings(max_examples=200)
@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_every_seed_is_kept_as_a_non_negative_int64_and_children_differ(seed: int) -> None:
    kept = chat(seed=seed).sampling.seed
    assert 0 <= kept < 2**63
    assert kept == seed or seed < 0
    children = [child_seed(kept, index) for index in range(64)]
    assert children[0] == kept
    assert len(set(children)) == 64
    assert all(0 <= child < 2**63 for child in children)


def test_child_seeds_follow_splitmix64() -> None:
    # First outputs of the reference generator for state 0, without their lowest bit.
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [child_seed(0, index) for index in (1, 2, 3)] == [value >> 1 for value in known]


def test_a_request_without_a_seed_draws_a_fresh_one_of_63_bits() -> None:
    drawn = {draw_seed() for _ in range(200)}
    assert len(drawn) == 200
    assert all(0 <= seed < 2**63 for seed in drawn)
    body = json.dumps({"model": "tiny", "prompt": "x"}).encode()
    first, second = (parse_completion(body, LIMITS, MODEL).sampling.seed for _ in range(2))
    assert first != second

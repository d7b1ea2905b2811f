"""Responses, read back through the types of the `openai` client."""

import json
import random
from collections.abc import Sequence
from itertools import chain
from typing import Any

import httpx2 as httpx  # what the openai client speaks through
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, ConfigDict

from actors.openai.protocol import ParsedRequest, parse_chat, parse_completion
from actors.openai.response_objects import SSE_DONE
from actors.openai.response_parts import ResponseIdentity
from actors.openai.response_writers import build_output_text, build_writer
from actors.openai.served_model import ServedModel
from configs.schema import EdgeConfig
from engine.messages import TokenRecord
from engine.plan import TokenLogprobs
from engine.request import RequestKey
from engine.text.output_text import TextDelta
from engine.text.tokenizing import Tokenizing, load_tokenizer
from tests.harness.tokenizer_folders import byte_level_folder

IDENTITY = ResponseIdentity(request_id="ab" * 16, created_s=1_700_000_000, model="tiny")
TEXT = "a鬱 the fox 👩‍👧."


@pytest.fixture(scope="module")
def tokenizing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizing:
    return load_tokenizer(byte_level_folder(tmp_path_factory.mktemp("model")))


def strict(kind: type[BaseModel]) -> type[BaseModel]:
    """The client's type, but with wrong types refused instead of coerced."""
    return type(kind.__name__, (kind,), {"model_config": ConfigDict(strict=True)})


def parse(endpoint: str, tokenizing: Tokenizing, **fields: object) -> ParsedRequest:
    model = ServedModel(name="tiny", max_model_len=1000, vocab_size=tokenizing.vocab_size)
    prompt: dict[str, object] = (
        {"messages": [{"role": "user", "content": "x"}]} if endpoint == "chat" else {"prompt": "x"}
    )
    parser = parse_chat if endpoint == "chat" else parse_completion
    body = json.dumps({"model": "tiny"} | prompt | fields).encode()
    return parser(body, EdgeConfig(), model, lambda: 1)


def ids_of(tokenizing: Tokenizing, text: str) -> list[int]:
    (ids,) = tokenizing.encode_batch([text], add_special_tokens=False)
    assert isinstance(ids, list)
    return ids


def records(
    ids: Sequence[int], child: int, *, top: int | None = None, cached: int = 0
) -> list[TokenRecord]:
    key = RequestKey(request_id="ab" * 16, child=child)
    logprobs = None
    if top is not None:
        logprobs = TokenLogprobs(-0.5, list(range(5, 5 + top)), [-0.25 * k for k in range(top)])
    return [
        TokenRecord(
            key=key,
            index=index,
            token_id=token_id,
            logprobs=logprobs,
            num_cached_tokens=cached if index == 0 else None,
            finish="length" if index == len(ids) - 1 else None,
        )
        for index, token_id in enumerate(ids)
    ]


def respond(
    parsed: ParsedRequest,
    tokenizing: Tokenizing,
    outputs: Sequence[Sequence[int]],
    *,
    prompt_ids: Sequence[Sequence[int]] = ((1, 2, 3),),
    cached: int = 2,
) -> list[bytes]:
    """The whole response, the choices' tokens taking turns as they would from a worker."""
    writer = build_writer(parsed, IDENTITY, tokenizing)
    sent = writer.start(prompt_ids)
    top = parsed.sampling.logprobs
    texts = [build_output_text(parsed, tokenizing) for _ in outputs]
    queues = [records(ids, child, top=top, cached=cached) for child, ids in enumerate(outputs)]
    rng = random.Random(3)
    while any(queues):
        child = rng.choice([index for index, queue in enumerate(queues) if queue])
        delta = texts[child].push(queues[child].pop(0))
        sent += writer.delta(child, delta)
        if delta.finish is not None:
            queues[child].clear()
    return sent + writer.finish()


def events(sent: Sequence[bytes]) -> list[dict[str, Any]]:
    """Server-sent events as a client reads them; the last must be [DONE]."""
    assert sent[-1] == SSE_DONE
    lines = b"".join(sent).decode().split("\n\n")
    assert lines.pop() == ""
    assert lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_chat_completion_is_the_clients_object(tokenizing: Tokenizing) -> None:
    parsed = parse("chat", tokenizing, n=2)
    outputs = [ids_of(tokenizing, TEXT), ids_of(tokenizing, "no")]
    (body,) = respond(parsed, tokenizing, outputs)
    read = strict(ChatCompletion).model_validate_json(body)
    assert isinstance(read, ChatCompletion)
    assert read.object == "chat.completion"
    assert (read.id, read.created, read.model) == ("chatcmpl-" + "ab" * 16, 1_700_000_000, "tiny")
    assert [choice.index for choice in read.choices] == [0, 1]
    assert [choice.message.content for choice in read.choices] == [TEXT, "no"]
    assert [choice.message.role for choice in read.choices] == ["assistant"] * 2
    assert [choice.finish_reason for choice in read.choices] == ["length"] * 2
    assert read.usage is not None
    num_tokens = sum(map(len, outputs))
    assert (read.usage.prompt_tokens, read.usage.completion_tokens) == (3, num_tokens)
    assert read.usage.total_tokens == 3 + num_tokens
    assert read.usage.prompt_tokens_details is not None
    assert read.usage.prompt_tokens_details.cached_tokens == 2
    plain = json.loads(body)
    assert plain["prompt_token_ids"] is None
    assert plain["choices"][0]["logprobs"] is None
    assert plain["choices"][0]["stop_reason"] is None
    assert plain["choices"][0]["token_ids"] is None


def test_a_completion_is_the_clients_object(tokenizing: Tokenizing) -> None:
    parsed = parse("completion", tokenizing, n=2, prompt=["x", "y"])
    texts = ["one", " two", "three", ""]
    eos = min(tokenizing.token_bytes.special_ids)
    outputs = [ids_of(tokenizing, text) or [eos] for text in texts]
    (body,) = respond(parsed, tokenizing, outputs, prompt_ids=[[1, 2, 3], [4]])
    read = strict(Completion).model_validate_json(body)
    assert isinstance(read, Completion)
    assert (read.object, read.id) == ("text_completion", "cmpl-" + "ab" * 16)
    assert [choice.text for choice in read.choices] == texts
    assert [choice.index for choice in read.choices] == [0, 1, 2, 3]
    assert read.usage is not None
    assert read.usage.prompt_tokens == 4, "each prompt counts once, not once a choice"
    assert read.usage.prompt_tokens_details is not None
    assert read.usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize("stop", [None, "the fox"])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_chat_stream_is_role_then_text_then_finish(
    tokenizing: Tokenizing, stop: str | None, logprobs: bool
) -> None:
    parsed = parse("chat", tokenizing, n=2, stream=True, stop=stop, logprobs=logprobs)
    outputs = [ids_of(tokenizing, TEXT), ids_of(tokenizing, "no")]
    sent = events(respond(parsed, tokenizing, outputs))
    chunks = [strict(ChatCompletionChunk).model_validate(event) for event in sent]
    for index, text in enumerate((TEXT, "no")):
        own = [
            chunk.choices[0]
            for chunk in chunks
            if isinstance(chunk, ChatCompletionChunk) and chunk.choices[0].index == index
        ]
        assert own[0].delta.model_dump(exclude_unset=True) == {"role": "assistant", "content": ""}
        assert [choice.finish_reason for choice in own[:-1]] == [None] * (len(own) - 1)
        expected = text.split(stop)[0] if stop else text
        assert "".join(choice.delta.content or "" for choice in own) == expected
        stopped = stop is not None and stop in text
        assert own[-1].finish_reason == ("stop" if stopped else "length")
    assert all("usage" not in event for event in sent)
    stops = [e["choices"][0].get("stop_reason", "none") for e in sent]
    assert stops.count("none") == len(stops) - 2
    assert stop is None or stop in stops


def test_a_completion_stream_ends_each_choice_with_its_finish(tokenizing: Tokenizing) -> None:
    parsed = parse("completion", tokenizing, n=2, stream=True)
    outputs = [ids_of(tokenizing, TEXT), ids_of(tokenizing, " no")]
    sent = events(respond(parsed, tokenizing, outputs))
    choices = [event["choices"][0] for event in sent]
    for index, text in enumerate((TEXT, " no")):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        finishes = [choice["finish_reason"] for choice in own]
        assert finishes == [None] * (len(finishes) - 1) + ["length"]
    # The client's type knows no null here, although OpenAI's servers send it.
    for event in sent:
        event["choices"][0]["finish_reason"] = "stop"
        strict(Completion).model_validate(event)


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_usage_comes_last_and_is_null_before_when_asked_for(
    tokenizing: Tokenizing, endpoint: str
) -> None:
    options = {"include_usage": True}
    parsed = parse(endpoint, tokenizing, stream=True, stream_options=options)
    ids = ids_of(tokenizing, TEXT)
    sent = events(respond(parsed, tokenizing, [ids]))
    assert all(event["usage"] is None for event in sent[:-1])
    assert sent[-1]["choices"] == []
    assert sent[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "total_tokens": 3 + len(ids),
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_continuous_usage_counts_up_on_every_chunk(tokenizing: Tokenizing, endpoint: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    parsed = parse(endpoint, tokenizing, stream=True, stream_options=options)
    ids = ids_of(tokenizing, TEXT)
    sent = events(respond(parsed, tokenizing, [ids]))
    counts = [event["usage"]["completion_tokens"] for event in sent]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids)


def test_chat_logprobs_hold_text_and_bytes_of_every_token(tokenizing: Tokenizing) -> None:
    ids = ids_of(tokenizing, TEXT)
    parsed = parse("chat", tokenizing, logprobs=True, top_logprobs=3)
    (body,) = respond(parsed, tokenizing, [ids])
    unary = ChatCompletion.model_validate_json(body).choices[0].logprobs
    assert unary is not None
    assert unary.content is not None
    assert len(unary.content) == len(ids)
    assert b"".join(bytes(item.bytes or []) for item in unary.content).decode() == TEXT
    assert "\ufffd" in "".join(item.token for item in unary.content), "some characters are torn"
    assert [len(item.top_logprobs) for item in unary.content] == [3] * len(ids)
    assert unary.content[0].logprob == -0.5
    assert [top.logprob for top in unary.content[0].top_logprobs] == [0.0, -0.25, -0.5]

    streamed = parse("chat", tokenizing, logprobs=True, top_logprobs=3, stream=True)
    gathered = []
    for event in events(respond(streamed, tokenizing, [ids])):
        logprobs = ChatCompletionChunk.model_validate(event).choices[0].logprobs
        gathered += [] if logprobs is None else logprobs.content or []
    assert [item.model_dump() for item in gathered] == [i.model_dump() for i in unary.content]


def test_a_chosen_token_stands_beside_those_that_were_named(tokenizing: Tokenizing) -> None:
    named = {"logprobs": True, "logprob_token_ids": [5], "return_tokens_as_token_ids": True}
    for stream in (False, True):
        parsed = parse("chat", tokenizing, top_logprobs=1, stream=stream, **named)
        sent = respond(parsed, tokenizing, [[5, 6]])
        bodies = events(sent) if stream else [json.loads(b"".join(sent))]
        shown = [body["choices"][0].get("logprobs") for body in bodies]
        tops = [token["top_logprobs"] for part in shown if part for token in part["content"]]
        assert [[top["token"] for top in of_token] for of_token in tops] == [
            ["token_id:5"],
            ["token_id:6", "token_id:5"],
        ]


def test_completion_logprobs_line_up_with_the_text(tokenizing: Tokenizing) -> None:
    ids = ids_of(tokenizing, TEXT)
    parsed = parse("completion", tokenizing, logprobs=2)
    (body,) = respond(parsed, tokenizing, [ids])
    choice = Completion.model_validate_json(body).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs == [-0.5] * len(ids)
    whole = [i for i, name in enumerate(logprobs.tokens) if not name.startswith("bytes:\\x")]
    assert 0 < len(whole) < len(ids)
    for index in whole:
        offset = logprobs.text_offset[index]
        assert choice.text[offset:].startswith(logprobs.tokens[index])
    for name, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert top[name] == -0.5
        assert next(iter(top)) == name
        assert len(top) == 3

    streamed = parse("completion", tokenizing, logprobs=2, stream=True)
    gathered: dict[str, list[object]] = {"tokens": [], "text_offset": [], "top_logprobs": []}
    for event in events(respond(streamed, tokenizing, [ids])):
        for name, values in gathered.items():
            values += event["choices"][0]["logprobs"][name]
    assert gathered == {name: getattr(logprobs, name) for name in gathered}


def test_a_probability_of_zero_is_a_number_in_json(tokenizing: Tokenizing) -> None:
    parsed = parse("chat", tokenizing, logprobs=True, top_logprobs=1)
    writer = build_writer(parsed, IDENTITY, tokenizing)
    writer.start([[1]])
    record = TokenRecord(
        key=RequestKey(request_id="0"),
        index=0,
        token_id=5,
        logprobs=TokenLogprobs(float("-inf"), [6], [float("-inf")]),
        finish="length",
    )
    writer.delta(0, build_output_text(parsed, tokenizing).push(record))
    (body,) = writer.finish()
    read = ChatCompletion.model_validate_json(body).choices[0].logprobs
    assert read is not None
    assert read.content is not None
    assert (read.content[0].logprob, read.content[0].top_logprobs[0].logprob) == (-9999.0, -9999.0)


def test_token_ids_are_returned_when_asked_for(tokenizing: Tokenizing) -> None:
    ids, prompt_ids = ids_of(tokenizing, TEXT), [[7, 8], [9]]
    chat = parse("chat", tokenizing, return_token_ids=True)
    (body,) = respond(chat, tokenizing, [ids], prompt_ids=[[7, 8]])
    assert json.loads(body)["prompt_token_ids"] == [7, 8]
    assert json.loads(body)["choices"][0]["token_ids"] == ids

    several = parse("completion", tokenizing, return_token_ids=True, prompt=["a", "b"])
    (body,) = respond(several, tokenizing, [ids, ids[:2]], prompt_ids=prompt_ids)
    choices = json.loads(body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == prompt_ids
    assert [choice["token_ids"] for choice in choices] == [ids, ids[:2]]


def test_streamed_token_ids_leave_none_out_and_the_prompts_come_first(
    tokenizing: Tokenizing,
) -> None:
    ids = ids_of(tokenizing, TEXT)
    chat = parse("chat", tokenizing, return_token_ids=True, stream=True, stop="the fox!")
    sent = events(respond(chat, tokenizing, [ids], prompt_ids=[[7, 8]]))
    assert [event.get("prompt_token_ids") for event in sent] == [[7, 8]] + [None] * (len(sent) - 1)
    choices = [event["choices"][0] for event in sent]
    assert list(chain.from_iterable(choice.get("token_ids", []) for choice in choices)) == ids

    several = parse("completion", tokenizing, return_token_ids=True, stream=True, prompt=["a", "b"])
    sent = events(respond(several, tokenizing, [ids, ids[:2]], prompt_ids=[[7, 8], [9]]))
    for index, (prompt, output) in enumerate([([7, 8], ids), ([9], ids[:2])]):
        own = [e["choices"][0] for e in sent if e["choices"][0]["index"] == index]
        assert own[0]["prompt_token_ids"] == prompt
        assert all("prompt_token_ids" not in choice for choice in own[1:])
        assert list(chain.from_iterable(choice["token_ids"] for choice in own)) == output


def test_text_held_back_sends_no_empty_chunk(tokenizing: Tokenizing) -> None:
    parsed = parse("completion", tokenizing, stream=True, stop="the fox jumps")
    sent = events(respond(parsed, tokenizing, [ids_of(tokenizing, "the fox")]))
    assert [event["choices"][0]["text"] for event in sent] == ["the fox"]


def test_a_response_that_is_not_complete_is_never_sent(tokenizing: Tokenizing) -> None:
    for endpoint in ("chat", "completion"):
        for stream in (False, True):
            parsed = parse(endpoint, tokenizing, stream=stream, n=2)
            writer = build_writer(parsed, IDENTITY, tokenizing)
            writer.start([[1]])
            writer.delta(0, TextDelta(text="x"))
            with pytest.raises(AssertionError, match="not finished"):
                writer.finish()


def test_the_client_library_reads_a_whole_stream(tokenizing: Tokenizing) -> None:
    parsed = parse("chat", tokenizing, stream=True, stream_options={"include_usage": True})
    sent = respond(parsed, tokenizing, [ids_of(tokenizing, TEXT)])

    def answer(_: httpx.Request) -> httpx.Response:
        headers = {"content-type": "text/event-stream; charset=utf-8"}
        return httpx.Response(200, content=b"".join(sent), headers=headers)

    http = httpx.Client(transport=httpx.MockTransport(answer))
    with openai.OpenAI(api_key="k", base_url="http://test", http_client=http) as client:
        chunks = list(
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
        )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == TEXT
    assert chunks[-1].usage is not None

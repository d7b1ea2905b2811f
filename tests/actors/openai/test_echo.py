"""Completions that begin with their prompt's text: the client's own, or what its ids say."""

import json
from typing import Any

import pytest

from actors.openai.protocol import ParsedRequest, parse_completion
from actors.openai.response_parts import ResponseIdentity
from actors.openai.response_writers import build_output_text, build_writer
from actors.openai.served_model import ServedModel
from configs.schema import EdgeConfig
from engine.messages import TokenRecord
from engine.request import RequestKey
from engine.text.tokenizing import Tokenizing, load_tokenizer
from tests.harness.tokenizer_folders import byte_level_folder

IDENTITY = ResponseIdentity(request_id="ef" * 16, created_s=1, model="tiny")


@pytest.fixture(scope="module")
def tokenizing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizing:
    return load_tokenizer(byte_level_folder(tmp_path_factory.mktemp("model")))


def ids_of(tokenizing: Tokenizing, text: str) -> list[int]:
    (ids,) = tokenizing.encode_batch([text], add_special_tokens=False)
    assert isinstance(ids, list)
    return ids


def parse(tokenizing: Tokenizing, prompt: object, **fields: Any) -> ParsedRequest:
    model = ServedModel(name="tiny", max_model_len=500, vocab_size=tokenizing.vocab_size)
    body = {"model": "tiny", "prompt": prompt, "echo": True} | fields
    return parse_completion(json.dumps(body).encode(), EdgeConfig(), model, lambda: 1)


def respond(
    parsed: ParsedRequest, tokenizing: Tokenizing, prompt_ids: list[list[int]], outputs: list[str]
) -> bytes:
    writer = build_writer(parsed, IDENTITY, tokenizing)
    sent = writer.start(prompt_ids)
    for child, output in enumerate(outputs):
        ids = ids_of(tokenizing, output)
        text = build_output_text(parsed, tokenizing)
        for index, token_id in enumerate(ids):
            finish = "length" if index == len(ids) - 1 else None
            key = RequestKey(request_id="ef" * 16, child=child)
            record = TokenRecord(key=key, index=index, token_id=token_id, finish=finish)  # type: ignore[arg-type]
            sent += writer.delta(child, text.push(record))
    return b"".join(sent + writer.finish())


@pytest.mark.parametrize("as_ids", [False, True])
def test_every_choice_begins_with_its_prompt_in_both_modes(
    tokenizing: Tokenizing, as_ids: bool
) -> None:
    texts = ["The fox ", "def f(x):\n"]
    ids = [ids_of(tokenizing, text) for text in texts]
    prompt: object = ids if as_ids else texts
    outputs = ["one", "two", "three", "four"]
    expected = [texts[i // 2] + output for i, output in enumerate(outputs)]

    body = json.loads(respond(parse(tokenizing, prompt, n=2), tokenizing, ids, outputs))
    assert [choice["text"] for choice in body["choices"]] == expected

    parsed = parse(tokenizing, prompt, n=2, stream=True)
    lines = respond(parsed, tokenizing, ids, outputs).decode().split("\n\n")
    got = [""] * 4
    for line in lines[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        got[choice["index"]] += choice["text"]
    assert got == expected


def test_the_prompts_tokens_are_counted_as_the_prompts(tokenizing: Tokenizing) -> None:
    ids = [ids_of(tokenizing, "The fox ")]
    body = json.loads(respond(parse(tokenizing, "The fox "), tokenizing, ids, ["one"]))
    assert body["usage"]["prompt_tokens"] == len(ids[0])
    assert body["usage"]["completion_tokens"] == len(ids_of(tokenizing, "one"))

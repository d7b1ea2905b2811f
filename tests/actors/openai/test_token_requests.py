"""/tokenize and /detokenize, without HTTP: what is asked, and the answer in vLLM's shape."""

import json
from typing import Any

import pytest

from actors.openai.response_objects import to_json
from actors.openai.served_model import ServedModel
from actors.openai.token_requests import (
    TokenizeCall,
    detokenize_answer,
    parse_detokenize,
    parse_tokenize,
    tokenize_answer,
)
from engine.messages import TokenizeRequest
from engine.text.tokenizing import Tokenizing, load_tokenizer
from tests.actors.openai.dialects import DIALECT
from tests.harness.tokenizer_folders import LINES, byte_level_folder

USER: dict[str, object] = {"role": "user", "content": "hi"}
MODEL = ServedModel(name="tiny", max_model_len=1000, vocab_size=1000, dialect=DIALECT)


@pytest.fixture(scope="module")
def tokenizing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizing:
    return load_tokenizer(byte_level_folder(tmp_path_factory.mktemp("model")))


def ask(**fields: Any) -> TokenizeCall:
    return parse_tokenize(json.dumps(fields).encode(), MODEL)


def test_a_text_is_tokenized_as_a_completions_prompt() -> None:
    call = ask(prompt="hi", model="tiny")
    assert call == TokenizeCall(prompt=TokenizeRequest(text="hi"), wants_texts=False)
    bare = ask(prompt="", add_special_tokens=False, return_token_strs=True)
    empty = TokenizeRequest(text="", add_special_tokens=False)
    assert bare == TokenizeCall(prompt=empty, wants_texts=True)


def test_messages_are_tokenized_as_a_chats() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert ask(messages=[USER]).prompt == TokenizeRequest(messages=[USER], add_special_tokens=False)
    assert ask(
        messages=[USER],
        tools=[tool],
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
    ).prompt == TokenizeRequest(
        messages=[USER],
        add_special_tokens=False,
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False, "tools": [tool]},
    )


@pytest.mark.parametrize("text", [*LINES, "", "<|im_start|>user"])
def test_text_comes_back_from_its_tokens(tokenizing: Tokenizing, text: str) -> None:
    (ids,) = tokenizing.encode_batch([text], add_special_tokens=False)
    assert isinstance(ids, list)
    call = ask(prompt=text, return_token_strs=True)
    answer = json.loads(to_json(tokenize_answer(call, ids, MODEL, tokenizing)))
    assert answer["tokens"] == ids
    assert (answer["count"], answer["max_model_len"]) == (len(ids), 1000)
    assert len(answer["token_strs"]) == len(ids)
    if text.isascii():
        assert "".join(answer["token_strs"]) == text
    asked = parse_detokenize(json.dumps({"tokens": ids}).encode(), MODEL)
    assert json.loads(to_json(detokenize_answer(asked, tokenizing))) == {"prompt": text}


def test_token_texts_come_only_when_asked_for(tokenizing: Tokenizing) -> None:
    answer = tokenize_answer(ask(prompt="x"), [1, 2], MODEL, tokenizing)
    assert json.loads(to_json(answer))["token_strs"] is None

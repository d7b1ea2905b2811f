"""The words of refusals: OpenAI's own, where it has some."""

import json

import pytest

from actors.openai.protocol import parse_chat
from actors.openai.served_model import ServedModel
from configs.schema import EdgeConfig
from engine.errors import RequestError
from tests.actors.openai.dialects import DIALECT

MODEL = ServedModel(name="tiny", max_model_len=100, vocab_size=500, dialect=DIALECT)
USER = {"role": "user", "content": "hi"}


def words(fields: dict[str, object]) -> str:
    body = json.dumps({"model": "tiny", "messages": [USER]} | fields).encode()
    with pytest.raises(RequestError) as caught:
        parse_chat(body, EdgeConfig(), MODEL)
    return caught.value.message


def test_the_words_are_openais() -> None:
    assert words({"model": "gone"}) == "The model `gone` does not exist"
    assert words({"foo": 1}) == "Unrecognized request argument supplied: foo"
    assert words({"n": "x"}) == (
        "Invalid type for 'n': expected an integer, but got a string instead."
    )
    assert words({"stop": 3}) == (
        "Invalid type for 'stop': expected a string or an array, but got an integer instead."
    )
    assert words({"temperature": 3.0}) == (
        "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 3.0"
        " instead."
    )
    assert words({"messages": []}) == (
        "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty"
        " array instead."
    )
    assert words({"messages": [USER | {"role": "robot"}]}) == (
        "Invalid value: 'robot'. Supported values are: 'system', 'developer', 'user', 'assistant',"
        " 'tool', 'function'."
    )
    assert words({"response_format": {"type": "xml"}}) == (
        "Invalid value: 'xml'. Supported values are: 'text', 'json_object', 'json_schema'."
    )
    assert words({"modalities": ["audio"]}) == (
        "Unsupported parameter: 'modalities' is not supported by this server, except as [\"text\"]."
    )
    assert words({"functions": []}) == (
        "Unsupported parameter: 'functions' is not supported by this server; use 'tools' instead."
    )
    assert words({"logit_bias": {"7": 1, "500": 1, "x": 1}}) == (
        "Invalid 'logit_bias': key '500', 'x' is out of vocabulary. Expected one of 500 token ids,"
        " 0 to 499."
    )
    assert words({"tool_choice": "auto"}) == (
        "Invalid 'tool_choice': only allowed when 'tools' are specified."
    )

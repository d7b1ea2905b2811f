"""/v1/embeddings, without HTTP: what is asked of which prompts, and what is refused."""

import json
import random
from typing import Any

import numpy as np
import pytest

from actors.openai import protocol
from actors.openai.embeddings import parse_embedding, shorten
from actors.openai.prompt_only import Embedding
from actors.openai.protocol import (
    ParsedRequest,
    check_totals,
    parse_chat,
    parse_completion,
    resolve_sampling,
)
from actors.openai.scores import parse_rerank, parse_score
from actors.openai.served_model import EmbeddingSpace, ServedModel
from configs.schema import EdgeConfig
from engine.errors import RequestError
from engine.messages import TokenizeRequest
from engine.text.tokenizing import load_tokenizer
from tests.actors.ingress.edge_app import MODEL_FOLDER

LIMITS = EdgeConfig(max_prompts=5)
PLAIN = EmbeddingSpace(num_dimensions=64, is_normalised=True, can_shorten=False)
SHORTER = EmbeddingSpace(num_dimensions=64, is_normalised=True, can_shorten=True)
SOME = EmbeddingSpace(
    num_dimensions=64, is_normalised=True, can_shorten=True, short_dimensions=(8, 32)
)


def model_of(embeddings: EmbeddingSpace | None) -> ServedModel:
    return ServedModel(
        name="tiny", aliases=("alias",), max_model_len=100, vocab_size=400, embeddings=embeddings
    )


def embedding(space: EmbeddingSpace | None = PLAIN, **fields: Any) -> ParsedRequest:
    body = {"model": "tiny", "input": ["one", "two"]} | fields
    return parse_embedding(json.dumps(body).encode(), LIMITS, model_of(space))


def test_an_embedding_asks_for_no_token() -> None:
    parsed = embedding(priority=-3, cache_salt="mine", user="u", encoding_format="base64")
    sampling = resolve_sampling(parsed, 12, 100)
    assert sampling.is_prompt_only
    assert sampling.wants_embedding
    assert parsed.prompt_only == Embedding(num_dimensions=None, is_normalised=True, as_base64=True)
    assert (parsed.num_choices, parsed.spec.priority, parsed.spec.salt) == (2, -3, "mine")


@pytest.mark.parametrize(
    ("asked", "prompts"),
    [
        ("one", [TokenizeRequest(text="one", cuts_end=True)]),
        (
            ["one", "two"],
            [
                TokenizeRequest(text="one", cuts_end=True),
                TokenizeRequest(text="two", cuts_end=True),
            ],
        ),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_input_is_one_or_several_texts_or_token_ids(asked: Any, prompts: list[Any]) -> None:
    assert embedding(input=asked).prompts == prompts


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize(("asked", "kept"), [(3, 3), (99, 99), (-1, 99)])
def test_a_longer_prompt_is_cut_where_that_was_asked(
    asked: int, kept: int, side: str | None
) -> None:
    cuts = {"truncate_prompt_tokens": asked, "truncation_side": side}
    ids = [random.randrange(400) for _ in range(150)]
    assert embedding(input=ids, **cuts).prompts == [ids[-kept:] if side == "left" else ids[:kept]]
    (text,) = embedding(input="x" * 5000, **cuts, add_special_tokens=False).prompts
    assert text == TokenizeRequest(
        text="x" * 5000, max_tokens=kept, cuts_end=side != "left", add_special_tokens=False
    )


def test_without_a_name_the_served_model_answers() -> None:
    assert embedding(model=None).model == "tiny"
    assert embedding(model="alias").model == "alias"


@pytest.mark.parametrize(
    ("space", "num_dimensions"), [(PLAIN, 64), (SHORTER, 64), (SHORTER, 1), (SOME, 8), (SOME, 64)]
)
def test_dimensions_that_the_model_has_may_be_asked_for(
    space: EmbeddingSpace, num_dimensions: int
) -> None:
    parsed = embedding(space, dimensions=num_dimensions)
    assert isinstance(parsed.prompt_only, Embedding)
    assert parsed.prompt_only.num_dimensions == num_dimensions


@pytest.mark.parametrize(
    ("space", "fields", "param", "code"),
    [
        (PLAIN, {"model": "other"}, "model", "model_not_found"),
        (None, {}, "model", "unsupported_endpoint"),
        (PLAIN, {"dimensions": 63}, "dimensions", "unsupported_parameter"),
        (SHORTER, {"dimensions": 0}, "dimensions", "integer_below_min_value"),
        (SHORTER, {"dimensions": 65}, "dimensions", "integer_above_max_value"),
        (SOME, {"dimensions": 9}, "dimensions", "invalid_value"),
        (PLAIN, {"input": []}, "input", "empty_array"),
        (PLAIN, {"input": [[]]}, "input[0]", "empty_array"),
        (PLAIN, {"input": ""}, "input", "empty_string"),
        (PLAIN, {"input": ["x", ""]}, "input[1]", "empty_string"),
        (PLAIN, {"input": ["x", [1]]}, "input[1]", "invalid_type"),
        (PLAIN, {"input": [1, "x"]}, "input", "invalid_type"),
        (PLAIN, {"input": [[1], [2, "x"]]}, "input[1][1]", "invalid_type"),
        (PLAIN, {"input": ["x"] * 6}, "input", "array_above_max_length"),
        (PLAIN, {"input": [1, 400]}, "input[1]", "invalid_value"),
        (PLAIN, {"input": [1] * 100}, "input", "context_length_exceeded"),
        (PLAIN, {"input": "x" * 1601}, "input", "context_length_exceeded"),
        (
            PLAIN,
            {"input": "x" * (2**21 + 1), "truncate_prompt_tokens": 5},
            "input",
            "invalid_value",
        ),
        (
            PLAIN,
            {"truncate_prompt_tokens": 100},
            "truncate_prompt_tokens",
            "integer_above_max_value",
        ),
        (PLAIN, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        (
            PLAIN,
            {"truncate_prompt_tokens": -2},
            "truncate_prompt_tokens",
            "integer_below_min_value",
        ),
        (PLAIN, {"encoding_format": "int8"}, "encoding_format", "invalid_value"),
        (PLAIN, {"max_tokens": 3}, "max_tokens", "unknown_parameter"),
        (PLAIN, {"priority": 2**40}, "priority", "integer_above_max_value"),
    ],
)
def test_a_bad_embedding_request_is_refused_by_name(
    space: EmbeddingSpace | None, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(RequestError) as raised:
        embedding(space, **fields)
    assert (raised.value.param, raised.value.code) == (param, code)


def test_a_model_without_embeddings_says_so_by_the_name_that_was_asked() -> None:
    with pytest.raises(RequestError) as raised:
        embedding(None, model="alias")
    assert (raised.value.status, raised.value.message) == (
        400,
        "The model `alias` generates and makes no embeddings: serve an embedding model, with"
        " sentence-transformers' `modules.json` in its folder.",
    )


def test_an_embedding_model_generates_and_scores_nothing() -> None:
    model, tokenizing = model_of(PLAIN), load_tokenizer(MODEL_FOLDER)
    chat = {"model": "alias", "messages": [{"role": "user", "content": "x"}]}
    score = {"model": "alias", "query": "q", "items": ["x"], "label_token_ids": [1]}
    asked = [
        lambda: parse_chat(json.dumps(chat).encode(), LIMITS, model),
        lambda: parse_completion(b'{"model": "alias", "prompt": "x"}', LIMITS, model),
        lambda: parse_score(json.dumps(score).encode(), LIMITS, model, tokenizing),
        lambda: parse_rerank(
            b'{"model": "alias", "query": "q", "documents": ["d"]}', LIMITS, model, tokenizing
        ),
    ]
    for ask in asked:
        with pytest.raises(RequestError) as raised:
            ask()
        assert (raised.value.status, raised.value.code) == (400, "unsupported_endpoint")
        assert raised.value.message == (
            "The model `alias` makes embeddings and generates nothing: send texts to"
            " /v1/embeddings."
        )


def test_all_prompts_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = random.randrange(20, 60)
    monkeypatch.setattr(protocol, "MAX_SCORED_TOKENS", limit)
    check_totals(embedding(), [limit - 3, 3])
    with pytest.raises(RequestError) as raised:
        check_totals(embedding(), [limit - 3, 4])
    assert raised.value.param == "input"


def test_a_shortened_embedding_has_the_length_that_the_model_gives() -> None:
    whole = np.array([3, 4, 12, 84], dtype=np.float32)
    assert shorten(whole, 2, is_normalised=True).tolist() == pytest.approx([0.6, 0.8])
    assert shorten(whole, 2, is_normalised=False).tolist() == [3, 4]
    nothing = shorten(np.zeros(4, dtype=np.float32), 2, is_normalised=True)
    assert (nothing.dtype, nothing.tolist()) == (np.float32, [0, 0])

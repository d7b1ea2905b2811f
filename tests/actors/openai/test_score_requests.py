"""/v1/score and /v1/rerank, without HTTP: what is asked of which prompts, and what is refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from actors.openai import protocol
from actors.openai.prompt_only import PairScoring, Reranking, Scoring
from actors.openai.protocol import ParsedRequest, check_totals, parse_completion, resolve_sampling
from actors.openai.scores import parse_rerank, parse_score, probabilities
from actors.openai.served_model import ServedModel
from configs.schema import EdgeConfig
from engine.errors import RequestError
from engine.messages import TokenizeRequest
from engine.text.tokenizing import Tokenizing, load_tokenizer
from tests.harness.tokenizer_folders import byte_level_folder

LIMITS = EdgeConfig(max_prompts=5)
MODEL = ServedModel(name="tiny", max_model_len=100, vocab_size=400)
SCORE = {"model": "tiny", "query": "Is it? ", "items": ["one", "two"], "label_token_ids": [3, 4]}
RERANK = {"model": "tiny", "query": "fox", "documents": ["a", {"text": "b"}, "c"]}
FOLDER = Path("demo_model/laps-demo")
LABELS = {"label_token_ids": [7, 9]}


@pytest.fixture(scope="module")
def tokenizing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizing:
    return load_tokenizer(byte_level_folder(tmp_path_factory.mktemp("model")))


def score(**fields: Any) -> ParsedRequest:
    return parse_score(json.dumps(SCORE | fields).encode(), LIMITS, MODEL, load_tokenizer(FOLDER))


def pairs(**fields: Any) -> ParsedRequest:
    body = json.dumps({"template": "{query}|{document}"} | LABELS | fields).encode()
    return parse_score(body, LIMITS, MODEL, load_tokenizer(FOLDER))


def rerank(tokenizing: Tokenizing, **fields: Any) -> ParsedRequest:
    return parse_rerank(json.dumps(RERANK | fields).encode(), LIMITS, MODEL, tokenizing)


def texts_of(parsed: ParsedRequest) -> list[str]:
    found = []
    for prompt in parsed.prompts:
        assert isinstance(prompt, TokenizeRequest)
        assert prompt.text is not None
        found.append(prompt.text)
    return found


def test_a_score_asks_for_labels_and_for_no_token() -> None:
    parsed = score(apply_softmax=True, priority=-3, cache_salt="mine")
    sampling = resolve_sampling(parsed, 12, MODEL.max_model_len)
    assert sampling.is_prompt_only
    assert sampling.label_token_ids == (3, 4)
    assert parsed.prompt_only == Scoring(apply_softmax=True)
    assert (parsed.num_choices, parsed.spec.priority, parsed.spec.salt) == (2, -3, "mine")


def test_the_query_is_joined_to_each_item_on_the_side_that_was_asked_for() -> None:
    assert texts_of(score()) == ["Is it? one", "Is it? two"]
    assert texts_of(score(item_first=True)) == ["oneIs it? ", "twoIs it? "]
    assert texts_of(score(items="alone")) == ["Is it? alone"]
    ids = {"query": [5, 6], "items": [[7], [8, 9]]}
    assert score(**ids).prompts == [[5, 6, 7], [5, 6, 8, 9]]
    assert score(**ids, item_first=True).prompts == [[7, 5, 6], [8, 9, 5, 6]]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": "other"}, "model", "model_not_found"),
        ({"label_token_ids": None}, "label_token_ids", "missing_required_parameter"),
        ({"label_token_ids": []}, "label_token_ids", "empty_array"),
        ({"label_token_ids": [1] * 129}, "label_token_ids", "array_above_max_length"),
        ({"label_token_ids": [1, 400]}, "label_token_ids[1]", "invalid_value"),
        ({"items": []}, "items", "empty_array"),
        ({"items": ["x"] * 6}, "items", "array_above_max_length"),
        ({"items": ["x", [1]]}, "items[1]", "invalid_type"),
        ({"query": [1], "items": ["x"]}, "items[0]", "invalid_type"),
        ({"query": "", "items": ["x", ""]}, "items[1]", "empty_string"),
        ({"query": [1] * 60, "items": [[2] * 40]}, "items", "context_length_exceeded"),
        ({"query": [1], "items": [[-1]]}, "items[0][0]", "invalid_value"),
        ({"items": ["x" * 1600]}, "items", "context_length_exceeded"),
        ({"max_tokens": 3}, "max_tokens", "unknown_parameter"),
        ({"priority": 2**40}, "priority", "integer_above_max_value"),
    ],
)
def test_a_bad_score_request_is_refused_by_name(
    fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(RequestError) as raised:
        score(**fields)
    assert (raised.value.param, raised.value.code) == (param, code)


def test_a_document_is_asked_about_in_the_models_own_chat(tokenizing: Tokenizing) -> None:
    parsed = rerank(tokenizing, **LABELS, instruction="Find animals.", top_n=9)
    for prompt, document in zip(parsed.prompts, "abc", strict=True):
        assert isinstance(prompt, TokenizeRequest)
        assert prompt.messages is not None
        (message,) = prompt.messages
        assert message["role"] == "user"
        for part in ("Find animals.", "Query: fox", f"Document: {document}"):
            assert part in str(message["content"])
    assert parsed.sampling.label_token_ids == (7, 9)
    assert parsed.prompt_only == Reranking(
        documents=["a", "b", "c"], num_results=3, returns_documents=False
    )


def test_a_template_is_filled_once_whatever_a_document_holds(tokenizing: Tokenizing) -> None:
    tricky = "{query} {document} \\1 \\g<1>"
    parsed = rerank(
        tokenizing, **LABELS, template="{document}|{query}|{{instruction}}", documents=[tricky]
    )
    (text,) = texts_of(parsed)
    assert text.startswith(f"{tricky}|fox|{{")


def test_texts_are_scored_in_pairs() -> None:
    assert texts_of(pairs(text_1="a", text_2="b")) == ["a|b"]
    assert texts_of(pairs(text_1="a", text_2=["b", "c"])) == ["a|b", "a|c"]
    assert texts_of(pairs(queries=["a", "b"], documents=["c", "d"])) == ["a|c", "b|d"]
    parsed = pairs(text_1="a", text_2=["b"])
    assert isinstance(parsed.prompt_only, PairScoring)
    assert parsed.sampling.label_token_ids == (7, 9)
    with pytest.raises(RequestError) as caught:
        pairs(text_1=["a", "b"], text_2=["c", "d", "e"])
    assert caught.value.param == "text_1"
    with pytest.raises(RequestError) as caught:
        pairs(text_1="a")
    assert caught.value.param == "text_2"


def test_yes_and_no_are_the_labels_of_a_model_that_has_them(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    last = max(whole["model"]["vocab"].values(), default=0)
    last = max([last, *(token["id"] for token in whole["added_tokens"])])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    whole["added_tokens"] += [
        {"id": last + i, "content": word, "special": False, **flags}
        for i, word in enumerate(("yes", "no"), start=1)
    ]
    path.write_text(json.dumps(whole))
    parsed = rerank(load_tokenizer(folder))
    assert parsed.sampling.label_token_ids == (last + 1, last + 2)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "label_token_ids", "missing_required_parameter"),
        ({"label_token_ids": [1]}, "label_token_ids", "invalid_value"),
        ({**LABELS, "documents": []}, "documents", "empty_array"),
        ({**LABELS, "documents": ["x"] * 6}, "documents", "array_above_max_length"),
        ({**LABELS, "documents": [{"title": "x"}]}, "documents[0].title", "unknown_parameter"),
        ({**LABELS, "documents": ["x" * 1600]}, "documents", "context_length_exceeded"),
        ({**LABELS, "query": ""}, "query", "empty_string"),
        ({**LABELS, "top_n": 0}, "top_n", "integer_below_min_value"),
        ({**LABELS, "template": "{query}"}, "template", "invalid_value"),
        ({**LABELS, "instruction": ""}, "instruction", "empty_string"),
    ],
)
def test_a_bad_rerank_request_is_refused_by_name(
    tokenizing: Tokenizing, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(RequestError) as raised:
        rerank(tokenizing, **fields)
    assert (raised.value.param, raised.value.code) == (param, code)


def test_all_prompts_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = random.randrange(20, 60)
    monkeypatch.setattr(protocol, "MAX_SCORED_TOKENS", limit)
    check_totals(score(), [limit - 3, 3])
    with pytest.raises(RequestError) as raised:
        check_totals(score(), [limit - 3, 4])
    assert raised.value.param == "items"


@pytest.mark.parametrize(
    ("fields", "num_best", "param"),
    [
        ({"prompt_logprobs": 4}, 4, "prompt_logprobs"),
        ({"echo": True, "logprobs": 2}, 2, "logprobs"),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 6}, 6, "prompt_logprobs"),
    ],
)
def test_what_is_returned_of_prompts_is_bounded(
    fields: dict[str, Any], num_best: int, param: str
) -> None:
    body = {"model": "tiny", "prompt": "x", "n": 2, "max_tokens": 0, **fields}
    if not body.get("echo"):
        body["max_tokens"] = 1
    parsed = parse_completion(json.dumps(body).encode(), LIMITS, MODEL)
    assert parsed.sampling.prompt_logprobs == num_best
    most = protocol.MAX_PROMPT_LOGPROBS // (2 * (1 + num_best))
    check_totals(parsed, [most])
    with pytest.raises(RequestError) as raised:
        check_totals(parsed, [most, 1])
    assert raised.value.param == param


def test_probabilities_are_of_all_tokens_or_of_the_labels_alone() -> None:
    inf = float("inf")
    assert probabilities([-1.5, -inf], apply_softmax=False) == pytest.approx([0.2231302, 0.0])
    assert probabilities([-700.0, -701.0], apply_softmax=True) == pytest.approx(
        [0.7310586, 0.2689414]
    )
    assert probabilities([-inf, -2.0], apply_softmax=True) == [0.0, 1.0]
    assert probabilities([-inf, -inf], apply_softmax=True) == [0.0, 0.0]

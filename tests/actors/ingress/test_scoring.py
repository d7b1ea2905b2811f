"""Scores and log-probabilities of prompts: the real routes and a real engine, against transformers.

The demo model, in fp32; no Ray: a worker is an engine that is stepped on the spot.
"""

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, cast

import httpx
import pytest
import torch

from actors.ingress.generation import GenerationJob
from engine.clock import ManualClock
from engine.messages import Assign, TokenRecord
from tests.actors.ingress.edge_app import ASSIGN, MODEL_FOLDER, EdgeApp, edge_app
from tests.harness.in_process import answer, start_engine
from tests.harness.tiny_models import reference_logits

LABELS = [11, 500, 970]


@pytest.fixture(scope="module")
def app() -> EdgeApp:
    """An ingress over one engine, with a limit on tokens that no test reaches."""
    engine = start_engine(scheduler__max_num_batched_tokens=23, scheduler__max_num_seqs=8)
    # No minute passes: what is left of the limit is what was not used.
    made = edge_app({"api.limits": {"*": {"tokens_per_minute": 100_000}}}, clock=ManualClock())

    async def run(
        job: GenerationJob,
        on_placed: Callable[[Assign], None],
        on_joined: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[list[TokenRecord], None]:
        on_placed(ASSIGN)
        for record in answer(engine, [(job.prompt_ids, job.spec.params)])[0].records:
            yield [record]

    cast("Any", made.edge.generations).run = run
    return made


def post(app: EdgeApp, path: str, **fields: Any) -> httpx.Response:
    async def send(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json={"model": "tiny"} | fields)

    response: httpx.Response = app.ask(send)
    return response


def ok(app: EdgeApp, path: str, **fields: Any) -> dict[str, Any]:
    response = post(app, path, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def ids_of(app: EdgeApp, text: str) -> list[int]:
    (ids,) = app.edge.tokenizing.encode_batch([text], add_special_tokens=False)
    assert isinstance(ids, list)
    return ids


def logprobs_of(ids: Sequence[int]) -> torch.Tensor:
    """fp64 [T, vocab]"""
    return reference_logits(MODEL_FOLDER, list(ids)).double().log_softmax(dim=-1)


@pytest.mark.parametrize("apply_softmax", [False, True])
def test_scores_are_the_probabilities_of_the_labels_behind_each_prompt(
    app: EdgeApp, apply_softmax: bool
) -> None:
    query, items = "def add(a, b):\n", ["    return ", "    raise Value", "x"]
    fields = {"label_token_ids": LABELS, "apply_softmax": apply_softmax}
    body = ok(app, "/v1/score", query=query, items=items, **fields)
    prompts = [ids_of(app, query + item) for item in items]
    for scores, ids in zip(body["scores"], prompts, strict=True):
        expected = logprobs_of(ids)[-1, LABELS]
        shares = expected.softmax(0) if apply_softmax else expected.exp()
        assert scores == pytest.approx(shares.tolist(), rel=1e-4, abs=1e-5)
    num_tokens = sum(map(len, prompts))
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == num_tokens
    assert body["usage"]["completion_tokens"] == 0
    again = ok(app, "/v1/score", query=[], items=prompts, **fields)
    assert again["scores"] == [
        pytest.approx(scores, rel=1e-4, abs=1e-5) for scores in body["scores"]
    ]


def test_documents_come_back_by_the_share_of_the_first_label(app: EdgeApp) -> None:
    documents = ["class Stack:", "import os", "while True:", "# nothing"]
    template = "{document}\n# {query}? "
    fields = {"query": "a loop", "documents": documents, "template": template}
    body = ok(app, "/v1/rerank", **fields, label_token_ids=LABELS[:2], return_documents=True)
    shares = []
    for document in documents:
        last = logprobs_of(ids_of(app, f"{document}\n# a loop? "))[-1, LABELS[:2]]
        shares.append(last.softmax(0)[0].item())
    order = sorted(range(4), key=lambda i: -shares[i])
    assert [result["index"] for result in body["results"]] == order
    for result in body["results"]:
        assert result["relevance_score"] == pytest.approx(
            shares[result["index"]], rel=1e-4, abs=1e-5
        )
        assert result["document"] == {"text": documents[result["index"]]}
    best = ok(app, "/v1/rerank", **fields, label_token_ids=LABELS[:2], top_n=2)
    assert [sorted(result) for result in best["results"]] == [["index", "relevance_score"]] * 2
    assert [result["index"] for result in best["results"]] == order[:2]


def test_a_model_to_which_yes_is_no_token_asks_for_labels(app: EdgeApp) -> None:
    refused = post(app, "/v1/rerank", query="q", documents=["d"])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "label_token_ids"
    chat = ok(app, "/v1/rerank", query="q", documents=["d"], label_token_ids=LABELS[:2])
    assert 0 < chat["results"][0]["relevance_score"] < 1


def test_tokens_of_scores_count_for_a_keys_limit(app: EdgeApp) -> None:
    left = []
    for _ in range(2):
        response = post(
            app, "/v1/score", query=[5] * 90, items=[[7] * 10] * 5, label_token_ids=LABELS
        )
        left.append(int(response.headers["x-ratelimit-remaining-tokens"]))
    assert left[0] - left[1] == 5 * (90 + 10)


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echoed_log_probabilities_are_the_prompts_and_then_the_outputs(
    app: EdgeApp, as_ids: bool, max_tokens: int
) -> None:
    text = "def f(x):\n    return x  # über\n"
    ids = ids_of(app, text)
    body = ok(
        app,
        "/v1/completions",
        prompt=ids if as_ids else text,
        echo=True,
        logprobs=3,
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    (choice,) = body["choices"]
    whole = ids + choice["token_ids"]
    assert len(choice["token_ids"]) == max_tokens == body["usage"]["completion_tokens"]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith(text)
    got = choice["logprobs"]
    lengths = {len(got[name]) for name in ("tokens", "token_logprobs", "top_logprobs")}
    assert lengths == {len(whole)} == {len(got["text_offset"])}
    expected = logprobs_of(whole)
    assert (got["token_logprobs"][0], got["top_logprobs"][0]) == (None, None)
    for position in range(1, len(whole)):
        line = expected[position - 1]
        own = line[whole[position]].item()
        assert got["token_logprobs"][position] == pytest.approx(own, rel=1e-4, abs=1e-5)
        best = line.topk(3).values.tolist()
        found = sorted(got["top_logprobs"][position].values(), reverse=True)[:3]
        assert found == pytest.approx(best, rel=1e-4, abs=1e-5)
    special_ids = app.edge.tokenizing.token_bytes.special_ids  # an output does not show them
    for token_id, at, token in zip(whole, got["text_offset"], got["tokens"], strict=True):
        is_shown = token_id not in special_ids and not token.startswith("bytes:")
        assert not is_shown or choice["text"][at:].startswith(token)


def test_an_echo_that_is_streamed_says_the_same_with_its_first_chunk(app: EdgeApp) -> None:
    fields = {"prompt": "import os\n", "echo": True, "logprobs": 1, "temperature": 0, "n": 2}
    whole = ok(app, "/v1/completions", **fields, max_tokens=3, ignore_eos=True)
    streamed = post(
        app, "/v1/completions", **fields, max_tokens=3, ignore_eos=True, stream=True
    ).text
    got: list[dict[str, list[Any]]] = [{}, {}]
    texts = ["", ""]
    for line in streamed.split("\n\n"):
        if line.startswith("data: {"):
            (choice,) = httpx.Response(200, content=line[6:]).json()["choices"]
            texts[choice["index"]] += choice["text"]
            for name, values in choice["logprobs"].items():
                got[choice["index"]].setdefault(name, []).extend(values)
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["text"]
        found, expected = got[choice["index"]], choice["logprobs"]
        assert found["tokens"] == expected["tokens"]
        assert found["text_offset"] == expected["text_offset"]
        assert found["token_logprobs"][1:] == pytest.approx(
            expected["token_logprobs"][1:], rel=1e-4, abs=1e-5
        )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_prompt_logprobs_come_in_vllms_shape_from_both_endpoints(
    app: EdgeApp, path: str, max_tokens: int
) -> None:
    is_chat = "chat" in path
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "x = 1"}
    body = ok(
        app,
        path,
        **prompt,
        prompt_logprobs=2,
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    holder = body if is_chat else body["choices"][0]
    ids, got = holder["prompt_token_ids"], holder["prompt_logprobs"]
    assert (len(got), got[0]) == (len(ids), None)
    expected = logprobs_of(ids)
    for position in range(1, len(ids)):
        line, entries = expected[position - 1], got[position]
        assert 2 <= len(entries) <= 3
        assert next(iter(entries)) == str(ids[position])
        for token_id, entry in entries.items():
            value = line[int(token_id)]
            assert entry["logprob"] == pytest.approx(value.item(), rel=1e-4, abs=1e-5)
            assert abs(entry["rank"] - 1 - int((line > value).sum())) <= 1
            piece = app.edge.tokenizing.piece(int(token_id))
            assert entry["decoded_token"] == piece.decode("utf-8", "replace")
    assert body["usage"]["completion_tokens"] == max_tokens
    plain = ok(app, path, **prompt, max_tokens=1, temperature=0)
    assert (plain if is_chat else plain["choices"][0])["prompt_logprobs"] is None


def test_a_prompt_of_one_token_has_nothing_to_tell(app: EdgeApp) -> None:
    fields = {"prompt": [42], "echo": True, "logprobs": 0, "prompt_logprobs": 3}
    (choice,) = ok(app, "/v1/completions", **fields, max_tokens=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["text_offset"] == [0]


def test_every_score_is_a_number(app: EdgeApp) -> None:
    body = ok(app, "/v1/score", query="", items=["a", "b" * 99], label_token_ids=LABELS)
    assert all(math.isfinite(value) for scores in body["scores"] for value in scores)

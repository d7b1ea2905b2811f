"""/v1/embeddings: the real routes, tokenizer and engine, against transformers.

A small random model; no Ray: a worker is an engine that is stepped on the spot.
"""

import base64
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import jsonschema
import numpy as np
import openai
import pytest
import torch
from transformers import AutoTokenizer

from actors.ingress.composition import describe_embeddings
from actors.ingress.generation import GenerationJob
from actors.ingress.openapi import build_openapi
from actors.ingress.prompt_tokens import Batchers
from actors.lifecycle.preflight import check_startable
from actors.openai.served_model import EmbeddingSpace
from actors.rpc.handles import BatcherHandle
from actors.tokenizer_batcher import PromptTokenizer
from configs.load import load_config
from configs.schema import ApiConfig, TokenizerConfig
from engine.clock import ManualClock, MonotonicClock
from engine.messages import Assign, TokenizeReply, TokenizeRequest, TokenRecord
from engine.models.spec import load_spec
from tests.actors.ingress.edge_app import ASSIGN, EdgeApp, edge_app
from tests.harness.in_process import answer, start_engine
from tests.harness.tiny_models import edit_config, reference_embedding, save_embedding_model
from tests.harness.tokenizer_folders import LINES, byte_level_folder

TEXTS = [*LINES, "x", "the same prefix, " * 9 + "and an end"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = byte_level_folder(tmp_path_factory.mktemp("embedding"), adds_eos=True)
    vocab_size = len(AutoTokenizer.from_pretrained(str(made)))
    save_embedding_model(made, seed=7, vocab_size=vocab_size, max_position_embeddings=600)
    edit_config(made, is_matryoshka=True)
    return made


class LocalBatcher:
    """A tokenizer batcher in this process."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = PromptTokenizer(str(folder), TokenizerConfig())

    async def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        (reply,) = self._tokenizer.encode_batch([request])
        return reply


@pytest.fixture(scope="module")
def app(folder: Path) -> EdgeApp:
    """An ingress over one engine, with a limit on tokens that no test reaches."""
    engine = start_engine(
        model__path=str(folder),
        scheduler__max_num_batched_tokens=23,
        scheduler__max_num_seqs=8,
    )
    batcher = cast("BatcherHandle", LocalBatcher(folder))

    async def find(name: str) -> BatcherHandle:
        return batcher

    batchers = Batchers(find, patience_s=1.0, clock=MonotonicClock())
    batchers.update(["batcher-0"])
    made = edge_app(
        {"api.limits": {"*": {"tokens_per_minute": 100_000}}},
        clock=ManualClock(),
        model_folder=folder,
        batchers=batchers,
        makes_embeddings=True,
    )

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


def post(app: EdgeApp, path: str = "/v1/embeddings", **fields: Any) -> httpx.Response:
    async def send(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json={"model": "tiny"} | fields)

    response: httpx.Response = app.ask(send)
    return response


def vectors_of(app: EdgeApp, **fields: Any) -> list[list[float]]:
    response = post(app, **fields)
    assert response.status_code == 200, response.text
    body = response.json()
    assert [found["index"] for found in body["data"]] == list(range(len(body["data"])))
    return [found["embedding"] for found in body["data"]]


def ids_of(folder: Path, texts: Sequence[str], **settings: Any) -> list[list[int]]:
    encoded = AutoTokenizer.from_pretrained(str(folder))(list(texts), **settings)
    found: list[list[int]] = encoded["input_ids"]
    return found


def expected_of(folder: Path, prompts: Sequence[list[int]], num: int = 64) -> list[list[float]]:
    whole = torch.stack([reference_embedding(folder, ids) for ids in prompts])
    shown: list[list[float]] = torch.nn.functional.normalize(whole[:, :num]).tolist()
    return shown


def close(found: list[list[float]], expected: list[list[float]]) -> bool:
    return np.shape(found) == np.shape(expected) and np.allclose(found, expected, atol=1e-4)


def test_the_openai_client_reads_the_embeddings_of_texts(app: EdgeApp, folder: Path) -> None:
    """It asks for base64 unless told otherwise, and decodes it itself."""

    async def send(client: httpx.AsyncClient) -> list[openai.types.CreateEmbeddingResponse]:
        theirs = openai.AsyncOpenAI(
            api_key="k", base_url=f"{client.base_url}/v1", http_client=client
        )
        asked = {"model": "tiny", "input": TEXTS}
        plain = await theirs.embeddings.create(**asked)
        return [plain, await theirs.embeddings.create(**asked, encoding_format="float")]

    ids = ids_of(folder, TEXTS)
    assert {prompt[-1] for prompt in ids} == {0}, "the tokenizer ends every prompt"
    for found in app.ask(send):
        assert (found.object, found.model) == ("list", "tiny")
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
        assert [one.object for one in found.data] == ["embedding"] * len(TEXTS)
        assert close([one.embedding for one in found.data], expected_of(folder, ids))


def test_base64_holds_the_numbers_of_the_list(app: EdgeApp) -> None:
    (listed,) = vectors_of(app, input="a text", encoding_format="float")
    (default,) = vectors_of(app, input="a text")
    (packed,) = vectors_of(app, input="a text", encoding_format="base64")
    assert listed == default
    assert np.frombuffer(base64.b64decode(cast("Any", packed)), dtype="<f4").tolist() == listed


def test_the_folder_passes_the_checks_before_a_start(folder: Path) -> None:
    check_startable(load_config(None, {"model.path": str(folder)}))


@pytest.mark.parametrize(("asked", "can_shorten"), [(None, True), (True, True), (False, False)])
def test_the_configuration_may_say_otherwise_than_the_folder(
    folder: Path, asked: bool | None, can_shorten: bool
) -> None:
    space = describe_embeddings(ApiConfig(matryoshka=asked), load_spec(folder))
    assert space == EmbeddingSpace(num_dimensions=64, is_normalised=True, can_shorten=can_shorten)


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_an_answer_is_what_the_document_says(app: EdgeApp, encoding_format: str) -> None:
    document = json.loads(build_openapi("name", "1"))
    answer = document["paths"]["/v1/embeddings"]["post"]["responses"]["200"]
    schema = answer["content"]["application/json"]["schema"]
    body = post(app, input=["a", "b"], encoding_format=encoding_format).json()
    jsonschema.validate(body, schema | {"components": document["components"]})


def test_token_ids_are_embedded_as_they_are(app: EdgeApp, folder: Path) -> None:
    prompts = [[5, 6, 7], [9], list(range(10, 80))]
    assert close(vectors_of(app, input=prompts), expected_of(folder, prompts))
    assert close(vectors_of(app, input=prompts[2]), expected_of(folder, prompts[2:]))


def test_a_text_comes_without_special_tokens_if_asked(app: EdgeApp, folder: Path) -> None:
    ids = ids_of(folder, TEXTS[:2], add_special_tokens=False)
    found = vectors_of(app, input=TEXTS[:2], add_special_tokens=False)
    assert close(found, expected_of(folder, ids))


@pytest.mark.parametrize("num_dimensions", [1, 20, 64])
def test_a_shortened_embedding_is_normalised_again(
    app: EdgeApp, folder: Path, num_dimensions: int
) -> None:
    found = vectors_of(app, input=TEXTS, dimensions=num_dimensions)
    expected = expected_of(folder, ids_of(folder, TEXTS), num_dimensions)
    assert close(found, expected)


def test_a_text_that_is_too_long_is_cut_if_asked(app: EdgeApp, folder: Path) -> None:
    texts = ["word " * 2000, "short"]
    refused = post(app, input=texts)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    ids = ids_of(folder, texts, truncation=True, max_length=40)
    assert len(ids[0]) == 40
    found = vectors_of(app, input=texts, truncate_prompt_tokens=40)
    assert close(found, expected_of(folder, ids))


def test_tokens_of_embeddings_count_for_a_keys_limit(app: EdgeApp) -> None:
    left = [
        int(post(app, input=[[5] * 90] * 3).headers["x-ratelimit-remaining-tokens"])
        for _ in range(2)
    ]
    assert left[0] - left[1] == 3 * 90


def test_usage_tells_how_much_of_the_prompts_was_cached(app: EdgeApp) -> None:
    prompt = [11] * 50
    cached = [
        post(app, input=[prompt]).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached == [0, 48]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/score", {"query": "q", "items": ["x"], "label_token_ids": [5]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    ],
)
def test_other_endpoints_are_refused_with_the_models_name(
    app: EdgeApp, path: str, fields: dict[str, Any]
) -> None:
    refused = post(app, path, **fields)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert "The model `tiny` makes embeddings" in error["message"]
    if path != "/v1/messages":  # Anthropic's errors have no codes
        assert (error["code"], error["param"]) == ("unsupported_endpoint", "model")


def test_a_model_that_generates_refuses_embeddings() -> None:
    refused = post(edge_app(), input="x")
    assert refused.status_code == 400
    assert refused.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": "model",
        "code": "unsupported_endpoint",
    }

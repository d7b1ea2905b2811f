"""Every door by which a token id enters, with a tokenizer that knows more of them than the model.

The model has 3,000 embeddings, the tokenizer 3,072 tokens.
"""

from typing import Any

import httpx
import pytest

from engine.text.tokenizing import load_tokenizer
from tests.actors.ingress.edge_app import MODEL_FOLDER, EdgeApp, edge_app

NUM_EMBEDDINGS = 3000
TOKENS = load_tokenizer(MODEL_FOLDER)
# A text whose tokens are among the 72 that the model lacks.
BEYOND = next(
    text
    for text in (TOKENS.piece(i).decode(errors="replace") for i in range(3000, 3072))
    if max(*TOKENS.encode_batch([text], add_special_tokens=False)[0], 0) >= NUM_EMBEDDINGS
)
MESSAGES = [{"role": "user", "content": BEYOND}]


@pytest.fixture(scope="module")
def app() -> EdgeApp:
    return edge_app(num_embeddings=NUM_EMBEDDINGS)


def doors(token_id: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """By which an id comes as a number."""
    return {
        "prompt": ("/v1/completions", {"prompt": [1, token_id]}),
        "prompts": ("/v1/completions", {"prompt": [[1], [token_id]]}),
        "bias": ("/v1/completions", {"prompt": "x", "logit_bias": {str(token_id): 1}}),
        "chat bias": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "logit_bias": {str(token_id): 1}},
        ),
        "stop": ("/v1/completions", {"prompt": "x", "stop_token_ids": [token_id]}),
        "label": (
            "/v1/score",
            {"query": "a", "items": ["b"], "label_token_ids": [token_id]},
        ),
        "query": (
            "/v1/score",
            {"query": [token_id], "items": [[1]], "label_token_ids": [1]},
        ),
        "item": (
            "/v1/score",
            {"query": [1], "items": [[token_id]], "label_token_ids": [1]},
        ),
        "detokenize": ("/detokenize", {"tokens": [token_id]}),
    }


@pytest.mark.parametrize("door", doors(0))
def test_an_id_beyond_the_embeddings_is_refused_and_the_last_one_is_not(
    app: EdgeApp, door: str
) -> None:
    refused = ask(app, *doors(NUM_EMBEDDINGS)[door])
    assert refused.status_code == 400, refused.text
    assert "0 to 2999" in refused.text
    taken = ask(app, *doors(NUM_EMBEDDINGS - 1)[door])
    assert taken.status_code == 200, taken.text


def ask(app: EdgeApp, path: str, body: dict[str, Any]) -> httpx.Response:
    needs_length = "completions" in path

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        whole = {"model": "tiny"} | body | ({"max_tokens": 1} if needs_length else {})
        return await client.post(path, json=whole)

    response: httpx.Response = app.ask(send)
    return response


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": BEYOND}),
        ("/v1/completions", {"prompt": ["x", BEYOND]}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/tokenize", {"prompt": BEYOND}),
        ("/v1/score", {"query": BEYOND, "items": ["a"], "label_token_ids": [1]}),
    ],
)
def test_a_text_with_a_token_beyond_the_embeddings_is_refused_by_name(
    app: EdgeApp, path: str, body: dict[str, Any]
) -> None:
    answer = ask(app, path, body)
    assert answer.status_code == 400, answer.text
    assert "ids end at 2999" in answer.text
    assert ask(app, path, _without(body)).status_code == 200


def _without(body: dict[str, Any]) -> dict[str, Any]:
    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items()}
        if isinstance(value, list):
            return [cleaned(item) for item in value]
        return "x" if value == BEYOND else value

    return {key: cleaned(value) for key, value in body.items()}

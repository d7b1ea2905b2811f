"""The running application's smaller routes: tokens, echoed prompts, the OpenAPI document."""

from functools import cache
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from load_tests.testbed.deployed import MODEL, PATIENCE_S, Application

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT = "import os\nimport "
MESSAGES = [{"role": "user", "content": "def main():"}]
MAX_MODEL_LEN = 2048


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def test_tokens_of_text_and_messages_are_those_of_transformers(disaggregated: Application) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{disaggregated.url}{path}", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text[:300]
        return answer.json()

    text = post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert text["tokens"] == tokenizer()(PROMPT).input_ids
    assert (text["count"], text["max_model_len"]) == (len(text["tokens"]), MAX_MODEL_LEN)
    assert "".join(text["token_strs"]) == PROMPT
    assert post("/detokenize", {"tokens": text["tokens"]}) == {"prompt": PROMPT}
    chat = post("/tokenize", {"model": disaggregated.model, "messages": MESSAGES})
    assert chat["tokens"] == tokenizer().apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )


def test_an_echoed_completion_begins_with_its_prompt(disaggregated: Application) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 12}
    with disaggregated.client() as client:
        plain = client.completions.create(model=disaggregated.model, **fields)
        echoed = client.completions.create(model=disaggregated.model, echo=True, **fields)
        assert echoed.choices[0].text == PROMPT + plain.choices[0].text
        chunks = client.completions.create(
            model=disaggregated.model, echo=True, stream=True, **fields
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.choices[0].text


def test_every_route_is_in_the_openapi_document(disaggregated: Application) -> None:
    document = httpx.get(f"{disaggregated.url}/openapi.json", timeout=PATIENCE_S).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/ChatBody")
    for path, item in document["paths"].items():
        if "get" in item and "{" not in path:
            assert httpx.get(f"{disaggregated.url}{path}", timeout=PATIENCE_S).status_code == 200

"""A whole application answers as an engine in this process does, however its KV is moved."""

import asyncio
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from engine.request import SamplingParams
from load_tests.testbed.deployed import MODEL, Application
from tests.harness.in_process import answer, start_engine

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPTS = [
    "def add(a, b):\n    return ",
    "import os\nimport ",
    "for i in range(",
    "class Foo(object):\n    def __init__(self, ",
    "try:\n    import ",
    "if __name__ == ",
    "def main():\n    parser = argparse.",
    "with open(filename, ",
]
TOKENS = 24
VOCAB_SIZE = 3072
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.4},
)


def complete(
    application: Application, prompts: list[str | list[int]], sampling: Mapping[str, Any]
) -> list[list[int]]:
    """Token ids of completions that are asked for at once."""
    params = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}} | sampling
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: application.complete(prompt, **params), prompts))


@pytest.fixture(params=["disaggregated", "over_gloo_pairs"])
def application(request: pytest.FixtureRequest) -> Application:
    found: Application = request.getfixturevalue(request.param)
    return found


def test_a_completion_through_every_actor_is_that_of_one_engine(
    application: Application, rng: random.Random
) -> None:
    encode = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode
    asked: list[tuple[str | list[int], list[int]]] = [
        (text, encode(text).ids) for text in PROMPTS[:4]
    ]
    for number in (1, 4, 5, 131):
        ids = rng.choices(range(10, VOCAB_SIZE), k=number)
        asked.append((ids, ids))
    engine = start_engine(model__path=str(MODEL))
    for sampling in SAMPLINGS:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **sampling)
        expected = answer(engine, [(ids, params) for _, ids in asked])
        found = complete(application, [prompt for prompt, _ in asked], sampling)
        assert found == [one.tokens for one in expected]
    application.wait_quiet()
    senders = [seen["sender"] for seen in application.statistics().values() if "sender" in seen]
    assert sum(sender["num_sent"] for sender in senders) >= 2 * len(asked)
    assert sum(sender["num_fallbacks"] for sender in senders) == 0


@pytest.mark.nightly  # by day test_worker_deaths.py compares four, while it kills workers
def test_32_concurrent_streams_give_the_tokens_of_single_requests(
    disaggregated: Application,
) -> None:
    expected = {prompt: disaggregated.complete(prompt, max_tokens=48) for prompt in PROMPTS}

    async def stream(client: openai.AsyncOpenAI, prompt: str) -> list[int]:
        token_ids: list[int] = []
        chunks = await client.completions.create(
            model=disaggregated.model,
            prompt=prompt,
            temperature=0.0,
            max_tokens=48,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        async for chunk in chunks:
            for choice in chunk.choices:
                token_ids += choice.model_extra["token_ids"]  # type: ignore[index]
        return token_ids

    async def run() -> list[list[int]]:
        async with disaggregated.async_client() as client:
            return await asyncio.gather(*(stream(client, p) for p in PROMPTS * 4))

    answers = asyncio.run(run())
    assert answers == [expected[prompt] for prompt in PROMPTS * 4]
    disaggregated.wait_quiet()

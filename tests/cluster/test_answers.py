"""The whole application answers, and every way through it gives the same tokens."""

import asyncio

import openai
import pytest

from load_tests.testbed.deployed import Application

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


def test_a_completion_through_every_actor_is_the_unified_worker_s(
    disaggregated: Application, unified: Application
) -> None:
    for prompt in PROMPTS:
        assert disaggregated.complete(prompt) == unified.complete(prompt), prompt
    disaggregated.wait_quiet()
    unified.wait_quiet()


@pytest.mark.nightly  # by day test_worker_deaths.py compares twelve, while it kills workers
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

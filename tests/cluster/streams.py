"""Streams that go on in the background while a test does something to the application."""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import openai

from load_tests.testbed.deployed import Application, wait_until

PROMPTS = (
    "import os\nimport ",
    "for i in range(",
    "class Foo(object):\n    def __init__(self, ",
    "def main():\n    parser = argparse.",
)
JOIN_S = 120.0


def undisturbed(
    application: Application, prompts: Sequence[str], max_tokens: int
) -> dict[str, list[int]]:
    """Greedy tokens of each prompt, asked for at once while nothing happens to anybody."""

    def complete(prompt: str) -> list[int]:
        return application.complete(prompt, max_tokens=max_tokens, extra_body={"ignore_eos": True})

    with ThreadPoolExecutor(len(prompts)) as pool:
        return dict(zip(prompts, pool.map(complete, prompts), strict=True))


class Load:
    """`num_streams` greedy streams, each started anew after its end, until the block is left.

    `num_finished` counts streams that brought exactly the tokens of an undisturbed request;
    `problems` says what happened to the others.
    """

    def __init__(
        self,
        application: Application,
        *,
        num_streams: int = 4,
        max_tokens: int,
        gap_s: float = 0.0,
    ) -> None:
        """gap_s: between a stream and the next; leaves processors to what a test waits for."""
        self._application = application
        self._gap_s = gap_s
        self._num_streams = num_streams
        self._max_tokens = max_tokens
        self._expected = undisturbed(application, PROMPTS[:num_streams], max_tokens)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.num_finished = 0
        self.num_started = 0
        self.num_streaming = 0  # now, with a first token
        self.problems: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_streaming()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let every stream under way come to its end."""
        self._is_stopping.set()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), f"streams did not end: {vars(self)}"

    def wait_streaming(self) -> None:
        """Until all streams are in the middle of their tokens at once."""
        wait_until(
            lambda: self.num_streaming == self._num_streams, lambda: f"streams run: {vars(self)}"
        )

    def wait_more(self, num_finished: int) -> None:
        """Until so many more streams have come to their end."""
        goal = self.num_finished + num_finished
        wait_until(
            lambda: self.num_finished >= goal, lambda: f"{goal} streams finished: {vars(self)}"
        )

    async def _run(self) -> None:
        async with self._application.async_client(timeout=JOIN_S) as client:
            prompts = (PROMPTS[i % len(PROMPTS)] for i in range(self._num_streams))
            await asyncio.gather(*(self._repeat(client, prompt) for prompt in prompts))

    async def _repeat(self, client: openai.AsyncOpenAI, prompt: str) -> None:
        while not self._is_stopping.is_set():
            self.num_started += 1
            try:
                token_ids = await self._stream(client, prompt)
            except (openai.APIError, OSError) as error:
                self.problems[f"{type(error).__name__}: {error}"] += 1
                if self.problems.total() > 100:
                    return  # enough is known, and nobody waits between tries
                continue
            if token_ids == self._expected[prompt]:
                self.num_finished += 1
            else:
                self.problems[f"{len(token_ids)} tokens, of {self._max_tokens}, or others"] += 1
            await asyncio.sleep(self._gap_s)

    async def _stream(self, client: openai.AsyncOpenAI, prompt: str) -> list[int]:
        chunks = await client.completions.create(
            model=self._application.model,
            prompt=prompt,
            temperature=0.0,
            max_tokens=self._max_tokens,
            stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        token_ids: list[int] = []
        try:
            async for chunk in chunks:
                self.num_streaming += not token_ids
                for choice in chunk.choices:
                    token_ids += choice.model_extra["token_ids"]  # type: ignore[index]
        finally:
            self.num_streaming -= bool(token_ids)
        return token_ids

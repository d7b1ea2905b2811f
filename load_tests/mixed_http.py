"""Serves a mixed load through a running server: one streamed completion a request, prompts as ids.

The client shares one event loop, and its processors with the server where both run on one machine.
"""

import asyncio
import gc
import time
from collections.abc import Sequence

import httpx
import msgspec

from load_tests.mixed_load import MixedLoad, Served, Stamps

TIMEOUT_S = 600.0
EVENT = "data: "
DONE = "[DONE]"


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None  # of this event alone


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


class MixedClient:
    """Asks a server over as many connections as there are requests at once."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self._url = url.rstrip("/")
        self._client = client
        self._model = ""

    async def connect(self) -> None:
        """Learn the model's name. Raises httpx.HTTPError when there is no server."""
        answer = await self._client.get(f"{self._url}/v1/models")
        answer.raise_for_status()
        self._model = answer.json()["data"][0]["id"]

    async def serve(self, load: MixedLoad, vocab_size: int) -> list[Served]:
        """Run `load` to its last token. Raises httpx.HTTPError when a request is refused."""
        arrivals = load.arrivals()
        assert arrivals, f"nobody arrives in {load.duration_s} s at {load.rate}/s"
        prompts = load.prompts(arrivals, vocab_size)
        stamps = Stamps(arrivals)
        gc.collect()
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for index, arrival in enumerate(arrivals):
                await asyncio.sleep(max(0.0, start_s + arrival.at_s - time.perf_counter()))
                one = self._one(index, prompts[index], load.num_output_tokens, stamps, start_s)
                tasks.create_task(one)
        return stamps.served(load.num_output_tokens)

    async def _one(
        self, index: int, prompt: Sequence[int], num_tokens: int, stamps: Stamps, start_s: float
    ) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        is_done = False
        async with self._client.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                data = line.removeprefix(EVENT)
                is_done = is_done or data == DONE
                if data and data != DONE:
                    num_new = _num_tokens(data)
                    if num_new:
                        stamps.add(index, time.perf_counter() - start_s, num_new)
        assert is_done, f"the stream of request {index} broke off"


def serve_over_http(url: str, load: MixedLoad, vocab_size: int) -> list[Served]:
    """Run `load` with ids below `vocab_size`. Raises httpx.HTTPError without a willing server."""
    return asyncio.run(_serve(url, load, vocab_size))


async def _serve(url: str, load: MixedLoad, vocab_size: int) -> list[Served]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        mixed = MixedClient(url, client)
        await mixed.connect()
        return await mixed.serve(load, vocab_size)


def _num_tokens(data: str) -> int:
    """How many tokens a server-sent event brings."""
    choices = msgspec.json.decode(data, type=_Chunk).choices
    return sum(len(choice.token_ids or []) for choice in choices)

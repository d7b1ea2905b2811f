"""Serves a mixed load through a running server: one streamed completion a request, prompts as ids.

One process reads some thousand tokens a second; for more, several take every n-th request each.
They share processors with the server where both run on one machine.
"""

import asyncio
import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError

import httpx
import msgspec

from load_tests.mixed_load import MixedLoad, Served, Stamps

TIMEOUT_S = 600.0
EVENT = "data: "
DONE = "[DONE]"
GATHER_S = 120.0  # for several processes to start, import and draw their prompts


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None  # of this event alone


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Every `of`-th request from number `first` on."""

    first: int = 0
    of: int = 1
    gather: Callable[[], object] = lambda: None  # returns when every client may start


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

    async def serve(self, load: MixedLoad, vocab_size: int, share: Share) -> list[Served]:
        """Run `load` to its last token. Raises ExceptionGroup when requests are refused."""
        arrivals = load.arrivals()
        assert len(arrivals) >= share.of, f"too few arrive in {load.duration_s} s at {load.rate}/s"
        prompts = load.prompts(arrivals, vocab_size)[share.first :: share.of]
        arrivals = arrivals[share.first :: share.of]
        stamps = Stamps(arrivals)
        gc.collect()
        share.gather()
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


def serve_over_http(
    url: str, load: MixedLoad, vocab_size: int, num_clients: int = 1
) -> list[Served]:
    """Run `load` with ids below `vocab_size`, from so many processes.

    Raises ConnectionError without a willing server.
    """
    if num_clients == 1:
        return _serve_share(url, load, vocab_size, Share())
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(num_clients, timeout=GATHER_S)
    with ProcessPoolExecutor(num_clients, spawn, _keep_barrier, (barrier,)) as clients:
        numbers = range(num_clients)
        asked = [
            clients.submit(_serve_gathered, url, load, vocab_size, i, num_clients) for i in numbers
        ]
        failures = [failure for client in asked if (failure := client.exception())]
    # A client that failed breaks the barrier for those that wait there: its reason comes first.
    for failure in sorted(failures, key=lambda one: isinstance(one, BrokenBarrierError)):
        raise failure
    served = [one for client in asked for one in client.result()]
    return sorted(served, key=lambda one: one.arrival.at_s)


# Of the clients, in the process of each: it can be given to a process at its start only.
_barrier: Barrier | None = None


def _keep_barrier(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _serve_gathered(
    url: str, load: MixedLoad, vocab_size: int, first: int, of: int
) -> list[Served]:
    """One client's part, in its own process; all begin together."""
    assert _barrier is not None, "the process was not prepared"
    share = Share(first=first, of=of, gather=_barrier.wait)
    try:
        return _serve_share(url, load, vocab_size, share)
    except BaseException:
        _barrier.abort()  # nobody is to wait for this client
        raise


def _serve_share(url: str, load: MixedLoad, vocab_size: int, share: Share) -> list[Served]:
    try:
        return asyncio.run(_serve(url, load, vocab_size, share))
    except (httpx.HTTPError, ExceptionGroup) as error:  # of one request, or of some at once
        reason = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        # An httpx error cannot be passed on to another process.
        raise ConnectionError(f"{url}: {reason!r}") from error


async def _serve(url: str, load: MixedLoad, vocab_size: int, share: Share) -> list[Served]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        mixed = MixedClient(url, client)
        await mixed.connect()
        return await mixed.serve(load, vocab_size, share)


def _num_tokens(data: str) -> int:
    """How many tokens a server-sent event brings."""
    choices = msgspec.json.decode(data, type=_Chunk).choices
    return sum(len(choice.token_ids or []) for choice in choices)

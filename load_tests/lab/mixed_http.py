"""Serves a mixed load through a running server: one streamed completion a request, prompts as ids.

One process reads some ten thousand tokens a second; for more, several take every n-th request each.
They share processors with the server where both run on one machine.
"""

import asyncio
import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError
from typing import Self

import msgspec

from load_tests.http_load.client import DONE, LoadError, RefusedError, Server
from load_tests.http_load.preflight import find_model
from load_tests.http_load.sse import EventParser
from load_tests.lab.child_processes import die_with_parent
from load_tests.mixed_load import (
    SHORT_FIRST_PRIORITIES,
    Arrival,
    MixedLoad,
    OverloadError,
    Served,
    Stamps,
)
from load_tests.testbed.stream_client import Piece, StreamClient

TIMEOUT_S = 600.0
GATHER_S = 120.0  # for several processes to start, import and draw their prompts


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None  # of this event alone


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How a server is asked."""

    says_priority: bool = False  # for a vLLM with priority scheduling: short prompts first
    patience_s: float = TIMEOUT_S  # for the whole answer to a request


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Every `of`-th request from number `first` on."""

    first: int = 0
    of: int = 1
    how: Asking = Asking()
    gather: Callable[[], object] | None = None  # returns when every client may start


class MixedClient:
    """Asks a server over as many connections as there are requests at once.

    While requests are due it only writes and reads: what came is looked at in the end.
    """

    def __init__(self, server: Server, model: str) -> None:
        self._client = StreamClient(server)
        self._model = model

    async def serve(self, load: MixedLoad, vocab_size: int, share: Share) -> list[Served]:
        """Run `load` to its last token. Raises ExceptionGroup when requests are refused."""
        arrivals = load.arrivals()
        assert len(arrivals) >= share.of, f"too few arrive in {load.duration_s} s at {load.rate}/s"
        prompts = load.prompts(arrivals, vocab_size)[share.first :: share.of]
        arrivals = arrivals[share.first :: share.of]
        requests = [
            self._request(
                prompt, load.num_output_tokens, arrival if share.how.says_priority else None
            )
            for prompt, arrival in zip(prompts, arrivals, strict=True)
        ]
        gc.collect()
        gc.freeze()
        if share.gather is not None:
            share.gather()
        start_s = time.perf_counter()
        due_s = [start_s + one.at_s for one in arrivals]
        answers = await self._ask_when_due(requests, due_s, share.how.patience_s)
        self._client.close()
        stamps = Stamps(arrivals)
        for index, pieces in enumerate(answers):
            _stamp(stamps, index, pieces, start_s)
        return stamps.served(load.num_output_tokens)

    def _request(self, prompt: Sequence[int], num_tokens: int, ranked: Arrival | None) -> bytes:
        """`ranked`: whose priority the server is told; None = it is told none."""
        body: dict[str, object] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if ranked is not None:
            body["priority"] = SHORT_FIRST_PRIORITIES[ranked.length_class]
        return self._client.request("/v1/completions", msgspec.json.encode(body))

    async def _ask_when_due(
        self, requests: Sequence[bytes], due_s: Sequence[float], patience_s: float
    ) -> list[list[Piece]]:
        """Sends each request when it is due; returns the pieces of each answer.

        A thread says when: an event loop wakes up to a millisecond late.
        """
        loop, is_over = asyncio.get_running_loop(), threading.Event()
        answers: list[list[Piece]] = [[] for _ in requests]

        async def ask(index: int) -> None:
            async with asyncio.timeout(patience_s):
                answers[index] = await self._client.post(requests[index])

        async with asyncio.TaskGroup() as tasks:

            def start(index: int) -> None:
                if not is_over.is_set():
                    tasks.create_task(ask(index))

            def call_when_due() -> None:
                for index, at_s in enumerate(due_s):
                    if is_over.wait(max(0.0, at_s - time.perf_counter())):
                        return
                    loop.call_soon_threadsafe(start, index)

            try:
                await asyncio.to_thread(call_when_due)
            finally:
                is_over.set()
        return answers


def _stamp(stamps: Stamps, index: int, pieces: Sequence[Piece], start_s: float) -> None:
    """Notes when the tokens of one answer came. Raises AssertionError if it broke off."""
    events, is_done = EventParser(), False
    for at_s, piece in pieces:
        for data in events.feed(piece):
            is_done = is_done or data == DONE
            if data != DONE and (num_new := _num_tokens(data)):
                stamps.add(index, at_s - start_s, num_new)
    assert is_done, f"the stream of request {index} broke off"


class HttpClients:
    """Processes that ask servers over HTTP, kept for several loads; one client is this process."""

    def __init__(self, num_clients: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._num = num_clients
        self._barrier = spawn.Barrier(num_clients, timeout=GATHER_S)
        self._pool = ProcessPoolExecutor(num_clients, spawn, _begin_client, (self._barrier,))
        # They start and import now, not when the first load is due.
        self._met = (
            [self._pool.submit(_meet) for _ in range(num_clients)] if num_clients > 1 else []
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown()

    def serve(self, url: str, load: MixedLoad, vocab_size: int, how: Asking) -> list[Served]:
        """Run `load` with ids below `vocab_size`.

        Raises OverloadError when a request is refused for want of capacity, and ConnectionError
        without a willing server, or for an answer that does not end within the patience of `how`.
        """
        if self._num == 1:
            return _serve_share(url, load, vocab_size, Share(how=how))
        while self._met:
            self._met.pop().result()
        self._barrier.reset()  # a client that failed has broken it
        shares = [Share(first=i, of=self._num, how=how) for i in range(self._num)]
        asked = [
            self._pool.submit(_serve_gathered, url, load, vocab_size, share) for share in shares
        ]
        failures = [failure for client in asked if (failure := client.exception())]
        # A client that failed breaks the barrier for those that wait there: its reason comes first.
        for failure in sorted(failures, key=lambda one: isinstance(one, BrokenBarrierError)):
            raise failure
        served = [one for client in asked for one in client.result()]
        return sorted(served, key=lambda one: one.arrival.at_s)


def serve_over_http(
    url: str, load: MixedLoad, vocab_size: int, num_clients: int = 1
) -> list[Served]:
    """Run `load` with ids below `vocab_size`, from so many processes that end with it.

    Raises OverloadError and ConnectionError as `HttpClients.serve` does.
    """
    with HttpClients(num_clients) as clients:
        return clients.serve(url, load, vocab_size, Asking())


# Of the clients, in the process of each: it can be given to a process at its start only.
_barrier: Barrier | None = None


def _begin_client(barrier: Barrier) -> None:
    die_with_parent()  # it would wait for loads for ever
    global _barrier
    _barrier = barrier


def _meet() -> None:
    """Returns when all clients run."""
    assert _barrier is not None, "the process was not prepared"
    _barrier.wait()


def _serve_gathered(url: str, load: MixedLoad, vocab_size: int, share: Share) -> list[Served]:
    """One client's part, in its own process; all begin together."""
    assert _barrier is not None, "the process was not prepared"
    try:
        return _serve_share(url, load, vocab_size, replace(share, gather=_barrier.wait))
    except BaseException:
        _barrier.abort()  # nobody is to wait for this client
        raise


def _serve_share(url: str, load: MixedLoad, vocab_size: int, share: Share) -> list[Served]:
    server = Server(url=url.rstrip("/"))
    try:
        client = MixedClient(server, find_model(server, None).model)
        return asyncio.run(client.serve(load, vocab_size, share))
    except (LoadError, OSError, ExceptionGroup) as error:  # of one request, or of some at once
        reason = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        # A server that has no capacity now says when to come back.
        is_full = isinstance(reason, RefusedError) and reason.retry_after_s is not None
        # Not every error can be passed on to another process.
        raise (OverloadError if is_full else ConnectionError)(f"{url}: {reason!r}") from error


def _num_tokens(data: str) -> int:
    """How many tokens a server-sent event brings."""
    choices = msgspec.json.decode(data, type=_Chunk).choices
    return sum(len(choice.token_ids or []) for choice in choices)

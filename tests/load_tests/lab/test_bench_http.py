"""The HTTP figure counts what the server says, notices broken streams, and its parts add up."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from load_tests.lab.bench_http import FreshPrompts, Server, Stages
from load_tests.lab.bench_transformers import encoder
from tests.harness.seeds import seed_of

MODEL = Path(__file__).resolve().parents[3] / "demo_model" / "laps-demo"
SEED = seed_of(__name__)
T = TypeVar("T")


class CountingServer:
    """Answers as the protocol says; tokens it was asked for are what it reports as usage."""

    def __init__(self, *, breaks_off: bool = False) -> None:
        self._breaks_off = breaks_off
        self.bodies: list[dict[str, object]] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "a model"}]})
        if request.url.path == "/version":
            return httpx.Response(200, json={"version": "0"})
        body = json.loads(request.content)
        self.bodies.append(body)
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": 1}
        events = [{"choices": [{"text": "x"}], "usage": None}, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return httpx.Response(
            200, text="".join(lines + ["data: [DONE]\n\n"] * (not self._breaks_off))
        )


def ask(counting: CountingServer, call: Callable[[Server], Coroutine[object, object, T]]) -> T:
    async def run() -> T:
        transport = httpx.MockTransport(counting.answer)
        async with httpx.AsyncClient(transport=transport) as client:
            server = Server("http://server/", client)
            await server.connect()
            return await call(server)

    return asyncio.run(run())


def test_a_stream_is_counted_by_the_usage_the_server_reports() -> None:
    counting = CountingServer()
    assert ask(counting, lambda server: server.complete("text", 37)) == 37
    [body] = counting.bodies
    assert (body["model"], body["prompt"], body["ignore_eos"]) == ("a model", "text", True)


def test_a_stream_without_its_end_is_not_a_figure() -> None:
    with pytest.raises(AssertionError, match="broke off"):
        ask(CountingServer(breaks_off=True), lambda server: server.complete([1, 2], 5))


def test_the_first_token_is_timed_on_a_request_for_one_token() -> None:
    counting = CountingServer()
    assert ask(counting, lambda server: server.first_token_s([4, 5, 6])) > 0
    assert (counting.bodies[0]["max_tokens"], counting.bodies[0]["prompt"]) == (1, [4, 5, 6])


def test_the_parts_of_what_is_added_add_up() -> None:
    stages = Stages(
        version_s=[0.004, 0.005, 0.009],
        ids_s=[0.020, 0.031, 0.040],
        text_s=[0.024, 0.037, 0.050],
        engine_ids_s=[0.010, 0.020, 0.030],
        engine_text_s=[0.010, 0.022, 0.031],
    )
    figures = {figure.name: figure.value for figure in stages.figures()}
    added_ms = figures.pop("added by HTTP and actors")
    parts_ms = [value for name, value in figures.items() if name.startswith("of it")]
    assert added_ms == pytest.approx(15.0)
    assert parts_ms == pytest.approx([5.0, 5.0, 5.0])


def test_fresh_prompts_stay_within_the_longest_and_never_repeat() -> None:
    prompts = FreshPrompts(MODEL, 16, 70, seed=SEED)
    encode = encoder(MODEL)
    drawn = [prompts.draw() for _ in range(30)]
    for text, ids in drawn:
        assert encode(text) == ids, f"seed {SEED}"
        assert 1 <= len(ids) <= 70, f"seed {SEED}"
    assert len({tuple(ids) for _, ids in drawn}) == 30, f"seed {SEED}"

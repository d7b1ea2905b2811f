"""What HTTP and the actors add to the engine's own time, against a running server with one client.

    serve run serve_app:app
    python -m load_tests.lab.bench_http --url http://127.0.0.1:8000

Each request of one client is followed by the same prompt on an engine in this process, so that
both see the same machine; every prompt is new to the server, so nothing of it is cached. Where the
time goes is told by differences that need no switch in the server:

    GET /version                  HTTP, proxy, replica and back
    prompt as ids, first token    the same + placing, submitting, computing, the token's way back
    prompt as text, first token   the same + the tokenizer actor

Then `--streams` clients at once give tokens per second. The client runs on the same processors as
the server; where there are few, that is part of the figure. Knows no Ray.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from load_tests.lab.bench_transformers import bench_config, encoder
from load_tests.lab.in_process import EngineInProcess
from load_tests.prompts import SourceText
from load_tests.tables import Figure, at_most, describe_machine, median_figure, render, to_json

TIMEOUT_S = 120.0
NUM_WARM = 5
TARGET_ADDED_MS = 20.0
EVENT = "data: "
DONE = "[DONE]"


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int


class _Chunk(msgspec.Struct):
    """The one field of an SSE chunk that is read here."""

    usage: _Usage | None = None


class Server:
    """A running server, asked over one kept-alive connection per client."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self._url = url.rstrip("/")
        self._client = client
        self._model = ""

    async def connect(self) -> None:
        """Learn the model's name. Raises httpx.HTTPError when there is no server."""
        answer = await self._client.get(f"{self._url}/v1/models")
        answer.raise_for_status()
        self._model = answer.json()["data"][0]["id"]

    async def version_s(self) -> float:
        """Seconds of a round trip that reaches the ingress and nothing behind it."""
        started_s = time.perf_counter()
        answer = await self._client.get(f"{self._url}/version")
        answer.raise_for_status()
        return time.perf_counter() - started_s

    async def first_token_s(self, prompt: str | Sequence[int]) -> float:
        """Seconds until the first event of a stream that asks for one token."""
        started_s = time.perf_counter()
        first_s = 0.0
        async with self._stream(prompt, 1) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line and not first_s:
                    first_s = time.perf_counter() - started_s
        return first_s

    async def complete(self, prompt: str | Sequence[int], num_tokens: int) -> int:
        """Stream `num_tokens` greedy tokens; the number that came, as the server counts it."""
        num_seen = 0
        is_done = False
        async with self._stream(prompt, num_tokens) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                data = line.removeprefix(EVENT)
                is_done = is_done or data == DONE
                if not line or data == DONE:
                    continue
                usage = msgspec.json.decode(data, type=_Chunk).usage
                num_seen = usage.completion_tokens if usage else num_seen
        assert is_done, f"the stream broke off; {num_seen} tokens were counted"
        return num_seen

    def _stream(
        self, prompt: str | Sequence[int], num_tokens: int
    ) -> AbstractAsyncContextManager[httpx.Response]:
        body = {
            "model": self._model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return self._client.stream("POST", f"{self._url}/v1/completions", json=body)


class FreshPrompts:
    """Text and its ids, never the same twice, of lengths drawn between two bounds."""

    def __init__(self, folder: Path, shortest: int, longest: int, *, seed: int) -> None:
        self._encode = encoder(folder)
        self._bounds = (shortest, longest)
        self._rng = random.Random(seed)
        self._source = SourceText()

    def draw(self) -> tuple[str, list[int]]:
        """A slice of source text of about the drawn length in tokens."""
        num_tokens = self._rng.randint(*self._bounds)
        text = self._source.slice(3 * num_tokens, self._rng)
        while len(ids := self._encode(text)) > num_tokens:
            text = text[: -max(1, len(text) * (len(ids) - num_tokens) // (2 * len(ids)))]
        return text, ids


@dataclass(slots=True, kw_only=True)
class Stages:
    """Seconds of each kind of round trip, one entry per round."""

    version_s: list[float] = field(default_factory=list)
    ids_s: list[float] = field(default_factory=list)
    text_s: list[float] = field(default_factory=list)
    engine_ids_s: list[float] = field(default_factory=list)  # in process, for the prompt as ids
    engine_text_s: list[float] = field(default_factory=list)  # in process, for the text's prompt

    def figures(self) -> list[Figure]:
        added_s = [a - b for a, b in zip(self.text_s, self.engine_text_s, strict=True)]
        behind_s = [a - b for a, b in zip(self.ids_s, self.engine_ids_s, strict=True)]
        edge_s, actors_s = statistics.median(self.version_s), statistics.median(behind_s)
        added_ms = 1e3 * statistics.median(added_s)
        return [
            median_figure("first token over HTTP", _ms(self.text_s), "ms"),
            median_figure("first token in process", _ms(self.engine_text_s), "ms"),
            at_most("added by HTTP and actors", added_ms, "ms", TARGET_ADDED_MS),
            median_figure("of it: HTTP, proxy, replica", _ms(self.version_s), "ms"),
            _figure("of it: place, submit, the token's way back", 1e3 * (actors_s - edge_s)),
            _figure("of it: tokenizer actor", added_ms - 1e3 * actors_s),
        ]


async def measure_one_client(
    server: Server, engine: EngineInProcess, prompts: FreshPrompts, num_rounds: int
) -> Stages:
    """One request at a time; each is repeated in this process before the next one."""
    stages = Stages()
    for round_index in range(NUM_WARM + num_rounds):
        if round_index == NUM_WARM:
            stages = Stages()
        stages.version_s.append(await server.version_s())
        _, ids = prompts.draw()
        stages.ids_s.append(await server.first_token_s(ids))
        stages.engine_ids_s.append(engine.first_token_s(ids))
        text, ids = prompts.draw()
        stages.text_s.append(await server.first_token_s(text))
        stages.engine_text_s.append(engine.first_token_s(ids))
    return stages


async def measure_streams(
    server: Server,
    engine: EngineInProcess,
    prompts: FreshPrompts,
    *,
    num_streams: int,
    num_tokens: int,
    num_rounds: int,
) -> list[Figure]:
    """Tokens per second of `num_streams` clients at once, and of the same prompts in process."""
    over_http, in_process = [], []
    for _ in range(num_rounds):
        drawn = [prompts.draw() for _ in range(num_streams)]
        started_s = time.perf_counter()
        counts = await asyncio.gather(*(server.complete(text, num_tokens) for text, _ in drawn))
        over_http.append(sum(counts) / (time.perf_counter() - started_s))
        assert counts == [num_tokens] * num_streams, f"tokens by stream: {counts}"
        started_s = time.perf_counter()
        engine.generate([ids for _, ids in drawn], num_tokens)
        in_process.append(num_streams * num_tokens / (time.perf_counter() - started_s))
    ratios = [a / b for a, b in zip(over_http, in_process, strict=True)]
    return [
        median_figure(f"{num_streams} streams over HTTP", over_http, "tokens/s"),
        median_figure(f"{num_streams} streams in process", in_process, "tokens/s"),
        median_figure(f"{num_streams} streams: HTTP / in process", ratios, "x"),
    ]


def _ms(seconds: Sequence[float]) -> list[float]:
    return [1e3 * s for s in seconds]


def _figure(name: str, value_ms: float) -> Figure:
    return Figure(name=name, value=value_ms, unit="ms")


async def run(args: argparse.Namespace) -> tuple[list[Figure], dict[str, object]]:
    config = bench_config(args.config, args.model, args.threads)
    prompts = FreshPrompts(Path(config.model.path), args.shortest, args.longest, seed=args.seed)
    engine = EngineInProcess(config)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.streams)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        server = Server(args.url, client)
        await server.connect()
        stages = await measure_one_client(server, engine, prompts, args.requests)
        figures = stages.figures()
        if args.streams:
            figures += await measure_streams(
                server,
                engine,
                prompts,
                num_streams=args.streams,
                num_tokens=args.tokens,
                num_rounds=args.rounds,
            )
    about = describe_machine() | {
        "prompt_tokens": [args.shortest, args.longest],
        "requests": args.requests,
        "new_tokens": args.tokens,
        "seed": args.seed,
    }
    return figures, about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--config", type=Path, help="of the engine in this process")
    parser.add_argument("--model", help="the served model's folder; default: the config's")
    parser.add_argument("--threads", type=int, default=1, help="torch threads in this process")
    parser.add_argument("--requests", type=int, default=40, help="of the one client, per kind")
    parser.add_argument("--shortest", type=int, default=16, help="prompt, in tokens")
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--streams", type=int, default=16, help="0 = leave this part out")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures, about = asyncio.run(run(args))
    if args.json:
        print(to_json(figures, about))
    else:
        print(render(figures), *(f"{k}: {v}" for k, v in about.items()), sep="\n")


if __name__ == "__main__":
    main()

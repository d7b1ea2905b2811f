"""How long a request waits for its second token: one worker against two with a handoff between.

    python -m load_tests.lab.bench_second_token --url http://127.0.0.1:8000 http://127.0.0.1:8001
    python -m load_tests.lab.bench_second_token --url http://127.0.0.1:8000 --json unified.json
    python -m load_tests.lab.bench_second_token --url http://127.0.0.1:8000 --against unified.json
    python -m load_tests.lab.bench_second_token --model /tmp/q/qwen3-8b \\
        --set model.weights=random --start configs/h200_1.yaml configs/h200_1p1d.yaml --json
        both.json

One client, one request at a time, greedy, prompts of token ids that no prompt before began with:
a request that finds anything in a prefix cache ends the run. Servers that run side by side are
asked in turn; those of `--start` run one after the other, for two that need the same GPUs. A time
is when an event's bytes were read: tokens that came in one event have no gap, and are counted.
"""

import argparse
import http.client
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from load_tests.http_load.client import (
    DONE,
    OK,
    READ_BYTES,
    BrokenStreamError,
    LoadError,
    RefusedError,
    Server,
    TimedOutError,
    UnreachableError,
)
from load_tests.http_load.preflight import find_model
from load_tests.http_load.sse import EventParser
from load_tests.lab.application import running
from load_tests.lab.model_folder import parse_settings
from load_tests.prompts import RandomPrompts
from load_tests.tables import Figure, at_most, describe_machine, render, render_rows

TIMINGS_HEADER = {"x-laps-timings": "1"}
TIMEOUT_S = 120.0
MIN_TOKENS = 3  # the first, the second, and one more for the time between tokens after that
TIMES = ("ttft_ms", "gap_ms", "tpot_ms")
# As the server calls them, in the order in which they pass.
STAGES = (
    "tokenize_ms",
    "place_ms",
    "queue_ms",
    "prefill_ms",
    "handoff_ms",
    "first_decode_ms",
    "stream_ms",
    "total_ms",
)


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None  # of this event alone


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: dict[str, float | None] | None = None
    error: dict[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request saw, in milliseconds on the client's clock; `stages` are the server's."""

    ttft_ms: float
    gap_ms: float  # from the first token to the second
    tpot_ms: float  # on average a token after the second
    is_merged: bool  # the first two tokens came in one event
    stages: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """All rounds of one prompt length at one server."""

    server: str
    prompt_tokens: int
    answers: list[Answer]

    def times_ms(self, name: str) -> list[float]:
        """One of TIMES, ascending."""
        return sorted(float(asdict(answer)[name]) for answer in self.answers)

    def median_ms(self, name: str) -> float:
        return statistics.median(self.times_ms(name))

    def stage_ms(self, name: str) -> float | None:
        """The median of a stage; None where no request had it."""
        found = [answer.stages[name] for answer in self.answers if name in answer.stages]
        return statistics.median(found) if found else None


class Asker:
    """One server, asked by one client; its model's name is found out first."""

    def __init__(self, url: str, num_tokens: int) -> None:
        """Raises LoadError for a server that is not ready."""
        self._server = Server(url=url)
        self._num_tokens = num_tokens
        self._model = find_model(self._server, None).model

    def ask(self, prompt: Sequence[int]) -> Answer:
        """Stream one answer to its end. Raises LoadError, also for a prompt found in a cache."""
        body = self._body(prompt)
        with closing(self._server.connection(TIMEOUT_S)) as connection:
            try:
                connection.connect()  # not part of the time: other clients keep theirs open
                return self._read(connection, body)
            except TimeoutError as error:
                raise TimedOutError(f"nothing came for {TIMEOUT_S:g} s") from error
            except (OSError, http.client.HTTPException) as error:
                raise UnreachableError(f"{self._server.url}: {error!r}") from error

    def _body(self, prompt: Sequence[int]) -> bytes:
        fields = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(fields)

    def _read(self, connection: http.client.HTTPConnection, body: bytes) -> Answer:
        headers = self._server.headers | TIMINGS_HEADER
        started_s = time.perf_counter()
        connection.request("POST", self._server.path("/v1/completions"), body, headers)
        response = connection.getresponse()
        if response.status != OK:
            raise RefusedError(response.status, response.read(500).decode(errors="replace"))
        parser = EventParser()
        tokens_s: list[float] = []
        stages: dict[str, float] = {}
        while data := response.read1(READ_BYTES):
            at_s = time.perf_counter() - started_s
            for text in parser.feed(data):
                if text == DONE:
                    return self._answer(tokens_s, stages)
                event = _parse(text)
                tokens_s += [at_s for choice in event.choices for _ in choice.token_ids or ()]
                stages |= {k: v for k, v in (event.timings or {}).items() if v is not None}
        raise BrokenStreamError("the stream ended without [DONE]")

    def _answer(self, tokens_s: Sequence[float], stages: dict[str, float]) -> Answer:
        if len(tokens_s) != self._num_tokens:
            raise BrokenStreamError(f"{len(tokens_s)} tokens came instead of {self._num_tokens}")
        if not stages:
            raise BrokenStreamError("the answer says no timings: this server cannot be measured")
        first_s, second_s, last_s = tokens_s[0], tokens_s[1], tokens_s[-1]
        return Answer(
            ttft_ms=1e3 * first_s,
            gap_ms=1e3 * (second_s - first_s),
            tpot_ms=1e3 * (last_s - second_s) / (len(tokens_s) - 2),
            is_merged=second_s == first_s,
            stages=stages,
        )


def _parse(text: str) -> _Event:
    """Raises BrokenStreamError for an error, and LoadError if the prompt was found in a cache."""
    try:
        event = msgspec.json.decode(text, type=_Event)
    except msgspec.DecodeError as error:
        raise BrokenStreamError(f"not an event of this protocol: {text[:200]}") from error
    if event.error is not None:
        raise BrokenStreamError(f"error event: {event.error}")
    details = event.usage.prompt_tokens_details if event.usage else None
    if details is not None and details.cached_tokens:
        raise LoadError(f"{details.cached_tokens} tokens were cached: take another --seed")
    return event


# ---- rounds --------------------------------------------------------------------------------------


def measure(servers: dict[str, Asker], args: argparse.Namespace) -> list[Series]:
    """Every prompt length in order; in a round each server, in turn, gets a new prompt.

    Warm-up rounds are asked and forgotten. Raises LoadError when a server does not answer well.
    """
    prompts = RandomPrompts(args.vocab_size, seed=args.seed)
    measured = []
    for num_tokens in args.prompt_tokens:
        answers: dict[str, list[Answer]] = {name: [] for name in servers}
        for round_index in range(args.warm_rounds + args.rounds):
            names = list(servers)
            turn = round_index % len(names)
            for name in names[turn:] + names[:turn]:
                answer = servers[name].ask(prompts.draw(1, num_tokens)[0])
                if round_index >= args.warm_rounds:
                    answers[name].append(answer)
        measured += [
            Series(server=name, prompt_tokens=num_tokens, answers=of_server)
            for name, of_server in answers.items()
        ]
    return measured


def measure_running(args: argparse.Namespace) -> list[Series]:
    names = args.names or args.url
    askers = (Asker(url, args.max_tokens) for url in args.url)
    return measure(dict(zip(names, askers, strict=True)), args)


def measure_started(args: argparse.Namespace) -> list[Series]:
    """Each configuration's application by itself: started, measured, ended."""
    names = args.names or [config.stem for config in args.start]
    measured = []
    for name, config in zip(names, args.start, strict=True):
        with running(
            config,
            args.model,
            overrides=parse_settings(args.set),
            port=args.port,
            ready_s=args.ready_s,
        ) as url:
            measured += measure({name: Asker(url, args.max_tokens)}, args)
    return measured


# ---- what is printed -----------------------------------------------------------------------------


def report(measured: Sequence[Series], allowed_ms: float) -> str:
    """Tables: times by length and server, the last server against the first, the stages."""
    names = list(dict.fromkeys(series.server for series in measured))
    parts = [render_rows(_time_rows(measured)), render_rows(_stage_rows(measured))]
    if len(names) > 1:
        parts.insert(1, render_rows(_difference_rows(measured, names[0], names[-1])))
        parts.append(render(_targets(measured, names[0], names[-1], allowed_ms)))
    return "\n\n".join(parts)


def _time_rows(measured: Sequence[Series]) -> list[tuple[str, ...]]:
    header = ("prompt", "server", "TTFT p50 / p90 / max", "gap to 2nd", "TPOT after", "merged")
    rows = [
        (
            f"{series.prompt_tokens}",
            series.server,
            *(_spread(series.times_ms(name)) for name in TIMES),
            f"{sum(answer.is_merged for answer in series.answers)} of {len(series.answers)}",
        )
        for series in sorted(measured, key=lambda series: series.prompt_tokens)
    ]
    return [header, *rows]


def _difference_rows(measured: Sequence[Series], first: str, last: str) -> list[tuple[str, ...]]:
    header = ("prompt", "server", "TTFT p50", "gap p50", "TPOT p50")
    rows = [
        (
            f"{one.prompt_tokens}",
            f"{last} minus {first}",
            *(f"{other.median_ms(name) - one.median_ms(name):+.2f} ms" for name in TIMES),
        )
        for one, other in _pairs(measured, first, last)
    ]
    return [header, *rows]


def _targets(measured: Sequence[Series], first: str, last: str, allowed_ms: float) -> list[Figure]:
    return [
        at_most(
            f"gap, prompt of {one.prompt_tokens}: {last} minus {first}",
            other.median_ms("gap_ms") - one.median_ms("gap_ms"),
            "ms",
            allowed_ms,
        )
        for one, other in _pairs(measured, first, last)
    ]


def _stage_rows(measured: Sequence[Series]) -> list[tuple[str, ...]]:
    """Medians of the stages that some request had."""
    stages = [name for name in STAGES if any(s.stage_ms(name) is not None for s in measured)]
    rows = [("prompt", "server", *stages)]
    for series in sorted(measured, key=lambda series: series.prompt_tokens):
        found = [series.stage_ms(stage) for stage in stages]
        cells = ("" if value is None else f"{value:.2f}" for value in found)
        rows.append((f"{series.prompt_tokens}", series.server, *cells))
    return rows


def _pairs(measured: Sequence[Series], first: str, last: str) -> list[tuple[Series, Series]]:
    """What both servers were asked, by prompt length."""
    by_place = {(series.server, series.prompt_tokens): series for series in measured}
    lengths = sorted({series.prompt_tokens for series in measured})
    return [
        (by_place[first, length], by_place[last, length])
        for length in lengths
        if (first, length) in by_place and (last, length) in by_place
    ]


def _spread(times_ms: Sequence[float]) -> str:
    p90_ms = times_ms[int(0.9 * (len(times_ms) - 1))]
    return f"{statistics.median(times_ms):.2f} / {p90_ms:.2f} / {times_ms[-1]:.2f} ms"


# ---- command line --------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", nargs="+", action="extend", help="servers that run already")
    where.add_argument("--start", nargs="+", type=Path, metavar="CONFIG", help="start one by one")
    parser.add_argument("--names", nargs="+", help="of the servers, in the same order")
    parser.add_argument("--model", type=Path, help="model folder, with --start")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="with --start")
    parser.add_argument("--port", type=int, default=8000, help="with --start")
    parser.add_argument("--ready-s", type=float, default=600.0, help="with --start: to get ready")
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[64, 8192])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warm-rounds", type=int, default=5, help="asked and not counted")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=3000, help="prompt ids are below it")
    parser.add_argument("--allowed-ms", type=float, default=4.0, help="that the gap may be longer")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--against", type=Path, help="JSON of an earlier run, put before this one")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args(arguments)
    if args.start and args.model is None:
        parser.error("--start needs --model")
    if args.names and len(args.names) != len(args.url or args.start):
        parser.error("--names: one for each server")
    if min(args.rounds, args.warm_rounds + 1) < 1 or args.max_tokens < MIN_TOKENS:
        parser.error(f"at least one round, and --max-tokens of at least {MIN_TOKENS}")
    return args


def main() -> None:
    args = parse()
    before = read_json(args.against) if args.against else []
    try:
        measured = measure_started(args) if args.start else measure_running(args)
    except LoadError as error:
        raise SystemExit(str(error)) from error
    measured = before + measured
    print(report(measured, args.allowed_ms))
    if args.json:
        about = describe_machine() | {"seed": args.seed, "max_tokens": args.max_tokens}
        series = [asdict(one) for one in measured]
        args.json.write_text(json.dumps({"about": about, "series": series}))


def read_json(path: Path) -> list[Series]:
    """What `--json` wrote. Raises SystemExit for another file."""
    try:
        return msgspec.convert(json.loads(path.read_text())["series"], type=list[Series])
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise SystemExit(f"{path}: not what --json of this bench writes: {error}") from error


if __name__ == "__main__":
    main()

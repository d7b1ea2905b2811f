"""Whether outputs held to random JSON schemas are valid, and how many of them end by themselves.

    python -m load_tests.lab.check_constraints --count 500 --seed 7
    python -m load_tests.lab.check_constraints --device cuda --kinds bounded recursive

As the API does it: a schema is restricted, tried out in a process of its own, and its output held
to it by the engine in this process; what refuses it is counted by its words. Half of the outputs
are greedy, half drawn at temperature 1. The oracle is `jsonschema` (Draft 2020-12, formats checked
as far as it knows them). Exits with 1 when an output that finished with `stop` is not valid.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from configs.load import load_config
from configs.schema import AppConfig
from engine.constraints.checks import MAX_UNCHECKED, ConstraintChecks
from engine.constraints.grammars import MAX_GRAMMARS
from engine.constraints.json_schema import restrict
from engine.errors import RequestError
from engine.request import Constraint, ConstraintKind, RequestKey, SamplingParams
from engine.scheduling.contracts import StepOutput
from engine.text.tokenizing import Tokenizing, load_tokenizer
from load_tests.lab.in_process import EngineInProcess
from load_tests.tables import render_rows
from load_tests.testbed.json_oracle import find_problem
from load_tests.testbed.random_schemas import Schema, SchemaKind, schema_of

DEMO_MODEL = Path("demo_model") / "laps-demo"
PROMPT = "def settings():\n    return "
_REASON_CHARS = 72
_NUM_TOGETHER = MAX_GRAMMARS // 2  # or compiled grammars would be gone before their rows begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A schema that was accepted."""

    kind: SchemaKind
    schema: Schema
    constraint: Constraint


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of one kind of schemas."""

    num_asked: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    num_valid: int = 0  # of those that finished with `stop`
    slowest_verdict_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a run found."""

    tallies: dict[SchemaKind, Tally]
    problems: list[str]  # one a line: what finished with `stop` and is not valid
    steps_ms: list[float]

    @property
    def is_met(self) -> bool:
        """Whether everything that finished with `stop` is valid."""
        return not self.problems

    def render(self) -> str:
        header = ("schemas", "asked", "accepted", "stop", "length", "valid of stop", "verdict, s")
        rows = [_cells(kind.value, tally) for kind, tally in self.tallies.items()]
        reasons = [
            (kind.value, reason, str(count))
            for kind, tally in self.tallies.items()
            for reason, count in tally.refusals.most_common()
        ]
        parts = [render_rows([header, *rows])]
        parts += [render_rows([("schemas", "refused because", "count"), *reasons])] * bool(reasons)
        if len(self.steps_ms) > 1:
            cuts = statistics.quantiles(self.steps_ms, n=100)
            parts.append(f"steps: {len(self.steps_ms)}, p50 {cuts[49]:.2f} p99 {cuts[98]:.2f} ms")
        return "\n\n".join([*parts, *self.problems])


class ConstraintRun:
    """Schemas through restriction, trial and engine; counts what comes of them."""

    def __init__(self, config: AppConfig, *, max_tokens: int, seed: int) -> None:
        """Raises ConfigError when the model cannot be served."""
        folder = Path(config.model.path)
        self._ours = EngineInProcess(config)
        self._tokenizing: Tokenizing = load_tokenizer(folder)
        self._checks = ConstraintChecks(str(folder))
        self._max_tokens = max_tokens
        self._seed = seed
        self._tallies: dict[SchemaKind, Tally] = {}
        self._problems: list[str] = []
        self._steps_ms: list[float] = []

    def close(self) -> None:
        """Ends the processes that tried constraints out."""
        self._checks.close()

    def run(self, schemas: Sequence[tuple[SchemaKind, Schema]]) -> Report:
        """Judge and answer all of `schemas`."""
        asked: list[Asked] = []
        for start in range(0, len(schemas), MAX_UNCHECKED):
            asked += self._accepted(schemas[start : start + MAX_UNCHECKED])
        for start in range(0, len(asked), _NUM_TOGETHER):
            self._answer(asked[start : start + _NUM_TOGETHER], self._seed + start)
        return Report(
            tallies=self._tallies, problems=self._problems, steps_ms=sorted(self._steps_ms)
        )

    def _accepted(self, schemas: Sequence[tuple[SchemaKind, Schema]]) -> list[Asked]:
        started_s = time.monotonic()
        under_way: list[tuple[Asked, Future[str]]] = []
        for kind, schema in schemas:
            tally = self._tallies.setdefault(kind, Tally())
            tally.num_asked += 1
            try:
                text = json.dumps(restrict(schema, "schema"))
            except RequestError as error:
                tally.refusals[_reason(error.message)] += 1
                continue
            constraint = Constraint(ConstraintKind.JSON_SCHEMA, text)
            asked = Asked(kind=kind, schema=schema, constraint=constraint)
            under_way.append((asked, self._checks.check(constraint)))
        accepted = []
        for asked, verdict in under_way:
            tally, problem = self._tallies[asked.kind], verdict.result()
            tally.slowest_verdict_s = max(tally.slowest_verdict_s, time.monotonic() - started_s)
            if problem:
                tally.refusals[_reason(problem)] += 1
            else:
                accepted.append(asked)
        return accepted

    def _answer(self, asked: Sequence[Asked], seed: int) -> None:
        (prompt,) = self._tokenizing.encode_batch([PROMPT], add_special_tokens=True)
        if isinstance(prompt, RequestError):
            raise prompt
        requests: dict[RequestKey, Asked] = {}
        for number, one in enumerate(asked):
            self._ours.engine.grammars.prepare(one.constraint).result()
            params = SamplingParams(
                max_tokens=self._max_tokens,
                temperature=float(number % 2),
                seed=seed + number,
                constraint=one.constraint,
            )
            requests[self._ours.submit(prompt, params)] = one
        tokens: dict[RequestKey, list[int]] = {key: [] for key in requests}

        def keep(output: StepOutput) -> None:
            for _, record in output.tokens:
                tokens[record.key].append(record.token_id)
                if record.finish is not None:
                    self._judge(requests[record.key], tokens[record.key], record.finish)

        while self._ours.engine.core.has_work:
            started_s = time.perf_counter()
            output = self._ours.step()
            self._steps_ms.append((time.perf_counter() - started_s) * 1e3)
            keep(output)

    def _judge(self, asked: Asked, tokens: Sequence[int], finish: str) -> None:
        tally = self._tallies[asked.kind]
        tally.finishes[finish] += 1
        if finish != "stop":
            return
        text = self._tokenizing.decode(tokens)
        problem = find_problem(asked.schema, text)
        if problem is None:
            tally.num_valid += 1
        else:
            self._problems.append(f"{json.dumps(asked.schema)} gave {text!r}: {problem}")


def draw_schemas(
    kinds: Sequence[SchemaKind], count: int, seed: int
) -> list[tuple[SchemaKind, Schema]]:
    """`count` schemas, the kinds in turn."""
    draw = random.Random(seed)
    return [
        (kind, schema_of(kind, draw))
        for kind in (kinds[number % len(kinds)] for number in range(count))
    ]


def _cells(name: str, tally: Tally) -> tuple[str, ...]:
    num_refused, num_stopped = tally.refusals.total(), tally.finishes["stop"]
    return (
        name,
        str(tally.num_asked),
        str(tally.num_asked - num_refused),
        str(num_stopped),
        str(tally.finishes["length"]),
        f"{tally.num_valid} of {num_stopped}",
        f"{tally.slowest_verdict_s:.1f}",
    )


def _reason(message: str) -> str:
    """Without the place, which is every schema's own."""
    return message.partition("': ")[2][:_REASON_CHARS] or message[:_REASON_CHARS]


def build_parser() -> argparse.ArgumentParser:
    names = [kind.value for kind in SchemaKind]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--kinds", nargs="+", choices=names, default=names[:2], metavar="KIND")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    overrides: dict[str, object] = {
        "model.path": str(args.model),
        "model.device": args.device,
        "scheduler.max_num_seqs": args.max_rows,
    }
    run = ConstraintRun(load_config(None, overrides), max_tokens=args.max_tokens, seed=args.seed)
    try:
        kinds = [SchemaKind(name) for name in args.kinds]
        report = run.run(draw_schemas(kinds, args.count, args.seed))
    finally:
        run.close()
    print(report.render())
    sys.exit(0 if report.is_met else 1)


if __name__ == "__main__":
    main()

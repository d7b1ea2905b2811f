"""What constrained rows, and schemas that are being tried out, cost the steps of everybody else.

    python -m load_tests.lab.bench_constrained
    python -m load_tests.lab.bench_constrained --device cuda --shapes qwen3-8b --rows 64 --held 8

One engine in this process decodes `--rows` rows, greedy, and each step is timed:

    free    no row has a constraint
    held    `--held` of the rows are held to a JSON schema that goes on for ever
    tried   all are free, while two schemas that are far too large are tried out all the time

in turn, for `--rounds` rounds. Shapes have random weights and a vocabulary of pieces of source
text. Knows no Ray.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from configs.load import load_config
from configs.schema import AppConfig
from engine.constraints.checks import MAX_CHILDREN, ConstraintChecks
from engine.constraints.json_schema import restrict
from engine.request import Constraint, ConstraintKind, SamplingParams
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.prompts import RandomPrompts, SourceText
from load_tests.tables import Figure, at_most, describe_machine, median_figure, render
from load_tests.testbed.random_schemas import Schema, too_much_to_compile

DEMO_MODEL = Path("demo_model") / "laps-demo"
MAX_RATIO = 1.1
_WARM_STEPS = 8
_PIECE_CHARS = (1, 12)
_BYTE_LEVEL = str.maketrans({" ": "Ġ", "\n": "Ċ", "\t": "ĉ"})
_ENDLESS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "kind": {"enum": ["first", "second", "third"]},
            "size": {"type": "integer", "minimum": 0, "maximum": 99_999},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "kind", "size", "tags"],
    },
    "minItems": 2000,
}


class ConstrainedBench:
    """Decode steps of one engine, timed one by one."""

    def __init__(self, ours: EngineInProcess, *, num_steps: int, seed: int) -> None:
        self._ours = ours
        self._num_steps = num_steps
        self._prompts = RandomPrompts(ours.engine.spec.vocab_size, seed=seed)

    def steps_ms(
        self, num_rows: int, num_held: int, num_prompt_tokens: int, constraint: Constraint
    ) -> list[float]:
        """Milliseconds of each step in which all rows, `num_held` of them held, are decoding."""
        self._ours.engine.grammars.prepare(constraint).result()
        # Nobody's answer ends within the measured steps.
        budget = self._num_steps + 4 * _WARM_STEPS + num_rows
        for number, prompt in enumerate(self._prompts.draw(num_rows, num_prompt_tokens)):
            is_held = number < num_held
            params = SamplingParams(
                max_tokens=budget,
                temperature=0.0,
                ignore_eos=not is_held,
                constraint=constraint if is_held else None,
            )
            self._ours.submit(prompt, params)
        self._step_until_all_decode(num_rows)
        steps_ms = []
        for _ in range(self._num_steps):
            started_s = time.perf_counter()
            self._ours.step()
            steps_ms.append((time.perf_counter() - started_s) * 1e3)
        self._ours.run_until_idle(lambda output: None)
        return steps_ms

    def _step_until_all_decode(self, num_rows: int) -> None:
        begun: set[object] = set()
        while len(begun) < num_rows:
            begun.update(record.key for _, record in self._ours.step().tokens)
        for _ in range(_WARM_STEPS):
            self._ours.step()


@contextmanager
def endless_trials(folder: Path, seed: int) -> Iterator[None]:
    """Meanwhile every process that tries constraints out has one that never compiles."""
    checks = ConstraintChecks(str(folder))
    draw = random.Random(seed)
    is_over = threading.Event()

    def ask(_: "Future[str] | None" = None) -> None:
        if not is_over.is_set():
            text = json.dumps(restrict(too_much_to_compile(draw), "schema"))
            future = checks.check(Constraint(ConstraintKind.JSON_SCHEMA, text))
            future.add_done_callback(ask)

    try:
        # The first verdicts wait for the processes to start, which no later one does.
        simple = [Constraint(ConstraintKind.REGEX, f"[a-{end}]{{3}}") for end in "xyz"]
        for future in [checks.check(constraint) for constraint in simple]:
            future.result()
        for _ in range(MAX_CHILDREN):
            ask()
        yield
    finally:
        is_over.set()
        checks.close()


def measure(bench: ConstrainedBench, args: argparse.Namespace, folder: Path) -> list[Figure]:
    """Rounds of the three kinds of steps, and the ratios of their 99th percentiles."""
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(restrict(_ENDLESS, "schema")))

    def steps_ms(num_held: int) -> list[float]:
        return bench.steps_ms(args.rows, num_held, args.prompt_tokens, constraint)

    def tried_ms() -> list[float]:
        with endless_trials(folder, args.seed):
            return steps_ms(0)

    kinds: dict[str, Callable[[], list[float]]] = {
        "free": lambda: steps_ms(0),
        f"held, {args.held} rows": lambda: steps_ms(args.held),
        "tried": tried_ms,
    }
    steps_ms(args.held)  # whatever is compiled or allocated once
    rounds: dict[str, list[list[float]]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, kind in kinds.items():
            rounds[name].append(kind())
    figures = []
    for name, of_kind in rounds.items():
        figures.append(median_figure(f"{name}: p50", [_quantile(r, 50) for r in of_kind], "ms"))
        figures.append(median_figure(f"{name}: p99", [_quantile(r, 99) for r in of_kind], "ms"))
    pooled = (list(chain.from_iterable(of_kind)) for of_kind in rounds.values())
    free_ms, *others_ms = (_quantile(steps, 99) for steps in pooled)
    figures += [
        at_most(f"{name}: p99 against free", other_ms / free_ms, "x", MAX_RATIO)
        for name, other_ms in zip(list(rounds)[1:], others_ms, strict=True)
    ]
    return figures


def write_vocabulary(folder: Path, vocab_size: int, seed: int) -> None:
    """A tokenizer.json of `vocab_size` pieces of source text; it decodes, and encodes nothing."""
    rng = random.Random(seed)
    source = SourceText()
    pieces: dict[str, int] = {}
    text = ""
    while len(pieces) < vocab_size:
        if len(text) < 100_000:
            text = source.slice(2_000_000, rng)
        num_chars = rng.randint(*_PIECE_CHARS)
        piece, text = text[:num_chars], text[num_chars:]
        if all(char.isascii() and (char.isprintable() or char in "\n\t") for char in piece):
            pieces.setdefault(piece.translate(_BYTE_LEVEL), len(pieces))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": byte_level | {"use_regex": True},
        "model": {"type": "BPE", "vocab": pieces, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def bench_config(folder: Path, args: argparse.Namespace) -> AppConfig:
    """The engine under test."""
    is_shapes = args.shapes is not None
    overrides: dict[str, object] = {
        "model.path": str(folder),
        "model.device": args.device,
        "model.dtype": "bfloat16" if args.device == "cuda" else "auto",
        "model.weights": "random" if is_shapes else "safetensors",
        "model.max_model_len": 4096 if is_shapes else None,
        "cache.enable_prefix_caching": False,
        "cache.num_blocks": args.num_blocks,
        "scheduler.max_num_seqs": args.rows,
        "scheduler.overlap": False if args.no_overlap else None,
    }
    return load_config(None, overrides)


def _quantile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, default=DEMO_MODEL)
    model.add_argument("--shapes", choices=sorted(SHAPES), help="random weights instead")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--held", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-blocks", type=int, help="default: as many as fit")
    parser.add_argument("--no-overlap", action="store_true", help="one step at a time")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(args: argparse.Namespace, scratch: Path) -> str:
    """Build the engine, measure, and return what is to be printed."""
    folder = args.model
    if args.shapes is not None:
        folder = write_shapes(args.shapes, scratch)
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        write_vocabulary(folder, vocab_size, args.seed)
    ours = EngineInProcess(bench_config(folder, args))
    bench = ConstrainedBench(ours, num_steps=args.steps, seed=args.seed)
    figures = measure(bench, args, folder)
    about = describe_machine() | {
        "engine": ours.engine.describe(),
        "compiled_since_ready": ours.engine.compilations.names,
        "overlap": not args.no_overlap and args.device == "cuda",
    }
    return "\n\n".join([render(figures), *(f"{name}: {value}" for name, value in about.items())])


def main() -> None:
    args = build_parser().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(run(args, Path(scratch)))


if __name__ == "__main__":
    main()

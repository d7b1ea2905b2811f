"""A decode step of an engine in FP8 by tilings of its products, on a GPU.

    python -m load_tests.lab.bench_few_tilings
    python -m load_tests.lab.bench_few_tilings --shapes llama-3.1-8b --tilings deep:split_k=4

A product alone does not show what a tiling is worth where kernels start before the one before them
has ended. So here the whole step is captured again with each tiling, and they are timed in turn: ms
a step, the median of `--steps`, each launched while the one before it computes; of several rounds
the median, and the range. `chosen` is what an engine takes. A tiling is

    KIND:FIELD=NUMBER,FIELD=NUMBER;KIND:...

of the fields of `kernels.quant.fp8_linear.QuantConfig`; a kind is a weight's shape (`kind_of`), or
`all`. Before it is timed each must multiply as the chosen one does; exits with 1 if one does not.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from configs.load import load_config
from configs.schema import AppConfig
from engine.layers.context import SINGLE_RANK
from engine.layers.quantized_operands import fp8_operand
from engine.runner import step_graph_set
from engine.runner.calibration import TimedSteps
from engine.runner.executor import Executor
from engine.runner.graph_sizes import GraphSize
from engine.runner.graphs import CudaRecorder, Recorder
from engine.runner.warm_up import DummyRow, dummy_step
from kernels.linear.small import tile_counters
from kernels.quant import fp8_few
from kernels.quant.coded_tokens import InputForm
from kernels.quant.fp8_linear import Fp8Operand, QuantConfig
from kernels.quant.token_groups import code_tokens
from load_tests.lab.bench_quant import make_weight
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.tables import render_rows

ALL = "all"
KINDS = ("gated", "deep", "narrow", "square")
MAX_DIFFERENCE = 3e-3  # norm of the difference over the norm: bfloat16 rounds by 1.7e-3
TILINGS = (
    *(f"{ALL}:prefetch_bytes={size}" for size in (128, 256, 512)),
    *(f"{kind}:prefetch_bytes={size}" for kind in KINDS for size in (128, 256)),
    "deep:split_k=4",
    "deep:split_k=3",
    "narrow:split_k=2",
    "square:split_k=2",
    "square:block_k=128,num_stages=6",
)

Change = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """What differs from the chosen tiling, by the kind of weight."""

    name: str
    changes: dict[str, Change]

    def of(self, config: QuantConfig, num_rows: int, num_columns: int) -> QuantConfig:
        """`config` of a weight [num_rows, num_columns], changed."""
        change = self.changes.get(ALL, {}) | self.changes.get(kind_of(num_rows, num_columns), {})
        values: dict[str, Any] = change
        return replace(config, **values)


CHOSEN = Tiling(name="chosen", changes={})


def kind_of(num_rows: int, num_columns: int) -> str:
    """One of KINDS: gate and up; down; query, key and value; output."""
    if num_rows > 2 * num_columns:
        return "gated"
    if num_columns > 2 * num_rows:
        return "deep"
    return "square" if num_rows <= num_columns else "narrow"


def tiling_of(text: str) -> Tiling:
    """Raises ValueError for what is no tiling."""
    known = [field.name for field in fields(QuantConfig)]
    changes: dict[str, Change] = {}
    for part in text.split(";"):
        kind, _, numbers = part.partition(":")
        if kind not in (ALL, *KINDS):
            raise ValueError(f"{kind!r} is none of {ALL}, {', '.join(KINDS)}")
        pairs = [pair.partition("=") for pair in numbers.split(",")]
        changes[kind] = {name: int(number) for name, _, number in pairs}
        if unknown := changes[kind].keys() - set(known):
            raise ValueError(f"{', '.join(sorted(unknown))}: a tiling has {', '.join(known)}")
    return Tiling(name=text, changes=changes)


@contextmanager
def tiled_by(tiling: Tiling) -> Iterator[None]:
    """What is launched or captured meanwhile has these tilings."""
    choose = fp8_few.choose_config

    def changed(
        num_tokens: int, num_pieces: int, num_rows: int, num_columns: int, *others: int
    ) -> QuantConfig:
        config = choose(num_tokens, num_pieces, num_rows, num_columns, *others)
        return tiling.of(config, num_rows, num_columns)

    with patch.object(fp8_few, "choose_config", changed):
        yield


def difference(tiling: Tiling, weights: Sequence[Fp8Operand], num_rows: int) -> float:
    """The largest between products with `tiling` and with the chosen one, of all weights."""
    counters = tile_counters(weights[0].codes.device)
    found = 0.0
    for weight in weights:
        num_columns = weight.codes.shape[1]
        x = torch.randn(num_rows, num_columns, dtype=torch.bfloat16, device=weight.codes.device)
        coded = code_tokens(x, InputForm(pieces=2, group=num_columns))
        wanted = fp8_few.fp8_few_linear(coded, weight, x.dtype, counters).float()
        with tiled_by(tiling):
            ours = fp8_few.fp8_few_linear(coded, weight, x.dtype, counters).float()
        found = max(found, float((ours - wanted).norm() / wanted.norm()))
    return found


class Race:
    """Decode steps of one size, captured again for each tiling."""

    def __init__(
        self,
        executor: Executor,
        *,
        num_rows: int,
        num_keys: int,
        num_steps: int,
        recorder: Recorder | None = None,
    ) -> None:
        """recorder: None = CUDA graphs."""
        self._executor = executor
        self._recorder = recorder or CudaRecorder()
        self._size = GraphSize(num_rows=num_rows, num_tokens=num_rows)
        row = DummyRow(num_computed_tokens=num_keys - 1, num_new_tokens=1)
        self._plan = dummy_step([row] * num_rows, executor.layout.block_size)
        self._num_steps = num_steps
        self._steps = TimedSteps(executor, SINGLE_RANK)

    def step_ms(self, tiling: Tiling) -> float:
        """Captures the step anew."""
        with ExitStack() as stack:
            stack.enter_context(tiled_by(tiling))
            stack.enter_context(
                patch.object(step_graph_set, "decode_sizes", lambda max_rows: [self._size])
            )
            self._executor.capture_graphs(self._recorder, _say_nothing, prompts=None)
        durations_s = self._steps.durations_s([self._plan] * (1 + self._num_steps))
        return 1e3 * statistics.median(durations_s[1:])


def bench_config(folder: Path, args: argparse.Namespace) -> AppConfig:
    return load_config(
        None,
        {
            "model.path": str(folder),
            "model.device": "cuda",
            "model.dtype": "bfloat16",
            "model.weights": "random",
            "model.quantization": "fp8",
            "model.max_model_len": 4096,
            "cache.enable_prefix_caching": False,
            "cache.kv_dtype": "fp8_e4m3",
            "cache.num_blocks": args.rows * -(-args.keys // 16) + 512,
            "scheduler.max_num_seqs": args.rows,
            "laps.enable_batch_prefill_cuda_graph": False,
        },
    )


def race(race_: Race, tilings: Sequence[Tiling], num_rounds: int) -> dict[str, list[float]]:
    """ms a step of each tiling in each round; rounds in turn."""
    found: dict[str, list[float]] = {tiling.name: [] for tiling in tilings}
    for number in range(num_rounds):
        for tiling in tilings:
            step_ms = race_.step_ms(tiling)
            found[tiling.name].append(step_ms)
            print(f"round {number}, {tiling.name}: {step_ms:.3f} ms", flush=True)
    return found


def render(found: dict[str, list[float]], num_layers: int) -> str:
    """The fastest first; us a layer beside the chosen tiling."""
    medians = {name: statistics.median(rounds) for name, rounds in found.items()}
    chosen_ms = medians[CHOSEN.name]
    rows = [("tiling", "ms a step", "range", "us a layer beside chosen")]
    rows += [
        (
            name,
            f"{medians[name]:.3f}",
            f"{min(found[name]):.3f} - {max(found[name]):.3f}",
            f"{1e3 * (medians[name] - chosen_ms) / num_layers:+.2f}",
        )
        for name in sorted(medians, key=lambda name: medians[name])
    ]
    return render_rows(rows)


def _weights_of(model: Path) -> list[Fp8Operand]:
    """One of each kind, of random numbers, as large as the model's."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv = 2 * config["num_key_value_heads"] * config["head_dim"]
    shapes = ((2 * inner, hidden), (hidden, inner), (heads + kv, hidden), (hidden, heads))
    made = [make_weight("fp8-row", *shape) for shape in shapes]
    return [fp8_operand(weight, weight.scales) for weight in made if weight.scales is not None]


def _say_nothing(line: str) -> None:
    """Only times matter here."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--rows", type=int, default=16, help="that decode; at most 64")
    parser.add_argument("--keys", type=int, default=160, help="of each row")
    parser.add_argument("--steps", type=int, default=48, help="of each tiling in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tilings", nargs="*", type=tiling_of, default=None)
    args = parser.parse_args(argv)
    named = args.tilings if args.tilings is not None else [tiling_of(text) for text in TILINGS]
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_shapes(args.shapes, Path(scratch))
        weights = _weights_of(folder)
        off = {tiling.name: difference(tiling, weights, args.rows) for tiling in named}
        wrong = {name: error for name, error in off.items() if not error <= MAX_DIFFERENCE}
        for name, error in wrong.items():
            print(f"{name}: products are off by {error:.1e}, not timed", flush=True)
        del weights
        engine = EngineInProcess(bench_config(folder, args)).engine
        good = [CHOSEN, *(tiling for tiling in named if tiling.name not in wrong)]
        timed = Race(engine.executor, num_rows=args.rows, num_keys=args.keys, num_steps=args.steps)
        print(render(race(timed, good, args.rounds), engine.spec.num_layers))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.rows} rows")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

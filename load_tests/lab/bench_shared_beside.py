"""Shared experts in a stream of their own, off and on: by rows that decode, and by prompt tokens.

    python -m load_tests.lab.bench_shared_beside --shapes deepseek-v2-lite --pin-routing 0

Steps in graphs on one GPU, with the same weights: first all sizes in one stream, then all in two,
and so on for `--turns`. Milliseconds are medians of a step. On a CPU, which captures nothing, both
columns are of one stream.
"""

import argparse
import json
import logging
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.load import load_config
from configs.schema import AppConfig, CacheConfig
from engine.layers.context import SINGLE_RANK
from engine.runner.calibration import TimedSteps
from engine.runner.warm_up import DummyRow, dummy_step
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.pinned_routing import build_pinned
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.tables import render_rows

logger = logging.getLogger(__name__)

ROWS = (1, 4, 16, 32, 64, 128, 256)
TOKENS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A kind of step: rows that decode, or one prompt."""

    num_rows: int
    num_tokens: int
    num_keys: int  # of each row, before its new tokens

    @property
    def label(self) -> str:
        return f"{self.num_rows} rows" if self.num_keys else f"prompt of {self.num_tokens}"

    def rows(self) -> list[DummyRow]:
        num_new = self.num_tokens // self.num_rows
        row = DummyRow(num_computed_tokens=self.num_keys, num_new_tokens=num_new)
        return [row] * self.num_rows


def sizes_of(args: argparse.Namespace) -> list[Size]:
    decodes = [Size(num_rows=n, num_tokens=n, num_keys=args.context - 1) for n in args.rows]
    return decodes + [Size(num_rows=1, num_tokens=n, num_keys=0) for n in args.tokens]


def beside_config(folder: Path, args: argparse.Namespace, threshold: int) -> AppConfig:
    """threshold: tokens of the largest step in two streams; 0 = none."""
    on_gpu, block_size = args.device == "cuda", CacheConfig().block_size
    most_tokens = max(args.tokens, default=64)
    blocks_a_row = -(-args.context // block_size)
    num_blocks = max(args.rows, default=1) * blocks_a_row + -(-most_tokens // block_size) + 64
    overrides: dict[str, object] = {
        "model.path": str(folder),
        "model.device": args.device,
        "model.dtype": "bfloat16" if on_gpu else "auto",
        "model.weights": "random",
        "model.max_model_len": max(most_tokens, args.context) + 16,
        "cache.enable_prefix_caching": False,
        "cache.num_blocks": num_blocks,
        "scheduler.max_num_batched_tokens": max(most_tokens, 64),
        "scheduler.max_num_seqs": max(args.rows, default=64),
        "execution.dual_stream_token_threshold": threshold if on_gpu else 0,
    }
    overrides |= {key: json.loads(value) for key, value in args.set}
    return load_config(None, overrides)


def steps_s(ours: EngineInProcess, sizes: Sequence[Size], num_rounds: int) -> list[list[float]]:
    """By size, of steps that are launched each while the one before it computes."""
    executor = ours.engine.executor
    timed = TimedSteps(executor, SINGLE_RANK)
    found = []
    for size in sizes:
        plan = dummy_step(size.rows(), executor.layout.block_size)
        found.append(timed.durations_s([plan] * (1 + num_rounds))[1:])
        logger.info("%s: %.3f ms", size.label, 1e3 * statistics.median(found[-1]))
    return found


def measure(folder: Path, args: argparse.Namespace) -> str:
    """A table in Markdown."""
    sizes = sizes_of(args)
    most = max(size.num_tokens for size in sizes)
    configs = [beside_config(folder, args, threshold) for threshold in (0, most)]
    model = None if args.pin_routing is None else build_pinned(configs[0], args.pin_routing)
    ours = EngineInProcess(configs[0], model)
    del model  # the engine's alone
    turns: tuple[list[list[list[float]]], ...] = ([], [])
    for turn in range(args.turns):
        for config, found in zip(configs, turns, strict=True):
            if turn or config is not configs[0]:
                ours.restart(config)
            found.append(steps_s(ours, sizes, args.rounds))
    return render(sizes, *turns)


def render(
    sizes: Sequence[Size],
    alone: Sequence[Sequence[list[float]]],
    beside: Sequence[Sequence[list[float]]],
) -> str:
    """alone, beside: seconds by turn and size."""
    rows: list[tuple[str, ...]] = [
        ("step", "one stream ms", "range", "two streams ms", "range", "one / two")
    ]
    for index, size in enumerate(sizes):
        cells, medians_s = [size.label], []
        for turns in (alone, beside):
            own_s = [seconds for turn in turns for seconds in turn[index]]
            medians_s.append(statistics.median(own_s))
            cells += [
                f"{1e3 * medians_s[-1]:.3f}",
                f"{1e3 * min(own_s):.3f} - {1e3 * max(own_s):.3f}",
            ]
        rows.append((*cells, f"{medians_s[0] / medians_s[1]:.3f}"))
    return render_rows(rows)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shapes", choices=sorted(SHAPES), default="deepseek-v2-lite")
    model.add_argument("--model", type=Path, help="a folder with config.json instead of --shapes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--pin-routing", type=int, metavar="SEED", help="experts drawn uniformly")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="of decode steps")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="of one prompt")
    parser.add_argument("--context", type=int, default=256, help="keys of each row that decodes")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each size and turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"),
        help="any other key of the configuration, its value in JSON",
    )  # fmt: skip
    return parser


def main() -> None:
    args = build_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s")
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        table = measure(args.model or write_shapes(args.shapes, Path(scratch)), args)
    print(f"{device}, torch {torch.__version__}, {args.shapes}\n\n{table}")


if __name__ == "__main__":
    main()

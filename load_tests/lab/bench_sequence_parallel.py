"""Prompt steps of a dense model over ranks: rows summed on every rank, or shared out, in turn.

    python -m load_tests.lab.bench_sequence_parallel --shapes qwen3-32b --ranks 4
    python -m load_tests.lab.bench_sequence_parallel --ranks 4 --set model.quantization '"fp8"'

Every rank is a process with a GPU and runs the same steps, without graphs, one form after the other
in each round; the first round is not counted. Milliseconds are medians, of the slowest rank:

    summed        each sum goes to all ranks, which add the residual and normalise all rows
    shared        it is scattered, each rank normalises its rows, and they are gathered
    stream        the same, scattered and normalised in one kernel (kernels/comm/share_stream.py)
    streams       and gathered by one of ours, too (kernels/comm/gather_stream.py)
    us of a sum   that the fastest of these saves: (summed - it) / (2 * layers)

`sequence_parallel`, `share_stream` and `gather_stream` of `kernels.comm.limits` are read from here.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import msgspec
import torch

from configs.load import load_config
from configs.schema import AppConfig, CacheConfig
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.layers.context import Comm
from engine.ranks.meeting import join_ranks
from engine.ranks.peer_ranks import PeerRanks
from engine.ranks.rank import Rank
from engine.runner.calibration import TimedSteps
from engine.runner.executor import Executor
from engine.runner.warm_up import DummyRow, dummy_step
from load_tests.lab.bench_two_batches import PATIENCE_S, START_S, run_beside
from load_tests.lab.child_processes import (
    add_limit_option,
    die_with_parent,
    end_after,
    exit_on_sigterm,
)
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.tables import render_rows

logger = logging.getLogger(__name__)

TOKENS = (512, 1024, 2048, 4096, 8192, 16383, 16384)  # one that no number of ranks divides
ROW_TOKENS = 1024
FROM_ONE_TOKEN = 1  # every step is shared out
LARGEST_BYTES = 2**40  # of any sum


class Form(Enum):
    SUMMED = "summed"
    SHARED = "shared"
    STREAM = "stream"
    STREAMS = "streams"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Steps of one size, in seconds by form; those with streams only where there is peer memory."""

    num_tokens: int
    seconds: dict[Form, float]

    @property
    def best_s(self) -> float:
        """Of the forms that share rows out."""
        return min(took_s for form, took_s in self.seconds.items() if form is not Form.SUMMED)

    @property
    def saved_s(self) -> float:
        return self.seconds[Form.SUMMED] - self.best_s


def time_forms(
    executor: Executor, comm: Comm, num_tokens: int, *, num_rounds: int, row_tokens: int
) -> Trial:
    """Of prompts of `row_tokens` each, the last one shorter; all ranks call it."""
    rows = [
        DummyRow(num_computed_tokens=0, num_new_tokens=min(row_tokens, num_tokens - start))
        for start in range(0, num_tokens, row_tokens)
    ]
    plan = dummy_step(rows, executor.layout.block_size)
    forms = tuple(Form) if isinstance(comm, PeerRanks) else (Form.SUMMED, Form.SHARED)
    found: dict[Form, list[float]] = {form: [] for form in forms}
    for _ in range(1 + num_rounds):
        for form in forms:
            _choose(executor, comm, form)
            # The second of two, which is launched while the first computes.
            found[form].append(TimedSteps(executor, comm).durations_s([plan] * 2)[1])
    seconds = {form: _slowest(comm, every[1:]) for form, every in found.items()}
    return Trial(num_tokens=num_tokens, seconds=seconds)


def _choose(executor: Executor, comm: Comm, form: Form) -> None:
    """What the next steps do; every rank calls it."""
    executor.min_exchanged_tokens = None if form is Form.SUMMED else FROM_ONE_TOKEN
    if isinstance(comm, PeerRanks):
        comm.limits = replace(
            comm.limits,
            share_stream=LARGEST_BYTES if form in (Form.STREAM, Form.STREAMS) else 0,
            gather_stream=LARGEST_BYTES if form is Form.STREAMS else 0,
        )


def _slowest(comm: Comm, seconds: Sequence[float]) -> float:
    """The median of the rank whose median is the longest."""
    own = msgspec.msgpack.encode(statistics.median(seconds))
    return max(msgspec.msgpack.decode(data, type=float) for data in comm.gather_bytes(own))


def render(trials: Sequence[Trial], num_layers: int) -> str:
    """A table in Markdown."""
    forms = [f"{form.value} ms" for form in Form]
    header = ("tokens", *forms, "best / summed", "us of a sum", "tokens/s")
    rows = [
        (
            f"{trial.num_tokens:,}",
            *(f"{1e3 * trial.seconds[form]:.2f}" if form in trial.seconds else "" for form in Form),
            f"{trial.best_s / trial.seconds[Form.SUMMED]:.3f}",
            f"{1e6 * trial.saved_s / (2 * num_layers):.1f}",
            f"{trial.num_tokens / trial.best_s:,.0f}",
        )
        for trial in trials
    ]
    return render_rows([header, *rows])


def bench_config(folder: Path, args: argparse.Namespace) -> AppConfig:
    """With room for the largest step."""
    on_gpu, size = args.device == "cuda", CacheConfig().block_size
    most = max(args.tokens)
    num_rows = -(-most // args.row_tokens)
    overrides: dict[str, object] = {
        "model.path": str(folder),
        "model.device": args.device,
        "model.dtype": "bfloat16" if on_gpu else "auto",
        "model.weights": "random",
        "model.max_model_len": 2 * args.row_tokens,
        "cache.enable_prefix_caching": False,
        "cache.num_blocks": num_rows * (-(-2 * args.row_tokens // size)) + 64,
        "scheduler.max_num_batched_tokens": most,
        "scheduler.max_num_seqs": num_rows,
        "workers.tensor_parallel_size": args.ranks,
        "workers.sequence_parallel_min_tokens": FROM_ONE_TOKEN,
        "workers.num_gpus": 1 if on_gpu else 0,
        "execution.cuda_graphs": False,
        "laps.enable_batch_prefill_cuda_graph": False,
    }
    overrides |= {key: json.loads(value) for key, value in args.set}
    return load_config(None, overrides)


def measure(comm: Comm, folder: Path, args: argparse.Namespace) -> str:
    """The table; every rank calls it."""
    config = bench_config(folder, args)
    engine = build_engine(config, "bench", MonotonicClock(), _no_handoff, comm=comm)
    num_layers = engine.spec.num_layers
    trials = []
    for num_tokens in args.tokens:
        rounds = {"num_rounds": args.rounds, "row_tokens": args.row_tokens}
        trials.append(time_forms(engine.executor, comm, num_tokens, **rounds))
        if comm.rank.index == 0:  # at once: a run may be cut short
            logger.info("%s", render(trials[-1:], num_layers).splitlines()[-1])
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    about = f"{comm.rank.size} x {device}, torch {torch.__version__}, {' '.join(sys.argv[1:])}"
    return f"{about}\n\n{render(trials, num_layers)}"


def _no_handoff(event: object) -> None:
    raise AssertionError(f"{event} in a unified engine")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shapes", choices=sorted(SHAPES), default="qwen3-32b")
    model.add_argument("--model", type=Path, help="a folder with config.json instead of --shapes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a step")
    parser.add_argument("--row-tokens", type=int, default=ROW_TOKENS, help="of a prompt, at most")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each form")
    parser.add_argument(
        "--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"),
        help="any other key of the configuration, its value in JSON",
    )  # fmt: skip
    for name in ("--board", "--name"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    add_limit_option(parser)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def run(args: argparse.Namespace, board: str, name: str) -> str:
    """One rank: meet the others and measure."""
    rank, device = Rank(args.rank, args.ranks), torch.device(args.device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or write_shapes(args.shapes, Path(scratch))
        comm = join_ranks(rank, board, name, device, start_s=START_S, timeout_s=PATIENCE_S)
        try:
            return measure(comm, folder, args)
        finally:
            comm.close()


def main() -> None:
    args = build_parser().parse_args()
    level = logging.INFO if args.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(relativeCreated)6d ms %(message)s")
    if args.rank > 0:
        die_with_parent()
        run(args, args.board, args.name)
        return
    exit_on_sigterm()
    end_after(args.limit_s)
    print(run_beside(args, lambda board, name: run(args, board, name)))


if __name__ == "__main__":
    main()

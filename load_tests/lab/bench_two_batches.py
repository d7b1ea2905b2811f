"""Two batches at once against one: steps with prompts by their tokens, decode steps by their rows.

    python -m load_tests.lab.bench_two_batches --pin-routing 0 --expert-parallel
    python -m load_tests.lab.bench_two_batches --pin-routing 0 --expert-parallel \\
        --shapes deepseek-v2-lite --set workers.expert_exchange_min_tokens 64
    python -m load_tests.lab.bench_two_batches --pin-routing 0 --expert-parallel \\
        --shapes deepseek-v2-lite --set workers.enable_dp_attention true

Every rank is a process with a GPU and runs the same steps, each kind of them in turn: whole, as two
batches one after the other (what cutting costs), and as two at once (what is hidden). With DP
attention tokens and rows are those of each rank. Milliseconds are medians, of the slowest rank.

    sent     what the two batches of a step send, in place
    hidden   (in turn - at once) / sent
    rule     whole / at once as `engine.runner.overlap.rule` predicts it with an H200's rates
    host     what a launch takes on the host, whole and as two batches

Steps with prompts replay no graph here, decode steps do: there the two batches are captured, and
neither what is sent nor what cutting costs can be told apart.
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from configs.load import load_config
from configs.schema import AppConfig, CacheConfig
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.layers.context import Comm
from engine.layers.schedules import DECODE, InlineLanes
from engine.plan import StepPlan
from engine.ranks.board import open_board
from engine.ranks.meeting import join_ranks
from engine.ranks.rank import Rank
from engine.runner.calibration import TimedSteps
from engine.runner.executor import Executor
from engine.runner.graphs import CudaRecorder
from engine.runner.overlap.batch_splits import split_prompts
from engine.runner.overlap.rule import H200, OverlapCosts, layer_costs
from engine.runner.overlap.trials import SPLIT, WHOLE, TimedLanes
from engine.runner.warm_up import DummyRow, dummy_step, release_step
from load_tests.lab.child_processes import (
    add_limit_option,
    die_with_parent,
    end_after,
    exit_on_sigterm,
)
from load_tests.lab.pinned_routing import build_pinned
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.tables import render_rows

logger = logging.getLogger(__name__)

TOKENS = tuple(64 << shift for shift in range(10))  # to 32,768
ROWS = (16, 32, 64, 128, 256)
START_S, PATIENCE_S = 120.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Steps of one size, in seconds."""

    size: int
    halves: tuple[int, int]  # tokens
    whole_s: float
    at_once_s: float
    in_turn_s: float | None = None  # None = in a graph
    sent_s: float | None = None
    host_s: tuple[float, float] | None = None

    @property
    def speed_up(self) -> float:
        return self.whole_s / self.at_once_s

    @property
    def hidden(self) -> float | None:
        """The share of what is sent that takes no time; None = not known, or nothing is sent."""
        if self.in_turn_s is None or not self.sent_s:
            return None
        return (self.in_turn_s - self.at_once_s) / self.sent_s


class SameSteps:
    """Runs steps on one rank's executor; every rank has one and does the same."""

    def __init__(self, executor: Executor, comm: Comm, num_rounds: int) -> None:
        self._executor = executor
        self._two_batches = executor.two_batches
        self._comm = comm
        self._num_rounds = num_rounds
        self._steps = TimedSteps(executor, comm)
        self._block_size = executor.layout.block_size

    def prompts(self, num_tokens: int, row_tokens: int) -> Trial:
        """Of prompts of `row_tokens` each, the last one shorter."""
        plan = self._plan(
            [
                DummyRow(num_computed_tokens=0, num_new_tokens=min(row_tokens, num_tokens - start))
                for start in range(0, num_tokens, row_tokens)
            ]
        )
        whole_s = self._step_s(plan, splits=False)
        with self._two_batches.running_in(InlineLanes()):
            in_turn_s = self._step_s(plan, splits=True)
        return Trial(
            size=num_tokens,
            halves=self._halves(plan),
            whole_s=whole_s,
            in_turn_s=in_turn_s,
            at_once_s=self._step_s(plan, splits=True),
            sent_s=self._sent_s(plan),
            host_s=(self._host_s(plan, splits=False), self._host_s(plan, splits=True)),
        )

    def decodes(self, num_rows: int, num_keys: int) -> Trial:
        row = DummyRow(num_computed_tokens=num_keys - 1, num_new_tokens=1)
        plan = self._plan([row] * num_rows)
        half = num_rows // 2
        return Trial(
            size=num_rows,
            halves=(half, num_rows - half),
            whole_s=self._step_s(plan, splits=False),
            at_once_s=self._step_s(plan, splits=True),
        )

    def _plan(self, rows: Sequence[DummyRow]) -> StepPlan:
        return dummy_step(rows, self._block_size)

    @contextmanager
    def _ruled(self, *, splits: bool) -> Iterator[None]:
        before, self._two_batches.rule = self._two_batches.rule, SPLIT if splits else WHOLE
        try:
            yield
        finally:
            self._two_batches.rule = before

    def _step_s(self, plan: StepPlan, *, splits: bool) -> float:
        """Each step is launched while the one before it computes; the first is not counted."""
        with self._ruled(splits=splits):
            durations_s = self._steps.durations_s([plan] * (1 + self._num_rounds))
        return self._slowest(durations_s[1:])

    def _host_s(self, plan: StepPlan, *, splits: bool) -> float:
        """Of a launch on a device that has nothing to do."""
        spans_s: list[float] = []
        with self._ruled(splits=splits):
            for _ in range(1 + self._num_rounds):
                began_s = time.perf_counter()
                step = self._executor.launch(plan)
                spans_s.append(time.perf_counter() - began_s)
                step.wait()
        self._release(plan)
        return self._slowest(spans_s[1:])

    def _sent_s(self, plan: StepPlan) -> float:
        lanes, spans_s, so_far_s = TimedLanes(self._executor.model.device), [], 0.0
        with self._ruled(splits=True), self._two_batches.running_in(lanes):
            for _ in range(1 + self._num_rounds):
                self._executor.launch(plan).wait()
                total_s = lanes.seconds()
                spans_s.append(total_s - so_far_s)
                so_far_s = total_s
        self._release(plan)
        return self._slowest(spans_s[1:])

    def _halves(self, plan: StepPlan) -> tuple[int, int]:
        split = split_prompts(plan.num_new_tokens)
        assert split is not None, f"{plan.num_tokens} tokens have no two halves"
        return split.token, plan.num_tokens - split.token

    def _release(self, plan: StepPlan) -> None:
        self._executor.launch(release_step(len(plan.rows))).wait()

    def _slowest(self, seconds: Sequence[float]) -> float:
        """The median of the rank whose median is the longest."""
        own = msgspec.msgpack.encode(statistics.median(seconds))
        return max(msgspec.msgpack.decode(d, type=float) for d in self._comm.gather_bytes(own))


def render_prompts(trials: Sequence[Trial], costs: OverlapCosts) -> str:
    """A table in Markdown."""
    header = ("tokens", "halves", "whole ms", "in turn", "at once", "sent", "hidden",
              "whole / at once", "rule", "host ms", "host, two")  # fmt: skip
    return render_rows([header, *(_prompt_cells(trial, costs) for trial in trials)])


def _prompt_cells(trial: Trial, costs: OverlapCosts) -> tuple[str, ...]:
    assert trial.in_turn_s is not None, "a step that replays no graph"
    assert trial.sent_s is not None, "likewise"
    assert trial.host_s is not None, "likewise"
    hidden = trial.hidden
    return (
        f"{trial.size:,}",
        "{:,} + {:,}".format(*trial.halves),
        f"{1e3 * trial.whole_s:.2f}",
        f"{1e3 * trial.in_turn_s:.2f}",
        f"{1e3 * trial.at_once_s:.2f}",
        f"{1e3 * trial.sent_s:.2f}",
        "" if hidden is None else f"{hidden:.0%}",
        f"{trial.speed_up:.3f}",
        f"{1 / (1 - costs.gain(*trial.halves)):.3f}",
        *(f"{1e3 * seconds:.2f}" for seconds in trial.host_s),
    )


def render_decodes(trials: dict[int, list[Trial]]) -> str:
    """trials: by lag, of the same sizes."""
    lags = list(trials)
    header = ("rows", "whole ms", *(f"at once, lag {lag}" for lag in lags),
              *(f"whole / at once, lag {lag}" for lag in lags))  # fmt: skip
    rows = [
        (
            str(of_size[0].size),
            f"{1e3 * of_size[0].whole_s:.2f}",
            *(f"{1e3 * trial.at_once_s:.2f}" for trial in of_size),
            *(f"{trial.speed_up:.3f}" for trial in of_size),
        )
        for of_size in zip(*trials.values(), strict=True)
    ]
    return render_rows([header, *rows])


# ---- one rank ------------------------------------------------------------------------------------


def bench_config(folder: Path, args: argparse.Namespace) -> AppConfig:
    on_gpu = args.device == "cuda"
    overrides: dict[str, object] = {
        "model.path": str(folder),
        "model.device": args.device,
        "model.dtype": "bfloat16" if on_gpu else "auto",
        "model.weights": "random",
        "model.max_model_len": args.max_model_len,
        "cache.enable_prefix_caching": False,
        "cache.num_blocks": _num_blocks(args),
        "scheduler.max_num_batched_tokens": max(args.tokens, default=1024),
        "scheduler.max_num_seqs": max(args.rows, default=64),
        "workers.tensor_parallel_size": args.ranks,
        "workers.expert_parallel": args.expert_parallel,
        "execution.enable_two_batch_overlap": True,
        "execution.tbo_min_prompt_tokens": 2,
        "execution.tbo_min_decode_rows": min(args.rows, default=None),
        "laps.enable_batch_prefill_cuda_graph": False,
    }
    if on_gpu:
        overrides["workers.num_gpus"] = 1
    overrides |= {key: json.loads(value) for key, value in args.set}
    return load_config(None, overrides)


def _num_blocks(args: argparse.Namespace) -> int:
    """As many as the largest step needs, and a few more."""
    size: int = CacheConfig().block_size
    num_rows = -(-max(args.tokens, default=0) // args.row_tokens)
    in_prompts: int = num_rows * -(-args.row_tokens // size)
    in_decodes: int = max(args.rows, default=0) * -(-args.context // size)
    of_one: int = -(-args.max_model_len // size)
    return max(in_prompts, in_decodes, of_one) + 64


def measure(comm: Comm, folder: Path, args: argparse.Namespace) -> str:
    """The tables; every rank calls it."""
    config = bench_config(folder, args)
    pinned = None if args.pin_routing is None else build_pinned(config, args.pin_routing, comm.rank)
    engine = build_engine(config, "bench", MonotonicClock(), _no_handoff, model=pinned, comm=comm)
    del pinned  # the engine's alone
    executor = engine.executor
    steps = SameSteps(executor, comm, args.rounds)
    prompts = [_said(comm, steps.prompts(size, args.row_tokens)) for size in args.tokens]
    by_lag: dict[int, list[Trial]] = {}
    for lag in args.lags if args.rows else ():
        _lag_by(executor, lag, args)
        by_lag[lag] = [_said(comm, steps.decodes(size, args.context)) for size in args.rows]
    layer = layer_costs(executor.model.spec, comm.rank.size, executor.model.dtype.itemsize)
    tables = [render_prompts(prompts, OverlapCosts(layer=layer, rates=H200))] if prompts else []
    tables += [render_decodes(by_lag)] if by_lag else []
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    about = f"{comm.rank.size} x {device}, torch {torch.__version__}, {' '.join(sys.argv[1:])}"
    return "\n\n".join([about, *tables])


def _lag_by(executor: Executor, lag: int, args: argparse.Namespace) -> None:
    """Graphs are captured with the lag, unless they already were, as the engine was built."""
    if lag == DECODE.lag and lag == args.lags[0]:
        return
    executor.two_batches.lag_by(lag)
    if executor.statistics().decode_graphs is not None:
        recorder = CudaRecorder(has_watchdog=True)
        executor.capture_split_decodes(recorder, logger.info, min_rows=min(args.rows))


def _said(comm: Comm, trial: Trial) -> Trial:
    if comm.rank.index == 0:
        logger.info("%d: whole %.2f ms, two %.2f ms", trial.size, 1e3 * trial.whole_s,
                    1e3 * trial.at_once_s)  # fmt: skip
    return trial


def _no_handoff(event: object) -> None:
    raise AssertionError(f"{event} in a unified engine")


# ---- all ranks -----------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shapes", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    model.add_argument("--model", type=Path, help="a folder with config.json instead of --shapes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=2)
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts a rank")
    parser.add_argument("--pin-routing", type=int, metavar="SEED", help="experts drawn uniformly")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="of prompt steps")
    parser.add_argument("--row-tokens", type=int, default=1024, help="of a prompt, at most")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="of decode steps")
    parser.add_argument("--context", type=int, default=256, help="keys of each row that decodes")
    parser.add_argument("--lags", type=int, nargs="+", default=[DECODE.lag], help="of decodes")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind")
    parser.add_argument("--max-model-len", type=int, default=16384)
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


def run_beside(args: argparse.Namespace, one: Callable[[str, str], str]) -> str:
    """`one(board, name)` in this process as rank 0, beside the processes of the other ranks."""
    board, name = open_board(), f"bench-{uuid.uuid4().hex}"
    others = []
    for rank in range(1, args.ranks):
        sees = []
        if args.device == "cuda":
            sees = [f"CUDA_VISIBLE_DEVICES=GPU-{torch.cuda.get_device_properties(rank).uuid}"]
        command = [sys.executable, *sys.orig_argv[1:]]
        told = ["--rank", str(rank), "--board", board, "--name", name]
        others.append(subprocess.Popen(["env", *sees, *command, *told]))
    try:
        return one(board, name)
    finally:
        for process in others:
            process.kill()
            process.wait()


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

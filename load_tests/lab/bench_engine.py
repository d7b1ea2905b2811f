"""What one engine reaches: prefill tokens/s, decode ms/step, latency of short prompts.

    python -m load_tests.lab.bench_engine --shapes qwen3-8b --peer peer.txt --chain chain.txt
    python -m load_tests.lab.bench_engine --works decode_bs256 --no-host --eager
    python -m load_tests.lab.bench_engine --quantization fp8 --kv-dtype fp8_e4m3
    python -m load_tests.lab.bench_engine --shapes qwen3-30b-a3b --pin-routing 0 --no-host
    python -m load_tests.lab.bench_engine --shapes qwen3-32b --tensor-parallel 2 --quick
    python -m load_tests.lab.bench_engine --shapes qwen3-32b --tensor-parallel 2 --works none \\
        --num-blocks 17300 --limit-s 400 --figures figures.jsonl
    python -m load_tests.lab.bench_engine --tensor-parallel 2 --expert-parallel \\
        --shapes qwen3-30b-a3b --pin-routing 0 --set execution.enable_two_batch_overlap true
    python -m load_tests.lab.bench_engine --profile --works prefill_16x4096 decode_bs64 --traces DIR

In this process, random weights, greedy, no end of sequence, prefix cache off, and timed as the
peer times itself: prompts are new in every round; a prefill is the median of rounds in which every
prompt gets one token, a decode step the 128th part of the median for 129 tokens less that for one.
`--quick` takes one round, and as decode steps those in which all rows decode (means of 16).
`--tensor-parallel` starts the other ranks as processes, a GPU for each (following.py). With
`--turn` it waits, after the line "ready and warm", until others have measured (turns.py). What the
host does between two launches, on every rank, and how steady steps are beside streams comes first,
and with `--works none` alone; on a CPU a launch computes, too. `--turns` keeps every step of it.
Each figure is logged as soon as it is measured, and written to `--figures`. `--profile` traces
works instead, `--then-profile` those that it names after all figures. After `--limit-s`, or CLOSE_S
after the last line, the process ends wherever it stands, with the stacks of its threads.
`--peer` reads its RESULT line and `--chain` what a bare chain of kernels printed. Knows no Ray.
"""

import argparse
import faulthandler
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from configs.load import load_config
from configs.schema import AppConfig
from engine.layers.context import SINGLE_RANK, Comm
from engine.scheduling.contracts import StepOutput
from load_tests.lab.comparison import Comparison, compare, read_chain, read_peer, render_comparisons
from load_tests.lab.figure_log import FigureLog
from load_tests.lab.floors import H200, floor_s
from load_tests.lab.following import LOG_FORMAT, Following
from load_tests.lab.host_work import collecting_as_a_worker, measure_host_work, no_figures
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.kernel_profile import (
    KernelRun,
    draw_profile,
    group_times_us,
    longest_kernels,
    read_trace,
    render_kernels,
    render_profile,
)
from load_tests.lab.pinned_routing import build_pinned, count_distinct
from load_tests.lab.shapes import SHAPES, WEIGHT_FORMATS, write_shapes
from load_tests.lab.turns import add_turn_option, wait_turn
from load_tests.lab.works import DECODE_STEPS, DECODES, WARM_UPS, WORKS, Kind, Work
from load_tests.prompts import RandomPrompts
from load_tests.tables import Figure, describe_machine, render

logger = logging.getLogger(__name__)

NUM_ROUNDS = {Kind.PREFILL: 3, Kind.SHORT_PREFILL: 7, Kind.DECODE: 3}
HOST_WORK = DECODES[3]  # the largest batch: most work for the host, least time on the device
NUM_TRACED_STEPS = 16
NUM_TOLD_ENDS = 8  # steps of a prefill
NUM_LISTED_KERNELS = 20
QUICK_MEAN_OF = 16  # steps
NUM_QUICK_TOKENS = DECODE_STEPS + 72  # rows begin to decode up to so many steps apart
LIMIT_S = 3600.0
CLOSE_S = 60.0  # once all is printed


class Bench:
    """Times works on one engine; prompts are random ids, never the same twice."""

    def __init__(self, ours: EngineInProcess, *, seed: int = 0, is_quick: bool = False) -> None:
        self.ours = ours
        self._is_quick = is_quick
        self._random = RandomPrompts(ours.engine.spec.vocab_size, seed=seed)

    def warm_up(self) -> None:
        """What the peer runs before its first figure."""
        for num_rows, num_tokens, num_new in WARM_UPS:
            self._seconds(num_rows, num_tokens, num_new)

    def rounds_s(self, work: Work) -> list[float]:
        """A duration of every round: of the whole prefill, or of one decode step on average.

        Where it is to be quick, of one prefill, or of steps in which all rows decode.
        """
        if self._is_quick and work.kind is Kind.DECODE:
            return self._steps_s(work)
        num_rounds = range(1 if self._is_quick else NUM_ROUNDS[work.kind])
        firsts_s = [self._seconds(work.num_rows, work.num_tokens, 1) for _ in num_rounds]
        if work.kind is not Kind.DECODE:
            return firsts_s
        num_new = 1 + DECODE_STEPS
        alls_s = [self._seconds(work.num_rows, work.num_tokens, num_new) for _ in num_rounds]
        return step_rounds_s(firsts_s, alls_s)

    def _steps_s(self, work: Work) -> list[float]:
        """Steps of all rows alone, of the same prompts: the mean of each QUICK_MEAN_OF.

        A single one says little: with a step in flight, some return at once and others late.
        """
        for prompt in self.prompts(work.num_rows, work.num_tokens):
            self.ours.add(prompt, NUM_QUICK_TOKENS)
        self._step_until_decoding(work.num_rows)
        steps_s: list[float] = []
        began_s = time.perf_counter()

        def note(output: StepOutput) -> None:
            nonlocal began_s
            ended_s = time.perf_counter()
            if len(output.tokens) == output.num_scheduled_tokens == work.num_rows:
                steps_s.append(ended_s - began_s)
            began_s = ended_s

        self.ours.run_until_idle(note)
        assert len(steps_s) >= DECODE_STEPS, f"only {len(steps_s)} steps of all rows"
        starts = range(0, DECODE_STEPS, QUICK_MEAN_OF)
        return [statistics.fmean(steps_s[start : start + QUICK_MEAN_OF]) for start in starts]

    def trace(self, work: Work, path: Path) -> None:
        """Write the profiler's trace of a prefill, or of decode steps of all rows, to `path`."""
        is_decode = work.kind is Kind.DECODE
        for prompt in self.prompts(work.num_rows, work.num_tokens):
            self.ours.add(prompt, NUM_QUICK_TOKENS if is_decode else 1)
        if is_decode:
            self._step_until_decoding(work.num_rows)
        on_gpu = torch.cuda.is_available()
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with profile(activities=[activity], acc_events=True) as profiler:
            if is_decode:
                for _ in range(NUM_TRACED_STEPS):
                    self.ours.step()
            else:
                self.ours.run_until_idle(_ignore)
            if on_gpu:
                torch.cuda.synchronize()  # with a step in flight its kernels belong here too
        profiler.export_chrome_trace(str(path))
        self.ours.run_until_idle(_ignore)

    def prompts(self, num_rows: int, num_tokens: int) -> list[list[int]]:
        return self._random.draw(num_rows, num_tokens)

    def _step_until_decoding(self, num_rows: int) -> None:
        """Until a step computed one token for each of `num_rows` rows and nothing else."""
        while self.ours.engine.core.has_work:
            output = self.ours.step()
            if len(output.tokens) == output.num_scheduled_tokens == num_rows:
                return
        num_blocks = self.ours.engine.cache.num_blocks
        raise AssertionError(
            f"{num_rows} rows never decoded together: {num_blocks} KV blocks may be too few"
        )

    def _seconds(self, num_rows: int, num_tokens: int, num_new: int) -> float:
        """From adding `num_rows` prompts until each has `num_new` tokens on the host."""
        prompts = self.prompts(num_rows, num_tokens)
        taken = num_allocations()
        ends_s: list[float] = []
        started_s = time.perf_counter()
        answers = self.ours.generate(prompts, num_new, lambda _: ends_s.append(time.perf_counter()))
        took_s = time.perf_counter() - started_s
        assert all(len(answer) == num_new for answer in answers), "not every token was generated"
        if num_new == 1:
            ends = ", ".join(f"{1e3 * (end_s - started_s):.1f}" for end_s in ends_s[:NUM_TOLD_ENDS])
            new = [now - before for now, before in zip(num_allocations(), taken, strict=True)]
            logger.info(
                "%d prompts of %d tokens: steps returned after %s ms; %d allocations on the device,"
                " %d of pinned memory", num_rows, num_tokens, ends, *new,
            )  # fmt: skip
        return took_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All that a run measured."""

    comparisons: list[Comparison]
    host: list[Figure]
    about: dict[str, object]

    def render(self, *, is_document: bool) -> str:
        """Tables in Markdown; without a list of circumstances where it is for a document."""
        parts = [render_comparisons(self.comparisons)] if self.comparisons else []
        parts += [render(self.host)] if self.host else []
        if not is_document:
            parts.append("\n".join(f"{name}: {value}" for name, value in self.about.items()))
        return "\n\n".join(parts)

    def to_json(self) -> str:
        """One object on one line."""
        host = {figure.name: {"value": figure.value, "unit": figure.unit} for figure in self.host}
        works = {one.work.key: one.to_builtins() for one in self.comparisons}
        return json.dumps({"about": self.about, "works": works, "host": host})


def num_allocations() -> tuple[int, int]:
    """How often memory of the device and pinned memory were asked of CUDA so far."""
    if not torch.cuda.is_available():
        return 0, 0
    on_device = torch.cuda.memory_stats().get("num_device_alloc", 0)
    return int(on_device), int(torch.cuda.host_memory_stats().get("num_host_alloc", 0))


def step_rounds_s(firsts_s: Sequence[float], alls_s: Sequence[float]) -> list[float]:
    """Seconds a decode step, by round: what a round took beyond the median of first tokens."""
    first_s = statistics.median(firsts_s)
    return [(all_s - first_s) / DECODE_STEPS for all_s in alls_s]


def run_works(
    bench: Bench,
    works: Sequence[Work],
    peer: dict[str, float],
    chain: dict[str, float],
    log: FigureLog,
) -> list[Comparison]:
    """Time every work, in order, and set it beside what others reached."""
    engine = bench.ours.engine
    machine = H200.times(bench.ours.num_ranks)
    found = []
    for work in works:
        least_s = floor_s(work, engine.spec, engine.layout.dtype, machine)
        one = compare(work, bench.rounds_s(work), least_s, peer=peer, chain=chain)
        log.add_work(one)
        found.append(one)
    return found


def profile_works(bench: Bench, works: Sequence[Work], folder: Path, png: Path | None) -> str:
    """Trace every work into `folder`; tables, and maybe a picture, of where the time went."""
    folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[KernelRun]] = {}
    for work in works:
        path = folder / f"{work.key}.json"
        bench.trace(work, path)
        runs[work.label] = read_trace(path)
    profiles = {label: group_times_us(kernels) for label, kernels in runs.items()}
    lists = [
        f"{label}:\n{render_kernels(longest_kernels(kernels, NUM_LISTED_KERNELS))}"
        for label, kernels in runs.items()
    ]
    if png is not None:
        draw_profile(profiles, png)
    return "\n\n".join([render_profile(profiles), *lists])


def engine_config(folder: Path, args: argparse.Namespace) -> AppConfig:
    """The configuration of the engine under test, from the command line's switches."""
    overrides: dict[str, object] = {
        "model.path": str(folder),
        "model.device": args.device,
        "model.dtype": "bfloat16" if args.device == "cuda" else "auto",
        "model.weights": args.weights,
        "model.quantization": args.quantization,
        "model.max_model_len": args.max_model_len,
        "model.deterministic": args.deterministic,
        "model.attention.prefill": args.attention_prefill,
        "model.attention.decode": args.attention_decode,
        "cache.enable_prefix_caching": False,
        "cache.num_blocks": args.num_blocks,
        "cache.kv_dtype": args.kv_dtype,
        "scheduler.max_num_batched_tokens": args.max_num_batched_tokens,
        "scheduler.max_num_seqs": args.max_rows,
        "scheduler.overlap": False if args.no_overlap else None,
        "scheduler.short_share": 0.0,  # all blocks are for the works, as the peer's are
        "execution.cuda_graphs": False if args.eager else None,
        "workers.tensor_parallel_size": args.tensor_parallel,
        "execution.enable_two_batch_overlap": args.overlap_batches,
        "workers.expert_parallel": args.expert_parallel,
    }
    if args.tensor_parallel > 1 and args.device == "cuda":
        overrides["workers.num_gpus"] = 1
    overrides |= {key: json.loads(value) for key, value in args.set}
    return load_config(None, overrides)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shapes", choices=sorted(SHAPES), default="qwen3-8b")
    model.add_argument("--model", type=Path, help="a folder with config.json instead of --shapes")
    parser.add_argument("--weights", choices=("random", "safetensors"), default="random")
    parser.add_argument("--weight-format", choices=sorted(WEIGHT_FORMATS), default="dense")
    parser.add_argument("--quantization", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8_e4m3"), default="auto")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--num-blocks", type=int, help="default: as many as fit")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--no-overlap", action="store_true", help="one step at a time")
    parser.add_argument("--attention-prefill", default="auto", metavar="NAME")
    parser.add_argument("--attention-decode", default="auto", metavar="NAME")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument(
        "--pin-routing", type=int, metavar="SEED", help="experts drawn uniformly (a mixture)"
    )
    parser.add_argument("--tensor-parallel", type=int, choices=(1, 2, 4, 8), default=1)
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts a rank")
    parser.add_argument(
        "--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"),
        help="any other key of the configuration, its value in JSON",
    )  # fmt: skip
    parser.add_argument("--nccl", action="store_true", help="no sums through peer memory")
    parser.add_argument("--overlap-batches", action="store_true", help="two batches at once")
    parser.add_argument("--quick", action="store_true", help="one round of each work")
    parser.add_argument("--works", nargs="*", default=[""], help="parts of names; default: all")
    parser.add_argument("--no-host", action="store_true", help="leave out the host's work")
    add_turn_option(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer", type=Path, help="file with the peer's RESULT line")
    parser.add_argument("--chain", type=Path, help="file with what the plain chain printed")
    parser.add_argument("--figures", type=Path, help="file for each figure as it comes, in JSON")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of the whole run")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="one object")
    output.add_argument("--markdown", action="store_true", help="tables only, for a document")
    parser.add_argument("--profile", action="store_true", help="where the time goes, no figures")
    parser.add_argument("--then-profile", nargs="+", default=[], help="works, after all figures")
    parser.add_argument("--turns", type=Path, help="file for every step beside streams and alone")
    parser.add_argument("--traces", type=Path, help="keep the profiler's traces in this folder")
    parser.add_argument("--png", type=Path, help="draw the profile; needs matplotlib")
    return parser


def describe(bench: Bench, args: argparse.Namespace) -> dict[str, object]:
    """What a reader must know to judge the figures."""
    on_gpu = args.device == "cuda"
    switches = (
        "weight_format",
        "quantization",
        "kv_dtype",
        "deterministic",
        "tensor_parallel",
        "expert_parallel",
        "set",
        "nccl",
        "overlap_batches",
        "quick",
        "eager",
        "no_overlap",
        "attention_prefill",
        "attention_decode",
    )
    model = bench.ours.engine.executor.model
    sizes = sorted({work.num_rows for work in DECODES})
    return describe_machine() | {
        "pin_routing": args.pin_routing,
        "distinct_experts_a_layer": [one.describe() for one in count_distinct(model, sizes)],
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "engine": bench.ours.engine.describe(),
        "compiled_since_ready": bench.ours.engine.compilations.names,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        **{name: getattr(args, name) for name in switches},
    }


def run(args: argparse.Namespace, scratch: Path, show: Callable[[str], object]) -> None:
    """Build the engine and measure what `args` asks for.

    show: called with what is to be printed, before anything is closed.
    """
    folder = args.model or write_shapes(args.shapes, scratch, args.weight_format)
    config = engine_config(folder, args)
    if args.tensor_parallel == 1:
        show(measure(_build(config, args, SINGLE_RANK), args, scratch))
        return
    with Following(
        config, scratch, pinned=args.pin_routing, uses_peer_memory=not args.nccl
    ) as others:
        show(_measure_led(others, config, args, scratch))


def _measure_led(
    others: Following, config: AppConfig, args: argparse.Namespace, scratch: Path
) -> str:
    """The engine ends with this function, before its ranks are disconnected."""
    ours = _build(config, args, others.comm)
    ours.engine.core.wrap_executor(others.lead)
    return measure(ours, args, scratch, others.figures)


def _build(config: AppConfig, args: argparse.Namespace, comm: Comm) -> EngineInProcess:
    if args.pin_routing is None:
        return EngineInProcess(config, comm=comm)
    return EngineInProcess(config, build_pinned(config, args.pin_routing, comm.rank), comm=comm)


def measure(
    ours: EngineInProcess,
    args: argparse.Namespace,
    scratch: Path,
    of_ranks: Callable[[], list[Figure]] = no_figures,
) -> str:
    """What is to be printed. of_ranks: what following cost other ranks so far."""
    works = [work for work in WORKS if any(part in work.key for part in args.works)]
    bench = Bench(ours, seed=args.seed, is_quick=args.quick)
    bench.warm_up()
    logger.info("ready and warm")
    if wait_turn(args.turn):
        bench.warm_up()  # the clocks of a GPU fall while it waits
    with collecting_as_a_worker():
        if args.profile:
            return profile_works(bench, works, args.traces or scratch, args.png)
        results = _take_figures(bench, works, args, of_ranks)
        text = results.to_json() if args.json else results.render(is_document=args.markdown)
        if not args.then_profile:
            return text
        traced = [work for work in WORKS if any(part in work.key for part in args.then_profile)]
        return f"{text}\n\n{profile_works(bench, traced, args.traces or scratch, args.png)}"


def _take_figures(
    bench: Bench,
    works: Sequence[Work],
    args: argparse.Namespace,
    of_ranks: Callable[[], list[Figure]],
) -> Results:
    peer = read_peer(args.peer) if args.peer else {}
    chain = read_chain(args.chain) if args.chain else {}
    log, host = FigureLog(args.figures), []
    if not args.no_host:
        num_rows = min(HOST_WORK.num_rows, args.max_rows)
        prompts = bench.prompts(num_rows, HOST_WORK.num_tokens)
        for figure in measure_host_work(bench.ours, prompts, of_ranks=of_ranks, turns=args.turns):
            log.add(figure)
            host.append(figure)
    comparisons = run_works(bench, works, peer, chain, log)
    if args.no_host:
        host = of_ranks()
        for figure in host:
            log.add(figure)
    return Results(comparisons=comparisons, host=host, about=describe(bench, args))


def _print(text: str) -> None:
    """Prints the last line; what is left to do has CLOSE_S."""
    print(text, flush=True)
    faulthandler.dump_traceback_later(CLOSE_S, exit=True)


def main() -> None:
    """Ends the process, without the interpreter's cleanup: that may wait for other ranks."""
    args = build_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    faulthandler.dump_traceback_later(args.limit_s, exit=True)
    status = 1
    try:
        with tempfile.TemporaryDirectory() as scratch:
            run(args, Path(scratch), _print)
        status = 0
    except BaseException:  # noqa: BLE001 - any: it ends the process
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _ignore(output: StepOutput) -> None:
    """Only time matters here."""


if __name__ == "__main__":
    main()

"""Short and long prompts that come when they come: TTFT by class, TPOT, and the highest good rate.

    python -m load_tests.lab.bench_mixed --shapes qwen3-8b --rates 16 24 --queue fcfs laps \\
        --peer vllm.txt --limits 100,1000,50 --search --budget-s 540 --json mixed.json
    python -m load_tests.lab.bench_mixed --rates 16 --seeds 7 --queue laps --mix exclusive fill \\
        --graphs ragged grid off
    python -m load_tests.lab.bench_mixed --rates --one-batch --peer vllm.txt --chain chain.txt
    python -m load_tests.lab.bench_mixed --url http://127.0.0.1:8000 --rates 16 24
    python -m load_tests.lab.bench_mixed --start configs/h200_2p2d.yaml \\
        configs/h200_unified_x4.yaml --model DIR/qwen3-8b --clients 8 --rates 64 96 --limits
        100,1000,50 --search
    python -m load_tests.lab.bench_mixed --config configs/gpu.yaml --rates 16 24
    python -m load_tests.lab.bench_mixed --rates 16 24 --set model.quantization=fp8 \\
        cache.kv_dtype=fp8_e4m3
    python -m load_tests.lab.bench_mixed --rates 300 --share-long 0 --duration-s 2 \\
        --window none adaptive fixed
    python -m load_tests.lab.bench_mixed --rates 16 24 --accepted 3:2.5
    python -m load_tests.lab.bench_mixed --shapes qwen3-30b-a3b --pin-routing 0 --rates 16 24 \\
        --tensor-parallel 2 --expert-parallel

Variants (graphs x queue x mix x window) take turns, rates in the order given, seeds pooled. Put
first what matters most: when `--budget-s` is over, what is left is not run, and said so. `--json`
is written again after every rate. With `--config` the engine is that of the file, and what it chose
for its device is printed. `--accepted`: each variant with drafts, too, as the controller decides,
of which so many count (`bench_accepted`). Greedy, no end of sequence; prompts are new to an engine
of this process and to a server that was just started. With `--tensor-parallel` the other ranks are
processes, a GPU for each (following.py), of one variant. Knows no Ray.
"""

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from configs.load import load_config
from configs.schema import AppConfig
from engine.layers.context import SINGLE_RANK, Comm
from engine.models.spec import load_spec
from load_tests.lab.application import running
from load_tests.lab.bench_accepted import Drafts, accept_synthetically
from load_tests.lab.following import Following
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.mixed_http import serve_over_http
from load_tests.lab.mixed_sweep import Budget, Results, Serve, Sweep, note
from load_tests.lab.one_batch import measure_batches, read_chain_batches
from load_tests.lab.open_loop import serve_load
from load_tests.lab.pinned_routing import build_pinned
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.mixed_load import (
    NUM_OUTPUT_TOKENS,
    SHARE_LONG,
    WARM_UP_PROMPTS,
    WARM_UP_SEED,
    MixedLoad,
    Served,
)
from load_tests.mixed_report import limits_from_text, read_peer_tables
from load_tests.prompts import FIRST_TOKEN_ID
from load_tests.tables import describe_machine

_ENGINE_SWITCHES = (
    "device",
    "max_model_len",
    "max_num_batched_tokens",
    "max_rows",
    "num_blocks",
    "queue",
    "mix",
    "window",
    "max_step_ms",
    "graphs",
    "accepted",
    "tensor_parallel",
    "expert_parallel",
    "pin_routing",
)
_MODEL_SWITCHES = ("device", "max_model_len", "num_blocks")  # which a file leaves open


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to schedule and to run steps. `auto` graphs: as the configuration has it."""

    queue: str
    mix: str
    window: str
    graphs: str
    max_step_ms: float | None = None  # None: as the configuration has it
    drafts: Drafts | None = None  # at most so many; so long if all were verified

    @property
    def label(self) -> str:
        parts = [self.queue]
        if self.queue == "laps":
            parts += [self.mix] + ([f"window {self.window}"] if self.window != "none" else [])
        parts += [] if self.max_step_ms is None else [f"{self.max_step_ms:g} ms"]
        parts += [] if self.drafts is None else [f"drafts {self.drafts.accepted_length:g}"]
        return ", ".join(parts + ([f"graphs {self.graphs}"] if self.graphs != "auto" else []))

    @property
    def overrides(self) -> dict[str, object]:
        """As keys of the configuration."""
        keys: dict[str, object] = {
            "laps.queue": self.queue,
        }
        if self.queue == "laps":
            keys |= {"laps.mix": self.mix, "laps.window": self.window}
        if self.max_step_ms is not None:
            keys["laps.max_step_ms"] = self.max_step_ms
        if self.graphs != "auto":
            keys["laps.enable_batch_prefill_cuda_graph"] = self.graphs != "off"
        if self.graphs not in ("auto", "off"):
            keys["laps.batch_prefill_form"] = self.graphs
        if self.drafts is not None:
            keys |= {
                "speculation.drafter": "ngram",
                "speculation.max_drafts": self.drafts.num_drafts,
            }
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVariant:
    """The engine as a configuration file has it."""

    path: Path

    @property
    def label(self) -> str:
        return self.path.name

    @property
    def overrides(self) -> dict[str, object]:
        return {}

    @property
    def drafts(self) -> Drafts | None:
        return None


def build_variants(args: argparse.Namespace) -> list[Variant] | list[FileVariant]:
    """Every combination that differs: mix, window and step time are of the laps queue alone."""
    if args.config is not None:
        return [FileVariant(path=args.config)]
    variants = []
    sides = [None] if args.accepted is None else [None, args.accepted]
    for graphs, queue, mix, window, max_step_ms, drafts in itertools.product(
        args.graphs, args.queue, args.mix, args.window, args.max_step_ms, sides
    ):
        is_laps = queue == "laps"
        variants.append(
            Variant(
                queue=queue,
                mix=mix if is_laps else "exclusive",
                window=window if is_laps else "none",
                graphs=graphs,
                max_step_ms=max_step_ms if is_laps else None,
                drafts=drafts,
            )
        )
    return list(dict.fromkeys(variants))


def engine_config(
    folder: Path, args: argparse.Namespace, overrides: Mapping[str, object]
) -> AppConfig:
    """The configuration of the engine under test: switches, the variant's keys, `--set`'s last."""
    of_model = {
        "model.path": str(folder),
        "model.device": args.device,
        "model.dtype": "bfloat16" if args.device == "cuda" else "auto",
        "model.weights": args.weights,
        "model.max_model_len": args.max_model_len,
        "cache.enable_prefix_caching": False,
        "cache.num_blocks": args.num_blocks,
    }
    of_steps = {
        "scheduler.max_num_batched_tokens": args.max_num_batched_tokens,
        "scheduler.max_num_seqs": args.max_rows,
        "workers.tensor_parallel_size": args.tensor_parallel,
        "workers.expert_parallel": args.expert_parallel,
        **overrides,
    }
    if args.tensor_parallel > 1 and args.device == "cuda":
        of_steps["workers.num_gpus"] = 1
    if args.device == "cuda" and "speculation.drafter" in overrides:
        of_steps["speculation.attention_backend"] = "decode"
    if args.config is not None:
        # Without Ray no worker asks for a GPU, so the file's engine runs on a CPU too.
        of_steps = {} if args.device == "cuda" else {"workers.num_gpus": 0}
    return load_config(args.config, {**of_model, **of_steps, **dict(args.set)})


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shapes", choices=sorted(SHAPES), default="qwen3-8b")
    model.add_argument("--model", type=Path, help="a folder with config.json instead of --shapes")
    parser.add_argument("--weights", choices=("random", "safetensors"), default="random")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--num-blocks", type=int, help="default: as many as fit")
    parser.add_argument("--tensor-parallel", type=int, choices=(1, 2, 4, 8), default=1)
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts a rank")
    parser.add_argument(
        "--pin-routing", type=int, metavar="SEED", help="experts drawn uniformly (a mixture)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, metavar="FILE", help="of an engine in this process")
    where.add_argument("--url", help="of a running server, instead of an engine in this process")
    where.add_argument(
        "--start", type=Path, nargs="+", default=[], metavar="CONFIG", help="servers"
    )
    parser.add_argument("--port", type=int, default=8000, help="with --start")
    parser.add_argument("--ready-s", type=float, default=600.0, help="with --start: to get ready")
    parser.add_argument("--clients", type=int, default=1, help="processes that ask over HTTP")
    parser.add_argument("--rates", type=float, nargs="*", default=[16.0, 24.0], help="requests/s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--duration-s", type=float, default=60.0, help="of the arrivals of a run")
    parser.add_argument("--warm-up-s", type=float, default=5.0, help="of the same load, first")
    parser.add_argument("--output-tokens", type=int, default=NUM_OUTPUT_TOKENS)
    parser.add_argument("--shrink", type=int, default=1, help="divides every prompt's length")
    parser.add_argument("--share-long", type=float, default=SHARE_LONG, help="of the requests")
    parser.add_argument("--queue", nargs="+", default=["laps"], metavar="laps|fcfs|priority")
    parser.add_argument("--mix", nargs="+", default=["exclusive"], metavar="exclusive|fill")
    parser.add_argument("--window", nargs="+", default=["none"], metavar="none|adaptive|fixed")
    parser.add_argument("--max-step-ms", type=float, nargs="+", default=[None], metavar="MS")
    parser.add_argument("--graphs", nargs="+", default=["auto"], metavar="auto|off|ragged|grid")
    parser.add_argument("--accepted", type=Drafts.parse, metavar="DRAFTS:LENGTH")
    parser.add_argument("--set", type=setting_from_text, nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--limits", type=limits_from_text, metavar="SHORT,LONG,TPOT", help="in ms")
    parser.add_argument("--search", action="store_true", help="for the highest good rate")
    parser.add_argument("--search-seeds", type=int, nargs="+", help="fewer, for the search alone")
    parser.add_argument("--one-batch", action="store_true", help="a few short prompts at once too")
    parser.add_argument("--peer", type=Path, nargs="+", default=[], help="files with RESULT lines")
    parser.add_argument("--chain", type=Path, help="file with what the plain chain printed")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="for all of it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, for a program")
    return parser


def run(args: argparse.Namespace, scratch: Path) -> Results:
    """Measure what `args` asks for. Raises ValueError for switches that contradict each other."""
    _check_switches(args)
    tables = read_peer_tables(args.peer)
    peers = [(name, table) for name, table in tables if "rate" in table]
    results = Results(limits=args.limits, peers=peers, about=describe(args))
    sweep = Sweep(results, Budget(args.budget_s), list(_loads(args)), args.json)
    folder = args.model or write_shapes(args.shapes, scratch)
    if args.url:
        _measure_server(sweep, "over HTTP", args.url, folder, args)
    elif args.start:
        for config in args.start:
            _measure_started(sweep, config, args)
    elif args.tensor_parallel > 1:
        _run_over_ranks(sweep, results, folder, scratch, args)
    else:
        engine_peer = {k: v for _, table in tables if "rate" not in table for k, v in table.items()}
        _run_in_process(sweep, results, folder, engine_peer, args)
    sweep.save()
    return results


def _check_switches(args: argparse.Namespace) -> None:
    """Raises ValueError for switches that contradict each other."""
    if args.search and (args.limits is None or not args.rates):
        raise ValueError("--search needs --limits, and --rates to start from")
    if (args.url or args.start) and (args.one_batch or not args.rates):
        raise ValueError("a server needs --rates; --one-batch is of an engine in this process")
    if args.start and args.model is None:
        raise ValueError("--start needs --model: a folder with a tokenizer")
    if args.url or args.start:
        _refuse_engine_switches(args)
    elif args.clients > 1:
        raise ValueError("--clients is of a server: it needs --url or --start")
    if args.config is not None:
        _refuse_engine_switches(args, keep=_MODEL_SWITCHES)
    if args.url and args.set:
        raise ValueError("--set: a server that runs has its configuration; use --start")
    if args.tensor_parallel > 1:
        _check_ranks(args)


def _check_ranks(args: argparse.Namespace) -> None:
    """Raises ValueError for what an engine over several ranks is not asked."""
    if args.one_batch or not args.rates:
        raise ValueError("--tensor-parallel needs --rates; --one-batch is of one rank")
    if len(build_variants(args)) > 1:
        raise ValueError("--tensor-parallel: ranks are not started anew; ask for one variant")


def describe(args: argparse.Namespace) -> dict[str, object]:
    """What a reader must know to judge the figures."""
    of_load = ("weights", "seeds", "duration_s", "output_tokens", "shrink", "share_long")
    names = [*of_load]
    if args.url or args.start:
        names += ["clients"]
    elif args.config is None:
        names += ["device", "max_num_batched_tokens", "max_rows", "pin_routing"]
        names += ["tensor_parallel", "expert_parallel"]
    else:
        names += ["device"]
    return describe_machine() | {name: getattr(args, name) for name in names} | dict(args.set)


def main() -> None:
    args = build_parser().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(run(args, Path(scratch)).render())


def _refuse_engine_switches(args: argparse.Namespace, keep: Sequence[str] = ()) -> None:
    """A server or a file has its own configuration. Raises ValueError for what is not followed."""
    parser = build_parser()
    for name in _ENGINE_SWITCHES:
        if name not in keep and getattr(args, name) != parser.get_default(name):
            switch = name.replace("_", "-")
            raise ValueError(
                f"--{switch} is of an engine in this process without a file; with --start or"
                " --config use --set"
            )


def _measure_started(sweep: Sweep, config: Path, args: argparse.Namespace) -> None:
    """An application of `config`, started for this and ended."""
    note(f"{config.stem}: starting the application")
    overrides = {"model.weights": args.weights, **dict(args.set)}
    with running(
        config, args.model, overrides=overrides, port=args.port, ready_s=args.ready_s
    ) as url:
        _measure_server(sweep, f"{config.stem} over HTTP", url, args.model, args)


def _measure_server(
    sweep: Sweep, variant: str, url: str, folder: Path, args: argparse.Namespace
) -> None:
    def serve(load: MixedLoad) -> list[Served]:
        return serve_over_http(url, load, load_spec(folder).vocab_size, args.clients)

    serve(_warm_up_load(args))
    _measure_all(sweep, variant, serve, args)


def _run_in_process(
    sweep: Sweep,
    results: Results,
    folder: Path,
    engine_peer: Mapping[str, float],
    args: argparse.Namespace,
) -> None:
    """All variants on one engine that is rebuilt in between, then the single batches."""
    ours: EngineInProcess | None = None

    def start(overrides: Mapping[str, object]) -> EngineInProcess:
        config = engine_config(folder, args, overrides)
        if ours is None:
            return _build(config, args)
        ours.restart(config)
        return ours

    for variant in build_variants(args) if args.rates else ():
        note(f"{variant.label}: starting the engine")
        ours = start(variant.overrides)
        _measure_variant(sweep, results, variant, ours, args)
    if args.one_batch:
        note("one batch: starting the engine")
        first = build_variants(args)[0]
        ours = start(first.overrides | {"cache.enable_prefix_caching": True})
        chain = read_chain_batches(args.chain) if args.chain else {}
        results.batches += measure_batches(ours, engine_peer, chain)


def _run_over_ranks(
    sweep: Sweep, results: Results, folder: Path, scratch: Path, args: argparse.Namespace
) -> None:
    """The one variant, on an engine that other processes follow."""
    (variant,) = build_variants(args)
    note(f"{variant.label}: starting {args.tensor_parallel} ranks")
    config = engine_config(folder, args, variant.overrides)
    with Following(config, scratch, pinned=args.pin_routing) as others:
        _measure_led(others, config, sweep, results, args)


def _measure_led(
    others: Following,
    config: AppConfig,
    sweep: Sweep,
    results: Results,
    args: argparse.Namespace,
) -> None:
    """The engine ends with this function, before its ranks are disconnected."""
    ours = _build(config, args, others.comm)
    ours.engine.core.wrap_executor(others.lead)
    (variant,) = build_variants(args)
    _measure_variant(sweep, results, variant, ours, args)


def _build(
    config: AppConfig, args: argparse.Namespace, comm: Comm = SINGLE_RANK
) -> EngineInProcess:
    if args.pin_routing is None:
        return EngineInProcess(config, comm=comm)
    return EngineInProcess(config, build_pinned(config, args.pin_routing, comm.rank), comm=comm)


def _measure_variant(
    sweep: Sweep,
    results: Results,
    variant: Variant | FileVariant,
    ours: EngineInProcess,
    args: argparse.Namespace,
) -> None:
    """All rates of a variant whose engine was just built."""
    if variant.drafts is not None:
        accept_synthetically(ours, variant.drafts.probability)
    warm_up(ours, _warm_up_load(args))
    keep = partial(_keep_rate, results, variant.label, ours)
    _measure_all(sweep, variant.label, partial(serve_load, ours), args, keep)
    cache, layout = ours.engine.cache, ours.engine.layout
    results.about |= {
        "engine": ours.engine.describe(),
        "num_kv_tokens": cache.num_blocks * layout.block_size,
        f"compiled_since_ready, {variant.label}": list(ours.engine.compilations.names),
        f"graphs, {variant.label}": asdict(ours.engine.executor.statistics()),
        f"chosen, {variant.label}": [c.describe() for c in ours.engine.limits.choices],
    }
    sweep.save()


def warm_up(ours: EngineInProcess, load: MixedLoad) -> None:
    """What the peer runs first, then `load`, which the cost model learns from."""
    num_prompts, num_tokens = WARM_UP_PROMPTS
    num_tokens = max(1, num_tokens // load.shrink)
    prompts = [[FIRST_TOKEN_ID + i] * num_tokens for i in range(num_prompts)]
    ours.generate(prompts, load.num_output_tokens)
    serve_load(ours, load)


def _measure_all(
    sweep: Sweep,
    variant: str,
    serve: Serve,
    args: argparse.Namespace,
    after: Callable[[float], None] = lambda rate: None,
) -> None:
    """`after` is told each of the given rates once it was measured."""
    for rate in args.rates:
        sweep.measure(variant, rate, serve)
        after(rate)
    if args.search:
        sweep.search(variant, serve, args.search_seeds or args.seeds)


def _keep_rate(results: Results, variant: str, ours: EngineInProcess, rate: float) -> None:
    """The host's last steps, and the step costs fitted by now.

    Costs also by rate: a simulation may then know less than the end.
    """
    core = ours.engine.core
    costs = msgspec.to_builtins(core.scheduler.costs)
    results.costs[variant] = costs
    results.costs_by_rate.setdefault(variant, {})[rate] = costs
    times = core.statistics()
    phases = {"plan": times.plan, "launch": times.launch, "commit": times.commit}
    results.about[f"host ms a step (processor), {variant} at {rate:g}/s"] = ", ".join(
        f"{name} {1e3 * phase.mean_s:.2f} ({1e3 * phase.mean_cpu_s:.2f})"
        for name, phase in phases.items()
    )


def _loads(args: argparse.Namespace) -> Iterator[MixedLoad]:
    """One a seed; a sweep sets the rate."""
    for seed in args.seeds:
        yield MixedLoad(
            rate=1.0,
            duration_s=args.duration_s,
            seed=seed,
            num_output_tokens=args.output_tokens,
            shrink=args.shrink,
            share_long=args.share_long,
        )


def _warm_up_load(args: argparse.Namespace) -> MixedLoad:
    """Of a seed of its own, at the first rate."""
    load = next(_loads(args))
    return replace(load, rate=args.rates[0], seed=WARM_UP_SEED, duration_s=args.warm_up_s)


def setting_from_text(text: str) -> tuple[str, object]:
    """`laps.max_step_ms=30` as a key and a value; what is not JSON is text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: not KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


if __name__ == "__main__":
    main()

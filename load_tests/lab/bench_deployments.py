"""Deployments of several GPUs on the mixed load over HTTP: given rates, then the highest good one.

    python -m load_tests.lab.bench_deployments 4u:60,104 2p2d 4vllm 3p1d:60,88 2u:30,52 1u:15,26 \\
        --model DIR/qwen3-8b --at-once 3 --num-blocks 9000 --clients 8 --rates 44 60 --search \\
        --limits 100,1000,50 --duration-s 12 --vllm-path /opt/vllm --json four.json --logs logs
    python -m load_tests.lab.validate_deployments four.json         # the simulator beside it
    python -m load_tests.lab.bench_deployments 1u 1p1d --model demo_model/laps-demo --at-once 2 \\
        --weights safetensors --gpus --shrink 8 --rates 4 --duration-s 8    # tries it on a CPU

What may be named is in `deployments.py`. `--at-once` of them start side by side, on the same GPUs,
and are measured in turn while the others idle; then they end, and the next ones start. So a start
is paid for once. `--num-blocks` is the KV of each engine (of vLLM's, too): all that are up at once
have to fit. With `--at-once 1` each may have the whole GPU.

Each rate's figures are printed at once as `RESULT {json}`, and `--json` is written again after
each. A deployment that does not start, or fails, is left out and the next one measured. A rate at
which requests are refused for want of capacity is too high. Equal rates do not offer equal loads:
ratios of two deployments are those of `prompt_tokens_per_s`. From the given rates a search goes on
by `--stride` until it has a good and a bad rate, and then between them: close to the rate that is
expected a small one, as 1.12, saves runs. When `--budget-s` is over, what is left is not run, and
said so. Every process is ended, also where this one is interrupted or told to end (SIGTERM).
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from engine.messages import LapsStatus
from engine.models.spec import load_spec
from load_tests.http_load.client import LoadError, Server, get
from load_tests.lab.application import FIRST_REPLICA_PORT
from load_tests.lab.bench_mixed import setting_from_text
from load_tests.lab.child_processes import exit_on_sigterm
from load_tests.lab.deployments import Deployment, Place, application_overrides, server_commands
from load_tests.lab.mixed_http import Asking, HttpClients
from load_tests.lab.mixed_sweep import SEARCH_STRIDE, Budget, Results, Serve, Sweep, note
from load_tests.lab.server_process import ROOT, ServerProcess, end_all
from load_tests.mixed_load import NUM_OUTPUT_TOKENS, WARM_UP_SEED, MixedLoad, OverloadError, Served
from load_tests.mixed_report import Point, limits_from_text
from load_tests.tables import describe_machine

END_S = 20.0  # for all that were up at once, to end
PATIENCE_S = 30.0  # for an answer, besides the time of all arrivals


@dataclass(slots=True, kw_only=True)
class Started:
    """A deployment's processes; clients ask the last one."""

    deployment: Deployment
    folder: Path
    processes: list[ServerProcess] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.processes[-1].command.url

    def wait_ready(self, until_s: float) -> None:
        """Raises LoadError for one that is late or has ended."""
        for process in self.processes:
            process.wait_ready(until_s)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("deployments", type=Deployment.parse, nargs="+", metavar="4u|2p2d|4vllm")
    parser.add_argument("--model", type=Path, required=True, help="a folder with a tokenizer")
    parser.add_argument("--weights", choices=("random", "safetensors"), default="random")
    parser.add_argument("--gpus", type=int, nargs="*", default=[0, 1, 2, 3], help="none = a CPU")
    parser.add_argument("--at-once", type=int, default=1, help="deployments that are up at a time")
    parser.add_argument("--num-blocks", type=int, help="of KV an engine; default: as many as fit")
    parser.add_argument("--set", type=setting_from_text, nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--vllm-path", type=Path, metavar="DIR", help="where vLLM is installed")
    parser.add_argument("--port", type=int, default=8000, help="the first one")
    parser.add_argument(
        "--replica-port", type=int, default=FIRST_REPLICA_PORT,
        help="the first of the ingress replicas: another one for a bench on other GPUs meanwhile",
    )  # fmt: skip
    parser.add_argument("--ready-s", type=float, default=240.0, help="to get ready")
    parser.add_argument("--clients", type=int, default=1, help="processes that ask")
    parser.add_argument("--rates", type=float, nargs="+", default=[44.0, 60.0], help="requests/s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7])
    parser.add_argument("--duration-s", type=float, default=20.0, help="of the arrivals of a run")
    parser.add_argument("--warm-up-s", type=float, default=5.0, help="of the same load, first")
    parser.add_argument("--output-tokens", type=int, default=NUM_OUTPUT_TOKENS)
    parser.add_argument("--shrink", type=int, default=1, help="divides every prompt's length")
    parser.add_argument("--limits", type=limits_from_text, metavar="SHORT,LONG,TPOT", help="in ms")
    parser.add_argument("--search", action="store_true", help="for the highest good rate")
    parser.add_argument("--stride", type=float, default=SEARCH_STRIDE, help="of its first steps")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="for all of it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, for a program")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="what the servers print")
    return parser


class Bench:
    """Starts, measures and ends what the arguments name."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises ValueError for contradicting switches, ConfigError for a wrong model."""
        if args.search and args.limits is None:
            raise ValueError("--search needs --limits")
        if args.stride <= 1.0:
            raise ValueError(f"--stride {args.stride:g}: a search goes on by more than 1 times")
        self._args = args
        self._vocab_size = load_spec(args.model).vocab_size
        self._budget = Budget(args.budget_s)
        self._loads = list(_loads(args))
        self.results = Results(limits=args.limits, peers=[], about=_describe(args))
        self._sweep = Sweep(
            self.results, self._budget, self._loads, args.json, self._tell, args.stride
        )

    def run(self) -> None:
        """All deployments, so many at a time."""
        waiting = list(self._args.deployments)
        with HttpClients(self._args.clients) as clients:
            while waiting:
                some, waiting = waiting[: self._args.at_once], waiting[self._args.at_once :]
                least_s = len(some) * self._args.duration_s
                if self._budget.allows(", ".join(one.name for one in some), least_s):
                    with self._running(some) as ready:
                        self._measure_all(ready, clients)
                self._sweep.save()

    @contextmanager
    def _running(self, some: Sequence[Deployment]) -> Iterator[list[Started]]:
        """Those of `some` that got ready; all have ended when the block is left."""
        with ExitStack() as stack:
            all_started: list[Started] = []
            for deployment in some:
                # Short, because the paths of Ray's sockets begin with it.
                folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
                started = Started(deployment=deployment, folder=Path(stack.enter_context(folder)))
                all_started.append(started)
            stack.callback(_end, all_started)
            began_s = time.monotonic()
            until_s = began_s + min(self._args.ready_s, self._budget.left_s)
            starting = [
                started
                for index, started in enumerate(all_started)
                if self._try(started, partial(self._start, started, index))
            ]
            ready = []
            for started in starting:
                if self._try(started, partial(started.wait_ready, until_s)):
                    ready_s = time.monotonic() - began_s
                    note(f"{started.deployment.name}: ready {ready_s:.0f} s after the start")
                    ready.append(started)
                else:
                    _end([started])  # or it would disturb the others
            yield ready

    def _place(self, index: int, folder: Path) -> Place:
        args = self._args
        return Place(
            index=index,
            first_port=args.port,
            first_replica_port=args.replica_port,
            folder=folder,
            model=args.model,
            gpus=args.gpus,
            num_blocks=args.num_blocks,
            overrides={"model.weights": args.weights, **dict(args.set)},
            vllm_path=args.vllm_path,
        )

    def _start(self, started: Started, index: int) -> None:
        deployment, place = started.deployment, self._place(index, started.folder)
        note(f"{deployment.name}: starting")
        logs = self._args.logs or place.folder
        logs.mkdir(parents=True, exist_ok=True)
        for command in server_commands(deployment, place):
            log = logs / f"{deployment.name}, {command.name}.log"
            started.processes.append(ServerProcess(command, log))
        if not deployment.is_vllm:
            self.results.about[f"deployment, {deployment.name}"] = {
                "config": str(deployment.config.relative_to(ROOT)),
                "overrides": application_overrides(deployment, place),
            }

    def _measure_all(self, ready: Sequence[Started], clients: HttpClients) -> None:
        """The given rates of each, then a step of the search of each in turn: a cut is fair."""
        searching = [one for one in ready if self._try(one, partial(self._measure, one, clients))]
        while self._args.search and searching:
            searching = [one for one in searching if self._search_once(one, clients)]

    def _measure(self, started: Started, clients: HttpClients) -> None:
        """Warm up, then the given rates."""
        name, serve = started.deployment.name, self._serve(started, clients)
        rates = started.deployment.rates or self._args.rates
        warm_up = replace(
            self._loads[0], rate=rates[0], seed=WARM_UP_SEED, duration_s=self._args.warm_up_s
        )
        try:
            serve(warm_up)
        except OverloadError as refusal:
            note(f"{name}, warming up: {refusal}")  # the rate itself is tried all the same
        for rate in rates:
            self._sweep.measure(name, rate, serve)
            if not started.deployment.is_vllm:
                self._try(started, partial(self._keep_costs, name, rate, started.url))

    def _search_once(self, started: Started, clients: HttpClients) -> bool:
        """Whether the search goes on."""
        goes_on: list[bool] = []
        name, serve = started.deployment.name, self._serve(started, clients)
        self._try(started, lambda: goes_on.append(self._sweep.search_once(name, serve)))
        return any(goes_on)

    def _serve(self, started: Started, clients: HttpClients) -> Serve:
        def serve(load: MixedLoad) -> list[Served]:
            says_priority = started.deployment.is_vllm
            how = Asking(says_priority=says_priority, patience_s=load.duration_s + PATIENCE_S)
            return clients.serve(started.url, load, self._vocab_size, how)

        return serve

    def _keep_costs(self, name: str, rate: float, url: str) -> None:
        """The step costs that the workers have fitted by now."""
        status = msgspec.json.decode(get(Server(url=url), "/laps_status"), type=LapsStatus)
        if status.step_costs is not None:
            costs = msgspec.to_builtins(status.step_costs)
            self.results.costs[name] = costs
            self.results.costs_by_rate.setdefault(name, {})[rate] = costs
            self._sweep.save()

    def _tell(self, point: Point) -> None:
        """A point's line, at once."""
        print("RESULT", json.dumps(point.to_builtins(self.results.limits)), flush=True)

    def _try(self, started: Started, step: Callable[[], None]) -> bool:
        """Whether it worked; why not is told and kept, and the other deployments go on."""
        try:
            step()
        except (LoadError, OSError, AssertionError, ValueError, RuntimeError) as error:
            name = started.deployment.name
            note(f"{name}: {error!r}" if not str(error) else f"{name}: {error}")
            self.results.about[f"failed, {name}"] = str(error)
            return False
        return True


def _end(all_started: Sequence[Started]) -> None:
    end_all((process for one in all_started for process in one.processes), END_S)


def _loads(args: argparse.Namespace) -> Iterator[MixedLoad]:
    """One a seed; a sweep sets the rate."""
    for seed in args.seeds:
        yield MixedLoad(
            rate=1.0,
            duration_s=args.duration_s,
            seed=seed,
            num_output_tokens=args.output_tokens,
            shrink=args.shrink,
        )


def _describe(args: argparse.Namespace) -> dict[str, object]:
    """What a reader must know to judge the figures."""
    names = ("weights", "seeds", "duration_s", "output_tokens", "shrink", "clients", "at_once")
    told = {name: getattr(args, name) for name in (*names, "num_blocks")}
    first = [] if args.vllm_path is None else [str(args.vllm_path)]
    versions = {
        "ray": _version("ray", sys.path),
        "torch": _version("torch", sys.path),
        "vllm": _version("vllm", [*first, *sys.path]),
    }
    return describe_machine() | versions | told | {"arguments": sys.argv[1:]}


def _version(package: str, folders: list[str]) -> str | None:
    """Of a package as the first of `folders` has it; None = none of them does."""
    return next((one.version for one in distributions(name=package, path=folders)), None)


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    exit_on_sigterm()
    try:
        bench = Bench(args)
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    bench.run()
    print(bench.results.render())
    if not bench.results.points:
        raise SystemExit("nothing was measured")


if __name__ == "__main__":
    main()

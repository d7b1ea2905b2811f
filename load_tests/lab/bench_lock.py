"""How long the engine's thread waits for the interpreter's lock, in a worker that serves over HTTP.

    python -m load_tests.lab.bench_lock --rows 64 --replicas 8                       # shipped model
    python -m load_tests.lab.bench_lock --config configs/gpu.yaml --model FOLDER --rows 256 \\
        --set model.weights=random --switch-ms 5 1 0.2

Starts the application on a Ray cluster of its own with `--replicas` ingress replicas. First the
worker's engine has `--rows` rows whose tokens go nowhere, then `--clients` processes keep as many
streams going and a prompt of `--prompt-tokens` comes now and then. Each time it reads how long the
thread was not on a processor in the host's phases of a step, and how late a thread that wants the
lock gets it. What they are more than without an event loop is what a process of the engine's own
could win, as a share of a step: an upper bound, because a step on a GPU may hide it.

`--switch-ms`: the load is measured once with each of these switch intervals (Python's is 5 ms) in
worker and ingresses.
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve

from actors.ingress.http_proxy import set_http_proxy
from actors.lifecycle.deployment import describe_deployment
from configs.load import load_config
from configs.process_environment import set_defaults, set_serve_environment
from configs.schema import AppConfig
from load_tests.http_load.client import Server
from load_tests.lab.lock_probe import Seen, empty, end_probe, fill, set_switch_interval, start_probe
from load_tests.lab.model_folder import parse_settings
from load_tests.tables import describe_machine, render_rows
from load_tests.testbed.deployed import MODEL, Application, free_port
from load_tests.testbed.stream_client import StreamClient
from serve_app import bind

HOST = "127.0.0.1"
REST_S = 1.0
ENDS_AT_ONCE = {  # nobody is to be drained at the end of a measurement
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}
PROMPTS_A_S = 4.0
LOOK_EVERY_S = 0.1
PATIENCE_S = 60.0
PHASES = ("plan", "launch", "wait", "commit")
HOST_PHASES = ("plan", "launch", "commit")


def deploy(config: AppConfig) -> Application:
    """Starts an application on a Ray cluster of its own, behind the proxy that it would choose."""
    set_http_proxy(config.edge.http_proxy)
    set_serve_environment()
    set_defaults(ENDS_AT_ONCE)
    port = free_port()
    ray.init("local", include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": HOST, "port": port})
    spec = describe_deployment(config)
    serve.run(bind(spec), name=config.name or "lock", route_prefix="/", blocking=False)
    return Application(config=config, url=f"http://{HOST}:{port}", hash=spec.hash)


def _config(args: argparse.Namespace) -> AppConfig:
    overrides: dict[str, object] = {"edge.num_replicas": args.replicas, "name": "lock"}
    if args.config is None:
        overrides |= {"workers.unified": 1, "workers.prefill": 0, "workers.decode": 0}
        overrides |= {"scheduler.max_num_seqs": args.rows + 2, "cache.num_blocks": 40 * args.rows}
    overrides |= {"model.path": str(args.model)}
    return load_config(args.config, overrides | parse_settings(args.set))


# ---- the load ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What a process of clients keeps going."""

    url: str
    model: str
    num_streams: int
    num_prompt_tokens: int
    num_tokens: int
    seed: int


def requests_of(client: StreamClient, streams: Streams) -> Iterator[bytes]:
    """Yields requests of new prompts."""
    rng = random.Random(streams.seed)
    while True:
        ids = [rng.randrange(300, 1500) for _ in range(streams.num_prompt_tokens)]
        fields = {"model": streams.model, "prompt": ids, "max_tokens": streams.num_tokens}
        fields |= {"temperature": 0, "ignore_eos": True, "stream": True}
        yield client.request("/v1/completions", msgspec.json.encode(fields))


def _keep_streams(streams: Streams, is_over: Event) -> None:
    """Runs streams that begin anew as soon as they end, in a process of its own."""

    async def keep() -> None:
        client = StreamClient(Server(url=streams.url))
        requests = requests_of(client, streams)

        async def one() -> None:
            while True:
                await client.post(next(requests))

        tasks = [asyncio.create_task(one()) for _ in range(streams.num_streams)]
        while not is_over.is_set():
            await asyncio.sleep(LOOK_EVERY_S)
            for task in tasks:
                if task.done():
                    task.result()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(keep())


@contextmanager
def _loaded(application: Application, args: argparse.Namespace) -> Iterator[None]:
    """Streams of several processes, until the block is left."""
    spawn = multiprocessing.get_context("spawn")
    is_over = spawn.Event()
    shares = [len(range(i, args.rows, args.clients)) for i in range(args.clients)]
    processes = []
    for index, share in enumerate(shares):
        streams = Streams(
            url=application.url,
            model=application.model,
            num_streams=share,
            num_prompt_tokens=16,
            num_tokens=args.tokens,
            seed=args.seed + index,
        )
        processes.append(spawn.Process(target=_keep_streams, args=(streams, is_over)))
        processes[-1].start()
    try:
        yield
    finally:
        is_over.set()
        for process in processes:
            process.join(PATIENCE_S)
    assert not any(process.exitcode for process in processes), "a client failed; it said why"


class _Prompts:
    """One prompt after the other, some a second, and how long each waited for its first token."""

    def __init__(self, application: Application, args: argparse.Namespace) -> None:
        self._streams = Streams(
            url=application.url,
            model=application.model,
            num_streams=1,
            num_prompt_tokens=args.prompt_tokens,
            num_tokens=1,
            seed=-args.seed,
        )
        self.first_s: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()), daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    async def _ask(self) -> None:
        client = StreamClient(Server(url=self._streams.url))
        for request in requests_of(client, self._streams):
            began_s = time.perf_counter()
            pieces = await client.post(request)
            self.first_s.append(pieces[0][0] - began_s)
            if self._is_over.wait(1 / PROMPTS_A_S):
                return


# ---- what is measured ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A worker in one situation."""

    name: str
    phases: Mapping[str, Any]  # of its last steps
    seen: Seen
    first_ms: float | None = None  # of a prompt over HTTP, p50

    @property
    def step_s(self) -> float:
        return sum(float(self.phases[name]["mean_s"]) for name in PHASES)

    @property
    def off_s(self) -> float:
        """Of the host's phases of a step, not on a processor."""
        host = [self.phases[name] for name in HOST_PHASES]
        return sum(float(phase["mean_s"] - phase["mean_cpu_s"]) for phase in host)

    def waits_s(self, quiet: "Look") -> float:
        """More than without an event loop: in the host's phases, and after the device's."""
        off_s, late_s = self.off_s - quiet.off_s, self.seen.late_s - quiet.seen.late_s
        return max(0.0, off_s) + max(0.0, late_s)


def look(application: Application, name: str, seconds: float) -> list[Look]:
    """Looks at every worker for so long."""
    application.call_in_workers(start_probe)
    time.sleep(seconds)
    seen = application.call_in_workers(end_probe)
    found = application.statistics()
    return [Look(name=name, phases=found[w]["step_times"], seen=seen[w]) for w in sorted(seen)]


def set_switch_intervals(application: Application, seconds: float) -> None:
    """In the workers and in the ingress replicas."""
    apply = partial(set_switch_interval, seconds=seconds)
    application.call_in_workers(apply)
    replicas: list[Any] = [ray.get_actor(name, "serve") for name in application.replicas()]
    ray.get([replica.__ray_call__.remote(apply) for replica in replicas], timeout=PATIENCE_S)


def measure(application: Application, args: argparse.Namespace) -> list[list[Look]]:
    """Returns the looks at each worker: without an event loop, then under load."""
    application.wait_ready()
    call: Callable[..., Any] = application.call_in_workers
    call(partial(fill, num_rows=args.rows, num_prompt_tokens=16, num_tokens=args.tokens))
    time.sleep(args.warm_s)
    looks = [look(application, "tokens go nowhere", args.seconds)]
    call(empty)
    with _loaded(application, args):
        time.sleep(args.warm_s)
        for switch_ms in args.switch_ms:
            set_switch_intervals(application, switch_ms / 1e3)
            time.sleep(REST_S)
            prompts = _Prompts(application, args)
            found = look(application, f"over HTTP, switch {switch_ms:g} ms", args.seconds)
            prompts.end()
            first_ms = 1e3 * statistics.median(prompts.first_s)
            looks.append([replace(one, first_ms=first_ms) for one in found])
    return [list(of_worker) for of_worker in zip(*looks, strict=True)]


def rows_of(looks: Sequence[Look]) -> list[tuple[str, ...]]:
    """Microseconds a step, and the share of it that the thread waited, a row for each look."""
    rows: list[tuple[str, ...]] = [
        ("us a step", "rows", "step", *PHASES, "off", "late, p99", "waits", "first token, ms")
    ]
    quiet, *_ = looks
    for one in looks:
        share = one.waits_s(quiet) / one.step_s if one.step_s else 0.0
        rows.append(
            (
                one.name,
                f"{one.seen.rows:.0f}",
                f"{1e6 * one.step_s:.0f}",
                *(f"{1e6 * one.phases[name]['mean_s']:.0f}" for name in PHASES),
                f"{1e6 * one.off_s:.0f}",
                f"{1e6 * one.seen.late_s:.0f}, {1e6 * one.seen.late_p99_s:.0f}",
                f"{100 * share:.1f} %",
                "" if one.first_ms is None else f"{one.first_ms:.1f}",
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="None = one unified worker on a CPU")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rows", type=int, default=64, help="streams at once")
    parser.add_argument("--replicas", type=int, default=8, help="of the ingress")
    parser.add_argument("--clients", type=int, default=4, help="processes that read the streams")
    parser.add_argument("--tokens", type=int, default=512, help="of a stream")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--switch-ms", type=float, nargs="+", default=[5.0], metavar="MS")
    parser.add_argument("--warm-s", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each look")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    application = deploy(_config(args))
    try:
        for looks in measure(application, args):
            print(render_rows(rows_of(looks)))
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    print(*(f"{name}: {value}" for name, value in describe_machine().items()), sep="\n")


if __name__ == "__main__":
    main()

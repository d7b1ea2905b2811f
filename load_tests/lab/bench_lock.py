"""How long the engine's thread waits for the interpreter's lock, in a worker that serves over HTTP.

    python -m load_tests.lab.bench_lock --rows 64 --replicas 8                       # shipped model
    python -m load_tests.lab.bench_lock --config configs/gpu.yaml --model FOLDER --rows 256

Starts the application on a Ray cluster of its own with `--replicas` ingress replicas, keeps
`--rows` streams going and sends a prompt of `--prompt-tokens` now and then. In each worker it reads
how much of the host's phases of a step the thread was not on a processor, and how late a thread
that wants the lock gets it, beside the same at rest. Their sum as a share of a step is what a
process of the engine's own could win. It is an upper bound: a launch may wait for the driver, and
on a CPU it is the step itself, which other processes push off the processors.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve

from actors.lifecycle.deployment import describe_deployment
from configs.load import load_config
from configs.schema import AppConfig
from load_tests.lab.lock_probe import Lateness, end_probe, start_probe
from load_tests.tables import describe_machine, render_rows
from load_tests.testbed.deployed import MODEL, Application, free_port
from load_tests.testbed.ingress_client import Client
from serve_app import bind

HOST = "127.0.0.1"
WARM_S = 3.0
REST_S = 2.0
PROMPTS_A_S = 4.0
HOST_PHASES = ("plan", "launch", "commit")
Measured = tuple[Mapping[str, Any], Lateness, Lateness]  # a step's phases; loaded, at rest


def _config(args: argparse.Namespace) -> AppConfig:
    overrides: dict[str, object] = {"edge.num_replicas": args.replicas, "name": "lock"}
    if args.config is None:
        overrides |= {"workers.unified": 1, "workers.prefill": 0, "workers.decode": 0}
        overrides |= {"scheduler.max_num_seqs": args.rows + 2, "cache.num_blocks": 40 * args.rows}
    return load_config(args.config, overrides | {"model.path": str(args.model)})


def _deploy(config: AppConfig) -> Application:
    port = free_port()
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": HOST, "port": port})
    spec = describe_deployment(config)
    serve.run(bind(spec), name="lock", route_prefix="/", blocking=False)
    return Application(config=config, url=f"http://{HOST}:{port}", hash=spec.hash)


class _Load:
    """Streams that begin anew as soon as they end, and prompts beside them."""

    def __init__(self, application: Application, args: argparse.Namespace) -> None:
        self._port = int(application.url.rpartition(":")[2])
        self._model = application.model
        self._args = args
        self._rng = random.Random(args.seed)
        self.num_tokens = 0

    async def run(self, until_s: float) -> None:
        streams = [self._stream(until_s) for _ in range(self._args.rows)]
        await asyncio.gather(*streams, self._prompts(until_s))

    async def _stream(self, until_s: float) -> None:
        client = Client(HOST, self._port)
        while time.perf_counter() < until_s:
            reply = await client.complete(self._body(16, self._args.tokens))
            assert reply.is_complete, reply
            self.num_tokens += self._args.tokens
        client.close()

    async def _prompts(self, until_s: float) -> None:
        client = Client(HOST, self._port)
        while time.perf_counter() < until_s:
            await client.complete(self._body(self._args.prompt_tokens, 1))
            await asyncio.sleep(1 / PROMPTS_A_S)
        client.close()

    def _body(self, num_prompt_tokens: int, num_tokens: int) -> dict[str, object]:
        ids = [self._rng.randrange(300, 1500) for _ in range(num_prompt_tokens)]
        fields = {"model": self._model, "prompt": ids, "max_tokens": num_tokens}
        return fields | {"temperature": 0, "ignore_eos": True, "stream": True}


def measure(application: Application, args: argparse.Namespace) -> dict[str, Measured]:
    """Returns, by worker, what its thread waited under load and at rest."""
    call = application.call_in_workers
    call(start_probe)
    time.sleep(REST_S)
    at_rest = call(end_probe)

    async def look() -> tuple[dict[str, Lateness], dict[str, dict[str, Any]]]:
        load = _Load(application, args)
        task = asyncio.create_task(load.run(time.perf_counter() + WARM_S + args.seconds))
        await asyncio.sleep(WARM_S)
        await asyncio.to_thread(call, start_probe)
        await asyncio.sleep(args.seconds - 1)
        loaded = await asyncio.to_thread(call, end_probe)
        seen = await asyncio.to_thread(application.statistics)
        await task
        print(f"{load.num_tokens / (WARM_S + args.seconds):,.0f} tokens/s")
        return loaded, seen

    loaded, seen = asyncio.run(look())
    return {name: (seen[name]["step_times"], loaded[name], at_rest[name]) for name in seen}


def rows_of(measured: Mapping[str, Measured]) -> list[tuple[str, ...]]:
    """Microseconds a step, and the share of it that the thread waited, a row for each worker."""
    names = ("plan", "launch", "wait", "commit")
    rows: list[tuple[str, ...]] = [
        ("us a step", *names, "host, not on a processor", "late for the lock, at rest", "share")
    ]
    for worker, (phases, loaded, at_rest) in measured.items():
        step_s = sum(phases[name]["mean_s"] for name in names)
        off_s = sum(phases[p]["mean_s"] - phases[p]["mean_cpu_s"] for p in HOST_PHASES)
        late_s = max(0.0, loaded.mean_s - at_rest.mean_s)
        share = (off_s + late_s) / step_s if step_s else 0.0
        rows.append(
            (
                worker,
                *(f"{1e6 * phases[name]['mean_s']:.0f}" for name in names),
                f"{1e6 * off_s:.0f}",
                f"{1e6 * loaded.mean_s:.0f}, {1e6 * at_rest.mean_s:.0f}",
                f"{100 * share:.1f} %",
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="None = one unified worker on a CPU")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rows", type=int, default=64, help="streams at once")
    parser.add_argument("--replicas", type=int, default=8, help="of the ingress")
    parser.add_argument("--tokens", type=int, default=256, help="of a stream")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    application = _deploy(_config(args))
    try:
        print(render_rows(rows_of(measure(application, args))))
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    print(*(f"{name}: {value}" for name, value in describe_machine().items()), sep="\n")


if __name__ == "__main__":
    main()

"""Where each tenth of a millisecond of a first token over HTTP goes, for one client alone.

    python -m load_tests.lab.bench_first_token                                     # shipped model
    python -m load_tests.lab.bench_first_token --config configs/gpu.yaml --model FOLDER \\
        --set model.weights=random --switch-ms 5 0.5

Starts the application on a Ray cluster of its own and wraps, inside the processes of the worker
and of the ingress replica, the functions that a request passes; nothing of it is in the product.
Their clocks are one, because they run on one machine. Printed are medians: when a request came
where, from the first byte that the client writes, and what that is after the place before.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import ray
from ray import serve

from configs.load import load_config
from load_tests.http_load.client import Server
from load_tests.lab.bench_lock import Streams, deploy, requests_of, set_switch_intervals
from load_tests.lab.first_token_marks import Mark, take_marks, wrap_ingress, wrap_worker
from load_tests.lab.model_folder import parse_settings
from load_tests.tables import describe_machine, render_rows
from load_tests.testbed.deployed import MODEL, PATIENCE_S, Application
from load_tests.testbed.stream_client import StreamClient

PAUSE_S = 0.02  # between two requests: everybody is asleep again
WARM_ROUNDS = 10
SENT, READ = "client: writes", "client: has the first event"


def _in_all(
    application: Application, of_worker: Callable[..., Any], of_ingress: Callable[..., Any]
) -> list[Any]:
    """Calls a function in every worker, and one in every replica of the ingress."""
    found = list(application.call_in_workers(of_worker).values())
    replicas: list[Any] = [ray.get_actor(name, "serve") for name in application.replicas()]
    calls = [replica.__ray_call__.remote(of_ingress) for replica in replicas]
    return found + ray.get(calls, timeout=PATIENCE_S)


async def _ask(application: Application, args: argparse.Namespace, seed: int) -> list[list[Mark]]:
    """Returns what the client saw of each request."""
    client = StreamClient(Server(url=application.url))
    streams = Streams(
        url=application.url,
        model=application.model,
        num_streams=1,
        num_prompt_tokens=args.prompt_tokens,
        num_tokens=4,
        seed=seed,
    )
    seen = []
    for request in islice(requests_of(client, streams), args.rounds + WARM_ROUNDS):
        await asyncio.sleep(PAUSE_S)
        sent_s = time.perf_counter()
        pieces = await client.post(request)
        seen.append([(SENT, sent_s), (READ, pieces[0][0])])
    return seen[WARM_ROUNDS:]


def passes(client: Sequence[Sequence[Mark]], marks: Sequence[Mark]) -> list[tuple[str, float, int]]:
    """Each place, in order: median of the seconds since the request was sent, and how many came."""
    seconds: dict[str, list[float]] = {}
    for (_, sent_s), (_, read_s) in client:
        within = [(at_s, name) for name, at_s in marks if sent_s <= at_s <= read_s]
        first: dict[str, float] = {SENT: sent_s, READ: read_s}
        for at_s, name in sorted(within):
            first.setdefault(name, at_s)
        for name, at_s in first.items():
            seconds.setdefault(name, []).append(at_s - sent_s)
    found = [(name, statistics.median(ours), len(ours)) for name, ours in seconds.items()]
    return sorted(found, key=lambda one: one[1])


def rows_of(columns: Mapping[str, Sequence[tuple[str, float, int]]]) -> list[tuple[str, ...]]:
    """A row for each place, and of each column the milliseconds since the start and the last."""
    first, *_ = columns.values()
    names = [name for name, _, _ in first]
    rows: list[tuple[str, ...]] = [("ms", *(f"{column}: at, after" for column in columns))]
    cells: dict[str, list[str]] = {name: [] for name in names}
    for found in columns.values():
        at = {name: at_s for name, at_s, _ in found}
        last_s = 0.0
        for name in names:
            at_s = at.get(name)
            cells[name].append(
                "" if at_s is None else f"{1e3 * at_s:.2f} +{1e3 * (at_s - last_s):.2f}"
            )
            last_s = last_s if at_s is None else at_s
    return rows + [(name, *cells[name]) for name in names]


def measure(application: Application, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the places of a request by switch interval, which take turns."""
    application.wait_ready()
    _in_all(application, wrap_worker, wrap_ingress)
    client: dict[float, list[list[Mark]]] = {}
    for turn in range(args.turns):
        for number, switch_ms in enumerate(args.switch_ms):
            set_switch_intervals(application, switch_ms / 1e3)
            seed = args.seed + 1000 * turn + number
            client.setdefault(switch_ms, []).extend(asyncio.run(_ask(application, args, seed)))
    marks = [mark for marks in _in_all(application, take_marks, take_marks) for mark in marks]
    return {f"switch {ms:g} ms": passes(seen, marks) for ms, seen in client.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="None = one unified worker on a CPU")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=60, help="requests, of each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--switch-ms", type=float, nargs="+", default=[5.0], metavar="MS")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    overrides: dict[str, object] = {"name": "first-token", "model.path": str(args.model)}
    if args.config is None:
        overrides |= {"workers.unified": 1, "workers.prefill": 0, "workers.decode": 0}
    application = deploy(load_config(args.config, overrides | parse_settings(args.set)))
    try:
        print(render_rows(rows_of(measure(application, args))))
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    print(*(f"{name}: {value}" for name, value in describe_machine().items()), sep="\n")


if __name__ == "__main__":
    main()

"""What one ingress replica costs with a null engine, beside plain FastAPI and uvicorn.

    python -m load_tests.lab.bench_ingress                       # plain, Python proxy, HAProxy
    python -m load_tests.lab.bench_ingress --kinds python-proxy --profile
    python -m load_tests.lab.bench_ingress --kinds haproxy --replicas 2 --server-cores 0-3

The client runs in this process, on the same machine: the CPU seconds of every process say what
was the server's.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from load_tests.lab.ingress_profile import Profile, profiled
from load_tests.lab.ingress_server import KINDS, Kind, Server, serving
from load_tests.tables import describe_machine, render_rows
from load_tests.testbed.ingress_client import Client, Reply

PROMPT = "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
WARM_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One server under `num_streams` streams for `wall_s`."""

    kind: Kind
    wall_s: float
    replies: list[Reply]
    server_cpu_s: dict[str, float]
    client_cpu_s: float

    def per_request_ms(self, role: str) -> float:
        return 1e3 * self.server_cpu_s.get(role, 0.0) / len(self.replies)


async def _stream_for(client: Client, until_s: float, num_tokens: int, into: list[Reply]) -> None:
    body: dict[str, object] = {
        "model": "laps-demo",
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    while time.perf_counter() < until_s:
        into.append(await client.complete(body))


async def load_for(
    server: Server, seconds: float, *, num_streams: int, num_tokens: int
) -> list[Reply]:
    """The answers to streams that each begin anew as soon as they end."""
    clients = [Client(server.host, server.port) for _ in range(num_streams)]
    replies: list[Reply] = []
    until_s = time.perf_counter() + seconds
    try:
        await asyncio.gather(*(_stream_for(c, until_s, num_tokens, replies) for c in clients))
    finally:
        for client in clients:
            client.close()
    bad = [reply for reply in replies if not reply.is_complete]
    assert not bad, f"{len(bad)} of {len(replies)} answers are not complete, as {bad[0]}"
    return replies


async def measure(kind: Kind, server: Server, args: argparse.Namespace) -> Measurement:
    """Warm up, then one timed window."""
    await load_for(server, WARM_S, num_streams=args.streams, num_tokens=args.tokens)
    before, client_before_s, started_s = server.cpu_s(), time.process_time(), time.perf_counter()
    replies = await load_for(server, args.seconds, num_streams=args.streams, num_tokens=args.tokens)
    wall_s, client_cpu_s = time.perf_counter() - started_s, time.process_time() - client_before_s
    after = server.cpu_s()
    used = {role: after[role] - before.get(role, 0.0) for role in after}
    return Measurement(
        kind=kind,
        wall_s=wall_s,
        replies=replies,
        server_cpu_s=used,
        client_cpu_s=client_cpu_s,
    )


def rows_of(measured: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """Throughput and latency, then CPU by process, a column for each server."""
    rows: list[tuple[str, ...]] = [("", *(m.kind for m in measured))]
    rows.append(("requests/s", *(f"{len(m.replies) / m.wall_s:.1f}" for m in measured)))
    events = [sum(reply.num_events for reply in m.replies) / m.wall_s for m in measured]
    rows.append(("tokens/s", *(f"{rate:,.0f}" for rate in events)))
    firsts = [[1e3 * (r.first_event_s or 0.0) for r in m.replies] for m in measured]
    rows.append(("first token p50, ms", *(f"{statistics.median(f):.0f}" for f in firsts)))
    sizes = [statistics.median(len(r.body) for r in m.replies) for m in measured]
    rows.append(("bytes of an answer", *(f"{size:,.0f}" for size in sizes)))
    totals = [1e3 * sum(m.server_cpu_s.values()) / len(m.replies) for m in measured]
    rows.append(("CPU a request, ms", *(f"{total:.2f}" for total in totals)))
    for role in sorted({role for m in measured for role in m.server_cpu_s}):
        shares = [m.per_request_ms(role) for m in measured]
        if max(shares) >= 0.005:
            rows.append((f"- {role}", *(f"{share:.2f}" for share in shares)))
    cores = [sum(m.server_cpu_s.values()) / m.wall_s for m in measured]
    rows.append(("cores that the server used", *(f"{c:.2f}" for c in cores)))
    rows.append(("the client", *(f"{m.client_cpu_s / m.wall_s:.2f}" for m in measured)))
    return rows


def profile_rows(profile: Profile) -> list[tuple[str, ...]]:
    """Where the ingress's time goes, the largest first."""
    rows: list[tuple[str, ...]] = [("work of the ingress process", "share")]
    ordered = sorted(profile.shares.items(), key=lambda item: -item[1])
    return rows + [(group, f"{100 * share:.1f} %") for group, share in ordered]


def measure_kind(kind: Kind, args: argparse.Namespace) -> Measurement:
    """Start it, measure it, and print its profile if that was asked for."""
    replicas = [f"edge.num_replicas={args.replicas}"]
    with serving(kind, step_ms=args.step_ms, overrides=replicas, cores=args.server_cores) as server:
        measured = asyncio.run(measure(kind, server, args))
        if args.profile and kind != "plain":
            ingress = server.find("ingress")
            with profiled(ingress.pid, args.seconds) as profile:
                asyncio.run(
                    load_for(
                        server, args.seconds + 2, num_streams=args.streams, num_tokens=args.tokens
                    )
                )
            print(f"\n{kind}\n{render_rows(profile_rows(profile))}", flush=True)
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--step-ms", type=float, default=2.0, help="between two tokens, at least")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the timed window")
    parser.add_argument("--replicas", type=int, default=1, help="ingress replicas")
    parser.add_argument("--server-cores", metavar="LIST", help="of the server, as for taskset")
    parser.add_argument("--profile", action="store_true", help="sample the ingress with py-spy")
    args = parser.parse_args()
    measured = [measure_kind(kind, args) for kind in args.kinds]
    print(render_rows(rows_of(measured)))
    print(*(f"{name}: {value}" for name, value in describe_machine().items()), sep="\n")


if __name__ == "__main__":
    main()

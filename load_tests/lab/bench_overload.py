"""What idle connections and a burst ten times too large do to the first tokens of those served.

    python -m load_tests.lab.bench_overload --kind haproxy

The demo model's engine answers. A budget of queued tokens that `--fitting` prompts fill is asked
ten times over at once; then as many requests as were let in, or as the budget takes at once, come
alone, and their first tokens are compared. Beside it, requests one after another, with and without
`--idle` connections that ask for nothing, as many as this machine lets HAProxy have.
"""

import argparse
import asyncio
import json
import random
import resource
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from load_tests.lab.ingress_server import KINDS, Kind, Server, serving
from load_tests.tables import describe_machine, render_rows
from load_tests.testbed.ingress_client import Client, Reply
from load_tests.testbed.ingress_idle import IdleConnections, idle_connections

NUM_SEQUENTIAL = 40
OVERLOAD = 10
PROXIES: dict[Kind, str] = {"python-proxy": "Serve's Python proxy", "haproxy": "HAProxy"}
MAX_CONNECTIONS = 12_000
FILES_A_CONNECTION = 2.5  # as HAProxy counts them
SPARE_FILES = 1000


def most_connections() -> int:
    """What HAProxy may be told to take here: it does not start without files for all of them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, int((hard - SPARE_FILES) / FILES_A_CONNECTION))


def draw_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(300, 3000) for _ in range(num_tokens)]


def body_of(prompt: list[int], num_tokens: int) -> dict[str, object]:
    return {
        "model": "laps-demo",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def ask_together(server: Server, bodies: list[dict[str, object]]) -> list[Reply]:
    """All at once, each over a connection of its own."""
    clients = [Client(server.host, server.port) for _ in bodies]
    try:
        calls = (client.complete(body) for client, body in zip(clients, bodies, strict=True))
        return await asyncio.gather(*calls)
    finally:
        for client in clients:
            client.close()


async def ask_in_turn(server: Server, bodies: list[dict[str, object]]) -> list[Reply]:
    """One after another, each over a connection of its own."""
    return [(await ask_together(server, [body]))[0] for body in bodies]


def first_token_ms(replies: list[Reply]) -> float:
    """The median over those that were answered."""
    assert all(reply.is_complete for reply in replies if reply.status == 200), "a stream broke off"
    firsts = [reply.first_event_s for reply in replies if reply.first_event_s is not None]
    return 1e3 * statistics.median(firsts)


def check_refusals(replies: list[Reply]) -> None:
    """Raises AssertionError for an answer that is neither whole nor a polite refusal."""
    for reply in replies:
        if reply.status != 200:
            assert reply.status in (429, 503), f"{reply.status}: {reply.body[:200]!r}"
            assert int(reply.headers["retry-after"]) >= 1, f"{reply.headers}"
            assert json.loads(reply.body)["error"], f"{reply.body[:200]!r}"


def measure_burst(server: Server, args: argparse.Namespace) -> list[tuple[str, ...]]:
    """Ten times the budget, and then as many as were let in, several times."""
    rng = random.Random(args.seed)

    def draw(num: int) -> list[dict[str, object]]:
        prompts = [draw_prompt(rng, args.prompt_tokens) for _ in range(num)]
        return [body_of(prompt, args.tokens) for prompt in prompts]

    rows: list[tuple[str, ...]] = [
        ("let in", "refused", "first token p50, ms", "let in alone", "alone", "ratio")
    ]
    for _ in range(args.rounds):
        replies = asyncio.run(ask_together(server, draw(OVERLOAD * args.fitting)))
        check_refusals(replies)
        counts = Counter(reply.status for reply in replies)
        num_served = counts.pop(200)
        alone = asyncio.run(ask_together(server, draw(min(num_served, args.fitting))))
        check_refusals(alone)  # some: what workers reported last may be the burst's end
        burst_ms, alone_ms = first_token_ms(replies), first_token_ms(alone)
        said = ", ".join(f"{num} x {status}" for status, num in counts.items())
        figures = (f"{burst_ms:.0f}", f"{alone_ms:.0f}", f"{burst_ms / alone_ms:.2f}")
        num_alone = sum(reply.status == 200 for reply in alone)
        rows.append((str(num_served), said, figures[0], str(num_alone), *figures[1:]))
    return rows


@contextmanager
def _idle(server: Server, num_idle: int) -> Iterator[None]:
    half = num_idle // 2
    wanted = IdleConnections(num_silent=half, num_half=num_idle - half, num_kept=0)
    with idle_connections(server.host, server.port, wanted):
        yield


def measure_idle(server: Server, kind: Kind, num_idle: int) -> list[tuple[str, ...]]:
    """Requests in turn without, with and again without the idle connections."""
    rng = random.Random()
    proxy, ingress = server.find(PROXIES[kind]), server.find("ingress")
    rows: list[tuple[str, ...]] = [
        ("idle connections", "first token p50, ms", "proxy, MiB", "ingress, MiB", "proxy's files")
    ]
    for num in (0, num_idle, 0):
        with _idle(server, num):
            bodies = [body_of(draw_prompt(rng, 32), 4) for _ in range(NUM_SEQUENTIAL)]
            replies = asyncio.run(ask_in_turn(server, bodies))
            assert all(reply.is_complete for reply in replies), "nobody is refused"
            sizes = [process.memory_info().rss / 2**20 for process in (proxy, ingress)]
            files = str(proxy.num_fds())
        rows.append(
            (str(num), f"{first_token_ms(replies):.0f}", *(f"{s:.1f}" for s in sizes), files)
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = [kind for kind in KINDS if kind in PROXIES]
    parser.add_argument("--kind", choices=kinds, default="python-proxy")
    parser.add_argument("--idle", type=int, default=10_000, help="connections")
    parser.add_argument("--fitting", type=int, default=16, help="prompts that the budget takes")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    args = parser.parse_args()
    budget = f"edge.max_queued_tokens={args.fitting * args.prompt_tokens}"
    overrides = [budget, "scheduler.max_num_seqs=16"]
    most = most_connections()
    environment = {"RAY_SERVE_HAPROXY_MAXCONN": str(most)}
    num_idle = min(args.idle, most - args.fitting) if args.kind == "haproxy" else args.idle
    with serving(args.kind, step_ms=0, overrides=overrides, environment=environment) as server:
        asyncio.run(ask_in_turn(server, [body_of([400] * 32, 4)] * 5))  # warm
        print(render_rows(measure_burst(server, args)), flush=True)
        print(render_rows(measure_idle(server, args.kind, num_idle)))
    print(*(f"{name}: {value}" for name, value in describe_machine().items()), sep="\n")


if __name__ == "__main__":
    main()

"""Idle connections, and ten times more requests than may wait: nobody else notices."""

import asyncio
import json
import random
from collections.abc import Iterator
from urllib.parse import urlsplit

import psutil
import pytest

from load_tests.testbed.deployed import Application, Cluster, actor_pid, named_actors, wait_until
from load_tests.testbed.ingress_client import Client, Reply
from load_tests.testbed.ingress_idle import SPARE_FILES, IdleConnections, idle_connections

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SOME = IdleConnections(num_silent=250, num_half=150, num_kept=100)
TEN_THOUSAND = IdleConnections(num_silent=5000, num_half=3000, num_kept=2000)
# Of the proxy's memory; buffers as large as requests may be would be far more.
MAX_IDLE_BYTES = 40 * 1024
NUM_TOKENS = 11
PROMPT_TOKENS = 67
NUM_FITTING = 9
BURST = 10 * NUM_FITTING


def draw_prompts(rng: random.Random, num_prompts: int, num_tokens: int) -> list[list[int]]:
    return [[rng.randrange(300, 1500) for _ in range(num_tokens)] for _ in range(num_prompts)]


def ask_all(application: Application, prompts: list[list[int]]) -> list[Reply]:
    """Stream answers to all prompts, each over a connection of its own, at once."""
    url = urlsplit(application.url)
    assert url.hostname is not None, application.url
    clients = [Client(url.hostname, url.port or 80, url.path) for _ in prompts]
    body = {
        "model": application.model,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }

    async def ask() -> list[Reply]:
        calls = (c.complete(body | {"prompt": p}) for c, p in zip(clients, prompts, strict=True))
        try:
            return await asyncio.gather(*calls)
        finally:
            for client in clients:
                client.close()

    return asyncio.run(ask())


def expected(application: Application, prompts: list[list[int]]) -> list[list[int]]:
    """What each prompt's answer is when nobody else asks."""
    extra = {"ignore_eos": True}
    return [application.complete(p, max_tokens=NUM_TOKENS, extra_body=extra) for p in prompts]


def proxy() -> psutil.Process:
    """Serve's HTTP proxy."""
    [name] = [n for n in named_actors("serve") if n.startswith("SERVE_PROXY_ACTOR")]
    return psutil.Process(actor_pid(name, "serve"))


def ports_to(port: int) -> set[int]:
    """Of this process's ends of its connections to a port."""
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in connections if c.raddr and c.raddr.port == port}


def peers_at(port: int, server: psutil.Process) -> set[int]:
    """Ports of the other ends of a process's connections that came to a port.

    Those of its other connections may have the same numbers as these.
    """
    connections = server.net_connections("tcp")
    return {c.raddr.port for c in connections if c.raddr and c.laddr.port == port}


@pytest.mark.parametrize(
    "idle", [SOME, pytest.param(TEN_THOUSAND, marks=pytest.mark.nightly)], ids=["500", "10000"]
)
def test_idle_connections_cost_little_and_stop_nobody(
    gang: Application, rng: random.Random, idle: IdleConnections
) -> None:
    prompts = draw_prompts(rng, 5, 23)
    right = expected(gang, prompts)
    server, url = proxy(), urlsplit(gang.url)
    assert url.hostname is not None, gang.url
    baseline = gang.baseline()
    # Ray raises the limit as far as the system allows; below this, connections would be refused.
    num_files, _ = server.rlimit(psutil.RLIMIT_NOFILE)
    assert num_files > idle.num_all + SPARE_FILES, f"the proxy may open {num_files} files"
    bytes_before = server.memory_info().rss
    port = url.port or 80
    with idle_connections(url.hostname, port, idle):
        ours = ports_to(port)
        assert len(ours) >= idle.num_all
        wait_until(
            lambda: ours <= peers_at(port, server),
            lambda: f"all are accepted; {len(ours - peers_at(port, server))} of {len(ours)} not",
        )
        for _ in range(3):
            assert [reply.token_ids for reply in ask_all(gang, prompts)] == right
        per_connection = (server.memory_info().rss - bytes_before) / idle.num_all
        print(f"{per_connection:.0f} bytes of the proxy for an idle connection")
        assert per_connection < MAX_IDLE_BYTES
    wait_until(
        lambda: ours.isdisjoint(peers_at(port, server)),
        lambda: f"they are closed; {len(ours & peers_at(port, server))} of {len(ours)} not",
    )
    assert [reply.token_ids for reply in ask_all(gang, prompts)] == right
    gang.wait_restored(baseline)


@pytest.fixture(scope="module")
def narrow(cluster: Cluster) -> Iterator[Application]:
    """A worker that runs two requests at once, before which few may wait."""
    limits = {
        "workers.unified": 1,
        "scheduler.max_num_seqs": 2,
        "scheduler.short_share": 0.0,  # who holds a row gives way to nobody
        "edge.max_queued_tokens": NUM_FITTING * PROMPT_TOKENS,
        "cache.enable_prefix_caching": False,
    }
    application = cluster.run("narrow", limits)
    yield application
    application.stop()


@pytest.mark.nightly
def test_in_a_burst_ten_times_too_large_everybody_gets_an_answer_or_is_sent_away(
    narrow: Application, rng: random.Random
) -> None:
    prompts = draw_prompts(rng, 7, PROMPT_TOKENS)
    right = expected(narrow, prompts)
    burst = [i % len(prompts) for i in range(BURST)]
    baseline = narrow.baseline()
    with (
        narrow.stream(prompts[0], max_tokens=400) as first,
        narrow.stream(prompts[1], max_tokens=400) as second,
    ):
        next(first)
        next(second)  # both rows are taken: whoever comes now waits
        replies = ask_all(narrow, [prompts[i] for i in burst])
    answered = [(i, r) for i, r in zip(burst, replies, strict=True) if r.status == 200]
    refused = [r for r in replies if r.status != 200]
    assert answered
    assert all(r.is_complete and r.token_ids == right[i] for i, r in answered)
    assert len(refused) >= BURST // 2  # rows come free meanwhile, and who comes then is taken
    assert {r.status for r in refused} <= {429, 503}
    assert all(int(r.headers["retry-after"]) >= 1 for r in refused)
    assert all(json.loads(r.body)["error"]["message"] for r in refused)
    narrow.wait_restored(baseline)
    [again] = ask_all(narrow, prompts[:1])
    assert again.token_ids == right[0]

"""Replicas of the ingress on several machines: limits, queue, metrics and responses are common."""

import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest

from load_tests.testbed.deployed import MODEL, metric_sum, wait_until
from load_tests.testbed.machines import network, why_not
from tests.cluster.on_machines import MachinesWithApplication

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(400),
    pytest.mark.skipif(why_not() is not None, reason=f"no machines here: {why_not()}"),
]

REPLICA_PORT = 30000  # of the first replica on a machine, past HAProxy
LIMIT = 60  # requests a minute
FLOOD_S = 6.0
HEARD_S = 0.5  # within which what one replica gave is known at the other, on a slow machine
PROMPT_TOKENS = 67
NUM_FITTING = 9
BURST = 20  # at each replica
CHANGES: dict[str, object] = {
    "workers": {"unified": 1, "prefill": 0, "decode": 0, "num_cpus": 1},
    "scheduler": {"max_num_seqs": 2, "short_share": 0.0},  # who holds a row gives way to nobody
    "edge": {
        "num_replicas": 2,
        "max_replicas_per_node": 1,
        "max_queued_tokens": NUM_FITTING * PROMPT_TOKENS,
        "max_predicted_wait_s": None,
    },
    "api": {
        "keys": {name: hashlib.sha256(name.encode()).hexdigest() for name in ("free", "limited")},
        "limits": {"limited": {"requests_per_minute": LIMIT}},
        "open_paths": ["/ready"],
    },
}


@dataclass(frozen=True)
class Replica:
    url: str

    def post(self, path: str, key: str, body: dict[str, object]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=120)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers={"Authorization": "Bearer free"}, timeout=30)

    def complete(self, key: str, prompt: list[int], max_tokens: int = 1) -> int:
        body = {"model": MODEL.name, "prompt": prompt, "max_tokens": max_tokens}
        return self.post("/v1/completions", key, body).status_code

    def metric(self, name: str) -> float:
        return metric_sum(self.get("/metrics").raise_for_status().text, name)


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Replica]]:
    """One on each of two machines."""
    with network() as machines:
        system = MachinesWithApplication(machines, names=("alpha",), changes=CHANGES)
        found = [Replica(f"http://{m.address}:{REPLICA_PORT}") for m in system.machines]
        wait_until(lambda: len(system.machines_of("ray::ServeReplica")) == 2, "two machines", 60)
        wait_until(lambda: all(r.get("/ready").status_code == 200 for r in found), "ready", 60)
        yield found


def test_a_key_gets_its_limit_once_however_many_replicas_it_asks(replicas: list[Replica]) -> None:
    """What the other gave since it was heard may be given once more, and is owed."""

    def flood(replica: Replica) -> list[tuple[float, int]]:
        seen = []
        while time.monotonic() < until_s:
            status = replica.complete("limited", [5, 6, 7])
            seen.append((time.monotonic(), status))
        return seen

    until_s = time.monotonic() + FLOOD_S
    with ThreadPoolExecutor(8) as threads:
        seen = [one for found in threads.map(flood, 4 * replicas) for one in found]
    given = sorted(at_s for at_s, status in seen if status == 200)
    assert {status for _, status in seen} == {200, 429}
    within = max(sum(at <= one <= at + HEARD_S for one in given) for at in given)
    refilled = LIMIT / 60 * FLOOD_S
    print(f"{len(given)} of {len(seen)} were given, {within} of them within {HEARD_S} s")
    assert LIMIT <= len(given) <= LIMIT + refilled + within
    # Both know what was given, and what is owed: neither gives more than what refills.
    wait_s = 2.0
    time.sleep(wait_s)
    with ThreadPoolExecutor(2) as threads:
        more = Counter(threads.map(lambda r: r.complete("limited", [5, 6, 7]), 5 * replicas))
    assert more[200] <= max(0.0, LIMIT + LIMIT / 60 * (FLOOD_S + wait_s) - len(given)) + 2


def test_what_waits_at_one_replica_is_no_room_at_the_other(replicas: list[Replica]) -> None:
    """Both rows are taken, so whoever is let in waits; each replica may let in one too many."""
    body = {"model": MODEL.name, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer free"}
    with ExitStack() as stack:
        for replica, first in zip(replicas, (5, 6), strict=True):
            url = f"{replica.url}/v1/completions"
            whole = body | {"prompt": [first, 7, 8]}
            held = stack.enter_context(
                httpx.stream("POST", url, json=whole, headers=headers, timeout=120)
            )
            next(held.iter_lines())
        threads = stack.enter_context(ThreadPoolExecutor(2 * BURST))
        prompts = [[300 + i] * PROMPT_TOKENS for i in range(2 * BURST)]
        asked = [
            threads.submit(replicas[i % 2].complete, "free", prompt)
            for i, prompt in enumerate(prompts)
        ]
        wait_until(lambda: sum(a.done() for a in asked) >= 2 * BURST - NUM_FITTING - 2, "refused")
        refused = Counter(one.result() for one in asked if one.done())
    let_in = Counter(one.result() for one in asked)[200]
    print(f"{let_in} of {2 * BURST} were let in, for {NUM_FITTING}; first {refused}")
    assert NUM_FITTING // 2 <= let_in <= NUM_FITTING + 2
    assert set(Counter(one.result() for one in asked)) == {200, 503}


def test_a_stored_response_is_found_at_the_other_replica(replicas: list[Replica]) -> None:
    here, there = replicas
    body: dict[str, object] = {"model": MODEL.name, "input": "one", "max_output_tokens": 3}
    first = here.post("/v1/responses", "free", body).raise_for_status().json()
    assert there.get(f"/v1/responses/{first['id']}").json() == first
    again = there.post("/v1/responses", "free", body | {"previous_response_id": first["id"]})
    assert again.raise_for_status().json()["previous_response_id"] == first["id"]


def test_both_replicas_show_the_metrics_of_both(replicas: list[Replica]) -> None:
    def shown() -> set[tuple[float, float]]:
        names = ("vllm:request_success_total", "vllm:generation_tokens_total")
        return {(r.metric(names[0]), r.metric(names[1])) for r in replicas}

    def settled() -> tuple[float, float]:
        """What both show, when it no longer changes: what the other counts is a second old."""
        seen: list[set[tuple[float, float]]] = []

        def look() -> bool:
            seen.append(shown())
            time.sleep(1.0)
            return len(seen) > 2 and seen[-3] == seen[-2] == seen[-1] and len(seen[-1]) == 1

        wait_until(look, "both show the same", 30)
        return min(seen[-1])

    before = settled()
    for replica in replicas:
        for _ in range(3):
            assert replica.complete("free", [5, 6, 7]) == 200
    assert settled() == (before[0] + 6, before[1] + 6)

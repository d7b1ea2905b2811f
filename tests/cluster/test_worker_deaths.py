"""Actors that die under load: no client gets a token twice, none too few, and all of it comes back.

Once a role and once a phase, on a real cluster; every other combination is in
tests/actors/test_deaths_virtual.py, and at night here.
Every expected token comes from an undisturbed request to the same application.
"""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray

from actors.lifecycle.placement_groups import worker_groups
from load_tests.testbed.deployed import (
    PATIENCE_S,
    Application,
    actor_pid,
    wait_replaced,
    wait_until,
)
from tests.cluster.streams import Load

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_STREAMS = 4
TOKENS = 60  # of a stream under load
GETS_ON = 8  # tokens
LONG = 300  # tokens of a stream that outlasts what is done to it
LONG_PROMPT = 1900  # tokens that take many steps and pieces
PROMPT = "import os\nimport "

Holdings = Mapping[str, Mapping[str, int]]


@pytest.fixture(scope="module")
def baselines() -> dict[str, Holdings]:
    """Per application, once every prefill worker has met every decode worker."""
    return {}


@pytest.fixture
def application(
    disaggregated: Application, baselines: dict[str, Holdings]
) -> Iterator[Application]:
    """All workers live; afterwards they do again, and nothing is left of what the test did."""
    if disaggregated.name not in baselines:
        wait_until(lambda: have_met(disaggregated), "all pairs have a channel")
        baselines[disaggregated.name] = disaggregated.baseline()
    yield disaggregated
    disaggregated.wait_loaded()
    disaggregated.wait_ready()
    disaggregated.wait_restored(baselines[disaggregated.name])


def have_met(application: Application) -> bool:
    """Asks short and long prompts, of both pools; whether every worker then knows every other."""
    prompts = [[number + 5] * length for number in range(4) for length in (9, LONG)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        list(threads.map(application.complete, prompts))
    seen = application.statistics().values()
    return sum(s["sender"]["num_channels"] for s in seen if "sender" in s) == 4


def short_worker(application: Application) -> str:
    """The prefill worker of the prompts of a `Load`."""
    pools = json.loads(application.get("/laps_status")[1])["pools"]
    return str(pools["short"][0])


def moved_pieces(seen: Mapping[str, Any]) -> int:
    return int(seen["receiver"]["num_pieces"])


def computed_tokens(seen: Mapping[str, Any]) -> int:
    return int(seen["scheduler"]["num_prompt_tokens_computed"])


def statistics_of(application: Application, name: str) -> Mapping[str, Any]:
    """Of one worker, whatever the others do."""
    seen: Mapping[str, Any] = ray.get(
        application.actor(name).statistics.remote(), timeout=PATIENCE_S
    )
    return seen


def running_on(application: Application) -> list[str]:
    """Decode workers that answer and have something in their batch."""
    names = []
    for name in application.workers("decode"):
        try:
            seen = statistics_of(application, name)
        except (ValueError, ray.exceptions.RayError):
            continue
        if seen["scheduler"]["num_running"]:
            names.append(name)
    return names


def wait_running(application: Application) -> str:
    """The only decode worker that runs something."""
    found: list[str] = []

    def is_found() -> bool:
        found[:] = running_on(application)
        return len(found) == 1

    wait_until(is_found, "a decode worker has it")
    return found[0]


def wait_gets_on(application: Application, name: str) -> None:
    """Until a decode worker has sampled some more tokens."""

    def num_tokens() -> int:
        return int(statistics_of(application, name)["scheduler"]["num_output_tokens"])

    goal = num_tokens() + GETS_ON
    wait_until(lambda: num_tokens() >= goal, f"{name} gets on")


def kill_process(application: Application, name: str) -> None:
    os.kill(application.pid(name), signal.SIGKILL)


def kill_actor(application: Application, name: str) -> None:
    ray.kill(application.actor(name), no_restart=False)


def pids(application: Application, *without: str) -> dict[str, int]:
    return {n: application.pid(n) for n in application.actors() if n not in without}


def named(application: Application, prefix: str) -> str:
    [name] = [n for n in application.actors() if n.startswith(prefix)]
    return name


@pytest.mark.parametrize(
    ("role", "kill"),
    [
        ("prefill", kill_actor),
        ("decode", kill_process),
        ("prefill", kill_process),
        ("decode", kill_actor),
    ],
)
@pytest.mark.nightly
def test_a_worker_that_dies_under_load_costs_no_stream_a_token(
    application: Application, role: str, kill: Callable[[Application, str], None]
) -> None:
    victim = short_worker(application) if role == "prefill" else application.workers(role)[0]
    others, victim_pid = pids(application, victim), application.pid(victim)
    num_retries = application.metric("laps_request_retries")
    with Load(application, num_streams=NUM_STREAMS, max_tokens=TOKENS) as load:
        kill(application, victim)
        load.wait_more(NUM_STREAMS)
        wait_replaced(victim, application.name, victim_pid)
        application.wait_loaded()
        load.wait_more(NUM_STREAMS)
    assert not load.problems
    assert pids(application, victim) == others, "nobody else died"
    if role == "decode":  # streams were in the middle of their tokens, some of them there
        assert application.metric("laps_request_retries") > num_retries


def test_a_prefill_and_a_decode_worker_that_die_at_once_cost_no_stream_a_token(
    application: Application,
) -> None:
    kills = {
        short_worker(application): kill_actor,
        application.workers("decode")[0]: kill_process,
    }
    before, others = {name: application.pid(name) for name in kills}, pids(application, *kills)
    num_retries = application.metric("laps_request_retries")
    with Load(application, num_streams=NUM_STREAMS, max_tokens=TOKENS) as load:
        for name, kill in kills.items():
            kill(application, name)
        load.wait_more(NUM_STREAMS)
        for name in kills:
            wait_replaced(name, application.name, before[name])
        application.wait_loaded()
        load.wait_more(NUM_STREAMS)
    assert not load.problems
    assert pids(application, *kills) == others, "nobody else died"
    # Streams were in the middle of their tokens, some of them on that decode worker.
    assert application.metric("laps_request_retries") > num_retries


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"temperature": 1.0, "seed": 7}, marks=pytest.mark.nightly),
        {"temperature": 1.0, "seed": 8, "top_p": 0.9, "frequency_penalty": 0.5},
    ],
)
def test_a_stream_goes_on_with_the_same_tokens_on_another_decode_worker(
    application: Application, sampling: dict[str, Any]
) -> None:
    undisturbed = application.complete(
        PROMPT, max_tokens=LONG, extra_body={"ignore_eos": True}, **sampling
    )
    num_retries = application.metric("laps_request_retries")
    with application.stream(PROMPT, max_tokens=LONG, **sampling) as tokens:
        seen = [next(tokens) for _ in range(3)]
        kill_process(application, wait_running(application))
        seen += tokens
    assert seen == undisturbed
    assert application.metric("laps_request_retries") == num_retries + 1


@pytest.mark.parametrize(
    ("role", "phase"),
    [
        pytest.param("prefill", "compute", marks=pytest.mark.nightly),
        pytest.param("prefill", "move", marks=pytest.mark.nightly),
        ("decode", "move"),
    ],
)
def test_a_request_waits_for_its_only_worker_that_died_in_the_middle_of_its_prompt(
    over_gloo_pairs: Application, rng: random.Random, role: str, phase: str
) -> None:
    application = over_gloo_pairs
    prompt = [rng.randrange(10, 3000) for _ in range(LONG_PROMPT)]
    [prefill], [decode] = application.workers("prefill"), application.workers("decode")
    before, num_retries = application.statistics(), application.metric("laps_request_retries")

    def is_in_phase() -> bool:
        now = application.statistics()
        if phase == "move":
            return moved_pieces(now[decode]) > moved_pieces(before[decode])
        return computed_tokens(now[prefill]) > computed_tokens(before[prefill])

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(application.complete, prompt)
        wait_until(is_in_phase, phase)
        victim = prefill if role == "prefill" else decode
        victim_pid = application.pid(victim)
        kill_process(application, victim)
        wait_replaced(victim, application.name, victim_pid)
        disturbed = answer.result(PATIENCE_S)
    assert application.metric("laps_request_retries") > num_retries
    application.wait_loaded()
    application.wait_quiet()
    assert application.complete(prompt) == disturbed


@pytest.mark.nightly
def test_a_request_whose_worker_dies_on_every_try_ends_with_an_error_and_without_done(
    application: Application,
) -> None:
    undisturbed = application.complete(PROMPT, max_tokens=LONG, extra_body={"ignore_eos": True})
    num_tries = 1 + application.config.handoff.tries
    body = {
        "model": application.model,
        "prompt": PROMPT,
        "max_tokens": LONG,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    url = f"{application.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line)
        events = [next(lines)]
        for _ in range(num_tries):
            victim = wait_running(application)
            # Who gets on between two deaths is not taken for their cause.
            wait_gets_on(application, victim)
            kill_process(application, victim)
        events += lines
    assert all(event.startswith("data: ") for event in events)
    *chunks, last = [event.removeprefix("data: ") for event in events]
    error = httpx.Response(200, text=last).json()["error"]
    assert error["type"] == "server_error"
    assert f"failed on {num_tries} tries" in error["message"]
    seen = [
        token_id
        for chunk in chunks
        for choice in httpx.Response(200, text=chunk).json()["choices"]
        for token_id in choice["token_ids"]
    ]
    assert 0 < len(seen) < LONG
    assert seen == undisturbed[: len(seen)]


def test_services_that_die_under_load_fail_no_stream(application: Application) -> None:
    victims = [named(application, prefix) for prefix in ("allocator", "tokenizer", "rendezvous")]
    others = pids(application, *victims)
    with Load(application, num_streams=NUM_STREAMS, max_tokens=TOKENS // 4) as load:
        for victim in victims:
            victim_pid = application.pid(victim)
            kill_process(application, victim)
            load.wait_more(NUM_STREAMS)
            assert not load.problems, victim
            wait_replaced(victim, application.name, victim_pid)
        load.wait_more(NUM_STREAMS)
    assert not load.problems
    assert pids(application, *victims) == others, "nobody else died"


@pytest.mark.nightly
def test_placement_goes_on_while_the_allocator_hangs(application: Application) -> None:
    expected = application.complete(PROMPT)
    allocator_pid = application.pid(named(application, "allocator"))
    os.kill(allocator_pid, signal.SIGSTOP)
    try:
        assert application.complete(PROMPT) == expected
    finally:
        os.kill(allocator_pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "is_for_good", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["gone", "killed"]
)
def test_a_supervisor_that_dies_adopts_the_workers_that_it_finds(
    application: Application, is_for_good: bool
) -> None:
    before, groups = pids(application), worker_groups(application.name)
    assert set(groups) == set(application.workers())
    supervisor = application.supervisor()
    supervisor_pid = actor_pid(supervisor, "serve")
    with Load(application, num_streams=2, max_tokens=TOKENS, gap_s=0.2) as load:
        if is_for_good:  # Serve looks after its deployment actors every 11 s at most
            ray.kill(ray.get_actor(supervisor, "serve"), no_restart=True)
        else:
            os.kill(supervisor_pid, signal.SIGKILL)
        load.wait_more(2)
        wait_replaced(supervisor, "serve", supervisor_pid)
    assert not load.problems
    application.wait_ready()
    assert pids(application) == before
    assert worker_groups(application.name) == groups


def test_ready_says_503_while_a_role_is_gone(over_gloo_pairs: Application) -> None:
    """The decode worker is stopped first, so that nothing depends on how soon it is back."""
    expected = over_gloo_pairs.complete(PROMPT)
    [decode] = over_gloo_pairs.workers("decode")
    pid = over_gloo_pairs.pid(decode)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: over_gloo_pairs.get("/ready")[0] == 503, "its silence is noticed")
        assert '"decode"' in over_gloo_pairs.get("/ready")[1]
        assert over_gloo_pairs.get("/health")[0] == 200
    finally:
        os.kill(pid, signal.SIGKILL)
    over_gloo_pairs.wait_ready()
    assert over_gloo_pairs.pid(decode) != pid
    assert over_gloo_pairs.complete(PROMPT) == expected

"""Actors that die under load: no client gets a token twice, none too few, and all of it comes back.

Once a role and once a phase, on a real cluster; every other combination is in
tests/actors/test_deaths_virtual.py, and at night here.
Every expected token comes from an undisturbed request to the same application.
"""

import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
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
from load_tests.testbed.moments import Pause, Strike, before_piece, before_step
from load_tests.testbed.system import signal_process
from load_tests.testbed.traces import is_gone
from tests.cluster.streams import Load

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_STREAMS = 4
TOKENS = 60  # of a stream under load
GETS_ON = 8  # tokens
LONG = 300  # tokens of a stream that outlasts what is done to it
LONG_PROMPT = 1900  # tokens that take 238 steps and 475 pieces
MIDDLE = 100  # the step or piece of it at which a worker dies
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
    return str(application.laps_status()["pools"]["short"][0])


def tell_loaded(application: Application, role: str, function: Callable[[Any], None]) -> None:
    """Calls a function in the workers of a role that can take requests now."""
    for name in application.workers(role):
        with suppress(ValueError, ray.exceptions.RayError):
            call = application.actor(name).__ray_call__.remote(function)
            ray.get(call, timeout=PATIENCE_S)


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
    application: Application, tmp_path: Path
) -> None:
    prefill, decode = short_worker(application), application.workers("decode")[0]
    before = {name: application.pid(name) for name in (prefill, decode)}
    others = pids(application, *before)
    num_retries = application.metric("laps_request_retries")
    with Load(application, num_streams=NUM_STREAMS, max_tokens=TOKENS) as load:
        # Nobody may lose one of them, come to the other, and lose that before it gets on: such a
        # request would be taken for the cause of both deaths. So the decode worker stops first,
        # before a step of its streams: what the client has seen may be all that it had to do.
        stop = Strike(number=GETS_ON, signal=signal.SIGSTOP, sent=tmp_path / "stopped")
        application.actor(decode).__ray_call__.remote(before_step(stop))
        wait_until(stop.sent.exists, f"{decode} stops")
        kill_actor(application, prefill)
        wait_until(lambda: is_gone(before[prefill]), f"{prefill} is gone")
        os.kill(before[decode], signal.SIGKILL)
        load.wait_more(NUM_STREAMS)
        for name, pid in before.items():
            wait_replaced(name, application.name, pid)
        application.wait_loaded()
        load.wait_more(NUM_STREAMS)
    assert not load.problems
    assert pids(application, *before) == others, "nobody else died"
    assert application.metric("laps_request_retries") > num_retries


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"temperature": 1.0, "seed": 7}, marks=pytest.mark.nightly),
        {"temperature": 1.0, "seed": 8, "top_p": 0.9, "frequency_penalty": 0.5},
    ],
)
def test_a_stream_goes_on_with_the_same_tokens_on_another_decode_worker(
    application: Application, sampling: dict[str, Any], tmp_path: Path
) -> None:
    undisturbed = application.complete(
        PROMPT, max_tokens=TOKENS, extra_body={"ignore_eos": True}, **sampling
    )
    num_retries = application.metric("laps_request_retries")
    # Whichever of them has the stream dies in the middle of it, and the other one does not.
    death = Strike(number=GETS_ON, signal=signal.SIGKILL, sent=tmp_path / "sent")
    application.call_in_workers(before_step(death), "decode")
    with application.stream(PROMPT, max_tokens=TOKENS, **sampling) as tokens:
        assert list(tokens) == undisturbed
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
    over_gloo_pairs: Application, rng: random.Random, role: str, phase: str, tmp_path: Path
) -> None:
    application = over_gloo_pairs
    prompt = [rng.randrange(10, 3000) for _ in range(LONG_PROMPT)]
    num_retries = application.metric("laps_request_retries")
    [victim] = application.workers(role)
    pid = application.pid(victim)
    death = Strike(number=MIDDLE, signal=signal.SIGKILL, sent=tmp_path / "sent", pid=pid)
    if phase == "move":
        application.call_in_workers(before_piece(death), "decode")
    else:
        application.call_in_workers(before_step(death), "prefill")
    disturbed = application.complete(prompt)
    wait_replaced(victim, application.name, pid)
    assert application.metric("laps_request_retries") > num_retries
    application.wait_loaded()
    application.wait_quiet()
    assert application.complete(prompt) == disturbed


@pytest.mark.nightly
def test_a_request_whose_worker_dies_on_every_try_ends_with_an_error_and_without_done(
    application: Application, tmp_path: Path
) -> None:
    """Each try waits in its prompt until decode workers know at which step they die."""
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
    tries = [tmp_path / str(number) for number in range(num_tries)]
    pauses = [
        Pause(number=1, begun=path.with_suffix(".begun"), over=path.with_suffix(".over"))
        for path in tries
    ]
    with ThreadPoolExecutor(1) as thread:
        application.call_in_workers(before_step(pauses[0]), "prefill")
        answer = thread.submit(httpx.post, url, json=body, timeout=PATIENCE_S)
        try:
            for path, pause, later in zip(tries, pauses, [*pauses[1:], None], strict=True):
                wait_until(pause.begun.exists, f"try {path.name} computes its prompt")
                death = Strike(number=TOKENS // 2, signal=signal.SIGKILL, sent=path)
                tell_loaded(application, "decode", before_step(death))
                if later is not None:
                    application.call_in_workers(before_step(later), "prefill")
                pause.over.touch()
        finally:
            for pause in pauses:
                pause.over.touch()
        events = [line for line in answer.result().text.splitlines() if line]
    assert answer.result().status_code == 200
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
    said: list[tuple[int, str]] = []

    def is_noticed() -> bool:
        said[:] = [over_gloo_pairs.get("/ready")]
        return said[0][0] == 503

    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(is_noticed, lambda: f"its silence is noticed; last {said}")
        assert '"decode"' in said[0][1]
        assert over_gloo_pairs.get("/health")[0] == 200
    finally:
        signal_process(pid, signal.SIGKILL)  # its supervisor may have done so
    over_gloo_pairs.wait_ready()
    assert over_gloo_pairs.pid(decode) != pid
    assert over_gloo_pairs.complete(PROMPT) == expected

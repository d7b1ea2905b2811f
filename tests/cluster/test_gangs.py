"""A worker of two ranks: it answers as one process does, and any rank's end is the end of both.

Short prompts go before long ones, and with their chunks (LAPS).

Every step is compared between the ranks (`debug`). What is expected of the shipped model comes from
an engine of one rank in this process, or from the same application undisturbed.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from actors.lifecycle.placement_groups import worker_groups
from engine.messages import WorkerStatus, decode
from engine.request import Constraint, ConstraintKind, SamplingParams
from load_tests.testbed.deployed import (
    MODEL,
    Application,
    Cluster,
    named_actors,
    wait_replaced,
    wait_until,
)
from load_tests.testbed.moments import Strike, before_step
from load_tests.testbed.traces import is_gone, left_of, rings_of
from tests.cluster.conftest import GANG
from tests.cluster.streams import PROMPTS, Load
from tests.harness.in_process import answer, start_engine

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NAME = "gang"
TOKENS = 120
FEW = 30  # tokens of a stream in whose middle a rank ends
REGEX = "(import [a-z]{3,9}\\n){9}"


def ranks(application: Application) -> list[str]:
    """Names of the worker's actors, rank 0 first."""
    [worker] = application.workers("unified")
    further = [name for name in application.actors() if name.startswith("rank-")]
    assert further == [f"rank-1.{worker}"]
    return [worker, *further]


def pids(application: Application) -> list[int]:
    return [application.pid(name) for name in ranks(application)]


def wait_ring_gone(ring: str) -> None:
    """A process that is killed may show its end a moment before it lets go of its sockets."""
    wait_until(lambda: not left_of([ring]), f"{ring} is gone")


def gang_ring(application: Application) -> str:
    [ring] = rings_of(pids(application)[:1])
    return ring


def check_replaced(application: Application, before: list[int], ring: str) -> None:
    """The gang is whole again, in its old place, and of the old one nothing is left."""
    worker, _ = ranks(application)
    assert set(pids(application)).isdisjoint(before)
    wait_until(lambda: all(map(is_gone, before)), f"processes {before} are gone")
    groups = worker_groups(NAME)
    assert set(groups) == {worker}
    wait_ring_gone(ring)
    assert gang_ring(application) != ring
    application.wait_quiet()


def test_a_gang_answers_as_an_engine_of_one_rank_does(gang: Application) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    engine = start_engine(model__path=str(MODEL))
    ids = [list(range(11, 11 + 7 * number)) for number in (1, 5, 40)]
    expected = [one.tokens for one in answer(engine, [(prompt, params) for prompt in ids])]
    with ThreadPoolExecutor(len(ids)) as together:
        extra = {"ignore_eos": True}
        found = list(together.map(lambda p: gang.complete(p, max_tokens=40, extra_body=extra), ids))
    assert found == expected
    sampled = {"temperature": 1.0, "seed": 5, "top_p": 0.9, "frequency_penalty": 0.5}
    held = Constraint(ConstraintKind.REGEX, REGEX)
    asked = SamplingParams(max_tokens=40, constraint=held, **sampled)
    [one] = answer(engine, [(ids[1], asked)])
    extra = {"structured_outputs": {"regex": REGEX}}
    assert gang.complete(ids[1], max_tokens=40, extra_body=extra, **sampled) == one.tokens
    assert len(set(pids(gang))) == 2


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        # By day tests/engine/ranks/ (test_plan_ring.py, test_leading.py) kills either.
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.nightly),
        (1, signal.SIGSTOP),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_ends_ends_the_gang_and_costs_no_stream_a_token(
    gang: Application, victim: int, number: signal.Signals, tmp_path: Path
) -> None:
    gang.wait_ready()
    prompt = PROMPTS[victim]
    undisturbed = gang.complete(prompt, max_tokens=FEW, extra_body={"ignore_eos": True})
    before, worker, ring = pids(gang), ranks(gang)[0], gang_ring(gang)
    num_retries = gang.metric("laps_request_retries")
    sent = tmp_path / "sent"
    in_the_middle = Strike(number=FEW // 2, signal=number, sent=sent, pid=before[victim])
    gang.call_in_workers(before_step(in_the_middle))
    with gang.stream(prompt, max_tokens=FEW, temperature=0.0) as tokens:
        wait_until(lambda: is_gone(before[1 - victim]), "the other rank has ended")
        took_s = time.time() - sent.stat().st_mtime
        assert list(tokens) == undisturbed
    assert gang.metric("laps_request_retries") == num_retries + 1
    if number == signal.SIGKILL:
        assert took_s < gang.config.workers.stall_s, "a death is noticed at once"
    wait_replaced(worker, NAME, before[0])
    gang.wait_ready()
    check_replaced(gang, before, ring)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_goes_with_a_killed_one(gang: Application, victim: int) -> None:
    """The one that is stopped can do nothing about the other's death."""
    gang.wait_ready()
    before, worker, ring = pids(gang), ranks(gang)[0], gang_ring(gang)
    os.kill(before[1 - victim], signal.SIGSTOP)
    os.kill(before[victim], signal.SIGKILL)
    wait_replaced(worker, NAME, before[0])
    gang.wait_ready()
    check_replaced(gang, before, ring)


@pytest.mark.nightly
def test_a_rank_that_dies_before_its_model_is_loaded_is_replaced_too(gang: Application) -> None:
    gang.wait_ready()
    expected = gang.complete(PROMPTS[0])
    (worker, rank), before, ring = ranks(gang), pids(gang), gang_ring(gang)
    os.kill(before[0], signal.SIGKILL)
    wait_replaced(rank, NAME, before[1])  # it answers as soon as it is connected
    loading = gang.pid(rank)
    os.kill(loading, signal.SIGKILL)
    wait_replaced(rank, NAME, loading)
    wait_replaced(worker, NAME, before[0])
    gang.wait_ready()
    assert gang.complete(PROMPTS[0]) == expected
    check_replaced(gang, [*before, loading], ring)


@pytest.mark.nightly
def test_ranks_that_die_again_and_again_cost_streams_nothing(gang: Application) -> None:
    gang.wait_ready()
    with Load(gang, max_tokens=TOKENS) as load:
        for victim in (1, 0, 1):
            before, worker, ring = pids(gang), ranks(gang)[0], gang_ring(gang)
            os.kill(before[victim], signal.SIGKILL)
            wait_replaced(worker, NAME, before[0])
            load.wait_more(4)
    assert not load.problems
    check_replaced(gang, before, ring)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["raise", "hang", "nan", "die"])
def test_a_rank_that_fails_by_itself_ends_the_gang(cluster: Cluster, fault: str) -> None:
    """`nan` is a rank whose tokens are not the others': it drifts."""
    faults = {"faults": f"unified-0.rank-1:step=60:{fault}"}
    application = cluster.run(f"{NAME}-{fault}", GANG | faults)
    expected = application.complete(PROMPTS[0], max_tokens=30, extra_body={"ignore_eos": True})
    [worker] = application.workers("unified")
    worker_pid = application.pid(worker)
    # Some 30 steps more: the fault comes in the middle, and not again in the new processes.
    found = application.complete(PROMPTS[0], max_tokens=45, extra_body={"ignore_eos": True})
    assert found[:30] == expected
    wait_replaced(worker, application.name, worker_pid)
    application.wait_quiet()
    application.stop()


@pytest.mark.nightly
def test_a_gang_that_cannot_start_says_why(cluster: Cluster) -> None:
    """Ranks share heads, and the shipped model does not have as many as that.

    `serve run` would have noticed before anything starts (test_preflight.py).
    """
    name, overrides = f"{NAME}-8", GANG | {"workers.tensor_parallel_size": 8}
    with pytest.raises(RuntimeError, match=f"Deploying application {name} failed"):
        cluster.run(name, overrides)
    [worker] = [actor for actor in named_actors(name) if actor.startswith("unified")]
    actor: Any = ray.get_actor(worker, name)
    status = decode(ray.get(actor.heartbeat.remote(), timeout=10.0), WorkerStatus)
    assert status.state == "failed"
    assert "workers.tensor_parallel_size: 8 ranks cannot share" in status.detail
    serve.delete(name)


@pytest.mark.nightly
def test_nothing_outlives_a_gang_whose_application_is_deleted(cluster: Cluster) -> None:
    gang = cluster.run(f"{NAME}-deleted", GANG)
    before, ring = pids(gang), gang_ring(gang)
    gang.stop()
    silence_s = gang.config.lifetimes.supervisor_silence_s
    wait_until(lambda: not named_actors(gang.name), "no actor is left", 60.0 + silence_s)
    wait_until(lambda: not worker_groups(gang.name), "no place is left")
    wait_until(lambda: all(map(is_gone, before)), "no process is left")
    wait_ring_gone(ring)

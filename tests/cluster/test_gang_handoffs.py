"""Prefill and decode workers of several ranks: KV moves between gangs, and their ends cost nothing.

Every step is compared between the ranks (`debug`). Answers are those of an engine of one rank in
this process. Each rank killed and stopped in each phase, and what is left of it: see
load_tests/lab/gang_deaths.py.
"""

import os
import signal
from collections.abc import Iterator

import pytest

from actors.lifecycle.placement_groups import worker_groups
from engine.request import SamplingParams
from load_tests.testbed.deployed import MODEL, Application, Cluster, wait_replaced, wait_until
from load_tests.testbed.traces import is_gone, left_of, rings_of
from tests.cluster.streams import Load
from tests.harness.in_process import answer, start_engine

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.nightly]

NAME = "gangs-apart"
TOKENS = 80
OVERRIDES: dict[str, object] = {
    "workers.unified": 0,
    "workers.prefill": 1,
    "workers.decode": 1,
    "workers.tensor_parallel_size": 2,
    "workers.num_cpus": 0.1,  # so that they have placement groups
    "workers.stall_s": 4.0,
    "scheduler.max_num_batched_tokens": 64,  # a prompt takes several steps, and its KV pieces
    "handoff.piece_bytes": 1,
    "lifetimes.supervisor_silence_s": 20.0,
    "debug": True,
}


@pytest.fixture(scope="module")
def gangs(cluster: Cluster) -> Iterator[Application]:
    application = cluster.run(NAME, OVERRIDES)
    yield application
    application.stop()


def check_answers(application: Application) -> None:
    engine = start_engine(model__path=str(MODEL))
    prompts = [list(range(11, 11 + 7 * number)) for number in (1, 5, 40)]
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}):
        params = SamplingParams(max_tokens=40, ignore_eos=True, **sampling)
        expected = [one.tokens for one in answer(engine, [(ids, params) for ids in prompts])]
        extra = {"ignore_eos": True}
        found = [
            application.complete(ids, max_tokens=40, extra_body=extra, **sampling)
            for ids in prompts
        ]
        assert found == expected


def handoffs(application: Application) -> tuple[int, int]:
    """Requests that were handed over, and channels or transfers that failed."""
    seen = application.statistics().values()
    [sender] = [one["sender"] for one in seen if "sender" in one]
    return sender["num_sent"], sender["num_retries"] + sum(sender["failures"].values())


@pytest.mark.parametrize("by_ranks", [False, True], ids=["by rank 0", "by ranks"])
@pytest.mark.parametrize("channel", ["gloo_pair", "object_store"])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1), (2, 4)])
def test_answers_are_those_of_one_process_whatever_the_sizes(
    cluster: Cluster, sizes: tuple[int, int], channel: str, by_ranks: bool
) -> None:
    asked = {
        "handoff.pull_by_ranks": by_ranks,
        "workers.prefill_tensor_parallel_size": sizes[0],
        "workers.decode_tensor_parallel_size": sizes[1],
        "handoff.channel": channel,
        "workers.stall_s": 20.0,
    }
    name = f"{NAME}-{sizes[0]}-{sizes[1]}-{channel.replace('_', '-')}-{by_ranks:d}"
    application = cluster.run(name, OVERRIDES | asked)
    check_answers(application)
    assert handoffs(application) == (6, 0)
    application.wait_quiet()
    application.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_rank_that_ends_costs_streams_nothing_on_either_side(
    gangs: Application, role: str, rank: int, number: signal.Signals
) -> None:
    gangs.wait_ready()
    [worker] = gangs.workers(role)
    names = [worker, f"rank-1.{worker}"]
    before = [gangs.pid(name) for name in names]
    [ring] = rings_of(before[:1])
    with Load(gangs, max_tokens=TOKENS) as load:
        os.kill(before[rank], number)
        wait_replaced(worker, NAME, before[0])
        load.wait_more(4)
    assert not load.problems
    gangs.wait_ready()
    wait_until(lambda: all(map(is_gone, before)), f"processes {before} are gone")
    assert set(worker_groups(NAME)) == set(gangs.workers())
    wait_until(lambda: not left_of([ring]), f"{ring} is gone")
    now = [gangs.pid(name) for name in gangs.workers()]
    assert len(rings_of(now) - {ring}) == 2, "each gang has one"
    gangs.wait_quiet()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_idle_rank_that_stands_still_is_noticed_without_a_request(
    gangs: Application, role: str, rank: int
) -> None:
    gangs.wait_ready()
    [worker] = gangs.workers(role)
    before = [gangs.pid(name) for name in (worker, f"rank-1.{worker}")]
    os.kill(before[rank], signal.SIGSTOP)
    wait_until(lambda: all(map(is_gone, before)), "both have ended", 3 * 4.0)
    wait_replaced(worker, NAME, before[0])
    gangs.wait_ready()
    gangs.wait_quiet()


@pytest.mark.parametrize("fault", ["raise", "hang", "nan", "die"])
@pytest.mark.parametrize(("role", "step"), [("prefill", 6), ("decode", 60)])
def test_a_rank_that_fails_by_itself_ends_its_gang(
    cluster: Cluster, role: str, step: int, fault: str
) -> None:
    """`nan` is a rank that drifts: its tokens are not the others'.

    A new process has the fault again, at a step that the same request does not reach.
    """
    faults = {"faults": f"{role}-0.rank-1:step={step}:{fault}"}
    application = cluster.run(f"{NAME}-{role}-{fault}", OVERRIDES | faults)
    [worker] = application.workers(role)
    pid = application.pid(worker)
    check_answers(application)
    wait_replaced(worker, application.name, pid)
    check_answers(application)
    application.wait_quiet()
    application.stop()

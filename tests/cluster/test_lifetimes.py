"""Who lives for whom, on a real cluster: redeploys, the death of every actor, and the end.

Workers ask for CPUs here, so their places are seen, too: these outlive crashes, and nothing else.
The tests share one application and run in the order of this file; the last one deletes it.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from ray import serve
from ray.util import list_named_actors
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.lifecycle.liveness import exit_for_good
from actors.lifecycle.placement_groups import WorkerGroup, remove_groups, worker_groups
from actors.remote_classes import WORKERS
from engine.messages import WorkerStatus, encode
from load_tests.testbed.deployed import (
    PATIENCE_S,
    START_S,
    Application,
    Cluster,
    actor_pid,
    named_actors,
    wait_until,
)
from tests.cluster.streams import Load

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NAME = "lifetimes"
NUM_CPUS = 0.1  # of a worker: two deployments at once find room
ROLES: dict[str, object] = {
    "workers.prefill": 1,
    "workers.decode": 1,
    "workers.num_cpus": NUM_CPUS,
}
# So long the services of an old deployment stay when it is replaced.
SILENCE_S = 6.0
# Streams of a replica that is replaced end by themselves, however slow the machine is.
DEPLOYED: dict[str, object] = ROLES | {
    "lifetimes.supervisor_silence_s": SILENCE_S,
    "edge.drain_s": 120.0,
}
REDEPLOYED: dict[str, object] = ROLES | {
    "lifetimes.supervisor_silence_s": SILENCE_S,
    "cache.num_blocks": 999,
}
ANSWER_S = 10.0
LONG = 200  # tokens of streams while new workers start


@ray.remote(num_cpus=0, max_restarts=-1)
class FreezesWhenDrained:
    """A worker of a deployment whose supervisor has ended: it stops as a process when it drains."""

    async def heartbeat(self) -> bytes:
        return encode(WorkerStatus(identity=None, state="ready"))

    async def drain(self, grace_s: float) -> None:
        if not ray.get_runtime_context().was_current_actor_reconstructed:
            os.kill(os.getpid(), signal.SIGSTOP)
        exit_for_good()  # as a worker that has nothing to do


class Deployed:
    """What is deployed under NAME now."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.now = cluster.run(NAME, DEPLOYED)

    def redeploy(self, overrides: dict[str, object]) -> Application:
        self.now = self._cluster.run(NAME, overrides)
        return self.now


@pytest.fixture(scope="module")
def deployed(cluster: Cluster) -> Iterator[Deployed]:
    deployed = Deployed(cluster)
    yield deployed
    deployed.now.stop()


@pytest.fixture
def application(deployed: Deployed) -> Application:
    deployed.now.wait_ready()
    return deployed.now


def pid(name: str, namespace: str = NAME) -> int:
    """Of a named actor; asking does not count as a heartbeat, as `heartbeat` would."""
    actor: Any = ray.get_actor(name, namespace)
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=ANSWER_S))


def pids(names: Iterable[str]) -> dict[str, int]:
    return {name: pid(name) for name in names}


def supervisors() -> list[str]:
    """Names of the living supervisors; Serve puts its own prefix in front."""
    entries = list_named_actors(all_namespaces=True)
    return sorted(e["name"] for e in entries if f"::{NAME}::" in e["name"])


def is_draining(name: str) -> bool:
    actor: Any = ray.get_actor(name, NAME)
    call = actor.__ray_call__.remote(lambda worker: worker._host.draining.is_begun)
    return bool(ray.get(call, timeout=ANSWER_S))


def kill_for_good(names: Iterable[str]) -> None:
    for name in names:
        ray.kill(ray.get_actor(name, NAME), no_restart=True)


@contextmanager
def standing_still(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def create_without_place(worker: str, place: WorkerGroup) -> None:
    """Ends a decode worker and its place for good; then creates one of its name there.

    As when the place is given back in the name of a deployment that has just been started again.
    """
    remove_groups([place], NAME)
    wait_until(lambda: worker not in named_actors(NAME), f"{worker} is gone")
    options: dict[str, Any] = {
        "name": worker,
        "namespace": NAME,
        "lifetime": "detached",
        "num_cpus": NUM_CPUS,
        "max_restarts": -1,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(place.handle, 0),
    }
    WORKERS["decode"].options(**options).remote(None, worker, "decode")  # nobody runs it


def lives_anew(before: dict[str, int]) -> bool:
    """Whether every one of these actors exists again, as another process, and answers."""
    try:
        now = pids(before)
    except (ValueError, ray.exceptions.RayError):
        return False
    return all(now[name] != before[name] for name in before)


def num_received(application: Application) -> int:
    """Handoffs that the decode workers have committed since they started."""
    names = application.workers("decode")
    return sum(
        s["incoming"]["num_committed"] for n, s in application.statistics().items() if n in names
    )


def places(application: Application) -> dict[str, WorkerGroup]:
    """Where each worker of this deployment runs, and nobody else."""
    found = worker_groups(NAME)
    assert set(found) == set(application.workers())
    assert all(group.node_id is not None for group in found.values())
    return found


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def test_actors_gone_for_good_and_a_killed_one_come_back_to_their_places_and_meet(
    application: Application,
) -> None:
    """But for one that was created in a place that is gone: it gets another one."""
    expected, places_before = application.complete("import os"), places(application)
    [prefill], [decode] = application.workers("prefill"), application.workers("decode")
    before = pids(application.actors())
    assert len(before) == 5, f"two workers, tokenizer, allocator and rendezvous: {before}"
    with standing_still(actor_pid(application.supervisor(), "serve")):
        create_without_place(decode, places_before.pop(decode))
    os.kill(before[prefill], signal.SIGKILL)
    kill_for_good(name for name in before if name not in (prefill, decode))
    wait_until(lambda: lives_anew(before), f"alive again: {list(before)}", START_S)
    application.wait_ready()
    assert places(application).items() >= places_before.items()
    assert application.complete("import os") == expected
    assert num_received(application) > 0
    application.wait_quiet()


def test_a_change_at_the_edge_keeps_the_workers(
    application: Application, deployed: Deployed
) -> None:
    before = pids(application.actors())
    expected = application.complete("import os")
    again = deployed.redeploy(DEPLOYED | {"edge.max_n": 3})
    assert again.hash == application.hash
    assert again.complete("import os") == expected
    assert pids(again.actors()) == before
    status, _ = again.get("/version")
    assert status == 200


def test_a_redeploy_under_load_fails_no_request_and_leaves_no_old_actor(
    application: Application, deployed: Deployed
) -> None:
    """Not even if an old worker dies while it drains: it comes back for those that need it.

    One that freezes then, and whose own supervisor has ended, is ended by the new one.
    """
    old = application.actors()
    orphan: Any = FreezesWhenDrained
    orphan.options(name="decode-0.01d", namespace=NAME, lifetime="detached").remote()
    [decode] = application.workers("decode")
    before = pids([decode])
    with (
        Load(application, num_streams=2, max_tokens=LONG, gap_s=0.5) as load,
        ThreadPoolExecutor(1) as thread,
    ):
        redeploy = thread.submit(deployed.redeploy, REDEPLOYED)
        # The new application starts first.
        wait_until(lambda: is_draining(decode), "the old decode worker drains", START_S)
        os.kill(before[decode], signal.SIGKILL)
        wait_until(lambda: lives_anew(before), "it lives again")
        again = redeploy.result()
        load.wait_more(4)
    assert not load.problems
    assert again.hash != application.hash
    wait_until(
        lambda: all(name.endswith(again.hash) for name in again.actors()),
        lambda: f"gone: {old}; there are {again.actors()}",
        PATIENCE_S + SILENCE_S,
    )
    assert len(again.actors()) == len(old)
    wait_until(lambda: set(worker_groups(NAME)) == set(again.workers()), "no old place is left")
    wait_until(lambda: len(supervisors()) == 1, lambda: f"one is left of {supervisors()}")
    blocks = {seen["blocks"] for seen in again.statistics().values()}
    assert blocks == {REDEPLOYED["cache.num_blocks"]}


def test_nothing_outlives_an_application_deleted_under_load(
    application: Application, deployed: Deployed
) -> None:
    num_before, num_places = free_cpus(), len(places(application))
    with Load(application, max_tokens=LONG) as load:
        serve.delete(NAME)
        wait_until(lambda: load.problems.total() > 0, "streams end with the application")
        wait_until(
            lambda: not named_actors(NAME),
            lambda: f"no actor is left; there are {named_actors(NAME)}",
            PATIENCE_S + SILENCE_S,
        )
        assert not supervisors()
    wait_until(lambda: not worker_groups(NAME), "no place is left")
    num_returned = num_places * NUM_CPUS
    wait_until(lambda: free_cpus() >= num_before + num_returned - 1e-6, "the CPUs are free again")

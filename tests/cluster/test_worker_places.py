"""Workers that ask for CPUs, on a real cluster: their places outlive crashes, and nothing else.

The tests share one application and run in the order of this file; the last one deletes it.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
import ray
from ray import serve

from actors.lifecycle.placement_groups import WorkerGroup, worker_groups
from tests.cluster.running import (
    Application,
    Cluster,
    actor_pid,
    named_actors,
    wait_replaced,
    wait_until,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NAME = "places"
NUM_CPUS = 0.5
# Serve looks after its deployment actors every 11 s at most; a worker has to be patient until then.
SETTINGS: dict[str, object] = {
    "workers.prefill": 1,
    "workers.decode": 1,
    "workers.num_cpus": NUM_CPUS,
    "lifetimes.supervisor_silence_s": 18.0,
}


@pytest.fixture(scope="module")
def application(cluster: Cluster) -> Iterator[Application]:
    application = cluster.run(NAME, SETTINGS)
    yield application
    application.stop()


@pytest.fixture
def groups(application: Application) -> dict[str, WorkerGroup]:
    application.wait_ready()
    return worker_groups(NAME)


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def test_every_worker_has_its_place(
    application: Application, groups: dict[str, WorkerGroup]
) -> None:
    assert set(groups) == set(application.workers())
    assert all(group.node_id is not None for group in groups.values())
    assert application.complete("import os")


def test_a_killed_worker_and_one_gone_for_good_come_back_to_their_places(
    application: Application, groups: dict[str, WorkerGroup]
) -> None:
    expected = application.complete("import os")
    [prefill], [decode] = application.workers("prefill"), application.workers("decode")
    before = {name: application.pid(name) for name in (prefill, decode)}
    os.kill(before[prefill], signal.SIGKILL)
    ray.kill(application.actor(decode), no_restart=True)
    for name, pid in before.items():
        wait_replaced(name, NAME, pid)
    application.wait_ready()
    assert worker_groups(NAME) == groups
    assert application.complete("import os") == expected


def test_a_new_supervisor_adopts_the_places(
    application: Application, groups: dict[str, WorkerGroup]
) -> None:
    before = {name: application.pid(name) for name in application.workers()}
    old = application.supervisor()
    old_pid = actor_pid(old, "serve")
    ray.kill(ray.get_actor(old, "serve"), no_restart=True)

    def is_back() -> bool:
        with suppress(ValueError, ray.exceptions.RayError):
            return actor_pid(application.supervisor(), "serve") != old_pid
        return False

    wait_until(is_back, "the supervisor is back")
    application.wait_ready()
    assert worker_groups(NAME) == groups
    assert {name: application.pid(name) for name in application.workers()} == before


def test_a_deleted_application_leaves_no_place(
    groups: dict[str, WorkerGroup],
) -> None:
    num_before = free_cpus()
    serve.delete(NAME)
    wait_until(lambda: not named_actors(NAME), "no actor is left")
    wait_until(lambda: not worker_groups(NAME), "no group is left")
    num_returned = len(groups) * NUM_CPUS
    wait_until(lambda: free_cpus() >= num_before + num_returned, "the CPUs are free again")

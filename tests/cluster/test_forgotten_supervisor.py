"""A supervisor that Serve has forgotten: nobody but itself can end it."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray import serve

from actors.supervisor import INGRESS_SILENCE_S
from load_tests.testbed.deployed import PATIENCE_S, Cluster, actor_pid, named_actors, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(900)]

NAME = "forgotten"
DEPLOYED: dict[str, object] = {"workers.unified": 1, "workers.num_cpus": 0.1, "edge.drain_s": 30.0}
REDEPLOYED = DEPLOYED | {"cache.num_blocks": 999}


def supervisors() -> list[str]:
    return [name for name in named_actors("serve") if f"::{NAME}::" in name]


def test_an_old_deployment_ends_though_serves_controller_died_during_the_redeploy(
    cluster: Cluster,
) -> None:
    """The controller takes up the new supervisor only; the old one keeps workers meanwhile."""
    cluster.run(NAME, DEPLOYED)
    [controller] = [name for name in named_actors("serve") if "CONTROLLER" in name]
    with ThreadPoolExecutor(1) as thread:
        redeploy = thread.submit(cluster.run, NAME, REDEPLOYED)
        wait_until(lambda: len(supervisors()) == 2, "the new supervisor has started")
        os.kill(actor_pid(controller, "serve"), signal.SIGKILL)
        again = redeploy.result()
    wait_until(
        lambda: all(name.endswith(again.hash) for name in again.actors()),
        "no old actor is left",
        PATIENCE_S + INGRESS_SILENCE_S,
    )
    assert len(supervisors()) == 1
    serve.delete(NAME)
    wait_until(lambda: not named_actors(NAME), "no actor is left")
    assert not supervisors()

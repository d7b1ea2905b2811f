"""One local Ray cluster for all tests of the whole application, and the applications they share."""

import os
import random

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster of our own, gone with the tests
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.running import Application, Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def disaggregated(cluster: Cluster) -> Iterator[Application]:
    """2 prefill workers and 1 decode worker, over gloo pairs."""
    application = cluster.run("disaggregated", {"workers.prefill": 2, "workers.decode": 1})
    yield application
    application.stop()


# A decode worker that two long streams fill, prompts that take many steps, and KV in many pieces.
TIGHT = {
    "workers.prefill": 1,
    "workers.decode": 1,
    "cache.block_size": 4,
    "cache.num_blocks": 1024,
    "scheduler.max_rows": 2,
    "scheduler.max_step_tokens": 8,
    "scheduler.unreserved_share": 0.001,
    "handoff.piece_bytes": 1,
    "lifetimes.acknowledge_every_s": 0.1,
}


@pytest.fixture(scope="session")
def over_gloo_pairs(cluster: Cluster) -> Iterator[Application]:
    """1 prefill and 1 decode worker with little room, KV over a gloo pair."""
    application = cluster.run("over-gloo-pairs", TIGHT | {"handoff.channel": "gloo_pair"})
    yield application
    application.stop()


@pytest.fixture(scope="session")
def over_object_store(cluster: Cluster) -> Iterator[Application]:
    """The same, KV through the object store."""
    application = cluster.run("over-object-store", TIGHT | {"handoff.channel": "object_store"})
    yield application
    application.stop()


@pytest.fixture(scope="session")
def unified(cluster: Cluster) -> Iterator[Application]:
    """One unified worker: the reference."""
    application = cluster.run("unified", {"workers.unified": 1})
    yield application
    application.stop()


@pytest.fixture
def rng() -> random.Random:
    """Fresh in every run; a failure shows its seed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


SHARED = {"disaggregated", "over_gloo_pairs", "over_object_store", "unified"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with few shared applications first: idle, too, each takes time of the machine."""
    shared: dict[Path, set[str]] = {}
    for item in items:
        used = SHARED.intersection(getattr(item, "fixturenames", ()))
        shared.setdefault(item.path, set()).update(used)
    items.sort(key=lambda item: len(shared[item.path]))

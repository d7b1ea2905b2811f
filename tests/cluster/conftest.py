"""Serve on the tests' Ray cluster, and the applications that tests share."""

import hashlib
import random
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import pytest
from ray import serve

from load_tests.testbed.deployed import Application, Cluster

# A decode worker that two long streams fill, prompts that take many steps, and KV in many pieces.
TIGHT = {
    "workers.prefill": 1,
    "workers.decode": 1,
    "cache.block_size": 4,
    "cache.num_blocks": 1024,
    "scheduler.max_num_seqs": 2,
    "scheduler.max_num_batched_tokens": 8,
    "scheduler.unreserved_share": 0.001,
    "scheduler.short_share": 0.0,  # who holds a row gives way to nobody
    "handoff.piece_bytes": 1,
    "lifetimes.acknowledge_every_s": 0.1,
}
KEY = "a key that nobody guesses"
# A worker of two ranks; every step is compared between them.
GANG = {
    "workers.unified": 1,
    "workers.tensor_parallel_size": 2,
    "workers.num_cpus": 0.1,  # so that it has a placement group
    "workers.stall_s": 4.0,
    "scheduler.overlap": True,  # plan n + 1 is sent while step n computes
    "scheduler.max_num_batched_tokens": 64,
    "laps.queue": "laps",
    "laps.mix": "fill",
    "laps.laps_length_threshold": 64,  # the longest prompt here goes in chunks, behind short ones
    "lifetimes.supervisor_silence_s": 8.0,
    "debug": True,
}
SHARED: Mapping[str, Mapping[str, object]] = {
    # The first: while it runs alone, nothing but calls has to listen. Two workers of each role,
    # which wait until Serve has started a supervisor anew; a prefill worker a pool.
    "disaggregated": {
        "workers.prefill": 2,
        "workers.decode": 2,
        "workers.num_cpus": 0.1,  # so that they have places, which outlive a supervisor
        "laps.enable_laps_alloc": True,
        "laps.min_workers_to_split": 2,
        "laps.spill_margin_s": 0.0,
        "handoff.channel": "object_store",
        "handoff.piece_bytes": 1,  # a block a piece
        "lifetimes.supervisor_silence_s": 30.0,
        "lifetimes.acknowledge_every_s": 0.1,
    },
    "gang": GANG | {"edge.num_replicas": 2},
    "over_gloo_pairs": TIGHT
    | {
        "handoff.channel": "gloo_pair",
        "api.keys": {"someone": hashlib.sha256(KEY.encode()).hexdigest()},  # every client has it
    },
    "over_object_store": TIGHT | {"handoff.channel": "object_store"},  # at night only
}


def _shared_by(item: pytest.Item) -> list[str]:
    """Names of the shared applications that a test uses, in the order of SHARED."""
    calls = getattr(item, "callspec", None)  # a fixture may choose one by its parameter
    named = [*getattr(item, "fixturenames", ()), *(calls.params.values() if calls else ())]
    return [name for name in SHARED if name in named]


class SharedApplications:
    """Each is started for the first test that uses it, and stopped after the last one.

    Even idle, its dozen processes take a third of a core from the tests that come later.
    """

    def __init__(self, cluster: Cluster, num_users: Counter[str]) -> None:
        self._cluster = cluster
        self._num_users = num_users
        self._running: dict[str, Application] = {}

    @contextmanager
    def use(self, name: str) -> Iterator[Application]:
        if name not in self._running:
            self._running[name] = self._cluster.run(
                name.replace("_", "-"), SHARED[name], api_key=KEY
            )
            self._running[name].wait_loaded()
        yield self._running[name]
        self._num_users[name] -= 1
        if not self._num_users[name]:
            self._running.pop(name).stop(waits=False)  # the next one starts meanwhile

    def stop(self) -> None:
        for application in self._running.values():
            application.stop()


@pytest.fixture(scope="package", autouse=True)
def certificates() -> Iterator[None]:
    """Those of the system, read once: each client reads them for 30 ms, though it asks by HTTP."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def cluster(local_ray: None) -> Iterator[Cluster]:
    yield Cluster.serve()
    serve.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="session")
def shared(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[SharedApplications]:
    users = Counter(name for item in request.session.items for name in _shared_by(item))
    shared = SharedApplications(cluster, users)
    yield shared
    shared.stop()


def _shared(name: str) -> Callable[..., Iterator[Application]]:
    @pytest.fixture(name=name)
    def use(shared: SharedApplications) -> Iterator[Application]:
        with shared.use(name) as application:
            yield application

    return use


disaggregated, gang, over_gloo_pairs, over_object_store = map(_shared, SHARED)


@pytest.fixture
def rng() -> random.Random:
    """Fresh in every run; a failure shows its seed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share an application stand together, those that share none before them.

    A test of two applications is the last of the one and the first of the other.
    """

    def order(item: pytest.Item) -> tuple[int, int]:
        used = [list(SHARED).index(name) for name in _shared_by(item)]
        return max(used, default=-1), min(used, default=-1)

    items.sort(key=order)

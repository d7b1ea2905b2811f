"""Placement groups of workers on a real Ray: found again, given back, and never in the way."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import ray
from ray.util import list_named_actors
from ray.util.placement_group import remove_placement_group

from actors.lifecycle.placement_groups import (
    WorkerGroup,
    end_lost,
    hold_places,
    remove_groups,
    remove_unused,
    unused_groups,
    worker_groups,
)
from engine.messages import Role
from tests.actors.lifecycle.placed_worker import Worker

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

NUM_GPUS = 2  # of `local_ray`
BUNDLE = {"CPU": 1.0, "GPU": 1.0}
HASH = "0a1b2c3d"
PAIR: dict[str, Role] = {f"prefill-0.{HASH}": "prefill", f"decode-0.{HASH}": "decode"}
PATIENCE_S = 60.0
CHECK_EVERY_S = 0.05


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of an application that leaves nothing behind."""
    name = str(request.node.name)
    yield name
    remove_groups(worker_groups(name).values(), name)
    wait_until(lambda: free_gpus() == NUM_GPUS, "all devices are free again")


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S} s: {what}"
        time.sleep(CHECK_EVERY_S)


def free_gpus() -> float:
    return float(ray.available_resources().get("GPU", 0.0))


def actors(namespace: str) -> set[str]:
    entries = list_named_actors(all_namespaces=True)
    return {e["name"] for e in entries if e["namespace"] == namespace}


def start(roles: Mapping[str, Role], namespace: str) -> dict[str, Any]:
    """As the supervisor does: create what has no actor yet."""
    missing = set(roles) - actors(namespace)
    return create(missing, namespace, hold_places(roles, missing, namespace, BUNDLE))


def create(
    names: Iterable[str], namespace: str, places: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "namespace": namespace,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": BUNDLE["CPU"],
        "num_gpus": BUNDLE["GPU"],
    }
    cls = ray.remote(Worker)
    return {n: cls.options(name=n, **options, **places[n]).remote() for n in names}


def ask(actor: Any, method: str, *args: object) -> Any:
    return ray.get(getattr(actor, method).remote(*args), timeout=PATIENCE_S)


def test_every_worker_gets_its_own_group_and_device(namespace: str) -> None:
    started = start(PAIR, namespace)
    devices = sorted(i for actor in started.values() for i in ask(actor, "devices"))
    assert devices == list(range(NUM_GPUS))
    groups = worker_groups(namespace)
    assert set(groups) == set(PAIR)
    assert len({group.id for group in groups.values()}) == len(PAIR)
    assert {g.node_id for g in groups.values()} == {ray.get_runtime_context().get_node_id()}


def test_every_rank_of_a_worker_gets_a_device_of_its_own_in_one_group(namespace: str) -> None:
    name = f"unified-0.{HASH}"
    places = hold_places(
        {name: "unified"}, [name], namespace, BUNDLE, num_ranks={"unified": NUM_GPUS}
    )
    options: dict[str, Any] = {"num_cpus": BUNDLE["CPU"], "num_gpus": BUNDLE["GPU"]}
    cls = ray.remote(Worker)
    detached = {"name": name, "namespace": namespace, "lifetime": "detached"}
    first = cls.options(**detached, **options, **places[name]).remote()
    second = ask(first, "start_rank", 1, options)
    assert sorted([*ask(first, "devices"), *ask(second, "devices")]) == list(range(NUM_GPUS))
    assert set(worker_groups(namespace)) == {name}
    [group] = unused_groups(worker_groups(namespace), [])
    remove_groups([group], namespace)
    for actor in (first, second):
        wait_until(lambda actor=actor: is_dead(actor), "the group ends all of its ranks")


def is_dead(actor: Any) -> bool:
    try:
        ask(actor, "pid")
    except ray.exceptions.RayActorError:
        return True
    return False


def test_a_crashed_worker_restarts_in_its_group(namespace: str) -> None:
    started = start(PAIR, namespace)
    pids = {name: ask(actor, "pid") for name, actor in started.items()}
    before = worker_groups(namespace)  # both have their nodes
    name, actor = next(iter(started.items()))
    with pytest.raises(ray.exceptions.RayActorError):
        ask(actor, "crash")

    def is_back() -> bool:
        try:
            return bool(ask(actor, "pid") != pids[name])
        except ray.exceptions.RayActorError:
            return False

    wait_until(is_back, f"{name} lives again")
    assert worker_groups(namespace) == before


def test_the_group_of_a_worker_gone_for_good_is_adopted_by_the_next(namespace: str) -> None:
    started = start(PAIR, namespace)
    for actor in started.values():
        ask(actor, "pid")
    before = worker_groups(namespace)
    gone, actor = next(iter(started.items()))
    ray.kill(actor, no_restart=True)
    wait_until(lambda: gone not in actors(namespace), f"{gone} is gone")
    [(again, successor)] = start(PAIR, namespace).items()
    assert again == gone
    ask(successor, "pid")
    assert worker_groups(namespace) == before


def test_a_worker_created_in_a_place_that_is_gone_makes_way_for_one_that_has_a_place(
    namespace: str,
) -> None:
    """Ray lets the first wait for ever, and an actor that waits is not created again."""
    lost, stays = PAIR
    places = hold_places(PAIR, PAIR, namespace, BUNDLE)
    remove_placement_group(worker_groups(namespace)[lost].handle)
    started = create(PAIR, namespace, places)
    ask(started[stays], "pid")
    end_lost(PAIR, namespace)
    wait_until(lambda: actors(namespace) == {stays}, f"{lost} is gone")
    [(again, successor)] = start(PAIR, namespace).items()
    assert again == lost
    ask(successor, "pid")
    end_lost(PAIR, namespace)
    assert actors(namespace) == set(PAIR)


def test_a_worker_that_hears_nobody_ends_for_good_before_its_device_is_given_back(
    namespace: str,
) -> None:
    """In the other order Ray may start it anew, in a group that is gone."""
    started = start(PAIR, namespace)
    for actor in started.values():
        ask(actor, "pid")
    gone, stays = PAIR
    started[gone].fall_silent.remote()
    wait_until(lambda: actors(namespace) == {stays}, f"{gone} is gone")
    assert set(worker_groups(namespace)) == set(PAIR)
    assert not remove_unused(namespace, HASH), "one still works in its place"
    assert set(worker_groups(namespace)) == {stays}
    started[stays].fall_silent.remote()
    wait_until(lambda: remove_unused(namespace, HASH), "nobody is in a place")
    assert not actors(namespace)
    assert not worker_groups(namespace)
    wait_until(lambda: free_gpus() == NUM_GPUS, "the devices are free")


def test_too_few_devices_give_a_whole_pair_and_the_rest_waits(namespace: str) -> None:
    roles: dict[str, Role] = {f"prefill-{i}.{HASH}": "prefill" for i in range(3)}
    roles[f"decode-0.{HASH}"] = "decode"
    started = start(roles, namespace)
    running = [f"prefill-0.{HASH}", f"decode-0.{HASH}"]
    for name in running:
        ask(started[name], "pid")
    waiting = {n for n, g in worker_groups(namespace).items() if g.node_id is None}
    assert waiting == set(roles) - set(running)
    remove_unused(namespace, HASH)
    wait_until(lambda: set(worker_groups(namespace)) == set(running), "who waits has no group")
    wait_until(lambda: actors(namespace) == set(running), "who waits is gone")
    remove_unused(namespace, HASH)
    assert [ask(started[n], "devices") for n in running] == [[0], [1]]


def test_only_what_a_deployment_does_not_use_is_removed(namespace: str) -> None:
    ask(start({"unified-0.aaaaaaaa": "unified"}, namespace)["unified-0.aaaaaaaa"], "pid")
    gone = start({"unified-0.bbbbbbbb": "unified"}, namespace)["unified-0.bbbbbbbb"]
    ask(gone, "pid")
    ray.kill(gone, no_restart=True)
    wait_until(lambda: len(actors(namespace)) == 1, "one is gone")
    remove_unused(namespace, "aaaaaaaa")
    assert len(worker_groups(namespace)) == 2
    remove_unused(namespace, "bbbbbbbb")
    wait_until(lambda: set(worker_groups(namespace)) == actors(namespace), "its group is gone")


def test_two_supervisors_at_once_make_one_group_of_a_worker(namespace: str) -> None:
    found: list[dict[str, dict[str, object]]] = []
    threads = [
        threading.Thread(target=lambda: found.append(hold_places(PAIR, PAIR, namespace, BUNDLE)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    groups = {
        places[name]["scheduling_strategy"].placement_group.id.hex()  # type: ignore[attr-defined]
        for places in found
        for name in PAIR
    }
    assert len(found) == len(threads)
    assert groups == {group.id for group in worker_groups(namespace).values()}
    assert len(groups) == len(PAIR)


def test_a_worker_that_asks_for_nothing_has_no_group(namespace: str) -> None:
    assert hold_places(PAIR, PAIR, namespace, {}) == {}
    assert worker_groups(namespace) == {}


def test_a_group_is_unused_without_its_worker_or_without_a_node() -> None:
    groups = {
        name: WorkerGroup(worker=name, id="00", node_id=node_id)
        for name, node_id in (("used", "a"), ("left", "a"), ("waiting", None))
    }
    unused = unused_groups(groups, ["used", "waiting", "other"])
    assert {group.worker for group in unused} == {"left", "waiting"}

"""Which node a worker is put on: pairs together while a node has room for both."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.lifecycle.placement_groups import NodeRoom, choose_nodes
from engine.messages import Role

GPU = {"CPU": 2.0, "GPU": 1.0}


def room(node_id: str, gpus: float, cpus: float = 64.0) -> NodeRoom:
    return NodeRoom(node_id=node_id, free={"CPU": cpus, "GPU": gpus, "memory": 1e9})


def workers(num_prefill: int, num_decode: int, num_unified: int = 0) -> dict[str, Role]:
    counts: list[tuple[Role, int]] = [
        ("unified", num_unified),
        ("prefill", num_prefill),
        ("decode", num_decode),
    ]
    return {f"{role}-{i}": role for role, count in counts for i in range(count)}


def test_a_pair_goes_to_the_fullest_node_that_has_room_for_both() -> None:
    nodes = [room("a", 8), room("b", 1), room("c", 2), room("d", 2, cpus=3.0)]
    assert choose_nodes(workers(1, 1), {}, nodes, GPU) == {"prefill-0": "c", "decode-0": "c"}


def test_a_pair_that_fits_on_no_node_is_spread() -> None:
    nodes = [room("a", 1), room("b", 1), room("c", 0)]
    assert choose_nodes(workers(1, 1), {}, nodes, GPU) == {"prefill-0": "a", "decode-0": "b"}


def test_a_second_pair_stays_with_the_first_while_there_is_room() -> None:
    chosen = choose_nodes(workers(2, 2), {}, [room("a", 5), room("b", 6)], GPU)
    assert set(chosen.values()) == {"a"}


def test_pairs_that_share_no_node_are_still_whole() -> None:
    chosen = choose_nodes(workers(2, 2), {}, [room("a", 3), room("b", 2)], GPU)
    for i in range(2):
        assert chosen[f"prefill-{i}"] == chosen[f"decode-{i}"]
    assert set(chosen.values()) == {"a", "b"}


@pytest.mark.parametrize("lost", ["prefill-0", "decode-0"])
def test_a_replaced_worker_goes_back_to_its_partners(lost: str) -> None:
    roles = workers(1, 1)
    [other] = set(roles) - {lost}
    nodes = [room("a", 1), room("b", 4), room("c", 1)]
    assert choose_nodes(roles, {other: "b"}, nodes, GPU) == {lost: "b"}


def test_too_few_devices_make_pairs_first_and_name_who_waits() -> None:
    chosen = choose_nodes(workers(3, 1), {}, [room("a", 2)], GPU)
    assert list(chosen.items())[:2] == [("prefill-0", "a"), ("decode-0", "a")]
    assert chosen["prefill-1"] is chosen["prefill-2"] is None


def test_parts_of_a_device_add_up() -> None:
    part = {"GPU": 0.1}
    chosen = choose_nodes(workers(0, 0, 10), {}, [NodeRoom(node_id="a", free={"GPU": 1.0})], part)
    assert set(chosen.values()) == {"a"}


def test_gangs_of_a_pair_share_a_node_with_room_for_all_their_ranks() -> None:
    """One bundle a rank, all of a worker's on one node; prefill and decode of unequal sizes."""
    ranks = {"prefill": 2, "decode": 4}
    nodes = [room("a", 4), room("b", 6), room("c", 8), room("d", 2)]
    assert choose_nodes(workers(1, 1), {}, nodes, GPU, ranks) == {
        "prefill-0": "b",
        "decode-0": "b",
    }
    spread = choose_nodes(workers(1, 1), {}, [room("a", 5), room("b", 2)], GPU, ranks)
    assert spread == {"prefill-0": "b", "decode-0": "a"}
    assert choose_nodes(workers(1, 1), {}, [room("a", 3), room("b", 3)], GPU, ranks) == {
        "prefill-0": "a",
        "decode-0": None,
    }


free_gpus = st.lists(st.integers(0, 9), max_size=6)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), free_gpus)
def test_no_node_is_overfilled_and_nobody_waits_while_there_is_room(
    num_prefill: int, num_decode: int, num_unified: int, gpus: list[int]
) -> None:
    roles = workers(num_prefill, num_decode, num_unified)
    nodes = [room(f"n{i}", num) for i, num in enumerate(gpus)]
    chosen = choose_nodes(roles, {}, nodes, GPU)
    assert set(chosen) == set(roles)
    for i, num in enumerate(gpus):
        assert list(chosen.values()).count(f"n{i}") <= num
    num_waiting = list(chosen.values()).count(None)
    assert num_waiting == max(0, len(roles) - sum(gpus))
    assert choose_nodes(roles, {}, nodes[::-1], GPU) == chosen


sizes = st.sampled_from([1, 2, 4])


@given(st.integers(1, 3), st.integers(1, 3), sizes, sizes, free_gpus)
def test_no_node_is_overfilled_by_gangs(
    num_prefill: int, num_decode: int, of_prefill: int, of_decode: int, gpus: list[int]
) -> None:
    roles, ranks = workers(num_prefill, num_decode), {"prefill": of_prefill, "decode": of_decode}
    nodes = [room(f"n{i}", num) for i, num in enumerate(gpus)]
    chosen = choose_nodes(roles, {}, nodes, GPU, ranks)
    free = {f"n{i}": num for i, num in enumerate(gpus)}
    for name, node_id in chosen.items():
        if node_id is not None:
            free[node_id] -= ranks[roles[name]]
    assert min(free.values(), default=0) >= 0
    for name, node_id in chosen.items():  # nobody waits who would fit into what is left
        assert node_id is not None or ranks[roles[name]] > max(free.values(), default=0)


@given(st.integers(1, 5), free_gpus)
def test_as_many_pairs_are_together_as_nodes_have_room_for(num_pairs: int, gpus: list[int]) -> None:
    nodes = [room(f"n{i}", num) for i, num in enumerate(gpus)]
    chosen = choose_nodes(workers(num_pairs, num_pairs), {}, nodes, GPU)
    num_together = sum(
        chosen[f"prefill-{i}"] is not None and chosen[f"prefill-{i}"] == chosen[f"decode-{i}"]
        for i in range(num_pairs)
    )
    assert num_together == min(num_pairs, sum(math.floor(num / 2) for num in gpus))

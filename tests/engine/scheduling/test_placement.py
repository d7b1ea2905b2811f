"""Where a prompt goes: least queued tokens, roles, limits, and ties always broken alike."""

import random
from typing import Any

import pytest

from engine.messages import Assign, Hold, Placement, PlaceRequest, Reject, Role
from engine.scheduling.placement import WorkerSnapshot, place


def _worker(name: str, role: Role, **given: Any) -> WorkerSnapshot:
    fields = {
        "is_alive": True,
        "queued_tokens": 0,
        "num_running": 0,
        "num_free_blocks": 100,
        "num_blocks": 100,
    }
    return WorkerSnapshot(name=name, role=role, **{**fields, **given})


def _place(
    *snapshots: WorkerSnapshot,
    num_tokens: int = 10,
    limit: int | None = 1000,
    avoid: tuple[str, ...] = (),
) -> Placement:
    prompt = PlaceRequest(num_prompt_tokens=num_tokens, max_queued_tokens=limit, avoid=list(avoid))
    return place(prompt, snapshots, 0.0)


def test_the_least_queued_tokens_win() -> None:
    workers = [_worker(f"u{i}", "unified", queued_tokens=n) for i, n in enumerate([30, 10, 20])]
    assert _place(*workers) == Assign(prefill_worker="u1", decode_worker=None)


def test_a_prefill_worker_needs_a_decode_worker() -> None:
    prefill = _worker("p0", "prefill")
    assert isinstance(_place(prefill), Hold)
    assert isinstance(_place(prefill, _worker("d0", "decode", is_alive=False)), Hold)
    decision = _place(prefill, _worker("d0", "decode"))
    assert decision == Assign(prefill_worker="p0", decode_worker="d0")


def test_a_decode_worker_never_prefills() -> None:
    assert isinstance(_place(_worker("d0", "decode")), Hold)


def test_the_decode_worker_is_the_one_with_fewest_running_then_most_room() -> None:
    prefill = _worker("p0", "prefill")
    busy = _worker("d0", "decode", num_running=3)
    tight = _worker("d1", "decode", num_running=1, num_free_blocks=5)
    roomy = _worker("d2", "decode", num_running=1, num_free_blocks=50)
    decision = _place(prefill, busy, tight, roomy)
    assert decision == Assign(prefill_worker="p0", decode_worker="d2")


def test_workers_that_just_failed_are_avoided_while_there_are_others() -> None:
    workers = [_worker("u0", "unified"), _worker("u1", "unified", queued_tokens=500)]
    assert _place(*workers, avoid=("u0",)) == Assign(prefill_worker="u1", decode_worker=None)
    both = _place(*workers, avoid=("u0", "u1"))
    assert both == Assign(prefill_worker="u0", decode_worker=None)


def test_the_dead_are_not_counted_on() -> None:
    dead = _worker("u0", "unified", is_alive=False)
    assert isinstance(_place(dead), Hold)
    alive = _worker("u1", "unified", queued_tokens=9)
    assert _place(dead, alive) == Assign(prefill_worker="u1", decode_worker=None)


@pytest.mark.parametrize(
    ("queued", "num_tokens", "is_refused"), [(990, 10, False), (991, 10, True)]
)
def test_queues_are_bounded_over_all_workers(
    queued: int, num_tokens: int, is_refused: bool
) -> None:
    workers = [
        _worker("u0", "unified", queued_tokens=queued - 300),
        _worker("u1", "unified", queued_tokens=300),
    ]
    assert isinstance(_place(*workers, num_tokens=num_tokens), Reject) is is_refused


def test_an_idle_system_takes_a_prompt_of_any_length() -> None:
    assert isinstance(_place(_worker("u0", "unified"), num_tokens=5000), Assign)


def test_ties_do_not_depend_on_the_order_of_the_snapshots() -> None:
    rng = random.Random(1)
    workers = [_worker(f"p{i}", "prefill") for i in range(4)]
    workers += [_worker(f"d{i}", "decode") for i in range(4)]
    for _ in range(20):
        rng.shuffle(workers)
        assert _place(*workers) == Assign(prefill_worker="p0", decode_worker="d0")


def test_a_retry_is_not_turned_away_by_admission() -> None:
    worker = _worker("u0", "unified", queued_tokens=5000)
    assert isinstance(_place(worker), Reject)
    assert isinstance(_place(worker, limit=None), Assign)

"""Where a prompt goes: least predicted TTFT, pools, hits, limits, and ties always broken alike."""

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import LapsConfig
from engine.cost_model import PRIOR
from engine.length_class import LengthClass, LinearCost, PrefillCost, classify
from engine.messages import Assign, Hold, Placement, Reject, Role, RouteRequest
from engine.routing.placement import (
    PlacementRules,
    ShortQueue,
    WorkerSnapshot,
    is_forced,
    route,
    wait_s,
)

COST = LinearCost(floor_s=0.01, token_s=1e-4)
LAPS = LapsConfig(spill_margin_s=0.05, laps_alloc_threshold=100, max_step_ms=20.0)
RULES = PlacementRules(laps=LAPS, cost=COST, block_size=16)


def _worker(name: str, role: Role, **given: Any) -> WorkerSnapshot:
    queued_tokens = given.get("queued_tokens", 0)
    fields = {
        "is_alive": True,
        "queued_tokens": 0,
        "queued_s": queued_tokens * COST.token_s,
        "num_waiting": 0,
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
    deadline_s: float | None = None,
) -> Placement:
    prompt = RouteRequest(
        num_prompt_tokens=num_tokens,
        max_queued_tokens=limit,
        avoid=list(avoid),
        ttft_deadline_s=deadline_s,
    )
    return route(prompt, snapshots, 0.0, RULES)


def _assigned(*snapshots: WorkerSnapshot, **given: Any) -> Assign:
    placement = _place(*snapshots, **{"limit": None, **given})
    assert isinstance(placement, Assign), placement
    return placement


def _where(*snapshots: WorkerSnapshot, **given: Any) -> tuple[str, str | None]:
    assign = _assigned(*snapshots, **given)
    return assign.prefill_worker, assign.decode_worker


@pytest.mark.parametrize(
    ("roles", "is_only_choice"),
    [
        (["unified"], True),
        (["prefill", "decode"], True),
        (["unified", "unified"], False),
        (["prefill", "prefill", "decode"], False),
        (["prefill", "decode", "decode"], False),
        ([], False),
    ],
)
@pytest.mark.parametrize("is_alive", [True, False])
def test_one_worker_a_role_is_no_choice(
    roles: list[Role], is_only_choice: bool, is_alive: bool
) -> None:
    # Neither while one is away: it is waited for, because there is no other.
    workers = [_worker(f"w{i}", role, is_alive=is_alive) for i, role in enumerate(roles)]
    assert is_forced(workers) == is_only_choice


def test_the_least_queued_work_wins() -> None:
    workers = [_worker(f"u{i}", "unified", queued_tokens=n) for i, n in enumerate([30, 10, 20])]
    assert _where(*workers) == ("u1", None)


def test_a_prefill_worker_needs_a_decode_worker() -> None:
    prefill = _worker("p0", "prefill")
    assert isinstance(_place(prefill), Hold)
    assert isinstance(_place(prefill, _worker("d0", "decode", is_alive=False)), Hold)
    assert _where(prefill, _worker("d0", "decode")) == ("p0", "d0")


def test_a_decode_worker_never_prefills() -> None:
    assert isinstance(_place(_worker("d0", "decode")), Hold)


def test_the_decode_worker_is_the_one_with_fewest_running_then_most_room() -> None:
    prefill = _worker("p0", "prefill")
    busy = _worker("d0", "decode", num_running=3)
    tight = _worker("d1", "decode", num_running=1, num_free_blocks=5)
    roomy = _worker("d2", "decode", num_running=1, num_free_blocks=50)
    assert _where(prefill, busy, tight, roomy) == ("p0", "d2")
    # Where the prompt does not fit it would wait, however little runs there.
    full = _worker("d3", "decode", num_free_blocks=6)
    assert _where(prefill, busy, full, num_tokens=95) == ("p0", "d3")
    assert _where(prefill, busy, full, num_tokens=96) == ("p0", "d0")


@pytest.mark.parametrize(
    ("near_running", "far_running", "chosen"),
    [
        (0, 0, "near"),
        (2, 0, "near"),
        (3, 0, "far"),
        (42, 40, "near"),
        (45, 40, "near"),
        (46, 40, "far"),
    ],
)
def test_kv_stays_on_its_machine_unless_others_are_less_busy(
    near_running: int, far_running: int, chosen: str
) -> None:
    prefill = _worker("p0", "prefill", host="a")
    near = _worker("near", "decode", host="a", num_running=near_running)
    far = _worker("far", "decode", host="b", num_running=far_running)
    assert _where(prefill, near, far, num_tokens=900) == ("p0", chosen)


def test_kv_that_moves_within_a_ms_goes_to_the_least_busy() -> None:
    prefill = _worker("p0", "prefill", host="a")
    near = _worker("near", "decode", host="a", num_running=1)
    far = _worker("far", "decode", host="b")
    assert _where(prefill, near, far, num_tokens=83) == ("p0", "far")
    assert _where(prefill, near, far, num_tokens=84) == ("p0", "near")


def test_a_near_decode_worker_without_room_does_not_make_a_prompt_wait() -> None:
    prefill = _worker("p0", "prefill", host="a")
    full = _worker("near", "decode", host="a", num_free_blocks=60)
    far = _worker("far", "decode", host="b", num_running=2)
    assert _where(prefill, full, far, num_tokens=959) == ("p0", "near")
    assert _where(prefill, full, far, num_tokens=960) == ("p0", "far")
    tight = replace(far, num_free_blocks=60)
    assert _where(prefill, replace(full, num_running=4), tight, num_tokens=960) == ("p0", "near")


def test_of_several_near_decode_workers_the_least_busy_gets_a_prompt() -> None:
    prefill = _worker("p0", "prefill", host="a")
    decoders = [_worker(f"d{n}", "decode", host="a", num_running=n) for n in (2, 1)]
    far = _worker("d0", "decode", host="b")
    assert _where(prefill, *decoders, far, num_tokens=900) == ("p0", "d1")
    # Where nobody has said where it is, the least busy of all.
    unknown = [replace(worker, host="") for worker in (prefill, *decoders, far)]
    assert _where(*unknown, num_tokens=900) == ("p0", "d0")


def test_a_conversation_goes_back_to_the_decode_worker_that_has_its_kv() -> None:
    prefill = _worker("p0", "prefill", host="a")
    had = _worker("d1", "decode", num_running=2, hit_tokens=800)
    others = [_worker(f"d{n}", "decode") for n in (0, 2)]
    assert _where(prefill, had, *others, num_tokens=900) == ("p0", "d1")
    busier = replace(had, num_running=3)
    assert _where(prefill, busier, *others, num_tokens=900) == ("p0", "d0")
    # A hit that saves less than a ms decides among those that are as busy, before free blocks do.
    little = replace(had, hit_tokens=64, num_free_blocks=60)
    assert _where(prefill, little, *others, num_tokens=900) == ("p0", "d0")
    assert _where(prefill, replace(little, num_running=0), *others, num_tokens=900) == ("p0", "d1")
    # 900 tokens between two GPUs take less than 100 over the network.
    near = _worker("d3", "decode", host="a")
    assert _where(prefill, replace(had, host="b"), near, num_tokens=900) == ("p0", "d3")


def test_workers_that_just_failed_are_avoided_while_there_are_others() -> None:
    workers = [_worker("u0", "unified"), _worker("u1", "unified", queued_tokens=500)]
    assert _where(*workers, avoid=("u0",)) == ("u1", None)
    assert _where(*workers, avoid=("u0", "u1")) == ("u0", None)


def test_the_dead_are_not_counted_on() -> None:
    dead = _worker("u0", "unified", is_alive=False)
    assert isinstance(_place(dead), Hold)
    alive = _worker("u1", "unified", queued_tokens=9)
    assert _where(dead, alive) == ("u1", None)


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
        assert _where(*workers) == ("p0", "d0")


def test_a_retry_is_not_turned_away_by_admission() -> None:
    worker = _worker("u0", "unified", queued_tokens=5000)
    assert isinstance(_place(worker), Reject)
    assert isinstance(_place(worker, limit=None), Assign)


# ---- pools -------------------------------------------------------------------------------------


def _pools(short_s: float, long_s: float, **given: Any) -> list[WorkerSnapshot]:
    return [
        _worker("s", "unified", label="short", queued_s=short_s, **given),
        _worker("l", "unified", label="long", queued_s=long_s, **given),
    ]


@pytest.mark.parametrize(("num_tokens", "worker"), [(1, "s"), (100, "s"), (101, "l"), (900, "l")])
def test_a_prompt_goes_to_the_pool_of_its_class(num_tokens: int, worker: str) -> None:
    assert _where(*_pools(0.0, 0.0), num_tokens=num_tokens)[0] == worker


def test_a_prompt_spills_when_it_wins_by_more_than_the_margin() -> None:
    assert _where(*_pools(0.049, 0.0))[0] == "s"
    spilled = _assigned(*_pools(0.06, 0.0))
    assert (spilled.prefill_worker, spilled.length_class) == ("l", "short")
    assert "spilled" in spilled.reason
    assert _where(*_pools(0.0, 0.06), num_tokens=500)[0] == "s", "long prompts spill, too"


def test_a_prompt_spills_to_keep_its_deadline() -> None:
    workers = _pools(0.04, 0.0)  # 0.051 s at home, 0.011 s elsewhere: less than the margin
    assert _where(*workers, deadline_s=0.052)[0] == "s"
    assert _where(*workers, deadline_s=0.05)[0] == "l"
    assert _where(*workers, deadline_s=0.001)[0] == "s", "late on both: the pools hold"


def test_the_class_deadline_stands_in_for_a_prompt_without_one() -> None:
    laps = msgspec.structs.replace(LAPS, short_ttft_deadline_s=0.05)
    rules = PlacementRules(laps=laps, cost=COST)
    prompt = RouteRequest(num_prompt_tokens=10)
    placement = route(prompt, _pools(0.04, 0.0), 0.0, rules)
    assert isinstance(placement, Assign)
    assert placement.prefill_worker == "l"


@pytest.mark.parametrize(("num_tokens", "dead"), [(10, "s"), (500, "l")])
def test_a_class_whose_pool_is_dead_uses_the_other(num_tokens: int, dead: str) -> None:
    workers = [_worker(dead, "unified", label="short" if dead == "s" else "long", is_alive=False)]
    workers += [w for w in _pools(0.3, 0.3) if w.name != dead]
    assert _where(*workers, num_tokens=num_tokens)[0] == workers[1].name


def test_where_short_prompts_go_first_they_wait_for_one_chunk_of_a_long_one() -> None:
    one_queue = _worker("a", "unified", queued_s=0.5)
    two_queues = _worker(
        "b", "unified", queued_s=0.5, short=ShortQueue(num_waiting=1, queued_s=0.1)
    )
    assert wait_s(one_queue, "short", 0.02) == 0.5
    assert wait_s(two_queues, "short", 0.02) == pytest.approx(0.12)
    assert wait_s(two_queues, "long", 0.02) == 0.5
    only_short = _worker(
        "c", "unified", queued_s=0.1, short=ShortQueue(num_waiting=3, queued_s=0.1)
    )
    assert wait_s(only_short, "short", 0.02) == pytest.approx(0.1)


# ---- cached prefixes ---------------------------------------------------------------------------


def test_only_uncached_tokens_count() -> None:
    workers = [
        _worker("empty", "unified", queued_s=0.0),
        _worker("warm", "unified", queued_s=0.03, hit_tokens=400),
    ]
    assign = _assigned(*workers, num_tokens=500)
    assert assign.prefill_worker == "warm"
    assert (assign.num_new_tokens, assign.length_class) == (100, "short")
    assert assign.work_s == pytest.approx(0.02)
    assert assign.ttft_s == pytest.approx(0.05)
    assert _where(*workers, num_tokens=410)[0] == "warm"
    busy = _worker("warm", "unified", queued_s=0.1, hit_tokens=400)
    assert _where(workers[0], busy, num_tokens=500)[0] == "empty", "a hit is not worth any queue"


def test_the_last_token_is_computed_even_when_all_of_it_is_cached() -> None:
    assert _assigned(_worker("u", "unified", hit_tokens=32), num_tokens=32).num_new_tokens == 1


def test_a_late_turn_is_short_where_its_history_is_and_long_elsewhere() -> None:
    warm = _worker("s0", "unified", label="short", hit_tokens=4000)
    cold = _worker("s1", "unified", label="short")
    long = _worker("l0", "unified", label="long")
    assert _where(warm, cold, long, num_tokens=4050)[0] == "s0"
    assert _where(cold, long, num_tokens=4050)[0] == "l0"


def test_a_late_turn_of_a_long_conversation_may_stay_in_the_long_pool() -> None:
    """Else a cold worker of that pool would compute it anew, up to the margin's worth of tokens."""
    workers = [_worker(f"l{i}", "unified", label="long") for i in range(2)]
    workers[1] = replace(workers[1], hit_tokens=288)
    assert _assigned(*workers, num_tokens=300).num_new_tokens == 12
    short = _worker("s0", "unified", label="short")
    assert _where(*workers, short, num_tokens=300)[0] == "l1"
    # What is short as a whole has its own pool, wherever a part of it is cached.
    workers[1] = replace(workers[1], hit_tokens=64)
    assert _where(*workers, short, num_tokens=100)[0] == "s0"


@pytest.mark.parametrize("cost", [COST, PRIOR], ids=["linear", "fitted"])
def test_the_threshold_is_a_prompt_without_history(cost: PrefillCost) -> None:
    assert classify(256, 0, 256, cost) == "short"
    assert classify(257, 0, 256, cost) == "long"
    assert classify(1, 0, 256, cost) == "short"


def test_reading_a_history_costs_where_the_model_says_so() -> None:
    assert classify(200, 0, 256, PRIOR) == "short"
    assert classify(200, 100_000, 256, PRIOR) == "long"
    assert classify(200, 100_000, 256, COST) == "short"


# ---- properties --------------------------------------------------------------------------------

LABELS: tuple[LengthClass | None, ...] = (None, "short", "long")


@st.composite
def _workers(draw: st.DrawFn) -> list[WorkerSnapshot]:
    num_workers = draw(st.integers(1, 8))
    workers = []
    for i in range(num_workers):
        queued_s = draw(st.floats(0, 2))
        share = draw(st.none() | st.floats(0, 1))
        short = None if share is None else ShortQueue(num_waiting=1, queued_s=share * queued_s)
        worker = _worker(
            f"u{i}",
            "unified",
            queued_s=queued_s,
            short=short,
            label=draw(st.sampled_from(LABELS)),
            hit_tokens=draw(st.sampled_from([0, 0, 16, 160, 800])),
        )
        workers.append(worker)
    return workers


@given(_workers(), st.integers(1, 2000), st.none() | st.floats(0.01, 2), st.data())
def test_one_worker_more_makes_no_prediction_worse_beyond_the_margin(
    workers: list[WorkerSnapshot], num_tokens: int, deadline_s: float | None, data: st.DataObject
) -> None:
    more = _assigned(*workers, num_tokens=num_tokens, deadline_s=deadline_s)
    if len(workers) > 1:
        left_out = data.draw(st.integers(0, len(workers) - 1))
        fewer = workers[:left_out] + workers[left_out + 1 :]
        less = _assigned(*fewer, num_tokens=num_tokens, deadline_s=deadline_s)
        assert more.ttft_s <= less.ttft_s + LAPS.spill_margin_s + 1e-9
    alone = [_assigned(worker, num_tokens=num_tokens).ttft_s for worker in workers]
    assert more.ttft_s <= min(alone) + LAPS.spill_margin_s + 1e-9


@given(_workers(), st.integers(1, 2000), st.randoms(use_true_random=False))
def test_the_same_inputs_give_the_same_decision_in_any_order(
    workers: list[WorkerSnapshot], num_tokens: int, rng: random.Random
) -> None:
    expected = _assigned(*workers, num_tokens=num_tokens)
    shuffled = rng.sample(workers, len(workers))
    assert _assigned(*shuffled, num_tokens=num_tokens) == expected

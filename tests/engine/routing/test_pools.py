"""Labels of workers: split, floors, and moves that need a reason that lasts."""

import itertools
import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import LapsConfig
from engine.length_class import LengthClass
from engine.routing.placement import ShortQueue, WorkerSnapshot
from engine.routing.pools import (
    CLASSES,
    MAX_MOVES,
    PoolState,
    follow,
    num_pending,
    pressure_s,
    rebalance,
)

LAPS = LapsConfig(
    enable_laps_alloc=True,
    laps_rebalance_interval_s=5.0,
    laps_rebalance_ratio=2.0,
    rebalance_cool_down_s=10.0,
    min_pending_s=0.25,
)
RATIO = msgspec.structs.replace(LAPS, rebalance_policy="ratio")
EIGHT = [f"p{i}" for i in range(8)]


def _worker(name: str, queued_s: float = 0.0, **given: Any) -> WorkerSnapshot:
    fields = {
        "role": "prefill",
        "is_alive": True,
        "queued_tokens": int(1000 * queued_s),
        "queued_s": queued_s,
        "num_waiting": 0,
        "num_running": 0,
        "num_free_blocks": 10,
        "num_blocks": 10,
    }
    return WorkerSnapshot(name=name, **{**fields, **given})


def _load(state: PoolState, short: float, long: float) -> list[WorkerSnapshot]:
    """Every worker of a pool with so many seconds queued, and ten times as many prompts."""
    seconds: Mapping[LengthClass, float] = {"short": short, "long": long}
    return [
        _worker(name, seconds[label], num_waiting=round(10 * seconds[label]), label=label)
        for name, label in state.labels.items()
    ]


def _sizes(state: PoolState) -> tuple[int, int]:
    labels = list(state.labels.values())
    return labels.count("short"), labels.count("long")


def _split(num_workers: int, laps: LapsConfig = LAPS) -> PoolState:
    return follow(PoolState(), [f"p{i}" for i in range(num_workers)], laps)


def _run(
    state: PoolState, short: float, long: float, until_s: float, laps: LapsConfig = LAPS
) -> PoolState:
    """The same load, looked at every second from 0 on."""
    for now_s in range(int(until_s) + 1):
        state = rebalance(state, _load(state, short, long), float(now_s), laps)
    return state


# ---- who belongs where -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "sizes"), [(1, (0, 0)), (2, (0, 0)), (3, (1, 2)), (4, (2, 2)), (9, (4, 5))]
)
def test_workers_are_split_half_and_half_from_three_on(
    num_workers: int, sizes: tuple[int, int]
) -> None:
    assert _sizes(_split(num_workers)) == sizes


def test_fewer_than_three_are_split_where_the_config_says_so() -> None:
    assert _sizes(_split(2, msgspec.structs.replace(LAPS, min_workers_to_split=2))) == (1, 1)


def test_without_the_switch_nothing_is_split() -> None:
    assert _sizes(_split(8, LapsConfig())) == (0, 0)


def test_labels_stay_while_others_come_and_go() -> None:
    state = _split(8)
    labels = dict(state.labels)
    assert follow(state, reversed(EIGHT), LAPS) is state
    fewer = follow(state, EIGHT[:6], LAPS)
    assert fewer.labels == {name: labels[name] for name in EIGHT[:6]}
    more = follow(state, [*EIGHT, "p8", "p9"], LAPS)
    assert labels.items() <= more.labels.items()
    assert _sizes(more) == (5, 5)


def test_a_pool_whose_workers_all_left_gets_one_of_the_other() -> None:
    state = _split(8)
    long = [name for name, label in state.labels.items() if label == "long"]
    assert _sizes(follow(state, long, LAPS)) == (1, 3)
    assert _sizes(follow(state, long[:2], LAPS)) == (0, 0), "too few to split"


# ---- when one moves ----------------------------------------------------------------------------


@pytest.mark.parametrize("laps", [LAPS, RATIO], ids=["pressure", "ratio"])
def test_a_busy_pool_gets_a_worker_in_the_second_period(laps: LapsConfig) -> None:
    state = _split(8)
    assert _sizes(_run(state, 2.0, 0.5, 4, laps)) == (4, 4)
    moved = _run(state, 2.0, 0.5, 5, laps)
    assert _sizes(moved) == (5, 3)
    (move,) = moved.moves
    assert (move.worker, move.pool, move.at_s) == ("p0", "short", 5.0)
    assert "short" in move.reason


def test_the_other_pool_can_get_one_as_well() -> None:
    assert _sizes(_run(_split(8), 0.5, 2.0, 5)) == (3, 5)


def test_there_is_one_move_per_cool_down_and_the_other_pool_keeps_its_floor() -> None:
    state = _run(_split(8), 4.0, 0.5, 14)
    assert _sizes(state) == (5, 3), "the second waits for the cool-down"
    assert _sizes(_run(_split(8), 4.0, 0.5, 15)) == (6, 2)
    assert _sizes(_run(_split(8), 4.0, 0.5, 500)) == (7, 1)
    floor = msgspec.structs.replace(LAPS, min_workers_per_pool=3)
    assert _sizes(_run(_split(8, floor), 4.0, 0.5, 500, floor)) == (5, 3)


@pytest.mark.parametrize("laps", [LAPS, RATIO], ids=["pressure", "ratio"])
@pytest.mark.parametrize(
    ("short", "long"), [(1.0, 0.5), (0.5, 1.0), (0.24, 0.0), (3.0, 3.0)], ids=str
)
def test_no_move_within_the_ratio_or_for_little_work(
    laps: LapsConfig, short: float, long: float
) -> None:
    assert _run(_split(8), short, long, 100, laps).moves == ()


def test_one_busy_period_moves_nobody() -> None:
    state = _split(8)
    for now_s, short in [(0, 3.0), (5, 0.5), (10, 3.0), (15, 0.5), (20, 3.0)]:
        state = rebalance(state, _load(state, short, 0.5), float(now_s), LAPS)
    assert state.moves == ()


def test_between_two_periods_nothing_is_looked_at() -> None:
    state = rebalance(_split(8), [], 0.0, LAPS)
    assert rebalance(state, _load(state, 9.0, 0.0), 4.9, LAPS) is state


def test_the_giver_is_the_one_that_is_soonest_free() -> None:
    state = _split(8)
    load = _load(state, 2.0, 0.5)
    load = [_worker("p6", 0.1) if s.name == "p6" else s for s in load]
    for now_s in (0.0, 5.0):
        state = rebalance(state, load, now_s, LAPS)
    assert state.moves[0].worker == "p6"


def test_the_dead_neither_move_nor_count_for_the_floor() -> None:
    state = _split(4)
    short, long = (sorted(n for n, lab in state.labels.items() if lab == p) for p in CLASSES)
    busy = [_worker(name, 2.0) for name in short]
    half_dead = [*busy, _worker(long[0], is_alive=False), _worker(long[1])]
    for now_s in (0.0, 5.0, 10.0, 15.0):
        state = rebalance(state, half_dead, now_s, LAPS)
    assert state.moves == ()


def test_a_pool_that_is_all_dead_gets_a_live_worker_when_there_is_work() -> None:
    state = _split(4)
    load = [_worker(n, 1.0, is_alive=label == "long") for n, label in state.labels.items()]
    for now_s in (0.0, 5.0):
        state = rebalance(state, load, now_s, LAPS)
    assert [move.reason for move in state.moves] == ["no short worker is alive"]
    idle = _split(4)
    load = [_worker(n, 0.0, is_alive=label == "long") for n, label in idle.labels.items()]
    for now_s in (0.0, 5.0, 10.0):
        idle = rebalance(idle, load, now_s, LAPS)
    assert idle.moves == ()


def test_pressure_is_the_ninth_of_ten() -> None:
    workers = [_worker(f"p{i}", float(i)) for i in range(1, 11)]
    assert pressure_s(workers) == 9.0
    assert pressure_s(workers[:3]) == 3.0
    assert pressure_s([]) == 0.0


def test_waiting_prompts_are_counted_by_class_where_workers_tell_them_apart() -> None:
    labels: Mapping[str, LengthClass] = {"a": "short", "b": "long"}
    told = _worker("a", num_waiting=7, short=ShortQueue(num_waiting=5, queued_s=0.1))
    untold = _worker("b", num_waiting=4)
    assert num_pending("short", [told, untold], labels) == 5
    assert num_pending("long", [told, untold], labels) == 2 + 4


# ---- properties --------------------------------------------------------------------------------


@st.composite
def _configs(draw: st.DrawFn) -> LapsConfig:
    return LapsConfig(
        enable_laps_alloc=True,
        rebalance_policy=draw(st.sampled_from(["pressure", "ratio"])),
        laps_rebalance_ratio=draw(st.sampled_from([1.1, 2.0])),
        rebalance_cool_down_s=draw(st.sampled_from([0.0, 10.0])),
        min_workers_per_pool=draw(st.integers(1, 3)),
        min_workers_to_split=draw(st.integers(2, 4)),
        min_pending_s=draw(st.sampled_from([0.0, 0.25])),
    )


def _random_walk(laps: LapsConfig, seed: int, num_looks: int = 40) -> list[PoolState]:
    """States under random loads, deaths and memberships."""
    rng = random.Random(seed)
    state, states = PoolState(), []
    members = EIGHT
    for look in range(num_looks):
        if rng.random() < 0.2:
            members = rng.sample(EIGHT, rng.randint(0, 8))
        state = follow(state, members, laps)
        load = [
            _worker(n, rng.choice([0.0, 0.5, 5.0]), num_waiting=rng.randint(0, 20),
                    is_alive=rng.random() < 0.8)
            for n in members
        ]  # fmt: skip
        state = rebalance(state, load, 3.0 * look, laps)
        states.append(state)
    return states


@settings(deadline=None)
@given(_configs(), st.integers(0, 2**32))
def test_pools_are_never_empty_and_moves_are_few(laps: LapsConfig, seed: int) -> None:
    for state in _random_walk(laps, seed):
        num_workers = len(state.labels)
        if num_workers:
            floor = min(laps.min_workers_per_pool, num_workers // 2)
            assert min(_sizes(state)) >= floor > 0
            assert num_workers >= laps.min_workers_to_split
        assert len(state.moves) <= MAX_MOVES
    times_s = [move.at_s for move in state.moves]
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    # Two periods in a row for each move, and the cool-down.
    assert all(gap >= max(2 * 5.0, laps.rebalance_cool_down_s) for gap in gaps_s)


@settings(deadline=None)
@given(_configs(), st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_moves(laps: LapsConfig, seed: int) -> None:
    assert _random_walk(laps, seed) == _random_walk(laps, seed)


@settings(deadline=None)
@given(
    st.sampled_from([LAPS, RATIO]),
    st.integers(3, 12),
    st.floats(0.0, 5.0),
    st.integers(0, 2**32),
)
def test_no_move_under_a_constant_balanced_load(
    laps: LapsConfig, num_workers: int, load_s: float, seed: int
) -> None:
    """The same load on every worker, noisy by a quarter up and down."""
    rng = random.Random(seed)
    # By count, pools of equal size are balanced; by pressure pools of any size.
    state = _split(num_workers + (num_workers % 2 if laps is RATIO else 0), laps)
    for look in range(50):
        load = [
            _worker(name, load_s * noise, num_waiting=round(100 * load_s * noise))
            for name in state.labels
            for noise in [rng.uniform(0.75, 1.25)]
        ]
        state = rebalance(state, load, 5.0 * look, laps)
    assert state.moves == ()

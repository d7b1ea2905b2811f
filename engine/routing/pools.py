"""Assigns workers to the pools for short and long prompts, and moves a worker between them.

Moving a worker costs nothing: every worker holds the whole model, and queued prompts stay where
they are. But each move disturbs the system, so a worker changes pools only if

    load(pool) > laps_rebalance_ratio * load(other)   in two periods in a row,
    the busy pool has min_pending_s of work queued,
    the last change is rebalance_cool_down_s old, and
    the other pool keeps min_workers_per_pool live workers.

Undoing a move needs the same imbalance in the opposite direction: that is the hysteresis. Pure:
state and snapshots in, state out; the same inputs give the same state.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from configs.schema import LapsConfig
from engine.length_class import LengthClass
from engine.routing.placement import WorkerSnapshot

CLASSES: tuple[LengthClass, LengthClass] = ("short", "long")
NUM_PERIODS = 2  # consecutive periods in which a pool must want a worker
PRESSURE_SHARE = 0.9  # quantile of the workers' queued seconds that is a pool's pressure
MAX_MOVES = 32  # number of moves kept
CLOCK_SLACK_S = 1e-9  # so that a period of 5 s is over at 4.999999999


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A worker changed pools."""

    worker: str
    pool: LengthClass  # the pool that it moved to
    at_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """Everything the next decision depends on besides the snapshots."""

    labels: Mapping[str, LengthClass] = field(default_factory=dict)  # empty = no split
    checked_s: float | None = None  # when the last period began
    wanted: LengthClass | None = None  # the pool that wanted a worker in that period
    num_periods: int = 0  # consecutive periods in which it did
    moved_s: float | None = None
    moves: tuple[Move, ...] = ()  # newest last


@dataclass(frozen=True, slots=True)
class _Demand:
    pool: LengthClass
    reason: str


def other(pool: LengthClass) -> LengthClass:
    return "long" if pool == "short" else "short"


def follow(state: PoolState, workers: Iterable[str], laps: LapsConfig) -> PoolState:
    """The state for this set of workers that prefill, alive or not.

    Remaining workers keep their label and a new one joins the smaller pool. A pool that lost too
    many workers gets some of the other's, so no pool is empty. Too few workers are not split.
    """
    names = sorted(workers)
    if not laps.enable_laps_alloc or len(names) < laps.min_workers_to_split:
        return replace(state, labels={}, wanted=None, num_periods=0) if state.labels else state
    labels = {name: state.labels[name] for name in names if name in state.labels}
    for name in names:
        if name not in labels:
            num_short = len(_members(labels, "short"))
            labels[name] = "short" if 2 * num_short < len(labels) else "long"
    floor = min(laps.min_workers_per_pool, len(names) // 2)
    for pool in CLASSES:
        num_missing = floor - len(_members(labels, pool))
        if num_missing > 0:
            labels |= dict.fromkeys(_members(labels, other(pool))[-num_missing:], pool)
    return state if labels == state.labels else replace(state, labels=labels)


def is_due(state: PoolState, now_s: float, laps: LapsConfig) -> bool:
    """Whether there are pools and the current period is over."""
    since_s = math.inf if state.checked_s is None else now_s - state.checked_s
    return bool(state.labels) and since_s >= laps.laps_rebalance_interval_s - CLOCK_SLACK_S


def rebalance(
    state: PoolState, snapshots: Sequence[WorkerSnapshot], now_s: float, laps: LapsConfig
) -> PoolState:
    """Check the pools and return the new state; at most one label changes, once per period.

    Between periods the state is returned unchanged, so this may be called at any time.
    """
    if not is_due(state, now_s, laps):
        return state
    alive = [s for s in snapshots if s.can_prefill and s.is_alive and s.name in state.labels]
    demand = _demand(state.labels, alive, laps)
    is_again = demand is not None and demand.pool == state.wanted
    state = replace(
        state,
        checked_s=now_s,
        wanted=demand.pool if demand else None,
        num_periods=state.num_periods + 1 if is_again else int(demand is not None),
    )
    is_cool = state.moved_s is None or now_s - state.moved_s >= laps.rebalance_cool_down_s
    if demand is None or state.num_periods < NUM_PERIODS or not is_cool:
        return state
    givers = _alive_in(state.labels, alive, other(demand.pool))
    if len(givers) <= laps.min_workers_per_pool:
        return state
    # The worker that will finish its queue first.
    worker = min(givers, key=lambda s: (s.queued_s, s.name)).name
    move = Move(worker=worker, pool=demand.pool, at_s=now_s, reason=demand.reason)
    return replace(
        state,
        labels={**state.labels, worker: demand.pool},
        wanted=None,
        num_periods=0,
        moved_s=now_s,
        moves=(*state.moves, move)[-MAX_MOVES:],
    )


def pressure_s(workers: Sequence[WorkerSnapshot]) -> float:
    """The P90, by nearest rank, of the workers' predicted seconds of queued work."""
    if not workers:
        return 0.0
    ordered = sorted(s.queued_s for s in workers)
    return ordered[math.ceil(PRESSURE_SHARE * len(ordered)) - 1]


def num_pending(
    pool: LengthClass, snapshots: Iterable[WorkerSnapshot], labels: Mapping[str, LengthClass]
) -> int:
    """Waiting prompts of a class: as reported by workers, else all that wait in its pool."""
    num_prompts = 0
    for worker in snapshots:
        if worker.short is None:
            num_prompts += worker.num_waiting if labels.get(worker.name) == pool else 0
        else:
            num_short = worker.short.num_waiting
            num_prompts += num_short if pool == "short" else worker.num_waiting - num_short
    return num_prompts


def _demand(
    labels: Mapping[str, LengthClass], alive: Sequence[WorkerSnapshot], laps: LapsConfig
) -> _Demand | None:
    """The pool that should get a worker now, if any."""
    for pool in CLASSES:
        mine, others = (_alive_in(labels, alive, p) for p in (pool, other(pool)))
        if not others or pressure_s(mine or others) < laps.min_pending_s:
            continue
        if not mine:
            return _Demand(pool, f"no {pool} worker is alive")
        if laps.rebalance_policy == "pressure":
            busy, idle = pressure_s(mine), pressure_s(others)
            unit = " s of work queued"
        else:
            busy, idle = (num_pending(p, alive, labels) for p in (pool, other(pool)))
            unit = " prompts waiting"
        if busy > laps.laps_rebalance_ratio * idle:
            return _Demand(pool, f"{pool} {busy:.3g}, {other(pool)} {idle:.3g}{unit}")
    return None


def _members(labels: Mapping[str, LengthClass], pool: LengthClass) -> list[str]:
    return sorted(name for name, label in labels.items() if label == pool)


def _alive_in(
    labels: Mapping[str, LengthClass], alive: Sequence[WorkerSnapshot], pool: LengthClass
) -> list[WorkerSnapshot]:
    return [s for s in alive if labels[s.name] == pool]

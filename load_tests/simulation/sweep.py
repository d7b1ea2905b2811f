"""Policies against rates: one table, and the highest rate that each policy sustains."""

from collections.abc import Sequence
from dataclasses import dataclass

from load_tests.simulation.cluster import ClusterSpec
from load_tests.simulation.metrics import (
    CLASS_NAMES,
    ClassFigures,
    Limits,
    Sample,
    figures,
    good_share,
    is_sustained,
)
from load_tests.simulation.routing import Policy, PoolSizes
from load_tests.simulation.scenario import Job, JobResult, Load, run_jobs, with_policies

Choice = tuple[str, Policy]  # the queue in each worker, and who gets a request


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """What is compared on what."""

    cluster: ClusterSpec
    load: Load
    choices: Sequence[Choice]
    rates: Sequence[float | None]  # None = as recorded
    seeds: Sequence[int]
    limits: Limits
    num_processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One policy at one rate: all seeds together."""

    rate: float
    by_class: dict[str, ClassFigures]
    good_share: float
    is_sustained: bool
    has_decodes: bool  # whether tokens after the first were simulated
    pool_sizes: list[PoolSizes]  # of the first seed
    moves: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One policy at all rates, in ascending order."""

    choice: Choice
    points: list[Point]

    @property
    def name(self) -> str:
        queue, policy = self.choice
        return f"{queue} + {policy.value}"

    @property
    def goodput(self) -> float:
        """The highest rate up to which every rate that was tried is sustained; 0 = none."""
        goodput = 0.0
        for point in self.points:
            if not point.is_sustained:
                break
            goodput = point.rate
        return goodput


def sweep(spec: SweepSpec) -> list[Curve]:
    """Run all policies at all rates."""
    cells = [(choice, rate) for choice in spec.choices for rate in spec.rates]
    points = _run_points(spec, cells)
    curves = []
    for i, choice in enumerate(spec.choices):
        mine = points[i * len(spec.rates) : (i + 1) * len(spec.rates)]
        curves.append(Curve(choice=choice, points=sorted(mine, key=lambda p: p.rate)))
    return curves


def refine(spec: SweepSpec, curve: Curve, num_halvings: int) -> Curve:
    """Narrow the goodput down between the rates that were tried; without a bound above, double."""
    points = list(curve.points)
    low = curve.goodput
    high = next((p.rate for p in points if p.rate > low and not p.is_sustained), None)
    while high is None:
        (point,) = _run_points(spec, [(curve.choice, 2 * low)])
        points.append(point)
        low, high = (point.rate, None) if point.is_sustained else (low, point.rate)
    for _ in range(num_halvings):
        (point,) = _run_points(spec, [(curve.choice, (low + high) / 2)])
        points.append(point)
        low, high = (point.rate, high) if point.is_sustained else (low, point.rate)
    return Curve(choice=curve.choice, points=sorted(points, key=lambda p: p.rate))


def table(curves: Sequence[Curve]) -> list[tuple[str, ...]]:
    """Rows of text with a header; times in ms, shares in %."""
    rows: list[tuple[str, ...]] = [
        (
            *("queue + routing", "rate /s", "class", "requests", "TTFT p50", "p90", "p99"),
            *("late", "latency mean", "TPOT p99", "good", "sustained"),
        )
    ]
    for curve in curves:
        for point in curve.points:
            rows += [_row(curve, point, name) for name in CLASS_NAMES]
    return rows


def goodput_table(curves: Sequence[Curve]) -> list[tuple[str, ...]]:
    """The highest sustained rate of each policy, and against the last one."""
    last = curves[-1].goodput
    rows: list[tuple[str, ...]] = [("queue + routing", "goodput /s", "against the last")]
    for curve in curves:
        ratio = f"{curve.goodput / last:.2f}x" if last > 0 else ""
        rows.append((curve.name, f"{curve.goodput:.2f}", ratio))
    return rows


def _row(curve: Curve, point: Point, name: str) -> tuple[str, ...]:
    of_class = point.by_class[name]
    is_all = name == "all"
    return (
        curve.name,
        f"{point.rate:.4g}",
        name,
        str(of_class.num_requests),
        *(_ms(s) for s in (of_class.ttft_p50_s, of_class.ttft_p90_s, of_class.ttft_p99_s)),
        f"{100 * of_class.late_share:.2f}",
        _ms(of_class.latency_mean_s),
        _ms(of_class.tpot_p99_s) if point.has_decodes else "",
        f"{100 * point.good_share:.2f}" if is_all else "",
        ("yes" if point.is_sustained else "NO") if is_all else "",
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _run_points(spec: SweepSpec, cells: Sequence[tuple[Choice, float | None]]) -> list[Point]:
    jobs = [
        Job(spec=with_policies(spec.cluster, *choice), load=spec.load, rate=rate, seed=seed)
        for choice, rate in cells
        for seed in spec.seeds
    ]
    results = run_jobs(jobs, spec.num_processes)
    num_seeds = len(spec.seeds)
    return [
        _build_point(rate, results[i * num_seeds : (i + 1) * num_seeds], spec)
        for i, (_, rate) in enumerate(cells)
    ]


def _build_point(rate: float | None, results: Sequence[JobResult], spec: SweepSpec) -> Point:
    samples: list[Sample] = [result.sample for result in results]
    if rate is None:
        assert spec.load.trace is not None, f"{spec.load.name} has no rate of its own"
        rate = spec.load.trace.rate
    return Point(
        rate=rate,
        by_class={name: figures(samples, name, spec.limits) for name in CLASS_NAMES},
        good_share=good_share(samples, spec.limits),
        is_sustained=is_sustained(samples, spec.limits),
        has_decodes=spec.cluster.num_decode > 0 or spec.cluster.worker.keeps_decodes,
        pool_sizes=results[0].pool_sizes,
        moves=results[0].moves,
    )

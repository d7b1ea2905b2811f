"""What a mixed load came to: TTFT by class, TPOT, throughput, backlog, and what kept its limits.

A quantile is the value at rank int(q * n) of n sorted ones, as in the peer's results. Reads what
the peer printed; runs nothing.
"""

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from load_tests.mixed_load import LengthClass, Served
from load_tests.tables import Figure, at_most, render, render_rows

COLUMNS = {
    "short_ttft_p50_ms": "short TTFT p50",
    "short_ttft_p90_ms": "p90",
    "short_ttft_p99_ms": "p99",
    "long_ttft_p50_ms": "long TTFT p50",
    "long_ttft_p90_ms": "p90",
    "long_ttft_p99_ms": "p99",
    "tpot_p50_ms": "TPOT p50",
    "tpot_p99_ms": "p99",
}
# At most so many ms, or so many times the best peer's, by requests/s.
LIMITS_MS = {
    16.0: {"short_ttft_p50_ms": 20.0, "short_ttft_p90_ms": 45.0},
    24.0: {"short_ttft_p50_ms": 35.0, "short_ttft_p90_ms": 90.0},
}
LIMITS_OF_PEER = {"long_ttft_p99_ms": 1.2, "tpot_p99_ms": 1.0}

GROWTH = 1.5  # a backlog grows if it does by this factor, and by a request, between two quarters

_RESULT = "RESULT "

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request must keep to count as served well, in seconds."""

    short_ttft_s: float
    long_ttft_s: float
    tpot_s: float

    def are_kept(self, served: Served) -> bool:
        is_short = served.arrival.length_class == "short"
        limit_s = self.short_ttft_s if is_short else self.long_ttft_s
        return served.ttft_s <= limit_s and served.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load, served to its last token."""

    duration_s: float  # of its arrivals
    seed: int
    served: Sequence[Served]

    def mean_backlog(self, from_s: float, to_s: float) -> float:
        """Requests that had arrived and not ended, on average over a stretch of time."""
        stays = ((max(s.arrival.at_s, from_s), min(s.last_s, to_s)) for s in self.served)
        return sum(max(0.0, end_s - start_s) for start_s, end_s in stays) / (to_s - from_s)

    @property
    def backlog(self) -> int:
        """Requests that had not ended when the last one had arrived."""
        return sum(s.last_s > self.duration_s for s in self.served)

    @property
    def quarters(self) -> tuple[float, float]:
        """The mean backlog of the second quarter of the arrivals, and of the last."""
        quarter_s = self.duration_s / 4
        return (
            self.mean_backlog(quarter_s, 2 * quarter_s),
            self.mean_backlog(3 * quarter_s, self.duration_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One variant at one rate: all runs of it, pooled."""

    variant: str
    rate: float  # requests/s asked for
    runs: Sequence[Run]

    @property
    def served(self) -> list[Served]:
        return [one for run in self.runs for one in run.served]

    @property
    def numbers(self) -> dict[str, float]:
        """Quantiles by the names of COLUMNS, in ms."""
        return quantiles_ms(self.served)

    @property
    def output_tokens_per_s(self) -> float:
        """From each run's start to its last token."""
        seconds = sum(max(one.last_s for one in run.served) for run in self.runs)
        return sum(one.num_tokens for one in self.served) / seconds

    @property
    def prompt_tokens_per_s(self) -> float:
        """Of the arrivals as drawn. Few of them stray by percents from what the rate says."""
        num_tokens = sum(one.arrival.num_tokens for one in self.served)
        return num_tokens / sum(run.duration_s for run in self.runs)

    @property
    def is_growing(self) -> bool:
        """Whether the backlog grew while requests arrived, over all runs."""
        early, late = (sum(parts) for parts in zip(*(r.quarters for r in self.runs), strict=True))
        return bool(late > GROWTH * early + len(self.runs))

    @property
    def backlog(self) -> float:
        """At the end of the arrivals, on average over the runs."""
        return sum(run.backlog for run in self.runs) / len(self.runs)

    def share_within(self, limits: Limits) -> float:
        served = self.served
        return sum(map(limits.are_kept, served)) / len(served)

    def to_builtins(self, limits: Limits | None) -> dict[str, object]:
        """Everything, pooled and by seed, for a program to read."""
        return {
            "variant": self.variant,
            "rate": self.rate,
            "requests": len(self.served),
            **self.numbers,
            "prompt_tokens_per_s": round(self.prompt_tokens_per_s, 1),
            "output_tokens_per_s": round(self.output_tokens_per_s, 1),
            "backlog": self.backlog,
            "is_growing": self.is_growing,
            "share_within_limits": None if limits is None else self.share_within(limits),
            "by_seed": {run.seed: quantiles_ms(run.served) for run in self.runs},
        }


def quantile(values: Iterable[float], q: float) -> float:
    """The value at rank int(q * n); NaN of none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(q * len(ranked)))] if ranked else math.nan


def quantiles_ms(served: Sequence[Served]) -> dict[str, float]:
    """By the names of COLUMNS; what has no value is left out."""
    classes: tuple[LengthClass, ...] = ("short", "long")
    values_s = {
        f"{name}_ttft": [one.ttft_s for one in served if one.arrival.length_class == name]
        for name in classes
    }
    values_s["tpot"] = [one.tpot_s for one in served]
    numbers = {}
    for key in COLUMNS:
        name, _, q = key.removesuffix("_ms").rpartition("_p")
        if values_s[name]:
            numbers[key] = round(1e3 * quantile(values_s[name], int(q) / 100), 2)
    return numbers


def limits_from_text(text: str) -> Limits:
    """`100,1000,50` in ms: TTFT of short prompts, of long ones, TPOT.

    Raises argparse.ArgumentTypeError for anything else.
    """
    parts = text.split(",")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text}: not three times in ms, as in 100,1000,50")
    short_s, long_s, tpot_s = (float(part) / 1e3 for part in parts)
    return Limits(short_ttft_s=short_s, long_ttft_s=long_s, tpot_s=tpot_s)


def read_peer_tables(paths: Sequence[Path]) -> list[tuple[str, dict[str, float]]]:
    """Every RESULT line of the files, with the file's name without its suffix.

    Raises ValueError for a file without one.
    """
    tables = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [line.removeprefix(_RESULT) for line in lines if line.startswith(_RESULT)]
        if not found:
            raise ValueError(f"{path}: no line starts with '{_RESULT}'")
        tables += [(path.stem, json.loads(line)) for line in found]
    return tables


def render_points(
    points: Sequence[Point],
    peers: Sequence[tuple[str, Numbers]] = (),
    limits: Limits | None = None,
) -> str:
    """A table in Markdown, by rate; peers' lines (by name, with their `rate`) come first."""
    header = ("requests/s", "engine", "requests", *COLUMNS.values())
    rows = [(*header, "tokens/s", "backlog", "grows", "within limits")]
    theirs = [(numbers["rate"], _peer_cells(name, numbers)) for name, numbers in peers]
    ours = [(point.rate, _cells(point, limits)) for point in points]
    rates = dict.fromkeys(rate for rate, _ in ours)
    for rate in rates:
        rows += [cells for at, cells in (*theirs, *ours) if at == rate]
    return render_rows(rows)


def target_figures(
    points: Sequence[Point], peers: Sequence[tuple[str, Numbers]] = ()
) -> list[Figure]:
    """What is asked at each rate, and whether it was met."""
    figures = []
    for point in points:
        wanted = dict(LIMITS_MS.get(point.rate, {}))
        for key, factor in LIMITS_OF_PEER.items():
            theirs = [numbers[key] for _, numbers in peers if numbers["rate"] == point.rate]
            if theirs:
                wanted[key] = round(factor * min(theirs), 2)
        name = f"{point.rate:g}/s, {point.variant}"
        figures += [
            at_most(f"{name}: {key.removesuffix('_ms')}", point.numbers[key], "ms", most_ms)
            for key, most_ms in wanted.items()
        ]
    return figures


def render_report(
    points: Sequence[Point], peers: Sequence[tuple[str, Numbers]], limits: Limits | None
) -> str:
    """The points, and what was asked of them; nothing where there are none."""
    if not points:
        return ""
    figures = target_figures(points, peers)
    parts = [render_points(points, peers, limits)] + ([render(figures)] if figures else [])
    return "\n\n".join(parts)


def _cells(point: Point, limits: Limits | None) -> tuple[str, ...]:
    return (
        f"{point.rate:g}",
        point.variant,
        str(len(point.served)),
        *_number_cells(point.numbers),
        f"{point.output_tokens_per_s:,.0f}",
        f"{point.backlog:.1f}",
        "YES" if point.is_growing else "no",
        "" if limits is None else f"{point.share_within(limits):.1%}",
    )


def _peer_cells(name: str, numbers: Numbers) -> tuple[str, ...]:
    num_requests = f"{numbers['requests']:g}" if "requests" in numbers else ""
    cells = (f"{numbers['rate']:g}", name, num_requests, *_number_cells(numbers))
    return (*cells, "", "", "", "")


def _number_cells(numbers: Numbers) -> list[str]:
    return [f"{numbers[key]:.1f}" if key in numbers else "" for key in COLUMNS]

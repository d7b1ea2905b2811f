"""Mixed loads at several rates within a time budget, and the search for the highest good rate.

Serves nothing itself: whoever drives a load, in process or over HTTP, is a function.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from load_tests.lab.one_batch import BatchFigure, render_batches
from load_tests.mixed_load import MixedLoad, OverloadError, Served
from load_tests.mixed_report import Limits, Numbers, Point, Run, render_report

GOOD_SHARE = 0.9  # of requests within the limits
SEARCH_STEP = 0.05  # the highest good rate is known to within this share of it
SEARCH_STRIDE = 1.25  # from the highest good rate up, or from the lowest bad one down
GIVE_UP_SHARE = 0.1  # of the highest bad rate: below that no good one is looked for
DRAIN_SHARE = 1.15  # of a run's arrivals, until the last token

Serve = Callable[[MixedLoad], list[Served]]


class Budget:
    """How much of the bench's time is left."""

    def __init__(self, total_s: float, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._end_s = now_s() + total_s
        self.left_out: list[str] = []

    @property
    def left_s(self) -> float:
        return self._end_s - self._now_s()

    def allows(self, what: str, seconds: float) -> bool:
        """Whether `what` may still run; if not, it is remembered as left out."""
        if self._now_s() + seconds <= self._end_s:
            return True
        self.left_out.append(what)
        return False


@dataclass(slots=True, kw_only=True)
class Results:
    """All that was measured so far."""

    limits: Limits | None
    peers: Sequence[tuple[str, Numbers]]
    points: list[Point] = field(default_factory=list)
    best_rates: dict[str, float | None] = field(default_factory=dict)  # by variant
    # By variant and rate: what the server said when it refused requests for want of capacity.
    refused: dict[str, dict[float, str]] = field(default_factory=dict)
    costs: dict[str, object] = field(default_factory=dict)  # fitted, by variant
    # Likewise, and by rate: as they were when that rate had been measured.
    costs_by_rate: dict[str, dict[float, object]] = field(default_factory=dict)
    batches: list[BatchFigure] = field(default_factory=list)
    about: dict[str, object] = field(default_factory=dict)

    def render(self) -> str:
        """Tables in Markdown, then what a reader must know of them."""
        parts = [render_report(self.points, self.peers, self.limits)]
        if self.best_rates:
            lines = (f"- {v}: {self._tell_best(v, r)}" for v, r in self.best_rates.items())
            parts.append(
                f"Highest rate with {GOOD_SHARE:.0%} within limits:\n\n" + "\n".join(lines)
            )
        parts += [
            f"{variant} at {rate:.3g}/s: {reason}"
            for variant, reasons in self.refused.items()
            for rate, reason in reasons.items()
        ]
        parts += [render_batches(self.batches)] if self.batches else []
        parts.append("\n".join(f"{name}: {value}" for name, value in self.about.items()))
        parts += [f"step costs, {name}: {json.dumps(costs)}" for name, costs in self.costs.items()]
        return "\n\n".join(part for part in parts if part)

    def _tell_best(self, variant: str, rate: float | None) -> str:
        is_cut = variant in self.cut_searches
        if rate is None:
            return "none yet: the search was cut" if is_cut else "none"
        point = next(p for p in self.points if (p.variant, p.rate) == (variant, rate))
        text = f"{rate:.3g}/s ({point.prompt_tokens_per_s:,.0f} prompt tokens/s)"
        return f"{text} or more: the search was cut" if is_cut else text

    def good_rates(self, variant: str) -> dict[float, bool]:
        """Whether each rate that was measured is good; one with refusals is not."""
        limits = self.limits
        assert limits is not None, "a good rate is one within limits"
        measured = {p.rate: is_good(p, limits) for p in self.points if p.variant == variant}
        return measured | dict.fromkeys(self.refused.get(variant, {}), False)

    @property
    def cut_searches(self) -> list[str]:
        """Variants whose highest good rate may be another: the next rate was not measured."""
        rates = ((variant, self.good_rates(variant)) for variant in self.best_rates)
        return [v for v, good in rates if good and next_rate(good, SEARCH_STEP) is not None]

    def to_json(self) -> str:
        return json.dumps(
            {
                "about": self.about,
                "limits": None if self.limits is None else asdict(self.limits),
                "points": [point.to_builtins(self.limits) for point in self.points],
                "peers": [{"name": name, **numbers} for name, numbers in self.peers],
                "best_rates": self.best_rates,
                "refused": self.refused,
                "cut_searches": self.cut_searches,
                "step_costs": self.costs,
                "step_costs_by_rate": self.costs_by_rate,
                "one_batch": [figure.to_builtins() for figure in self.batches],
            }
        )


class Sweep:
    """Loads of several rates, one variant at a time, as far as time allows."""

    def __init__(
        self,
        results: Results,
        budget: Budget,
        loads: Sequence[MixedLoad],
        path: Path | None,
        after: Callable[[Point], None] = lambda point: None,
        stride: float = SEARCH_STRIDE,
    ) -> None:
        """`loads`: one a seed, at a rate that is replaced; `path`: where results are kept.

        after: is told each point once it was measured. stride: of a search, above 1, until it has
        a good and a bad rate.
        """
        self._stride = stride
        self._after = after
        self._results = results
        self._budget = budget
        self._loads = loads
        self._path = path

    def measure(
        self, variant: str, rate: float, serve: Serve, seeds: Sequence[int] | None = None
    ) -> Point | None:
        """All seeds (or those given) that time allows, pooled.

        None if it allows none, or if requests are refused for want of capacity, which is kept.
        """
        runs = []
        for load in self._loads:
            if seeds is not None and load.seed not in seeds:
                continue
            what = f"{variant} at {rate:.3g}/s, seed {load.seed}"
            if not self._budget.allows(what, DRAIN_SHARE * load.duration_s):
                continue
            try:
                served = serve(replace(load, rate=rate))
            except OverloadError as refusal:
                note(f"{what}: {refusal}")
                self._results.refused.setdefault(variant, {})[rate] = str(refusal)
                self.save()
                return None
            runs.append(Run(duration_s=load.duration_s, seed=load.seed, served=served))
            note(f"{what}: {Point(variant=variant, rate=rate, runs=runs[-1:]).numbers}")
        if not runs:
            return None
        point = Point(variant=variant, rate=rate, runs=runs)
        self._results.points.append(point)
        self.save()
        self._after(point)
        return point

    def search(self, variant: str, serve: Serve, seeds: Sequence[int] | None = None) -> None:
        """Narrow down the highest good rate, from the rates of `variant` that were measured."""
        while self.search_once(variant, serve, seeds):
            pass

    def search_once(self, variant: str, serve: Serve, seeds: Sequence[int] | None = None) -> bool:
        """Measure the next rate of a search; whether there was one, and time for it."""
        good = self._results.good_rates(variant)
        rate = next_rate(good, SEARCH_STEP, self._stride) if good else None
        if rate is not None:
            self.measure(variant, rate, serve, seeds)
        known = self._results.good_rates(variant)
        self._results.best_rates[variant] = highest_good(known)
        self.save()
        return rate in known

    def save(self) -> None:
        """Write what is known by now: a run that is cut short has not been for nothing."""
        self._results.about["left_out"] = self._budget.left_out
        if self._path is not None:
            self._path.write_text(self._results.to_json(), encoding="utf-8")


def is_good(point: Point, limits: Limits) -> bool:
    """Enough requests within limits, and a backlog that does not grow."""
    return point.share_within(limits) >= GOOD_SHARE and not point.is_growing


def next_rate(
    good: Mapping[float, bool], step: float, stride: float = SEARCH_STRIDE
) -> float | None:
    """Where to look next for the highest good rate; None when it is known to within `step`.

    Also None when no rate was good down to a small share of the highest.
    """
    highest = highest_good(good)
    bad = [rate for rate, is_rate_good in good.items() if not is_rate_good]
    if highest is None:
        return min(bad) / stride if min(bad) > GIVE_UP_SHARE * max(bad) else None
    if not bad:
        return highest * stride
    return math.sqrt(highest * min(bad)) if min(bad) > highest * (1 + step) else None


def note(text: str) -> None:
    """A line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def highest_good(good: Mapping[float, bool]) -> float | None:
    """The highest good rate below every bad one."""
    first_bad = min(
        (rate for rate, is_rate_good in good.items() if not is_rate_good), default=math.inf
    )
    return max((rate for rate in good if rate < first_bad), default=None)

"""What runs came to: vLLM's names where its `bench serve` has one, and the same by prompt class.

    TTFT  sending to first token     TPOT  a token after the first, on average over a request
    ITL   between two events that bring tokens    E2E(L)  sending to last token    all in ms
    completed, failed, cancelled,
    stopped                          add up to num_prompts, the arrivals
    request_goodput                  completed requests/s that kept the limits of their class
    slo_share                        of those that were not cancelled by their own client; a request
                                     that failed or was refused has missed its limits

Quantiles are interpolated linearly (numpy's default, as there). Only completed requests count in
times. Runs of several seeds are pooled: times together, and counts over the sum of their durations.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from load_tests.http_load.records import Header, Outcome, Record
from load_tests.http_load.scenario import LENGTH_CLASSES, Slo

Number = float | int | None
Summary = dict[str, Number]

GOOD_SHARE = 0.9  # a rate is good while so many requests keep their limits
MAX_LAG_MS = 20.0  # p99; a client that is later than this measures itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load at one rate with one seed."""

    header: Header
    records: Sequence[Record]

    @property
    def duration_s(self) -> float:
        """From the start of the load to the end of its last request."""
        return max((record.ended_s for record in self.records), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Point:
    """All runs at one rate."""

    rate: float  # requests/s asked for
    runs: Sequence[Run]
    slo: Slo

    @property
    def records(self) -> list[Record]:
        return [record for run in self.runs for record in run.records]

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.runs, self.slo)

    @cached_property
    def by_class(self) -> dict[str, Summary]:
        return {
            name: summarize(
                [
                    Run(
                        header=run.header,
                        records=[r for r in run.records if r.length_class == name],
                    )
                    for run in self.runs
                ],
                self.slo,
                duration_s=sum(run.duration_s for run in self.runs),
            )
            for name in LENGTH_CLASSES
        }


def is_within(record: Record, slo: Slo) -> bool:
    """Whether a request was completed within all limits of its class."""
    limits = slo.of(record.length_class)
    pairs = (
        (record.ttft_s, limits.ttft_ms),
        (record.tpot_s, limits.tpot_ms),  # a single token has no time after the first
        (record.e2e_s, limits.e2e_ms),
    )
    return record.outcome is Outcome.COMPLETED and all(
        value_s is None or limit_ms is None or 1e3 * value_s <= limit_ms
        for value_s, limit_ms in pairs
    )


def highest_good_rate(points: Sequence[Point]) -> float | None:
    """The highest rate up to which every rate is good; None if the lowest is not."""
    best = None
    for point in sorted(points, key=lambda point: point.rate):
        share = point.summary["slo_share"]
        if share is None or share < GOOD_SHARE:
            break
        best = point.rate
    return best


def summarize(runs: Sequence[Run], slo: Slo, duration_s: float | None = None) -> Summary:
    """Everything about some runs; `duration_s` where theirs is not told by their records."""
    records = [record for run in runs for record in run.records]
    total_s = sum(run.duration_s for run in runs) if duration_s is None else duration_s
    completed = [r for r in records if r.outcome is Outcome.COMPLETED]
    judged = [r for r in records if r.outcome in (Outcome.COMPLETED, Outcome.FAILED)]
    num_good = sum(is_within(record, slo) for record in judged)
    input_tokens = sum(r.num_prompt_tokens for r in completed)
    output_tokens = sum(r.num_output_tokens for r in completed)
    lags_s = [lag for r in records if (lag := r.lag_s) is not None]
    return {
        "num_prompts": len(records),
        "duration": total_s,
        "completed": len(completed),
        "failed": sum(r.outcome is Outcome.FAILED for r in records),
        "stopped": sum(r.outcome is Outcome.STOPPED for r in records),
        "cancelled": sum(r.outcome is Outcome.CANCELLED for r in records),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _per(len(completed), total_s),
        "request_goodput": _per(num_good, total_s),
        "output_throughput": _per(output_tokens, total_s),
        "total_token_throughput": _per(input_tokens + output_tokens, total_s),
        "max_output_tokens_per_s": max((_peak_tokens_per_s(run) for run in runs), default=0),
        "max_concurrent_requests": max((_peak_in_flight(run) for run in runs), default=0),
        **_times("ttft", (r.ttft_s for r in completed)),
        **_times("tpot", (r.tpot_s for r in completed)),
        **_times("itl", (gap_s for r in completed for gap_s in r.gaps_s)),
        **_times("e2el", (r.e2e_s for r in completed)),
        "slo_share": num_good / len(judged) if judged else None,
        "p99_client_lag_ms": quantile_ms(lags_s, 0.99),
    }


def in_flight(run: Run) -> tuple[list[float], list[int]]:
    """Seconds of the load, and how many requests were under way from then on."""
    changes = sorted(
        change
        for record in run.records
        if record.sent_s is not None and record.ended_s > record.sent_s
        for change in ((record.sent_s, 1), (record.ended_s, -1))
    )
    steps = np.cumsum([step for _, step in changes], dtype=np.int64)
    return [at_s for at_s, _ in changes], [int(step) for step in steps]


def quantile_ms(values_s: Sequence[float], q: float) -> float | None:
    """None of none."""
    return 1e3 * float(np.quantile(values_s, q)) if values_s else None


def _times(name: str, values_s: Iterable[float | None]) -> Summary:
    known_s = [value for value in values_s if value is not None]
    return {
        f"mean_{name}_ms": 1e3 * float(np.mean(known_s)) if known_s else None,
        f"median_{name}_ms": quantile_ms(known_s, 0.5),
        f"std_{name}_ms": 1e3 * float(np.std(known_s)) if known_s else None,
        f"p90_{name}_ms": quantile_ms(known_s, 0.9),
        f"p99_{name}_ms": quantile_ms(known_s, 0.99),
    }


def _per(amount: float, total_s: float) -> float:
    return amount / total_s if total_s else 0.0


def _peak_tokens_per_s(run: Run) -> int:
    """Of the fullest second."""
    by_second: dict[int, int] = {}
    for record in run.records:
        for at_s, num_tokens in zip(record.chunk_s, record.chunk_tokens, strict=True):
            by_second[math.floor(at_s)] = by_second.get(math.floor(at_s), 0) + num_tokens
    return max(by_second.values(), default=0)


def _peak_in_flight(run: Run) -> int:
    return max(in_flight(run)[1], default=0)

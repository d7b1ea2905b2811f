"""What a simulated run meant for its requests: first tokens by class, limits kept, goodput.

A request is short by what was computed of it, as the workers' queues see it: if that took, alone,
at most what `threshold` tokens take without a history. Good means inside every limit. A rate is
sustained if 90 % of its requests are good and in neither class the last quarter waits longer than
the second, unless 90 % of it are good: else a longer run would be worse without end. By class,
because whoever serves short prompts first can hide a backlog of long ones behind a share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.cost_model import StepCosts
from engine.length_class import classify
from load_tests.simulation.cluster import Served
from load_tests.simulation.workload import Floats

CLASS_NAMES = ("short", "long", "all")
GOOD_SHARE = 0.9
MIN_QUARTER = 8  # requests; the median of fewer says nothing
GROWTH = 1.5  # of the median first token, from the second quarter to the last: a backlog that grows

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request is promised; None = nothing."""

    ttft_s: float = 0.4
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run's requests, in the order of arrival; arrays [requests]."""

    ttft_s: Floats
    latency_s: Floats
    tpot_s: Floats
    is_short: Flags
    duration_s: float  # of the arrivals

    def is_good(self, limits: Limits) -> Flags:
        """Which requests are inside every limit [requests]."""
        is_good: Flags = self.ttft_s <= limits.ttft_s
        if limits.tpot_s is not None:
            is_good &= self.tpot_s <= limits.tpot_s
        return is_good

    def of_class(self, name: str) -> Flags:
        """Which requests are of a class in `CLASS_NAMES` [requests]."""
        if name == "all":
            return np.ones(len(self.ttft_s), dtype=np.bool_)
        return self.is_short if name == "short" else ~self.is_short


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFigures:
    """Of one class; without requests all but their number is nan."""

    num_requests: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    late_share: float  # first token after its limit
    latency_mean_s: float
    tpot_p99_s: float


def build_sample(served: Served, *, threshold: int, costs: StepCosts) -> Sample:
    """`threshold` in tokens."""
    num_new = served.workload.prompt_tokens - served.cached_tokens
    is_short = num_new <= threshold
    for i in np.flatnonzero(served.cached_tokens):
        new, cached = int(num_new[i]), int(served.cached_tokens[i])
        is_short[i] = classify(new, cached, threshold, costs) == "short"
    return Sample(
        ttft_s=served.ttft_s,
        latency_s=served.latency_s,
        tpot_s=served.tpot_s,
        is_short=is_short,
        duration_s=served.workload.duration_s,
    )


def figures(samples: Sequence[Sample], name: str, limits: Limits) -> ClassFigures:
    """Of a class in `CLASS_NAMES`, all runs together."""
    picked = [sample.of_class(name) for sample in samples]
    pairs = list(zip(samples, picked, strict=True))
    ttft_s = np.concatenate([sample.ttft_s[mask] for sample, mask in pairs])
    latency_s = np.concatenate([sample.latency_s[mask] for sample, mask in pairs])
    tpot_s = np.concatenate([sample.tpot_s[mask] for sample, mask in pairs])
    if len(ttft_s) == 0:
        ttft_s = latency_s = tpot_s = np.array([np.nan])
        num_requests = 0
    else:
        num_requests = len(ttft_s)
    p50_s, p90_s, p99_s = np.percentile(ttft_s, [50, 90, 99]).tolist()
    return ClassFigures(
        num_requests=num_requests,
        ttft_p50_s=p50_s,
        ttft_p90_s=p90_s,
        ttft_p99_s=p99_s,
        late_share=float(np.mean(ttft_s > limits.ttft_s)) if num_requests else float("nan"),
        latency_mean_s=float(np.mean(latency_s)),
        tpot_p99_s=float(np.percentile(tpot_s, 99)),
    )


def good_share(samples: Sequence[Sample], limits: Limits) -> float:
    """Of the requests of all runs."""
    return float(np.mean(np.concatenate([sample.is_good(limits) for sample in samples])))


def is_sustained(samples: Sequence[Sample], limits: Limits) -> bool:
    """Whether such a rate is served within the limits for as long as one likes."""
    return good_share(samples, limits) >= GOOD_SHARE and not any(
        _has_growing_backlog(sample, name, limits) for sample in samples for name in CLASS_NAMES
    )


def _has_growing_backlog(sample: Sample, name: str, limits: Limits) -> bool:
    mask = sample.of_class(name)
    ttft_s, is_good = sample.ttft_s[mask], sample.is_good(limits)[mask]
    quarter = len(ttft_s) // 4
    if quarter < MIN_QUARTER:
        return False
    early_s = float(np.median(ttft_s[quarter : 2 * quarter]))
    late_s = float(np.median(ttft_s[-quarter:]))
    is_late_good = float(np.mean(is_good[-quarter:])) >= GOOD_SHARE
    return late_s > GROWTH * early_s and not is_late_good

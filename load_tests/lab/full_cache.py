"""Short prompts beside long answers that fill the KV cache: the load, its figures, a virtual run.

The long answers are all asked for at the start; short prompts arrive until the last of them ends.
Knows no engine: `bench_full_cache` runs the same load on one.
"""

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from load_tests.simulation.real_worker import RealWorker
from load_tests.simulation.worker import WorkerSpec

MAX_VIRTUAL_S = 36_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FullCacheLoad:
    """`num_long` 0: the short prompts alone, for `alone_s`."""

    num_long: int = 40
    num_long_tokens: int = 1500  # of each answer
    num_short_tokens: int = 16
    num_prompt_tokens: int = 20  # of both
    rate: float = 2.0  # short prompts per second, Poisson
    alone_s: float = 30.0
    seed: int = 7

    def arrivals_s(self) -> Iterator[float]:
        """Of short prompts, without end."""
        rng = random.Random(self.seed)
        at_s = 0.0
        while True:
            at_s += rng.expovariate(self.rate)
            yield at_s

    def needed_tokens(self, num_short: int) -> int:
        """Computed if nothing is computed twice and no prompt shares anything."""
        num_long = self.num_long * (self.num_prompt_tokens + self.num_long_tokens - 1)
        return num_long + num_short * (self.num_prompt_tokens + self.num_short_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullCacheResult:
    """What one run took. Seconds; `full` = from the first preemption on, all if there was none."""

    first_token_s: list[float]  # of short prompts that came while the cache was full
    num_short: int  # all of them
    long_end_s: list[float]  # since the start
    num_preemptions: int
    num_recomputed_tokens: int

    def quantile_s(self, share: float) -> float:
        """Of the short first tokens. Raises IndexError if there are none."""
        ordered = sorted(self.first_token_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def cells(self) -> list[str]:
        """A row of a table with the columns of `HEADER`."""
        quantiles = [f"{1e3 * self.quantile_s(share):.0f}" for share in (0.5, 0.9, 1.0)]
        total = ["-", "-"]
        if self.long_end_s:
            total = [f"{max(self.long_end_s):.1f}", f"{statistics.fmean(self.long_end_s):.1f}"]
        return [
            f"{len(self.first_token_s)} of {self.num_short}",
            *quantiles,
            *total,
            str(self.num_preemptions),
            str(self.num_recomputed_tokens),
        ]


HEADER = [
    "run",
    "short while full",
    "p50 ms",
    "p90 ms",
    "max ms",
    "long: last end s",
    "mean end s",
    "preemptions",
    "tokens recomputed",
]


@dataclass(slots=True)
class Timeline:
    """Collects a run's times as they come; seconds since the start."""

    load: FullCacheLoad
    arrived_s: list[float]
    first_s: dict[int, float]  # by number of the short prompt
    long_end_s: list[float]
    full_since_s: float | None = None

    @classmethod
    def of(cls, load: FullCacheLoad) -> "Timeline":
        return cls(load, [], {}, [])

    def is_over(self, now_s: float) -> bool:
        """Whether no more short prompts come."""
        if self.load.num_long == 0:
            return now_s > self.load.alone_s
        return len(self.long_end_s) == self.load.num_long

    def result(self, num_preemptions: int, num_computed_tokens: int) -> FullCacheResult:
        since_s = self.full_since_s or 0.0
        num_short = len(self.arrived_s)
        assert len(self.first_s) == num_short, f"{len(self.first_s)} of {num_short} were answered"
        return FullCacheResult(
            first_token_s=[
                self.first_s[i] - at_s for i, at_s in enumerate(self.arrived_s) if at_s >= since_s
            ],
            num_short=num_short,
            long_end_s=self.long_end_s,
            num_preemptions=num_preemptions,
            num_recomputed_tokens=num_computed_tokens - self.load.needed_tokens(num_short),
        )


def run_virtual(load: FullCacheLoad, spec: WorkerSpec) -> FullCacheResult:
    """The engine's scheduler on a virtual clock; `spec` must keep its decodes."""
    assert spec.keeps_decodes, "the answers are made where the prompts are computed"
    worker, timeline = RealWorker(spec), Timeline.of(load)
    for i in range(load.num_long):
        worker.add(_request(load, "long", i, load.num_long_tokens, 0.0), 0.0)
    arrivals = load.arrivals_s()
    next_s = next(arrivals)
    now_s = 0.0
    while not timeline.is_over(now_s) or worker.next_plan_s < MAX_VIRTUAL_S:
        if next_s <= worker.next_plan_s and not timeline.is_over(next_s):
            now_s, number = next_s, len(timeline.arrived_s)
            worker.add(_request(load, "short", number, load.num_short_tokens, now_s), now_s)
            timeline.arrived_s.append(now_s)
            next_s = next(arrivals)
            continue
        if worker.next_plan_s > MAX_VIRTUAL_S:
            break
        now_s = worker.next_plan_s
        outcome = worker.plan(now_s)
        for request, at_s in outcome.first_tokens:
            if request.ingress_id == "short":
                timeline.first_s[int(request.key.request_id)] = at_s
        timeline.long_end_s += [s for r, s in outcome.finished if r.ingress_id == "long"]
        if timeline.full_since_s is None and worker.num_preemptions > 0:
            timeline.full_since_s = now_s
    return timeline.result(worker.num_preemptions, worker.num_step_tokens)


def _request(load: FullCacheLoad, kind: str, number: int, num_tokens: int, now_s: float) -> Request:
    return Request(
        spec=RequestSpec(params=SamplingParams(max_tokens=num_tokens, ignore_eos=True)),
        key=RequestKey(str(number), child=int(kind == "long")),
        ingress_id=kind,
        tokens=[1] * load.num_prompt_tokens,
        num_prompt_tokens=load.num_prompt_tokens,
        arrival_s=now_s,
    )

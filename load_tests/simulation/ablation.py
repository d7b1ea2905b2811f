"""What each part of length-aware scheduling pays on one simulated worker: queue x mix x window.

    python -m load_tests.simulation.ablation
    python -m load_tests.simulation.ablation --set max_step_ms=25 --seeds 5

    traffic   `online` mixes at two rates; 300 short prompts a second for one second of ten, over a
              quiet mix; and mixes of five shares of short prompts, Poisson and bursty, at rates
              that keep the worker as busy with prompts
    worker    unified, with 64 tokens out, or one that only prefills: there it can be idle while
              requests are here, and only an idle one has a window

Every variant gets the same requests. Windows are tried where they can matter: on the first three.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from engine.cost_model import PRIOR
from load_tests.simulation.cluster import ClusterSpec, serve
from load_tests.simulation.metrics import Limits, Sample, build_sample, figures
from load_tests.simulation.routing import Policy
from load_tests.simulation.scenario import ONLINE_SHORT_SHARE, build_laps
from load_tests.simulation.worker import WorkerSpec
from load_tests.simulation.workload import Mix, Workload, drawn, recorded
from load_tests.tables import render_rows

RATES = (16.0, 24.0)  # requests/s
SHORT_SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)
BURSTY_CV = 3.0  # of the gaps
BUSY_SHARE = 0.6  # of the time, with prompts alone, in the mixes of different shares
QUIET_RATE = 6.0  # requests/s beside the bursts
BURST_RATE, BURST_S, BURST_EVERY_S = 300.0, 1.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to choose prompts."""

    queue: str
    mix: str = "exclusive"
    window: str = "none"

    @property
    def label(self) -> str:
        if self.queue != "laps":
            return self.queue
        return f"laps, {self.mix}" + ("" if self.window == "none" else f", {self.window} window")

    def worker(self, settings: Sequence[str], *, is_unified: bool) -> WorkerSpec:
        """`settings` as KEY=VALUE; raises msgspec.ValidationError for what the config refuses."""
        laps = build_laps([f"mix={self.mix}", f"window={self.window}", *settings])
        return WorkerSpec(laps=laps, keeps_decodes=is_unified, predicts=False).with_queue(
            self.queue
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What arrives, and at which kind of worker."""

    name: str
    is_unified: bool
    draw: Callable[[int], Workload]  # of a seed
    variants: Sequence[Variant]


FCFS = Variant(queue="fcfs")
MIXES = [Variant(queue="laps", mix=mix) for mix in ("exclusive", "fill")]
WITH_WINDOWS = [
    Variant(queue="laps", mix=mix, window=window)
    for mix, window in product(("exclusive", "fill"), ("none", "adaptive", "fixed"))
]


def all_traffic(duration_s: float) -> Iterator[Traffic]:
    """In the order of the table."""
    for is_unified, rate in product((True, False), RATES):
        yield Traffic(
            name=f"{rate:g}/s, {ONLINE_SHORT_SHARE:.0%} short",
            is_unified=is_unified,
            draw=_Draw(short_share=ONLINE_SHORT_SHARE, rate=rate, duration_s=duration_s),
            variants=[FCFS, *WITH_WINDOWS],
        )
    for is_unified in (True, False):
        yield Traffic(
            name=f"{QUIET_RATE:g}/s with bursts of {BURST_RATE:g} short/s",
            is_unified=is_unified,
            draw=lambda seed: draw_bursts(seed, duration_s),
            variants=[FCFS, *WITH_WINDOWS],
        )
    for cv, share in product((1.0, BURSTY_CV), SHORT_SHARES):
        rate = busy_rate(share)
        yield Traffic(
            name=f"{rate:.3g}/s, {share:.0%} short, {'Poisson' if cv == 1 else 'bursty'}",
            is_unified=True,
            draw=_Draw(short_share=share, rate=rate, duration_s=duration_s, cv=cv),
            variants=[FCFS, *MIXES],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    short_share: float
    rate: float
    duration_s: float
    cv: float = 1.0

    def __call__(self, seed: int) -> Workload:
        return drawn(
            "mix",
            Mix(self.short_share),
            rate=self.rate,
            num_requests=max(1, round(self.rate * self.duration_s)),
            seed=seed,
            cv=self.cv,
        )


def draw_bursts(seed: int, duration_s: float) -> Workload:
    """The quiet mix of a seed, and short prompts in bursts over it."""
    quiet = _Draw(short_share=ONLINE_SHORT_SHARE, rate=QUIET_RATE, duration_s=duration_s)(seed)
    burst = _Draw(short_share=1.0, rate=BURST_RATE, duration_s=BURST_S)
    rows = _rows(quiet, 0.0)
    for start_s in np.arange(BURST_EVERY_S / 2, duration_s, BURST_EVERY_S).tolist():
        rows += _rows(burst(int(1e6 * (seed + 1) + start_s)), start_s)
    return recorded("bursts", rows)


def busy_rate(short_share: float) -> float:
    """Requests/s whose prompts take `BUSY_SHARE` of a device's time, shared floors left out."""
    some = _Draw(short_share=short_share, rate=1.0, duration_s=20_000.0)(0)
    seconds = [PRIOR.seconds(int(n), 0) - PRIOR.floor_s for n in some.prompt_tokens]
    return BUSY_SHARE / float(np.mean(seconds))


def run(
    traffic: Traffic, variant: Variant, settings: Sequence[str], num_seeds: int
) -> list[Sample]:
    """One sample a seed."""
    worker = variant.worker(settings, is_unified=traffic.is_unified)
    cluster = ClusterSpec(worker=worker, policy=Policy.ROUND_ROBIN)
    threshold = worker.laps.laps_length_threshold
    return [
        build_sample(serve(cluster, traffic.draw(seed)), threshold=threshold, costs=worker.costs)
        for seed in range(num_seeds)
    ]


def table(duration_s: float, settings: Sequence[str], num_seeds: int) -> list[tuple[str, ...]]:
    """Rows of text with a header; times in ms."""
    rows: list[tuple[str, ...]] = [
        ("traffic", "worker", "variant", "short p50", "p90", "p99", "long p50", "p90", "p99",
         "TPOT p99"),
    ]  # fmt: skip
    return rows + [
        _row(traffic, variant, run(traffic, variant, settings, num_seeds))
        for traffic in all_traffic(duration_s)
        for variant in traffic.variants
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    parser.add_argument("--seeds", type=int, default=3, help="how many, pooled")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="laps section")
    args = parser.parse_args(argv)
    start_s = time.perf_counter()
    print("Times in ms.\n")
    print(render_rows(table(args.seconds, args.set, args.seeds)))
    print(f"\nsimulated in {time.perf_counter() - start_s:.1f} s")


def _row(traffic: Traffic, variant: Variant, samples: Sequence[Sample]) -> tuple[str, ...]:
    by_class = [figures(samples, name, Limits()) for name in ("short", "long")]
    cells = [
        f"{1e3 * value_s:.1f}" if one.num_requests else ""
        for one in by_class
        for value_s in (one.ttft_p50_s, one.ttft_p90_s, one.ttft_p99_s)
    ]
    tpot_s = figures(samples, "all", Limits()).tpot_p99_s
    worker = "unified" if traffic.is_unified else "prefill"
    tpot = f"{1e3 * tpot_s:.1f}" if traffic.is_unified else ""
    return (traffic.name, worker, variant.label, *cells, tpot)


def _rows(workload: Workload, from_s: float) -> list[tuple[float, int, int]]:
    columns = (workload.arrival_s + from_s, workload.prompt_tokens, workload.output_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


if __name__ == "__main__":
    main()

"""From names on a command line to runs: loads, policies, rates and seeds, on several processes."""

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from configs.resolved import ResolvedLaps
from engine.cost_model import PRIOR, StepCosts
from load_tests.simulation.cluster import ClusterSpec, serve
from load_tests.simulation.metrics import Sample, build_sample
from load_tests.simulation.routing import Policy, PoolSizes
from load_tests.simulation.traces import read_azure, read_lengths, read_mooncake
from load_tests.simulation.workload import (
    Bootstrap,
    Lengths,
    Mix,
    Workload,
    drawn,
    lmsys,
    recorded,
    sharegpt,
)

ONLINE_SHORT_SHARE = 0.8
LOADS = "online, mix:SHARE, sharegpt, lmsys, lengths:CSV, azure:CSV, mooncake:JSONL, recorded:JSON"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What arrives, but for its rate: lengths to draw, or a recorded workload."""

    name: str
    lengths: Lengths | None = None
    trace: Workload | None = None
    cv: float = 1.0  # of the gaps between drawn arrivals
    duration_s: float = 60.0  # of drawn arrivals
    max_requests: int | None = None

    def workload(self, rate: float | None, seed: int) -> Workload:
        """At `rate` a second; None = as it was recorded."""
        if self.trace is not None:
            trace = self.trace if self.max_requests is None else self.trace.first(self.max_requests)
            return trace if rate is None else trace.at_rate(rate)
        assert self.lengths is not None, f"{self.name} has neither lengths nor a trace"
        assert rate is not None, f"{self.name} needs a rate"
        num_requests = max(1, round(rate * self.duration_s))
        if self.max_requests is not None:
            num_requests = min(num_requests, self.max_requests)
        return drawn(
            self.name, self.lengths, rate=rate, num_requests=num_requests, seed=seed, cv=self.cv
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run."""

    spec: ClusterSpec
    load: Load
    rate: float | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What is kept of a run."""

    sample: Sample
    pool_sizes: list[PoolSizes]
    moves: tuple[str, ...]


def build_load(text: str, *, cv: float, duration_s: float, max_requests: int | None) -> Load:
    """A load by its name in `LOADS`.

    Raises ValueError for another and for a bad file, OSError for a lost one.
    """
    kind, _, argument = text.partition(":")
    path = Path(argument)
    lengths: Lengths | None = None
    trace: Workload | None = None
    match kind:
        case "online":
            lengths = Mix(ONLINE_SHORT_SHARE)
        case "mix":
            lengths = Mix(_share(argument))
        case "sharegpt":
            lengths = sharegpt
        case "lmsys":
            lengths = lmsys
        case "lengths":
            lengths = Bootstrap(*read_lengths(path))
        case "azure":
            trace = read_azure(path)
        case "mooncake":
            trace = read_mooncake(path)
        case "recorded":
            trace = recorded(path.stem, json.loads(path.read_text(encoding="utf-8")))
        case _:
            raise ValueError(f"no load {text!r}; there are {LOADS}")
    return Load(
        name=text,
        lengths=lengths,
        trace=trace,
        cv=cv,
        duration_s=duration_s,
        max_requests=max_requests,
    )


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"mix:{text}: the share of short prompts is a number from 0 to 1")
    return share


def read_costs(path: Path | None) -> StepCosts:
    """Fitted costs from a JSON file; None = the prior. Raises OSError, msgspec.MsgspecError."""
    if path is None:
        return PRIOR
    return msgspec.json.decode(path.read_bytes(), type=StepCosts)


def build_laps(settings: Sequence[str]) -> ResolvedLaps:
    """From KEY=VALUE texts. Raises ValueError, or msgspec.ValidationError as the config would."""
    for setting in settings:
        if "=" not in setting:
            raise ValueError(f"{setting}: not KEY=VALUE")
    values = dict(setting.split("=", 1) for setting in settings)
    return msgspec.convert(values, ResolvedLaps, strict=False)


def with_policies(spec: ClusterSpec, queue: str, policy: Policy) -> ClusterSpec:
    """The same cluster with another queue in its workers and another choice of workers."""
    worker = replace(spec.worker, predicts=policy is not Policy.ROUND_ROBIN).with_queue(queue)
    return replace(spec, worker=worker, policy=policy)


def run_job(job: Job) -> JobResult:
    """One run, from its seed alone."""
    worker = job.spec.worker
    served = serve(job.spec, job.load.workload(job.rate, job.seed))
    threshold = worker.laps.laps_length_threshold
    return JobResult(
        sample=build_sample(served, threshold=threshold, costs=worker.costs),
        pool_sizes=served.pool_sizes,
        moves=served.moves,
    )


def run_jobs(jobs: Sequence[Job], num_processes: int) -> list[JobResult]:
    """In the order of the jobs, whatever the number of processes."""
    if num_processes == 1 or len(jobs) == 1:
        return [run_job(job) for job in jobs]
    with ProcessPoolExecutor(num_processes) as pool:
        return list(pool.map(run_job, jobs))

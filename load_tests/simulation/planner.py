"""How many devices prefill and decode a traffic within its limits, and how many prefill short ones.

Prefill and decode are sized one after the other: first tokens do not depend on who decodes. Each
number is the least for which 90 % of the requests keep the limit and no backlog grows, found by
doubling and halving; more workers are taken to be no worse.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.cost_model import StepCosts
from load_tests.simulation.cluster import ClusterSpec
from load_tests.simulation.metrics import Limits, good_share, is_sustained
from load_tests.simulation.routing import PoolSizes
from load_tests.simulation.scenario import Job, JobResult, Load, run_jobs
from load_tests.simulation.workload import Workload

MAX_WORKERS = 4096
SETTLED_SHARE = 0.5  # of the arrivals; pools are counted after it


class NoPlanError(Exception):
    """No number of workers serves the traffic within its limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The traffic, what it is promised, and how it is served but for the numbers of workers."""

    cluster: ClusterSpec  # its numbers of workers are ignored
    load: Load
    rate: float | None
    seeds: tuple[int, ...]
    ttft_s: float
    tpot_s: float
    num_processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The plan, and how well it did."""

    num_prefill: int
    num_decode: int
    num_short: float  # of those that prefill, on average; 0 = not split
    ttft_good_share: float
    tpot_good_share: float


def plan(question: Question) -> Answer:
    """Raises NoPlanError if `MAX_WORKERS` are not enough."""
    workload = question.load.workload(question.rate, question.seeds[0])
    worker = replace(question.cluster.worker, keeps_decodes=False)
    cluster = replace(question.cluster, worker=worker, num_decode=0)
    ttft = Limits(ttft_s=question.ttft_s)
    num_prefill, results = _least(
        lambda num: _run(question, replace(cluster, num_prefill=num)),
        ttft,
        at_least=num_needed(workload, worker.costs),
    )
    cluster = replace(cluster, num_prefill=num_prefill)
    tpot = Limits(ttft_s=float("inf"), tpot_s=question.tpot_s)
    num_decode, with_decodes = _least(
        lambda num: _run(question, replace(cluster, num_decode=num)), tpot, at_least=1
    )
    return Answer(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_short=_mean_short(results[0].pool_sizes, workload.duration_s),
        ttft_good_share=good_share([r.sample for r in results], ttft),
        tpot_good_share=good_share([r.sample for r in with_decodes], tpot),
    )


def num_needed(workload: Workload, costs: StepCosts) -> int:
    """Workers without which prompts arrive faster than they can be computed, floors shared."""
    some = workload.first(2000)
    seconds = sum([costs.seconds(int(n), 0) - costs.floor_s for n in some.prompt_tokens])
    if workload.chains is not None or some.duration_s == 0:
        return 1  # what is cached takes no time
    return max(1, int(seconds / some.duration_s))


def _run(question: Question, spec: ClusterSpec) -> list[JobResult]:
    jobs = [
        Job(spec=spec, load=question.load, rate=question.rate, seed=seed) for seed in question.seeds
    ]
    return run_jobs(jobs, question.num_processes)


def _least(
    run: Callable[[int], list[JobResult]], limits: Limits, *, at_least: int
) -> tuple[int, list[JobResult]]:
    """The least number of workers that sustains the traffic, and what came of it."""

    def attempt(num: int) -> tuple[bool, list[JobResult]]:
        results = run(num)
        return is_sustained([result.sample for result in results], limits), results

    low, high = at_least - 1, at_least
    is_enough, results = attempt(high)
    while not is_enough:
        if high >= MAX_WORKERS:
            raise NoPlanError(f"{high} workers do not serve this traffic within its limits")
        low, high = high, 2 * high
        is_enough, results = attempt(high)
    while high - low > 1:
        middle = (low + high) // 2
        is_enough, tried = attempt(middle)
        if is_enough:
            high, results = middle, tried
        else:
            low = middle
    return high, results


def _mean_short(sizes: list[PoolSizes], duration_s: float) -> float:
    """Workers in the short pool, over the time after the pools had settled."""
    since_s = SETTLED_SHARE * duration_s
    total = 0.0
    ends_s = [size.at_s for size in sizes[1:]] + [duration_s]
    for size, end_s in zip(sizes, ends_s, strict=True):
        total += size.num_short * max(0.0, end_s - max(size.at_s, since_s))
    return total / (duration_s - since_s) if duration_s > since_s else float(sizes[-1].num_short)

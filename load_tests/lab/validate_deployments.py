"""The simulator held against measured deployments: the same arrivals, and step costs fitted there.

    python -m load_tests.lab.bench_deployments ... --json four.json       (GPUs)
    python -m load_tests.lab.validate_deployments four.json --markdown
    python -m load_tests.lab.validate_deployments four.json --costs ours.json --costs-of fcfs

Workers get step costs that workers of the same role had fitted in the end, in the first deployment
with such workers: those that prefill alone see no decodes, and a fit to the steps of unified ones
may be a quarter off at the few sizes of their steps. Those that decode get what unified workers had
fitted. Costs of another file (`--costs`, also of `bench_mixed --json`) are chosen likewise;
`--costs-of` gives all workers one variant's. vLLM is not simulated. What no fit contains is stated:
`--host-ms` from a plan to its step's start on an idle device, `--http-ms` from the end of a step to
the client, besides what comes before the worker. A handoff takes what `ClusterSpec` says. Errors
are relative to the measured value; within 10 % is met.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from configs.load import load_config
from configs.resolved import resolve_laps, resolve_scheduler
from configs.schema import AppConfig
from engine.cost_model import StepCosts
from load_tests.lab.deployments import BLOCK_TOKENS, Deployment
from load_tests.lab.mixed_sweep import SEARCH_STEP, highest_good, is_good, next_rate
from load_tests.lab.server_process import ROOT
from load_tests.mixed_report import Limits, Point, Run
from load_tests.simulation.cluster import ClusterSpec
from load_tests.simulation.measured import (
    ASSUMED_KV_TOKENS,
    MET_SHARE,
    MeasuredRun,
    load_of,
    read_measured,
    simulate_cluster,
)
from load_tests.simulation.routing import Policy
from load_tests.simulation.worker import WorkerSpec
from load_tests.tables import render_rows

FIGURES = {
    "short_ttft_p50_ms": "short p50",
    "short_ttft_p90_ms": "p90",
    "long_ttft_p50_ms": "long p50",
    "long_ttft_p99_ms": "p99",
    "tpot_p50_ms": "TPOT p50",
    "tpot_p99_ms": "p99",
}


class _Told(msgspec.Struct, frozen=True):
    """What the file tells of a deployment of ours."""

    config: str
    overrides: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A deployment as the simulator has it."""

    name: str
    cluster: ClusterSpec
    read_s: float  # from the end of a step until the client has its tokens

    def point(self, run: MeasuredRun, rate: float, seeds: Sequence[int]) -> Point:
        """The loads of these seeds at `rate`, pooled."""
        loads = [load_of(run, rate, seed) for seed in seeds]
        runs = [
            Run(
                duration_s=load.duration_s,
                seed=load.seed,
                served=simulate_cluster(self.cluster, load, self.read_s),
            )
            for load in loads
        ]
        return Point(variant=self.name, rate=rate, runs=runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A figure measured and simulated, in the same unit."""

    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative to the measured value; above 0 = simulated too high."""
        return self.simulated / self.measured - 1.0

    @property
    def is_met(self) -> bool:
        return abs(self.error) <= MET_SHARE

    def __str__(self) -> str:
        return f"{self.measured:,.1f}, {self.simulated:,.1f}: {self.error:+.0%}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="what bench_deployments --json has written")
    parser.add_argument("--costs", type=Path, help="of bench_mixed --json, instead of the file's")
    parser.add_argument(
        "--costs-of", metavar="VARIANT", help="whose, for all roles; default: by role"
    )
    parser.add_argument("--host-ms", type=float, default=1.0)
    parser.add_argument("--http-ms", type=float, default=4.0)
    parser.add_argument("--markdown", action="store_true", help="with the command, for a record")
    return parser


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCosts:
    """Step costs by role, and the deployments whose workers had fitted them."""

    whose: str
    costs: StepCosts  # of unified workers, and of those that decode alone
    whose_prefill: str
    prefill_costs: StepCosts  # of those that prefill alone

    def __str__(self) -> str:
        def told(whose: str, costs: StepCosts) -> str:
            return f"{whose}, fitted to {costs.num_samples:,} steps"

        text = told(self.whose, self.costs)
        if self.whose_prefill == self.whose:
            return text
        return (
            f"{text}; of workers that prefill alone {told(self.whose_prefill, self.prefill_costs)}"
        )


def choose_costs(run: MeasuredRun, wanted: str | None) -> RoleCosts:
    """Those of `wanted` for all roles; None = by role. Raises ValueError where there are none."""
    if not run.step_costs:
        raise ValueError("the file has no step costs: give --costs and --costs-of")
    whose = wanted or _first_of_role(run, "unified") or next(iter(run.step_costs))
    whose_prefill = wanted or _first_of_role(run, "prefill") or whose
    return RoleCosts(
        whose=whose,
        costs=run.final_costs(whose),
        whose_prefill=whose_prefill,
        prefill_costs=run.final_costs(whose_prefill),
    )


def _first_of_role(run: MeasuredRun, role: Literal["unified", "prefill"]) -> str | None:
    """The first variant with step costs and such workers; None = there is none."""
    for name in run.step_costs:
        with suppress(argparse.ArgumentTypeError):  # a variant of bench_mixed
            if getattr(Deployment.parse(name), role) > 0:
                return name
    return None


def check_ranks(names: Sequence[str]) -> None:
    """Raises ValueError for workers over different numbers of GPUs: their step costs differ."""
    by_ranks = {Deployment.parse(name).ranks: name for name in names}
    if len(by_ranks) > 1:
        raise ValueError(f"{' and '.join(by_ranks.values())}: measure them to a file each")


def simulated_deployment(
    run: MeasuredRun, name: str, costs: RoleCosts, host_s: float, http_s: float
) -> Simulated:
    """A measured deployment of ours. Raises ValueError for one that the file does not describe."""
    about = run.about.get(f"deployment, {name}")
    if about is None:
        raise ValueError(f"the file does not tell how {name} was configured")
    told = msgspec.convert(about, _Told)
    config = load_config(ROOT / told.config, told.overrides)
    deployment = Deployment.parse(name)
    laps = resolve_laps(config.laps, {})
    worker_costs = costs.prefill_costs if deployment.prefill else costs.costs
    cluster = ClusterSpec(
        worker=_worker_spec(config, worker_costs, host_s),
        decode_costs=costs.costs,
        num_prefill=deployment.unified + deployment.prefill,
        num_decode=deployment.decode,
        policy=Policy.LAPS if laps.enable_laps_alloc else Policy.PREDICTED,
    )
    return Simulated(name=name, cluster=cluster, read_s=http_s)


def _worker_spec(config: AppConfig, costs: StepCosts, host_s: float) -> WorkerSpec:
    scheduler = resolve_scheduler(config.scheduler, {})
    num_blocks = config.cache.num_blocks
    on_gpu = config.model.device == "cuda"
    return WorkerSpec(
        laps=resolve_laps(config.laps, {}),
        costs=costs,
        keeps_decodes=config.workers.unified > 0,
        overlap=on_gpu if scheduler.overlap is None else scheduler.overlap,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_rows=scheduler.max_num_seqs,
        max_kv_tokens=ASSUMED_KV_TOKENS if num_blocks is None else BLOCK_TOKENS * num_blocks,
        host_s=host_s,
    )


def simulated_best_rate(
    run: MeasuredRun, simulated: Simulated, rates: Sequence[float], limits: Limits
) -> float | None:
    """The highest good rate, searched for as it was measured: from `rates`, by the same seeds."""
    seeds = msgspec.convert(run.about.get("seeds"), list[int])
    good = {rate: is_good(simulated.point(run, rate, seeds), limits) for rate in rates}
    while (rate := next_rate(good, SEARCH_STEP)) is not None:
        good[rate] = is_good(simulated.point(run, rate, seeds), limits)
    return highest_good(good)


def compare(run: MeasuredRun, simulated: Simulated) -> list[tuple[float, dict[str, Compared]]]:
    """Every measured point of a deployment, by rate."""
    compared = []
    for point in run.points_of(simulated.name):
        numbers = simulated.point(run, point.rate, list(point.by_seed)).numbers
        figures = {
            key: Compared(measured=point.numbers[key], simulated=numbers[key])
            for key in FIGURES
            if point.numbers.get(key, 0.0) > 0.0 and key in numbers
        }
        compared.append((point.rate, figures))
    return sorted(compared, key=lambda one: one[0])


def render(run: MeasuredRun, deployments: Sequence[Simulated]) -> str:
    """Tables of points and of highest good rates: measured, simulated, and the error."""
    rows = [("deployment", "requests/s", *FIGURES.values())]
    all_figures: list[Compared] = []
    for one in deployments:
        for rate, figures in compare(run, one):
            rows.append((one.name, f"{rate:.3g}", *(str(figures.get(k, "")) for k in FIGURES)))
            all_figures += figures.values()
    num_met = sum(figure.is_met for figure in all_figures)
    parts = [render_rows(rows), f"{num_met} of {len(all_figures)} figures within {MET_SHARE:.0%}."]
    if run.limits is not None:
        parts.append(render_rows(_best_rate_rows(run, deployments, run.limits)))
    return "\n\n".join(parts)


def _best_rate_rows(
    run: MeasuredRun, deployments: Sequence[Simulated], limits: Limits
) -> list[tuple[str, str]]:
    rows = [("deployment", "highest good rate")]
    for one in deployments:
        measured = run.best_rates.get(one.name)
        rates = [point.rate for point in run.points_of(one.name)]
        simulated = simulated_best_rate(run, one, rates, limits)
        if one.name not in run.best_rates:
            rows.append((one.name, f"not measured, {_told_rate(simulated)}"))
        elif one.name in run.cut_searches:
            told = f"search cut at {_told_rate(measured)}, {_told_rate(simulated)}"
            rows.append((one.name, told))
        elif measured and simulated:
            rows.append((one.name, str(Compared(measured=measured, simulated=simulated))))
        else:
            rows.append((one.name, f"{_told_rate(measured)}, {_told_rate(simulated)}"))
    return rows


def _told_rate(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:.3g}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        run = read_measured(args.file)
        source = run if args.costs is None else read_measured(args.costs)
        costs = choose_costs(source, args.costs_of)
        names = [name for name in run.variants if not Deployment.parse(name).is_vllm]
        check_ranks(names)
        deployments = [
            simulated_deployment(run, name, costs, args.host_ms / 1e3, args.http_ms / 1e3)
            for name in names
        ]
    except (OSError, ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    if args.markdown:
        words = sys.argv[1:] if argv is None else argv
        print(f"    python -m load_tests.lab.validate_deployments {shlex.join(words)}\n")
    print(
        f"Times in ms: measured, simulated: error. Step costs of {costs};"
        f" {args.host_ms:g} ms before a step on an idle device, {args.http_ms:g} ms of HTTP.\n"
    )
    print(render(run, deployments))


if __name__ == "__main__":
    main()

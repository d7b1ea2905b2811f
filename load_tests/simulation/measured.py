"""A measured run of `bench_mixed` read back, simulated again, and both held against each other.

The simulation gets what the measured engine got: the arrivals of the same seeds, the variant's
queue and knobs, one worker that keeps its decodes. It takes step costs that the engine fitted while
it was measured, and what the host adds to the device's time, which no fit of step costs contains.

A point is *held out* if the costs were fixed before it ran: by the order of the file, or because
they are of another variant. Of the others the fit has seen some steps. Quantiles are those of the
measured side, by the same function.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from configs.load import load_config
from configs.resolved import resolve_laps, resolve_scheduler
from configs.schema import AppConfig
from engine.cost_model import StepCosts
from engine.runner.graph_sizes import ragged_sizes
from load_tests.mixed_load import SHARE_LONG, MixedLoad, Served
from load_tests.mixed_report import COLUMNS, Limits, quantiles_ms
from load_tests.simulation.cluster import ClusterSpec, serve
from load_tests.simulation.routing import Policy
from load_tests.simulation.worker import WorkerSpec
from load_tests.simulation.workload import recorded

MET_SHARE = 0.1  # of the measured value: a figure simulated this closely is met
FIGURES = (
    "short_ttft_p50_ms",
    "short_ttft_p90_ms",
    "long_ttft_p50_ms",
    "long_ttft_p90_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
)
ASSUMED_KV_TOKENS = 700_000  # of an 8B model in 16 bits on one H200, where the file tells none


class MeasuredPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One variant at one rate; figures in ms by the names of COLUMNS."""

    variant: str
    rate: float  # requests/s
    by_seed: dict[int, dict[str, float]]
    numbers: dict[str, float] = {}  # all seeds pooled


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a file of `bench_mixed --json` tells, in the order of measuring."""

    about: dict[str, object]
    points: list[MeasuredPoint]
    step_costs: dict[str, StepCosts]  # by variant, as fitted when all its points were measured
    # By variant and rate, as fitted when that point was measured; {} = not recorded.
    step_costs_by_rate: dict[str, dict[float, StepCosts]] = {}
    limits: Limits | None = None  # of a good request, where a search asked for them
    best_rates: dict[str, float | None] = {}  # by variant, where they were searched for
    cut_searches: list[str] = []  # variants whose highest good rate may be another

    def points_of(self, variant: str) -> list[MeasuredPoint]:
        return [point for point in self.points if point.variant == variant]

    def final_costs(self, variant: str) -> StepCosts:
        """Fitted to all points of `variant`. Raises ValueError where there are none."""
        if variant not in self.step_costs:
            raise ValueError(f"no step costs of {variant!r}; there are {list(self.step_costs)}")
        return self.step_costs[variant]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(point.variant for point in self.points))


class _PromptGraphs(msgspec.Struct, frozen=True):
    num_graphs: int


class _PromptSteps(msgspec.Struct, frozen=True):
    form: str


class _Graphs(msgspec.Struct, frozen=True):
    """What a file tells of the graphs of a variant's engine."""

    prompt_graphs: _PromptGraphs | None = None
    prompt_steps: _PromptSteps | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """What the host adds to the device's time; none of it is in fitted step costs."""

    start_s: float  # from the plan of a step to its start, on an idle device
    gap_s: float  # between two steps, on a busy one
    read_s: float  # from the end of a step until whoever reads its tokens has them


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Step costs, and which points they were fixed before."""

    costs: StepCosts
    variant: str
    rate: float | None  # they were fixed at the end of this point; None = of all of the variant's
    num_seen: int  # points of `variant`, in order, whose steps they may be fitted to

    def is_held_out(self, run: MeasuredRun, point: MeasuredPoint) -> bool:
        if point.variant != self.variant:
            return True
        return run.points_of(self.variant).index(point) >= self.num_seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of one point, in ms."""

    point: MeasuredPoint
    is_held_out: bool
    name: str
    measured_ms: float
    simulated_ms: float

    @property
    def error(self) -> float:
        """Relative to the measured value; above 0 = simulated too slow."""
        return self.simulated_ms / self.measured_ms - 1.0

    @property
    def is_met(self) -> bool:
        return abs(self.error) <= MET_SHARE


def read_measured(path: Path) -> MeasuredRun:
    """Raises OSError for a file that is not there, ValueError for one of another kind."""
    data = json.loads(path.read_text(encoding="utf-8"))
    try:
        points = [
            {**point, "numbers": {key: point[key] for key in COLUMNS if key in point}}
            for point in data["points"]
        ]
        run = msgspec.convert({**data, "points": points}, MeasuredRun, str_keys=True)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: not what bench_mixed --json writes: {error}") from error
    if not run.points:
        raise ValueError(f"{path}: nothing was measured; give bench_mixed some --rates")
    return run


def choose_fit(run: MeasuredRun, variant: str, rate: float | None) -> Fit:
    """The costs as they were after `rate` (None = the first) of `variant`.

    A file without costs by point has those of the end, to which all points of the variant
    contributed. Raises ValueError for a variant or a rate that was not measured.
    """
    points = run.points_of(variant)
    rates = [point.rate for point in points]
    if not points:
        raise ValueError(f"no variant {variant!r} was measured; there are {run.variants}")
    if rate is not None and rate not in rates:
        raise ValueError(f"{variant} was not measured at {rate:g}/s; there are {rates}")
    last = 0 if rate is None else rates.index(rate)
    costs = run.step_costs_by_rate.get(variant, {}).get(rates[last])
    if costs is not None:
        return Fit(costs=costs, variant=variant, rate=rates[last], num_seen=last + 1)
    costs = run.final_costs(variant)
    return Fit(costs=costs, variant=variant, rate=None, num_seen=len(points))


def worker_spec(run: MeasuredRun, variant: str, costs: StepCosts, host: HostTimes) -> WorkerSpec:
    """The measured engine as a simulated worker. Raises ValueError for an unknown variant."""
    config = _config_of(run.about, variant)
    scheduler, laps = resolve_scheduler(config.scheduler, {}), resolve_laps(config.laps, {})
    overlap = scheduler.overlap
    return WorkerSpec(
        laps=laps,
        costs=msgspec.structs.replace(costs, floor_s=costs.floor_s + host.gap_s),
        keeps_decodes=True,
        overlap=run.about.get("device") == "cuda" if overlap is None else overlap,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_rows=scheduler.max_num_seqs,
        max_kv_tokens=msgspec.convert(run.about.get("num_kv_tokens", ASSUMED_KV_TOKENS), int),
        host_s=host.start_s,
        graph_token_sizes=_graph_token_sizes(run.about, variant, config),
        predicts=False,
    )


def simulate_load(spec: WorkerSpec, load: MixedLoad, read_s: float) -> list[Served]:
    """The load's requests as the simulated worker serves them, in the order of arrival."""
    return simulate_cluster(ClusterSpec(worker=spec, policy=Policy.ROUND_ROBIN), load, read_s)


def simulate_cluster(cluster: ClusterSpec, load: MixedLoad, read_s: float) -> list[Served]:
    """The load's requests as `cluster` serves them, in the order of arrival."""
    arrivals = load.arrivals()
    rows = [(a.at_s, a.num_tokens, load.num_output_tokens) for a in arrivals]
    served = serve(cluster, recorded(f"seed {load.seed}", rows))
    times_s = np.stack([served.first_s, served.last_s], axis=1) + read_s
    return [
        Served(arrival=arrival, first_s=first_s, last_s=last_s, num_tokens=load.num_output_tokens)
        for arrival, (first_s, last_s) in zip(arrivals, times_s.tolist(), strict=True)
    ]


def compare(run: MeasuredRun, point: MeasuredPoint, fit: Fit, host: HostTimes) -> list[Comparison]:
    """Every figure of a point, measured and simulated."""
    spec = worker_spec(run, point.variant, fit.costs, host)
    loads = [load_of(run, point.rate, seed) for seed in point.by_seed]
    served = [one for load in loads for one in simulate_load(spec, load, host.read_s)]
    simulated = quantiles_ms(served)
    return [
        Comparison(
            point=point,
            is_held_out=fit.is_held_out(run, point),
            name=name.removesuffix("_ms"),
            measured_ms=point.numbers[name],
            simulated_ms=simulated[name],
        )
        for name in FIGURES
        if point.numbers.get(name, 0.0) > 0.0 and name in simulated
    ]


def load_of(run: MeasuredRun, rate: float, seed: int) -> MixedLoad:
    """The load that was measured. Raises msgspec.ValidationError where the file lacks a number."""
    about = run.about
    return MixedLoad(
        rate=rate,
        seed=seed,
        duration_s=msgspec.convert(about.get("duration_s"), float),
        num_output_tokens=msgspec.convert(about.get("output_tokens"), int),
        shrink=msgspec.convert(about.get("shrink"), int),
        share_long=msgspec.convert(about.get("share_long", SHARE_LONG), float),
    )


def _graph_token_sizes(
    about: Mapping[str, object], variant: str, config: AppConfig
) -> tuple[int, ...]:
    """Sizes that chunks were cut to: those of graphs, if it captured those that are captured now.

    An engine that captured others, or none, is taken to have cut nothing.
    """
    told = msgspec.convert(about.get(f"graphs, {variant}", {}), _Graphs)
    scheduler = resolve_scheduler(config.scheduler, {})
    sizes = ragged_sizes(
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        max_graph_rows=resolve_laps(config.laps, {}).batch_prefill_max_rows,
    )
    is_ragged = told.prompt_steps is not None and told.prompt_steps.form == sizes.form
    num_graphs = 0 if told.prompt_graphs is None else told.prompt_graphs.num_graphs
    return sizes.graph_token_sizes if is_ragged and num_graphs == len(sizes.sizes) else ()


def _settings_of(label: str) -> dict[str, object]:
    """Keys of the configuration, from a variant's label as the bench prints it.

    How steps with prompts run is in the costs. Raises ValueError for a label of another kind.
    """
    queue, *parts = label.split(", ")
    settings: dict[str, object] = {
        "laps.queue": queue,
    }
    for part in parts:
        match part.split():
            case ["exclusive" | "fill" as mix]:
                settings["laps.mix"] = mix
            case ["window", window]:
                settings["laps.window"] = window
            case [number, "ms"]:
                settings["laps.max_step_ms"] = float(number)
            case ["graphs", _]:
                pass
            case _:
                raise ValueError(f"{part!r} of variant {label!r} is not known here")
    return settings


def _config_of(about: Mapping[str, object], label: str) -> AppConfig:
    """Switches, the variant's keys, then what `--set` said: its keys are dotted."""
    sections = AppConfig.__struct_fields__
    told = {key: value for key, value in about.items() if key.partition(".")[0] in sections}
    return load_config(
        None,
        {
            "scheduler.max_num_batched_tokens": about.get("max_num_batched_tokens"),
            "scheduler.max_num_seqs": about.get("max_rows"),
            **_settings_of(label),
            **told,
        },
    )


def num_met(comparisons: Sequence[Comparison]) -> int:
    return sum(comparison.is_met for comparison in comparisons)

"""The simulator held against files of the bench: here against ones it has served itself."""

import json
from pathlib import Path

import msgspec
import pytest

from configs.load import load_config
from configs.resolved import resolve_laps
from engine.cost_model import PRIOR
from engine.runner.graph_sizes import ragged_sizes
from load_tests.lab import validate_simulation
from load_tests.lab.bench_mixed import build_parser, build_variants
from load_tests.lab.mixed_sweep import Results
from load_tests.mixed_load import MixedLoad
from load_tests.mixed_report import Point, Run
from load_tests.simulation.measured import (
    HostTimes,
    MeasuredRun,
    choose_fit,
    load_of,
    read_measured,
    simulate_load,
    worker_spec,
)

VARIANTS = ("fcfs", "laps, exclusive, 30 ms")
RATES = (10.0, 22.0)
SEEDS = (7, 8)
ABOUT: dict[str, object] = {
    "device": "cuda",
    "duration_s": 6.0,
    "output_tokens": 20,
    "shrink": 1,
    "max_num_batched_tokens": 2048,
    "max_rows": 128,
    "laps.max_long_wait_s": 0.7,
    "compiled_since_ready, fcfs": [],
}
HOST = HostTimes(start_s=0.0013, gap_s=0.0002, read_s=0.0006)
SWITCHES = ["--host-ms", "1.3", "--gap-ms", "0.2", "--read-ms", "0.6"]
COSTS = msgspec.structs.replace(PRIOR, floor_s=0.0061, num_samples=777)


def measure(path: Path, *, by_rate: bool = True) -> Path:
    """What the bench would write if an engine were as the simulator takes it to be."""
    results = Results(limits=None, peers=[], about=dict(ABOUT))
    run = MeasuredRun(about=ABOUT, points=[], step_costs={})
    for variant in VARIANTS:
        spec = worker_spec(run, variant, COSTS, HOST)
        results.costs[variant] = msgspec.to_builtins(COSTS)
        for rate in RATES:
            loads = [load_of(run, rate, seed) for seed in SEEDS]
            runs = [
                Run(
                    duration_s=load.duration_s,
                    seed=load.seed,
                    served=simulate_load(spec, load, HOST.read_s),
                )
                for load in loads
            ]
            results.points.append(Point(variant=variant, rate=rate, runs=runs))
    data = json.loads(results.to_json())
    costs = {f"{RATES[0]}": msgspec.to_builtins(COSTS)}
    data["step_costs_by_rate"] = dict.fromkeys(VARIANTS, costs) if by_rate else {}
    path.write_text(json.dumps(data))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure(tmp_path_factory.mktemp("measured") / "mixed.json")


def rows_of(out: str) -> list[list[str]]:
    lines = [line for line in out.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_an_engine_that_is_as_simulated_is_met_to_the_last_figure(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validate_simulation.main([str(file), "--fit-rate", "10", *SWITCHES])
    out = capsys.readouterr().out
    rows = rows_of(out)
    assert len(rows) == len(VARIANTS) * len(RATES) * 6
    assert {row[7] for row in rows} <= {"+0.0%", "-0.0%"}
    assert {(row[0], row[3]) for row in rows} == {("10", "fitted"), ("22", "held out")}
    assert {row[2] for row in rows} == {"7 8"}
    assert "held out: 12 of 12 figures within 10 %." in out
    assert "after 10/s" in out
    assert "700,000 tokens are assumed" in out


def test_what_differs_by_more_than_a_tenth_is_marked(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validate_simulation.main([str(file), "--markdown", *SWITCHES[:-1], "5"])
    out = capsys.readouterr().out
    assert "5 ms until tokens are read" in out
    assert f"python -m load_tests.lab.validate_simulation {file} --markdown" in out
    for row in rows_of(out):
        measured, simulated = float(row[5]), float(row[6])
        assert simulated - measured == pytest.approx(0 if "tpot" in row[4] else 4.4, abs=0.11)
        assert (row[8] == "NO") == (abs(simulated / measured - 1) > 0.1) or measured < 5
    assert {row[8] for row in rows_of(out)} == {"yes", "NO"}


def test_without_costs_by_rate_nothing_is_held_out_but_other_variants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = measure(tmp_path / "old.json", by_rate=False)
    validate_simulation.main([str(path), *SWITCHES])
    out = capsys.readouterr().out
    assert {row[3] for row in rows_of(out)} == {"fitted"}
    assert "none of its own points is held out" in out
    validate_simulation.main([str(path), "--fit-variant", "fcfs", *SWITCHES])
    roles = {(row[1], row[3]) for row in rows_of(capsys.readouterr().out)}
    assert roles == {(VARIANTS[0], "fitted"), (VARIANTS[1], "held out")}


def test_a_point_that_ran_before_the_fit_is_not_held_out(file: Path) -> None:
    run = read_measured(file)
    costs = dict.fromkeys(RATES, COSTS)
    run = msgspec.structs.replace(run, step_costs_by_rate={VARIANTS[0]: costs})
    first, second = run.points_of(VARIANTS[0])
    early, late = (choose_fit(run, VARIANTS[0], rate) for rate in RATES)
    assert [early.is_held_out(run, point) for point in (first, second)] == [False, True]
    assert [late.is_held_out(run, point) for point in (first, second)] == [False, False]


def test_the_simulation_gets_the_arrivals_that_were_measured(file: Path) -> None:
    run = read_measured(file)
    load = load_of(run, 22.0, 8)
    assert load == MixedLoad(rate=22.0, duration_s=6.0, seed=8, num_output_tokens=20)
    served = simulate_load(worker_spec(run, "fcfs", COSTS, HOST), load, HOST.read_s)
    assert [one.arrival for one in served] == load.arrivals()
    assert all(one.ttft_s > COSTS.floor_s + HOST.read_s for one in served)


def test_every_variant_of_the_bench_is_simulated_with_its_own_settings() -> None:
    switches = "--queue laps fcfs priority --mix exclusive fill --window none adaptive fixed"
    switches += " --max-step-ms 12.5 40 --graphs auto off ragged grid"
    run = MeasuredRun(about=ABOUT, points=[], step_costs={})
    for variant in build_variants(build_parser().parse_args(switches.split())):
        keys = {k: v for k, v in variant.overrides.items() if "graph" not in k and "form" not in k}
        expected = load_config(None, {**keys, "laps.max_long_wait_s": 0.7})
        spec = worker_spec(run, variant.label, COSTS, HOST)
        assert spec.laps == resolve_laps(expected.laps, {})
        assert (spec.max_num_batched_tokens, spec.max_rows, spec.overlap) == (2048, 128, True)


def test_chunks_are_cut_to_graphs_where_the_measured_engine_had_those_of_now() -> None:
    sizes = ragged_sizes(128, 2048).graph_token_sizes
    for form, num_graphs, expected in (
        ("ragged", len(sizes), sizes),
        ("ragged", len(sizes) - 1, ()),
        ("grid", len(sizes), ()),
    ):
        graphs = {"prompt_graphs": {"num_graphs": num_graphs}, "prompt_steps": {"form": form}}
        run = MeasuredRun(about=ABOUT | {"graphs, fcfs": graphs}, points=[], step_costs={})
        assert worker_spec(run, "fcfs", COSTS, HOST).graph_token_sizes == expected
    assert worker_spec(run, "laps, fill", COSTS, HOST).graph_token_sizes == ()


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (["--fit-rate", "11"], "not measured at 11/s"),
        (["--fit-variant", "sjf"], "no variant 'sjf'"),
    ],
)
def test_what_was_not_measured_cannot_be_fitted_to(
    file: Path, switches: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        validate_simulation.main([str(file), *switches])
    assert message in capsys.readouterr().err


def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    for text in ("[]", "{}", '{"points": [{"rate": 1}], "about": {}, "step_costs": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="not what bench_mixed --json writes"):
            read_measured(path)
    path.write_text('{"points": [], "about": {}, "step_costs": {}}')
    with pytest.raises(SystemExit):
        validate_simulation.main([str(path)])
    assert "nothing was measured" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is not known here"):
        worker_spec(MeasuredRun(about={}, points=[], step_costs={}), "laps, both", COSTS, HOST)

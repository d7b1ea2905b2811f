"""The simulator beside measured deployments: one that the simulator itself measured is met."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.cost_model import PRIOR
from load_tests.lab.validate_deployments import (
    Compared,
    RoleCosts,
    check_ranks,
    choose_costs,
    compare,
    main,
    render,
    simulated_best_rate,
    simulated_deployment,
)
from load_tests.mixed_report import Limits
from load_tests.simulation.measured import MeasuredRun, read_measured
from load_tests.simulation.routing import Policy

LIMITS = Limits(short_ttft_s=0.1, long_ttft_s=1.0, tpot_s=0.05)
COSTS = msgspec.structs.replace(PRIOR, num_samples=500)
SLOW = msgspec.structs.replace(PRIOR, num_samples=300, floor_s=0.03)
ROLE_COSTS = RoleCosts(whose="2u", costs=COSTS, whose_prefill="1p1d", prefill_costs=PRIOR)
SPLIT = {"workers.prefill": 1, "workers.decode": 1, "workers.unified": 0}
RATES = {"1p1d": 12.0, "2u": 20.0, "1vllm": 9.0}


def written(path: Path, numbers: dict[str, dict[str, float]]) -> Path:
    """As bench_deployments writes it; `numbers` by deployment."""
    about = {
        "duration_s": 4.0,
        "output_tokens": 16,
        "shrink": 1,
        "seeds": [7],
        "deployment, 1p1d": {"config": "configs/h200_2p2d.yaml", "overrides": SPLIT},
        "deployment, 2u": {
            "config": "configs/h200_unified_x4.yaml",
            "overrides": {"workers.unified": 2, "cache.num_blocks": 5000},
        },
    }
    points = [
        {"variant": name, "rate": rate, "by_seed": {"7": {}}, **numbers.get(name, {})}
        for name, rate in RATES.items()
    ]
    costs = msgspec.to_builtins(COSTS)
    told = {
        "about": about,
        "points": points,
        "step_costs": {"1p1d": msgspec.to_builtins(PRIOR), "2u": costs},
        "limits": msgspec.to_builtins(LIMITS),
        "best_rates": {"2u": 40.0, "1p1d": None, "1vllm": 10.0},
    }
    path.write_text(json.dumps(told))
    return path


@pytest.fixture
def run(tmp_path: Path) -> MeasuredRun:
    return read_measured(written(tmp_path / "out.json", {}))


def test_costs_are_those_of_workers_of_the_same_role(run: MeasuredRun) -> None:
    assert choose_costs(run, None) == ROLE_COSTS
    one = choose_costs(run, "1p1d")
    assert (one.costs, one.prefill_costs, str(one)) == (PRIOR, PRIOR, "1p1d, fitted to 0 steps")
    without_roles = {"fcfs": COSTS, "laps, fill": PRIOR}
    one = choose_costs(msgspec.structs.replace(run, step_costs=without_roles), None)
    assert (one.whose, one.whose_prefill) == ("fcfs", "fcfs")
    with pytest.raises(ValueError, match="3u"):
        choose_costs(run, "3u")
    with pytest.raises(ValueError, match="--costs"):
        choose_costs(msgspec.structs.replace(run, step_costs={}), None)


def test_workers_of_other_sizes_have_no_costs_in_common() -> None:
    check_ranks(["2u@2", "1p1d@2"])
    with pytest.raises(ValueError, match="4u and 2u@2: measure them to a file each"):
        check_ranks(["4u", "2u@2"])


def test_a_deployment_is_simulated_as_it_was_configured(run: MeasuredRun) -> None:
    split = simulated_deployment(run, "1p1d", ROLE_COSTS, 0.001, 0.004).cluster
    assert (split.num_prefill, split.num_decode, split.worker.keeps_decodes) == (1, 1, False)
    assert (split.worker.max_num_batched_tokens, split.policy) == (2048, Policy.PREDICTED)
    unified = simulated_deployment(run, "2u", ROLE_COSTS, 0.001, 0.004).cluster
    assert (unified.num_prefill, unified.num_decode, unified.worker.keeps_decodes) == (2, 0, True)
    assert (unified.worker.max_kv_tokens, unified.worker.laps.max_step_ms) == (80_000, 36.0)
    with pytest.raises(ValueError, match="how 1vllm was configured"):
        simulated_deployment(run, "1vllm", ROLE_COSTS, 0.001, 0.004)


def test_workers_that_prefill_alone_have_costs_of_their_own(run: MeasuredRun) -> None:
    def numbers(costs: RoleCosts) -> tuple[float, float]:
        simulated = simulated_deployment(run, "1p1d", costs, 0.001, 0.004)
        told = simulated.point(run, 12.0, [7]).numbers
        return told["short_ttft_p50_ms"], told["tpot_p50_ms"]

    first_ms, token_ms = numbers(ROLE_COSTS)
    slow_prefill_ms, same_token_ms = numbers(replace(ROLE_COSTS, prefill_costs=SLOW))
    same_first_ms, slow_token_ms = numbers(replace(ROLE_COSTS, costs=SLOW))
    assert slow_prefill_ms > first_ms + 20
    assert same_first_ms == first_ms
    assert slow_token_ms > token_ms + 20
    assert same_token_ms == pytest.approx(token_ms, rel=0.2)


def test_what_the_simulator_measured_is_met_and_an_error_has_a_sign(
    run: MeasuredRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {
        name: dict(
            simulated_deployment(run, name, ROLE_COSTS, 0.001, 0.004).point(run, rate, [7]).numbers
        )
        for name, rate in RATES.items()
        if not name.endswith("vllm")
    }
    numbers["2u"]["long_ttft_p99_ms"] *= 2
    again = read_measured(written(tmp_path / "own.json", numbers))
    simulated = simulated_deployment(again, "2u", ROLE_COSTS, 0.001, 0.004)
    [(rate, figures)] = compare(again, simulated)
    assert rate == 20.0
    assert {key for key, one in figures.items() if not one.is_met} == {"long_ttft_p99_ms"}
    assert figures["long_ttft_p99_ms"].error == pytest.approx(-0.5)
    slower = replace(simulated, read_s=0.014)
    [(_, later)] = compare(again, slower)
    shift_ms = later["short_ttft_p50_ms"].simulated - figures["short_ttft_p50_ms"].simulated
    assert shift_ms == pytest.approx(10.0, abs=0.02)
    main([str(tmp_path / "own.json")])
    printed = capsys.readouterr().out
    assert "11 of 12 figures within 10%." in printed
    assert "1vllm" not in printed


def test_the_best_rate_is_searched_for_as_it_was_measured(run: MeasuredRun) -> None:
    simulated = simulated_deployment(run, "2u", ROLE_COSTS, 0.001, 0.004)
    best = simulated_best_rate(run, simulated, [20.0], LIMITS)
    assert best is not None
    assert best > 20.0
    assert simulated_best_rate(run, simulated, [best, 20.0], LIMITS) == pytest.approx(best, rel=0.3)
    hopeless = Limits(short_ttft_s=1e-6, long_ttft_s=1e-6, tpot_s=1e-6)
    assert simulated_best_rate(run, simulated, [20.0], hopeless) is None


def test_a_search_that_was_cut_has_no_error(run: MeasuredRun) -> None:
    cut = msgspec.structs.replace(run, cut_searches=["2u"])
    simulated = simulated_deployment(cut, "2u", ROLE_COSTS, 0.001, 0.004)
    last = render(cut, [simulated]).splitlines()[-1]
    assert "search cut at 40, " in last
    assert "%" not in last


def test_a_figure_is_told_with_its_error() -> None:
    assert str(Compared(measured=20.0, simulated=23.0)) == "20.0, 23.0: +15%"

"""The command: tables, plots and plans, from the loads and settings that it is told."""

import json
from pathlib import Path

import msgspec
import pytest

from engine.cost_model import PRIOR
from load_tests import simulate
from load_tests.simulation.cluster import ClusterSpec
from load_tests.simulation.metrics import CLASS_NAMES, Limits, is_sustained
from load_tests.simulation.planner import Question, plan
from load_tests.simulation.routing import Policy
from load_tests.simulation.scenario import (
    Job,
    build_laps,
    build_load,
    read_costs,
    run_job,
    run_jobs,
    with_policies,
)
from load_tests.simulation.sweep import SweepSpec, refine, sweep

SMALL = ["--seconds", "4", "--seeds", "1", "--processes", "1"]


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["simulate", *arguments])
    simulate.main()


def test_it_prints_a_line_for_each_policy_rate_and_class(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = ["--queue", "laps", "fcfs", "--routing", "laps", "round-robin"]
    run_main(
        monkeypatch, *SMALL, "--workers", "2", *policies, "--load", "online", "--rates", "8", "200"
    )
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()]
    of_class = [row for row in rows if len(row) > 10 and row[3].strip() in CLASS_NAMES]
    assert len(of_class) == 4 * 2 * 3
    assert {row[-2].strip() for row in of_class if row[3].strip() == "all"} == {"yes", "NO"}


def test_it_plans_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["--slo-ttft", "0.4", "--slo-tpot", "0.02"]
    run_main(monkeypatch, *SMALL, "--plan", "--load", "online", "--rate", "60", *limits)
    out = capsys.readouterr().out
    assert "prefill workers: " in out
    assert "decode workers: " in out


def test_traffic_that_no_number_of_devices_serves_ends_with_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("load_tests.simulation.planner.MAX_WORKERS", 4)
    limits = ["--slo-ttft", "0.0001", "--slo-tpot", "0.02"]  # the first is shorter than any step
    with pytest.raises(SystemExit, match="error: 4 workers do not serve this traffic"):
        run_main(monkeypatch, *SMALL, "--plan", "--load", "online", "--rate", "5", *limits)


def test_a_plan_is_the_least_that_serves() -> None:
    load = build_load("online", cv=1.0, duration_s=8.0, max_requests=None)
    cluster = with_policies(ClusterSpec(), "laps", Policy.LAPS)
    question = Question(
        cluster=cluster, load=load, rate=60.0, seeds=(0,), ttft_s=0.4, tpot_s=0.0052
    )
    answer = plan(question)
    assert answer.num_prefill > 1
    assert answer.num_decode > 1
    assert answer.ttft_good_share >= 0.9
    for num_prefill, expected in ((answer.num_prefill - 1, False), (answer.num_prefill, True)):
        spec = ClusterSpec(worker=cluster.worker, policy=cluster.policy, num_prefill=num_prefill)
        sample = run_job(Job(spec=spec, load=load, rate=60.0, seed=0)).sample
        assert is_sustained([sample], Limits(ttft_s=0.4)) is expected


def test_the_goodput_is_narrowed_down_between_the_rates() -> None:
    load = build_load("online", cv=1.0, duration_s=6.0, max_requests=None)
    spec = SweepSpec(
        cluster=ClusterSpec(num_prefill=1),
        load=load,
        choices=[("laps", Policy.LAPS)],
        rates=[2.0],
        seeds=[0],
        limits=Limits(),
    )
    (curve,) = sweep(spec)
    assert curve.goodput == 2.0
    refined = refine(spec, curve, 3)
    above = min(p.rate for p in refined.points if p.rate > refined.goodput)
    assert 2.0 < refined.goodput < above
    assert above - refined.goodput <= refined.goodput / 4


def test_several_processes_give_what_one_gives() -> None:
    load = build_load("sharegpt", cv=2.0, duration_s=3.0, max_requests=40)
    jobs = [Job(spec=ClusterSpec(), load=load, rate=10.0, seed=seed) for seed in range(3)]
    one, two = run_jobs(jobs, 1), run_jobs(jobs, 2)
    assert [r.sample.ttft_s.tolist() for r in one] == [r.sample.ttft_s.tolist() for r in two]


def test_recorded_arrivals_are_replayed_with_fitted_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arrivals, costs = tmp_path / "arrivals.json", tmp_path / "costs.json"
    arrivals.write_text(json.dumps([[0.0, 100, 5], [1.0, 3000, 5]]))
    slower = msgspec.structs.replace(PRIOR, floor_s=1.0, num_samples=99)
    costs.write_bytes(msgspec.json.encode(slower))
    assert read_costs(costs) == slower
    files = ["--load", f"recorded:{arrivals}", "--costs", str(costs)]
    run_main(monkeypatch, *SMALL, *files, "--unified", "--workers", "1")
    out = capsys.readouterr().out
    assert "| laps + laps     | 2       | short | 1 " in out
    assert "NO" in out  # every step takes a second


def test_costs_are_taken_from_a_measured_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = msgspec.structs.replace(PRIOR, floor_s=1.5, num_samples=99)
    numbers = {"short_ttft_p50_ms": 1.0}
    point = {"variant": "fcfs", "rate": 8.0, "by_seed": {"7": numbers}} | numbers
    costs = {"fcfs": msgspec.to_builtins(slow)}
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps({"about": {}, "points": [point], "step_costs": costs}))
    files = ["--costs", str(path), "--costs-of"]
    load = ["--load", "online", "--rates", "2", "--workers", "1"]
    run_main(monkeypatch, *SMALL, *load, *files, "fcfs")
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()]
    (row,) = [row for row in rows if len(row) > 10 and row[3].strip() == "all"]
    assert float(row[5]) > 1500
    with pytest.raises(SystemExit):
        run_main(monkeypatch, *SMALL, *load, *files, "laps")
    assert "no step costs of 'laps'; there are ['fcfs']" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_main(monkeypatch, *SMALL, *load, "--costs-of", "fcfs")
    assert "--costs-of needs --costs" in capsys.readouterr().err


def test_settings_are_those_of_the_config_and_wrong_ones_are_errors() -> None:
    assert build_laps(["mix=fill", "max_step_ms=20", "laps_length_threshold=128"]).mix == "fill"
    with pytest.raises(msgspec.ValidationError):
        build_laps(["mix=both"])
    with pytest.raises(msgspec.ValidationError):
        build_laps(["no_such_key=1"])
    with pytest.raises(ValueError, match="no load 'poems'"):
        build_load("poems", cv=1.0, duration_s=1.0, max_requests=None)


def test_it_asks_for_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, lacking in (
        (("--load", "online"), "--rates"),
        (("--load", "online", "--plan"), "--rate"),
        (("--load", "online", "--plan", "--rate", "5"), "--slo-tpot"),
    ):
        with pytest.raises(SystemExit):
            run_main(monkeypatch, *arguments)
        assert f"needs {lacking}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--load", "poems"), "no load 'poems'; there are online, mix:SHARE"),
        (("--load", "mix:some"), "mix:some: the share of short prompts is a number from 0 to 1"),
        (("--load", "mix:2"), "mix:2: the share"),
        (("--load", "azure:/no/such.csv"), "No such file or directory: '/no/such.csv'"),
        (("--costs", "/no/such.json"), "No such file or directory: '/no/such.json'"),
        (("--set", "mix"), "mix: not KEY=VALUE"),
        (("--set", "mix=both"), "Invalid enum value 'both' - at `$.mix`"),
        (("--queue", "lifo"), "invalid choice: 'lifo'"),
        (("--rates", "0"), "0: must be above 0"),
        (("--workers", "0"), "0: must be above 0"),
        (("--seeds", "-1"), "-1: must be above 0"),
        (("--seconds", "long"), "invalid positive value: 'long'"),
    ],
)
def test_what_cannot_be_simulated_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "--rates", "1", *arguments)
    assert message in capsys.readouterr().err


def test_plots_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    rates = ["--load", "online", "--rates", "8", "40"]
    run_main(monkeypatch, *SMALL, "--workers", "4", *rates, "--out", str(tmp_path / "plots"))
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"ttft_short.png", "ttft_long.png", "ttft_all.png", "goodput.png", "pools.png"}

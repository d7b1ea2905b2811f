"""What a mixed load came to: ranks, backlogs, limits, the peer's lines, the search for a rate."""

import json
import random
from pathlib import Path

import pytest

from load_tests.lab.mixed_sweep import Budget, Results, Sweep, is_good, next_rate
from load_tests.lab.one_batch import Batch, BatchFigure, read_chain_batches, render_batches
from load_tests.mixed_load import Arrival, LengthClass, MixedLoad, OverloadError, Served
from load_tests.mixed_report import (
    Limits,
    Point,
    Run,
    quantile,
    quantiles_ms,
    read_peer_tables,
    render_points,
    target_figures,
)
from tests.harness.seeds import seed_of

SEED = seed_of(__name__)
LIMITS = Limits(short_ttft_s=0.1, long_ttft_s=1.0, tpot_s=0.05)
PEER = """INFO ready
RESULT {"rate": 16, "requests": 350, "short_ttft_p90_ms": 94, "tpot_p99_ms": 22}
RESULT {"short_prefill_1x64_ms": 7.4}
"""
CHAIN = """batch prefill, ragged graph with attention inside:
  1x64 in T=64: graph 5.200 ms, eager 17.400 ms, capture 0.02 s
  8x16 in T=128: graph 5.600 ms, eager 8.300 ms, capture 0.02 s
re-prefill: 32 new tokens on 2000 cached, 4 rows
  graph 6.300 ms
"""


def served(
    at_s: float, ttft_s: float, tpot_s: float = 0.01, length_class: LengthClass = "short"
) -> Served:
    first_s = at_s + ttft_s
    return Served(
        arrival=Arrival(at_s=at_s, num_tokens=9, length_class=length_class),
        first_s=first_s,
        last_s=first_s + 10 * tpot_s,
        num_tokens=11,
    )


def run_of(*requests: Served, duration_s: float = 40.0) -> Run:
    return Run(duration_s=duration_s, seed=7, served=requests)


def point_of(*runs: Run, rate: float = 16.0, variant: str = "laps") -> Point:
    return Point(variant=variant, rate=rate, runs=runs)


def queue_run(rate: float, capacity: float) -> Run:
    """Requests of one server that takes 1 / capacity seconds for each."""
    free_s, requests = 0.0, []
    for i in range(int(40 * rate)):
        at_s = i / rate
        free_s = max(free_s, at_s) + 1 / capacity
        requests.append(served(at_s, free_s - at_s, tpot_s=0.0))
    return run_of(*requests)


# ---- arithmetic ----------------------------------------------------------------------------------


def test_a_quantile_is_a_value_that_occurred() -> None:
    values = [float(i) for i in range(100)]
    random.Random(SEED).shuffle(values)
    assert [quantile(values, q) for q in (0.5, 0.9, 0.99)] == [50.0, 90.0, 99.0]
    assert quantile([3.0], 0.99) == 3.0


def test_classes_have_their_own_quantiles_and_share_those_of_later_tokens() -> None:
    numbers = quantiles_ms([served(0, 0.02, 0.004), served(1, 0.5, 0.006, "long")])
    assert numbers["short_ttft_p90_ms"] == 20.0
    assert numbers["long_ttft_p90_ms"] == 500.0
    assert (numbers["tpot_p50_ms"], numbers["tpot_p99_ms"]) == (6.0, 6.0)
    assert "long_ttft_p50_ms" not in quantiles_ms([served(0, 0.02)])


def test_a_backlog_is_who_had_arrived_and_not_ended() -> None:
    run = run_of(served(0, 9, 0.1), served(30, 19, 0.1))  # end at 10 and at 50 s
    assert run.backlog == 1
    assert run.mean_backlog(0, 20) == pytest.approx(0.5)
    assert run.quarters == pytest.approx((0.0, 1.0))


def test_prompt_tokens_a_second_are_those_that_were_drawn() -> None:
    point = point_of(run_of(served(0, 9), served(30, 19)), run_of(served(1, 9)))
    assert point.prompt_tokens_per_s == pytest.approx(3 * 9 / 80)
    assert point.to_builtins(None)["prompt_tokens_per_s"] == 0.3


@pytest.mark.parametrize(("rate", "is_growing"), [(5, False), (9.5, False), (12, True), (20, True)])
def test_a_backlog_grows_beyond_capacity(rate: float, is_growing: bool) -> None:
    assert point_of(queue_run(rate, 10.0), queue_run(rate, 10.0)).is_growing is is_growing


def test_a_request_is_within_limits_if_all_its_times_are() -> None:
    assert LIMITS.are_kept(served(0, 0.09, 0.04))
    assert not LIMITS.are_kept(served(0, 0.11, 0.04))
    assert not LIMITS.are_kept(served(0, 0.09, 0.06))
    assert LIMITS.are_kept(served(0, 0.9, 0.04, "long"))
    assert not LIMITS.are_kept(served(0, 1.1, 0.04, "long"))
    nine_of_ten = point_of(run_of(*[served(i, 0.01) for i in range(9)], served(9, 2.0)))
    assert nine_of_ten.share_within(LIMITS) == pytest.approx(0.9)
    assert is_good(nine_of_ten, LIMITS)
    assert not is_good(point_of(run_of(served(0, 0.01), served(1, 2.0))), LIMITS)
    assert not is_good(point_of(queue_run(20, 10.0)), Limits(
        short_ttft_s=99, long_ttft_s=99, tpot_s=99))  # fmt: skip


# ---- the search ----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [[16.0], [30.0], [3.0, 70.0]])
def test_the_search_ends_close_below_the_truth(start: list[float]) -> None:
    truth = random.Random(SEED).uniform(8.0, 40.0)
    good = {rate: rate <= truth for rate in start}
    while (rate := next_rate(good, 0.05)) is not None:
        good[rate] = rate <= truth
    highest = max(rate for rate in good if good[rate])
    assert highest <= truth < 1.05 * highest, f"seed {SEED}"
    assert len(good) < 20


def test_a_search_in_which_nothing_is_good_ends() -> None:
    good = {50.0: False}
    while (rate := next_rate(good, 0.05)) is not None:
        good[rate] = False
    assert 0.08 * 50.0 < min(good) <= 0.1 * 50.0


def test_a_good_rate_above_a_bad_one_does_not_count() -> None:
    assert next_rate({10.0: False, 20.0: True}, 0.05) == 8.0


def test_a_small_stride_needs_fewer_runs_close_to_the_truth() -> None:
    def num_runs(stride: float) -> int:
        good = {100.0: True}
        while (rate := next_rate(good, 0.05, stride)) is not None:
            good[rate] = rate <= 107.0
        return len(good)

    assert (num_runs(1.12), num_runs(1.25)) == (4, 5)


def sweep_of(results: Results, budget: Budget, path: Path | None = None) -> Sweep:
    loads = [MixedLoad(rate=1.0, duration_s=4.0, seed=seed) for seed in (7, 8)]
    return Sweep(results, budget, loads, path)


def test_a_sweep_finds_the_highest_good_rate_and_keeps_what_it_measured(tmp_path: Path) -> None:
    results = Results(limits=LIMITS, peers=[])
    sweep = sweep_of(results, Budget(1e9), tmp_path / "out.json")

    def serve(load: MixedLoad) -> list[Served]:
        return [served(0.1, 0.05 if load.rate < 21 else 5.0)]

    assert sweep.measure("laps", 16.0, serve) is not None
    sweep.search("laps", serve)
    best = results.best_rates["laps"]
    assert best is not None
    assert 21 / 1.05 < best < 21
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["best_rates"], written["cut_searches"]) == ({"laps": best}, [])
    assert [p["rate"] for p in written["points"]] == [p.rate for p in results.points]
    assert set(written["points"][0]["by_seed"]) == {"7", "8"}
    assert f"laps: {best:.3g}/s (2 prompt tokens/s)\n" in results.render()


def test_a_rate_with_refusals_is_not_good_and_the_search_goes_on(tmp_path: Path) -> None:
    results = Results(limits=LIMITS, peers=[])
    sweep = sweep_of(results, Budget(1e9), tmp_path / "out.json")

    def serve(load: MixedLoad) -> list[Served]:
        if load.rate > 21:
            raise OverloadError("300 tokens are queued")
        return [served(0.1, 0.05)]

    assert sweep.measure("laps", 30.0, serve) is None
    assert sweep.measure("laps", 16.0, serve) is not None
    sweep.search("laps", serve)
    best = results.best_rates["laps"]
    assert best is not None
    assert 21 / 1.05 < best < 21
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["refused"]["laps"]["30.0"] == "300 tokens are queued"
    assert written["cut_searches"] == []
    assert "laps at 30/s: 300 tokens are queued" in results.render()


def test_what_time_does_not_allow_is_left_out_and_named() -> None:
    now_s = 0.0
    budget = Budget(10.0, lambda: now_s)
    sweep = sweep_of(Results(limits=None, peers=[]), budget)

    def serve(load: MixedLoad) -> list[Served]:
        nonlocal now_s
        now_s += 6.0
        return [served(0.1, 0.05)]

    point = sweep.measure("fcfs", 16.0, serve)
    assert point is not None
    assert [run.seed for run in point.runs] == [7]
    assert sweep.measure("fcfs", 24.0, serve) is None
    expected = ["16/s, seed 8", "24/s, seed 7", "24/s, seed 8"]
    assert budget.left_out == [f"fcfs at {what}" for what in expected]


# ---- beside others -------------------------------------------------------------------------------


def test_the_peers_lines_are_read_with_the_files_name(tmp_path: Path) -> None:
    (tmp_path / "threshold-1024.txt").write_text(PEER)
    [(name, at_16), (_, engine)] = read_peer_tables([tmp_path / "threshold-1024.txt"])
    assert (name, at_16["rate"], engine) == ("threshold-1024", 16, {"short_prefill_1x64_ms": 7.4})
    (tmp_path / "empty.txt").write_text("Traceback")
    with pytest.raises(ValueError, match=r"empty\.txt"):
        read_peer_tables([tmp_path / "empty.txt"])


def test_targets_are_limits_and_shares_of_the_best_peer() -> None:
    peers = [
        ("a", {"rate": 16.0, "long_ttft_p99_ms": 400.0, "tpot_p99_ms": 22.0}),
        ("b", {"rate": 16.0, "long_ttft_p99_ms": 500.0, "tpot_p99_ms": 21.0}),
    ]
    point = point_of(run_of(served(0, 0.044, 0.0215), served(1, 0.479, 0.001, "long")))
    met = {f.name.split()[-1]: (f.target, f.is_met) for f in target_figures([point], peers)}
    assert met == {
        "short_ttft_p50": ("<= 20", False),
        "short_ttft_p90": ("<= 45", True),
        "long_ttft_p99": ("<= 480", True),
        "tpot_p99": ("<= 21", False),
    }
    assert target_figures([point_of(run_of(served(0, 1)), rate=5.0)], peers) == []


def test_the_table_puts_the_peer_beside_ours_at_every_rate() -> None:
    point = point_of(run_of(served(0, 0.0201)))
    peers = [("vllm", {"rate": 16.0, "short_ttft_p50_ms": 21.0}), ("vllm", {"rate": 99.0})]
    lines = render_points([point], peers, LIMITS).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[:4] for row in cells[2:]] == [
        ["16", "vllm", "", "21.0"],
        ["16", "laps", "1", "20.1"],
    ]
    assert cells[3][-1] == "100.0%"


def test_the_chains_graphs_go_to_batches_of_the_same_shape(tmp_path: Path) -> None:
    (tmp_path / "chain.txt").write_text(CHAIN)
    assert read_chain_batches(tmp_path / "chain.txt") == {
        "1x64": 5.2,
        "8x16": 5.6,
        "4x32 on 2,000 cached": 6.3,
    }


def test_a_batch_is_held_against_a_share_of_the_other() -> None:
    figure = BatchFigure(
        what="wall",
        batch=Batch(num_rows=1, num_tokens=64),
        rounds_ms=[6.0, 5.5, 5.0],
        theirs_ms=7.4,
        target=0.75,
    )
    assert figure.ratio == pytest.approx(0.743, abs=1e-3)
    row = render_batches([figure]).splitlines()[2]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "1x64", "wall", "5.50 ms", "5.00 - 6.00", "7.40", "0.743", "<= 0.75", "yes"]  # fmt: skip

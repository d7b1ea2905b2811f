"""The engine figures are timed as the peer times its own, and read what others printed."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.core import Executor
from engine.messages import LoadReport, TokenRecord
from engine.ranks.comm import GlooRanks
from engine.request import RequestKey
from load_tests.lab import bench_engine, turns
from load_tests.lab.bench_engine import Bench, build_parser, engine_config, run, step_rounds_s
from load_tests.lab.comparison import (
    TARGETS,
    Comparison,
    compare,
    read_chain,
    read_peer,
    render_comparisons,
)
from load_tests.lab.following import Following
from load_tests.lab.host_work import (
    NUM_STREAMS,
    StreamReaders,
    above_neighbours,
    measure_host_work,
    split_by_stream,
)
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.works import DECODE_STEPS, DECODES, LONG_PREFILLS, SHORT_PREFILLS, Kind, Work
from tests.harness.seeds import seed_of

MODEL = Path(__file__).resolve().parents[3] / "demo_model" / "laps-demo"
SEED = seed_of(__name__)
TINY = ["--model", str(MODEL), "--weights", "safetensors", "--device", "cpu", "--max-rows", "4",
        "--max-model-len", "256", "--max-num-batched-tokens", "48",
        "--num-blocks", "256"]  # fmt: skip

PEER = """INFO 11-21 engine ready
RESULT {"rate": 8, "requests": 160, "short_ttft_p50_ms": 16.5}
RESULT {"prefill_32x1024_tok_s": 42953, "decode_bs64_ctx4096_ms_per_step": 15.29, "other": 1}
"""
CHAIN = """linears only, one graph:
  M=1: 4.390 ms
decode step in one graph (FA3):
  bs=1 ctx=192: 4.880 ms (capture 0.02 s)
  bs=64 ctx=4160: 13.900 ms (capture 0.03 s)
  bs=1 ctx=4160: 5.100 ms (capture 0.02 s)
batch prefill, ragged graph with attention inside (padded to T tokens, 64 rows) against eager:
  1x64 in T=64: graph 5.200 ms, eager 17.400 ms, capture 0.02 s
  32x64 in T=2048: graph 48.000 ms, eager 47.800 ms, capture 0.05 s
re-prefill: 32 new tokens on 2000 cached, 4 rows
  graph 6.300 ms
prefill eager:
  8x1024: 184.5 ms, 44400 tok/s
  1x8000: 216.2 ms, 37000 tok/s
  1x16000: 487.8 ms, 32800 tok/s
"""


@pytest.fixture(scope="module")
def bench() -> Bench:
    config = engine_config(MODEL, build_parser().parse_args(TINY))
    return Bench(EngineInProcess(config), seed=SEED)


def _run(switches: list[str], folder: Path) -> str:
    """What a run prints."""
    shown: list[str] = []
    run(build_parser().parse_args(switches), folder, shown.append)
    [printed] = shown
    return printed


# ---- arithmetic ----------------------------------------------------------------------------------


def test_a_decode_step_is_what_128_more_tokens_take() -> None:
    firsts_s = [0.5, 0.1, 0.2]
    steps_s = step_rounds_s(firsts_s, [0.2 + 128 * 0.004, 0.2 + 128 * 0.006, 0.2 + 128 * 0.005])
    assert steps_s == pytest.approx([0.004, 0.006, 0.005])


def test_a_work_reads_seconds_in_its_own_unit() -> None:
    assert Work(Kind.PREFILL, 16, 4096).in_unit(2.0) == 32768
    assert Work(Kind.SHORT_PREFILL, 8, 64).in_unit(0.0125) == 12.5
    assert Work(Kind.DECODE, 64, 128).in_unit(0.005) == 5.0


def test_a_smaller_duration_and_a_larger_rate_meet_a_target() -> None:
    decode, prefill = DECODES[0], LONG_PREFILLS[0]

    def is_met(work: Work, ours_s: float, theirs_s: float) -> bool | None:
        peer = {work.key: work.in_unit(theirs_s)}
        return compare(work, [ours_s], 0.001, peer=peer, chain={}).is_met

    assert is_met(decode, 0.88, 1.0) is True
    assert is_met(decode, 0.90, 1.0) is False
    assert is_met(prefill, 1.0, 1.05) is True
    assert is_met(prefill, 1.0, 1.03) is False
    assert compare(decode, [1.0], 0.1, peer={}, chain={}).is_met is None
    assert is_met(SHORT_PREFILLS[0], 1.0, 1.0) is None  # nothing is asked of it


def test_a_share_of_the_floor_is_one_at_the_floor_for_durations_and_rates() -> None:
    for work in (DECODES[0], LONG_PREFILLS[0], SHORT_PREFILLS[0]):
        one = compare(work, [0.5, 0.2, 0.4], 0.1, peer={}, chain={})
        assert one.share_of_floor == pytest.approx(0.25)
        assert one.spread == pytest.approx(tuple(sorted(map(work.in_unit, (0.5, 0.2)))))


def test_every_target_belongs_to_a_work() -> None:
    assert set(TARGETS) == {work.key for work in (*DECODES, *LONG_PREFILLS)}
    assert TARGETS["decode_bs256_ctx128_ms_per_step"] == 0.83
    assert TARGETS["decode_bs64_ctx4096_ms_per_step"] == 0.90
    assert TARGETS["prefill_4x16000_tok_s"] == 1.06


# ---- what others printed -------------------------------------------------------------------------


def test_the_peers_line_is_found_among_its_others(tmp_path: Path) -> None:
    (tmp_path / "peer.txt").write_text(PEER)
    peer = read_peer(tmp_path / "peer.txt")
    assert peer["prefill_32x1024_tok_s"] == 42953
    assert peer["decode_bs64_ctx4096_ms_per_step"] == 15.29


@pytest.mark.parametrize("text", ["no result", PEER + PEER.splitlines()[-1]])
def test_a_file_without_exactly_one_table_of_works_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "peer.txt").write_text(text)
    with pytest.raises(ValueError, match=r"peer\.txt"):
        read_peer(tmp_path / "peer.txt")


def test_the_chains_figures_go_to_the_works_of_the_same_shape(tmp_path: Path) -> None:
    (tmp_path / "chain.txt").write_text(CHAIN)
    assert read_chain(tmp_path / "chain.txt") == {
        "decode_bs1_ctx128_ms_per_step": 4.88,
        "decode_bs64_ctx4096_ms_per_step": 13.9,
        "short_prefill_1x64_ms": 5.2,
        "short_prefill_32x64_ms": 47.8,  # eager was faster
        "prefill_32x1024_tok_s": 44400,
        "prefill_4x16000_tok_s": 32800,
    }
    (tmp_path / "chain.txt").write_text("Traceback")
    with pytest.raises(ValueError, match=r"chain\.txt"):
        read_chain(tmp_path / "chain.txt")


def test_a_table_holds_ours_theirs_the_target_and_the_floor() -> None:
    work = DECODES[3]
    one = compare(work, [0.0095] * 3, 0.0045, peer={work.key: 11.46}, chain={work.key: 10.6})
    [header, _, row] = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in render_comparisons([one]).splitlines()
    ]
    assert dict(zip(header, row, strict=True)) == {
        "work": "decode, batch 256, context 128",
        "ours": "9.5 ms/step",
        "range": "9.5 - 9.5",
        "vLLM": "11.46",
        "ratio": "0.829",
        "target": "<= 0.83",
        "met": "yes",
        "plain chain": "10.6",
        "floor": "4.5",
        "share of floor": "47%",
    }


# ---- on a small engine ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_measures_and_prints_every_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = (Work(Kind.PREFILL, 3, 40), Work(Kind.SHORT_PREFILL, 2, 7), Work(Kind.DECODE, 4, 9))
    monkeypatch.setattr(bench_engine, "WORKS", works)
    monkeypatch.setattr(bench_engine, "WARM_UPS", ((2, 5, 2),))
    switches = [*TINY, "--no-host", "--no-overlap", "--works", "prefill_3x40", "decode", "--json"]
    printed = json.loads(_run(switches, tmp_path))
    assert list(printed["works"]) == [works[0].key, works[2].key]
    rate, step = printed["works"].values()
    assert rate["unit"] == "tokens/s"
    assert step["unit"] == "ms/step"
    for one in (rate, step):
        assert one["range"][0] <= one["value"] <= one["range"][1]
        assert 0 < one["share_of_floor"] < 1
        assert one["vllm"] is one["ratio"] is one["is_met"] is None
    assert printed["about"]["no_overlap"] is True


@pytest.mark.slow
def test_two_ranks_are_measured_as_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When they are disconnected the engine is gone, whose graphs NCCL would wait for."""
    led: list[weakref.ref[Executor]] = []
    lived_on: list[bool] = []
    lead, close = Following.lead, GlooRanks.close

    def noted(self: Following, executor: Executor) -> Executor:
        led.append(weakref.ref(executor))
        return lead(self, executor)

    def closed(self: GlooRanks) -> None:
        lived_on.extend(executor() is not None for executor in led)
        close(self)

    monkeypatch.setattr(Following, "lead", noted)
    monkeypatch.setattr(GlooRanks, "close", closed)
    works = (Work(Kind.PREFILL, 3, 40), Work(Kind.DECODE, 4, 9))
    monkeypatch.setattr(bench_engine, "WORKS", works)
    monkeypatch.setattr(bench_engine, "WARM_UPS", ((2, 5, 2),))
    turn, figures = tmp_path / "turn", tmp_path / "figures.jsonl"

    def let_others_measure(_: float) -> None:
        assert not figures.exists(), "measured before its turn"
        turn.touch()

    monkeypatch.setattr(turns, "time", SimpleNamespace(sleep=let_others_measure))
    warmed_after_turn, warm_up = [], Bench.warm_up

    def noted_warm_up(self: Bench) -> None:
        warmed_after_turn.append(turn.exists())
        warm_up(self)

    monkeypatch.setattr(Bench, "warm_up", noted_warm_up)
    switches = [*TINY, "--no-host", "--quick", "--tensor-parallel", "2", "--json"]
    switches += ["--turn", str(turn), "--figures", str(figures)]
    printed = json.loads(_run(switches, tmp_path))
    assert turn.exists()
    assert warmed_after_turn == [False, True]
    assert list(printed["works"]) == [work.key for work in works]
    host = {name: figure["value"] for name, figure in printed["host"].items()}
    assert host["ring to rank 1, p50"] <= host["ring to rank 1, p99"]
    assert 0 < host["rank 1: launch"] < host["rank 1: message to launched"]
    assert host["rank 1: take a step's result"] > 0
    assert lived_on == [False]


def test_a_step_that_does_not_end_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted in looks, so that a run which was stopped and goes on has not stalled."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    others = Following(engine_config(MODEL, build_parser().parse_args(TINY)), tmp_path)
    assert others._turn() is None
    others._steps.num_launched = 1
    assert others._turn() == 0
    others._on_stall()
    assert ended == [1]
    assert "no step ended for 60 s" in capsys.readouterr().err
    others._steps.num_ended = 1
    assert others._turn() is None


HANGS = """
import sys, threading
from load_tests.lab import bench_engine, turns
bench_engine.WARM_UPS = ((2, 5, 6),)
bench_engine.CLOSE_S = 0.5
bench_engine.Following.__exit__ = lambda *_: threading.Event().wait()
bench_engine.main()
"""


@pytest.mark.slow
def test_a_run_whose_end_hangs_has_told_all_figures_and_ends(tmp_path: Path) -> None:
    figures = tmp_path / "figures.jsonl"
    switches = ["--no-host", "--works", "none", "--tensor-parallel", "2", "--markdown"]
    ended = subprocess.run(
        [sys.executable, "-c", HANGS, *TINY, *switches, "--figures", str(figures)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1
    assert "Timeout (0:00:00.500000)!" in ended.stderr
    told = [json.loads(line) for line in figures.read_text().splitlines()]
    assert {"leader: write to the ring", "rank 1: launch"} <= {figure["name"] for figure in told}
    assert all(figure["name"] in ended.stdout for figure in told)


@pytest.mark.slow
def test_no_collection_looks_at_the_engine_while_figures_are_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    are_listed: list[bool] = []

    def note(bench: Bench, *_: object) -> list[Comparison]:
        are_listed.append(any(one is bench.ours for one in gc.get_objects()))
        return []

    monkeypatch.setattr(bench_engine, "WARM_UPS", ((2, 5, 2),))
    monkeypatch.setattr(bench_engine, "run_works", note)
    _run([*TINY, "--no-host", "--works", "decode_bs1_"], tmp_path)
    assert are_listed == [False]


@pytest.mark.slow
def test_every_prompt_is_new_and_within_the_vocabulary(bench: Bench) -> None:
    prompts = bench.prompts(5, 12) + bench.prompts(5, 12)
    assert len(set(map(tuple, prompts))) == 10, f"seed {SEED}"
    assert max(map(max, prompts)) < bench.ours.engine.spec.vocab_size, f"seed {SEED}"


@pytest.mark.slow
def test_the_hosts_work_is_measured_over_steps_of_all_rows(bench: Bench, tmp_path: Path) -> None:
    kept = tmp_path / "turns.jsonl"
    measured = measure_host_work(bench.ours, bench.prompts(4, 20), num_tokens=9, turns=kept)
    figures = {f.name: f for f in measured}
    parts = [figures[f"host: {part}"].value for part in ("plan", "launch", "commit")]
    assert min(parts) > 0
    assert figures["host: sum of these"].value == pytest.approx(sum(parts))
    assert figures[f"host: encode {NUM_STREAMS} messages"].value > 0
    for name in ("step", f"step beside {NUM_STREAMS} streams"):
        median_ms, p99_ms = figures[f"{name}, p50"].value, figures[f"{name}, p99"].value
        assert 0 < median_ms <= p99_ms
        above = figures[f"{name}, p99 above the median"]
        assert above.value == p99_ms - median_ms
        assert above.is_met == (above.value <= 1.0)
        of_device = figures[f"{name}, p99 of the device above its neighbours"].value
        assert 0 < of_device < p99_ms
    told = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [turn["run"] for turn in told] == sorted(turn["run"] for turn in told)
    assert {turn["run"] for turn in told} == {"alone", "beside"}
    for turn in told:
        parts_ms = [turn[part] for part in ("plan", "launch", "catch_up", "wait", "commit")]
        assert sum(part_ms for part_ms in parts_ms if part_ms > 0) <= turn["took"] * (1 + 1e-9)
    assert all(turn["device"] > 0 for turn in told)


@pytest.mark.slow
def test_rows_that_never_decode_together_are_an_error(bench: Bench) -> None:
    with pytest.raises(AssertionError, match="5 prompts never decoded together"):
        list(measure_host_work(bench.ours, bench.prompts(5, 20), num_tokens=3))  # four rows


@pytest.mark.gpu
def test_a_trace_of_decode_steps_says_where_the_time_went(tmp_path: Path) -> None:
    switches = [*TINY, "--device", "cuda", "--max-model-len", "1024"]
    switches += ["--profile", "--works", "decode_bs1_"]
    table = _run(switches, tmp_path)
    [header, _, row] = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[:3]
    ]
    times_ms = {
        group: float(cell.split()[0]) for group, cell in zip(header[1:], row[1:], strict=True)
    }
    assert min(times_ms[group] for group in ("attention", "linear", "norm", "rope+kv")) > 0
    assert sum(times_ms.values()) - times_ms["wall ms"] == pytest.approx(
        times_ms["wall ms"], abs=0.01
    )


# ---- streams -------------------------------------------------------------------------------------


def tokens_of(num_rows: int, num_streams: int) -> list[tuple[str, TokenRecord]]:
    return [
        (f"stream-{i % num_streams}", TokenRecord(key=RequestKey(f"{i:032x}"), index=0, token_id=i))
        for i in range(num_rows)
    ]


def idle_load() -> LoadReport:
    return LoadReport(
        queued_tokens=0, num_waiting=0, num_running=0, num_free_blocks=1, num_blocks=1
    )


def test_a_steps_tokens_are_split_by_stream_in_order() -> None:
    split = split_by_stream(tokens_of(7, 3))
    assert {name: [r.token_id for r in records] for name, records in split.items()} == {
        "stream-0": [0, 3, 6],
        "stream-1": [1, 4],
        "stream-2": [2, 5],
    }


def test_readers_read_every_record_before_they_end() -> None:
    with StreamReaders(3, idle_load()) as readers:
        for num_rows in (7, 1, 12):
            readers.publish(tokens_of(num_rows, 3))
    assert readers.num_read == 20


def test_a_record_that_nobody_reads_is_noticed() -> None:
    with (
        pytest.raises(AssertionError, match="2 of 8 records were not read"),
        StreamReaders(3, idle_load()) as readers,
    ):
        readers.publish(tokens_of(8, 4))


def test_the_timed_steps_are_the_peers() -> None:
    assert DECODE_STEPS == 128


def test_steady_growth_is_not_counted_as_unsteadiness() -> None:
    growing = [10.0 + 0.01 * i for i in range(300)]
    assert max(map(abs, above_neighbours(growing)[20:-20])) < 0.02
    growing[150] += 3.0
    assert above_neighbours(growing)[150] == pytest.approx(3.0, abs=0.02)
    assert above_neighbours([7.0]) == [0.0]

"""The bench of channels: its board, its table, and a run of it without a GPU."""

import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.errors import HandoffError
from load_tests.lab import bench_channel_pairs
from load_tests.lab.bench_channel_pairs import lines_until_over
from load_tests.lab.bench_channels import QWEN3_8B, Outcome, Steps, render, steps_of
from load_tests.testbed.channel_ends import FileBoard

ROOT = Path(__file__).resolve().parents[3]


def test_a_board_of_files_keeps_counts_waits_and_forgets(tmp_path: Path) -> None:
    one, two = FileBoard(tmp_path), FileBoard(tmp_path)
    threads = [threading.Thread(target=one.add, args=("k/n", 1)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert two.add("k/n", 5) == 25
    writing = threading.Thread(target=one.set, args=("k/late", b"\x00\xff"))
    writing.start()
    assert two.get(["k/n", "k/late"], 10.0) == [b"25", b"\x00\xff"]
    writing.join()
    assert two.num_keys() == 2
    two.set("other", b"")
    assert one.delete_prefix("k/") == 2
    assert not one.delete("k/n")
    assert one.delete("other")
    with pytest.raises(HandoffError, match="nobody wrote"):
        one.get(["k/n"], 0.01)


def test_steps_are_told_by_their_order_and_few_steps_have_no_p99() -> None:
    steps = steps_of([float(i) for i in range(1000, 0, -1)])
    assert (steps.p50_ms, steps.p99_ms, steps.slowest_ms) == (500.5, 990.0, 1000.0)
    with pytest.raises(AssertionError, match="--seconds"):
        steps_of([1.0] * 99)


def test_the_table_sets_steps_against_those_alone() -> None:
    alone = Steps(num_steps=100, p50_ms=10.0, p99_ms=11.0, slowest_ms=12.0)
    loaded = Steps(num_steps=100, p50_ms=10.0, p99_ms=16.5, slowest_ms=24.0)
    done = Outcome(
        channel="cuda_ipc",
        kv_dtype="fp8_e4m3",
        num_bytes=600 * 10**6,
        open_s=0.5,
        neighbours_gb_s=300.0,
        scattered_gb_s=200.0,
        loaded_gb_s=199.0,
        alone=alone,
        loaded=loaded,
    )
    table = render([done, Outcome(channel="nccl_pair", error="too slow")])
    assert "16.50 ms, 1.500x" in table
    [row] = [line.replace(" ", "") for line in table.splitlines() if "fp8_e4m3" in line]
    assert row.startswith("|cuda_ipc|fp8_e4m3|600,000,000|0.50s|2.00|3.00|300.0|200.0|")
    assert "too slow" in table


@pytest.mark.slow
def test_the_bench_runs_without_a_gpu(tmp_path: Path) -> None:
    written = tmp_path / "channels.json"
    command = [sys.executable, "-m", "load_tests.lab.bench_channels", "--device", "cpu"]
    command += ["--tokens", "33", "--rounds", "2", "--stages", "--json", str(written)]
    command += ["--kv-dtype", "bfloat16", "fp8_e4m3"]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=200)
    outcomes = json.loads(written.read_text())["channels"]
    num_bytes = 3 * QWEN3_8B.block_bytes
    assert [(one["channel"], one["kv_dtype"], one["num_bytes"]) for one in outcomes] == [
        ("gloo_pair", "bfloat16", num_bytes),
        ("gloo_pair", "fp8_e4m3", num_bytes // 2),
    ]
    for outcome in outcomes:
        assert outcome["error"] == ""
        assert min(outcome["scattered_gb_s"], outcome["busy_gb_s"]) > 0
    lines = [line.replace(" ", "") for line in run.stdout.decode().splitlines()]
    for process, stage in [("receiver", "pieces:write"), ("sender", "pieces:read")]:
        timed = [line for line in lines if line.startswith(f"|{process}|{stage}|1.0|")]
        assert len(timed) == 2


@pytest.mark.slow
def test_all_pairs_hand_over_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "pairs.json"
    switches = ["--device", "cpu", "--prefill", "2", "--decode", "2", "--tokens", "33"]
    switches += ["--seconds", "0.02", "--json", str(written)]
    monkeypatch.setattr(sys, "argv", ["bench", *switches])
    monkeypatch.setattr(bench_channel_pairs, "exit_on_sigterm", lambda: None)
    bench_channel_pairs.main()
    figures = json.loads(written.read_text())["pairs"]
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for is_alone in (True, False):
        some = [one for one in figures if one["is_alone"] is is_alone]
        assert sorted((one["prefill"], one["decode"]) for one in some) == pairs
    assert {one["num_bytes"] for one in figures} == {3 * QWEN3_8B.block_bytes}
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("RESULT ") for line in lines) == len(figures) == 8
    total = sum(one["gb_s"] for one in figures if not one["is_alone"])
    assert f"| {total:.2f} " in lines[-1]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("decode:1", "raise SystemExit(3)", "failed: decode:1 with 3"),
        ("prefill:0", "raise SystemExit(4)", "failed: prefill:0 with 4"),
        ("prefill:0", "input()", "the time was over"),
    ],
)
def test_a_worker_that_fails_ends_the_bench_of_pairs(
    tmp_path: Path, name: str, text: str, reason: str
) -> None:
    limit_s = 0.0 if "time" in reason else 60.0
    with ExitStack() as stack:
        waits = {one: python("input()", stack) for one in ("prefill:0", "prefill:1", "decode:0")}
        workers = {**waits, name: python(text, stack)}
        with pytest.raises(SystemExit, match=reason):
            lines_until_over(workers, tmp_path / "figures", time.monotonic() + limit_s)


def python(text: str, stack: ExitStack) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE)
    stack.enter_context(process)
    stack.callback(process.kill)
    return process

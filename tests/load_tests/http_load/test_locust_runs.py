"""Whole loads: locust, the sweep and the chat as processes against a server that a test scripts."""

import json
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from load_tests.http_load.records import Header, Outcome, Record, RunReader
from load_tests.http_load.scenario import Changes, change, read_scenario
from load_tests.http_load.schedule import draw_sessions
from load_tests.sweep import main
from tests.harness.seeds import seed_of
from tests.load_tests.http_load.fake_openai import FakeOpenAI, Reply, running

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
SEED = seed_of(__name__)
TIMEOUT_S = 120
AGENTS = """
name: few
about: Conversations of three turns.
rate: 30
duration_s: 2
slo: {short: {ttft_ms: 5000}, long: {ttft_ms: 5000}}
load:
  kind: conversations
  num_turns: {kind: fixed, tokens: 3}
  system_tokens: 5
  question_tokens: {kind: uniform, min: 6, max: 9}
  output_tokens: {kind: fixed, tokens: 4}
"""


def locust_command(fake: FakeOpenAI, records: Path, *words: str) -> list[str]:
    command = [sys.executable, "-m", "locust", "-f", "load_tests/locustfile.py", "--headless"]
    command += ["--only-summary", f"--host={fake.url}", f"--records={records}", f"--seed={SEED}"]
    return [*command, "--shrink=32", *words]


def run_locust(fake: FakeOpenAI, records: Path, *words: str) -> tuple[Header, list[Record], str]:
    done = subprocess.run(
        locust_command(fake, records, *words),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    reader = RunReader(records)
    reader.refresh()
    assert reader.header is not None, done.stderr
    return reader.header, reader.records, done.stdout + done.stderr


def counts(records: list[Record]) -> Counter[Outcome]:
    return Counter(record.outcome for record in records)


def test_every_arrival_ends_as_completed_failed_or_cancelled(tmp_path: Path) -> None:
    replies = {
        1: Reply(status=429, headers=("Retry-After: 2",), message="full"),
        2: Reply(cut_after=0),
        3: Reply(error_after=0),
    }

    def script(number: int, body: dict[str, Any]) -> Reply:
        return replies.get(number % 5, Reply(gap_s=0.002)) if number >= 0 else Reply()

    with running(FakeOpenAI(script=script)) as fake:
        words = ("--rate=15", "--duration=3", "--cancelled=0.3", "--exit-code-on-error=0")
        header, records, log = run_locust(fake, tmp_path / "run.jsonl", *words)
    assert len(fake.load) == len(records) == header.num_arrivals
    assert {record.index for record in records} == set(range(header.num_arrivals))
    ends = counts(records)
    assert sum(ends.values()) == header.num_arrivals
    num_bad = sum(number % 5 in replies for number in range(header.num_arrivals))
    assert ends[Outcome.FAILED] == num_bad
    refused = [record for record in records if record.status == 429]
    assert len(refused) == sum(number % 5 == 1 for number in range(header.num_arrivals))
    asked_to_cancel = sum(
        turn.cancel_after_tokens is not None
        for session in draw_sessions(
            change(
                read_scenario("mixed"),
                Changes(rate=15, duration_s=3, share_cancelled=0.3, seed=SEED, shrink=32),
            )
        )
        for turn in session.turns
    )
    assert asked_to_cancel - num_bad <= ends[Outcome.CANCELLED] <= asked_to_cancel
    assert ends[Outcome.CANCELLED] + num_bad + ends[Outcome.COMPLETED] == header.num_arrivals
    for metric in ("TTFT", "TPOT", "ITL", "LAG", "POST", "SLO", "REFUSED"):
        assert f"\n{metric} " in log
    assert all(record.is_shed for record in refused)
    errors = log.partition("Error report")[2]
    assert "the stream" in errors
    assert "error event" in errors
    assert "429" not in errors, "a server that sheds load does what it should"


def test_a_stalled_server_does_not_slow_arrivals(tmp_path: Path) -> None:
    arrivals = draw_sessions(
        change(read_scenario("mixed"), Changes(rate=10, duration_s=2, seed=SEED, shrink=32))
    )
    fake = FakeOpenAI()
    stalled = Reply(waits_for=lambda: len(fake.load) == len(arrivals))
    fake.script = lambda number, body: stalled if number >= 0 else Reply()
    with running(fake):
        _, records, _ = run_locust(fake, tmp_path / "run.jsonl", "--rate=10", "--duration=2")
    assert counts(records) == {Outcome.COMPLETED: len(arrivals)}
    by_index = sorted(records, key=lambda record: record.index)
    assert [r.due_s for r in by_index] == pytest.approx([a.start_s for a in arrivals], abs=1e-5)
    # The server answers nobody before everybody has asked.
    assert max(record.sent_s or 0.0 for record in records) < min(r.chunk_s[0] for r in records)


def test_a_turn_of_a_conversation_repeats_the_answer_before_it(tmp_path: Path) -> None:
    path = tmp_path / "few.yaml"
    path.write_text(AGENTS)
    with running(FakeOpenAI()) as fake:
        words = (f"--scenario={path}", "--shrink=1", "--vocab-size=99")  # answers: 100 and up
        _, records, _ = run_locust(fake, tmp_path / "run.jsonl", *words)
    assert len(records) % 3 == 0
    assert counts(records) == {Outcome.COMPLETED: len(records)}
    prompts = sorted((seen.body["prompt"] for seen in fake.load), key=len)
    first = [prompt for prompt in prompts if 100 not in prompt]
    assert len({tuple(prompt[:5]) for prompt in first}) == 1  # all share the system prompt
    for prompt in first:
        turns = [other for other in prompts if other[: len(prompt)] == prompt]
        assert [turn.count(100) for turn in turns] == [0, 1, 2]
        for before, after in pairwise(turns):
            assert after[: len(before) + 4] == [*before, 100, 101, 102, 103]


def test_a_run_that_is_stopped_records_what_it_did_not_send(tmp_path: Path) -> None:
    records = tmp_path / "run.jsonl"
    with (
        running(FakeOpenAI(script=lambda n, body: Reply(gap_s=60.0 if n >= 0 else 0))) as fake,
        subprocess.Popen(
            locust_command(fake, records, "--rate=5", "--duration=600"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        try:
            fake.wait_until(lambda: len(fake.load) > 3, within_s=TIMEOUT_S)
            process.send_signal(signal.SIGTERM)
            log, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert "\nSTOPPED " in log
    assert "Error report" not in log, "nothing failed"
    reader = RunReader(records)
    reader.refresh()
    assert reader.header is not None
    assert len(reader.records) == reader.header.num_arrivals
    assert counts(reader.records) == {Outcome.STOPPED: reader.header.num_arrivals}
    num_sent = sum(record.sent_s is not None for record in reader.records)
    assert 4 <= num_sent < reader.header.num_arrivals


def sweep(fake: FakeOpenAI, out: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "load_tests.sweep", "--url", fake.url, "--out", str(out), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_a_sweep_writes_a_report_of_every_rate_and_seed(tmp_path: Path) -> None:
    out = tmp_path / "report"
    words = ["--shrink", "64", "--duration", "2", "--rates", "4", "9", "--seeds", "1", "2"]
    with running(FakeOpenAI(max_model_len=300)) as fake:
        done = sweep(fake, out, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / "results.json").read_text())
    assert [point["request_rate"] for point in results["points"]] == [4, 9]
    for point in results["points"]:
        assert point["failed"] == 0
        assert point["completed"] == point["num_prompts"] > 0
        assert set(point["by_seed"]) == {"1", "2"}
    # Two runs of one seed never send the same prompt: a prefix cache has nothing of theirs.
    prompts = [tuple(seen.body["prompt"]) for seen in fake.seen if len(seen.body["prompt"]) > 3]
    assert len(prompts) == len(set(prompts))
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert len(list(out.glob("*.jsonl"))) == 4


def test_a_sweep_that_cannot_be_run_says_why_and_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str) -> str:
        """What it says when it is run in this process."""
        given = ["sweep", "--url", fake.url, "--out", str(tmp_path / "report"), *words]
        monkeypatch.setattr(sys, "argv", given)
        with pytest.raises(SystemExit) as end:
            main()
        return str(end.value.code)

    with running(FakeOpenAI(max_model_len=100)) as fake:
        assert "serves fake, but not 'other'" in refused("--model", "other")
        assert "--shrink" in refused("--scenario", "mixed", "--duration", "20")
        assert "no such scenario" in refused("--scenario", "none")
        assert "--trace PATH" in refused("--scenario", "azure_trace")
        assert all(seen.body["max_tokens"] == 2 for seen in fake.seen)  # probes
    done = sweep(fake, tmp_path / "report")
    assert done.returncode == 1
    assert "no connection" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "report").exists()


def test_a_chat_repeats_what_was_said_until_it_is_reset() -> None:
    with running(FakeOpenAI(script=lambda number, body: Reply(num_tokens=3))) as fake:
        done = subprocess.run(
            [sys.executable, "-m", "load_tests.chat", "--url", fake.url],
            cwd=ROOT,
            input="hello\nand then\n/reset\nagain\n/quit\n",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    said = [[m["content"] for m in seen.body["messages"]] for seen in fake.seen]
    assert said == [["hello"], ["hello", " t0 t1 t2", "and then"], ["again"]]
    assert done.stdout.count("first token") == 3
    assert "3 tokens" in done.stdout

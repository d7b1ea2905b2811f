"""The script that shows what is chosen, on a CPU: every key, and problems that are problems."""

from pathlib import Path

import pytest

from load_tests.lab import show_choices
from load_tests.lab.show_choices import build_parser, run

MODEL = Path(__file__).resolve().parents[3] / "demo_model" / "laps-demo"
SWITCHES = ["--model", str(MODEL), "--device", "cpu", "--max-model-len", "256"]


@pytest.mark.slow
def test_every_choice_of_the_file_is_shown_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, problems = run(build_parser().parse_args(SWITCHES), tmp_path)
    assert problems == []
    for words in (
        "scheduler.max_num_seqs 128 (KV memory for about 32,768 tokens)",
        "laps.batch_prefill_max_rows 128 (",
        "laps.max_step_ms",
        "laps.max_mixed_step_ms",
        "laps.max_busy_step_ms",
        "scheduler.max_num_batched_tokens",
        "edge.max_queued_tokens",
        "step of 16 prompt tokens",
        "calibration:",
        "built in",
    ):
        assert words in report
    monkeypatch.setattr(show_choices, "MAX_CALIBRATION_S", 0.0)
    _, problems = run(build_parser().parse_args(SWITCHES), tmp_path)
    assert len(problems) == 1
    assert "the calibration took" in problems[0]

"""The bench of masks compares what it times, on a small vocabulary."""

import sys

import pytest

from load_tests.lab import bench_masks

pytestmark = [pytest.mark.lab, pytest.mark.slow]


def test_each_number_of_threads_has_its_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--rows 5 --vocab-size 40000 --steps 6 --threads 1 2"
    monkeypatch.setattr(sys, "argv", ["bench_masks", *asked.split()])
    bench_masks.main()
    said = capsys.readouterr().out
    assert all(f"| {number}       |" in said for number in (1, 2)), said
    assert "vocab_size: 40000" in said

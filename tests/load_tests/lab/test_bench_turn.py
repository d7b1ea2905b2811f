"""The figures of a turn are of steps in which every row has all drafts, and all are right."""

import re

import pytest

from load_tests.lab.bench_turn import main


def test_a_table_is_printed_for_each_drafter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drafters = ["host", "device", "model"]
    argv = ["bench_turn", "--rows", "2", "--drafts", "3", "--steps", "4", "--drafters", *drafters]
    monkeypatch.setattr("sys.argv", argv)
    main()
    printed = capsys.readouterr().out
    assert re.findall("2 rows, 3 drafts of each, drafter: (.*)", printed) == drafters
    names = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")]
    parts = ["plan", "launch", "wait", "commit", "encode", "sum of these", "a row"]
    assert names == ["figure", *parts] * 3

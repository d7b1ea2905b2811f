"""What counts against a gang, and that its record says so; the real thing takes minutes."""

import os
import subprocess
import sys
import uuid

import pytest

from engine.ranks.plan_ring import PlanRing
from load_tests.lab import gang_deaths
from load_tests.lab.gang_deaths import Outcome, render
from load_tests.testbed.traces import is_gone, left_of, rings_of

pytestmark = pytest.mark.lab


def outcome(**changes: object) -> Outcome:
    fields: dict[str, object] = {
        "role": "decode",
        "rank": 1,
        "signal": "SIGSTOP",
        "phase": "mid stream",
        "num_asks": 5,
        "num_wrong": 0,
        "num_lost": 0,
        "restored_s": 8.25,
        "left": "",
    }
    return Outcome(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({}, "| decode | 1 | SIGSTOP | mid stream | 5 of 5 | 0 | 0 | 8.2 | nothing |"),
        (
            {"num_wrong": 1},
            "| decode | 1 | SIGSTOP | mid stream | 4 of 5 | 1 | 0 | 8.2 | nothing |",
        ),
        ({"num_lost": 2}, "| decode | 1 | SIGSTOP | mid stream | 3 of 5 | 0 | 2 | 8.2 | nothing |"),
        (
            {"left": "@laps-ring-x"},
            "| decode | 1 | SIGSTOP | mid stream | 5 of 5 | 0 | 0 | 8.2 | @laps-ring-x |",
        ),
    ],
)
def test_whatever_is_wrong_lost_or_left_is_in_the_row_and_a_violation(
    changes: dict[str, object], row: str
) -> None:
    found = outcome(**changes)
    lines = [" ".join(line.split()) for line in render([found], "--seed 7", "cuda").splitlines()]
    assert row in lines
    assert found.is_violation == bool(changes)


def test_a_process_is_gone_once_it_has_ended() -> None:
    assert not is_gone(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not is_gone(child.pid)
    child.communicate(b"\n")
    assert is_gone(child.pid)


def test_a_ring_belongs_to_its_process_and_is_left_until_it_is_closed() -> None:
    name = f"traces-{uuid.uuid4().hex}"
    with PlanRing(name, 1, 1.0):
        assert rings_of([os.getpid()]) == left_of([f"@laps-ring-{name}"]) == {f"@laps-ring-{name}"}
        assert not rings_of([os.getppid()])
    assert not left_of([f"@laps-ring-{name}"])


@pytest.mark.parametrize(
    "options", [["--only", "no such phase"], ["--device", "cuda", "--sizes", "4", "8"]]
)
def test_a_run_without_a_cell_is_an_error(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It proves nothing, and would else end like one in which nothing was wrong."""
    monkeypatch.setattr(sys, "argv", ["gang_deaths", *options])
    monkeypatch.setattr(gang_deaths, "Cluster", None)
    monkeypatch.setattr(gang_deaths, "draw_cases", None)
    with pytest.raises(SystemExit) as ended:
        gang_deaths.main()
    assert ended.value.code == 2
    assert "no cell" in capsys.readouterr().err

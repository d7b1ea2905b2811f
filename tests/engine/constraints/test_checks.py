"""Constraints that are tried out in a process of their own: a verdict, in bounded time, for all."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from engine.constraints import check_child
from engine.constraints.checks import MAX_UNCHECKED, ConstraintChecks
from engine.errors import CapacityError, WorkerError
from engine.request import Constraint, ConstraintKind

MODEL = Path(__file__).parents[3] / "demo_model" / "laps-demo"
REGEX, GRAMMAR = ConstraintKind.REGEX, ConstraintKind.GRAMMAR
START_S = 60.0  # for a process on a machine that has much else to do


def deep_grammar(last: str) -> Constraint:
    """Each rule is in the one before it: the library follows them down its stack, and dies."""
    rules = [f'a{i}: "x" a{i} | a{i + 1}' for i in range(20_000)]
    return Constraint(GRAMMAR, "\n".join(["start: a0", *rules, f'a20000: "{last}"']))


def ambiguous_grammar(last: str) -> Constraint:
    """Each rule can be read in twice as many ways as the next."""
    rules = [f'r{i} ::= r{i + 1} r{i + 1} | "a" r{i + 1}' for i in range(40)]
    return Constraint(GRAMMAR, "\n".join(["root ::= r0", *rules, f'r40 ::= "{last}" | ""']))


@pytest.fixture(scope="module")
def checks() -> Iterator[ConstraintChecks]:
    made = ConstraintChecks(str(MODEL))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (REGEX, "[a-z]+(\\.[0-9]{2})?"),
        (REGEX, "\u00e9{3}"),
        (GRAMMAR, 'root ::= "a" root | "b"'),
        (ConstraintKind.JSON_SCHEMA, '{"type":"object","additionalProperties":true}'),
    ],
)
def test_a_constraint_that_outputs_can_meet_passes(
    checks: ConstraintChecks, kind: ConstraintKind, text: str
) -> None:
    assert checks.check(Constraint(kind, text)).result() == ""


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (REGEX, "(", "not closed"),
        (REGEX, "(?=a)b", "only groups"),
        (REGEX, "(" * 9000 + "a" + ")" * 9000, "cannot be compiled"),
        (GRAMMAR, 'root ::= "a" other', "cannot be compiled"),
        (GRAMMAR, "root ::= root", "nothing may follow"),
        (GRAMMAR, 'root ::= ""', "empty output"),
        (ConstraintKind.JSON_SCHEMA, '{"type":"strange"}', "cannot be compiled"),
        (ConstraintKind.STRUCTURAL_TAG, "{}", "cannot be compiled"),
    ],
)
def test_one_that_is_none_is_refused_in_words(
    checks: ConstraintChecks, kind: ConstraintKind, text: str, words: str
) -> None:
    assert words in checks.check(Constraint(kind, text)).result()


def test_one_that_can_be_read_in_too_many_ways_is_refused(checks: ConstraintChecks) -> None:
    assert "too many ways" in checks.check(ambiguous_grammar("c")).result()


def test_one_that_the_machine_had_no_time_for_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a plugin of pytest has its own
    request.addfinalizer(lambda: signal.signal(signal.SIGALRM, before))
    tries = tmp_path / "tries"  # a byte for each: every one is in a process of its own

    def judge(_: object, constraint: Constraint) -> str:
        with tries.open("ab") as file:
            file.write(b"x")
        if tries.stat().st_size == 1:
            os.kill(os.getpid(), signal.SIGALRM)  # as at the limit
        return ""

    monkeypatch.setattr(check_child, "judge", judge)
    nothing: Any = None
    assert check_child.judge_apart(nothing, Constraint(REGEX, "a")) == ""
    assert tries.stat().st_size == 2
    monkeypatch.setattr(check_child, "WALL_LIMIT_S", 0.1)
    monkeypatch.setattr(check_child, "judge", lambda *_: threading.Event().wait())
    assert check_child.judge_apart(nothing, Constraint(REGEX, "a")) is None


@pytest.mark.slow
def test_one_that_takes_too_long_is_refused_and_holds_up_no_other(
    checks: ConstraintChecks,
) -> None:
    endless = deep_grammar("c")
    started_s = time.monotonic()
    slow, quick = checks.check(endless), checks.check(Constraint(REGEX, "quick|words"))
    assert quick.result() == ""
    assert "takes too long" in slow.result()
    assert time.monotonic() - started_s < START_S + check_child.WALL_LIMIT_S
    assert checks.check(endless).done(), "a verdict is not kept"
    assert checks.check(Constraint(REGEX, "after it")).result() == ""


@pytest.mark.slow
def test_one_that_dies_of_its_limits_costs_the_next_one_no_new_start(
    checks: ConstraintChecks,
) -> None:
    def children() -> set[str]:
        tasks = Path("/proc/self/task").glob("*/children")
        return {pid for task in tasks for pid in task.read_text().split()}

    assert checks.check(Constraint(REGEX, "before it")).result() == ""
    before = children()
    assert "takes too long" in checks.check(deep_grammar("d")).result()
    assert checks.check(Constraint(REGEX, "behind it")).result() == ""
    assert children() <= before, "others may have ended meanwhile, and none has begun"


def test_the_same_constraint_is_checked_once(checks: ConstraintChecks) -> None:
    first, second = (checks.check(Constraint(REGEX, "twice")) for _ in range(2))
    assert first.result() == second.result() == ""


@pytest.mark.slow
def test_more_than_a_queueful_is_turned_away_and_the_others_are_answered(
    checks: ConstraintChecks,
) -> None:
    endless = [deep_grammar(last) for last in "xy"]
    under_way = [checks.check(constraint) for constraint in endless]
    under_way += [checks.check(Constraint(REGEX, f"n{i}")) for i in range(MAX_UNCHECKED - 2)]
    with pytest.raises(CapacityError):
        checks.check(Constraint(REGEX, "one too many"))
    wait(under_way)
    assert [future.result() == "" for future in under_way] == [False] * 2 + [True] * (
        MAX_UNCHECKED - 2
    )


def test_a_process_that_cannot_start_is_an_error_of_ours(tmp_path: Path) -> None:
    checks = ConstraintChecks(str(tmp_path))
    with pytest.raises(WorkerError, match="did not start"):
        checks.check(Constraint(REGEX, "a")).result()
    checks.close()

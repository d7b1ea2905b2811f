"""When an actor that hears no supervisor ends; what it ends with is tested on a real cluster."""

import pytest

from actors.lifecycle import liveness
from actors.lifecycle.liveness import CHECK_EVERY_S, Lifeline


def test_a_beat_counts_for_the_whole_silence_and_no_longer() -> None:
    lifeline = Lifeline(5 * CHECK_EVERY_S)  # not started: the looks are the test's
    for _ in range(3):
        assert [lifeline.look() for _ in range(5)] == [False] * 5
        lifeline.beat()
    assert [lifeline.look() for _ in range(6)] == [False] * 5 + [True]


def test_a_supervisor_that_ray_knows_is_waited_for_and_one_that_it_knows_no_more_is_not() -> None:
    known = {"supervisor"}
    lifeline = Lifeline(4 * CHECK_EVERY_S, lambda: "supervisor" in known)
    assert not any(lifeline.look() for _ in range(61))
    known.clear()
    looks = [lifeline.look() for _ in range(5)]
    assert looks.index(True) >= 2, "from half the silence on it was not asked for"


def test_the_last_act_is_done_before_the_end_unless_somebody_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def last_act() -> bool:
        done.append("act")
        if done.count("act") == 2:
            lifeline.beat()
        return done.count("act") == 4

    lifeline = Lifeline(2 * CHECK_EVERY_S, last_act=last_act)
    monkeypatch.setattr(liveness.time, "sleep", lambda _: done.append("wait"))
    monkeypatch.setattr(liveness, "exit_for_good", lambda: done.append("end"))
    lifeline._watch()
    assert done == [
        *("wait", "wait", "act", "wait", "act"),
        *("wait", "wait", "wait", "act", "wait", "act", "end"),
    ]


def test_a_question_that_fails_leaves_the_silence_to_decide() -> None:
    def fail() -> bool:
        raise RuntimeError("Ray is gone")

    lifeline = Lifeline(4 * CHECK_EVERY_S, fail)
    assert [lifeline.look() for _ in range(5)] == [False] * 4 + [True]

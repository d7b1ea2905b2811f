"""An actor that says nothing is given up after so many calls in a row, never before it spoke."""

import random

from ray.serve._private import constants

from actors.lifecycle.liveness import MAX_UNANSWERED, SERVE_NAMESPACE, LivenessTracker

NAME = "decode-0.0a1b2c"


def _time_outs(calls: LivenessTracker, num: int, name: str = NAME) -> list[bool]:
    return [calls.timed_out(name) for _ in range(num)]


def test_who_has_never_answered_is_waited_for_as_long_as_it_takes() -> None:
    assert not any(_time_outs(LivenessTracker(), random.randrange(MAX_UNANSWERED, 99)))


def test_who_has_answered_is_given_up_once_after_so_many_calls_in_a_row() -> None:
    calls = LivenessTracker()
    calls.answered(NAME)
    assert _time_outs(calls, MAX_UNANSWERED) == [False] * (MAX_UNANSWERED - 1) + [True]
    assert not any(_time_outs(calls, MAX_UNANSWERED)), "it starts, and has not answered since"
    calls.answered(NAME)
    assert _time_outs(calls, MAX_UNANSWERED)[-1]


def test_an_answer_in_between_counts_anew() -> None:
    calls = LivenessTracker()
    for _ in range(3):
        calls.answered(NAME)
        assert not any(_time_outs(calls, MAX_UNANSWERED - 1))


def test_who_died_is_not_expected_to_answer_and_others_are() -> None:
    calls, other = LivenessTracker(), "prefill-0.0a1b2c"
    calls.answered(NAME)
    calls.answered(other)
    _time_outs(calls, MAX_UNANSWERED - 1)
    calls.forget(NAME)
    assert not any(_time_outs(calls, MAX_UNANSWERED))
    assert _time_outs(calls, MAX_UNANSWERED, other)[-1]


def test_who_is_created_anew_may_start_for_as_long_as_it_takes() -> None:
    calls, other = LivenessTracker(), "prefill-0.0a1b2c"
    calls.answered(NAME)
    calls.answered(other)
    calls.forget_others([other])  # it has no actor any more
    assert not any(_time_outs(calls, MAX_UNANSWERED))
    assert _time_outs(calls, MAX_UNANSWERED, other)[-1]


def test_who_is_expected_to_answer_is_given_up_though_it_never_did() -> None:
    calls = LivenessTracker()
    given_up = []
    for _ in range(2 * MAX_UNANSWERED):
        calls.expect(NAME)  # again and again, and still every call counts
        given_up += _time_outs(calls, 1)
    assert given_up == 2 * ([False] * (MAX_UNANSWERED - 1) + [True])


def test_supervisors_are_looked_for_where_serve_has_its_actors() -> None:
    assert SERVE_NAMESPACE == constants.SERVE_NAMESPACE

"""The check of answers over HTTP: what it takes for valid, and what it notices."""

import json
import random

import pytest

from load_tests.lab.check_answers import (
    Answer,
    Question,
    Tally,
    draw_question,
    is_met,
    judge_answer,
    judge_calls,
    read_stream,
    render,
)

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def calls(*pairs: tuple[str, str], finish: str = "tool_calls", content: str = "") -> Answer:
    return Answer(finish=finish, content=content, calls=list(pairs))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (calls(("go", '{"x": 1}')), None),
        (calls(("go", '{"x": "1"}')), "not of type"),
        (calls(("go", "[1]")), "not of type"),
        (calls(("went", "{}")), "calls went"),
        (calls(("go", '{"x": 1}'), content="So"), "has content"),
        (calls(finish="stop"), "and 0 calls"),
        (calls(finish="tool_calls"), "and 0 calls"),
        (calls(("go", '{"x": 1}'), finish="stop"), "and 1 calls"),
        (calls(("go", '{"x": 1'), finish="length"), None),
        (calls(("went", "{"), finish="length"), "calls went"),
        (calls(finish="length", content="So"), "has content"),
    ],
)
def test_calls_are_judged_by_name_arguments_and_what_stands_beside(
    answer: Answer, words: str | None
) -> None:
    problem = judge_calls(answer, {"go": POINT}, must_call=True)
    assert problem is None if words is None else words in str(problem)


def test_a_marker_in_what_is_shown_is_noticed_also_where_the_answer_was_cut() -> None:
    question = Question(kind="tools required", path="", body={}, judge=lambda _: None)
    cut = Answer(finish="length", content="", calls=[("go", '{"x": 1')])
    assert judge_answer(question, cut) is None
    leaking = Answer(finish="length", content="</tool_call", calls=[])
    assert judge_answer(question, leaking) == "shows </tool_call"


@pytest.mark.parametrize("finish", ["", "abort", "tool_calls"])
def test_an_answer_that_does_not_say_how_it_ended_is_noticed(finish: str) -> None:
    question = Question(kind="chat json", path="", body={}, judge=lambda _: None)
    assert "finished with" in str(judge_answer(question, Answer(finish=finish, content="{}")))


def test_a_run_in_which_nothing_ended_by_itself_is_not_met() -> None:
    cut = Tally(num_asked=3)
    cut.finishes["length"] += 2
    assert not is_met({"chat json": cut})
    cut.finishes["stop"] += 1
    assert is_met({"chat json": cut})
    assert "chat json" in render({"chat json": cut})


def test_a_stream_is_put_together_and_its_error_is_raised() -> None:
    def event(delta: object, finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return f"data: {json.dumps({'choices': [choice]})}\n\n"

    def piece(arguments: str, **more: str) -> dict[str, object]:
        name = {"name": more["name"]} if "name" in more else {}
        call = {"index": 0, "function": name | {"arguments": arguments}}
        return {"tool_calls": [call | ({"id": "c"} if name else {})]}

    text = event({"content": "So"}) + event(piece("", name="go")) + event(piece('{"x"'))
    text += event(piece(": 1}")) + event({}, "tool_calls") + "data: [DONE]\n\n"
    assert read_stream(text) == calls(("go", '{"x": 1}'), content="So")
    with pytest.raises(RuntimeError, match="stopping"):
        read_stream('data: {"error": {"message": "stopping"}}\n\n')
    with pytest.raises(RuntimeError, match="DONE"):
        read_stream(event({"content": "So"}))


def test_questions_are_the_same_for_a_seed_and_of_every_kind() -> None:
    seed = random.randrange(10**6)

    def drawn() -> list[Question]:
        draw = random.Random(seed)
        return [draw_question(draw, "m", [1, 2, 3, 4, 5], tools=True) for _ in range(200)]

    first, second = drawn(), drawn()
    assert [q.body for q in first] == [q.body for q in second]
    assert len({q.kind for q in first}) == 11

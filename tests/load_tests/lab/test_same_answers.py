"""Recordings of answers: what is normalised, what counts as a difference, and what does not."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from load_tests.lab.same_answers import Answer, differences, joined_events, main, normalised, read
from load_tests.lab.same_answers_requests import calls


def event(index: int, text: str, finish: str | None = None, **fields: Any) -> str:
    choice = {"index": index, "text": text, "finish_reason": finish} | fields
    return f"data: {json.dumps({'id': 'cmpl-ID', 'choices': [choice]})}\n\n"


def answer(body: str, *, name: str = "completion.text", kind: str = "application/json") -> Answer:
    return Answer(name=name, status=200, content_type=kind, body=body)


def differ(old: Answer, new: Answer) -> bool:
    return bool(differences({old.name: old}, {new.name: new}))


def test_ids_and_times_get_marks_and_nothing_else_does() -> None:
    body = f'{{"id":"cmpl-{"0a" * 16}","created":1700000000,"text":"cmpl-1, created: 5"}}'
    assert normalised(body) == '{"id":"cmpl-ID","created":"TIME","text":"cmpl-1, created: 5"}'
    assert normalised('{"queue_ms": 1.5e-3,"ms":4}') == '{"queue_ms":"TIME","ms":4}'


def test_streams_are_the_same_however_their_tokens_are_cut() -> None:
    whole = event(0, "ab", "stop", token_ids=[1, 2]) + event(1, "c", "length") + "data: [DONE]\n\n"
    cut = (
        event(0, "a", token_ids=[1])
        + event(1, "c", "length")
        + event(0, "b", "stop", token_ids=[2])
    )
    assert joined_events(whole) == joined_events(cut + "data: [DONE]\n\n")


@pytest.mark.parametrize(
    "other",
    [
        event(0, "ac", "stop") + "data: [DONE]\n\n",
        event(0, "ab", "length") + "data: [DONE]\n\n",
        event(0, "ab", "stop"),
        event(0, "ab", "stop") + event(1, "") + "data: [DONE]\n\n",
        event(0, "ab", "stop") + "data: [DONE]\n\ndata: {",
    ],
    ids=["text", "finish", "no end", "choice", "rest"],
)
def test_a_stream_that_says_something_else_differs(other: str) -> None:
    stream = event(0, "a") + event(0, "b", "stop") + "data: [DONE]\n\n"
    kind = "text/event-stream; charset=utf-8"
    assert not differ(answer(stream, kind=kind), answer(stream, kind=kind))
    assert differ(answer(stream, kind=kind), answer(other, kind=kind))


def test_scores_may_differ_in_their_last_digits_alone() -> None:
    def scored(value: float, num_cached: int, name: str = "score.texts") -> Answer:
        return answer(f'{{"scores":[{value}],"cached_tokens":{num_cached}}}', name=name)

    assert not differ(scored(0.12345678, 0), scored(0.12345679, 16))
    assert differ(scored(0.12345678, 0), scored(0.1244, 0))
    assert differ(scored(0.12345678, 0, "completion.x"), scored(0.12345679, 0, "completion.x"))


def test_compare_names_what_differs_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_bytes(b"\n".join(map(msgspec.json.encode, [answer("{}"), answer("1", name="gone")])))
    new.write_bytes(msgspec.json.encode(answer("[]")))
    assert main(["compare", str(old), str(old)]) == 0
    assert main(["compare", str(old), str(new)]) == 1
    shown = capsys.readouterr().out
    assert "completion.text:" in shown
    assert "gone: only in the old recording" in shown
    assert set(read(old)) == {"completion.text", "gone"}


def test_every_request_has_a_name_of_its_own() -> None:
    names = [call.name for call in calls("model")]
    assert len(names) > 200
    assert len(set(names)) == len(names)

"""Whether two versions of the application answer the same, byte for byte, over HTTP.

    python -m load_tests.lab.same_answers record --base-url http://127.0.0.1:8000 --out old.jsonl
    python -m load_tests.lab.same_answers compare old.jsonl new.jsonl

`record` sends the requests of same_answers_requests.py one at a time to an application of the demo
model and writes, a line each, `name`, `status`, `content_type` and `body`. Ids, `created`
and measured times are replaced by fixed marks; nothing else is. `compare` prints every difference
and exits with 1 if there is one.

Each recording needs an application that was just started, because a prefix cache remembers.

How many tokens one event of a stream carries, and in which order several choices go on, depends on
how steps, messages between processes and writes to a socket meet. So streams are compared after the
events of each choice were joined, by the order of the choices; the other events stay as they came.
Scores of several prompts are the same but for their last digits, because the batch that a prompt
falls in decides how its sums are rounded, and so is where its prefix is cached. `/metrics` and
`/laps_status` are measurements: of them names and types are compared.
"""

import argparse
import difflib
import http.client
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from load_tests.http_load.client import Server
from load_tests.http_load.sse import EventParser
from load_tests.lab.same_answers_requests import Call, calls

TIMEOUT_S = 120.0
SHOWN_LINES = 20  # of each difference
EVENT_STREAM = "text/event-stream"
CONTINUED_TEXTS = ("text", "content", "reasoning_content", "arguments")
SCORED = ("score.", "rerank.")
SCORE_TOLERANCE = 1e-4
DECIMAL = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")
CACHED = re.compile(r'"cached_tokens":\d+')
MEASURED = ("laps_status", "metrics")

Json = dict[str, Any]

MARKS: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"\b(cmpl|chatcmpl|score|rerank)-[0-9a-f]{32}\b"), r"\1-ID"),
    (re.compile(r"\bcall_[0-9a-f]{24}\b"), "call_ID"),
    (re.compile(r"\b(ingress|prefill|decode|unified)(-\d+)?[-.][0-9a-f]{8,32}\b"), r"\1\2-ID"),
    (re.compile(r'"created":\s*\d+'), '"created":"TIME"'),
    (re.compile(r'("[a-z_]+_ms":)\s*[0-9.e+-]+'), r'\1"TIME"'),
)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one request was answered; a line of a recording."""

    name: str
    status: int
    content_type: str
    body: str


# ---- record --------------------------------------------------------------------------------------


def record(server: Server, out: Path) -> int:
    """Ask everything in turn; returns how many requests were sent."""
    model = _model_name(server)
    num_sent = 0
    with out.open("wb") as file:
        for call in calls(model):
            file.write(msgspec.json.encode(_ask(server, call)) + b"\n")
            num_sent += 1
    return num_sent


def _model_name(server: Server) -> str:
    answer = _ask(server, Call(name="models", path="/v1/models"))
    return str(json.loads(answer.body)["data"][0]["id"])


def _ask(server: Server, call: Call) -> Answer:
    """A connection each, so that a refusal that closes one is the next request's no matter."""
    connection = server.connection(TIMEOUT_S)
    try:
        headers = server.headers | dict(call.headers)
        connection.request(call.method, server.path(call.path), body=call.body, headers=headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", errors="backslashreplace")
        return Answer(
            name=call.name,
            status=response.status,
            content_type=response.headers.get("content-type", ""),
            body=_described(text) if call.name in MEASURED else normalised(text),
        )
    except (OSError, http.client.HTTPException) as error:
        raise SystemExit(f"{call.name}: no answer from {server.url}: {error!r}") from error
    finally:
        connection.close()


def normalised(text: str) -> str:
    """The text with fixed marks where ids and times stood."""
    for pattern, mark in MARKS:
        text = pattern.sub(mark, text)
    return text


def _described(text: str) -> str:
    """Names and types of what was measured: of JSON every path, of metrics every family."""
    try:
        value = json.loads(text)
    except ValueError:
        return "\n".join(sorted({line for line in text.splitlines() if line.startswith("# TYPE")}))
    return "\n".join(sorted(set(_paths(value, "$"))))


def _paths(value: object, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, f"{path}.{normalised(key)}")
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item, f"{path}[]")
    else:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        yield f"{path}: {'number' if is_number else type(value).__name__}"


# ---- compare -------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Answer]:
    """A recording, by name. Raises ValueError if a name comes twice."""
    answers: dict[str, Answer] = {}
    for line in path.read_bytes().splitlines():
        answer = msgspec.json.decode(line, type=Answer)
        if answer.name in answers:
            raise ValueError(f"{path}: {answer.name!r} comes twice")
        answers[answer.name] = answer
    return answers


def differences(old: Mapping[str, Answer], new: Mapping[str, Answer]) -> list[str]:
    """One text for every request whose answers differ, or that one side lacks."""
    found = []
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in old or name not in new:
            found.append(f"{name}: only in the {'old' if name in old else 'new'} recording")
        elif lines := _difference(old[name], new[name]):
            found.append("\n".join([f"{name}:", *lines]))
    return found


def _difference(old: Answer, new: Answer) -> list[str]:
    before, after = _lines(old), _lines(new)
    if before == after or (old.name.startswith(SCORED) and _score_alike(old, new)):
        return []
    diff = difflib.unified_diff(before, after, "old", "new", n=0, lineterm="")
    return [f"  {line[:2000]}" for line in diff][:SHOWN_LINES]


def _score_alike(old: Answer, new: Answer) -> bool:
    """The same but for the last digits of decimals, and for how many tokens were cached."""
    if (old.status, old.content_type) != (new.status, new.content_type):
        return False
    before, after = (CACHED.sub("", answer.body) for answer in (old, new))
    if DECIMAL.sub("", before) != DECIMAL.sub("", after):
        return False
    pairs = zip(DECIMAL.findall(before), DECIMAL.findall(after), strict=True)
    return all(math.isclose(float(one), float(two), rel_tol=SCORE_TOLERANCE) for one, two in pairs)


def _lines(answer: Answer) -> list[str]:
    head = [f"status {answer.status}", f"content-type {answer.content_type}"]
    is_stream = answer.content_type.startswith(EVENT_STREAM)
    return head + (joined_events(answer.body) if is_stream else answer.body.splitlines())


def joined_events(body: str) -> list[str]:
    """The events of a stream: each choice as one event, by its index, and then all others in order.

    An event that carries several choices, or none, stays as it came.
    """
    choices: dict[int, Json] = {}
    others: list[Json | str] = []
    for data in EventParser().feed(body.encode()):
        event = _parsed(data)
        index = _only_choice(event)
        if isinstance(event, dict) and index is not None:
            choices[index] = _join(choices[index], event) if index in choices else event
        else:
            others.append(event)
    rest = body[body.rfind("\n\n") + 2 :] if "\n\n" in body else body
    events = [*(choices[index] for index in sorted(choices)), *others]
    return [json.dumps(event, sort_keys=True) for event in events] + [f"rest: {rest!r}"]


def _parsed(data: str) -> Json | str:
    """What is not an object stays a text: the end of a stream."""
    try:
        event = json.loads(data)
    except ValueError:
        return data
    return event if isinstance(event, dict) else data


def _only_choice(event: Json | str) -> int | None:
    """The index of the choice that an event is about; None if it is not about just one."""
    choices = event.get("choices") if isinstance(event, dict) else None
    return int(choices[0]["index"]) if choices and len(choices) == 1 else None


def _join(one: Json, two: Json) -> Json:
    """One object for two of which the second continues the first."""
    both = {key: _join_field(key, one[key], two[key]) for key in one if key in two}
    return one | two | both


def _join_field(key: str, before: object, after: object) -> object:
    if isinstance(before, list) and isinstance(after, list):
        if key == "choices":
            return [_join(before[0], after[0])]
        return _join_calls(before, after) if key == "tool_calls" else before + after
    if isinstance(before, dict) and isinstance(after, dict):
        return _join(before, after)
    if isinstance(before, str) and isinstance(after, str) and key in CONTINUED_TEXTS:
        return before + after
    return before if after in (None, "") else after


def _join_calls(before: Sequence[Json], after: Sequence[Json]) -> list[Json]:
    calls = {call["index"]: call for call in before}
    for call in after:
        index = call["index"]
        calls[index] = _join(calls[index], call) if index in calls else call
    return list(calls.values())


# ---- command -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="ask a running application everything")
    recording.add_argument("--base-url", required=True, help="of the application, without /v1")
    recording.add_argument("--out", type=Path, required=True, help="file to write, JSON lines")
    comparing = commands.add_parser("compare", help="print what differs between two recordings")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "record":
        num_sent = record(Server(url=options.base_url), options.out)
        print(f"{num_sent} answers in {options.out}")
        return 0
    old, new = read(options.old), read(options.new)
    found = differences(old, new)
    print("\n".join([*found, f"{len(found)} of {len(old)} answers differ"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

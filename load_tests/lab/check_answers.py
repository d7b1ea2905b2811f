"""Whether what a server answers under a constraint is valid, whatever its tokens are pushed to.

    python -m load_tests.lab.check_answers --url http://127.0.0.1:8000 --count 2000 --seed 7

Asks for JSON of random schemas, regular expressions, choices and tool calls, in both dialects,
streamed and not, greedy and drawn, with a `logit_bias` towards characters that break JSON. What
finishes with `stop` or `tool_calls` has to be valid (`json_oracle.find_problem`), what is cut
by its length must not show a marker, a refusal has to be a 400, and some greedy answers have to be
the same streamed and not. Exits with 1 otherwise, or if nothing ended by itself. For a server of
this project with a model whose template knows tools (`--no-tools` for others), and with
`model.deterministic`, or another batch may be another greedy answer.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from load_tests.tables import render_rows
from load_tests.testbed.json_oracle import find_problem
from load_tests.testbed.random_schemas import SchemaKind, schema_of

Json = dict[str, Any]
Judge = Callable[["Answer"], str | None]  # why it is not valid

KINDS = [kind for kind in SchemaKind if kind is not SchemaKind.WRONG]
PUSHED = ("\t", "\n", "\r", "\x00", "\x1f", '"', "\\", "{", "}", "[", "]", ",", ":", "0", "9", "e")
MARKERS = ("<tool_call", "</tool_call", "[TOOL_CALLS", "<|python_tag|>")
REGEXES = ("[a-z]{2,5}", "(yes|no)!", "a.b", "\\d{3}-[A-F]+", "[^\\n]{1,8}", '"\\w*"')
CHOICES = (["red", "green"], ['n"o\n', "yes"], ["\\", "é", "\t"])
PROMPT = "def settings():\n    return "
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One choice, put together from its chunks if it was streamed."""

    finish: str
    content: str
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request and what its answer is held to."""

    kind: str
    path: str
    body: Json
    judge: Judge
    is_asked_twice: bool = False  # streamed and not, for the same answer


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of one kind of questions."""

    num_asked: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    num_twice: int = 0
    problems: list[str] = field(default_factory=list)


# ---- questions -----------------------------------------------------------------------------------


def draw_question(draw: random.Random, model: str, ids: Sequence[int], *, tools: bool) -> Question:
    """A random one; `ids` are those that a bias may push."""
    makers = [_by_format, _by_outputs, _by_text] + [_by_tools] * (2 * tools)
    question = draw.choice(makers)(draw)
    body = question.body | {
        "model": model,
        "max_tokens": draw.choice([5, 100, 400]),
        "temperature": draw.choice([0.0, 1.0]),
        "seed": draw.randrange(2**31),
        "stream": draw.random() < 0.5,
    }
    if draw.random() < 0.8:
        strength = draw.choice([5, 20, 100])
        body["logit_bias"] = {
            str(i): draw.choice([strength, strength, -100])
            for i in draw.sample(ids, min(len(ids), 4))
        }
    is_asked_twice = body["temperature"] == 0.0 and draw.random() < 0.3
    return replace(question, body=body, is_asked_twice=is_asked_twice)


def _by_format(draw: random.Random) -> Question:
    schema = schema_of(draw.choice(KINDS), draw)
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return _held("json_schema", {"response_format": described}, draw, lambda a: _text(schema, a))


def _by_outputs(draw: random.Random) -> Question:
    schema = schema_of(draw.choice(KINDS), draw)
    return _held("json", {"structured_outputs": {"json": schema}}, draw, lambda a: _text(schema, a))


def _by_text(draw: random.Random) -> Question:
    if draw.random() < 0.5:
        choices = draw.choice(CHOICES)
        fields: Json = {"structured_outputs": {"choice": choices}}
        return _held(
            "choice", fields, draw, lambda a: None if a.content in choices else "no choice"
        )
    pattern = draw.choice(REGEXES)
    fields = {"structured_outputs": {"regex": pattern}}

    def judge(answer: Answer) -> str | None:
        return None if re.fullmatch(pattern, answer.content) else f"is not {pattern}"

    return _held("regex", fields, draw, judge)


def _held(name: str, fields: Json, draw: random.Random, judge: Judge) -> Question:
    """In one dialect or the other."""
    if draw.random() < 0.5:
        body = {"prompt": PROMPT} | fields
        return Question(kind=f"completion {name}", path="/v1/completions", body=body, judge=judge)
    return Question(
        kind=f"chat {name}", path="/v1/chat/completions", body=_chat(fields), judge=judge
    )


def _by_tools(draw: random.Random) -> Question:
    kinds = [kind for kind in KINDS if kind is not SchemaKind.OPEN]  # these hardly ever end
    schemas = {f"tool_{i}": schema_of(draw.choice(kinds), draw) for i in range(draw.randint(1, 3))}
    how = draw.choice(["required", "named", "strict"])
    named = next(iter(schemas))
    functions = [
        {"name": name, "parameters": schema} | ({"strict": True} if how == "strict" else {})
        for name, schema in schemas.items()
    ]
    fields: Json = {"tools": [{"type": "function", "function": f} for f in functions]}
    if how == "required":
        fields["tool_choice"] = "required"
    if how == "named":
        fields["tool_choice"] = {"type": "function", "function": {"name": named}}
        schemas = {named: schemas[named]}
    must_call = how != "strict"
    return Question(
        kind=f"tools {how}",
        path="/v1/chat/completions",
        body=_chat(fields),
        judge=lambda answer: judge_calls(answer, schemas, must_call=must_call),
    )


def _chat(fields: Json) -> Json:
    return {"messages": [{"role": "user", "content": "What are the settings?"}]} | fields


# ---- judgement -----------------------------------------------------------------------------------


def judge_answer(question: Question, answer: Answer) -> str | None:
    """Why an answer must not be what it is; None = it may."""
    may_call = question.kind.startswith("tools")
    shown = [answer.content, *(arguments for _, arguments in answer.calls)]
    leaked = [marker for marker in MARKERS if any(marker in text for text in shown)]
    if leaked and may_call:
        return f"shows {leaked[0]}"
    if answer.finish not in ("stop", "length", *["tool_calls"] * may_call):
        return f"finished with {answer.finish!r}"
    if answer.finish == "length" and not may_call:
        return None
    return question.judge(answer)


def _text(schema: Json, answer: Answer) -> str | None:
    return find_problem(schema, answer.content)


def judge_calls(answer: Answer, schemas: Mapping[str, Json], *, must_call: bool) -> str | None:
    """Of an answer with tools; what is cut by its length may end within a call."""
    if must_call and answer.content:
        return "has content beside its calls"
    if unknown := [name for name, _ in answer.calls if name not in schemas]:
        return f"calls {unknown[0]}"
    if answer.finish == "length":
        return None
    if (answer.finish == "tool_calls") != bool(answer.calls) or (must_call and not answer.calls):
        return f"finished with {answer.finish!r} and {len(answer.calls)} calls"
    for name, arguments in answer.calls:
        problem = find_problem({"type": "object"}, arguments)
        problem = problem or find_problem(schemas[name], arguments)
        if problem:
            return f"{name}: {problem}"
    return None


# ---- the server ----------------------------------------------------------------------------------


def ask(client: httpx.Client, question: Question) -> Answer | str:
    """The answer, or why it was refused. Raises RuntimeError for any other status."""
    response = client.post(question.path, json=question.body)
    if response.status_code == 400:
        return str(response.json()["error"]["message"])
    if response.status_code != 200:
        raise RuntimeError(f"{response.status_code} {response.text[:200]}")
    if not question.body["stream"]:
        choice = response.json()["choices"][0]
        message = choice.get("message") or {"content": choice["text"]}
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or []
        ]
        return Answer(finish=choice["finish_reason"], content=message["content"] or "", calls=calls)
    return read_stream(response.text)


def read_stream(text: str) -> Answer:
    """From the events of one streamed choice. Raises RuntimeError for one without its end."""
    if not text.endswith("data: [DONE]\n\n") and '"error"' not in text:
        raise RuntimeError("a stream ended without [DONE]")
    content, finish, calls = "", "", list[list[str]]()
    for event in text.split("\n\n"):
        if not event.startswith("data: ") or event == "data: [DONE]":
            continue
        chunk = json.loads(event.removeprefix("data: "))
        if "error" in chunk:
            raise RuntimeError(str(chunk["error"]))
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                if call.get("id"):
                    calls.append([call["function"]["name"], ""])
                calls[-1][1] += call["function"].get("arguments") or ""
            finish = choice["finish_reason"] or finish
    return Answer(finish=finish, content=content, calls=[(name, args) for name, args in calls])


def pushed_ids(client: httpx.Client, model: str) -> list[int]:
    """Ids of the characters that a bias may push, where a token is that character alone."""
    found: list[int] = []
    for text in PUSHED:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        tokens = client.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        found += tokens if len(tokens) == 1 else []
    return sorted(set(found))


def run(client: httpx.Client, questions: Sequence[Question], workers: int) -> dict[str, Tally]:
    """Ask them all; each is judged as it comes."""
    tallies = {question.kind: Tally() for question in questions}

    def one(question: Question) -> None:
        tally = tallies[question.kind]
        tally.num_asked += 1
        problem: str | None
        try:
            answer = ask(client, question)
            if isinstance(answer, str):
                tally.refusals[answer.partition("': ")[2][:60] or answer[:60]] += 1
                return
            tally.finishes[answer.finish] += 1
            problem = judge_answer(question, answer)
            if problem is None and question.is_asked_twice:
                tally.num_twice += 1
                body = question.body | {"stream": not question.body["stream"]}
                again = ask(client, replace(question, body=body))
                problem = None if again == answer else f"the other way it is {again!r}"
        except (RuntimeError, httpx.HTTPError, ValueError, LookupError) as error:
            answer, problem = "", repr(error)
        if problem:
            tally.problems.append(f"{json.dumps(question.body)} gave {answer!r}: {problem}")

    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(one, questions))
    return tallies


def render(tallies: Mapping[str, Tally]) -> str:
    header = ("answers", "asked", "refused", "stop", "tool_calls", "length", "twice", "problems")
    rows = [
        (
            kind,
            str(tally.num_asked),
            str(tally.refusals.total()),
            *(str(tally.finishes[finish]) for finish in ("stop", "tool_calls", "length")),
            str(tally.num_twice),
            str(len(tally.problems)),
        )
        for kind, tally in sorted(tallies.items())
    ]
    reasons = sum((tally.refusals for tally in tallies.values()), Counter[str]())
    refused = [("refused because", "count"), *((r, str(n)) for r, n in reasons.most_common())]
    problems = [problem for tally in tallies.values() for problem in tally.problems]
    return "\n\n".join([render_rows([header, *rows]), render_rows(refused), *problems])


def is_met(tallies: Mapping[str, Tally]) -> bool:
    """Whether there is no problem, and something was there to be judged."""
    num_ended = sum(
        tally.finishes["stop"] + tally.finishes["tool_calls"] for tally in tallies.values()
    )
    return num_ended > 0 and not any(tally.problems for tally in tallies.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--no-tools", action="store_true")
    args = parser.parse_args()
    with httpx.Client(base_url=args.url, timeout=TIMEOUT_S) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        ids, draw = pushed_ids(client, model), random.Random(args.seed)
        if not ids:
            sys.exit("no token of this model is one of the characters to push: nothing to check")
        questions = [
            draw_question(draw, model, ids, tools=not args.no_tools) for _ in range(args.count)
        ]
        tallies = run(client, questions, args.clients)
    print(render(tallies))
    sys.exit(0 if is_met(tallies) else 1)


if __name__ == "__main__":
    main()

"""Tool calls found in text: three formats, any way of cutting it, and nothing ever lost."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.openai.chat_dialect import ToolFormat, build_tool_parser
from actors.openai.tools.call_reader import MAX_DEPTH, JsonScanner
from actors.openai.tools.events import CallArguments, CallEnded, CallStarted, Content, Event

HERMES, LLAMA3, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA3_JSON, ToolFormat.MISTRAL
NAMES = frozenset({"add", "get_weather"})
ARGUMENTS = '{"city": "Zwölf } \\" [", "days": [1, -2.5e3, {"x": null}], "e": {}}'


@dataclass
class Read:
    """What a client would put together from events."""

    content: str = ""
    calls: list[tuple[str, str, bool | None]] = field(default_factory=list)


def read(events: Sequence[Event]) -> Read:
    found = Read()
    for event in events:
        match event:
            case Content(text):
                assert text, "an empty event says nothing"
                found.content += text
            case CallStarted(name):
                assert not found.calls or found.calls[-1][2] is not None, "calls interleave"
                found.calls.append((name, "", None))
            case CallArguments(text):
                name, arguments, ended = found.calls[-1]
                assert ended is None
                found.calls[-1] = (name, arguments + text, None)
            case CallEnded(is_complete):
                name, arguments, ended = found.calls[-1]
                assert ended is None
                found.calls[-1] = (name, arguments, is_complete)
    assert all(ended is not None for _, _, ended in found.calls)
    return found


def parse(tool_format: ToolFormat, pieces: Sequence[str]) -> Read:
    parser = build_tool_parser(tool_format, NAMES)
    events = [event for piece in pieces for event in parser.push(piece)]
    return read(events + parser.finish())


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def parse_cut(tool_format: ToolFormat, text: str) -> Read:
    """An answer whose tokens were used up behind `text`."""
    parser = build_tool_parser(tool_format, NAMES)
    return read([*parser.push(text), *parser.finish(is_cut=True)])


MISTRAL_CALLS = (
    'So: [TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "get_weather", "arguments": '
    + ARGUMENTS
    + "}]"
)
WHOLE_ANSWERS = [
    (HERMES, "Let me see.\n" + hermes("add", "{}") + "\n" + hermes("get_weather", ARGUMENTS)),
    (HERMES, hermes("get_weather", ARGUMENTS) + "  "),
    (LLAMA3, llama("add", "{}") + "; " + llama("get_weather", ARGUMENTS)),
    (LLAMA3, "<|python_tag|>" + llama("get_weather", ARGUMENTS)),
    (MISTRAL, MISTRAL_CALLS),
    (MISTRAL, "[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]" + ARGUMENTS),
]


@pytest.mark.parametrize(("tool_format", "text"), WHOLE_ANSWERS)
def test_an_answer_that_is_cut_anywhere_shows_a_part_of_the_whole_one(
    tool_format: ToolFormat, text: str
) -> None:
    """No half of a marker, and of a call only what is certainly one."""
    whole = parse(tool_format, [text])
    for length in range(len(text) + 1):
        found = parse_cut(tool_format, text[:length])
        is_first_object = tool_format is LLAMA3 and not found.calls and text.startswith("{")
        if not is_first_object:  # nothing announced it: it may be any answer in JSON
            assert whole.content.startswith(found.content.rstrip()), text[:length]
        assert len(found.calls) <= len(whole.calls)
        for (name, arguments, is_complete), (all_of, entire, _) in zip(
            found.calls, whole.calls, strict=False
        ):
            assert name == all_of
            assert entire.startswith(arguments)
            assert not is_complete or arguments == entire


# (format, text, content, [(name, arguments, complete)])
ROWS: list[tuple[ToolFormat, str, str, list[tuple[str, str, bool]]]] = [
    (HERMES, "No call, <b>text</b> <tool", "No call, <b>text</b> <tool", []),
    (HERMES, "  spaces stay \n", "  spaces stay \n", []),
    (HERMES, hermes("add", ARGUMENTS), "", [("add", ARGUMENTS, True)]),
    (
        HERMES,
        "Let me see.\n" + hermes("add", "{}") + "\n" + hermes("get_weather", ARGUMENTS) + "\n",
        "Let me see.",
        [("add", "{}", True), ("get_weather", ARGUMENTS, True)],
    ),
    (HERMES, hermes("add", "{}") + "\nand then", "and then", [("add", "{}", True)]),
    (
        HERMES,
        f'<tool_call>{{"id": [7], "arguments" : {ARGUMENTS} , "name":"add"}}</tool_call>',
        "",
        [("add", ARGUMENTS, True)],
    ),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}", True)]),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"b  c\\"}"}</tool_call>',
        "",
        [("add", '{"a": "b  c"}', True)],
    ),
    (HERMES, '<tool_call>{"name": "add", "arguments": {}}', "", [("add", "{}", True)]),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x',
        "",
        [("add", '{"a": 1, "b": "x', False)],
    ),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": nul}}</tool_call>',
        "}}</tool_call>",
        [("add", '{"a": nul', False)],
    ),
    (LLAMA3, llama("add", ARGUMENTS), "", [("add", ARGUMENTS, True)]),
    (LLAMA3, " \n" + llama("add", "{}"), "", [("add", "{}", True)]),
    (LLAMA3, "<|python_tag|>" + llama("add", "{}"), "", [("add", "{}", True)]),
    (LLAMA3, "Sure.<|python_tag|> " + llama("add", "{}"), "Sure.", [("add", "{}", True)]),
    (
        LLAMA3,
        llama("add", "{}") + "; " + llama("get_weather", ARGUMENTS),
        "",
        [("add", "{}", True), ("get_weather", ARGUMENTS, True)],
    ),
    (LLAMA3, llama("add", "{}") + "; so", "; so", [("add", "{}", True)]),
    (LLAMA3, "So: " + llama("add", "{}"), "So: " + llama("add", "{}"), []),
    (LLAMA3, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (LLAMA3, '{"answer": 4}', '{"answer": 4}', []),
    (LLAMA3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (
        MISTRAL,
        f'[TOOL_CALLS][{{"name": "add", "arguments": {ARGUMENTS}, "id": "abc"}}]',
        "",
        [("add", ARGUMENTS, True)],
    ),
    (MISTRAL, "[TOOL_CALLS]" + " " * 40 + '[{"name": "add"}]', "", [("add", "{}", True)]),
    (
        MISTRAL,
        'On it.[TOOL_CALLS] [{"name": "add", "arguments": {}},'
        ' {"name": "get_weather", "arguments": {"a": 1}}]',
        "On it.",
        [("add", "{}", True), ("get_weather", '{"a": 1}', True)],
    ),
    (MISTRAL, f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}", "", [("add", ARGUMENTS, True)]),
    (MISTRAL, '[TOOL_CALLS]add{"a": 1}', "", [("add", '{"a": 1}', True)]),
    (
        MISTRAL,
        'Hm[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]x1y2[ARGS]{}',
        "Hm",
        [("add", '{"a": 1}', True), ("get_weather", "{}", True)],
    ),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a', "", [("add", '{"a', False)]),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "add", "arguments": {}}, oh',
        ", oh",
        [("add", "{}", True)],
    ),
]
# Nothing in these is a call of an offered function.
NO_CALLS = [
    (HERMES, hermes("sub", ARGUMENTS)),
    (HERMES, "<tool_call>add(1, 2)</tool_call>"),
    (HERMES, "<tool_call>{}</tool_call>"),
    (HERMES, "<tool_call>[]</tool_call>"),
    (HERMES, '<tool_call> {"name": "add", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {\'a\': 1}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": "not json"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add"'),
    (HERMES, "<tool_call>" * 3),
    (LLAMA3, '{"name": "add", "parameters": 4}'),
    (LLAMA3, '{"name": "add'),
    (LLAMA3, '<|python_tag|>brave_search.call(query="x")'),
    (LLAMA3, "<|python_tag"),
    (MISTRAL, "[TOOL_CALLS] hello"),
    (MISTRAL, '[TOOL_CALLS]sub[ARGS]{"a": 1}'),
    (MISTRAL, "[TOOL_CALLS]add[ARGS]"),
    (MISTRAL, "[TOOL_CALLS]add[ARGS][1]"),
    (MISTRAL, "[TOOL_CALLS]add(1)"),
    (MISTRAL, "[TOOL_CALLS][]"),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, "[TOOL_CALLS]" + " " * 40 + 'add[ARGS]{"a": 1}'),
    (MISTRAL, "[TOOL_CALLS]add[CALL_ID]" + "x y " * 60),
    (MISTRAL, "[TOOL_CA"),
]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), ROWS)
def test_calls_and_content_are_told_apart_however_the_text_is_cut(
    tool_format: ToolFormat, text: str, content: str, calls: list[tuple[str, str, bool]]
) -> None:
    assert parse(tool_format, [text]) == Read(content, list(calls))
    assert parse(tool_format, list(text)) == Read(content, list(calls))
    rng = random.Random(text)
    for _ in range(20):
        assert parse(tool_format, cut(text, rng)) == Read(content, list(calls))


@pytest.mark.parametrize(("tool_format", "text"), NO_CALLS)
def test_what_only_looks_like_a_call_stays_content_to_the_letter(
    tool_format: ToolFormat, text: str
) -> None:
    for around in ("", "before ", "\n\n"):
        whole = text if tool_format is LLAMA3 and around == "before " else around + text
        assert parse(tool_format, [whole]) == Read(whole)
        assert parse(tool_format, list(whole)) == Read(whole)


@pytest.mark.parametrize(
    ("tool_format", "write"),
    [
        (HERMES, hermes),
        (LLAMA3, llama),
        (MISTRAL, lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{arguments}"),
    ],
)
def test_arguments_are_passed_on_while_they_are_written(
    tool_format: ToolFormat, write: Callable[[str, str], str]
) -> None:
    parser = build_tool_parser(tool_format, NAMES)
    seen: list[str] = []
    for char in write("add", ARGUMENTS):
        events = parser.push(char)
        assert len(events) <= 3
        seen += [event.text for event in events if isinstance(event, CallArguments)]
    assert "".join(seen) == ARGUMENTS
    assert len(seen) >= len(ARGUMENTS) - 2


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *('{"name": "add", ', '"arguments": ', '"parameters": ', "{", "}", "[", "]", ",", ";", ":"),
    *('"', "\\", "add", "sub", "1", " ", "\n", "null", "é", '{"a": 1}', "text"),
]


@settings(max_examples=400, deadline=None)
@given(
    tool_format=st.sampled_from(list(ToolFormat)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    seed=st.integers(0, 2**32),
)
def test_any_text_reads_the_same_in_any_pieces_and_keeps_every_letter(
    tool_format: ToolFormat, fragments: list[str], seed: int
) -> None:
    text = "".join(fragments)
    whole = parse(tool_format, [text])
    rng = random.Random(seed)
    assert parse(tool_format, list(text)) == whole
    assert parse(tool_format, cut(text, rng)) == whole
    if not whole.calls:
        assert whole.content == text
    for _, arguments, is_complete in whole.calls:
        if is_complete:
            assert isinstance(json.loads(arguments), dict)


EDITS = st.tuples(st.integers(0, 200), st.sampled_from(list('{}[]",:\\0.-eut \n')))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def scan(text: str) -> bool:
    scanner = JsonScanner()
    return all(scanner.push(char) for char in text) and scanner.is_done


def is_json(text: str) -> bool:
    def refuse(_: str) -> None:
        raise ValueError

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(
    value=st.lists(json_values, max_size=3),
    is_ascii=st.booleans(),
    indent=st.sampled_from([None, 1]),
    edits=st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from(list('{}[]",:\\0.-eut \n'))), max_size=2
    ),
)
def test_the_scanner_accepts_what_python_accepts(
    value: list[object], is_ascii: bool, indent: int | None, edits: list[tuple[int, str]]
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert scan(text)
    for place, char in edits:
        where = place % (len(text) + 1)
        text = text[:where] + char + text[where + (place % 2) :]
    if text.lstrip(" \n").startswith(("[", "{", '"')):
        assert scan(text) == is_json(text)


def test_the_scanner_bounds_depth() -> None:
    assert scan("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert not scan("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))

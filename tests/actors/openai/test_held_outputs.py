"""Requests for an output of a given form: what constraint they become, and calls parsers read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from actors.openai.chat_dialect import ChatDialect, ToolFormat, build_dialect, build_tool_parser
from actors.openai.chat_text import ChatText, hold_behind_thinking
from actors.openai.protocol import ParsedRequest, parse_chat, parse_completion
from actors.openai.served_model import ServedModel
from actors.openai.tools.call_reader import MAX_DEPTH
from actors.openai.tools.events import CallArguments, CallEnded, CallStarted, Content
from configs.schema import ApiConfig, EdgeConfig
from engine.constraints.vocabulary import Vocabulary
from engine.errors import RequestError
from engine.messages import decode, encode
from engine.request import Constraint, ConstraintKind, SamplingParams, Thinking
from engine.text.tokenizing import load_tokenizer
from tests.actors.openai.dialects import DIALECT
from tests.engine.constraints.following import allows, demo_vocabulary
from tests.harness.tokenizer_folders import byte_level_folder

MODEL = ServedModel(name="tiny", max_model_len=100, vocab_size=500, dialect=DIALECT)
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "tag": {"enum": ["a", "b"]}},
    "required": ["x"],
}
MOVE = {"type": "function", "function": {"name": "move-to", "parameters": POINT}}
WAIT = {"type": "function", "function": {"name": "wait"}}
STRICT = {"type": "function", "function": {"name": "go", "parameters": POINT, "strict": True}}


def chat(model: ServedModel = MODEL, **fields: Any) -> ParsedRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat(json.dumps(body).encode(), EdgeConfig(), model, lambda: 1)


def speaking(tool_format: ToolFormat) -> ServedModel:
    return replace(MODEL, dialect=ChatDialect(knows_tools=True, tool_format=tool_format))


def constraint_of(parsed: ParsedRequest) -> Constraint:
    params = parsed.sampling
    assert params.constraint is not None
    assert decode(encode(params), SamplingParams) == params
    return params.constraint


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return demo_vocabulary()


def test_without_a_form_there_is_no_constraint() -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None},
    ]
    for fields in cases:
        assert chat(**fields).sampling.constraint is None


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"a": [1]}', "{}"], ["[1]", "x"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p"}}},
            ['{"x": 3}', '{"x": -1, "tag": "b"}'],
            ["{}", '{"x": "3"}', '{"x": 3, "y": 4}'],
        ),
        ({"structured_outputs": {"json": POINT}}, ['{"x": 3}'], ["{}"]),
        ({"structured_outputs": {"json": json.dumps(POINT)}}, ['{"x": 3}'], ["{}"]),
        ({"structured_outputs": {"regex": "a+|b"}}, ["aaa", "b"], ["ab", ""]),
        ({"structured_outputs": {"choice": ["yes", 'n"o\n']}}, ["yes", 'n"o\n'], ["ye", "no"]),
        ({"structured_outputs": {"grammar": 'root ::= "x" root | "y"'}}, ["xxy"], ["xx"]),
        ({"json_schema": json.dumps(POINT)}, ['{"x": 3}'], ["{}"]),
        ({"regex": "a+|b"}, ["aaa", "b"], ["ab", ""]),
        ({"ebnf": 'root ::= "x" root | "y"'}, ["xxy"], ["xx"]),
    ],
)
def test_a_form_allows_what_it_says_and_nothing_else(
    vocabulary: Vocabulary, fields: Any, good: list[str], bad: list[str]
) -> None:
    fields = json.loads(json.dumps(fields))
    described = fields.get("response_format", {}).get("json_schema")
    for strict in (None, True, False):
        if described is not None:
            described |= {"schema": POINT, "strict": strict}
        constraint = constraint_of(chat(**fields))
        assert [allows(vocabulary, constraint, text) for text in good] == [True] * len(good)
        assert [allows(vocabulary, constraint, text) for text in bad] == [False] * len(bad)


def test_completions_take_the_same_forms() -> None:
    cases: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
    ]
    for fields in cases:
        body = json.dumps({"model": "tiny", "prompt": "x"} | fields).encode()
        parsed = parse_completion(body, EdgeConfig(), MODEL, lambda: 1)
        assert constraint_of(parsed) == constraint_of(chat(**fields))


def test_a_long_constraint_is_refused_by_its_size() -> None:
    with pytest.raises(RequestError) as caught:
        chat(structured_outputs={"regex": "a" * 70_000})
    assert caught.value.param == "structured_outputs.regex"
    assert caught.value.code == "string_above_max_length"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "unknown_parameter"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty_array"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "empty_string"),
        ({"regex": ""}, "regex", "empty_string"),
        ({"json_schema": "{"}, "json_schema", "invalid_type"),
        ({"regex": "a", "ebnf": "b"}, "regex", "invalid_value"),
        ({"structured_outputs": {"regex": "a"}, "regex": "a"}, "regex", "invalid_value"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "invalid_type"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_type"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "invalid_value"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", "invalid_value"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "invalid_value",
        ),
    ],
)
def test_a_form_that_is_none_is_refused_by_name(
    fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.param, caught.value.code) == (param, code)


HERMES = '<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>'
LLAMA = '{{"name": "{0}", "parameters": {1}}}'
OBJECT = '{{"name": "{0}", "arguments": {1}}}'


def written(tool_format: ToolFormat, *calls: tuple[str, str]) -> str:
    """Calls as a model of that format is to write them."""
    match tool_format:
        case ToolFormat.HERMES:
            return "\n".join(HERMES.format(*call) for call in calls)
        case ToolFormat.LLAMA3_JSON:
            return "; ".join(LLAMA.format(*call) for call in calls)
    return f"[TOOL_CALLS][{', '.join(OBJECT.format(*call) for call in calls)}]"


ONE, TWO = ("move-to", '{"x": 12, "tag": "a"}'), ("wait", "{}")


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_required_calls_are_calls_that_the_formats_parser_reads(
    vocabulary: Vocabulary, tool_format: ToolFormat
) -> None:
    parsed = chat(speaking(tool_format), tools=[MOVE, WAIT], tool_choice="required")
    constraint = constraint_of(parsed)
    assert constraint.kind is ConstraintKind.STRUCTURAL_TAG
    both = written(tool_format, ONE, TWO)
    assert allows(vocabulary, constraint, both)
    for text in ("Hello.", "", written(tool_format, ("go", "{}")), f"{both} and more"):
        assert not allows(vocabulary, constraint, text)
    assert not allows(vocabulary, constraint, written(tool_format, ("move-to", "{}")))
    parser = build_tool_parser(tool_format, parsed.tool_names)
    assert [*parser.push(both), *parser.finish()] == [
        CallStarted("move-to"),
        CallArguments(ONE[1]),
        CallEnded(True),
        CallStarted("wait"),
        CallArguments("{}"),
        CallEnded(True),
    ]


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_a_named_function_is_called_once(vocabulary: Vocabulary, tool_format: ToolFormat) -> None:
    choice = {"type": "function", "function": {"name": "move-to"}}
    constraint = constraint_of(chat(speaking(tool_format), tools=[MOVE, WAIT], tool_choice=choice))
    assert allows(vocabulary, constraint, written(tool_format, ONE))
    assert not allows(vocabulary, constraint, written(tool_format, TWO))
    assert not allows(vocabulary, constraint, written(tool_format, ONE, ONE))


def test_without_parallel_calls_one_is_required() -> None:
    first, many = (
        constraint_of(chat(tools=[WAIT], tool_choice="required", parallel_tool_calls=parallel))
        for parallel in (False, True)
    )
    assert first != many


def test_a_strict_function_may_be_left_uncalled_but_not_called_wrongly(
    vocabulary: Vocabulary,
) -> None:
    constraint = constraint_of(chat(tools=[STRICT, MOVE]))
    go = HERMES.format("go", '{"x": 1}')
    loose = HERMES.format("move-to", '{"what": ["ever"]}')
    for text in ("Just text.", go, f"First\n{go} then\n{loose}", ""):
        assert allows(vocabulary, constraint, text)
    for text in (HERMES.format("go", "{}"), HERMES.format("other", "{}"), "<tool_call>x"):
        assert not allows(vocabulary, constraint, text)
    parser = build_tool_parser(ToolFormat.HERMES, frozenset({"go"}))
    assert Content("First") in [*parser.push(f"First\n{go}"), *parser.finish()]


@pytest.mark.parametrize("tool_format", [ToolFormat.LLAMA3_JSON, ToolFormat.MISTRAL])
def test_a_strict_function_is_refused_where_text_and_calls_look_alike(
    tool_format: ToolFormat,
) -> None:
    with pytest.raises(RequestError) as caught:
        chat(speaking(tool_format), tools=[MOVE, STRICT])
    assert caught.value.param == "tools[1].function.strict"
    chat(speaking(tool_format), tools=[MOVE, STRICT], tool_choice="required")


def test_a_strict_function_is_held_where_special_tokens_begin_calls_too() -> None:
    dialect = replace(DIALECT, tool_markers={7: "<tool_call>"})
    marked = constraint_of(chat(replace(MODEL, dialect=dialect), tools=[STRICT]))
    assert marked == constraint_of(chat(tools=[STRICT]))  # test_tag_layout follows such tokens


ANY_OF = {
    "anyOf": [
        {"type": "string"},
        {"$ref": "#/$defs/point"},
        {"properties": {"y": {"const": 1}}, "required": ["y"]},
    ],
    "$defs": {"point": {"anyOf": [POINT, {"type": "null"}, {"$ref": "#/$defs/point"}]}},
}


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({}, ["{}", '{"a": [1]}'], ["1", '"a"', "[]", "null"]),
        ({"properties": {"x": {"type": "integer"}}}, ['{"x": 1}'], ["1"]),
        ({"$ref": "#/$defs/p", "$defs": {"p": POINT}}, ['{"x": 1}'], ["{}", "null"]),
        (ANY_OF, ['{"x": 1}', '{"y": 1}'], ['"a"', "null", "{}"]),
        ({"enum": [1, {"a": 1}, "b"]}, ['{"a": 1}'], ["1", '"b"']),
        ({"type": ["object", "null"], "required": ["z"]}, ['{"z": 0}'], ["null", "{}"]),
        ({"minLength": 2, "type": ["string", "object"]}, ["{}"], ['"abc"']),
    ],
)
@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_arguments_are_an_object_whatever_the_parameters_leave_open(
    vocabulary: Vocabulary,
    tool_format: ToolFormat,
    parameters: dict[str, Any],
    good: list[str],
    bad: list[str],
) -> None:
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    constraint = constraint_of(chat(speaking(tool_format), tools=[tool], tool_choice="required"))
    for arguments in good:
        text = written(tool_format, ("go", arguments))
        assert allows(vocabulary, constraint, text), text
        parser = build_tool_parser(tool_format, frozenset({"go"}))
        assert CallEnded(True) in [*parser.push(text), *parser.finish()]
    for arguments in bad:
        assert not allows(vocabulary, constraint, written(tool_format, ("go", arguments)))


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_an_output_of_calls_alone_never_shows_content_however_deep_or_cut(
    tool_format: ToolFormat,
) -> None:
    parsed = chat(speaking(tool_format), tools=[MOVE], tool_choice="required")
    deep = '{"x": ' + "[" * 2 * MAX_DEPTH + "]" * 2 * MAX_DEPTH + "}"
    text = written(tool_format, ONE, ("move-to", deep))
    for length in (5, 40, len(text) // 2, len(text)):
        reader = ChatText(parsed, starts_thinking=False)
        events = [*reader.push(text[:length]), *reader.finish(is_cut=True)]
        assert not [event for event in events if isinstance(event, Content)]


@pytest.mark.parametrize(
    "parameters", [{"type": "string"}, {"enum": [1]}, {"anyOf": [{"type": "null"}, {"$ref": "#"}]}]
)
def test_parameters_that_no_object_meets_are_refused_by_their_place(
    parameters: dict[str, Any],
) -> None:
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    with pytest.raises(RequestError, match="no object") as caught:
        chat(tools=[tool], tool_choice="required")
    assert caught.value.param == "tools[0].function.parameters"


JSON_OBJECT = {"response_format": {"type": "json_object"}}
THINKING = ChatDialect(splits_reasoning=True, thinking=Thinking(5, 6))


def test_a_form_is_for_what_comes_behind_a_models_thinking() -> None:
    thinks = replace(MODEL, dialect=THINKING)
    assert chat(thinks, **JSON_OBJECT).sampling.thinking == Thinking(5, 6)
    assert chat(thinks).sampling.thinking is None
    assert chat(**JSON_OBJECT).sampling.thinking is None


def test_a_models_thinking_is_known_where_its_markers_are_tokens(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)  # with <think>, without its end
    api = ApiConfig(reasoning_parser="think")
    assert build_dialect(None, api, load_tokenizer(folder)).thinking is None
    file = str(folder / "tokenizer.json")
    extended = Tokenizer.from_file(file)
    extended.add_tokens(["</think>"])
    extended.save(file)
    complete = load_tokenizer(folder)
    thinking = build_dialect(None, api, complete).thinking
    assert thinking is not None
    assert complete.piece(thinking.open_id) == b"<think>"
    assert complete.piece(thinking.close_id) == b"</think>"
    assert build_dialect(None, ApiConfig(reasoning_parser="none"), complete).thinking is None


@pytest.mark.parametrize(("tail", "is_open"), [("<think>\n", True), ("<think> a </think>", False)])
def test_thinking_that_the_prompt_begins_goes_on_before_the_form(
    tmp_path: Path, tail: str, is_open: bool
) -> None:
    tokenizing = load_tokenizer(byte_level_folder(tmp_path))
    (ids,) = tokenizing.encode_batch([f"Hello {tail}"], add_special_tokens=False)
    assert isinstance(ids, list)
    parsed = chat(replace(MODEL, dialect=THINKING), **JSON_OBJECT)
    held = hold_behind_thinking(parsed.sampling, parsed, ids, tokenizing)
    assert held.thinking == Thinking(5, 6, is_open)
    free = chat(replace(MODEL, dialect=THINKING))
    assert hold_behind_thinking(free.sampling, free, ids, tokenizing) == free.sampling


def test_thinking_without_a_token_that_ends_it_is_refused_only_where_the_prompt_begins_it(
    tmp_path: Path,
) -> None:
    tokenizing = load_tokenizer(byte_level_folder(tmp_path))
    parsed = chat(replace(MODEL, dialect=ChatDialect(splits_reasoning=True)), **JSON_OBJECT)
    inside, outside = tokenizing.encode_batch(["a <think>", "a"], add_special_tokens=False)
    assert isinstance(inside, list)
    assert isinstance(outside, list)
    with pytest.raises(RequestError, match="not one of its tokens"):
        hold_behind_thinking(parsed.sampling, parsed, inside, tokenizing)
    held = hold_behind_thinking(parsed.sampling, parsed, outside, tokenizing)
    assert held == parsed.sampling


FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}}
HERMES_CALL = '<tool_call>\n{"name": "move-to", "arguments": {"y": 4}}\n</tool_call>'
LLAMA_CALL = '{"name": "move-to", "parameters": {"y": 4}}'
MISTRAL_CALL = '[TOOL_CALLS][{"name": "move-to", "arguments": {"y": 4}}]'


@pytest.mark.parametrize(
    ("tool_format", "call"),
    [
        (ToolFormat.HERMES, HERMES_CALL),
        (ToolFormat.LLAMA3_JSON, LLAMA_CALL),
        (ToolFormat.MISTRAL, MISTRAL_CALL),
    ],
)
def test_with_tools_and_a_format_the_answer_is_a_call_or_an_object(
    tool_format: ToolFormat, call: str, vocabulary: Vocabulary
) -> None:
    parsed = chat(speaking(tool_format), tools=[MOVE], **FORM)
    constraint = constraint_of(parsed)
    assert allows(vocabulary, constraint, '{"x": 3}')
    assert allows(vocabulary, constraint, call), "arguments are free unless a function is strict"
    for text in ("words", '{"y": 4}', f'{{"x": 3}}{call}', call[:-3]):
        assert not allows(vocabulary, constraint, text)
    answer = ChatText(parsed, starts_thinking=False)
    assert answer.push('{"x": 3}') + answer.finish() == [Content('{"x": 3}')]
    calling = ChatText(parsed, starts_thinking=False)
    assert CallStarted("move-to") in calling.push(call) + calling.finish()


def test_a_required_call_needs_no_format(vocabulary: Vocabulary) -> None:
    constraint = constraint_of(chat(tools=[MOVE], tool_choice="required", **FORM))
    assert not allows(vocabulary, constraint, '{"x": 3}')
    held = HERMES_CALL.replace('{"y": 4}', '{"x": 3}')
    assert allows(vocabulary, constraint, held)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered(mode: str, vocabulary: Vocabulary) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "wait"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    parsed = chat(tools=[MOVE, WAIT], tool_choice=choice)
    assert parsed.tool_names == {"wait"}
    (prompt,) = parsed.prompts
    assert not isinstance(prompt, list)
    assert [t["function"]["name"] for t in prompt.chat_template_kwargs["tools"]] == ["wait"]  # type: ignore[attr-defined]
    assert parsed.holds_calls == (mode == "required")
    if mode == "required":
        assert allows(
            vocabulary,
            constraint_of(parsed),
            '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>',
        )
        assert not allows(vocabulary, constraint_of(parsed), HERMES_CALL)

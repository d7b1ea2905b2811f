"""Layouts of literal text around values, also where markers are special tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.constraints.compiling import compile_constraint
from engine.constraints.tag_layout import layout_grammar
from engine.constraints.vocabulary import Vocabulary, load_vocabulary
from engine.request import Constraint, ConstraintKind
from tests.engine.constraints.following import allowed_ids
from tests.harness.tokenizer_folders import byte_level_folder

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
MARKERS = ["[TOOL_CALLS]", "<tool_call>", "</tool_call>"]


def tag(begin: str, end: str) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": POINT}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Vocabulary:
    folder: Path = byte_level_folder(tmp_path_factory.mktemp("model"))
    file = str(folder / "tokenizer.json")
    extended = Tokenizer.from_file(file)
    if request.param:
        extended.add_special_tokens(MARKERS)
    extended.save(file)
    size = extended.get_vocab_size()
    eos_id = extended.token_to_id("<|im_end|>")
    return load_vocabulary(folder, vocab_size=size, eos_token_ids=(eos_id,))


def by_layout(layout: dict[str, Any]) -> Constraint:
    return Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps({"format": layout}))


def follows(vocabulary: Vocabulary, layout: dict[str, Any], *parts: str) -> bool:
    """Whether the output may be these texts, a marker among them by its token if it has one."""
    matcher = compile_constraint(vocabulary, by_layout(layout)).matcher()
    ids: list[int] = []
    for part in parts:
        special = vocabulary.special_ids.get(part)
        found = vocabulary.tokenizer.tokenize_bytes(part.encode())
        ids += found if special is None else [special]
    return all(matcher.accept_token(i) for i in ids) and matcher.is_complete


def test_a_marker_is_written_by_its_token_where_it_has_one(vocabulary: Vocabulary) -> None:
    layout = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "[TOOL_CALLS]["},
            tag('{"name": "go", "arguments": ', "}"),
            {"type": "const_string", "value": "]"},
        ],
    }
    call = '[{"name": "go", "arguments": {"x": 12}}]'
    assert follows(vocabulary, layout, "[TOOL_CALLS]", call)
    assert not follows(vocabulary, layout, "[TOOL_CALLS]", call.replace("12", '"12"'))
    if vocabulary.special_ids.get("[TOOL_CALLS]"):
        spelled = vocabulary.tokenizer.tokenize_bytes(b"[")
        start = compile_constraint(vocabulary, by_layout(layout)).matcher()
        assert allowed_ids(start, vocabulary) == [vocabulary.special_ids["[TOOL_CALLS]"]]
        assert not start.accept_token(spelled[0])


def test_a_plain_string_is_text_whatever_it_says(vocabulary: Vocabulary) -> None:
    layout = {"type": "or", "elements": [{"type": "plain_string", "value": "a[TOOL_CALLS]"}]}
    matcher = compile_constraint(vocabulary, by_layout(layout)).matcher()
    letters = vocabulary.tokenizer.greedy_tokenize
    spelled = [i for char in "a[TOOL_CALLS]" for i in letters(char)]
    assert all(matcher.accept_token(i) for i in spelled)
    assert matcher.is_complete


def test_text_is_free_until_a_trigger_begins_a_tag(vocabulary: Vocabulary) -> None:
    layout = {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [tag('<tool_call>\n{"name": "go", "arguments": ', "}\n</tool_call>")],
    }
    call = ('\n{"name": "go", "arguments": {"x": 1}}\n', "</tool_call>")
    for parts in (
        ("Just text.",),
        ("",),
        ("First\n", "<tool_call>", *call, " then ", "<tool_call>", *call),
        ("<tool_call>", *call),
    ):
        assert follows(vocabulary, layout, *parts), parts
    for parts in (
        ("<tool_call>", "x"),
        ("a ", "<tool_call>", '\n{"name": "go", "arguments": {}}\n', "</tool_call>"),
        ("<tool_call>", call[0]),
    ):
        assert not follows(vocabulary, layout, *parts), parts


def test_one_of_several_or_several_with_a_separator(vocabulary: Vocabulary) -> None:
    tags = [tag("a", ";"), tag("b", ";")]
    many = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": ", ",
        "stop_after_first": False,
    }
    one = many | {"stop_after_first": True}
    assert follows(vocabulary, many, 'a{"x": 1};, b{"x": -2};')
    assert follows(vocabulary, one, 'b{"x": 1};')
    assert not follows(vocabulary, one, 'a{"x": 1};, b{"x": -2};')
    assert not follows(vocabulary, many, "")


def test_what_is_no_layout_is_an_error() -> None:
    with pytest.raises(ValueError, match="a layout of type 'strange'"):
        layout_grammar({"type": "strange"}, {})

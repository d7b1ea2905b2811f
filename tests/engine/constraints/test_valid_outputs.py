"""Outputs drawn under a schema's masks: whatever is drawn, what ends is valid for the schema."""

import json
import random
from typing import Any

import llguidance
import pytest

from engine.constraints.compiling import compile_constraint
from engine.constraints.json_schema import restrict
from engine.constraints.vocabulary import load_vocabulary
from engine.errors import RequestError
from engine.request import Constraint, ConstraintKind
from load_tests.testbed.json_oracle import find_problem
from load_tests.testbed.random_schemas import SchemaKind, schema_of
from tests.engine.constraints.drawing import VOCABULARY, draw_output, schema_constraint
from tests.engine.constraints.following import MODEL, accepts_text, allowed_ids, allows
from tests.harness.seeds import seed_of

SEED = seed_of(__name__)


@pytest.mark.filterwarnings("ignore:Possible (nested set|set):FutureWarning")
@pytest.mark.parametrize("num_schemas", [75, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", [kind for kind in SchemaKind if kind is not SchemaKind.WRONG])
def test_what_ends_is_valid_whatever_is_pushed(kind: SchemaKind, num_schemas: int) -> None:
    draw = random.Random(SEED)
    num_ended = 0
    for _ in range(num_schemas):
        schema = schema_of(kind, draw)
        try:
            output = draw_output(schema_constraint(schema), draw)
        except RequestError:  # no value can satisfy it, or a pattern that is refused
            continue
        if output is not None:
            num_ended += 1
            problem = find_problem(schema, output.decode())
            assert problem is None, f"seed {SEED}: {json.dumps(schema)} gave {output!r}: {problem}"
    assert num_ended > num_schemas / 3, f"seed {SEED}"


ODD_NAMES = ("a\\b", "C:\\new", "\\u0041", 'x" "y', "\t")
CASES = [
    ({"type": "string", "minLength": 1, "maxLength": 3}, ['"a"', '"\\t"'], ['"\t"', '""']),
    ({"type": "object", "properties": {"b": False}}, ["{}"], ['{"b": }', '{"b": 1}']),
    (
        {"properties": {"b": {"type": "integer", "minimum": 5, "maximum": 4}}},
        ["{}"],
        ['{"b": 5}', '{"b": }'],
    ),
    ({"type": "array", "items": False}, ["[]"], ["[, ]", "[1]"]),
    ({"anyOf": [False, {"enum": []}, {"const": 1}]}, ["1"], [""]),
    (
        {
            "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
            "properties": {"a": {"$ref": "#/$defs/n"}},
        },
        ["{}"],
        ['{"a": {"n": {}}}'],
    ),
    (
        {
            "properties": {
                name: {"const": 1} for name in ("a\\b", "C:\\new", "\\u0041", 'x" "y', "\t")
            }
        },
        ['{"a\\\\b": 1, "C:\\\\new": 1, "\\\\u0041": 1, "x\\" \\"y": 1, "\\t": 1}'],
        ['{"a\\b": 1}', '{"C:\\new": 1}', '{"\\u0041": 1}', '{"x" "y": 1}', '{"\t": 1}'],
    ),
    ({"type": "object", "required": ["a"], "properties": {"b": {}}}, ['{"a": [1]}'], ["{}"]),
    ({"$defs": {"a/b": {"const": 1}}, "$ref": "#/$defs/a~1b"}, ["1"], ["2"]),
    (
        {
            "properties": {
                "n": {"type": "integer", "minimum": 3, "$defs": {"x": {"const": "y"}}},
                "m": {"$ref": "#/properties/n/$defs/x"},
            }
        },
        ['{"n": 3, "m": "y"}'],
        ['{"n": 2}', '{"m": 3}'],
    ),
    ({"format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"x"', "1"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-5}, ["0.00001"], ["0", "-0", "0.0"]),
    ({"type": "number", "exclusiveMaximum": 0, "minimum": -1e-5}, ["-0.00001"], ["0", "-0"]),
    ({"type": "integer", "maximum": 1e300}, ["7"], ["7.5"]),
    (
        {"type": "number", "minimum": 3, "maximum": 5, "exclusiveMinimum": 0},
        ["3", "4.5"],
        ["1", "0.5", "5.1"],
    ),
    (
        {"type": "number", "minimum": -5, "maximum": -3, "exclusiveMaximum": 0},
        ["-3.5"],
        ["-1", "-0.5"],
    ),
    ({"type": "number", "exclusiveMaximum": 1}, ["0.5", "0.9990"], ["1", "0.99999999999999999999"]),
    ({"type": "number", "exclusiveMinimum": 0.1, "maximum": 1}, ["0.2"], [f"0.1{'0' * 22}1"]),
    ({"type": "number", "maximum": -944.0500318323153}, ["-944.06"], ["-944.0500318323152"]),
    ({"const": 1.0}, ["1"], ["1.5"]),
    ({"const": 0.1}, ["0.1"], ["0.2"]),
    ({"x-guidance": {"lenient": True}, "type": "integer"}, ["7"], ['"7"']),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=range(len(CASES)))
def test_what_a_schema_says_is_held(schema: Any, good: list[str], bad: list[str]) -> None:
    constraint = schema_constraint(schema)
    for text in good:
        assert find_problem(schema, text) is None
        assert allows(VOCABULARY, constraint, text), text
    for text in bad:
        assert not allows(VOCABULARY, constraint, text), text


def test_a_part_that_stands_in_many_places_is_written_once() -> None:
    schema: Any = True
    for _ in range(60):
        schema = {"type": "object", "required": ["a", "b"], "additionalProperties": schema}
    assert len(json.dumps(restrict(schema, "schema"))) < 20_000
    many = {"anyOf": [{"const": i} for i in range(700)]}
    wide = {"required": [f"n{i}" for i in range(3000)], "additionalProperties": many}
    assert len(json.dumps(restrict(wide, "schema"))) < 400_000
    with pytest.raises(RequestError, match="more than"):
        restrict({"anyOf": [{"pattern": "a" * 20_000}] * 5}, "schema")


@pytest.mark.parametrize(
    "data", [b'"\x80"', b'"\xc3"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xc0\x80"']
)
def test_bytes_that_are_no_text_have_no_place_in_a_string(data: bytes) -> None:
    assert not allows(VOCABULARY, schema_constraint({"type": "string"}), data)


def test_an_output_ends_only_where_it_is_complete() -> None:
    matcher = compile_constraint(VOCABULARY, schema_constraint({"enum": [12]})).matcher()
    assert set(allowed_ids(matcher, VOCABULARY)).isdisjoint(VOCABULARY.eos_token_ids)
    assert accepts_text(matcher, VOCABULARY, "12")
    assert allowed_ids(matcher, VOCABULARY) == sorted(VOCABULARY.eos_token_ids)


def test_an_output_layer_may_be_larger_or_smaller_than_the_vocabulary() -> None:
    for vocab_size in (VOCABULARY.vocab_size + 45, 400):
        vocabulary = load_vocabulary(MODEL, vocab_size=vocab_size, eos_token_ids=(0,))
        matcher = compile_constraint(vocabulary, schema_constraint({"type": "string"})).matcher()
        assert not accepts_text(matcher, vocabulary, '"a')
        assert max(allowed_ids(matcher, vocabulary)) < min(vocab_size, VOCABULARY.vocab_size)


def test_a_matcher_beyond_its_limits_allows_nothing_and_is_not_complete() -> None:
    limits = llguidance.LLParserLimits(step_lexer_fuel=1, initial_lexer_fuel=10**6)
    constraint = Constraint(ConstraintKind.REGEX, "([a-z]{1,30}x?){9}[0-9]")
    matcher = compile_constraint(VOCABULARY, constraint, limits).matcher()
    for _ in range(20):
        allowed = allowed_ids(matcher, VOCABULARY)
        if not allowed:
            break
        matcher.accept_token(allowed[-1])
    assert allowed_ids(matcher, VOCABULARY) == []
    assert matcher.error
    assert not matcher.is_complete
    assert not matcher.accept_token(5)

"""The table of keywords in `docs/api.md`: each is tried, and what it says is what happens."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.constraints import keywords
from engine.constraints.formats import FORMATS
from engine.constraints.json_schema import restrict
from engine.errors import RequestError
from load_tests.testbed.json_oracle import find_problem
from tests.engine.constraints.drawing import VOCABULARY, schema_constraint
from tests.engine.constraints.following import allows

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
ROW = re.compile(r"^\| (`[^|]*`) \| (held|annotation|refused) \|", re.MULTILINE)
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
MAP = {"type": "object", "additionalProperties": WHOLE}
AB = {"type": "object", "properties": {"a": WHOLE, "b": WHOLE}}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
PATTERN = {"type": "object", "patternProperties": {"^x-": WHOLE, "^y": TEXT}}
OBJECTS = [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in (1, 2)]
IF = {**AB, "if": {"properties": {"a": {"const": 1}}}}
IF |= {"then": {"required": ["b"]}, "else": {"properties": {"b": False}}}
REFERRING = {"$ref": "#/$defs/n", "maximum": 5, "$defs": {"n": {"minimum": 2, **WHOLE}}}

# Keyword -> a schema with it, values that stay allowed, values that do not.
HELD: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "type": ({"type": ["integer", "null"]}, [1, None], ["a", 1.5]),
    "enum": ({"enum": [1, "a", None], "type": ["integer", "null"]}, [1, None], ["a", 2]),
    "const": ({"anyOf": [{"const": 1, "minimum": 2}, {"const": 5}]}, [5], [1]),
    "properties": (AB, [{}, {"a": 1, "b": 2}], [{"a": "1"}, {"b": 1, "a": 2}, {"c": 1}]),
    "required": ({**MAP, "required": ["z"]}, [{"z": 1}], [{}, {"z": "a"}]),
    "additionalProperties": (MAP, [{}, {"q": 1}], [{"q": "1"}]),
    "patternProperties": (PATTERN, [{"x-1": 1, "y": ""}], [{"x-1": ""}, {"y": 1}, {"z": 1}]),
    "propertyNames": ({**MAP, "propertyNames": {"pattern": "^a+$"}}, [{"aa": 1}], [{"b": 1}]),
    "minProperties": ({**AB, "minProperties": 2}, [{"a": 1, "b": 1}], [{}, {"a": 1}]),
    "maxProperties": ({**AB, "maxProperties": 1}, [{}, {"b": 1}], [{"a": 1, "b": 1}]),
    "dependentRequired": ({**AB, "dependentRequired": {"a": ["b"]}}, [{"b": 1}], [{"a": 1}]),
    "dependentSchemas": (
        {**AB, "dependentSchemas": {"a": {"properties": {"b": {"minimum": 3}}}}},
        [{"b": 1}, {"a": 1}, {"a": 1, "b": 3}],
        [{"a": 1, "b": 1}],
    ),
    "dependencies": ({**AB, "dependencies": {"a": ["b"]}} | DRAFT_7, [{"b": 1}], [{"a": 1}]),
    "items": ({"type": "array", "items": WHOLE}, [[], [1, 2]], [["a"]]),
    "prefixItems": ({"prefixItems": [WHOLE, TEXT]}, [[1, "a"]], [[1, 1], [1], [1, "a", 2]]),
    "additionalItems": (
        {"type": "array", "items": [WHOLE], "additionalItems": TEXT, "maxItems": 3} | DRAFT_7,
        [[1], [1, "a"]],
        [[1, 1], ["a"]],
    ),
    "minItems": ({"type": "array", "items": WHOLE, "minItems": 1}, [[1]], [[]]),
    "maxItems": ({"type": "array", "items": WHOLE, "maxItems": 1}, [[1], []], [[1, 1]]),
    "uniqueItems": (
        {"uniqueItems": True, "items": {"enum": [1, "a", 1.0]}},
        [[], ["a", 1]],
        [[1, 1]],
    ),
    "minLength": ({**TEXT, "minLength": 2}, ["ab"], ["a"]),
    "maxLength": ({**TEXT, "maxLength": 2}, ["ab"], ["abc"]),
    "pattern": ({**TEXT, "pattern": "^(?!a)[a-z]+$"}, ["bc"], ["ab", "B"]),
    "format": ({**TEXT, "format": "date"}, ["2024-02-29"], ["2023-02-29"]),
    "minimum": ({**WHOLE, "minimum": 2}, [2], [1]),
    "maximum": ({**WHOLE, "maximum": 2}, [2], [3]),
    "exclusiveMinimum": ({**WHOLE, "exclusiveMinimum": 2}, [3], [2]),
    "exclusiveMaximum": ({**WHOLE, "exclusiveMaximum": 2}, [1], [2]),
    "multipleOf": ({"type": "number", "multipleOf": 1.5}, [3, 4.5, 0], [4, 0.5]),
    "$ref": (REFERRING, [2, 5], [1, 6, "a"]),
    "$defs": (REFERRING, [3], [6]),
    "definitions": ({"$ref": "#/definitions/n", "definitions": {"n": WHOLE}}, [1], ["a"]),
    "allOf": ({"allOf": [AB, {"required": ["b"]}, {"required": ["a"]}]}, [{"a": 1, "b": 1}], [{}]),
    "anyOf": ({**WHOLE, "anyOf": [{"minimum": 9}, {"maximum": 1}]}, [9, 1], [5, "a"]),
    "oneOf": (
        {"properties": {"k": {}, "x": WHOLE}, "oneOf": OBJECTS},
        [{"k": 1, "x": 2}, {"k": 2}],
        [{"k": 3}, {"x": 1}],
    ),
    "not": ({**AB, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    "if": (IF, [{"a": 1, "b": 1}, {"a": 2}], [{"a": 1}, {"a": 2, "b": 1}]),
    "then": (IF, [{"a": 1, "b": 1}], [{"a": 1}]),
    "else": (IF, [{"a": 2}], [{"a": 2, "b": 1}]),
}
ODD_ANNOTATIONS = {"discriminator": {"propertyName": "a"}, "examples": [1], "contentSchema": WHOLE}
REFUSED = {"contains": {}, "minContains": 1, "maxContains": 1}


def documented() -> dict[str, str]:
    """Keyword -> what becomes of it, as the page says."""
    return {
        name: kind
        for names, kind in ROW.findall(PAGE.read_text())
        for name in re.findall(r"`([^`]+)`", names)
    }


def test_the_table_has_every_keyword_that_is_read() -> None:
    table = documented()
    for kind, names in (
        ("held", {*keywords.TYPE_OF, *keywords.CHOICES, *keywords.OTHERS, *keywords.DEFINITIONS}),
        ("annotation", {*keywords.ANNOTATIONS}),
    ):
        names |= {"format"} if kind == "held" else set()
        assert {name for name, said in table.items() if said == kind} == names
    assert set(HELD) == {name for name, said in table.items() if said == "held"}


def test_the_list_of_formats_is_the_one_that_is_held() -> None:
    listed = PAGE.read_text().partition("\nFormats: ")[2].partition("\n\n")[0]
    assert re.findall(r"`([^`]+)`", listed) == sorted(FORMATS)


@pytest.mark.parametrize("name", HELD)
def test_a_keyword_that_is_held_keeps_wrong_values_out_and_right_ones_in(name: str) -> None:
    schema, good, bad = HELD[name]
    assert f'"{name}"' in json.dumps(schema)
    constraint = schema_constraint(schema)
    for value in good:
        assert find_problem(schema, json.dumps(value)) is None, value
        assert allows(VOCABULARY, constraint, json.dumps(value)), value
    for value in bad:
        assert not allows(VOCABULARY, constraint, json.dumps(value)), value


def test_an_annotation_changes_nothing() -> None:
    plain = restrict({"properties": {"a": WHOLE}}, "schema")
    for name, said in documented().items():
        if said == "annotation":
            value = ODD_ANNOTATIONS.get(name, "x")
            assert restrict({"properties": {"a": WHOLE}, name: value}, "schema") == plain
            inner = {} if name == "$id" else {name: value}
            assert restrict({"properties": {"a": WHOLE | inner}}, "schema") == plain


def test_a_keyword_that_is_refused_is_named() -> None:
    for name, said in documented().items():
        if said == "refused":
            with pytest.raises(
                RequestError, match=re.escape(f"'{name}' is not supported")
            ) as caught:
                restrict({"properties": {"a": {name: REFUSED.get(name, "#x")}}}, "schema")
            assert caught.value.param == "schema.properties.a"

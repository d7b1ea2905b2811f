"""Schemas that are rewritten for the grammar compiler: narrower or refused, never wider."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.constraints.json_schema import MAX_NODES, restrict
from engine.errors import RequestError
from load_tests.testbed.random_schemas import random_schema
from tests.harness.seeds import fresh_seed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4) | st.just(1.5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["key_0", "key_1", "a", "b"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def accepts(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@given(st.integers(0, 10**6), st.lists(VALUES, min_size=8, max_size=8))
def test_a_restricted_schema_allows_nothing_that_its_original_forbids(
    seed: int, values: list[Any]
) -> None:
    schema = random_schema(random.Random(seed))
    restricted = restrict(json.loads(json.dumps(schema)), "schema")
    # A pattern is meant to match the whole string by then, so it cannot be compared here.
    if "pattern" in json.dumps(schema):
        return
    for value in values:
        assert not accepts(restricted, value) or accepts(schema, value)


def test_random_schemas_can_be_met() -> None:
    """What they are for: answers of models; one that nothing satisfies would be refused."""
    seed = fresh_seed()
    draw = random.Random(seed)
    for _ in range(5000):
        schema = random_schema(draw)
        try:
            restrict(schema, "schema")
        except RequestError as error:
            pytest.fail(f"seed {seed}: {schema}: {error}")


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, {"any": [1, {"thing": None}]}),
        ({"type": "array"}, [1, ["x"], {}]),
        ({}, {"x": 1}),
        ({"type": "object", "properties": {}}, {}),
        ({"type": "object", "required": ["a"], "additionalProperties": {"const": 1}}, {"a": 1}),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 1}),
        ({"minLength": 2}, "ab"),
        ({"type": ["integer", "string"], "minimum": 3, "maxLength": 1}, 4),
        ({"allOf": [{"enum": [1, 2]}]}, 2),
        ({"type": "integer", "minimum": 2.5, "exclusiveMaximum": 4}, 3),
        ({"type": "number", "format": "double"}, 0.5),
        ({"type": "integer", "minimum": -3}, 10**14),
        ({"type": "integer", "maximum": 0}, -(10**14)),
        ({"properties": {"a": {"const": 1}}, "required": ["b"]}, {"b": [0]}),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "a"),
        ({"prefixItems": [{"const": 1}], "minItems": 0, "maxItems": 2}, []),
        ({"$defs": {"a/b~c": {"const": 1}}, "$ref": "#/$defs/a~1b~0c"}, 1),
        ({"$defs": {"a b%": {"const": 1}}, "$ref": "#/$defs/a%20b%25"}, 1),
        ({"$defs": {"a": {"anyOf": [{"const": 1}]}}, "$ref": "#/$defs/a/anyOf/0"}, 1),
        (
            {
                "properties": {
                    "n": {"type": ["integer", "null"], "minimum": 1, "$defs": {"x": {"const": 5}}},
                    "m": {"$ref": "#/properties/n/$defs/x"},
                    "o": {"$ref": "#/properties/n"},
                }
            },
            {"n": 2, "m": 5, "o": None},
        ),
        ({"x-order": 1, "title": "t", "uniqueItems": False, "type": "array"}, []),
        ({"type": "string", "enum": ["a", 1]}, "a"),
        (
            {
                "$defs": {
                    "node": {
                        "type": "object",
                        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"const": 0}]}},
                        "required": ["next"],
                    }
                },
                "$ref": "#/$defs/node",
            },
            {"next": {"next": 0}},
        ),
    ],
)
def test_what_a_schema_plainly_means_stays_allowed(schema: Any, value: Any) -> None:
    assert accepts(restrict(schema, "schema"), value)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ([], "schema"),
        ({"type": "strin"}, "schema.type"),
        ({"type": []}, "schema.type"),
        ({"properties": []}, "schema.properties"),
        ({"enum": 1}, "schema.enum"),
        ({"enum": []}, "schema"),
        ({"type": "string", "enum": [1]}, "schema"),
        ({"$ref": "#/nowhere"}, "schema.$ref"),
        ({"$ref": "http://elsewhere/x"}, "schema.$ref"),
        ({"anyOf": []}, "schema.anyOf"),
        ({"anyOf": [{"$ref": "#"}]}, "schema"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "schema"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "schema"),
        (
            {"type": "object", "additionalProperties": False, "properties": {}, "required": ["a"]},
            "schema",
        ),
        ({"type": "array", "items": {"uniqueItems": True}}, "schema.items.uniqueItems"),
        ({"uniqueItems": True, "items": {"type": "string"}}, "schema.uniqueItems"),
        ({"uniqueItems": True, "items": {"enum": [*range(30)]}}, "schema.uniqueItems"),
        ({"uniqueItems": 1}, "schema.uniqueItems"),
        ({"not": {}}, "schema"),
        ({"type": "string", "not": {"type": ["string", "null"]}}, "schema"),
        ({"type": "string", "not": {"enum": ["a" * 500]}}, "schema.not"),
        ({"type": "number", "not": {"enum": [*range(20)]}}, "schema.not"),
        ({"type": "string", "not": {"pattern": "a"}}, "schema.not"),
        ({"oneOf": [{"type": "string"}, {"pattern": "a", "type": "string"}]}, "schema.oneOf[1]"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "schema.oneOf[0]"),
        ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"a": {}}}]}, "schema.oneOf[1]"),
        ({"if": {"pattern": "a"}, "then": {"maxLength": 3}, "type": "string"}, "schema.if"),
        (
            {"type": "object", "patternProperties": {"a": {}, "b": {"const": 1}}},
            "schema.patternProperties",
        ),
        ({"type": "object", "patternProperties": {"^(?=a)b": {}}}, "schema.patternProperties"),
        (
            {"properties": {"a": {}}, "patternProperties": {"(a+)+$": {"const": 1}}},
            "schema.patternProperties",
        ),
        ({"type": "object", "minProperties": 2}, "schema.minProperties"),
        (
            {"properties": {f"p{i}": {} for i in range(20)}, "maxProperties": 9},
            "schema.minProperties",
        ),
        ({"propertyNames": {"pattern": "a", "maxLength": 3}}, "schema.propertyNames"),
        ({"type": "number", "multipleOf": 0.1}, "schema.multipleOf"),
        ({"type": "integer", "multipleOf": 9973}, "schema.multipleOf"),
        ({"type": "integer", "multipleOf": 0}, "schema.multipleOf"),
        ({"enum": ["aa"], "pattern": "(a|b)*"}, "schema.pattern"),
        ({"items": [{}], "prefixItems": [{}]}, "schema"),
        ({"contains": {}}, "schema"),
        ({"unevaluatedProperties": False}, "schema"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "schema"),
        ({"allOf": [{"$ref": "#"}]}, "schema"),
        ({"const": 1, "minimum": 2}, "schema"),
        ({"minLength": 1, "minimum": 1}, "schema"),
        ({"type": "string", "minLength": -1}, "schema.minLength"),
        ({"type": "string", "maxLength": "3"}, "schema.maxLength"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "schema"),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 0}, "schema"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "schema"),
        ({"type": "integer", "minimum": 10**16}, "schema.minimum"),
        ({"type": "number", "maximum": -(10.0**15)}, "schema.maximum"),
        ({"type": "number", "minimum": True}, "schema.minimum"),
        ({"type": "array", "prefixItems": [{}, False]}, "schema"),
        ({"required": [1]}, "schema.required"),
        ({"properties": {"a": {"$id": "x"}}}, "schema.properties.a.$id"),
        ({"const": 2**60}, "schema.const"),
        ({"const": 123456789.12345679}, "schema.const"),
        ({"enum": [7.77472557674212e-19 * 1e-10]}, "schema.enum"),
        ({"enum": ["abc"], "format": "date"}, "schema"),
        ({"$defs": {"p": {"$id": "x", "q": {}}}, "$ref": "#/$defs/p/q"}, "schema.$ref"),
        ({"enum": [{"a": [1e300]}]}, "schema.enum"),
        ({"type": "string", "pattern": "a$b"}, "schema.pattern"),
        ({"$ref": "#/required", "required": ["a"]}, "schema.$ref"),
    ],
)
def test_what_could_not_be_kept_is_refused_by_its_place(schema: Any, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        restrict(schema, "schema")
    assert caught.value.param == where


def test_a_tag_that_is_only_expected_sets_no_other_alternative_apart() -> None:
    """{} is a value of both alternatives, although the first is written with its tag."""
    tagged = {
        "oneOf": [{"properties": {"k": {"const": 1}}}],
        "discriminator": {"propertyName": "k"},
    }
    schema = {"oneOf": [tagged, {"type": "object", "properties": {"b": {"type": "null"}}}]}
    assert not accepts(schema, {})
    with pytest.raises(RequestError, match="another alternative"):
        restrict(schema, "schema")


def test_reading_a_schema_takes_bounded_work() -> None:
    choices = [{"anyOf": [{"minLength": 1}, {"maxLength": 9}]} for _ in range(40)]
    with pytest.raises(RequestError, match="too many alternatives"):
        restrict({"allOf": choices, "type": "string"}, "schema")
    names = [f"p{i}" for i in range(60)]
    dependent = dict(zip(names[:30], ([name] for name in names[30:]), strict=True))
    properties = {name: {} for name in names}
    with pytest.raises(RequestError, match="too many alternatives"):
        restrict({"properties": properties, "dependentRequired": dependent}, "schema")
    deep: Any = {}
    for _ in range(400):
        deep = {"properties": {"a": deep}}
    with pytest.raises(RequestError, match="too deeply"):
        restrict(deep, "schema")


def test_a_schema_of_too_many_parts_is_refused() -> None:
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(MAX_NODES)}}
    with pytest.raises(RequestError, match="more than"):
        restrict(wide, "schema")

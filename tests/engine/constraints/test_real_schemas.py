"""Schemas as tools and libraries write them: inputs of MCP servers, and objects of zod."""

import json
from typing import Any

import pytest

from engine.constraints.json_schema import restrict
from load_tests.testbed.json_oracle import find_problem
from tests.engine.constraints.drawing import VOCABULARY, draw_output, schema_constraint
from tests.engine.constraints.following import allows
from tests.harness.seeds import fresh_random

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
ZOD_EMAIL = (
    "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@"
    "([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$"
)


def tool(properties: dict[str, Any], required: list[str], **others: Any) -> dict[str, Any]:
    """As the TypeScript SDK writes the input of a tool."""
    head = {"type": "object", "properties": properties, "required": required}
    return {**head, "additionalProperties": False, "$schema": DRAFT_7, **others}


TEXT, FLAG = {"type": "string"}, {"type": "boolean"}
EDIT = {
    "type": "object",
    "properties": {
        "oldText": {"type": "string", "description": "Text to search for - must match exactly"},
        "newText": {"type": "string", "description": "Text to replace it with"},
    },
    "required": ["oldText", "newText"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, tuple[dict[str, Any], Any]] = {
    "filesystem edit_file": (
        tool(
            {
                "path": TEXT,
                "edits": {"type": "array", "items": EDIT},
                "dryRun": {"type": "boolean", "default": False, "description": "Preview"},
            },
            ["path", "edits"],
        ),
        {"path": "/a", "edits": [{"oldText": "a", "newText": "b"}]},
    ),
    "filesystem read_text_file": (
        tool({"path": TEXT, "tail": {"type": "number"}, "head": {"type": "number"}}, ["path"]),
        {"path": "/a", "head": 3},
    ),
    "filesystem list_allowed_directories": (
        {"type": "object", "properties": {}, "required": []},
        {},
    ),
    "github create_issue": (
        tool(
            {
                "owner": TEXT,
                "repo": TEXT,
                "title": TEXT,
                "body": TEXT,
                "assignees": {"type": "array", "items": TEXT},
                "milestone": {"type": "number"},
                "labels": {"type": "array", "items": TEXT},
            },
            ["owner", "repo", "title"],
        ),
        {"owner": "a", "repo": "b", "title": "c", "labels": ["bug"]},
    ),
    "github push_files": (
        tool(
            {
                "branch": TEXT,
                "files": {
                    "type": "array",
                    "items": tool({"path": TEXT, "content": TEXT}, ["path"]),
                },
                "state": {"type": "string", "enum": ["open", "closed", "all"]},
                "page": {"type": "number", "minimum": 1, "maximum": 100},
            },
            ["branch", "files"],
        ),
        {"branch": "main", "files": [{"path": "a"}], "state": "open", "page": 2},
    ),
    "github with oneOf": (
        {
            "type": "object",
            "properties": {"number": {"type": "integer"}, "sha": TEXT, "base": TEXT},
            "oneOf": [{"required": ["number"]}, {"required": ["sha"]}],
        },
        {"sha": "abc", "base": "main"},
    ),
    "fetch": (
        {
            "title": "Fetch",
            "description": "Parameters for fetching a URL.",
            "type": "object",
            "properties": {
                "url": {"type": "string", "format": "uri", "minLength": 1, "title": "Url"},
                "max_length": {
                    "type": "integer",
                    "default": 5000,
                    "exclusiveMinimum": 0,
                    "exclusiveMaximum": 1000000,
                    "title": "Max Length",
                },
                "start_index": {"type": "integer", "default": 0, "minimum": 0},
                "raw": {"type": "boolean", "default": False},
            },
            "required": ["url"],
        },
        {"url": "https://example.com/a?b=c", "max_length": 100},
    ),
    "slack post_message": (
        tool(
            {
                "channel_id": {"type": "string", "pattern": "^[CDG][A-Z0-9]{8,}$"},
                "text": TEXT,
                "thread_ts": {"type": "string", "pattern": "^\\d{10}\\.\\d{6}$"},
                "limit": {"type": "number", "default": 100, "maximum": 200},
            },
            ["channel_id", "text"],
        ),
        {"channel_id": "C12345678", "text": "hi", "thread_ts": "1234567890.123456"},
    ),
    "memory create_entities": (
        tool(
            {
                "entities": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": TEXT,
                            "entityType": TEXT,
                            "observations": {"type": "array", "items": TEXT},
                        },
                        "required": ["name", "entityType", "observations"],
                    },
                }
            },
            ["entities"],
        ),
        {"entities": [{"name": "a", "entityType": "b", "observations": ["c"]}]},
    ),
    "zod 3, draft 7": (
        {
            "$schema": DRAFT_7,
            "$ref": "#/definitions/Order",
            "definitions": {
                "Order": tool(
                    {
                        "id": {"type": "string", "format": "uuid"},
                        "site": {"type": "string", "format": "uri"},
                        "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
                        "place": {
                            "type": "array",
                            "minItems": 2,
                            "maxItems": 2,
                            "items": [{"type": "number"}, {"type": "number"}],
                        },
                        "colors": {
                            "type": "array",
                            "items": {"type": "string", "enum": ["red", "green", "blue"]},
                            "uniqueItems": True,
                        },
                        "sizes": {"type": "object", "additionalProperties": {"type": "integer"}},
                        "parent": {"allOf": [{"$ref": "#/definitions/Order"}], "description": "up"},
                    },
                    ["id", "note", "place"],
                )
            },
        },
        {
            "id": "12345678-1234-4234-8234-123456789012",
            "site": "http://a.b",
            "note": None,
            "place": [1, 2.5],
            "colors": ["blue", "red"],
            "sizes": {"s": 1},
        },
    ),
    "zod 4": (
        {
            **tool(
                {
                    "email": {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
                    "age": {
                        "type": "integer",
                        "exclusiveMinimum": 0,
                        "maximum": 9007199254740991,
                    },
                    "step": {"type": "number", "multipleOf": 0.5},
                    "tags": {
                        "type": "object",
                        "propertyNames": {"type": "string", "enum": ["a", "b"]},
                        "additionalProperties": {"type": "string"},
                    },
                    "pair": {"type": "array", "prefixItems": [TEXT, FLAG], "items": TEXT},
                    "shape": {
                        "oneOf": [
                            tool(
                                {"type": {"type": "string", "const": "circle"}, "r": {}}, ["type"]
                            ),
                            tool({"type": {"type": "string", "const": "line"}, "l": {}}, ["type"]),
                        ]
                    },
                    "both": {
                        "allOf": [
                            {"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
                            {"type": "object", "properties": {"b": FLAG}, "required": ["b"]},
                        ]
                    },
                },
                ["email", "shape"],
            ),
            "$schema": "https://json-schema.org/draft/2020-12/schema",
        },
        {
            "email": "a.b@c.de",
            "age": 7,
            "step": 1.5,
            "tags": {"b": "x"},
            "pair": ["a", True],
            "shape": {"type": "line", "l": 1},
            "both": {"a": "", "b": True},
        },
    ),
    "OpenAPI 3.0": (
        {
            "type": "object",
            "required": ["pet"],
            "properties": {
                "pet": {
                    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                    "discriminator": {"propertyName": "petType"},
                },
                "age": {"type": "integer", "nullable": True, "example": 3, "format": "int32"},
                "data": {"type": "string", "format": "byte"},
            },
            "$defs": {
                "Pet": {
                    "type": "object",
                    "required": ["petType"],
                    "properties": {"petType": {"type": "string"}},
                },
                "Cat": {
                    "allOf": [
                        {"$ref": "#/$defs/Pet"},
                        {
                            "properties": {
                                "petType": {"enum": ["cat"]},
                                "lives": {"type": "integer"},
                            }
                        },
                    ]
                },
                "Dog": {
                    "allOf": [
                        {"$ref": "#/$defs/Pet"},
                        {"properties": {"petType": {"enum": ["dog"]}, "tricks": {"type": "null"}}},
                    ]
                },
            },
        },
        {"pet": {"petType": "cat", "lives": 9}, "data": "QUI="},
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_a_real_schema_asks_for_is_allowed_and_what_is_drawn_is_valid(name: str) -> None:
    schema, value = SCHEMAS[name]
    constraint, text = schema_constraint(schema), json.dumps(value)
    assert find_problem(schema, text) is None
    assert allows(VOCABULARY, constraint, text)
    draw = fresh_random()
    for output in (draw_output(constraint, draw) for _ in range(2)):
        assert output is None or find_problem(schema, output.decode()) is None, output


def test_references_to_the_same_alternatives_share_their_definitions() -> None:
    """Or a document of many fields of one union would be as large as all of them together."""
    options = [
        tool({"kind": {"const": i}, **{f"p{k}": TEXT for k in range(20)}}, ["kind"])
        for i in range(10)
    ]
    defs = {f"d{i}": option for i, option in enumerate(options)}
    union = {"oneOf": [{"$ref": f"#/$defs/d{i}"} for i in range(10)]}
    schema = {"$defs": defs, "properties": {f"f{i}": dict(union) for i in range(40)}}
    assert len(json.dumps(restrict(schema, "schema"))) < 1.5 * len(json.dumps(schema))

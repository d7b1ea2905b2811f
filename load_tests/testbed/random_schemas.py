"""Random JSON schemas of every supported kind: such that end by themselves, and such that need not.

bounded    values are short, so that a model that knows no JSON ends them
recursive  the same with a reference to itself that may stop at every level
open       strings, numbers, arrays or objects without an end of their own
adversarial  legal and ill-meaning, often without any value: see `adversarial_schemas`
combined   keywords beside each other and alternatives that exclude each other: `combined_schemas`
wrong      no value satisfies it, it is too large, or what it says could not be kept
"""

import random
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from load_tests.testbed.adversarial_schemas import adversarial_schema
from load_tests.testbed.combined_schemas import combined_schema

Schema = dict[str, Any]

_PATTERNS = ("^[a-z]{2,4}$", "[A-Z]{2}-\\d{1,3}", "^(yes|no)$", "[^0-9]{1,3}", "\\w.\\S")
_FORMATS = ("date", "time", "date-time", "ipv4", "ipv6", "uuid")  # that say how long they are
_VALUES: tuple[Any, ...] = ("red", "two words", 'q"uote\\', "é", 1, -2.5, True, None, [1], {"k": 0})
_MAX_DEPTH = 3
_HUGE_NODES = 25_000


class SchemaKind(Enum):
    """What may be expected of outputs held to a schema."""

    BOUNDED = "bounded"
    RECURSIVE = "recursive"
    OPEN = "open"
    ADVERSARIAL = "adversarial"
    COMBINED = "combined"
    WRONG = "wrong"


def schema_of(kind: SchemaKind, draw: random.Random) -> Schema:
    """A random schema of `kind`."""
    match kind:
        case SchemaKind.BOUNDED:
            return random_schema(draw)
        case SchemaKind.RECURSIVE:
            return _recursive(draw)
        case SchemaKind.OPEN:
            return _object_of(draw, {"a": draw.choice(_OPEN), "b": random_schema(draw, 1)})
        case SchemaKind.ADVERSARIAL:
            return adversarial_schema(draw)
        case SchemaKind.COMBINED:
            return combined_schema(draw)
    return draw.choice(list(_WRONG.values()))(draw)


def random_schema(draw: random.Random, depth: int = _MAX_DEPTH) -> Schema:
    """A bounded one, at most `depth` levels of arrays and objects deep."""
    makers = [_string, _number, _choice, _simple, _several]
    if depth > 0:
        makers += [_object, _object, _array, _any_of, _referring]
    return draw.choice(makers)(draw, depth)


def wrong_schemas(draw: random.Random) -> Mapping[str, Schema]:
    """One of each kind of wrong ones, by what is wrong."""
    return {name: make(draw) for name, make in _WRONG.items()}


# ---- bounded -------------------------------------------------------------------------------------


def _string(draw: random.Random, depth: int) -> Schema:
    if draw.random() < 0.2:
        return {"type": "string", "format": draw.choice(_FORMATS)}
    if draw.random() < 0.4:
        return {"type": "string", "pattern": draw.choice(_PATTERNS)}
    low = draw.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 5)}


def _number(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(-120, 120)
    if draw.random() < 0.3:
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 2.5}
    high = low + draw.randint(0, 300)
    if draw.random() < 0.3:
        return draw.choice([{"type": "number"}, {"type": "integer", "maximum": low}])
    if draw.random() < 0.4:
        far = 10 ** draw.randint(1, 14) + draw.randint(-9, 120)
        return draw.choice(
            [
                {"type": "number", "minimum": low, "exclusiveMaximum": low + draw.random()},
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "integer", "minimum": -far, "maximum": far * 2},
            ]
        )
    return {"type": "integer", "minimum": low, "maximum": high}


def _choice(draw: random.Random, depth: int) -> Schema:
    if draw.random() < 0.3:
        return {"const": draw.choice(_VALUES)}
    return {"enum": draw.sample(_VALUES, draw.randint(1, 4))}


def _simple(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice(["boolean", "null"]), "description": "short"}


def _several(draw: random.Random, depth: int) -> Schema:
    return {"type": ["string", "null", "boolean"], "maxLength": draw.randint(0, 6)}


def _object(draw: random.Random, depth: int) -> Schema:
    names = [f"key_{i}" for i in range(draw.randint(0, 3))]
    schema = _object_of(draw, {name: random_schema(draw, depth - 1) for name in names})
    if draw.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _object_of(draw: random.Random, properties: Schema) -> Schema:
    required = draw.sample(list(properties), draw.randint(0, len(properties)))
    return {"type": "object", "properties": properties, "required": required}


def _array(draw: random.Random, depth: int) -> Schema:
    if draw.random() < 0.3:
        parts = [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 2))]
        return {"type": "array", "prefixItems": parts, "items": False}
    low = draw.randint(0, 1)
    items = random_schema(draw, depth - 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randint(0, 2)}


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}


def _referring(draw: random.Random, depth: int) -> Schema:
    """Only where it is the root itself can it say `$defs` that a reference finds."""
    if depth < _MAX_DEPTH:
        return _simple(draw, depth)
    return {
        "$defs": {"part": random_schema(draw, 1)},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/part"}, "b": {"allOf": [{"$ref": "#/$defs/part"}]}},
        "required": ["a"],
    }


# ---- recursive and open --------------------------------------------------------------------------


def _recursive(draw: random.Random) -> Schema:
    """A list or a tree of nodes; each says, among equals, whether another one follows."""
    ends = [{"type": "null"}, {"const": 0}]
    more: Schema = {"anyOf": [{"$ref": "#/$defs/node"}, *draw.sample(ends, draw.randint(1, 2))]}
    if draw.random() < 0.4:
        more = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
    node = {
        "type": "object",
        "properties": {"value": random_schema(draw, 0), "next": more},
        "required": draw.choice([["next"], ["value", "next"], ["value"]]),
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


_OPEN: tuple[Schema, ...] = (
    {"type": "string"},
    {"type": "string", "minLength": 40},
    {"type": "string", "pattern": "[a-z ]+"},
    {"type": "string", "format": "email"},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
)


# ---- wrong ---------------------------------------------------------------------------------------


def _needs_itself(draw: random.Random) -> Schema:
    """A ring of references, each through a required property."""
    size = draw.randint(1, 400)
    ring = [
        {"type": "object", "properties": {"x": {"$ref": f"#/$defs/n{i + 1}"}}, "required": ["x"]}
        for i in range(size)
    ]
    ring[-1]["properties"] = {"x": {"$ref": "#/$defs/n0"}}
    return {"$defs": {f"n{i}": node for i, node in enumerate(ring)}, "$ref": "#/$defs/n0"}


def _empty_range(draw: random.Random) -> Schema:
    low = draw.randint(-100, 100)
    return {"type": "integer", "minimum": low, "maximum": low - draw.randint(1, 50)}


def _too_many_parts(draw: random.Random) -> Schema:
    return {"type": "object", "properties": {f"p{i}": {} for i in range(_HUGE_NODES)}}


def too_much_to_compile(draw: random.Random) -> Schema:
    """Short, but it counts within counts: far too many states."""
    low, high = draw.randint(1, 9), draw.randint(400, 600)
    count = f"{{{low},{high}}}"
    return {"type": "string", "pattern": f"(([a-z]{count}x?){count}[a-y]?){count}"}


def _not_kept(draw: random.Random) -> Schema:
    keyword, value = draw.choice([("uniqueItems", True), ("contains", {}), ("multipleOf", 0.1)])
    return {"type": "object", "properties": {"a": {keyword: value}}}


_WRONG: Mapping[str, Callable[[random.Random], Schema]] = {
    "needs itself without end": _needs_itself,
    "empty range": _empty_range,
    "too many parts": _too_many_parts,
    "too much to compile": too_much_to_compile,
    "keyword that is not kept": _not_kept,
}

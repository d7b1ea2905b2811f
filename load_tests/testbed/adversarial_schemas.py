"""Random JSON schemas that ask for trouble: parts without a value, odd names, references, patterns.

Such schemas are legal, and few of them mean anything. What they share is that a grammar made of
them without care lets through an answer that is not valid: where a part is empty, where a name is
written as it is, where a bound is read in one way and checked in another.
"""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
Subschema = Schema | bool

NAMES = (
    *("a\\b", "C:\\new", "\\u0041", 'x" "y', "tab\there", "line\nbreak", "nul\x00", "\x1f", "\x7f"),
    *("", " ", "é", "日本", "😀", "\u2028", "a/b", "a~b", "~1", "%25", "$ref", "{", "}", '"', "\\"),
    *("__proto__", "a" * 300, "\\", "\\n", '\\"', "x-guidance", "type", "enum", "#", "'", "`"),
)
_UNMET: tuple[Subschema, ...] = (
    False,
    {"enum": []},
    {"anyOf": [False, {"enum": []}]},
    {"anyOf": [{"anyOf": [False]}]},
    {"type": "integer", "minimum": 5, "maximum": 4},
    {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
    {"type": "number", "minimum": 1, "exclusiveMaximum": 1},
    {"type": "string", "minLength": 3, "maxLength": 2},
    {"type": "string", "pattern": "^[a-c]{2}$", "minLength": 3},
    {"type": "string", "enum": [1, None]},
    {"type": "array", "items": False, "minItems": 1},
    {"type": "array", "minItems": 2, "maxItems": 1},
    {"type": "array", "prefixItems": [False]},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "object", "additionalProperties": False, "properties": {}, "required": ["z"]},
    {"allOf": [False]},
)
_CONSTANTS: tuple[Any, ...] = (
    *(1.0, -0.0, 0.1, 1e-7, 123456789.123456, 2**53 + 1, -(10**17), 1e15, 1.5e16, True, None, ""),
    *(
        '"',
        "\\",
        "\t",
        "\x00",
        "\u2028",
        "😀",
        "\\u0041",
        "a\nb",
        [],
        {},
        [[], [None]],
        [1, "1", 1.5],
    ),
    *({"": 0}, {'x" "y': {"a\\b": [True]}}, {"b": 1, "a": 2}),
)
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_PATTERNS = (
    *("^a.c$", ".", "\\S\\s\\S", "[^a]{1,3}", "\\w+\\W", "\\D\\d", "^(x|y)$", "^a|b$", "a?b*?c+"),
    *('"', "\\\\", "[\\t\\n]", "[\\]^-]", "[[&&a]", "\\u00e9", "\\x41", "(?:a|b){2,3}", "\\.\\*"),
    *("", "^$", "[!-~]{2}", "é|日", "[^\\S]", "[\\w.-]+@x", "\\/a", "a{0}", "\\$\\^"),
    *("a^b", "$a", "(?=a)b", "a\\b", "[", "a{2", "(", "\\1", "a**", "[z-a]", "(?i)a"),
)
_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
_OTHER_FORMATS = ("uri", "int32", "made-up")  # that nobody holds


def adversarial_schema(draw: random.Random) -> Schema:
    """Legal for JSON Schema (Draft 2020-12) but for some patterns; often without any value."""
    parts = {f"d{i}": _part(draw, 2) for i in range(draw.randint(0, 2))}
    parts |= {draw.choice(NAMES): _part(draw, 1)} if draw.random() < 0.4 else {}
    schema = draw.choice(_OBJECTS)(draw, 3, parts) if draw.random() < 0.7 else _part(draw, 3, parts)
    if isinstance(schema, bool):
        schema = {"type": "array", "items": schema, "maxItems": 2}
    if parts:
        schema = {**schema, draw.choice(["$defs", "definitions"]): parts}
        schema = _with_definitions_by_one_name(schema)
    return schema


def _with_definitions_by_one_name(schema: Schema) -> Schema:
    """References say `$defs`; half of the schemas have the older name beside it."""
    if "definitions" not in schema:
        return schema
    return {**schema, "$defs": schema["definitions"]}


def _part(draw: random.Random, depth: int, parts: Schema | None = None) -> Subschema:
    if draw.random() < 0.15:
        return draw.choice(_UNMET)
    if parts and draw.random() < 0.25:
        return {"$ref": _reference(draw, parts)}
    makers: list[Callable[[random.Random, int, Schema], Subschema]] = [*_LEAVES]
    if depth > 0:
        makers += [*_OBJECTS, _array, _tuple, _any_of]
    return draw.choice(makers)(draw, depth, parts or {})


def _reference(draw: random.Random, parts: Schema) -> str:
    if draw.random() < 0.15:
        return "#"
    name = draw.choice(list(parts)).replace("~", "~0").replace("/", "~1")
    if draw.random() < 0.5 or "%" in name:
        name = "".join(c if c.isalnum() or c in "~_" else _percent(c) for c in name)
    return f"#/$defs/{name}"


def _percent(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode())


# ---- leaves --------------------------------------------------------------------------------------


def _string(draw: random.Random, depth: int, parts: Schema) -> Schema:
    schema: Schema = {} if draw.random() < 0.1 else {"type": "string"}
    low = draw.randint(0, 3)
    if draw.random() < 0.7 or not schema:
        schema |= {"maxLength": low + draw.randint(0, 4)}
    if draw.random() < 0.5:
        schema |= {"minLength": low}
    if draw.random() < 0.4:
        schema |= {"pattern": draw.choice(_PATTERNS)}
    elif draw.random() < 0.2:
        schema |= {"format": draw.choice(_FORMATS + _OTHER_FORMATS)}
    return schema


def _formatted(draw: random.Random, depth: int, parts: Schema) -> Schema:
    return draw.choice([{}, {"type": ["string", "null"]}]) | {"format": draw.choice(_FORMATS)}


def _number(draw: random.Random, depth: int, parts: Schema) -> Schema:
    scale = 10.0 ** draw.randint(-8, 14)
    low, high = sorted(round(draw.uniform(-scale, scale), draw.randint(0, 9)) for _ in range(2))
    if draw.random() < 0.1:
        low, high = high, low
    if draw.random() < 0.3:
        low, high = float(int(low)), float(int(high))
    schema: Schema = {"type": draw.choice(["integer", "number", "number"])}
    if draw.random() < 0.2:  # as long as floats are
        low, high = draw.uniform(-scale, 0), draw.uniform(0, scale)
    for names, bound in ((_LOWER, low), (_UPPER, high)):
        for name in draw.sample(names, draw.choice([0, 1, 1, 2])):
            schema[name] = draw.choice([bound, bound, 0, int(bound)])
    return schema


def _constant(draw: random.Random, depth: int, parts: Schema) -> Schema:
    if draw.random() < 0.2:
        return {"const": draw.uniform(-1, 1) * 10.0 ** draw.randint(-9, 14)}
    if draw.random() < 0.1:
        return {"const": draw.choice(["2024-02-29", "abc"]), "format": "date"}
    if draw.random() < 0.4:
        return {"const": draw.choice(_CONSTANTS)}
    return {"enum": [draw.choice(_CONSTANTS) for _ in range(draw.randint(1, 4))]}


def _typed(draw: random.Random, depth: int, parts: Schema) -> Schema:
    names = ["null", "boolean", "string", "integer", "number"]
    return {"type": draw.sample(names, draw.randint(1, 3)), "maxLength": 4, "minimum": -3}


# ---- structures ----------------------------------------------------------------------------------


def _object(draw: random.Random, depth: int, parts: Schema) -> Schema:
    names = draw.sample(NAMES, draw.randint(1, 3)) + ["plain"] * draw.randint(0, 1)
    schema: Schema = {} if draw.random() < 0.2 else {"type": "object"}
    schema["properties"] = {name: _part(draw, depth - 1, parts) for name in names}
    schema["required"] = draw.sample(names, draw.randint(0, len(names)))
    if draw.random() < 0.2:
        schema["required"] += [draw.choice(NAMES)]
    if draw.random() < 0.4:
        others: list[Subschema] = [True, False, {"type": "null"}, {}]
        schema["additionalProperties"] = draw.choice(others)
    return schema


def _map(draw: random.Random, depth: int, parts: Schema) -> Schema:
    schema: Schema = {"type": "object", "additionalProperties": _part(draw, depth - 1, parts)}
    if draw.random() < 0.5:
        schema["required"] = draw.sample(NAMES, draw.randint(1, 2))
    return schema


def _array(draw: random.Random, depth: int, parts: Schema) -> Schema:
    low = draw.randint(0, 2)
    schema: Schema = {"type": "array", "items": _part(draw, depth - 1, parts)}
    if draw.random() < 0.5:
        schema["minItems"] = low
    if draw.random() < 0.8:
        schema["maxItems"] = low + draw.randint(0, 2)
    return schema


def _tuple(draw: random.Random, depth: int, parts: Schema) -> Schema:
    prefix = [_part(draw, depth - 1, parts) for _ in range(draw.randint(1, 3))]
    schema: Schema = {"type": "array", "prefixItems": prefix}
    if draw.random() < 0.5:
        schema["items"] = draw.choice([True, False, {"type": "null"}])
    if draw.random() < 0.4:
        schema["minItems"] = draw.randint(0, 4)
    if draw.random() < 0.4:
        schema["maxItems"] = draw.randint(0, 4)
    return schema


def _any_of(draw: random.Random, depth: int, parts: Schema) -> Schema:
    return {"anyOf": [_part(draw, depth - 1, parts) for _ in range(draw.randint(1, 3))]}


_OBJECTS = (_object, _map)
_LEAVES = (_string, _string, _formatted, _number, _number, _constant, _typed)

"""Random JSON schemas whose values are short, so that a model that knows no JSON ends them."""

import random
from typing import Any

_PATTERNS = ("^[a-z]{2,4}$", "[A-Z]{2}-\\d{1,3}", "^(yes|no)$", "[^0-9]{1,3}", "\\w.\\S")
_VALUES: tuple[Any, ...] = ("red", "two words", 'q"uote\\', "é", 1, -2.5, True, None, [1], {"k": 0})


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of every supported kind, at most `depth` levels of arrays and objects deep."""
    makers = [_string, _number, _choice, _simple, _several]
    if depth > 0:
        makers += [_object, _object, _array, _any_of, _referring]
    return draw.choice(makers)(draw, depth)


def _string(draw: random.Random, depth: int) -> dict[str, Any]:
    if draw.random() < 0.4:
        return {"type": "string", "pattern": draw.choice(_PATTERNS)}
    low = draw.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 5)}


def _number(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(-120, 120)
    if draw.random() < 0.3:
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 2.5}
    high = low + draw.randint(0, 300)
    if draw.random() < 0.3:
        return draw.choice([{"type": "number"}, {"type": "integer", "maximum": low}])
    return {"type": "integer", "minimum": low, "maximum": high}


def _choice(draw: random.Random, depth: int) -> dict[str, Any]:
    if draw.random() < 0.3:
        return {"const": draw.choice(_VALUES)}
    return {"enum": draw.sample(_VALUES, draw.randint(1, 4))}


def _simple(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": draw.choice(["boolean", "null"]), "description": "short"}


def _several(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": ["string", "null", "boolean"], "maxLength": draw.randint(0, 6)}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = [f"key_{i}" for i in range(draw.randint(0, 3))]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(draw, depth - 1) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
    }
    if draw.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    if draw.random() < 0.3:
        parts = [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 2))]
        return {"type": "array", "prefixItems": parts, "items": False}
    low = draw.randint(0, 1)
    items = random_schema(draw, depth - 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randint(0, 2)}


def _any_of(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}


def _referring(draw: random.Random, depth: int) -> dict[str, Any]:
    """Only where it is the root itself can it say `$defs` that a reference finds."""
    if depth < 3:
        return _simple(draw, depth)
    return {
        "$defs": {"part": random_schema(draw, 1)},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/part"}, "b": {"allOf": [{"$ref": "#/$defs/part"}]}},
        "required": ["a"],
    }

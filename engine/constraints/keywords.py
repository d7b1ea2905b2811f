"""Which keywords of JSON Schema are read, of which types they speak, and what shape they have.

A keyword restricts the output, is an annotation, or is refused: a keyword that nobody knows may be
a misspelled one. `docs/api.md` has the same as a table. Knows no rewriting.
"""

import math
from collections.abc import Callable, Mapping
from typing import cast

from engine.constraints.formats import FORMATS
from engine.errors import RequestError

Schema = dict[str, object]

MAX_BOUND = 10**15 - 1  # of numbers; all JSON readers represent integers up to it exactly
MAX_WHERE_CHARS = 200  # length of the location in an error message

LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")
STRICT = ("exclusiveMinimum", "exclusiveMaximum")
BOUNDS = (*LOWER, *UPPER)
DEFINITIONS = ("$defs", "definitions")
# Tests whether a decoded JSON value is of a type.
TYPES: Mapping[str, Callable[[object], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: (
        not isinstance(value, bool)
        and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
    "number": lambda value: not isinstance(value, bool) and isinstance(value, int | float),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
# Keyword -> the type that it speaks of; "number" includes integers.
TYPE_OF: Mapping[str, str] = {
    **dict.fromkeys(("minLength", "maxLength", "pattern"), "string"),
    **dict.fromkeys((*BOUNDS, "multipleOf"), "number"),
    **dict.fromkeys(("items", "prefixItems", "additionalItems"), "array"),
    **dict.fromkeys(("minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("properties", "required", "additionalProperties"), "object"),
    **dict.fromkeys(("patternProperties", "propertyNames"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties"), "object"),
}
DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")
CHOICES = ("anyOf", "oneOf", "if", *DEPENDENCIES)
OTHERS = ("$ref", "allOf", "not", "then", "else", "const", "enum", "type")
ANNOTATIONS = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "discriminator", "contentMediaType", "contentEncoding"),
    *("contentSchema", "nullable", "example", "externalDocs", "xml", "markdownDescription"),
    *("enumNames", "enumDescriptions", "errorMessage", "$vocabulary"),
    "strict",  # OpenAI's, of the function, which clients also put into its parameters
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf")
_OBJECTS = ("properties", "patternProperties", *DEPENDENCIES, *DEFINITIONS)
_KNOWN = {*TYPE_OF, *CHOICES, *OTHERS, *ANNOTATIONS, *DEFINITIONS, "format"}


def restricts(schema: Schema) -> bool:
    """Whether it has a keyword of its own that restricts, besides `$ref` and `allOf`."""
    return any(
        name in TYPE_OF or name in CHOICES or name in ("const", "enum", "type", "not")
        for name in schema
    ) or (schema.get("format") in FORMATS)


def check_keywords(schema: Schema, where: str) -> None:
    """Raises RequestError for an unknown keyword and for one whose value has a wrong shape."""
    for name, value in schema.items():
        if name not in _KNOWN and not name.startswith("x-"):
            raise refused(where, f"the keyword '{name[:60]}' is not supported")
        _check_value(name, value, f"{where}.{name}")
    types_of(schema, where)


def _check_value(name: str, value: object, where: str) -> None:
    if name in _COUNTS and not (_is_whole(value) and cast("int", value) >= 0):
        raise refused(where, "expected a whole number, 0 or more")
    if name == "pattern" and not isinstance(value, str):
        raise refused(where, "expected a string")
    if name in BOUNDS and not _is_bound(name, value):
        raise refused(where, "expected a number of at most 15 digits")
    if name == "multipleOf" and not (_is_number(value) and cast("float", value) > 0):
        raise refused(where, "expected a number above 0")
    if name == "uniqueItems" and not isinstance(value, bool):
        raise refused(where, "expected true or false")
    if name in _OBJECTS and not isinstance(value, dict):
        raise refused(where, "expected an object")
    if name in _LISTS_OF_SCHEMAS and not list_at(value, where):
        raise refused(where, "expected at least one schema")
    if name in ("enum", "prefixItems"):
        list_at(value, where)
    if name == "required":
        strings_at(value, where)


def types_of(schema: Schema, where: str) -> tuple[str, ...]:
    """The types that it names; () = it names none."""
    if "type" not in schema:
        return ()
    value = schema["type"]
    names = [value] if isinstance(value, str) else strings_at(value, f"{where}.type")
    if not names or any(name not in TYPES for name in names):
        raise refused(f"{where}.type", f"expected one or several of {', '.join(TYPES)}")
    return tuple(dict.fromkeys(names))


def list_at(value: object, where: str) -> list[object]:
    """`value` as a list. Raises RequestError naming `where`."""
    if not isinstance(value, list):
        raise refused(where, "expected an array")
    return value


def strings_at(value: object, where: str) -> list[str]:
    """`value` as distinct strings. Raises RequestError naming `where`."""
    found = list_at(value, where)
    if not all(isinstance(item, str) for item in found):
        raise refused(where, "expected an array of strings")
    return list(dict.fromkeys(cast("list[str]", found)))


def refused(where: str, detail: str) -> RequestError:
    """The error of a schema that is not valid or cannot be kept, at a place in it."""
    return RequestError(
        f"Invalid schema at '{where[:MAX_WHERE_CHARS]}': {detail}.",
        param=where[:MAX_WHERE_CHARS],
        code="invalid_value",
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def _is_bound(name: str, value: object) -> bool:
    """Whether the bound can be kept; also True for one that has no effect within MAX_BOUND.

    In Draft 4, `exclusiveMinimum` and `exclusiveMaximum` are true or false.
    """
    if name in STRICT and isinstance(value, bool):
        return True
    if not _is_number(value):
        return False
    number = cast("float", value)
    return abs(number) <= MAX_BOUND or name in (UPPER if number > 0 else LOWER)

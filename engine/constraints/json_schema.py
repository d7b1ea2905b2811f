"""JSON schemas as the grammar compiler takes them: what it would ignore is refused, not dropped.

`restrict` rewrites a schema to one that allows a part of what it allowed, never more:

    an object with properties      has these and no others, in this order
    an object or array that says   may hold anything (the compiler would leave it empty)
      nothing of what is in it
    a required name without a      may have any value that additionalProperties allows
      property of its own
    a string of a known format     is held to it (`formats`), not just described by it
    a number with bounds           has no exponent and few decimals (`number_range`)

A schema that no value can satisfy is refused too, also one that needs itself without end. Knows no
compiler and no tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import cast

from engine.constraints.formats import FORMATS
from engine.constraints.number_range import BOUNDS, is_bound, read_range
from engine.constraints.pattern import writable_pattern
from engine.constraints.satisfiability import can_be_met
from engine.errors import RequestError

Schema = dict[str, object]

MAX_NODES = 20_000
MAX_WHERE_CHARS = 200  # of the place that an error names
# What a value must be to be of a type, as JSON is decoded.
_TYPES: Mapping[str, Callable[[object], bool]] = {
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
# Keyword -> the types it says something about.
_KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "properties": ("object",),
    "required": ("object",),
    "additionalProperties": ("object",),
    "items": ("array",),
    "prefixItems": ("array",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "exclusiveMaximum": ("integer", "number"),
}
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
# Each says alone what the value is.
_DECIDERS = ("$ref", "const", "enum", "anyOf", "allOf")
_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "format", "discriminator"),
)


def restrict(schema: object, param: str) -> Schema:
    """A copy that the compiler takes as it is meant. Raises RequestError naming `param`."""
    if not isinstance(schema, dict):
        raise _refused(param, "expected an object with a JSON schema")
    root = cast("Schema", schema)
    restricted = _Restriction(param).node(root, param)
    for name in _DEFINITIONS:
        if name in root and name not in restricted:
            raise _refused(param, f"'{name}' may not stand beside a boolean schema")
    if not can_be_met(restricted, lambda reference: _resolve(restricted, reference, param)):
        raise _refused(param, "no value can satisfy it")
    return restricted


class _Restriction:
    """One schema's copy; counts its nodes."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._num_nodes = 0

    def node(self, schema: object, where: str) -> Schema:
        where = where[:MAX_WHERE_CHARS]  # every node below writes it out: a name may have megabytes
        self._count(1)
        if schema is True:
            return {}
        if schema is False:
            return {"enum": []}
        if not isinstance(schema, dict):
            raise _refused(where, "expected a JSON schema")
        _check_keywords(schema, where)
        kept: Schema = {
            name: {key: self.node(value, f"{where}.{name}.{key}") for key, value in inner.items()}
            for name, inner in _objects(schema, _DEFINITIONS, where)
        }
        deciders = [name for name in _DECIDERS if name in schema]
        if deciders:
            return kept | self._decided(schema, deciders, where)
        types = _types_of(schema, where)
        return kept | self._typed(schema, types, where)

    def _count(self, num_nodes: int) -> None:
        self._num_nodes += num_nodes
        if self._num_nodes > MAX_NODES:
            raise _refused(self._param, f"it has more than {MAX_NODES} parts")

    def _decided(self, schema: Schema, deciders: list[str], where: str) -> Schema:
        others = [name for name in schema if name in _KEYWORDS]
        if len(deciders) > 1 or others:
            names = ", ".join(f"'{name}'" for name in (*deciders, *others))
            raise _refused(where, f"{names} cannot be combined; keep one of them")
        match deciders[0]:
            case "$ref":
                self._refuse_type(schema, where)
                return {"$ref": _reference(schema["$ref"], where)}
            case "const":
                return {"enum": _of_type([schema["const"]], schema, where)}
            case "enum":
                return {"enum": _of_type(_list(schema["enum"], f"{where}.enum"), schema, where)}
            case "anyOf":
                self._refuse_type(schema, where)
                return {"anyOf": self._list(schema["anyOf"], f"{where}.anyOf")}
        parts = self._list(schema["allOf"], f"{where}.allOf")
        if len(parts) != 1:
            raise _refused(f"{where}.allOf", "only a single schema is supported")
        self._refuse_type(schema, where)
        return {"anyOf": parts}

    def _refuse_type(self, schema: Schema, where: str) -> None:
        if "type" in schema:
            raise _refused(where, "'type' cannot stand beside '$ref', 'anyOf' or 'allOf'")

    def _list(self, value: object, where: str) -> list[Schema]:
        found = _list(value, where)
        if not found:
            raise _refused(where, "expected at least one schema")
        return [self.node(item, f"{where}[{i}]") for i, item in enumerate(found)]

    def _typed(self, schema: Schema, types: tuple[str, ...], where: str) -> Schema:
        """One alternative a type: then each has its own keywords only."""
        parts = [self._of_type(schema, name, where) for name in types]
        if len(parts) == 1:
            return parts[0]
        return {"anyOf": parts} if parts else {}

    def _of_type(self, schema: Schema, name: str, where: str) -> Schema:
        own = {
            key: value
            for key, value in schema.items()
            if name in _KEYWORDS.get(key, ()) and key not in _STRUCTURE
        }
        _check_bounds(own, where)
        if "pattern" in own:
            own["pattern"] = writable_pattern(str(own["pattern"]), f"{where}.pattern")
        match name:
            case "string" if schema.get("format") in FORMATS:
                return {"type": "string", **_formatted(str(schema["format"]), own, where)}
            case "object":
                return {"type": "object", **self._object(schema, where)}
            case "array":
                return {"type": "array", **self._array(schema, where), **own}
            case "integer" | "number" if own and read_range({"type": name, **own}).is_empty:
                return {"enum": []}
        return {"type": name, **own}

    def _object(self, schema: Schema, where: str) -> Schema:
        is_open = schema.get("additionalProperties", "properties" not in schema)
        others = self.node(is_open, f"{where}.additionalProperties")
        names = _strings(schema.get("required", []), f"{where}.required")
        inner = _object_at(schema, "properties", where)
        properties = {
            key: self.node(value, f"{where}.properties.{key}") for key, value in inner.items()
        }
        properties |= {name: others for name in names if name not in properties}
        if not properties:
            is_closed = others == {"enum": []}
            return {"additionalProperties": False if is_closed else (others or True)}
        return {"properties": properties, "required": names, "additionalProperties": False}

    def _array(self, schema: Schema, where: str) -> Schema:
        items = schema.get("items", True)
        prefix = _list(schema.get("prefixItems", []), f"{where}.prefixItems")
        if not prefix:
            return {"items": self.node(items, f"{where}.items") or True}
        if "minItems" in schema or "maxItems" in schema:
            raise _refused(where, "'prefixItems' cannot be combined with 'minItems' or 'maxItems'")
        # Just the items that are listed: an array of exactly these is what the schema allows too.
        return {
            "prefixItems": self._list(prefix, f"{where}.prefixItems"),
            "items": False,
        }


_STRUCTURE = ("properties", "required", "additionalProperties", "items", "prefixItems")


def _check_keywords(schema: Schema, where: str) -> None:
    for name, value in schema.items():
        is_known = name in _KEYWORDS or name in _DECIDERS or name in _DEFINITIONS
        if is_known or name == "type" or name in _ANNOTATIONS or name.startswith("x-"):
            continue
        if name == "uniqueItems" and value is False:
            continue
        raise _refused(where, f"the keyword '{name[:60]}' is not supported")


def _check_bounds(own: Schema, where: str) -> None:
    for name, value in own.items():
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if name in _COUNTS and not is_count:
            raise _refused(f"{where}.{name}", "expected a whole number, 0 or more")
        if name == "pattern" and not isinstance(value, str):
            raise _refused(f"{where}.pattern", "expected a string")
        if name in BOUNDS and not is_bound(name, value):
            raise _refused(f"{where}.{name}", "expected a number of at most 15 digits")
    if "pattern" in own and len(own.keys() & {"minLength", "maxLength"}) > 0:
        raise _refused(
            where, "'pattern' cannot be combined with 'minLength' or 'maxLength'; say it in one"
        )


def _formatted(name: str, own: Schema, where: str) -> Schema:
    if own:
        names = ", ".join(f"'{key}'" for key in own)
        raise _refused(where, f"the format '{name}' cannot be combined with {names}; keep one")
    return {"pattern": FORMATS[name]}


def _types_of(schema: Schema, where: str) -> tuple[str, ...]:
    """As it says, or as its keywords imply; () = any."""
    if "type" not in schema:
        groups = {_KEYWORDS[name][-1] for name in schema if name in _KEYWORDS}
        if len(groups) > 1:
            raise _refused(where, "it needs a 'type': its keywords are about different ones")
        return tuple(groups)
    value = schema["type"]
    names = [value] if isinstance(value, str) else _strings(value, f"{where}.type")
    unknown = [name for name in names if name not in _TYPES]
    if unknown or not names:
        kinds = ", ".join(_TYPES)
        raise _refused(f"{where}.type", f"expected one or several of {kinds}")
    return tuple(dict.fromkeys(names))


def _of_type(values: list[object], schema: Schema, where: str) -> list[object]:
    if "type" not in schema:
        return values
    types = _types_of(schema, where)
    return [value for value in values if any(_TYPES[name](value) for name in types)]


def _objects(
    schema: Schema, names: tuple[str, ...], where: str
) -> Iterator[tuple[str, dict[str, object]]]:
    for name in names:
        if name in schema:
            yield name, _object_at(schema, name, where)


def _object_at(schema: Schema, name: str, where: str) -> dict[str, object]:
    value = schema.get(name, {})
    if not isinstance(value, dict):
        raise _refused(f"{where}.{name}", "expected an object")
    return value


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise _refused(where, "expected an array")
    return value


def _strings(value: object, where: str) -> list[str]:
    found = _list(value, where)
    if not all(isinstance(item, str) for item in found):
        raise _refused(where, "expected an array of strings")
    return list(dict.fromkeys(cast("list[str]", found)))


def _reference(value: object, where: str) -> str:
    if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
        raise _refused(f"{where}.$ref", "only references into the schema itself ('#/...') are")
    return value


def _resolve(root: Schema, reference: str, param: str) -> Schema:
    """What a reference names in a restricted schema; raises RequestError if there is none."""
    found: object = root
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise _refused(param, f"'{reference[:80]}' names nothing in it")
    return cast("Schema", found)


def _refused(where: str, detail: str) -> RequestError:
    return RequestError(
        f"Invalid schema at '{where[:MAX_WHERE_CHARS]}': {detail}.",
        param=where[:MAX_WHERE_CHARS],
        code="invalid_value",
    )

"""Restricts JSON schemas to what the grammar library enforces; the rest is refused, not dropped.

`restrict` rewrites a schema to one that allows a subset of its values, never more:

    an object with properties      has these and no others, in this order
    a required name without a      may have any value that additionalProperties allows
      property of its own
    an array with prefixItems      has exactly these, unless bounds on its length say otherwise
    a pattern                      applies to the whole string, in the common dialect (`pattern`)
    a string of a known format     must match it (`formats`), not only be described by it
    a reference                    goes to a definition of its own, so that rewriting preserves it
    a part that no value meets     is left out (`satisfiability`)

A schema that no value can satisfy is refused. Knows no grammars and no tokens.
"""

import math
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import cast
from urllib.parse import unquote

from engine.constraints.formats import FORMATS
from engine.constraints.pattern import portable_pattern
from engine.constraints.satisfiability import DEFINITIONS, without_unmet
from engine.errors import RequestError

Schema = dict[str, object]

MAX_NODES = 20_000
MAX_BOUND = 10**15 - 1  # of numbers; all JSON readers represent integers up to it exactly
_MAX_CONSTANT = 2**53 - 1  # readers that use floats represent all integers up to it exactly
_NUM_DIGITS = 15  # distinct decimals with up to this many digits are distinct floats
_LEAST_EXPONENT = -18  # of the last digit of a bound
_PATTERN_CHARS_A_NODE = 4  # this many characters of a pattern cost about as much as one node
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
BOUNDS = (*_LOWER, *_UPPER)
_STRICT = {"exclusiveMinimum", "exclusiveMaximum"}
MAX_WHERE_CHARS = 200  # length of the location in an error message
# Tests whether a decoded JSON value is of a type.
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
# Keyword -> the types it applies to.
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
# Each of these determines the value on its own.
_DECIDERS = ("$ref", "const", "enum", "anyOf", "allOf")
_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "format", "discriminator"),
)


def restrict(schema: object, param: str, *, only_objects: bool = False) -> Schema:
    """A restricted copy that the library enforces exactly. Raises RequestError naming `param`.

    only_objects: of the values that the schema allows, keep only the objects.
    """
    if not isinstance(schema, dict):
        raise _refused(param, "expected an object with a JSON schema")
    copied = _Restriction(cast("Schema", schema), param).run()
    restricted = without_unmet(_objects_of(copied) if only_objects else copied)
    if restricted is None:
        wanted = "no object" if only_objects else "no value"
        raise _refused(param, f"{wanted} can satisfy it")
    return restricted


def _objects_of(root: Schema) -> Schema:
    """A restricted schema without its values that are not objects.

    Each definition that the whole value may refer to gets a second one, for its objects only.
    """
    definitions = dict(cast("dict[str, Schema]", root.get("$defs", {})))
    due: list[str] = []

    def objects(node: Schema) -> Schema:
        if "$ref" in node:
            name = str(node["$ref"]).removeprefix(DEFINITIONS)
            due.append(name)
            return {"$ref": f"{DEFINITIONS}{name}o"}
        if "enum" in node:
            values = cast("list[object]", node["enum"])
            return {"enum": [value for value in values if isinstance(value, dict)]}
        if "anyOf" in node:
            return {"anyOf": [objects(option) for option in cast("list[Schema]", node["anyOf"])]}
        if node.get("type", "object") != "object":
            return {"enum": []}
        return {"type": "object", **(node or {"additionalProperties": {}})}

    held = objects({key: value for key, value in root.items() if key != "$defs"})
    while due:
        name = due.pop()
        if f"{name}o" not in definitions:
            definitions[f"{name}o"] = objects(definitions[name])
    return held | ({"$defs": definitions} if definitions else {})


class _Restriction:
    """Copies one schema; counts its nodes and gives each referenced node a definition."""

    def __init__(self, root: Schema, param: str) -> None:
        self._root = root
        self._param = param
        self._num_nodes = 0
        self._name_of: dict[str, str] = {}  # reference as written -> name of its definition
        self._definitions: dict[str, Schema] = {}
        self._referred: list[tuple[str, str, object]] = []  # name, location, schema; not copied yet

    def run(self) -> Schema:
        restricted = self.node(self._root, self._param)
        while self._referred:
            name, where, schema = self._referred.pop()
            self._definitions[name] = self.node(schema, where)
        return restricted | ({"$defs": self._definitions} if self._definitions else {})

    def node(self, schema: object, where: str) -> Schema:
        where = where[:MAX_WHERE_CHARS]  # all nodes below repeat it, and a name may have megabytes
        self._count(1)
        if schema is True:
            return {}
        if schema is False:
            return {"enum": []}
        if not isinstance(schema, dict):
            raise _refused(where, "expected a JSON schema")
        _check_keywords(schema, where)
        if "$id" in schema and schema is not self._root:
            raise _refused(f"{where}.$id", "only the whole schema may have one")
        for name in _DEFINITIONS:
            _object_at(schema, name, where)
        deciders = [name for name in _DECIDERS if name in schema]
        if deciders:
            return self._decided(schema, deciders, where)
        return self._typed(schema, _types_of(schema, where), where)

    def _count(self, num_nodes: int) -> None:
        self._num_nodes += num_nodes
        if self._num_nodes > MAX_NODES:
            raise _refused(self._param, f"it has more than {MAX_NODES} parts")

    def _decided(self, schema: Schema, deciders: list[str], where: str) -> Schema:
        others = [name for name in schema if name in _KEYWORDS]
        others += ["format"] if schema.get("format") in FORMATS else []
        if len(deciders) > 1 or others:
            names = ", ".join(f"'{name}'" for name in (*deciders, *others))
            raise _refused(where, f"{names} cannot be combined; keep one of them")
        match deciders[0]:
            case "$ref":
                self._refuse_type(schema, where)
                return {"$ref": self._reference(schema["$ref"], where)}
            case "const":
                return self._enum([schema["const"]], schema, f"{where}.const")
            case "enum":
                return self._enum(_list(schema["enum"], f"{where}.enum"), schema, f"{where}.enum")
            case "anyOf":
                self._refuse_type(schema, where)
                return {"anyOf": self._list(schema["anyOf"], f"{where}.anyOf")}
        parts = self._list(schema["allOf"], f"{where}.allOf")
        if len(parts) != 1:
            raise _refused(f"{where}.allOf", "only a single schema is supported")
        self._refuse_type(schema, where)
        return {"anyOf": parts}

    def _enum(self, values: list[object], schema: Schema, where: str) -> Schema:
        self._count(len(values))
        constants = [_constant(value, where) for value in values]
        return {"enum": _of_type(constants, schema, where)}

    def _reference(self, value: object, where: str) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            detail = "only references into the schema itself ('#/...') are supported"
            raise _refused(f"{where}.$ref", detail)
        if value not in self._name_of:
            self._name_of[value] = str(len(self._name_of))
            found = _resolve(self._root, value, f"{where}.$ref")
            self._referred.append((self._name_of[value], f"{self._param}.{value}", found))
        return f"{DEFINITIONS}{self._name_of[value]}"

    def _refuse_type(self, schema: Schema, where: str) -> None:
        if "type" in schema:
            raise _refused(where, "'type' cannot stand beside '$ref', 'anyOf' or 'allOf'")

    def _list(self, value: object, where: str) -> list[Schema]:
        found = self._items(value, where)
        if not found:
            raise _refused(where, "expected at least one schema")
        return found

    def _typed(self, schema: Schema, types: tuple[str, ...], where: str) -> Schema:
        """One alternative per type, so that each has its own keywords only."""
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
        match name:
            case "string":
                self._count(len(str(own.get("pattern", ""))) // _PATTERN_CHARS_A_NODE)
                return {"type": "string", **_string(schema, own, where)}
            case "object":
                return {"type": "object", **self._object(schema, where)}
            case "array":
                return self._array(schema, own, where)
            case "integer" | "number" if own:
                bounds = _integer_bounds(own) if name == "integer" else _number_bounds(own)
                return {"enum": []} if bounds is None else {"type": name, **bounds}
        return {"type": name}

    def _object(self, schema: Schema, where: str) -> Schema:
        inner = _object_at(schema, "properties", where)
        others = self.node(
            schema.get("additionalProperties", True), f"{where}.additionalProperties"
        )
        names = _strings(schema.get("required", []), f"{where}.required")
        properties = {
            key: self.node(value, f"{where}.properties.{key}") for key, value in inner.items()
        }
        missing = [name for name in names if name not in properties]
        if missing:
            shared = self._shared(others)
            properties |= {name: dict(shared) for name in missing}
        if not properties:
            is_closed = "properties" in schema and "additionalProperties" not in schema
            return {"additionalProperties": False if is_closed else others}
        return {"properties": properties, "required": names, "additionalProperties": False}

    def _shared(self, node: Schema) -> Schema:
        """A reference that replaces `node` in several places, so that it is written only once."""
        if not node:
            return node
        name = f"{len(self._definitions)}s"
        while name in self._definitions:
            name += "s"
        self._definitions[name] = node
        return {"$ref": f"{DEFINITIONS}{name}"}

    def _array(self, schema: Schema, own: Schema, where: str) -> Schema:
        """`own`: the bounds on the array's length."""
        prefix = self._items(schema.get("prefixItems", []), f"{where}.prefixItems")
        is_exact = bool(prefix) and not own
        if is_exact:
            own = {"minItems": len(prefix)}
        others: object = schema.get("items", not prefix)
        # With exactly the prefix items, the schema of other items does not matter.
        items = False if is_exact else self.node(others, f"{where}.items")
        if "maxItems" in own and cast("int", own["maxItems"]) < cast("int", own.get("minItems", 0)):
            return {"enum": []}
        return {
            "type": "array",
            **own,
            **({"prefixItems": prefix} if prefix else {}),
            "items": items,
        }

    def _items(self, value: object, where: str) -> list[Schema]:
        return [self.node(item, f"{where}[{i}]") for i, item in enumerate(_list(value, where))]


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
        if name in BOUNDS and not _is_bound(name, value):
            raise _refused(f"{where}.{name}", "expected a number of at most 15 digits")


def _string(schema: Schema, own: Schema, where: str) -> Schema:
    """The pattern of a string, from the keyword or the format, and its length bounds."""
    written = {key: value for key, value in own.items() if key != "pattern"}
    if cast("int", own.get("minLength", 0)) > cast("int", own.get("maxLength", math.inf)):
        return {"enum": []}
    is_formatted = schema.get("format") in FORMATS
    if "pattern" in own and is_formatted:
        raise _refused(where, "'pattern' cannot be combined with 'format'; say it in one")
    if "pattern" in own:
        pattern = portable_pattern(str(own["pattern"]), f"{where}.pattern")
        return {**written, "pattern": f"^{pattern}$"}
    if is_formatted:
        return {**written, "pattern": f"^{FORMATS[str(schema['format'])]}$"}
    return written


def _is_bound(name: str, value: object) -> bool:
    """Whether the bound can be kept; also True for one that has no effect within MAX_BOUND."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return abs(value) <= MAX_BOUND or name in (_UPPER if value > 0 else _LOWER)


def _number_bounds(own: Schema) -> Schema | None:
    """Bounds of a number, inclusive and of few digits, within those of `own`; None if empty.

    Readers compare floats: a decimal text close enough to an exclusive bound reads as the bound
    itself. Decimals of up to 15 digits are distinct floats, and rounding keeps their order. The
    library never writes a prefix of an upper bound: below 0.99 it has 0.90, not 0.9.
    """
    lows, highs = [-Decimal(MAX_BOUND)], [Decimal(MAX_BOUND)]
    for name, value in own.items():
        bound = Decimal(repr(value))
        is_lower, is_strict = name in _LOWER, name in _STRICT
        if bound == 0:
            quantum = Decimal(1).scaleb(_LEAST_EXPONENT)
        else:
            exponent = max(bound.adjusted() - _NUM_DIGITS + 1, _LEAST_EXPONENT)
            quantum = Decimal(1).scaleb(exponent)
        rounding = ROUND_CEILING if is_lower else ROUND_FLOOR
        nearest = bound.quantize(quantum, rounding=rounding)
        if is_strict and nearest == bound:
            nearest += quantum if is_lower else -quantum
        (lows if is_lower else highs).append(nearest)
    low, high = max(lows), min(highs)
    if low > high:
        return None
    kept: Schema = {}
    if any(name in own for name in _LOWER):
        kept["minimum"] = _plain_number(low)
    if any(name in own for name in _UPPER):
        kept["maximum"] = _plain_number(high)
    return kept


def _integer_bounds(own: Schema) -> Schema | None:
    """Bounds of an integer as integers, within those of `own`; None if empty."""
    lows, highs = [-MAX_BOUND], [MAX_BOUND]
    for name, value in own.items():
        bound = Fraction(repr(value))
        if name in _LOWER:
            lows.append(math.floor(bound) + 1 if name in _STRICT else math.ceil(bound))
        else:
            highs.append(math.ceil(bound) - 1 if name in _STRICT else math.floor(bound))
    if max(lows) > min(highs):
        return None
    kept: Schema = {"minimum": max(lows)} if any(name in own for name in _LOWER) else {}
    return kept | ({"maximum": min(highs)} if any(name in own for name in _UPPER) else {})


def _plain_number(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


def _constant(value: object, where: str) -> object:
    """A constant as the library reads it without a change; RequestError if that is impossible."""
    match value:
        case dict():
            return {key: _constant(inner, where) for key, inner in value.items()}
        case list():
            return [_constant(inner, where) for inner in value]
        case bool():
            return value
        case int() | float() if not abs(value) <= _MAX_CONSTANT:
            raise _refused(where, f"a number in it is beyond {_MAX_CONSTANT}; make it a string")
        case float() if value.is_integer():
            return int(value)
        case float():
            digits, exponent = Decimal(repr(value)).as_tuple()[1:]
            if len(digits) > _NUM_DIGITS or not isinstance(exponent, int) or exponent < -22:
                raise _refused(where, f"a number in it has more than {_NUM_DIGITS} digits")
    return value


def _types_of(schema: Schema, where: str) -> tuple[str, ...]:
    """The types that it names, or that its keywords imply; () = any."""
    if "type" not in schema:
        groups = {_KEYWORDS[name][-1] for name in schema if name in _KEYWORDS}
        groups |= {"string"} if schema.get("format") in FORMATS else set()
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


def _resolve(root: Schema, reference: str, where: str) -> object:
    """The schema that a JSON pointer in a fragment refers to; RequestError if there is none."""
    found: object = root
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            is_index = key.isascii() and key.isdigit() and int(key[:9]) < len(found)
            found = found[int(key)] if is_index and len(key) <= 9 else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict) and isinstance(found.get("$id"), str) and found is not root:
            raise _refused(where, "it leads through a part with an '$id' of its own")
    if not isinstance(found, dict | bool):
        raise _refused(where, f"'{reference[:80]}' names no schema in it")
    return found


def _refused(where: str, detail: str) -> RequestError:
    return RequestError(
        f"Invalid schema at '{where[:MAX_WHERE_CHARS]}': {detail}.",
        param=where[:MAX_WHERE_CHARS],
        code="invalid_value",
    )

"""Whether a constant is a value of a schema, asked of the schema as it was written.

Where readers of a schema may differ (patterns, formats, steps that are no binary fractions), there
are two answers: `surely` is what all of them agree on, and otherwise what one of them may say.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import cast

from engine.constraints.formats import FORMATS
from engine.constraints.keywords import LOWER, MAX_BOUND, STRICT, TYPES, Schema, refused, types_of
from engine.constraints.lookahead import portable_patterns
from engine.constraints.numbers import identity_of, is_multiple, strictest
from engine.constraints.schema_reader import ANY, NEVER, Conjunction, Part, SchemaReader, joined

_MAX_DEPTH = 100
_MAX_TEXT = 256
_QUANTIFIED_GROUP = re.compile(r"\)[*+?{]")
_REPEATED = re.compile(r"[*+{]")
_MAX_REPEATED = 2  # so that matching takes at most a square of the text's length


def key_pattern_of(pattern: str, where: str) -> "re.Pattern[str] | None":
    """`pattern` for Python where matching takes bounded time, else None. Raises RequestError."""
    portable_patterns(pattern, where)
    if _QUANTIFIED_GROUP.search(pattern) or len(_REPEATED.findall(pattern)) > _MAX_REPEATED:
        return None
    try:
        return re.compile(pattern)
    except re.error:
        return None


class Membership:
    """Asks about values of one document's schemas."""

    def __init__(self, reader: SchemaReader) -> None:
        self._reader = reader
        self._listed: dict[int, set[str]] = {}  # part -> its `enum`, as of `identity_of`

    def has(self, conjunction: Conjunction, value: object, *, surely: bool, depth: int = 0) -> bool:
        """Whether `value` is one of the conjunction. RequestError if that takes too long to say."""
        flat = self._reader.flat(conjunction).conjunction
        if depth > _MAX_DEPTH:
            where = flat.parts[0].where if flat.parts else ""
            raise refused(where, "a constant in it is nested too deeply, or refers to itself")
        return all(
            self._meets(part, value, surely=surely)
            and self._meets_structure(part, value, surely=surely, depth=depth + 1)
            and all(
                any(self.has(option, value, surely=surely, depth=depth + 1) for option in choice)
                for choice in self._reader.choices(part)
            )
            for part in flat.parts
        ) and not any(
            self.has(Conjunction((part,)), value, surely=not surely, depth=depth + 1)
            for part in flat.excluded
        )

    def meets_all(self, parts: Sequence[Part], value: object, *, surely: bool) -> bool:
        """Whether `value` meets all parts, whatever their choices say."""
        return all(
            self._meets(part, value, surely=surely)
            and self._meets_structure(part, value, surely=surely, depth=0)
            for part in parts
        )

    def name_meets(self, name: str, pattern: str, where: str) -> bool | None:
        """Whether `pattern` is found in the name of a property; None if that cannot be said."""
        compiled = key_pattern_of(pattern, where)
        if compiled is None or len(name) > _MAX_TEXT:
            return None
        return compiled.search(name) is not None

    def property_of(self, part: Part, name: str, *, surely: bool) -> Conjunction:
        """What the part demands of a property's value.

        surely: nothing less; else nothing more. RequestError if a pattern is too complex to say.
        """
        schema, where = part.schema, part.where
        names = schema.get("propertyNames", True)
        if names is not True:
            allowed = self._reader.read(names, f"{where}.propertyNames")
            if not self.has(allowed, name, surely=surely):
                return NEVER
        found = []
        properties = cast("Schema", schema.get("properties", {}))
        if name in properties:
            found.append(self._reader.read(properties[name], f"{where}.properties.{name}"))
        place = f"{where}.patternProperties"
        is_unknown = False
        for pattern, inner in cast("Schema", schema.get("patternProperties", {})).items():
            is_met = self.name_meets(name, pattern, place)
            if is_met is None and surely:
                detail = f"'{pattern[:60]}' is too complex to stand beside properties with names"
                raise refused(place, detail)
            is_unknown |= is_met is None
            if is_met:
                found.append(self._reader.read(inner, f"{place}.{pattern}"))
        if found or is_unknown:
            return joined(found)
        others = schema.get("additionalProperties", True)
        return self._reader.read(others, f"{where}.additionalProperties")

    # ---- one part, without its choices ----------------------------------------------------------

    def _meets(self, part: Part, value: object, *, surely: bool) -> bool:
        self._reader.spend(1)
        schema = part.schema
        types = types_of(schema, part.where)
        if types and not any(TYPES[name](value) for name in types):
            return False
        if "const" in schema and identity_of(schema["const"]) != identity_of(value):
            return False
        if "enum" in schema and identity_of(value) not in self._enum_of(part):
            return False
        if isinstance(value, str):
            return self._meets_text(part, value, surely=surely)
        if TYPES["number"](value):
            return _meets_number(schema, cast("float", value), surely=surely)
        if isinstance(value, list | dict):
            return _meets_counts(schema, value)
        return True

    def _enum_of(self, part: Part) -> set[str]:
        if id(part.schema) not in self._listed:
            values = cast("list[object]", part.schema["enum"])
            self._listed[id(part.schema)] = {identity_of(value) for value in values}
        return self._listed[id(part.schema)]

    def _meets_text(self, part: Part, text: str, *, surely: bool) -> bool:
        schema = part.schema
        if not _is_within(schema, "minLength", "maxLength", len(text)):
            return False
        name = schema.get("format")
        if surely and name in FORMATS and not re.fullmatch(FORMATS[str(name)], text[:_MAX_TEXT]):
            return False
        if "pattern" not in schema:
            return True
        compiled = key_pattern_of(str(schema["pattern"]), f"{part.where}.pattern")
        if compiled is None or len(text) > _MAX_TEXT:
            if surely:
                detail = "it is too complex to stand beside constants; leave one of them out"
                raise refused(f"{part.where}.pattern", detail)
            return True
        return bool(compiled.fullmatch(text) if surely else compiled.search(text))

    def _meets_structure(self, part: Part, value: object, *, surely: bool, depth: int) -> bool:
        if isinstance(value, list):
            needs = [self.item_of(part, i) for i in range(len(value))]
            inner: Sequence[object] = value
        elif isinstance(value, dict):
            required = cast("list[str]", part.schema.get("required", []))
            if any(name not in value for name in required):
                return False
            needs = [self.property_of(part, name, surely=surely) for name in value]
            inner = list(value.values())
        else:
            return True
        return all(
            need is ANY or self.has(need, item, surely=surely, depth=depth)
            for need, item in zip(needs, inner, strict=True)
        )

    def item_of(self, part: Part, index: int) -> Conjunction:
        """What the part demands of the item at `index`, whatever the array's length."""
        prefix, rest = prefix_of(part, self._reader)
        return prefix[index] if index < len(prefix) else rest


def prefix_of(part: Part, reader: SchemaReader) -> tuple[list[Conjunction], Conjunction]:
    """The schemas of an array's first items, and the one of all others; also in Draft 7's words."""
    schema, where = part.schema, part.where
    name, others = "prefixItems", "items"
    if isinstance(schema.get("items"), list):
        if "prefixItems" in schema:
            raise refused(where, "'items' cannot be a list beside 'prefixItems'")
        name, others = "items", "additionalItems"
    elif reader.is_old and "prefixItems" in schema and "items" in schema:
        detail = "the draft that '$schema' names does not know 'prefixItems'; make 'items' a list"
        raise refused(where, detail)
    items = cast("list[object]", schema.get(name, []))
    prefix = [reader.read(item, f"{where}.{name}[{i}]") for i, item in enumerate(items)]
    return prefix, reader.read(schema.get(others, True), f"{where}.{others}")


def _is_within(schema: Schema, least: str, most: str, count: int) -> bool:
    is_enough = count >= cast("int", schema.get(least, 0))
    return is_enough and count <= cast("int", schema.get(most, count))


def _meets_counts(schema: Schema, value: "list[object] | dict[str, object]") -> bool:
    if isinstance(value, dict):
        return _is_within(schema, "minProperties", "maxProperties", len(value))
    if schema.get("uniqueItems") is True and len({identity_of(v) for v in value}) < len(value):
        return False
    return _is_within(schema, "minItems", "maxItems", len(value))


def _meets_number(schema: Schema, value: float, *, surely: bool) -> bool:
    number = Fraction(repr(value))
    for name, bound in strictest([schema]).items():
        limit = Fraction(repr(bound))
        if number == limit and name in STRICT:
            return False
        if number != limit and (number < limit) is (name in LOWER):
            return False
    step = schema.get("multipleOf")
    if not isinstance(step, int | float):
        return True
    if surely or abs(value) > MAX_BOUND:
        return is_multiple(value, step)
    is_exact = (number / Fraction(repr(step))).denominator == 1
    return is_exact or (value / step).is_integer()

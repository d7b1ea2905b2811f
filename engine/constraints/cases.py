"""Merges the parts of a schema: every way through its choices, and of each way one case a type.

A case is what all parts that hold together say about values of one type. Its fields are the merged
keywords; the schemas of properties and items stay conjunctions, which are taken apart in turn.

    narrow   the case has no more values than its parts: for what an output may be
    wide     it has no fewer values than its parts: for what an output must not be
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from engine.constraints.formats import FORMATS
from engine.constraints.keywords import TYPE_OF, Schema, refused, strings_at, types_of
from engine.constraints.membership import Membership, prefix_of
from engine.constraints.numbers import Bounds, strictest
from engine.constraints.schema_reader import (
    ANY,
    NEVER,
    Choice,
    Conjunction,
    Part,
    SchemaReader,
    joined,
)

Place = tuple[str, str]  # a text of the schema, and where it is


@dataclass(frozen=True, slots=True, eq=False)
class Anything:
    """Every value."""

    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """Some constants."""

    parts: tuple[Part, ...]
    values: tuple[object, ...]
    where: str


@dataclass(frozen=True, slots=True, eq=False)
class Strings:
    parts: tuple[Part, ...]
    least: int = 0
    most: int | None = None
    patterns: tuple[Place, ...] = ()  # all of them match
    formats: tuple[str, ...] = ()  # known ones; all of them match
    besides: tuple[str, ...] = ()  # texts that it does not have


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    parts: tuple[Part, ...]
    is_integer: bool
    bounds: Bounds
    steps: tuple[int | float, ...] = ()
    where: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    parts: tuple[Part, ...]
    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction = ANY
    least: int = 0
    most: int | None = None
    is_bounded: bool = False  # whether something is said about its length
    is_unique: bool = False
    where: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """Either `is_closed`: it has no properties but `properties`, or it may have any others."""

    parts: tuple[Part, ...]
    properties: Mapping[str, Conjunction]
    layers: tuple[Part, ...] = ()  # the parts that speak of objects
    required: tuple[str, ...] = ()
    is_closed: bool = False
    others: Conjunction = ANY  # unless it is closed
    names: Conjunction = ANY  # of others
    least: int = 0
    most: int | None = None
    where: str = ""


Case = Anything | Values | Strings | Numbers | Arrays | Objects


class Leaf(NamedTuple):
    """A case, and what has to be left out of it."""

    case: Case
    excluded: tuple[Part, ...]


_ALL_TYPES = ("null", "boolean", "string", "number", "array", "object")
_CONSTANTS: Mapping[str, tuple[object, ...]] = {"null": (None,), "boolean": (False, True)}


class CaseReader:
    """The cases of one document's conjunctions."""

    def __init__(self, reader: SchemaReader, membership: Membership) -> None:
        self._reader = reader
        self._membership = membership
        self._known: dict[object, list[Leaf]] = {}

    def leaves(self, conjunction: Conjunction, *, is_wide: bool = False) -> list[Leaf]:
        """Cases that together have the values of the conjunction's parts."""
        key = (conjunction.key, is_wide)
        if key not in self._known:
            flat = self._reader.flat(conjunction).conjunction
            found: list[Leaf] = []
            choices = self._choices(flat.parts, is_wide=is_wide)
            for parts, excluded in self._ways(flat, choices, is_wide=is_wide):
                self._reader.spend(len(parts))
                cases = self._wide(parts) if is_wide else self._narrow(parts)
                found += [Leaf(case, excluded) for case in cases]
            self._known[key] = found
        return self._known[key]

    def of_each_type(self) -> list[Case]:
        """All values, by type."""
        return [self._of_type((), name, is_wide=False) for name in _ALL_TYPES]

    def _choices(self, parts: Sequence[Part], *, is_wide: bool) -> list[Choice]:
        return [
            choice for part in parts for choice in self._reader.choices(part, is_tagged=not is_wide)
        ]

    def _ways(
        self, chosen: Conjunction, choices: Sequence[Choice], *, is_wide: bool
    ) -> Iterator[Conjunction]:
        """Every way through `choices`, as what holds then."""
        if not choices:
            yield chosen
            return
        held = {id(part.schema) for part in chosen.parts}
        for option in choices[0]:
            flat = self._reader.flat(option).conjunction
            self._reader.spend(4 * (len(flat.parts) + len(held)))
            again = [part for part in flat.parts if id(part.schema) in held]
            if not is_wide and any(self._reader.choices(part) for part in again):
                continue  # a choice that leads back to itself decides nothing: it has no value
            new = [part for part in flat.parts if id(part.schema) not in held]
            due = self._choices(new, is_wide=is_wide)
            rest = [*choices[1:], *due]
            yield from self._ways(joined([chosen, flat]), rest, is_wide=is_wide)

    # ---- one way --------------------------------------------------------------------------------

    def _narrow(self, parts: tuple[Part, ...]) -> list[Case]:
        if any("const" in part.schema or "enum" in part.schema for part in parts):
            return [self._values(parts, surely=True)]
        types = _declared(parts)
        if types is None:
            types = _implied(parts)
        if not types and not _declares(parts):
            return [Anything(parts)]
        return [self._of_type(parts, name, is_wide=False) for name in types]

    def _wide(self, parts: tuple[Part, ...]) -> list[Case]:
        if any("const" in part.schema or "enum" in part.schema for part in parts):
            return [self._values(parts, surely=False)]
        types = _declared(parts)
        if types is None:
            if not _implied(parts, is_wide=True):
                return [Anything(parts)]
            types = _ALL_TYPES
        return [self._of_type(parts, name, is_wide=True) for name in types]

    def _values(self, parts: tuple[Part, ...], *, surely: bool) -> Values:
        """The constants of the parts that meet all of the parts, whose choices are made already."""
        listed = next(part for part in parts if "const" in part.schema or "enum" in part.schema)
        schema, where = listed.schema, listed.where
        name = "const" if "const" in schema else "enum"
        values = [schema["const"]] if name == "const" else cast("list[object]", schema["enum"])
        others = parts if len(parts) > 1 or _says_more(schema) else ()
        kept = [v for v in values if self._membership.meets_all(others, v, surely=surely)]
        return Values(parts, tuple(kept), f"{where}.{name}")

    def _of_type(self, parts: tuple[Part, ...], name: str, *, is_wide: bool) -> Case:
        own = [part for part in parts if _speaks_of(part.schema, name)]
        where = (own or parts)[0].where if parts else ""
        match name:
            case "null" | "boolean":
                return Values(parts, _CONSTANTS[name], where)
            case "string":
                return _strings(parts, own)
            case "integer" | "number":
                steps = [cast("float", p.schema["multipleOf"]) for p in own if _has_step(p)]
                bounds = strictest([part.schema for part in own])
                is_integer = name == "integer"
                return Numbers(parts, is_integer, bounds, tuple(dict.fromkeys(steps)), where)
            case "array":
                return self._arrays(parts, own, where, is_wide=is_wide)
        return self._objects(parts, own, where, is_wide=is_wide)

    def _arrays(
        self, parts: tuple[Part, ...], own: Sequence[Part], where: str, *, is_wide: bool
    ) -> Arrays:
        layers = []
        for part in own:
            prefix, rest = prefix_of(part, self._reader)
            is_open = is_wide or not prefix or "items" in part.schema
            layers.append((prefix, rest if is_open else NEVER))
        length = max((len(prefix) for prefix, _ in layers), default=0)
        places = [
            joined(prefix[i] if i < len(prefix) else rest for prefix, rest in layers)
            for i in range(length)
        ]
        least, most = _counts(own, "minItems", "maxItems")
        return Arrays(
            parts,
            prefix=tuple(places),
            rest=joined(rest for _, rest in layers),
            least=least,
            most=most,
            is_bounded=any("minItems" in p.schema or "maxItems" in p.schema for p in own),
            is_unique=any(p.schema.get("uniqueItems") is True for p in own),
            where=where,
        )

    def _objects(
        self, parts: tuple[Part, ...], own: Sequence[Part], where: str, *, is_wide: bool
    ) -> Objects:
        required = [
            name
            for part in own
            for name in strings_at(part.schema.get("required", []), f"{part.where}.required")
        ]
        named = [name for part in own for name in cast("Schema", part.schema.get("properties", {}))]
        names = joined(
            self._reader.read(part.schema["propertyNames"], f"{part.where}.propertyNames")
            for part in own
            if "propertyNames" in part.schema
        )
        if not is_wide and not (named or required):
            named = self._few_names(names)
        known = dict.fromkeys([*named, *required])
        self._reader.spend(len(known) * len(own))
        least, most = _counts(own, "minProperties", "maxProperties")
        return Objects(
            parts,
            properties={name: self.property_of(own, name, is_wide=is_wide) for name in known},
            layers=tuple(own),
            required=tuple(dict.fromkeys(required)),
            is_closed=not is_wide and (bool(known) or _names_none(own)),
            others=joined(self._others(part) for part in own),
            names=names,
            least=least,
            most=most,
            where=where,
        )

    def property_of(self, parts: Sequence[Part], name: str, *, is_wide: bool) -> Conjunction:
        """What the parts demand of a property's value."""
        return joined(
            self._membership.property_of(part, name, surely=not is_wide) for part in parts
        )

    def _others(self, part: Part) -> Conjunction:
        others = part.schema.get("additionalProperties", True)
        return self._reader.read(others, f"{part.where}.additionalProperties")

    def _few_names(self, names: Conjunction) -> list[str]:
        """The names that properties may have, if they are listed."""
        if not names.parts:
            return []
        cases = [leaf.case for leaf in self.leaves(names)]
        if not all(isinstance(case, Values) for case in cases):
            return []
        listed = [v for case in cases if isinstance(case, Values) for v in case.values]
        return [value for value in listed if isinstance(value, str)]


# ---- keywords of one type ------------------------------------------------------------------------


def _strings(parts: tuple[Part, ...], own: Sequence[Part]) -> Strings:
    least, most = _counts(own, "minLength", "maxLength")
    patterns = {
        str(part.schema["pattern"]): f"{part.where}.pattern"
        for part in own
        if "pattern" in part.schema
    }
    formats = [str(p.schema["format"]) for p in own if p.schema.get("format") in FORMATS]
    return Strings(parts, least, most, tuple(patterns.items()), tuple(dict.fromkeys(formats)))


def _counts(own: Sequence[Part], least: str, most: str) -> tuple[int, int | None]:
    lows = [cast("int", part.schema[least]) for part in own if least in part.schema]
    highs = [cast("int", part.schema[most]) for part in own if most in part.schema]
    return max(lows, default=0), min(highs, default=None)


def _has_step(part: Part) -> bool:
    return "multipleOf" in part.schema


def _names_none(own: Sequence[Part]) -> bool:
    """Whether `properties` is there, is empty, and nothing is said about others."""
    others = ("additionalProperties", "patternProperties", "propertyNames")
    says_more = any(name in part.schema for part in own for name in others)
    return not says_more and any("properties" in part.schema for part in own)


def _speaks_of(schema: Schema, name: str) -> bool:
    kind = "number" if name == "integer" else name
    is_formatted = kind == "string" and schema.get("format") in FORMATS
    return is_formatted or any(TYPE_OF.get(keyword) == kind for keyword in schema)


def _says_more(schema: Schema) -> bool:
    """Whether there is something beside `const` or `enum` that a constant has to meet."""
    return (
        ("const" in schema and "enum" in schema)
        or "type" in schema
        or any(name in TYPE_OF for name in schema)
        or schema.get("format") in FORMATS
    )


def _declares(parts: Sequence[Part]) -> bool:
    return any("type" in part.schema for part in parts)


def _declared(parts: Sequence[Part]) -> tuple[str, ...] | None:
    """The types that all parts name; None = none of them names any."""
    found: list[str] | None = None
    for part in parts:
        named = types_of(part.schema, part.where)
        if not named:
            continue
        is_number = "number" in named
        given = [*named, *(["integer"] if is_number else [])]
        if found is None:
            found = list(dict.fromkeys(given))
        else:
            found = [name for name in found if name in given]
    if found is None:
        return None
    return tuple(name for name in found if name != "integer" or "number" not in found)


def _implied(parts: Sequence[Part], *, is_wide: bool = False) -> tuple[str, ...]:
    """The type that the keywords speak of; () = any. RequestError if they speak of several."""
    kinds = {TYPE_OF[name] for part in parts for name in part.schema if name in TYPE_OF}
    kinds |= {"string" for part in parts if part.schema.get("format") in FORMATS}
    if len(kinds) > 1 and not is_wide:
        detail = "it needs a 'type': its keywords are about different ones"
        raise refused(parts[0].where, detail)
    return tuple(kinds)

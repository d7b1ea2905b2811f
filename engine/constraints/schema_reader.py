"""Takes a JSON schema apart: what has to hold together, and between what a value may choose.

    part          one schema object of the document, by its place
    conjunction   parts that all have to hold, and parts that must not (`excluded`)
    choice        several conjunctions of which one has to hold

`$ref`, `allOf` and `not` make larger conjunctions; `anyOf`, `oneOf`, `if` and the keywords of
dependencies make choices, each of which covers the keyword exactly. Knows no types and no values.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast
from urllib.parse import unquote

from engine.constraints.keywords import (
    DEPENDENCIES,
    MAX_WHERE_CHARS,
    Schema,
    check_keywords,
    list_at,
    refused,
    restricts,
    strings_at,
)

_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07", "2019-09")
_ONE_OF = (
    "values of it may be values of another alternative of 'oneOf'; give each alternative a "
    "required property with a 'const' of its own, or use 'anyOf'"
)
_NOT = "its values cannot be left out of what stands beside it"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One schema object; the same object is the same part."""

    schema: Schema
    where: str
    reason: str = _NOT  # why it cannot be excluded, if it cannot


class Conjunction(NamedTuple):
    """All values of all `parts` and of none of `excluded`; all values if there are none."""

    parts: tuple[Part, ...] = ()
    excluded: tuple[Part, ...] = ()

    @property
    def key(self) -> tuple[frozenset[int], tuple[int, ...]]:
        """The same for the same schema objects."""
        return (
            frozenset(id(part.schema) for part in self.parts),
            tuple(sorted({id(part.schema) for part in self.excluded})),
        )


class Flat(NamedTuple):
    """A conjunction without references and `allOf`."""

    conjunction: Conjunction
    has_reference: bool  # whether there was a reference in it


MAX_STEPS = 200_000  # of reading one document; a large one of a thousand properties takes 10,000
ANY = Conjunction()
NEVER = Conjunction((Part({"enum": []}, ""),))
Choice = Sequence[Conjunction]


def joined(conjunctions: Iterable[Conjunction]) -> Conjunction:
    """What holds where all of `conjunctions` hold."""
    parts: dict[int, Part] = {}
    excluded: dict[int, Part] = {}
    for conjunction in conjunctions:
        parts |= {id(part.schema): part for part in conjunction.parts}
        excluded |= {id(part.schema): part for part in conjunction.excluded}
    return Conjunction(tuple(parts.values()), tuple(excluded.values()))


class SchemaReader:
    """Reads one document. Raises RequestError for what is no schema or is not supported."""

    def __init__(self, root: Schema, param: str) -> None:
        self._root = root
        self._param = param
        draft = str(root.get("$schema", ""))
        self.is_old = any(name in draft for name in _OLD_DRAFTS)  # `items` may be a list
        self._checked: set[int] = set()
        self._choices: dict[
            tuple[int, bool], list[Choice]
        ] = {}  # by part; also keeps schemas made here alive
        self._whole: dict[tuple[int, ...], Part] = {}  # conjunctions as one part
        self._tags: dict[str, Part] = {}  # by the name of the property
        self._flat: dict[int, Flat] = {}  # of single parts
        self._num_steps = 0

    def read(self, schema: object, where: str) -> Conjunction:
        """The schema as a conjunction."""
        where = where[:MAX_WHERE_CHARS]  # all parts below repeat it, and a name may have megabytes
        if schema is True:
            return ANY
        if schema is False:
            return NEVER
        if not isinstance(schema, dict):
            raise refused(where, "expected a JSON schema")
        part = Part(schema, where)
        self._check(part)
        return Conjunction((part,))

    def spend(self, num_steps: int) -> None:
        """Count work; raises RequestError when it becomes too much."""
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise refused(self._param, "its keywords leave too many alternatives together")

    def flat(self, conjunction: Conjunction) -> Flat:
        """The conjunction with references followed. A reference to itself has no value."""
        if len(conjunction.parts) != 1 or conjunction.excluded:
            return self._flattened(conjunction)
        part_id = id(conjunction.parts[0].schema)
        if part_id not in self._flat:
            self._flat[part_id] = self._flattened(conjunction)
        return self._flat[part_id]

    def _flattened(self, conjunction: Conjunction) -> Flat:
        found: dict[int, Part] = {}
        excluded = {id(part.schema): part for part in conjunction.excluded}
        open_ids: set[int] = set()
        done: set[int] = set()
        has_reference = False
        stack = [(part, False) for part in reversed(conjunction.parts)]
        while stack:
            part, is_left = stack.pop()
            self.spend(1)
            part_id = id(part.schema)
            if is_left:
                open_ids.discard(part_id)
                done.add(part_id)
                continue
            if part_id in open_ids:
                return Flat(NEVER, has_reference)
            if part_id in done:
                continue
            open_ids.add(part_id)
            if restricts(part.schema):
                found[part_id] = part
            has_reference |= "$ref" in part.schema
            excluded |= {id(other.schema): other for other in self._excluded_by(part)}
            stack.append((part, True))
            stack += [(other, False) for other in reversed(self._joined_with(part))]
        return Flat(Conjunction(tuple(found.values()), tuple(excluded.values())), has_reference)

    def choices(self, part: Part, *, is_tagged: bool = False) -> Sequence[Choice]:
        """What a value of the part chooses between; one conjunction of each choice has to hold.

        is_tagged: options have the property that `discriminator` names, although JSON Schema does
        not ask for it; so the choice has fewer values.
        """
        key = (id(part.schema), is_tagged)
        if key not in self._choices:
            schema, where = part.schema, part.where
            found: list[Choice] = []
            if "anyOf" in schema:
                found.append(self._list(schema["anyOf"], f"{where}.anyOf"))
            if "oneOf" in schema:
                found.append(self._one_of(self._list(schema["oneOf"], f"{where}.oneOf")))
            if is_tagged:
                found = [self._tagged(choice, schema) for choice in found]
            if "if" in schema and ("then" in schema or "else" in schema):
                found.append(self._conditional(schema, where))
            for name in DEPENDENCIES:
                for dependent, value in cast("Schema", schema.get(name, {})).items():
                    place = f"{where}.{name}.{dependent}"
                    found.append(self._dependent(dependent, value, place))
            self._choices[key] = found
        return self._choices[key]

    def as_one_part(self, conjunction: Conjunction) -> Part:
        """A conjunction without excluded parts as one part, the same for the same parts."""
        assert not conjunction.excluded, "only what has to hold can be one part"
        if len(conjunction.parts) == 1:
            return conjunction.parts[0]
        key = tuple(id(part.schema) for part in conjunction.parts)
        if key not in self._whole:
            where = conjunction.parts[0].where if conjunction.parts else self._param
            schemas: list[object] = [part.schema for part in conjunction.parts]
            self._whole[key] = Part({"allOf": schemas} if schemas else {}, where)
        return self._whole[key]

    def _check(self, part: Part) -> None:
        if id(part.schema) in self._checked:
            return
        check_keywords(part.schema, part.where)
        if "$id" in part.schema and part.schema is not self._root:
            raise refused(f"{part.where}.$id", "only the whole schema may have one")
        self._checked.add(id(part.schema))

    def _list(self, value: object, where: str) -> list[Conjunction]:
        found = list_at(value, where)
        return [self.read(schema, f"{where}[{i}]") for i, schema in enumerate(found)]

    def _joined_with(self, part: Part) -> list[Part]:
        """The parts that `allOf` and `$ref` add to it."""
        found: list[Part] = []
        if "allOf" in part.schema:
            for inner in self._list(part.schema["allOf"], f"{part.where}.allOf"):
                found += inner.parts
        if "$ref" in part.schema:
            found += self._target(part.schema["$ref"], f"{part.where}.$ref").parts
        return found

    def _excluded_by(self, part: Part) -> list[Part]:
        if "not" not in part.schema or part.schema["not"] is False:
            return []
        return [self.as_one_part(self.read(part.schema["not"], f"{part.where}.not"))]

    def _one_of(self, options: Sequence[Conjunction]) -> list[Conjunction]:
        """Each of `options` without the values of all others."""
        parts = [self.as_one_part(option) for option in options]
        others = [replace(self._behind(part), reason=_ONE_OF) for part in parts]
        return [
            Conjunction((part,), (*others[:i], *others[i + 1 :])) for i, part in enumerate(parts)
        ]

    def _behind(self, part: Part) -> Part:
        """What a mere reference leads to, which is the same part for all such references."""
        seen: set[int] = set()
        while "$ref" in part.schema and id(part.schema) not in seen:
            if restricts(part.schema) or "allOf" in part.schema:
                break
            seen.add(id(part.schema))
            part = self.as_one_part(self._target(part.schema["$ref"], f"{part.where}.$ref"))
        return part

    def _tagged(self, options: Choice, schema: Schema) -> Choice:
        """With a discriminator, each option has its property, as its readers expect."""
        discriminator = schema.get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if not isinstance(name, str):
            return options
        tag = Conjunction((self._tags.setdefault(name, Part({"required": [name]}, self._param)),))
        return [joined([option, tag]) if self._has(option, name) else option for option in options]

    def _has(self, option: Conjunction, name: str) -> bool:
        parts = self.flat(option).conjunction.parts
        return any(name in cast("Schema", part.schema.get("properties", {})) for part in parts)

    def _conditional(self, schema: Schema, where: str) -> Choice:
        condition = self.read(schema["if"], f"{where}.if")
        then = self.read(schema.get("then", True), f"{where}.then")
        otherwise = self.read(schema.get("else", True), f"{where}.else")
        return [
            joined([condition, then]),
            Conjunction(otherwise.parts, (self.as_one_part(condition),)),
        ]

    def _dependent(self, name: str, value: object, where: str) -> Choice:
        """Without the property, or with it and what depends on it."""
        if isinstance(value, list):
            names = strings_at(value, where)
            needed = Conjunction((Part({"required": [name, *names]}, where),))
        else:
            needed = joined(
                [Conjunction((Part({"required": [name]}, where),)), self.read(value, where)]
            )
        return [Conjunction((Part({"properties": {name: False}}, where),)), needed]

    def _target(self, reference: object, where: str) -> Conjunction:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            detail = "only references into the schema itself ('#/...') are supported"
            raise refused(where, detail)
        found = _resolve(self._root, reference, where)
        return self.read(found, f"{self._param}.{reference}")


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
            raise refused(where, "it leads through a part with an '$id' of its own")
    if not isinstance(found, dict | bool):
        raise refused(where, f"'{reference[:80]}' names no schema in it")
    return found

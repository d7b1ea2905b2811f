"""The names that properties of an open object may have, as regular expressions.

A name that matches one pattern of `patternProperties` has to be known to match no other, or the
values of both patterns have to be the same: a value is held to one of them only.
"""

import re
from collections.abc import Mapping
from typing import cast

from engine.constraints.cases import Anything, Objects, Strings, Values
from engine.constraints.formats import FORMATS
from engine.constraints.keywords import Schema, refused
from engine.constraints.lookahead import portable_patterns
from engine.constraints.pattern import literal_pattern
from engine.constraints.schema_reader import ANY, Conjunction, Part, SchemaReader, joined
from engine.constraints.separation import Separation

_ANY_CHAR = r"[\x{0}-\x{10FFFF}]"
_PREFIX = re.compile(r"\^([A-Za-z0-9_@ /:-]+)(?![*+?{|])")


class KeyPatterns:
    """Reads the names of one document's objects."""

    def __init__(self, reader: SchemaReader, separation: Separation) -> None:
        self._reader = reader
        self._separation = separation

    def of(self, case: Objects) -> Mapping[str, Conjunction] | None:
        """What the value of a property has to be, by the pattern of its name; None = any name.

        Raises RequestError for what cannot be kept.
        """
        texts = list(dict.fromkeys(text for part in case.layers for text in _patterns_of(part)))
        if not texts:
            names = self._names(case)
            return None if names is None else dict.fromkeys(names, case.others)
        if case.names != ANY:
            detail = "'propertyNames' cannot be kept beside 'patternProperties'"
            raise refused(case.where, detail)
        found: dict[str, Conjunction] = {}
        for text in texts:
            where = f"{case.where}.patternProperties"
            patterns = portable_patterns(text, where, is_search=True)
            if len(patterns) > 1:
                raise refused(where, f"'{text[:60]}' looks ahead, which names cannot be held to")
            value = joined(self._value(part, text) for part in case.layers)
            found[patterns[0]] = value
        return found

    def _value(self, part: Part, text: str) -> Conjunction:
        """What the part demands of the value of a property whose name matches the pattern."""
        patterns, place = _patterns_of(part), f"{part.where}.patternProperties"
        for other in patterns:
            if other != text and patterns[other] != patterns.get(text) and not _differ(text, other):
                detail = (
                    f"a name could match both '{text[:60]}' and '{other[:60]}'; "
                    "begin them with '^' and different texts"
                )
                raise refused(place, detail)
        if text in patterns:
            return self._reader.read(patterns[text], f"{place}.{text}")
        others = part.schema.get("additionalProperties", True)
        return self._reader.read(others, f"{part.where}.additionalProperties")

    def _names(self, case: Objects) -> list[str] | None:
        """One pattern of all names in a list, [] if there are no names, None for any name."""
        options: list[str] = []
        for names in self._separation.cases(case.names):
            match names:
                case Anything():
                    return None
                case Values():
                    texts = [value for value in names.values if isinstance(value, str)]
                    options += [literal_pattern(text) for text in texts]
                case Strings() if not (names.patterns or names.formats or names.most is not None):
                    if names.least == 0:
                        return None
                    options.append(f"{_ANY_CHAR}{{{names.least},}}")
                case Strings():
                    options.append(self._name(names, f"{case.where}.propertyNames"))
        return [f"(?:{'|'.join(options)})"] if options else []

    def _name(self, names: Strings, where: str) -> str:
        found = [FORMATS[name] for name in names.formats]
        for text, place in names.patterns:
            found += portable_patterns(text, place)
        if names.least > 0 or names.most is not None:
            most = "" if names.most is None else names.most
            found.append(f"{_ANY_CHAR}{{{names.least},{most}}}")
        if len(found) > 1:
            detail = "names can be held to one pattern, format or length, not to several at once"
            raise refused(where, detail)
        return found[0]


def _patterns_of(part: Part) -> Schema:
    return cast("Schema", part.schema.get("patternProperties", {}))


def _differ(pattern: str, other: str) -> bool:
    """Whether no name can match both: they begin with different texts."""
    heads = [_PREFIX.match(text) for text in (pattern, other)]
    if any(head is None for head in heads) or "|" in pattern + other:
        return False
    first, second = (head[1] for head in heads if head is not None)
    length = min(len(first), len(second))
    return first[:length] != second[:length]

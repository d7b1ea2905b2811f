"""Random JSON schemas whose keywords stand beside each other: merged, exclusive, conditional.

What they ask for is what grammars do badly: that all of several schemas hold, that exactly one of
several does, that one does not, that items are distinct, that names of properties match. Values are
short. Some schemas say Draft 7, and then use its words for tuples and dependencies.
"""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
Subschema = Schema | bool

NAMES = ("kind", "a", "b", "c", "x-1", "long name", "é", 'q"', "\\u0061")
_TAGS = ("cat", "dog", 1, 2, True, None)
_KEY_PATTERNS = ("^x-", "^[a-c]$", "a", "^k", "^[a-z ]{1,9}$", "\\d$", "^(a|b)$")
_PATTERNS = (
    *("^[a-z]{1,3}$", "^(?!a)[a-d]{1,2}$", "^(?=.*\\d)[a-z0-9]{1,4}$", "^(?!.*--)[a-z-]{1,5}$"),
    *("^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "^(?!cat$|dog$)[a-z]{3,4}$", "[^0-9]{1,3}", "^\\w{2}$"),
    *("^(?!\\s)(?![A-Z]).{1,4}$", "^(?!.*ab)[a-c]{1,5}$", "^(?!$)[a-b]*$", "^(?![\\w]+$).{1,3}$"),
)
_FORMATS = ("date", "uuid4", "uri", "regex", "ipv4", "base64", "time", "made-up")
_STEPS = (1, 2, 3, 7, 10, 0.5, 0.25, 1.5, 0.1, 0.01, 2.5)
_VALUES: tuple[Any, ...] = ("a", "cat", "2024-02-29", "", 0, 1, 2.5, -3, True, None, [1], {"a": 1})
_MAX_DEPTH = 2
_NEWEST, _DRAFT_7 = (
    "https://json-schema.org/draft/2020-12/schema",
    "http://json-schema.org/draft-07/schema#",
)


def combined_schema(draw: random.Random) -> Schema:
    """Legal for the draft that it names; not every one has a value or can be kept."""
    is_old = draw.random() < 0.2
    maker = _Maker(draw, is_old=is_old)
    parts = {"p0": maker.part(1), "p1": maker.object_of(1)}
    schema = maker.part(_MAX_DEPTH)
    if isinstance(schema, bool) or (is_old and "$ref" in schema):
        schema = {"allOf": [schema]}
    return {"$schema": _DRAFT_7 if is_old else _NEWEST, **schema, "$defs": parts}


class _Maker:
    """Draws the parts of one schema."""

    def __init__(self, draw: random.Random, *, is_old: bool) -> None:
        self._draw = draw
        self._is_old = is_old

    def part(self, depth: int) -> Subschema:
        draw = self._draw
        if draw.random() < 0.03:
            return draw.random() < 0.7
        makers: list[Callable[[int], Schema]] = [self._leaf, self._leaf]
        if depth > 0:
            makers += [self.object_of, self.object_of, self._map, self._array, self._tuple]
            makers += [self._union, self._tagged, self._merged, self._merged, self._conditional]
            makers += [self._referring, self._negated]
        return draw.choice(makers)(depth)

    # ---- leaves ---------------------------------------------------------------------------------

    def _leaf(self, depth: int) -> Schema:
        leaves = (self._string, self._string, self._number, self._number, self._constant)
        return self._draw.choice(leaves)()

    def _string(self) -> Schema:
        draw = self._draw
        schema: Schema = {"type": draw.choice(["string", ["string", "null"]])}
        if draw.random() < 0.5:
            schema["pattern"] = draw.choice(_PATTERNS)
        if draw.random() < 0.3:
            schema["format"] = draw.choice(_FORMATS)
        if draw.random() < 0.3:
            schema["minLength"] = draw.randint(0, 2)
        if draw.random() < 0.3:
            schema["maxLength"] = draw.randint(1, 9)
        return schema

    def _number(self) -> Schema:
        draw = self._draw
        schema: Schema = {"type": draw.choice(["integer", "number", "number"])}
        low = draw.choice([-20, -0.5, 0, 1, 0.1, 5])
        if draw.random() < 0.6:
            schema[draw.choice(["minimum", "exclusiveMinimum"])] = low
        if draw.random() < 0.6:
            schema[draw.choice(["maximum", "exclusiveMaximum"])] = low + draw.choice(
                [0, 3, 7.5, 50]
            )
        if draw.random() < 0.6:
            schema["multipleOf"] = draw.choice(_STEPS)
        return schema

    def _constant(self) -> Schema:
        draw = self._draw
        schema: Schema = {"enum": draw.sample(_VALUES, draw.randint(1, 6))}
        if draw.random() < 0.2:
            schema = {"const": draw.choice(_VALUES)}
        if draw.random() < 0.5:
            schema |= draw.choice([self._string, self._number])()
        return schema

    # ---- objects and arrays ---------------------------------------------------------------------

    def object_of(self, depth: int) -> Schema:
        draw = self._draw
        names = draw.sample(NAMES, draw.randint(1, 3))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.part(depth - 1) for name in names},
            "required": draw.sample(names, draw.randint(0, len(names))),
        }
        if draw.random() < 0.2:
            schema["required"] += [draw.choice(NAMES)]
            schema["required"] = list(dict.fromkeys(schema["required"]))
        self._add_rules(schema, depth, 0.15)
        return schema

    def _map(self, depth: int) -> Schema:
        schema: Schema = {"type": "object", "maxProperties": self._draw.randint(1, 3)}
        self._add_rules(schema, depth, 0.4)
        return schema

    def _add_rules(self, schema: Schema, depth: int, chance: float) -> None:
        draw = self._draw
        others: dict[str, Callable[[], Any]] = {
            "additionalProperties": lambda: self.part(depth - 1),
            "propertyNames": self._names,
            "minProperties": lambda: draw.randint(0, 2),
            "maxProperties": lambda: draw.randint(0, 3),
            "patternProperties": lambda: self._by_pattern(depth),
            "dependencies" if self._is_old else "dependentRequired": self._dependents,
        }
        for name, make in others.items():
            if draw.random() < chance:
                schema[name] = make()

    def _names(self) -> Subschema:
        listed: Schema = {"enum": self._draw.sample(NAMES, 3)}
        pattern: Schema = {"pattern": self._draw.choice(_KEY_PATTERNS)}
        others: tuple[Subschema, ...] = ({"maxLength": 3}, {"minLength": 2}, True)
        return self._draw.choice((listed, pattern, *others))

    def _by_pattern(self, depth: int) -> Schema:
        patterns = self._draw.sample(_KEY_PATTERNS, self._draw.randint(1, 2))
        return {pattern: self.part(depth - 1) for pattern in patterns}

    def _dependents(self) -> Schema:
        first, second = self._draw.sample(NAMES, 2)
        return {first: [second]}

    def _array(self, depth: int) -> Schema:
        draw = self._draw
        schema: Schema = {"type": "array", "items": self.part(depth - 1)}
        low = draw.randint(0, 2)
        schema |= {"minItems": low, "maxItems": low + draw.randint(0, 2)}
        if draw.random() < 0.6:
            schema |= {"uniqueItems": True, "items": self._finite()}
        return schema

    def _finite(self) -> Schema:
        draw = self._draw
        few = {"type": "integer", "minimum": 1, "maximum": draw.randint(1, 12)}
        listed = {"enum": draw.sample([*_VALUES, 1.0, False], draw.randint(1, 9))}
        return draw.choice([few, listed, {"type": "boolean"}, {"type": ["boolean", "null"]}])

    def _tuple(self, depth: int) -> Schema:
        draw = self._draw
        first = [self.part(depth - 1) for _ in range(draw.randint(1, 3))]
        names = ("items", "additionalItems") if self._is_old else ("prefixItems", "items")
        schema: Schema = {"type": "array", names[0]: first}
        if draw.random() < 0.5:
            schema[names[1]] = draw.choice([False, True, {"type": "null"}])
        if draw.random() < 0.5:
            schema["minItems"] = draw.randint(0, 3)
        if draw.random() < 0.5:
            schema["maxItems"] = draw.randint(0, 4)
        return schema

    # ---- combinations ---------------------------------------------------------------------------

    def _union(self, depth: int) -> Schema:
        draw = self._draw
        schema = {draw.choice(["anyOf", "oneOf"]): [self.part(depth - 1) for _ in range(2)]}
        if draw.random() < 0.4:
            beside = draw.choice([self.object_of, self._leaf])(depth - 1)
            schema = {**beside, **schema} if draw.random() < 0.5 else {**schema, **beside}
        return schema

    def _tagged(self, depth: int) -> Schema:
        """Objects that a property tells apart, mostly."""
        draw = self._draw
        options = []
        for tag in draw.sample(_TAGS, draw.randint(2, 4)):
            option = self.object_of(depth - 1)
            option["properties"]["kind"] = draw.choice([{"const": tag}, {"enum": [tag]}])
            if draw.random() < 0.7:
                option["required"] = list(dict.fromkeys([*option["required"], "kind"]))
            options.append(option)
        schema: Schema = {"oneOf": options}
        if draw.random() < 0.5:
            schema["discriminator"] = {"propertyName": "kind"}
        return schema

    def _merged(self, depth: int) -> Schema:
        draw = self._draw
        make = draw.choice([self.object_of, self.object_of, self._leaf, self._array, self._tuple])
        schema: Schema = {"allOf": [make(depth - 1) for _ in range(2)]}
        if draw.random() < 0.4:
            schema |= make(depth - 1)
        if draw.random() < 0.2:
            schema["allOf"].append({"$ref": "#/$defs/p1"})
        return schema

    def _conditional(self, depth: int) -> Schema:
        draw = self._draw
        schema = self.object_of(depth)
        name = draw.choice(list(schema["properties"]))
        schema["properties"][name] = {"enum": draw.sample(["a", "b", "c", 1], 3)}
        schema["if"] = {"properties": {name: {"const": draw.choice(["a", 1])}}}
        if draw.random() < 0.7:
            schema["if"]["required"] = [name]
        for branch in draw.choice([["then"], ["else"], ["then", "else"]]):
            schema[branch] = draw.choice(
                [{"required": [draw.choice(NAMES)]}, {"properties": {"a": self.part(0)}}]
            )
        return schema

    def _negated(self, depth: int) -> Schema:
        draw = self._draw
        schema = draw.choice([self.object_of, self._leaf, self._array])(depth - 1)
        schema["not"] = draw.choice(
            [
                {"required": [draw.choice(NAMES)]},
                {"const": draw.choice(_VALUES)},
                {"enum": draw.sample(_VALUES, 3)},
                {"type": draw.choice(["null", "integer", "string"])},
                {"minimum": draw.randint(-3, 9)},
                {"type": "string", "maxLength": draw.randint(0, 2)},
                {"properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"minItems": 2},
            ]
        )
        return schema

    def _referring(self, depth: int) -> Schema:
        draw = self._draw
        schema: Schema = {"$ref": f"#/$defs/{draw.choice(['p0', 'p1'])}"}
        if draw.random() < 0.3:
            schema["description"] = "beside it"
        elif draw.random() < 0.5:
            schema |= draw.choice([{"type": "object"}, {"required": ["a"]}, {"maxLength": 3}])
        return schema

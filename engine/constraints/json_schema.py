"""Restricts JSON schemas to what the grammar library enforces; the rest is refused, not dropped.

`restrict` rewrites a schema to one that allows a subset of its values, never more:

    an object with properties      has these and no others, in this order
    a required name without a      may have any value that additionalProperties allows
      property of its own
    an array with prefixItems      has exactly these, unless bounds on its length say otherwise
    an array of distinct items     is one of a list of arrays: in any order, or if these are too
                                   many, in the order of the values
    a pattern                      applies to the whole string, in the common dialect (`pattern`)
    a string of a known format     must match it (`formats`), not only be described by it
    keywords beside each other     are merged to one alternative for each type (`cases`)
    oneOf, not, if                 are alternatives that share no value (`separation`)
    a reference                    goes to a definition of its own, so that rewriting preserves it
    a part that no value meets     is left out (`satisfiability`)

What is written has only `$ref`, `anyOf`, `enum`, or the keywords of one type; further patterns of a
string are in an `allOf`. A schema that no value can satisfy is refused. Knows no grammars and no
tokens.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import cast

from engine.constraints.cases import (
    Anything,
    Arrays,
    Case,
    CaseReader,
    Numbers,
    Objects,
    Strings,
    Values,
)
from engine.constraints.formats import FORMATS
from engine.constraints.key_patterns import KeyPatterns
from engine.constraints.keywords import CHOICES, MAX_BOUND, Schema, refused, restricts
from engine.constraints.lookahead import pattern_besides, portable_patterns
from engine.constraints.membership import Membership
from engine.constraints.numbers import (
    common_step,
    constant,
    integer_bounds,
    is_exact_step,
    number_bounds,
)
from engine.constraints.satisfiability import DEFINITIONS, without_unmet
from engine.constraints.schema_reader import Conjunction, Part, SchemaReader
from engine.constraints.separation import Separation, few_values
from engine.constraints.unique_items import distinct_arrays
from engine.errors import RequestError

MAX_NODES = 20_000
MAX_MULTIPLES = 1000  # that are written as constants
MAX_PROPERTY_SETS = 64  # into which an object falls by the number of its properties
_PATTERN_CHARS_A_NODE = 4  # this many characters of a pattern cost about as much as one node


def restrict(schema: object, param: str, *, only_objects: bool = False) -> Schema:
    """A restricted copy that the library enforces exactly. Raises RequestError naming `param`.

    only_objects: of the values that the schema allows, keep only the objects.
    """
    if not isinstance(schema, dict):
        raise refused(param, "expected an object with a JSON schema")
    try:
        copied = _Restriction(cast("Schema", schema), param).run()
    except RecursionError:
        raise refused(param, "it is nested too deeply") from None
    restricted = without_unmet(_objects_of(copied) if only_objects else copied)
    if restricted is None:
        wanted = "no object" if only_objects else "no value"
        raise refused(param, f"{wanted} can satisfy it")
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
    """Writes one schema; counts its nodes and gives each referenced conjunction a definition."""

    def __init__(self, root: Schema, param: str) -> None:
        self._root = root
        self._param = param
        self._reader = SchemaReader(root, param)
        membership = Membership(self._reader)
        case_reader = CaseReader(self._reader, membership)
        self._separation = Separation(self._reader, membership, case_reader)
        self._key_patterns = KeyPatterns(self._reader, self._separation)
        self._num_nodes = 0
        self._name_of: dict[object, str] = {}  # key of a conjunction -> name of its definition
        self._definitions: dict[str, Schema] = {}
        self._due: list[tuple[str, Conjunction]] = []  # definitions that are not written yet

    def run(self) -> Schema:
        restricted = self._node(self._reader.read(self._root, self._param))
        while self._due:
            name, conjunction = self._due.pop()
            self._definitions[name] = self._written(conjunction)
        return restricted | ({"$defs": self._definitions} if self._definitions else {})

    def _node(self, conjunction: Conjunction) -> Schema:
        self._count(1)
        flat = self._reader.flat(conjunction)
        if flat.has_reference:
            return self._reference(flat.conjunction)
        return self._written(flat.conjunction)

    def _count(self, num_nodes: int) -> None:
        self._num_nodes += num_nodes
        if self._num_nodes > MAX_NODES:
            raise refused(self._param, f"it has more than {MAX_NODES} parts")

    def _reference(self, flat: Conjunction) -> Schema:
        """A reference to a definition that has the conjunction once, however often it stands."""
        if flat.excluded and self._separation.is_apart(flat):
            flat = Conjunction(flat.parts)
        if flat == Conjunction():
            return {}
        if flat.key not in self._name_of:
            self._name_of[flat.key] = str(len(self._name_of))
            self._due.append((self._name_of[flat.key], flat))
        return {"$ref": f"{DEFINITIONS}{self._name_of[flat.key]}"}

    def _written(self, flat: Conjunction) -> Schema:
        """A conjunction without references."""
        if len(flat.parts) == 1 and not flat.excluded and _only_chooses(flat.parts[0]):
            (choice,) = self._reader.choices(flat.parts[0], is_tagged=True)
            return {"anyOf": [self._node(option) for option in choice]}
        nodes = [node for case in self._separation.cases(flat) for node in self._case(case)]
        if len(nodes) == 1:
            return nodes[0]
        return {"anyOf": nodes} if nodes else {"enum": []}

    def _case(self, case: Case) -> list[Schema]:
        """The alternatives that a case is written as; none if it has no value."""
        self._count(1)
        match case:
            case Anything():
                return [{}]
            case Values():
                return [self._constants(case)]
            case Strings():
                return self._string(case)
            case Numbers():
                return self._number(case)
            case Arrays():
                return self._array(case)
        return self._object(case)

    def _constants(self, case: Values) -> Schema:
        self._count(len(case.values))
        if case.values == (None,):
            return {"type": "null"}
        if len(case.values) == 2 and case.values[0] is False and case.values[1] is True:
            return {"type": "boolean"}
        return {"enum": [constant(value, case.where) for value in case.values]}

    def _string(self, case: Strings) -> list[Schema]:
        if case.least > (math.inf if case.most is None else case.most):
            return []
        patterns = [FORMATS[name] for name in case.formats]
        for text, where in case.patterns:
            self._count(len(text) // _PATTERN_CHARS_A_NODE)
            patterns += portable_patterns(text, where)
        patterns += [pattern_besides(text) for text in case.besides]
        node: Schema = {"type": "string", **_limits(case, "minLength", "maxLength")}
        if patterns:
            node["pattern"] = f"^{patterns[0]}$"
        if len(patterns) > 1:
            node["allOf"] = [{"pattern": f"^{pattern}$"} for pattern in patterns[1:]]
        return [node]

    def _number(self, case: Numbers) -> list[Schema]:
        bounds = integer_bounds(case.bounds) if case.is_integer else number_bounds(case.bounds)
        if bounds is None:
            return []
        name = "integer" if case.is_integer else "number"
        if not case.steps:
            return [{"type": name, **bounds}]
        step = common_step([*case.steps, 1] if case.is_integer else case.steps)
        is_exact = all(is_exact_step(common_step([each])) for each in case.steps)
        is_exact = is_exact and is_exact_step(step)
        values = None if is_exact and step.denominator == 1 else few_values(case, MAX_MULTIPLES)
        if values is not None:
            self._count(len(values))
            return [{"enum": values}]
        if not is_exact:
            detail = (
                "readers disagree about its multiples, or it is too large: bounds must leave "
                f"at most {MAX_MULTIPLES} values"
            )
            raise refused(f"{case.where}.multipleOf", detail)
        # Beyond these bounds, readers that use floats miss multiples. The library writes multiples
        # with all decimals of the step, and finds no end at a bound that has fewer.
        low = math.ceil(bounds.get("minimum", -MAX_BOUND))
        high = math.floor(bounds.get("maximum", MAX_BOUND))
        exact = int(step) if step.denominator == 1 else float(step)
        return [{"type": name, "minimum": low, "maximum": high, "multipleOf": exact}]

    # ---- arrays ---------------------------------------------------------------------------------

    def _array(self, case: Arrays) -> list[Schema]:
        if case.least > (math.inf if case.most is None else case.most):
            return []
        if case.is_unique and (case.most is None or case.most > 1):
            return [self._distinct(case)]
        is_exact = bool(case.prefix) and not case.is_bounded
        prefix = [self._node(item) for item in case.prefix]
        node: Schema = {"type": "array"}
        node |= {"minItems": len(prefix)} if is_exact else _limits(case, "minItems", "maxItems")
        if prefix:
            node["prefixItems"] = prefix
        # With exactly the prefix items, the schema of other items does not matter.
        node["items"] = False if is_exact else self._node(case.rest)
        return [node]

    def _distinct(self, case: Arrays) -> Schema:
        """The arrays of distinct items as constants."""
        least, most = case.least, case.most
        if case.prefix and not case.is_bounded:
            least = most = len(case.prefix)
        pools = [self._few_values(item, case.where) for item in case.prefix]
        is_longer = most is None or most > len(pools)
        rest = self._few_values(case.rest, case.where) if is_longer else []
        arrays = distinct_arrays(pools, rest, least, most)
        if arrays is None:
            raise _not_distinct(case.where, "it leaves too many arrays")
        self._count(sum(map(len, arrays)))
        return {"enum": arrays}

    def _few_values(self, items: Conjunction, where: str) -> list[object]:
        found: list[object] = []
        for case in self._separation.cases(items):
            values = few_values(case, MAX_MULTIPLES)
            if values is None:
                raise _not_distinct(where, "it cannot be kept for items without a list of values")
            found += [constant(value, where) for value in values]
        return found

    # ---- objects --------------------------------------------------------------------------------

    def _object(self, case: Objects) -> list[Schema]:
        if case.least > (math.inf if case.most is None else case.most):
            return []
        if case.is_closed or case.most == 0:
            return self._closed(case)
        if case.least > 1:
            detail = "at most 1 can be kept where the names are free; list them in 'properties'"
            raise refused(f"{case.where}.minProperties", detail)
        node: Schema = {"type": "object"} | _limits(case, "minProperties", "maxProperties")
        keys = self._key_patterns.of(case)
        if keys is None:
            return [node | {"additionalProperties": self._node(case.others)}]
        patterns = {f"^{pattern}$": self._node(value) for pattern, value in keys.items()}
        if not patterns:
            return [node | {"additionalProperties": False}]
        return [node | {"patternProperties": patterns, "additionalProperties": False}]

    def _closed(self, case: Objects) -> list[Schema]:
        """Objects that have no properties but those with names."""
        required = [name for name in case.properties if name in case.required]
        optional = [name for name in case.properties if name not in case.required]
        least = max(case.least - len(required), 0)
        most = len(optional) if case.most is None else case.most - len(required)
        if most < 0 or least > len(optional):
            return []
        if least == 0 and most >= len(optional):
            nodes = {name: self._property(case, name) for name in case.properties}
            return [_closed_node(nodes, required)]
        if least == 1 and most >= len(optional) and not required:
            nodes = {name: self._property(case, name) for name in case.properties}
            return [_closed_node(nodes, required) | {"minProperties": 1}]
        nodes = {
            name: self._reference(self._reader.flat(case.properties[name]).conjunction)
            for name in case.properties
        }
        sets = _property_sets(optional, least, most)
        if sets is None:
            detail = f"it leaves more than {MAX_PROPERTY_SETS} sets of properties"
            raise refused(f"{case.where}.minProperties", detail)
        return [
            _closed_node(
                {name: nodes[name] for name in nodes if name in (*required, *needed, *others)},
                [*required, *needed],
            )
            for needed, others in sets
        ]

    def _property(self, case: Objects, name: str) -> Schema:
        """Properties that are required but not described share one definition."""
        self._count(1)
        value = case.properties[name]
        if value.parts and value.key == case.others.key:
            return self._reference(self._reader.flat(value).conjunction)
        return self._node(value)


def _closed_node(properties: dict[str, Schema], required: Sequence[str]) -> Schema:
    if not properties:
        return {"type": "object", "additionalProperties": False}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _property_sets(
    names: Sequence[str], least: int, most: int
) -> list[tuple[tuple[str, ...], Sequence[str]]] | None:
    """Sets of `least` to `most` names, as those that are there and those that may be.

    Each set is in one of them: without an upper limit, by its first names; else by all of them.
    """
    found: list[tuple[tuple[str, ...], Sequence[str]]] = []
    sizes = [least] if most >= len(names) else range(least, most + 1)
    for size in sizes:
        for needed in combinations(range(len(names)), size):
            after = needed[-1] + 1 if needed and most >= len(names) else len(names)
            found.append((tuple(names[i] for i in needed), names[after:]))
            if len(found) > MAX_PROPERTY_SETS:
                return None
    return found


def _limits(case: Strings | Arrays | Objects, least: str, most: str) -> Schema:
    limits: Schema = {least: case.least} if case.least > 0 else {}
    return limits if case.most is None else {**limits, most: case.most}


def _only_chooses(part: Part) -> bool:
    """Whether the part says nothing but `anyOf` or `oneOf`."""
    schema = part.schema
    names = [name for name in schema if name in CHOICES]
    others = {name: value for name, value in schema.items() if name not in CHOICES}
    return names in (["anyOf"], ["oneOf"]) and not restricts(others)


def _not_distinct(where: str, detail: str) -> RequestError:
    advice = "leave it out, or give the items an 'enum' of few values"
    return refused(f"{where}.uniqueItems", f"{detail}; {advice}")

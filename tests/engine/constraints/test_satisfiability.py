"""Which parts of restricted schemas have a value, also in large ones, without a second look."""

import random
from typing import Any

import pytest

from engine.constraints.satisfiability import without_unmet

NULL: dict[str, Any] = {"type": "null"}
NEVER: dict[str, Any] = {"enum": []}


class Definitions(dict[str, Any]):
    """Counts how often one of them is looked up."""

    num_asked = 0

    def __getitem__(self, name: str) -> Any:
        self.num_asked += 1
        return super().__getitem__(name)


def ring(size: int, last: dict[str, Any]) -> dict[str, Any]:
    """Each definition needs the next one, in any order of writing; the last is given."""
    nodes: dict[str, Any] = {f"n{size - 1}": last}
    for i in range(size - 1):
        needed = {"a": {"$ref": f"#/$defs/n{i + 1}"}, "b": dict(NULL)}
        nodes[f"n{i}"] = {"type": "object", "properties": needed, "required": ["a", "b"]}
    names = random.sample(list(nodes), len(nodes))
    return {"$defs": Definitions({name: nodes[name] for name in names}), "$ref": "#/$defs/n0"}


@pytest.mark.parametrize(
    ("last", "is_met"),
    [(NULL, True), ({"$ref": "#/$defs/n0"}, False), ({"enum": []}, False), ({"enum": [1]}, True)],
)
def test_a_long_way_is_followed_once(last: dict[str, Any], is_met: bool) -> None:
    root = ring(random.randrange(2_000, 9_000), last)
    assert (without_unmet(root) is not None) is is_met
    assert root["$defs"].num_asked <= 2 * len(root["$defs"]) + 1


def test_what_has_no_value_is_left_out_where_another_way_is_left() -> None:
    never = dict(NEVER)
    assert without_unmet({"anyOf": [never, NULL]}) == {"anyOf": [NULL]}
    assert without_unmet({"anyOf": [never, dict(NEVER)]}) is None
    optional = {"type": "object", "properties": {"a": never, "b": dict(NULL)}, "required": ["b"]}
    left = without_unmet(optional)
    assert left is not None
    assert left["properties"] == {"b": NULL}
    assert without_unmet(optional | {"required": ["a"]}) is None
    assert without_unmet({"type": "object", "additionalProperties": never}) == {
        "type": "object",
        "additionalProperties": False,
    }


def test_items_count_as_far_as_there_have_to_be_any() -> None:
    never = dict(NEVER)
    pair = {"type": "array", "prefixItems": [dict(NULL), never], "items": False}
    assert without_unmet(pair | {"minItems": 2}) is None
    left = without_unmet(pair | {"minItems": 1})
    assert left is not None
    assert left["prefixItems"] == [NULL, False]
    assert without_unmet({"type": "array", "items": never, "minItems": 1}) is None
    assert without_unmet({"type": "array", "items": False, "minItems": 1}) is None
    left = without_unmet({"type": "array", "items": never, "minItems": 0})
    assert left is not None
    assert left["items"] is False


def test_a_definition_that_needs_itself_is_left_out_with_what_refers_to_it() -> None:
    endless = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/n"}},
        "required": ["x"],
    }
    root = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": endless}}
    assert without_unmet(root) == {"type": "object", "properties": {}, "$defs": {}}


def test_a_node_in_several_places_counts_in_each() -> None:
    shared = dict(NULL)
    both = {"type": "object", "properties": {"a": shared, "b": shared}, "required": ["a", "b"]}
    assert without_unmet(both) == both


def test_a_reference_to_nowhere_is_our_mistake() -> None:
    with pytest.raises(KeyError):
        without_unmet({"$ref": "#/$defs/x"})

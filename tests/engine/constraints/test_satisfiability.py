"""Which restricted schemas have a value, also large ones, without looking at anything twice."""

import random
from typing import Any

import pytest

from engine.constraints.satisfiability import can_be_met
from engine.errors import RequestError

NULL: dict[str, Any] = {"type": "null"}


class Resolver:
    """Finds `#/$defs/NAME`, and counts how often it was asked."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.num_asked = 0
        self._root = root

    def __call__(self, reference: str) -> dict[str, Any]:
        self.num_asked += 1
        found: dict[str, Any] = self._root["$defs"][reference.rpartition("/")[2]]
        return found


def ring(size: int, last: dict[str, Any]) -> dict[str, Any]:
    """Each definition needs the next one, in any order of writing; the last is given."""
    nodes: dict[str, Any] = {f"n{size - 1}": last}
    for i in range(size - 1):
        needed = {"a": {"$ref": f"#/$defs/n{i + 1}"}, "b": NULL}
        nodes[f"n{i}"] = {"type": "object", "properties": needed, "required": ["a", "b"]}
    names = random.sample(list(nodes), len(nodes))
    return {"$defs": {name: nodes[name] for name in names}, "$ref": "#/$defs/n0"}


@pytest.mark.parametrize(
    ("last", "expected"),
    [(NULL, True), ({"$ref": "#/$defs/n0"}, False), ({"enum": []}, False), ({"enum": [1]}, True)],
)
def test_a_long_way_is_followed_once(last: dict[str, Any], expected: bool) -> None:
    root = ring(random.randrange(2_000, 9_000), last)
    resolver = Resolver(root)
    assert can_be_met(root, resolver) is expected
    assert resolver.num_asked <= len(root["$defs"]) + 1


def test_one_of_several_alternatives_is_enough_and_all_items_of_a_prefix_are_needed() -> None:
    never = {"enum": []}
    assert can_be_met({"anyOf": [never, NULL]}, Resolver({}))
    assert not can_be_met({"anyOf": [never, never]}, Resolver({}))
    assert not can_be_met({"type": "array", "prefixItems": [NULL, never]}, Resolver({}))
    assert can_be_met({"type": "array", "items": never, "minItems": 0}, Resolver({}))
    assert not can_be_met({"type": "array", "items": never, "minItems": 1}, Resolver({}))


def test_a_node_in_several_places_counts_in_each() -> None:
    shared = dict(NULL)
    both = {"type": "object", "properties": {"a": shared, "b": shared}, "required": ["a", "b"]}
    assert can_be_met(both, Resolver({}))


def test_a_reference_to_nowhere_is_passed_on() -> None:
    def nowhere(reference: str) -> dict[str, Any]:
        raise RequestError(f"{reference} names nothing")

    with pytest.raises(RequestError, match="names nothing"):
        can_be_met({"$ref": "#/x"}, nowhere)

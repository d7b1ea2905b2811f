"""What of a restricted JSON schema has no value at all is taken out of it.

A least fixed point: a node is met when enough of the nodes that it needs are, so one that needs
itself without end is never met. Every node counts down what it still misses; each edge is followed
once. Knows no keyword that a restricted schema cannot have.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import cast

Schema = dict[str, object]

DEFINITIONS = "#/$defs/"  # what every reference of a restricted schema begins with
_NEVER = -1  # nothing that is met can meet the node


def without_unmet(root: Schema) -> Schema | None:
    """A copy of a restricted schema in which every part has a value; None if it has none itself.

    A property that nothing can meet is not among the properties then, and an array of such items
    is empty. Raises KeyError for a reference to nothing.
    """
    met = _met_nodes(root)
    return cast("Schema", _copy(root, met)) if id(root) in met else None


def _met_nodes(root: Schema) -> set[int]:
    """The ids of nodes that have a value."""
    definitions = cast("dict[str, Schema]", root.get("$defs", {}))
    missing: dict[int, int] = {}  # id of a node -> how many of its needs have to be met yet
    needed_by: defaultdict[int, list[int]] = defaultdict(list)
    for node in _nodes_of(root):
        if id(node) in missing:
            continue  # one node in several places
        needs, num_enough = _needs(node, definitions)
        missing[id(node)] = num_enough
        for need in needs:
            needed_by[id(need)].append(id(node))
    ready = [node_id for node_id, num_missing in missing.items() if num_missing == 0]
    met = set(ready)
    while ready:
        for node_id in needed_by[ready.pop()]:
            missing[node_id] -= 1
            if missing[node_id] == 0:
                met.add(node_id)
                ready.append(node_id)
    return met


def _nodes_of(root: Schema) -> Iterator[Schema]:
    """Yields the nodes of a restricted schema, outer ones first."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        for name in ("$defs", "properties"):
            stack += cast("dict[str, Schema]", node.get(name, {})).values()
        for name in ("anyOf", "prefixItems"):
            stack += cast("list[Schema]", node.get(name, []))
        for name in ("items", "additionalProperties"):
            inner = node.get(name)
            if isinstance(inner, dict):
                stack.append(inner)


def _needs(node: Schema, definitions: dict[str, Schema]) -> tuple[list[Schema], int]:
    """Nodes on which it depends, and how many of them have to be met."""
    if "$ref" in node:
        return [definitions[str(node["$ref"]).removeprefix(DEFINITIONS)]], 1
    if "enum" in node:
        return [], 0 if node["enum"] else _NEVER
    if "anyOf" in node:
        return cast("list[Schema]", node["anyOf"]), 1
    needs: list[Schema] = []
    if node.get("type") == "object":
        properties = cast("dict[str, Schema]", node.get("properties", {}))
        needs = [properties[name] for name in cast("list[str]", node.get("required", []))]
    if node.get("type") == "array":
        num_items = cast("int", node.get("minItems", 0))
        prefix = cast("list[Schema]", node.get("prefixItems", []))
        needs = prefix[:num_items]
        if num_items > len(prefix):
            if node["items"] is False:
                return [], _NEVER
            needs = [*needs, cast("Schema", node["items"])]
    return needs, len(needs)


def _copy(node: object, met: set[int]) -> object:
    """Copies a node that can be met; False stands for one that cannot."""
    if not isinstance(node, dict):
        return node
    if id(node) not in met:
        return False
    copied: Schema = dict(node)
    for name in ("$defs", "properties"):
        if name in node:
            inner = cast("dict[str, Schema]", node[name])
            copied[name] = {key: _copy(v, met) for key, v in inner.items() if id(v) in met}
    if "anyOf" in node:
        options = cast("list[Schema]", node["anyOf"])
        copied["anyOf"] = [_copy(option, met) for option in options if id(option) in met]
    if "prefixItems" in node:
        prefix = cast("list[Schema]", node["prefixItems"])
        copied["prefixItems"] = [_copy(item, met) for item in prefix]
    for name in ("items", "additionalProperties"):
        if name in node:
            copied[name] = _copy(node[name], met)
    return copied

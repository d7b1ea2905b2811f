"""Removes the parts of a restricted JSON schema that no value can satisfy.

Computes a least fixed point: a node is met when enough of the nodes that it needs are met, so an
endless recursion is never met. Every node counts down the needs that are not met yet; each edge is
followed once. Knows no keyword that a restricted schema cannot have.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import cast

Schema = dict[str, object]

DEFINITIONS = "#/$defs/"  # prefix of every reference in a restricted schema
_NEVER = -1  # the node can never be met


def without_unmet(root: Schema) -> Schema | None:
    """A copy of a restricted schema in which every part has a value; None if the root has none.

    Properties that cannot be met are removed, and an array of items that cannot be met must be
    empty. Raises KeyError for a reference to a missing definition.
    """
    met = _met_nodes(root)
    return cast("Schema", _copy(root, met)) if id(root) in met else None


def _met_nodes(root: Schema) -> set[int]:
    """The ids (as of `id`) of nodes that have a value."""
    definitions = cast("dict[str, Schema]", root.get("$defs", {}))
    missing: dict[int, int] = {}  # id of a node -> number of its needs that are not met yet
    needed_by: defaultdict[int, list[int]] = defaultdict(list)
    for node in _nodes_of(root):
        if id(node) in missing:
            continue  # the same node in several places
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
    """Every node of a restricted schema, outer ones first."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        for name in ("$defs", "properties", "patternProperties"):
            stack += cast("dict[str, Schema]", node.get(name, {})).values()
        for name in ("anyOf", "prefixItems"):
            stack += cast("list[Schema]", node.get(name, []))
        for name in ("items", "additionalProperties"):
            inner = node.get(name)
            if isinstance(inner, dict):
                stack.append(inner)


def _needs(node: Schema, definitions: dict[str, Schema]) -> tuple[list[Schema], int]:
    """The nodes that it depends on, and how many of them must be met."""
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
        if node.get("minProperties") and not needs:
            return _any_property(node), 1
    if node.get("type") == "array":
        num_items = cast("int", node.get("minItems", 0))
        prefix = cast("list[Schema]", node.get("prefixItems", []))
        needs = prefix[:num_items]
        if num_items > len(prefix):
            if node["items"] is False:
                return [], _NEVER
            needs = [*needs, cast("Schema", node["items"])]
    return needs, len(needs)


def _any_property(node: Schema) -> list[Schema]:
    """The nodes of which one must be met for an object that has a property."""
    found = list(cast("dict[str, Schema]", node.get("properties", {})).values())
    found += cast("dict[str, Schema]", node.get("patternProperties", {})).values()
    others = node.get("additionalProperties")
    return [*found, others] if isinstance(others, dict) else found


def _copy(node: object, met: set[int]) -> object:
    """Copy of a node that is met; False for one that is not."""
    if not isinstance(node, dict):
        return node
    if id(node) not in met:
        return False
    copied: Schema = dict(node)
    for name in ("$defs", "properties", "patternProperties"):
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

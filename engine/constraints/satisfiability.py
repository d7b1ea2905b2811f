"""Whether a restricted JSON schema has a value at all, in time that grows with its size alone.

A least fixed point: a node is met when enough of the nodes that it needs are, so one that needs
itself without end is never met. Every node counts down what it still misses; each edge is followed
once. Knows no keyword that a restricted schema cannot have.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import cast

Schema = dict[str, object]

_NEVER = -1  # nothing that is met can meet the node


def can_be_met(root: Schema, resolve: Callable[[str], Schema]) -> bool:
    """`resolve`: what a reference names in `root`; its errors are passed on."""
    missing: dict[int, int] = {}  # id of a node -> how many of its needs have to be met yet
    needed_by: defaultdict[int, list[int]] = defaultdict(list)
    for node in nodes_of(root):
        if id(node) in missing:
            continue  # one node in several places
        needs, num_enough = _needs(node, resolve)
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
    return id(root) in met


def nodes_of(root: Schema) -> Iterator[Schema]:
    """Every node of a restricted schema, outer ones first."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        for name in ("$defs", "definitions", "properties"):
            stack += cast("dict[str, Schema]", node.get(name, {})).values()
        for name in ("anyOf", "prefixItems"):
            stack += cast("list[Schema]", node.get(name, []))
        for name in ("items", "additionalProperties"):
            inner = node.get(name)
            if isinstance(inner, dict):
                stack.append(inner)


def _needs(node: Schema, resolve: Callable[[str], Schema]) -> tuple[list[Schema], int]:
    """Nodes on which it depends, and how many of them have to be met."""
    if "$ref" in node:
        return [resolve(str(node["$ref"]))], 1
    if "enum" in node:
        return [], 0 if node["enum"] else _NEVER
    if "anyOf" in node:
        return cast("list[Schema]", node["anyOf"]), 1
    needs: list[Schema] = []
    if node.get("type") == "object":
        properties = cast("dict[str, Schema]", node.get("properties", {}))
        needs = [properties[name] for name in cast("list[str]", node.get("required", []))]
    if node.get("type") == "array":
        needs = list(cast("list[Schema]", node.get("prefixItems", [])))
        if cast("int", node.get("minItems", 0)) > 0 and isinstance(node["items"], dict):
            needs.append(cast("Schema", node["items"]))
    return needs, len(needs)

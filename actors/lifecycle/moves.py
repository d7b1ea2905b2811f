"""Moves workers off nodes that Ray was asked to drain: which a deployment has, and which end.

    a node is drained -> a worker of another name starts elsewhere -> it is ready: the old drains

A worker whose successor finds no room goes on until its node ends. Nothing here waits, and nothing
reads the deadline of a drain: it is a time of day, and clocks of machines differ.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import ray
from ray._private.state import actors, state  # Ray has no public form of either

from engine.messages import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The workers of a deployment, at one moment."""

    staying: dict[str, Role]  # those that it is to have; some may have to be created
    leaving: dict[str, Role]  # others, on nodes that end
    to_drain: list[str]  # of `leaving`: their successors are ready
    surplus: list[str]  # beyond what the configuration says, and not ready

    @property
    def roles(self) -> dict[str, Role]:
        """All that may have requests."""
        return self.staying | self.leaving


def choose_crew(
    wanted: Mapping[str, Role],
    there: Collection[str],
    nodes: Mapping[str, str | None],
    ending: Collection[str],
    ready: Collection[str],
) -> Crew:
    """Returns which workers a deployment should have.

    wanted: names and roles by the configuration. there: all workers of the deployment that have an
    actor. nodes: worker -> node id, None while it waits for one. ending: nodes that are drained.
    ready: workers that can serve.
    """
    staying: dict[str, Role] = {}
    leaving: dict[str, Role] = {}
    to_drain: list[str] = []
    surplus: list[str] = []
    for role in dict.fromkeys(wanted.values()):
        names = [name for name in wanted if wanted[name] == role]
        mine = sorted((name for name in there if name.startswith(f"{role}-")), key=_order)
        ends = [name for name in mine if nodes.get(name) in ending]
        stays = [name for name in mine if name not in ends]
        stays += _free_names(names, mine)[: max(0, len(names) - len(stays))]
        late = [name for name in reversed(stays) if name not in ready]
        spare = late[: max(0, len(stays) - len(names))]
        staying |= {name: role for name in stays if name not in spare}
        leaving |= dict.fromkeys(ends, role)
        surplus += spare
        if all(name in ready for name in stays):
            to_drain += ends
    return Crew(staying=staying, leaving=leaving, to_drain=to_drain, surplus=surplus)


def _order(name: str) -> tuple[int, str]:
    """By the index in `decode-1.3fa9c1d2`."""
    return int(name.partition(".")[0].rpartition("-")[2]), name


def _free_names(names: list[str], taken: Collection[str]) -> list[str]:
    """Returns as many names like these as there are, the first ones that are free."""
    role, _, rest = names[0].partition("-")
    suffix = rest.partition(".")[2]
    numbered = (f"{role}-{i}.{suffix}" for i in count())
    free = (name for name in numbered if name not in taken)
    return [next(free) for _ in names]


def ending_nodes() -> frozenset[str]:
    """The ids, in hex, of nodes that Ray was asked to drain. Waits for Ray's control store."""
    return frozenset(state.get_draining_nodes())


def node_of(name: str, namespace: str) -> str | None:
    """The id of the node on which a named actor runs; None while it runs nowhere. Waits for Ray."""
    with suppress(ValueError):  # there is none
        entry = actors(ray.get_actor(name, namespace)._actor_id.hex())
        return entry["Address"]["NodeID"] if entry.get("State") == "ALIVE" else None
    return None

"""Places each worker on Ray: a placement group of its own, on a node near its partners.

A group is detached like its worker and found again by name, so a restarted worker or Supervisor
finds the devices still held. Ray does not remove the group of a worker that ended. The Supervisor
does or, when there is none, the deployment's rendezvous, which is the last of its actors to leave.
A group is removed after its worker has ended for good: a worker that Ray kills because its group is
removed may be started anew, and then waits for that group for ever.
Workers that ask for no resources have no group, because Ray has no empty ones.

The group of a worker of several ranks has a bundle for each, all on one node; rank 0 is in the
first. It is held, found and given back like any other: removing it ends all ranks.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest

import ray
from ray._private.state import available_resources_per_node  # Ray has no public form of it
from ray._raylet import PlacementGroupID
from ray.exceptions import RaySystemError
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from engine.messages import Role

logger = logging.getLogger(__name__)

Resources = Mapping[str, float]  # Ray's names -> amount: {"CPU": 2.0, "GPU": 1.0}

PARTNERS: Mapping[Role, Role] = {"prefill": "decode", "decode": "prefill"}
ONE_RANK: Mapping[str, int] = {"unified": 1, "prefill": 1, "decode": 1}
PRECISION = 1e-4  # Ray counts resources in ten-thousandths


# ---- which node: a decision on a snapshot --------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """The free resources of a node at one moment."""

    node_id: str
    free: Resources


def choose_nodes(
    roles: Mapping[str, Role],
    placed: Mapping[str, str],
    nodes: Sequence[NodeRoom],
    bundle: Resources,
    num_ranks: Mapping[str, int] = ONE_RANK,
) -> dict[str, str | None]:
    """Chooses a node for every worker without one; None = no node has the resources.

    roles: all workers of a deployment. placed: worker -> node id. bundle: what one rank takes.
    num_ranks: role -> ranks of one such worker, all on one node.
    A prefill and a decode worker go to one node that has room for both, because KV moves from GPU
    to GPU there; else each goes where it has most partners. Among equal nodes the fullest is taken,
    which leaves room for whole pairs elsewhere.
    """
    at = dict(placed)
    room = {node.node_id: dict(node.free) for node in nodes}
    chosen: dict[str, str | None] = {}

    def taken(*names: str) -> Resources:
        size = sum(num_ranks[roles[name]] for name in names)
        return {resource: size * amount for resource, amount in bundle.items()}

    for pair in _pairs(roles, placed):
        shared = _best_node(pair, roles, at, room, taken(*pair))
        for name in pair:
            node_id = shared or _best_node((name,), roles, at, room, taken(name))
            chosen[name] = node_id
            if node_id is not None:
                at[name] = node_id
                for resource, amount in taken(name).items():
                    room[node_id][resource] -= amount
    return chosen


def _pairs(roles: Mapping[str, Role], placed: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Workers without a node: prefill and decode workers in pairs, the rest one by one."""
    prefill, decode, unified = (
        [name for name, role in roles.items() if role == wanted and name not in placed]
        for wanted in ("prefill", "decode", "unified")
    )
    pairs = zip_longest(prefill, decode)
    return [tuple(name for name in pair if name) for pair in pairs] + [(n,) for n in unified]


def _best_node(
    names: Sequence[str],
    roles: Mapping[str, Role],
    at: Mapping[str, str],
    room: Mapping[str, Resources],
    taken: Resources,
) -> str | None:
    """The node with room for what `names` take that `choose_nodes` would take, or None."""
    wanted = {PARTNERS.get(roles[name]) for name in names}

    def rank(node_id: str) -> tuple[int, float, str]:
        num_partners = sum(at[n] == node_id and roles.get(n) in wanted for n in at)
        return -num_partners, sum(room[node_id].get(r, 0.0) for r in taken), node_id

    fitting = [
        node_id
        for node_id, free in room.items()
        if all(free.get(r, 0.0) >= amount - PRECISION for r, amount in taken.items())
    ]
    return min(fitting, key=rank, default=None)


# ---- groups on Ray -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """The placement group of a worker, as Ray's table has it."""

    worker: str  # name of the worker's actor
    id: str  # in hex
    node_id: str | None  # None = it waits for a node with room

    @property
    def handle(self) -> PlacementGroup:
        """The group in the form that Ray's functions take."""
        return PlacementGroup(PlacementGroupID(bytes.fromhex(self.id)))


def worker_groups(namespace: str) -> dict[str, WorkerGroup]:
    """Worker -> its group, of every deployment of an application. Waits for Ray's control store.

    namespace: of the application's actors. A name is unique on Ray, so the group's carries it.
    """
    prefix = f"{namespace}/"
    groups = (
        WorkerGroup(
            worker=entry["name"].removeprefix(prefix),
            id=entry["placement_group_id"],
            node_id=entry["bundles_to_node_id"][0] if entry["state"] == "CREATED" else None,
        )
        for entry in placement_group_table().values()
        if entry["state"] != "REMOVED" and entry["name"].startswith(prefix)
    )
    return {group.worker: group for group in groups}


def hold_places(
    roles: Mapping[str, Role],
    missing: Iterable[str],
    namespace: str,
    bundle: Resources,
    num_ranks: Mapping[str, int] = ONE_RANK,
    ending: Collection[str] = (),
) -> dict[str, dict[str, object]]:
    """Returns actor options that put each `missing` worker into its group, found or created.

    roles: all workers of the deployment. bundle: what one rank of a worker takes; without resources
    there are no groups and no options. num_ranks: as in `choose_nodes`. ending: ids of nodes that
    are not chosen. Does not wait: a group that does not fit waits on Ray, and its worker with it.
    """
    names = frozenset(missing)
    if not bundle or not names:
        return {}
    groups = worker_groups(namespace)
    placed = {n: g.node_id for n, g in groups.items() if n in roles and g.node_id is not None}
    handles = {name: groups[name].handle for name in names if name in groups}
    # Ray serves groups in the order of creation: in pairs, so that too few devices still make a
    # pair.
    nodes = [node for node in _look_at_nodes() if node.node_id not in ending]
    chosen = choose_nodes(roles, placed, nodes, bundle, num_ranks)
    for name, node_id in chosen.items():
        if name in names and name not in handles:
            bundles = [bundle] * num_ranks[roles[name]]
            handles[name] = _create(name, namespace, bundles, node_id)
    return {name: {"scheduling_strategy": _inside(handle, 0)} for name, handle in handles.items()}


def _inside(group: PlacementGroup, rank: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=rank
    )


def in_own_bundle(rank: int) -> dict[str, object]:
    """Actor options that put a further rank of the worker that asks into its own bundle.

    The bundle is one of the worker's group; without a group, the rank is put onto the same node.
    """
    group = get_current_placement_group()
    if group is not None:
        return {"scheduling_strategy": _inside(group, rank)}
    node_id = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)}


def _look_at_nodes() -> list[NodeRoom]:
    """Returns the free resources of living nodes; Ray's view lags, so use it as a preference."""
    nodes: dict[str, Resources] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return [NodeRoom(node_id=node_id, free=free) for node_id, free in nodes.items()]


def _create(
    worker: str, namespace: str, bundles: Sequence[Resources], node_id: str | None
) -> PlacementGroup:
    """Creates a group that prefers a node, but takes another if that one is full or gone.

    Raises RaySystemError when Ray refuses it.
    """
    if node_id is None:
        wanted = f"{len(bundles)} x " if len(bundles) > 1 else ""
        logger.warning("%s waits: no node has %s%s free", worker, wanted, dict(bundles[0]))
    try:
        group: PlacementGroup = placement_group(
            [dict(bundle) for bundle in bundles],
            strategy="STRICT_PACK",
            name=f"{namespace}/{worker}",
            lifetime="detached",
            _soft_target_node_id=node_id,
        )
    except RaySystemError:  # the name is taken: another supervisor of the deployment was quicker
        found = worker_groups(namespace).get(worker)
        if found is None:
            raise
        return found.handle
    return group


# ---- the end of a group --------------------------------------------------------------------------


def remove_groups(groups: Iterable[WorkerGroup], namespace: str) -> None:
    """End the workers of these groups, for good, and give their devices back.

    Ray ends a worker that runs in a removed group, but one that waits for it would wait for ever.
    """
    for group in groups:
        logger.info("the place of %s is given back", group.worker)
        with suppress(ValueError):  # it has no actor any more
            ray.kill(ray.get_actor(group.worker, namespace), no_restart=True)
        remove_placement_group(group.handle)


def end_lost(workers: Iterable[str], namespace: str) -> None:
    """End those workers whose group is gone, for good, so that the supervisor creates them anew.

    workers: had an actor before this call, and answer nothing. Ray would let one that does not run
    yet, because it was just created or restarts, wait for its group for ever.
    """
    groups = worker_groups(namespace)
    for worker in workers:
        if worker not in groups:
            logger.warning("%s waits in a place that is gone: it is ended", worker)
            with suppress(ValueError):  # it has just ended by itself
                ray.kill(ray.get_actor(worker, namespace), no_restart=True)


def unused_groups(groups: Mapping[str, WorkerGroup], actors: Iterable[str]) -> list[WorkerGroup]:
    """Returns groups whose worker never got a node, then groups without a worker.

    Removed in this order, none that waits takes the devices of one that has ended.
    """
    alive = frozenset(actors)
    waiting = [g for g in groups.values() if g.node_id is None]
    return waiting + [g for g in groups.values() if g.node_id and g.worker not in alive]


def remove_unused(namespace: str, deployment_hash: str) -> bool:
    """Removes the unused groups of a deployment without a supervisor; returns whether that is all.

    Its running workers leave by themselves. A worker that waits for a device cannot, and would ask
    the cluster for it for ever.
    """
    groups = worker_groups(namespace)
    entries = list_named_actors(all_namespaces=True)
    actors = [e["name"] for e in entries if e["namespace"] == namespace]
    ours = {name: g for name, g in groups.items() if name.endswith(f".{deployment_hash}")}
    unused = unused_groups(ours, actors)
    remove_groups(unused, namespace)
    return len(unused) == len(ours)

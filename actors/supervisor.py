"""The Supervisor: creates, adopts, watches and drains every other actor of the application.

A Serve deployment actor: Serve starts it, restarts it and ends it with the application. Serve's
controller, started anew during a redeploy, forgets the old Supervisor, which would then keep its
workers for ever: one that no ingress asks any more ends itself. What a Supervisor creates is
detached, so that the next one finds it by name; such an actor ends itself when it hears no
Supervisor (actors/lifecycle/liveness.py). After a redeploy with another config or model
the new Supervisor drains the workers of the old one, which it knows by the hash in their names.
Workers on a node that Ray was asked to drain are replaced (actors/lifecycle/moves.py).
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.util import list_named_actors

from actors.lifecycle.deployment import (
    DeploymentSpec,
    allocator_name,
    batcher_names,
    rendezvous_name,
    service_options,
    worker_bundle,
    worker_names,
    worker_options,
)
from actors.lifecycle.liveness import MAX_UNANSWERED, Lifeline, LivenessTracker
from actors.lifecycle.moves import Crew, choose_crew, ending_nodes, node_of
from actors.lifecycle.placement_groups import (
    WorkerGroup,
    end_lost,
    hold_places,
    remove_groups,
    unused_groups,
    worker_groups,
)
from actors.observability.logs import leave_out, set_up_logging
from actors.rpc.handles import (
    AllocatorHandle,
    WorkerHandle,
    create_actor,
    find_actor,
    ping,
    wait_answer,
)
from engine.errors import WorkerError
from engine.kv.host.shared_file import UnusedFiles, name_for
from engine.messages import Topology, WorkerStatus, encode

logger = logging.getLogger(__name__)
T = TypeVar("T")

STARTING = WorkerStatus(identity=None, state="starting")  # of a worker that does not answer
STARTING_PERIOD_S = 0.2  # while workers load, so that readiness is noticed soon
# Of all ingresses, which ask twice a second. Serve replaces one within a minute; a machine on which
# everything starts at once may take longer until the first one asks.
INGRESS_SILENCE_S = 300.0
# What Ray says of each worker: where its group is removed, it waits for ever. `remove_groups` and
# `end_lost` see to that (actors/lifecycle/placement_groups.py); whoever reads the log need not.
WARNED_OF = "Scheduling a restartable detached actor with a placement group is not recommended"
EXIT_FAILED = 70  # EX_SOFTWARE
WORKER_PREFIXES = ("prefill-", "decode-", "unified-")


def _exit_without_watcher(watcher: asyncio.Task[None]) -> None:
    """Fail-stop: without the watching task no actor is kept. Serve starts another one."""
    logger.critical("the supervisor's task ended, exiting", exc_info=watcher.exception())
    logging.shutdown()
    os._exit(EXIT_FAILED)


class Supervisor:
    """Creates and watches the deployment's actors, and says which of them can serve."""

    def __init__(self, spec_text: str) -> None:
        """Starts creating and adopting at once, as a task on the actor's event loop.

        spec_text: a DeploymentSpec's.
        """
        spec = DeploymentSpec.from_text(spec_text)
        set_up_logging(spec.config.log_level)
        leave_out("ray.actor", WARNED_OF)
        app_name = serve.get_deployment_actor_context().app_name
        own_name = ray.get_runtime_context().get_actor_name()
        self._spec = spec.in_application(app_name, supervisor=own_name or "")
        self._config = spec.config
        self._wanted = worker_names(spec.config, spec.hash)
        self._crew = Crew(staying=dict(self._wanted), leaving={}, to_drain=[], surplus=[])
        self._batchers = batcher_names(spec.config, spec.hash)
        self._statuses: dict[str, WorkerStatus] = dict.fromkeys(self._wanted, STARTING)
        self._answering: set[str] = set()  # services that answered their last ping
        # Actors of earlier deployments: they existed before this supervisor. It must not touch
        # those of later ones, because it lives on while the streams of its own ingresses end.
        self._earlier: frozenset[str] | None = None
        self._moved: set[tuple[str, str | None]] = set()  # services, and the nodes they have left
        self._unused_arenas = UnusedFiles(keep=name_for(spec.block_key))
        self._has_looked = False  # every actor was asked at least once
        # An actor that does not answer must not delay the others' heartbeats.
        self._patience_s = spec.config.lifetimes.supervisor_silence_s / MAX_UNANSWERED
        self._liveness = LivenessTracker()
        # If Serve still wants a supervisor, it starts another one.
        self._lifeline = Lifeline(INGRESS_SILENCE_S).start()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        self._watcher.add_done_callback(_exit_without_watcher)

    def __repr__(self) -> str:
        """What Ray prints before this actor's log lines."""
        return f"supervisor.{self._spec.hash}"

    async def topology(self) -> bytes:
        """The current Topology, encoded.

        Raises WorkerError if the watching task has ended, and before its first round ends: an
        ingress keeps what it heard from this supervisor's predecessor until then.
        """
        self._lifeline.beat()
        if self._watcher.done():
            raise WorkerError(f"the supervisor stopped watching: {self._watcher.exception()!r}")
        if not self._has_looked:
            raise WorkerError("the supervisor has not looked at its actors yet")
        return encode(self._topology())

    def _topology(self) -> Topology:
        return Topology(
            workers=dict(self._statuses),
            roles=self._crew.roles,
            batchers=[n for n in self._batchers if n in self._answering],
            allocator=allocator_name(self._spec.hash),
        )

    # ---- one round ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Repeats for ever: create missing actors, ask all for their status, drain old ones."""
        while True:
            groups = await asyncio.to_thread(worker_groups, self._spec.namespace)
            names = await asyncio.to_thread(self._named_actors)
            ending = await asyncio.to_thread(ending_nodes)
            if self._earlier is None:
                there = {*names, *groups}
                self._earlier = frozenset(n for n in there if not n.endswith(self._spec.hash))
            self._liveness.forget_others(names)
            self._choose_crew(names, groups, ending)
            await asyncio.to_thread(self._create_missing, names, ending)
            await asyncio.gather(
                *(self._check_worker(name) for name in self._crew.roles),
                *(self._ping(name) for name in (*self._batchers, rendezvous_name(self._spec.hash))),
                self._update_allocator(),
            )
            self._has_looked = True
            await asyncio.to_thread(self._end_lost, names)
            await self._retire(name for name in names if name in self._earlier)
            await self._move(groups, ending)
            old_groups = {n: groups[n] for n in groups if n in self._earlier or self._has_left(n)}
            unused = unused_groups(old_groups, names)
            await asyncio.to_thread(remove_groups, unused, self._spec.namespace)
            await asyncio.to_thread(self._unused_arenas.remove, time.monotonic())
            period_s = self._config.lifetimes.supervisor_heartbeat_s
            await asyncio.sleep(min(period_s, STARTING_PERIOD_S) if self._is_starting else period_s)

    @property
    def _is_starting(self) -> bool:
        """Whether an expected actor is not up, so that rounds follow each other sooner."""
        is_loading = any(status.state == "starting" for status in self._statuses.values())
        return is_loading or not self._answering.issuperset(self._batchers)

    def _named_actors(self) -> list[str]:
        """Names of all detached actors of this application, of any deployment."""
        entries = list_named_actors(all_namespaces=True)
        return sorted(e["name"] for e in entries if e["namespace"] == self._spec.namespace)

    def _choose_crew(
        self, names: list[str], groups: Mapping[str, WorkerGroup], ending: frozenset[str]
    ) -> None:
        """Decides which workers there should be; statuses are of these alone."""
        ours = [n for n in names if n.startswith(WORKER_PREFIXES) and n.endswith(self._spec.hash)]
        nodes = {name: group.node_id for name, group in groups.items()}
        ready = [name for name, status in self._statuses.items() if status.state == "ready"]
        self._crew = choose_crew(self._wanted, ours, nodes, ending, ready)
        known = self._statuses
        self._statuses = {name: known.get(name, STARTING) for name in self._crew.roles}

    def _has_left(self, name: str) -> bool:
        """Whether a place is that of a worker of this deployment that has moved."""
        return name.endswith(self._spec.hash) and name not in self._crew.roles

    def _create_missing(self, names: list[str], ending: frozenset[str]) -> None:
        """Create every expected actor that has no name yet; an existing one is adopted."""
        from actors import remote_classes  # the actor classes import more than this actor needs

        spec = self._spec
        # The rendezvous first: without it, nobody would give back the places of those that follow.
        for name, cls in (
            (rendezvous_name(spec.hash), remote_classes.RendezvousCls),
            (allocator_name(spec.hash), remote_classes.LapsAllocatorCls),
        ):
            if name not in names:
                create_actor(cls, service_options(spec, name), spec, name)
        staying = self._crew.staying
        missing = {name: role for name, role in staying.items() if name not in names}
        bundle, num_ranks = worker_bundle(spec.config), spec.config.workers.num_ranks
        places = hold_places(staying, missing, spec.namespace, bundle, num_ranks, ending)
        for name, role in missing.items():
            options = worker_options(spec, name) | places.get(name, {})
            create_actor(remote_classes.WORKERS[role], options, spec, name, role)
        for name in self._batchers:
            if name not in names:
                options = service_options(spec, name)
                create_actor(remote_classes.TokenizerBatcherCls, options, spec, name)

    def _end_lost(self, names: list[str]) -> None:
        """Ends our workers that answer nothing and whose place is gone."""
        silent = [n for n, status in self._statuses.items() if status is STARTING and n in names]
        if silent and worker_bundle(self._config):
            end_lost(silent, self._spec.namespace)

    async def _check_worker(self, name: str) -> None:
        """Sends a worker a heartbeat and keeps its status."""
        answer = await self._ask(name, lambda actor: WorkerHandle(name, actor).heartbeat())
        status = answer or STARTING  # it restarts by itself, or is created in the next round
        if answer is not None and answer.state == "starting":
            self._liveness.forget(name)  # a process that loads a model may be too busy to answer
        if status.state != self._statuses[name].state:
            pid = f" (pid {status.identity.pid})" if status.identity else ""
            why = f": {status.detail}" if status.detail else ""
            logger.info("%s is %s%s%s", name, status.state, pid, why)
        self._statuses[name] = status

    async def _ping(self, name: str) -> None:
        """Sends a helper actor a heartbeat and notes whether it answers."""

        async def pinged(actor: ActorHandle[Any]) -> bool:
            await ping(name, actor)
            return True

        if await self._ask(name, pinged):
            self._answering.add(name)
        else:
            self._answering.discard(name)

    async def _update_allocator(self) -> None:
        name = allocator_name(self._spec.hash)
        topology = self._topology()
        await self._ask(name, lambda actor: AllocatorHandle(name, actor).update(topology))

    async def _ask(self, name: str, call: Callable[[ActorHandle[Any]], Awaitable[T]]) -> T | None:
        """Returns an actor's answer; None if there is none in time.

        An actor that lives but has stopped answering is ended, and Ray starts it anew.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                actor = await find_actor(name, self._spec.namespace)
        except (WorkerError, TimeoutError) as error:
            logger.debug("%s: %r", name, error)
            return None
        try:
            async with asyncio.timeout(self._patience_s):
                answer = await call(actor)
        except WorkerError as error:
            self._liveness.forget(name)
            logger.debug("%s: %r", name, error)
            return None
        except TimeoutError:
            if self._liveness.timed_out(name):
                logger.error("%s lives and answers nothing: it is ended, to be started anew", name)
                await asyncio.to_thread(ray.kill, actor, no_restart=False)
            return None
        self._liveness.answered(name)
        return answer

    # ---- nodes that end -------------------------------------------------------------------------

    async def _move(self, groups: Mapping[str, WorkerGroup], ending: frozenset[str]) -> None:
        """Takes everything off nodes that end: workers when others can take their requests."""
        await asyncio.gather(*(self._drain(name, 0.0) for name in self._crew.to_drain))
        surplus = [groups[name] for name in self._crew.surplus if name in groups]
        await asyncio.to_thread(remove_groups, surplus, self._spec.namespace)
        if ending:
            await asyncio.to_thread(self._move_services, ending)

    def _move_services(self, ending: frozenset[str]) -> None:
        """Ends services on such nodes, each once; Ray starts them anew on others."""
        spec = self._spec
        names = (*self._batchers, allocator_name(spec.hash), rendezvous_name(spec.hash))
        for name in names:
            node = node_of(name, spec.namespace)
            if node in ending and (name, node) not in self._moved:
                self._moved.add((name, node))
                logger.info("%s leaves a node that ends", name)
                with suppress(ValueError):  # it has just ended by itself
                    ray.kill(ray.get_actor(name, spec.namespace), no_restart=False)

    # ---- other deployments of this application --------------------------------------------------

    async def _retire(self, old_names: Iterable[str]) -> None:
        """Drains the workers of another deployment once this one can serve, and keeps their
        helpers.

        Old helpers (tokenizers, allocator) are needed until the last old worker has gone; then they
        get no heartbeats and end by themselves. Those that answer nothing, and so cannot end by
        themselves, are found here, as their own supervisor may have ended: started anew, a worker
        drains at once, and a helper hears nobody.
        """
        old = list(old_names)
        if any(self._statuses[name].state != "ready" for name in self._crew.staying):
            return
        workers = [name for name in old if name.startswith(WORKER_PREFIXES)]
        helpers = [name for name in old if name not in workers]
        for name in old:
            self._liveness.expect(name)
        await asyncio.gather(
            *(self._drain(name, self._config.lifetimes.drain_s) for name in workers)
        )
        keep = self._ping if workers else self._look_at
        await asyncio.gather(*(keep(name) for name in helpers))

    async def _drain(self, name: str, grace_s: float) -> None:
        async def drained(actor: ActorHandle[Any]) -> None:
            handle = WorkerHandle(name, actor)
            await handle.heartbeat()
            await handle.drain(grace_s)

        await self._ask(name, drained)

    async def _look_at(self, name: str) -> None:
        """Asks an actor for a sign of life, which is no heartbeat for it."""
        await self._ask(name, lambda actor: wait_answer(name, actor))

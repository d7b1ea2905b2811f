"""An ingress's view of the system: the supervisor's topology, kept fresh, and readiness.

`Peers` finds the other actors of the application by name.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from ray import serve

from actors.lifecycle.deployment import SUPERVISOR
from actors.rpc.handles import (
    AllocatorHandle,
    BatcherHandle,
    SupervisorHandle,
    WorkerHandle,
    find_actor,
    ping,
)
from engine.errors import CapacityError, ConfigError, WorkerError
from engine.kv.hashes import RequestHasher
from engine.messages import LapsStatus, Topology

logger = logging.getLogger(__name__)

POLL_S = 0.5
START_POLL_S = 0.1

SUPERVISOR_TIMEOUT_S = 5.0
ALLOCATOR_TIMEOUT_S = 2.0
BEAT_TIMEOUT_S = 1.0


class Peers:
    """Looks actors up by name in the application's namespace; each raises WorkerError."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    async def worker(self, name: str) -> WorkerHandle:
        return WorkerHandle(name, await find_actor(name, self._namespace))

    async def allocator(self, name: str) -> AllocatorHandle:
        return AllocatorHandle(name, await find_actor(name, self._namespace))

    async def batcher(self, name: str) -> BatcherHandle:
        return BatcherHandle(name, await find_actor(name, self._namespace))

    async def beat(self, names: Iterable[str]) -> None:
        """Sends heartbeats to the actors that are not workers, as far as they exist."""
        await asyncio.gather(*(self._beat(name) for name in names))

    async def _beat(self, name: str) -> None:
        with suppress(WorkerError, TimeoutError):
            async with asyncio.timeout(BEAT_TIMEOUT_S):
                await ping(name, await find_actor(name, self._namespace))

    async def topology(self) -> Topology:
        """Returns the supervisor's topology."""
        try:
            async with asyncio.timeout(SUPERVISOR_TIMEOUT_S):
                actor = await asyncio.to_thread(serve.get_deployment_actor, SUPERVISOR)
                return await SupervisorHandle(actor).topology()
        except (ValueError, TimeoutError) as error:
            raise WorkerError("the supervisor is not running") from error

    async def laps_status(self, topology: Callable[[], Topology]) -> LapsStatus:
        """Returns the allocator's status. Raises CapacityError while it is away."""
        try:
            async with asyncio.timeout(ALLOCATOR_TIMEOUT_S):
                allocator = await self.allocator(topology().allocator)
                return await allocator.status()
        except (WorkerError, TimeoutError) as error:
            raise CapacityError("the allocator does not answer", retry_after_s=1.0) from error


def block_hasher(topology: Topology) -> RequestHasher | None:
    """Returns a hasher of blocks as the workers compute them; None before one has identified
    itself.

    A worker with another key, after a redeploy of the same configuration and model, then seems to
    have nothing cached.
    """
    for status in topology.workers.values():
        identity = status.identity
        if identity is not None:
            return RequestHasher.of_blocks(identity.block_key, identity.model, identity.layout)
    return None


class SystemView:
    """Polls the supervisor and passes on each new topology."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Topology]],
        on_topology: Callable[[Topology], None],
        connected: Callable[[], set[str]],
        beat: Callable[[Topology], Awaitable[None]],
    ) -> None:
        """`ask` raises WorkerError while the supervisor is away; `connected` names live workers.

        `beat` keeps actors alive that only the supervisor keeps otherwise, while it is away: Serve
        notices a dead one within 11 s, a frozen one after 90.
        """
        self._ask = ask
        self._beat = beat
        self._on_topology = on_topology
        self._connected = connected
        self._topology: Topology | None = None

    @property
    def topology(self) -> Topology | None:
        """The last topology; it stays in use while the supervisor is away."""
        return self._topology

    def require_topology(self) -> Topology:
        """Returns the last topology. Raises WorkerError before the first."""
        if self._topology is None:
            raise WorkerError("the supervisor has not said yet what runs")
        return self._topology

    async def wait_ready(self) -> Topology:
        """Wait until every role can serve. Raises ConfigError when a worker says it never will."""
        while True:
            await self.refresh()
            topology = self._topology
            if topology is not None:
                for name, status in topology.workers.items():
                    if status.state == "failed":
                        raise ConfigError(f"{name} cannot start: {status.detail}")
                if not self.missing_roles():
                    return topology
            await asyncio.sleep(START_POLL_S)

    async def follow(self) -> None:
        """Refresh for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        try:
            topology = await self._ask()
        except WorkerError as error:
            logger.debug("%s", error)
            if self._topology is not None:
                await self._beat(self._topology)
            return
        self._topology = topology
        self._on_topology(topology)

    def missing_roles(self) -> list[str]:
        """Roles without an actor that is ready and connected; empty = the system can serve."""
        topology = self._topology
        if topology is None:
            return ["supervisor"]
        connected = self._connected()
        ready = (n for n, status in topology.workers.items() if status.state == "ready")
        able = {topology.roles[name] for name in ready if name in connected}
        missing: set[str] = {role for role in topology.roles.values() if role not in able}
        return sorted(missing if topology.batchers else missing | {"tokenizer"})

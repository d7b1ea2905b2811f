"""Where an ingress finds the other actors of its application."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from ray import serve

from actors.handles import (
    AllocatorHandle,
    BatcherHandle,
    SupervisorHandle,
    WorkerHandle,
    find_actor,
    ping,
)
from engine.errors import CapacityError, WorkerError
from engine.messages import LapsStatus, Topology

SUPERVISOR = "supervisor"
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
        """Beat the lifelines of actors that are not workers, as far as they are there."""
        await asyncio.gather(*(self._beat(name) for name in names))

    async def _beat(self, name: str) -> None:
        with suppress(WorkerError, TimeoutError):
            async with asyncio.timeout(BEAT_TIMEOUT_S):
                await ping(name, await find_actor(name, self._namespace))

    async def topology(self) -> Topology:
        """The supervisor's."""
        try:
            async with asyncio.timeout(SUPERVISOR_TIMEOUT_S):
                actor = await asyncio.to_thread(serve.get_deployment_actor, SUPERVISOR)
                return await SupervisorHandle(actor).topology()
        except (ValueError, TimeoutError) as error:
            raise WorkerError("the supervisor is not running") from error

    async def laps_status(self, topology: Callable[[], Topology | None]) -> LapsStatus:
        """The allocator's. Raises CapacityError while it is away."""
        known = topology()
        assert known is not None, "a replica that answers has seen one"
        try:
            async with asyncio.timeout(ALLOCATOR_TIMEOUT_S):
                allocator = await self.allocator(known.allocator)
                return await allocator.status()
        except (WorkerError, TimeoutError) as error:
            raise CapacityError("the allocator does not answer", retry_after_s=1.0) from error

"""What an ingress knows of the system: the supervisor's topology, kept fresh, and readiness."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from engine.errors import ConfigError, WorkerError
from engine.kv.request_hasher import RequestHasher
from engine.messages import Topology

logger = logging.getLogger(__name__)

POLL_S = 0.5
START_POLL_S = 0.1


def block_hasher(topology: Topology) -> RequestHasher | None:
    """Names blocks as the workers do; None before one of them has said who it is.

    A worker that hashes under another key, made after a redeploy of the same config and model,
    seems to have nothing cached.
    """
    for status in topology.workers.values():
        identity = status.identity
        if identity is not None:
            return RequestHasher(
                identity.block_key,
                model=identity.model,
                dtype=identity.layout.dtype,
                block_size=identity.layout.block_size,
            )
    return None


class SystemView:
    """Polls the supervisor and hands each new topology on."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Topology]],
        on_topology: Callable[[Topology], None],
        connected: Callable[[], set[str]],
        beat: Callable[[Topology], Awaitable[None]],
    ) -> None:
        """`ask` raises WorkerError while the supervisor is away; `connected` names live workers.

        `beat` keeps alive whom only the supervisor keeps else, while it is away: Serve notices a
        dead one within 11 s, a frozen one after 90.
        """
        self._ask = ask
        self._beat = beat
        self._on_topology = on_topology
        self._connected = connected
        self._topology: Topology | None = None

    @property
    def topology(self) -> Topology | None:
        """The last one heard of; it goes on being used while the supervisor is away."""
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

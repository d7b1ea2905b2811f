"""One client's links to all workers: reads their streams, acknowledges, keeps their load.

Used by an ingress (which gets tokens) and by the allocator (which only wants load reports). A
link survives its worker: it reconnects for as long as the topology lists the worker. Requests on a
worker that died, was replaced or skipped a message are reported as lost at once, so that none waits
for tokens that cannot come.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from actors.rpc.handles import WorkerHandle
from engine.clock import Clock
from engine.errors import WorkerError
from engine.messages import ExpertTotals, HandoffTotals, LoadReport, Role, StepMessage

logger = logging.getLogger(__name__)

RECONNECT_S = 0.2


@dataclass(slots=True, eq=False)
class WorkerLink:
    """What this process knows of one worker."""

    name: str
    role: Role
    handle: WorkerHandle | None = None  # None = not connected
    incarnation: str | None = None
    load: LoadReport | None = None
    handoffs: HandoffTotals | None = None  # None = it sends no KV, or has not said
    experts: ExpertTotals | None = None  # likewise
    load_at_s: float = 0.0
    next_seq: int = 0

    @property
    def is_up(self) -> bool:
        """Whether the stream is read and the model loaded; before, no blocks are reported."""
        return self.handle is not None and self.load is not None and self.load.num_blocks > 0

    @property
    def is_draining(self) -> bool:
        return self.load is not None and self.load.is_draining


class WorkerLinks:
    """Links to every worker of the topology."""

    def __init__(
        self,
        client_id: str,
        *,
        find: Callable[[str], Awaitable[WorkerHandle]],
        acknowledge_every_s: float,
        silence_s: float,
        clock: Clock,
        on_message: Callable[[StepMessage], Awaitable[None]],
        on_lost: Callable[[str], None],
    ) -> None:
        """`on_lost(worker)` is called when messages of that worker may be missing.

        A worker that sends nothing for `silence_s`, not even a load report, counts as lost.
        """
        self._client_id = client_id
        self._find = find
        self._acknowledge_every_s = acknowledge_every_s
        self._silence_s = silence_s
        self._clock = clock
        self._on_message = on_message
        self._on_lost = on_lost
        self._links: dict[str, WorkerLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def update(self, roles: Mapping[str, Role]) -> None:
        """Opens links to new workers of the topology and drops those that are gone."""
        for name in self._links.keys() - roles.keys():
            self._tasks.pop(name).cancel()
            del self._links[name]
            self._on_lost(name)
        for name in roles.keys() - self._links.keys():
            link = self._links[name] = WorkerLink(name=name, role=roles[name])
            self._tasks[name] = asyncio.create_task(self._follow(link))

    def get(self, name: str) -> WorkerHandle:
        """Returns a connected worker. Raises WorkerError while it is away."""
        link = self._links.get(name)
        if link is None or link.handle is None:
            raise WorkerError(f"{name} is not connected")
        return link.handle

    def follows(self, name: str) -> bool:
        """Whether the worker is in the topology, connected or not."""
        return name in self._links

    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    def check(self) -> None:
        """Raises the error of a reading task that has ended; none should."""
        for task in self._tasks.values():
            if task.done():
                task.result()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._links.clear()

    async def _follow(self, link: WorkerLink) -> None:
        """Reads one worker's stream, for ever."""
        while True:
            try:
                handle = await self._find(link.name)
                await self._read(link, handle)
            except (WorkerError, TimeoutError) as error:
                logger.debug("%s: %r", link.name, error)
            if link.handle is not None:
                link.handle, link.load, link.handoffs, link.experts = None, None, None, None
                logger.warning("lost the connection to %s; reconnecting", link.name)
                self._on_lost(link.name)
            await asyncio.sleep(RECONNECT_S)

    async def _read(self, link: WorkerLink, handle: WorkerHandle) -> None:
        acknowledger: asyncio.Task[None] | None = None
        try:
            async with contextlib.aclosing(handle.read(self._client_id)) as messages:
                while True:
                    async with asyncio.timeout(self._silence_s):
                        message = await anext(messages, None)
                    if message is None:
                        return  # another reader took the stream over
                    if link.handle is None:
                        link.handle, link.incarnation = handle, message.incarnation
                        link.next_seq = message.step_seq
                        acknowledger = asyncio.create_task(self._acknowledge(link, handle))
                    if (message.incarnation, message.step_seq) != (link.incarnation, link.next_seq):
                        raise WorkerError(f"{link.name} skipped messages")
                    link.next_seq += 1
                    link.load, link.load_at_s = message.load, self._clock.now_s()
                    link.handoffs = message.handoffs or link.handoffs
                    link.experts = message.experts or link.experts
                    await self._on_message(message)
        finally:
            if acknowledger is not None:
                acknowledger.cancel()

    async def _acknowledge(self, link: WorkerLink, handle: WorkerHandle) -> None:
        while True:
            with contextlib.suppress(WorkerError):  # the reading task notices a death
                await handle.acknowledge(self._client_id, link.next_seq - 1)
            await asyncio.sleep(self._acknowledge_every_s)

"""The sender's channels: at most one to each decode worker, opened when first used.

Every channel opened to a peer has the next epoch. A channel that fails is closed and replaced at
its next use. When the configured kind does not open, or failed MAX_FAILURES times within
FAILURE_WINDOW_S, the object store takes its place until the window has passed; that is logged and
counted. Knows nothing of requests.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from actors.handoff.contracts import Channels, Peer, SendChannel
from actors.handoff.waits import bounded
from configs.schema import HandoffConfig
from engine.clock import Clock
from engine.errors import HandoffError, WorkerError
from engine.messages import ChannelKind, PairReply, PairRequest, WorkerIdentity

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
FAILURE_WINDOW_S = 60.0


class PeerLink:
    """The channel to one decode worker."""

    def __init__(
        self,
        name: str,
        identity: WorkerIdentity,
        config: HandoffConfig,
        *,
        channels: Channels,
        clock: Clock,
    ) -> None:
        self._name = name
        self._identity = identity
        self._config = config
        self._channels = channels
        self._clock = clock
        self._lock = asyncio.Lock()
        self._channel: SendChannel | None = None
        self._discarded: set[asyncio.Task[None]] = set()
        self._num_users = 0
        self._epoch = 0
        self._failed_at_s: deque[float] = deque(maxlen=MAX_FAILURES)
        self.num_fallbacks = 0  # channels opened that were not of the configured kind

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    @asynccontextmanager
    async def use(self, peer: Peer) -> AsyncIterator[SendChannel]:
        """An open channel to `peer`; a WorkerError raised inside ends it for all its users.

        Raises HandoffError if none can be opened, WorkerError if the peer is dead.
        """
        async with self._lock:
            if self._channel is not None and self._should_change(self._channel):
                await self._hang_up()
            if self._channel is None:
                self._channel = await self._open(peer)
            channel = self._channel
            self._num_users += 1
        try:
            yield channel
        except WorkerError:
            await self._replace(channel)
            raise
        finally:
            self._num_users -= 1

    async def close(self) -> None:
        async with self._lock:
            await self._hang_up()
        await asyncio.gather(*self._discarded)

    async def _replace(self, channel: SendChannel) -> None:
        """Close a channel that failed, unless another of its users did so already."""
        async with self._lock:
            if self._channel is channel:
                self._failed_at_s.append(self._clock.now_s())
                await self._hang_up()

    async def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _preferred(self) -> ChannelKind:
        since_s = self._clock.now_s() - FAILURE_WINDOW_S
        num_failures = sum(at_s > since_s for at_s in self._failed_at_s)
        return self._config.channel if num_failures < MAX_FAILURES else "object_store"

    def _should_change(self, channel: SendChannel) -> bool:
        """Go back to the configured kind once it may be tried again and nobody is under way."""
        return self._num_users == 0 and channel.kind != self._preferred()

    async def _open(self, peer: Peer) -> SendChannel:
        kind = self._preferred()
        if kind == self._config.channel:
            try:
                return await self._open_kind(peer, kind)
            except HandoffError as error:
                if kind == "object_store":
                    raise
                self._failed_at_s.append(self._clock.now_s())
                logger.warning("no %s to %s: %s", kind, self._name, error)
        self.num_fallbacks += 1
        logger.warning("KV for %s goes through the object store", self._name)
        return await self._open_kind(peer, "object_store")

    async def _open_kind(self, peer: Peer, kind: ChannelKind) -> SendChannel:
        """Open both ends at the same time. Raises HandoffError or WorkerError."""
        self._epoch += 1
        request = PairRequest(
            sender=self._identity,
            channel=kind,
            epoch=self._epoch,
            rendezvous_key=f"{self._identity.incarnation}/{self._name}/{self._epoch}/",
        )
        # The receiver first waits for what is under way on the older epoch, then for us.
        bound_s = 3 * self._config.transfer_deadline_s
        theirs = asyncio.ensure_future(bounded(peer.open_pair(request), bound_s))
        ours = asyncio.create_task(self._channels.open_send(request))
        try:
            reply = await theirs
            self._check(reply)
            return await ours
        except BaseException:
            theirs.cancel()
            self._discard(ours)
            raise

    def _discard(self, opening: asyncio.Task[SendChannel]) -> None:
        """Close an end that is of no use as soon as it is open or has failed, at its deadline."""
        task = asyncio.ensure_future(_close_when_open(opening))
        self._discarded.add(task)
        task.add_done_callback(self._discarded.discard)

    def _check(self, reply: PairReply) -> None:
        mine, receiver = self._identity, reply.receiver
        if receiver is None:
            raise HandoffError(f"{self._name} did not open a channel: {reply.reason}")
        if receiver.model != mine.model or receiver.layout != mine.layout:
            raise WorkerError(f"{self._name} holds another model or another KV layout")


class PeerLinks:
    """The links of one prefill worker to all decode workers it has met."""

    def __init__(
        self,
        identity: WorkerIdentity,
        config: HandoffConfig,
        *,
        channels: Channels,
        find_peer: Callable[[str], Awaitable[Peer]],
        clock: Clock,
    ) -> None:
        """`find_peer(name)` raises WorkerError when there is no such worker (now)."""
        self._identity = identity
        self._config = config
        self._channels = channels
        self._find_peer = find_peer
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._links: dict[str, PeerLink] = {}

    @property
    def num_open(self) -> int:
        return sum(link.is_open for link in self._links.values())

    @property
    def num_fallbacks(self) -> int:
        return sum(link.num_fallbacks for link in self._links.values())

    async def peer(self, name: str) -> Peer:
        """The worker's handle; it stays valid while that worker restarts."""
        if name not in self._peers:
            self._peers[name] = await self._find_peer(name)
        return self._peers[name]

    def forget_peer(self, name: str) -> None:
        """Look the worker up anew next time: it may have been replaced by another of its name."""
        self._peers.pop(name, None)

    def link(self, name: str) -> PeerLink:
        if name not in self._links:
            self._links[name] = PeerLink(
                name, self._identity, self._config, channels=self._channels, clock=self._clock
            )
        return self._links[name]

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()


async def _close_when_open(opening: asyncio.Task[SendChannel]) -> None:
    try:
        channel = await opening
    except WorkerError as error:
        logger.debug("the unused end did not open: %s", error)
    else:
        await channel.close()

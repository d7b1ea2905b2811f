"""The sender's channels: at most one to each decode worker, opened when first used.

Every channel opened to a peer has the next epoch. A channel that fails is closed and replaced at
its next use. One of a worse kind is replaced when a better one may be tried again: new users wait
until the others are done with it. channel_choice.py chooses the kinds to try; a choice other than
the first, and its reason, is logged once per channel and counted. Knows no requests.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from actors.kv_transfer.channel_choice import ChannelChoice, channel_order
from actors.kv_transfer.contracts import Channels, Peer, SendChannel, UnfitError
from actors.kv_transfer.waits import bounded, close_when_open
from configs.schema import HandoffConfig
from engine.clock import Clock
from engine.errors import HandoffError, WorkerError
from engine.messages import ChannelKind, PairReply, PairRequest, WorkerIdentity

logger = logging.getLogger(__name__)

Offer = Callable[[ChannelKind], bytes]


def no_offer(_: ChannelKind) -> bytes:
    """The empty offer of a worker whose KV store is in host memory."""
    return b""


class PeerLink:
    """The channel to one decode worker."""

    def __init__(
        self,
        name: str,
        identity: WorkerIdentity,
        config: HandoffConfig,
        *,
        channels: Channels,
        choice: ChannelChoice,
        offer: Offer,
    ) -> None:
        self._name = name
        self._identity = identity
        self._config = config
        self._channels = channels
        self._choice = choice
        self._offer = offer
        self._lock = asyncio.Lock()
        self._channel: SendChannel | None = None
        self._discarded: set[asyncio.Task[None]] = set()
        self._num_users = 0
        self._idle = asyncio.Event()  # set when the last user of a channel has gone
        self._epoch = 0
        self.num_fallbacks = 0  # channels opened that were not of the favourite kind

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    @asynccontextmanager
    async def use(self, peer: Peer) -> AsyncIterator[SendChannel]:
        """Yields an open channel to `peer`; a WorkerError raised inside ends it for all its users.

        Raises HandoffError if none can be opened, WorkerError if the peer is dead.
        """
        while (channel := await self._take(peer)) is None:
            await self._idle.wait()
        try:
            yield channel
        except WorkerError:
            await self._replace(channel)
            raise
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._idle.set()

    async def close(self) -> None:
        async with self._lock:
            await self._hang_up()
        await asyncio.gather(*self._discarded)

    async def _take(self, peer: Peer) -> SendChannel | None:
        """An open channel with one user more; None = not before all users of this one have gone.

        Then a better kind is tried again. Else a worse one might be used for ever, as transfers
        that it makes slow follow each other without a pause.
        """
        async with self._lock:
            if self._channel is not None and self._should_change(self._channel):
                if self._num_users:
                    return None
                await self._hang_up()
            if self._channel is None:
                self._channel = await self._open(peer)
            self._num_users += 1
            self._idle.clear()
            return self._channel

    async def _replace(self, channel: SendChannel) -> None:
        """Closes a channel that failed, unless another user of it has done so already."""
        async with self._lock:
            if self._channel is channel:
                self._choice.count_failure(channel.kind)
                self._choice.forget_unfit()
                await self._hang_up()

    async def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _should_change(self, channel: SendChannel) -> bool:
        """Whether a better kind may be tried again."""
        return channel.kind != self._choice.candidates()[0]

    async def _open(self, peer: Peer) -> SendChannel:
        """Opens the first kind that works. Raises the last one's HandoffError, or WorkerError."""
        candidates = self._choice.candidates()
        reasons: list[str] = []
        for kind in candidates[:-1]:
            try:
                return self._opened(await self._open_kind(peer, kind), reasons)
            except UnfitError as error:
                self._choice.count_unfit(kind)
                reasons.append(f"{kind}: {error}")
            except HandoffError as error:
                self._choice.count_failure(kind)
                reasons.append(f"{kind}: {error}")
        return self._opened(await self._open_kind(peer, candidates[-1]), reasons)

    def _opened(self, channel: SendChannel, reasons: list[str]) -> SendChannel:
        """Logs and counts the chosen kind."""
        if channel.kind == self._choice.favourite:
            logger.info("KV for %s goes by %s", self._name, channel.kind)
            return channel
        self.num_fallbacks += 1
        why = "; ".join(reasons) or "better kinds failed lately or do not fit"
        logger.warning("KV for %s goes by %s (%s)", self._name, channel.kind, why)
        return channel

    async def _open_kind(self, peer: Peer, kind: ChannelKind) -> SendChannel:
        """Open both ends at the same time. Raises UnfitError, HandoffError or WorkerError."""
        offer = self._offer(kind)
        self._epoch += 1
        request = PairRequest(
            sender=self._identity,
            channel=kind,
            epoch=self._epoch,
            rendezvous_key=f"{self._identity.incarnation}/{self._name}/{self._epoch}/",
            offer=offer,
        )
        # The receiver first waits for what is under way on the older epoch, then for us.
        bound_s = 3 * self._config.transfer_deadline_s
        theirs = asyncio.create_task(self._ask(peer, request, bound_s))
        ours = asyncio.create_task(self._open_own(request))
        try:
            _, channel = await asyncio.gather(theirs, ours)  # whichever fails first ends it
        except BaseException:
            theirs.cancel()
            self._discard(ours)
            raise
        return channel

    async def _open_own(self, request: PairRequest) -> SendChannel:
        try:
            return await self._channels.open_send(request)
        except HandoffError:
            raise
        except WorkerError as error:  # the rendezvous is away, which says nothing of the peer
            raise HandoffError(error.message) from error

    async def _ask(self, peer: Peer, request: PairRequest, bound_s: float) -> None:
        self._check(await bounded(peer.open_pair(request), bound_s))

    def _discard(self, opening: asyncio.Task[SendChannel]) -> None:
        """Close an end that is of no use as soon as it is open or has failed, at its deadline."""
        task = asyncio.ensure_future(close_when_open(opening))
        self._discarded.add(task)
        task.add_done_callback(self._discarded.discard)

    def _check(self, reply: PairReply) -> None:
        mine, receiver = self._identity, reply.receiver
        if receiver is None:
            kind_of_error = UnfitError if reply.is_unfit else HandoffError
            raise kind_of_error(f"{self._name} did not open a channel: {reply.reason}")
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
        is_on_gpu: bool = False,
        offer: Offer = no_offer,
    ) -> None:
        """`find_peer(name)` raises WorkerError when there is no such worker (now).

        `is_on_gpu`: where the KV store is. `offer(kind)`: what a request to open says of it, or
        UnfitError. Raises ConfigError when the configured kind of channel needs a GPU.
        """
        self._identity = identity
        self._config = config
        self._channels = channels
        self._find_peer = find_peer
        self._clock = clock
        self._order = channel_order(config, is_on_gpu=is_on_gpu)
        self._offer = offer
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
                name,
                self._identity,
                self._config,
                channels=self._channels,
                choice=ChannelChoice(self._order, self._clock),
                offer=self._offer,
            )
        return self._links[name]

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()

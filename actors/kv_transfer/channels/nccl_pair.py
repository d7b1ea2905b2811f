"""The `nccl_pair` channel: a 2-rank NCCL group per (sender, receiver, epoch), GPU to GPU.

A worker of several ranks is its rank 0 here, whose GPU has the staging; pieces have whole blocks.

Pieces go from a staging slot of the sender to one of the receiver (staging_ring.py): one send a
piece, because NCCL reaches its rate with large messages only, and several sends in one group call
fail with a communicator that does not block. A send is posted while the one before it moves
(posting_thread.py), so the link does not wait for the host. A piece is received into staging;
only complete pieces are copied to their blocks, before the receive ends.

NCCL does not notice a dead peer: the oldest operation has our own deadline, at whose end the group
is aborted. After an abort the GPU goes on computing; the next epoch has a new group. Memory of an
operation whose abort fails or does not end is never used again (kept_memory.py).
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from actors.kv_transfer.channels.gloo_pair import remove_keys
from actors.kv_transfer.channels.handshake import SENDER_RANK, Handshake, exchange_handshakes
from actors.kv_transfer.channels.kept_memory import keep_for_good
from actors.kv_transfer.channels.pair_ends import PairReceiver, PairSender
from actors.kv_transfer.channels.posting_thread import PostingThread
from actors.kv_transfer.channels.rendezvous_store import RendezvousStore
from actors.kv_transfer.channels.staging_ring import RingPiece, StagingRing
from actors.kv_transfer.contracts import OutgoingData, RendezvousClient, StoredBlocks
from actors.kv_transfer.kv_pieces import QueuedTake
from actors.kv_transfer.waits import IsOver
from engine.errors import HandoffError
from engine.messages import ChannelKind, PairRequest
from engine.ranks.nccl_deadlines import NO_WATCHDOG


class PairGroup(Protocol):
    """The two ranks as torch sees them.

    Each operation is posted and returns a function that says whether it has ended. The operations
    of one end run one after the other, in the order in which they were posted.
    """

    def send(self, data: Tensor, loaded: torch.cuda.Event | None = None) -> IsOver:
        """Sends `data` once the event `loaded` has happened on the device; None = at once."""
        ...

    def receive(self, data: Tensor) -> IsOver: ...

    def abort(self) -> None:
        """Ends all operations, from any thread; once it has returned none touches memory."""
        ...


class StagedStore(Protocol):
    """The blocks of a worker as a staging slot of its GPU has them: `KvPieces`, `RankPieces`."""

    device: torch.device

    @property
    def block_bytes(self) -> int: ...

    def queue_load(self, block_ids: Sequence[int], staging: Tensor) -> torch.cuda.Event | None:
        """Copies blocks into `staging`; an event for the end, None = it has ended."""
        ...

    def queue_take(self, staging: Tensor, block_ids: Sequence[int]) -> QueuedTake:
        """Overwrites blocks with `staging`."""
        ...


GroupFactory = Callable[[dist.Store, int], PairGroup]


class NcclGroup:
    """A `ProcessGroupNCCL` of two, with a stream of its own."""

    def __init__(self, store: dist.Store, rank: int, device: torch.device, max_ctas: int) -> None:
        nccl: Any = dist.ProcessGroupNCCL  # not in every build of torch, and its stubs lack half
        options = nccl.Options(is_high_priority_stream=False)
        options._timeout = NO_WATCHDOG
        options.config.blocking = 0  # or an abort would wait for the peer
        options.config.max_ctas = max_ctas
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._peer = 1 - rank
        self._group = nccl(store, rank, 2, options)

    def send(self, data: Tensor, loaded: torch.cuda.Event | None = None) -> IsOver:
        if loaded is not None:
            self._stream.wait_event(loaded)
        return self._post(lambda: self._group.send([data], self._peer, 0))

    def receive(self, data: Tensor) -> IsOver:
        return self._post(lambda: self._group.recv([data], self._peer, 0))

    def abort(self) -> None:
        self._group.abort()

    def _post(self, post: Callable[[], Any]) -> IsOver:
        with torch.cuda.stream(self._stream):
            work = post()
            work.wait()  # only queues a wait: the group works on a stream of its own
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return lambda: bool(event.query())  # type: ignore[no-untyped-call]


class NcclConnection:
    """One end of a pair of GPUs, driven by its own thread in one order."""

    def __init__(
        self, handshake: Handshake, deadline_s: float, ring: StagingRing, pieces: StagedStore
    ) -> None:
        self.deadline_s = deadline_s
        self._handshake = handshake
        self._ring = ring
        self._pieces = pieces
        self._thread = PostingThread(handshake.epoch, deadline_s, self._cut)
        self._cutting = threading.Lock()
        self._store: RendezvousStore | None = None
        self._group: PairGroup | None = None

    @property
    def kind(self) -> ChannelKind:
        return "nccl_pair"

    @property
    def epoch(self) -> int:
        return self._handshake.epoch

    @property
    def is_open(self) -> bool:
        return self._thread.is_open

    async def load(self, data: OutgoingData) -> RingPiece:
        """Returns a staging slot; the piece is copied there when it is sent."""
        assert isinstance(data, StoredBlocks), "an nccl_pair carries blocks of a GPU"
        return await self._ring.acquire(data.nbytes, self.deadline_s, data.block_ids)

    async def room(self, num_bytes: int, into: Sequence[int] | None) -> RingPiece:
        return await self._ring.acquire(num_bytes, self.deadline_s, into)

    def release(self, staged: RingPiece) -> None:
        staged.discard()

    def start_send(self, staged: RingPiece) -> "asyncio.Future[None]":
        sending = _Sending(self._pieces, self._thread, staged)
        return self._thread.start(
            "send", lambda: sending.post(self._require_group()), sending.drain
        )

    def start_receive(self, staged: RingPiece) -> "asyncio.Future[None]":
        receiving = _Receiving(self._pieces, self._thread, staged)
        return self._thread.start(
            "receive", lambda: receiving.post(self._require_group()), receiving.drain
        )

    def start_nothing(self) -> "asyncio.Future[None]":
        return self._thread.start("keep a place", lambda: _at_once)

    async def close(self) -> None:
        """Aborts all operations; a new epoch starts over."""
        await self._thread.close()

    async def open(self, client: RendezvousClient, key: str, make_group: GroupFactory) -> None:
        """Meet the other end, warm up (NCCL connects with the first bytes), check the rate."""
        await self._thread.start("open", lambda: self._open(client, key, make_group))

    # ---- in the thread --------------------------------------------------------------------------

    def send(self, data: Tensor) -> None:
        self._wait("send", data, lambda: self._require_group().send(data))

    def receive(self, data: Tensor) -> None:
        self._wait("receive", data, lambda: self._require_group().receive(data))

    def _wait(self, verb: str, data: Tensor, post: Callable[[], IsOver]) -> None:
        try:
            self._thread.wait(verb, post)
        except BaseException:
            if not self._thread.has_cut:
                keep_for_good(data)
            raise

    def _open(self, client: RendezvousClient, key: str, make_group: GroupFactory) -> IsOver:
        store = RendezvousStore(client, self.deadline_s)
        group = make_group(dist.PrefixStore(key, store), self._handshake.rank)
        with self._cutting:
            self._group, self._store = group, store
        del group  # an aborted group must be dropped
        if self._thread.is_aborted:  # the abort came before there was a group
            self._cut()
        exchange_handshakes(self, self._handshake)
        if self._handshake.rank == SENDER_RANK:
            remove_keys(client, key)
        return _at_once

    def _require_group(self) -> PairGroup:
        if self._group is None:
            raise HandoffError(f"the channel of epoch {self.epoch} is closed")
        return self._group

    def _cut(self) -> None:
        """Aborts the group; from any thread. NCCL may call the store until the group is gone."""
        with self._cutting:
            group, self._group = self._group, None
            store, self._store = self._store, None
        if group is not None:
            group.abort()
        del group, store  # in this order


class _Sending:
    """A piece that is copied into staging and then sent."""

    def __init__(self, pieces: StagedStore, thread: PostingThread, staged: RingPiece) -> None:
        self._pieces = pieces
        self._thread = thread
        self._staged = staged
        self._is_posted = False
        self._loaded: torch.cuda.Event | None = None  # None = it is loaded

    def post(self, group: PairGroup) -> IsOver:
        staged = self._staged
        assert staged.block_ids is not None, "there is nothing to send"
        self._loaded = self._pieces.queue_load(staged.block_ids, staged.staging)
        self._is_posted = True
        return group.send(staged.staging, self._loaded)

    def drain(self) -> None:
        if self._loaded is not None:
            self._loaded.synchronize()
        if self._is_posted and not self._thread.has_cut:
            self._staged.lose()


class _Receiving:
    """A piece that is received and then written to its blocks, if it is still wanted.

    The copy is queued when the piece has arrived, so that an aborted receive is never written.
    """

    def __init__(self, pieces: StagedStore, thread: PostingThread, staged: RingPiece) -> None:
        self._pieces = pieces
        self._thread = thread
        self._staged = staged
        self._is_posted = False
        self._has_come: IsOver | None = None
        self._take: QueuedTake | None = None

    def post(self, group: PairGroup) -> IsOver:
        self._is_posted = True
        self._has_come = group.receive(self._staged.staging)
        return self._is_over

    def drain(self) -> None:
        if self._take is not None:
            self._take.wait()
        if self._is_posted and not self._thread.has_cut:
            self._staged.lose()

    def _is_over(self) -> bool:
        staged = self._staged
        if self._take is None:
            assert self._has_come is not None, "it was posted"
            if not self._has_come() or self._thread.is_aborted:
                return False
            if not staged.block_ids:
                return True
            self._take = self._pieces.queue_take(staged.staging, staged.block_ids)
        if not self._take.is_over():
            return False
        staged.digests = self._take.digests.tolist()
        return True


def _at_once() -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclSettings:
    deadline_s: float
    piece_bytes: int  # the largest piece; NUM_SLOTS of them are staged
    max_ctas: int  # SMs that a communicator may take
    max_pairs: int  # open at a time
    floor_gb_s: float


class NcclPairs:
    """The pairs of one worker, limited in number, over one staging ring."""

    def __init__(
        self,
        pieces: StagedStore,
        settings: NcclSettings,
        make_group: GroupFactory | None = None,
    ) -> None:
        """`make_group(store, rank)`; None = NCCL on the device of `pieces`."""
        self._pieces = pieces
        self._settings = settings
        self._make_group = make_group or self._make_nccl_group
        self._ring = StagingRing(pieces.device, max(settings.piece_bytes, pieces.block_bytes))
        self._connections: list[NcclConnection] = []

    @property
    def num_open(self) -> int:
        return sum(connection.is_open for connection in self._connections)

    @property
    def num_free_slots(self) -> int:
        return self._ring.num_free

    async def open_send(
        self, request: PairRequest, client: RendezvousClient
    ) -> PairSender[RingPiece]:
        return PairSender(await self._connect(request, client, SENDER_RANK))

    async def open_receive(
        self, request: PairRequest, client: RendezvousClient
    ) -> PairReceiver[RingPiece]:
        return PairReceiver(await self._connect(request, client, 1 - SENDER_RANK))

    async def _connect(
        self, request: PairRequest, client: RendezvousClient, rank: int
    ) -> NcclConnection:
        self._connections = [c for c in self._connections if c.is_open]
        settings = self._settings
        if len(self._connections) >= settings.max_pairs:
            raise HandoffError(
                f"{settings.max_pairs} nccl pairs are open already (handoff.max_nccl_pairs)"
            )
        handshake = Handshake(
            epoch=request.epoch,
            rank=rank,
            device=self._pieces.device,
            floor_gb_s=settings.floor_gb_s,
        )
        connection = NcclConnection(handshake, settings.deadline_s, self._ring, self._pieces)
        self._connections.append(connection)
        try:
            await connection.open(client, request.rendezvous_key, self._make_group)
        except BaseException:
            await connection.close()
            raise
        return connection

    def _make_nccl_group(self, store: dist.Store, rank: int) -> PairGroup:
        return NcclGroup(store, rank, self._pieces.device, self._settings.max_ctas)

"""The `nccl_pair` channel: a 2-rank NCCL group per (sender, receiver, epoch), GPU to GPU.

Pieces go from a staging slot of the sender to one of the receiver (staging_ring.py): one send a
piece, because NCCL reaches its rate with large messages only, and several sends in one group call
fail with a communicator that does not block. What is late lands in staging, never in the KV store.

NCCL does not notice a dead peer: every operation has our own deadline, and a timer that aborts the
group at the end of it. After an abort the GPU goes on computing; the next epoch has a new group.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from actors.handoff.contracts import OutgoingData, RendezvousClient, StoredBlocks
from actors.handoff.gloo_pair import remove_keys
from actors.handoff.kv_pieces import KvPieces
from actors.handoff.pair_ends import PairReceiver, PairSender
from actors.handoff.pair_proof import SENDER_RANK, Greeting, greet
from actors.handoff.pair_thread import PairThread
from actors.handoff.rendezvous_store import RendezvousStore
from actors.handoff.staging_ring import RingPiece, StagingRing
from engine.errors import HandoffError
from engine.messages import ChannelKind, PairRequest

T = TypeVar("T")

POLL_S = 50e-6  # between two looks at an operation; 256 MiB take about 700 us
ABORT_S = 10.0  # an abort takes half a second; after so long its thread is given up
# NCCL's own timeout would end the process: ours comes first.
GROUP_TIMEOUT_FACTOR = 10.0


class PairGroup(Protocol):
    """The two ranks as torch sees them.

    Each operation starts and returns whether it is over. It does not wait for other work on the
    device: what is sent must be there.
    """

    def send(self, data: Tensor) -> Callable[[], bool]: ...

    def receive(self, data: Tensor) -> Callable[[], bool]: ...

    def abort(self) -> None:
        """End what is under way, from any thread; no operation of this end touches memory after."""
        ...


class NcclGroup:
    """A `ProcessGroupNCCL` of two, with a stream of its own."""

    def __init__(
        self, store: dist.Store, rank: int, device: torch.device, max_ctas: int, timeout_s: float
    ) -> None:
        nccl: Any = dist.ProcessGroupNCCL  # not in every build of torch, and its stubs lack half
        options = nccl.Options(is_high_priority_stream=False)
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0  # or an abort would wait for the peer
        options.config.max_ctas = max_ctas
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._peer = 1 - rank
        self._group = nccl(store, rank, 2, options)

    def send(self, data: Tensor) -> Callable[[], bool]:
        return self._start(lambda: self._group.send([data], self._peer, 0))

    def receive(self, data: Tensor) -> Callable[[], bool]:
        return self._start(lambda: self._group.recv([data], self._peer, 0))

    def abort(self) -> None:
        self._group.abort()

    def _start(self, post: Callable[[], Any]) -> Callable[[], bool]:
        with torch.cuda.stream(self._stream):
            work = post()
            work.wait()  # queues: the group works on a stream of its own, ours waits for it
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return lambda: bool(event.query())  # type: ignore[no-untyped-call]


GroupFactory = Callable[[dist.Store, int], PairGroup]


class NcclConnection:
    """One end of a pair of GPUs, driven by its own thread in one order."""

    def __init__(
        self, greeting: Greeting, deadline_s: float, ring: StagingRing, pieces: KvPieces
    ) -> None:
        self.deadline_s = deadline_s
        self._greeting = greeting
        self._ring = ring
        self._pieces = pieces
        self._thread = PairThread(greeting.epoch, self._hang_up)
        self._aborting = threading.Lock()
        self._is_aborted = threading.Event()  # or about to be
        self._abort_done = threading.Event()
        self._store: RendezvousStore | None = None  # NCCL may call it as long as the group lives
        self._group: PairGroup | None = None

    @property
    def kind(self) -> ChannelKind:
        return "nccl_pair"

    @property
    def epoch(self) -> int:
        return self._greeting.epoch

    @property
    def is_open(self) -> bool:
        return self._thread.is_open

    def start(self, operation: Callable[[], T]) -> "asyncio.Future[T]":
        return self._thread.start(operation)

    async def load(self, data: OutgoingData) -> RingPiece:
        assert isinstance(data, StoredBlocks), "an nccl_pair carries blocks of a GPU"
        piece = await self._ring.acquire(data.nbytes, self.deadline_s)
        try:
            await self._pieces.load(data, piece.staging)
        except BaseException:
            piece.discard()
            raise
        return piece

    async def room(self, num_bytes: int) -> RingPiece:
        return await self._ring.acquire(num_bytes, self.deadline_s)

    def release(self, staged: RingPiece) -> None:
        staged.discard()

    async def close(self) -> None:
        """Abort, which ends what is under way: it is staged only, and a new epoch starts over."""
        self._thread.is_open = False
        await asyncio.to_thread(self._abort)
        await self._thread.close()

    # ---- operations, in the thread --------------------------------------------------------------

    def open(self, client: RendezvousClient, key: str, make_group: GroupFactory) -> None:
        """Meet the other end, warm up (NCCL connects with the first bytes), prove the rate."""
        self._store = RendezvousStore(client, self.deadline_s)
        self._group = make_group(dist.PrefixStore(key, self._store), self._greeting.rank)
        greet(self, self._greeting)
        if self._greeting.rank == SENDER_RANK:
            remove_keys(client, key)

    def send_staged(self, staged: RingPiece) -> None:
        self.send(staged.staging)

    def receive_staged(self, staged: RingPiece) -> None:
        self.receive(staged.staging)

    def send(self, data: Tensor) -> None:
        self._finish("send", lambda group: group.send(data))

    def receive(self, data: Tensor) -> None:
        self._finish("receive", lambda group: group.receive(data))

    def _finish(self, verb: str, start: Callable[[PairGroup], Callable[[], bool]]) -> None:
        """Start an operation and wait for its end, or for that of the deadline's abort."""
        group = self._group
        if group is None or self._is_aborted.is_set():
            raise HandoffError(f"the channel of epoch {self.epoch} is closed")
        deadline = threading.Timer(self.deadline_s, self._abort)
        deadline.daemon = True
        deadline.start()
        try:
            is_over = start(group)  # may itself wait for the peer, the first time
            while not self._is_aborted.is_set() and not is_over():
                time.sleep(POLL_S)
        finally:
            deadline.cancel()
        if self._is_aborted.is_set():
            self._abort_done.wait(ABORT_S)
            raise HandoffError(f"the channel did not {verb}: closed, or not in {self.deadline_s} s")

    def _abort(self) -> None:
        """From any thread, any number of times; returns when the abort is over."""
        with self._aborting:
            is_first = not self._is_aborted.is_set()
            self._is_aborted.set()
        if not is_first:
            self._abort_done.wait(ABORT_S)
            return
        group = self._group
        try:
            if group is not None:
                group.abort()
        finally:
            self._abort_done.set()

    def _hang_up(self) -> None:
        """In the thread."""
        self._abort()
        self._group = None  # before its store
        self._store = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclSettings:
    deadline_s: float
    piece_bytes: int  # the largest piece; two of them are staged
    max_ctas: int  # SMs that a communicator may take
    max_pairs: int  # open at a time
    floor_gb_s: float


class NcclPairs:
    """The pairs of one worker: at most so many, over one staging ring."""

    def __init__(
        self,
        pieces: KvPieces,
        settings: NcclSettings,
        make_group: GroupFactory | None = None,
    ) -> None:
        """`make_group(store, rank)`; None = NCCL on the device of `pieces`."""
        self._pieces = pieces
        self._settings = settings
        self._make_group = make_group or self._make_nccl_group
        self._ring = StagingRing(pieces, max(settings.piece_bytes, pieces.block_bytes))
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
        greeting = Greeting(
            epoch=request.epoch,
            rank=rank,
            device=self._pieces.device,
            floor_gb_s=settings.floor_gb_s,
        )
        connection = NcclConnection(greeting, settings.deadline_s, self._ring, self._pieces)
        self._connections.append(connection)
        try:
            key = request.rendezvous_key
            await connection.start(lambda: connection.open(client, key, self._make_group))
        except BaseException:
            await connection.close()
            raise
        return connection

    def _make_nccl_group(self, store: dist.Store, rank: int) -> PairGroup:
        settings = self._settings
        timeout_s = GROUP_TIMEOUT_FACTOR * settings.deadline_s
        return NcclGroup(store, rank, self._pieces.device, settings.max_ctas, timeout_s)

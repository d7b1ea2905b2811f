"""KV channels of a worker: bytes of whole blocks from a prefill worker to a decode worker.

A channel carries pieces (runs of blocks) from one sender to one receiver and counts them by
sequence number. The piece's header goes by RPC, the bytes beside it:

    gloo_pair     a 2-rank gloo group per (sender, receiver, epoch): bytes over a TCP connection
    object_store  bytes as an object in Ray's shared memory (actors/handoff/object_store_channel.py)

What listens where: the two ends meet on a Ray actor (actors/rendezvous.py), so there is no
TCPStore, which would listen on all interfaces. Gloo itself listens on one port per group end, on
the `address` given and no other: loopback on a single host, the private interface's between hosts.

Any failure ends a channel for good: it closes, and the next one has a higher epoch. Bytes arrive in
staging buffers, never in the KV store, so nothing late can land there. The only actor module that
knows torch; knows no requests, no reservations and no owners of blocks.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from actors.handoff.contracts import (
    Deliver,
    PieceBytes,
    ReceiveChannel,
    SendChannel,
    StagedPiece,
)
from actors.handoff.object_store_channel import (
    ByteBudget,
    ObjectStoreReceiver,
    ObjectStoreSender,
    acknowledged,
)
from actors.handoff.waits import end_thread
from actors.rendezvous import RendezvousClient
from engine.errors import HandoffError, WorkerError
from engine.messages import ChannelKind, PairRequest, PieceReply

logger = logging.getLogger(__name__)

T = TypeVar("T")

SENDER_RANK, RECEIVER_RANK = 0, 1


class BlockStore(Protocol):
    """The tensor side of the KV cache (engine/kv/kv_store.py)."""

    def gather(self, block_ids: Sequence[int]) -> Tensor:
        """A contiguous copy [n, *block_shape]."""
        ...

    def scatter(self, block_ids: Sequence[int], data: Tensor) -> None:
        """Overwrite blocks with `data`: uint8, as many bytes."""
        ...

    def digest_staged(self, data: Tensor) -> list[int]:
        """Checksum of each of the n blocks in `data`."""
        ...


class KvPieces:
    """Blocks of a KV store as bytes in host memory, copied in threads of its own."""

    def __init__(self, store: BlockStore, *, num_threads: int = 2) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-copy")

    async def read(self, block_ids: Sequence[int]) -> StagedPiece:
        return await self._run(lambda: self._read(block_ids))

    async def write(self, block_ids: Sequence[int], piece: StagedPiece) -> bool:
        return await self._run(lambda: self._write(block_ids, piece))

    def close(self) -> None:
        """Wait for the copies under way; later ones fail."""
        self._threads.shutdown(wait=True)

    def _read(self, block_ids: Sequence[int]) -> StagedPiece:
        blocks = self._store.gather(block_ids)
        data: PieceBytes = blocks.view(-1).view(torch.uint8).cpu().numpy()
        return StagedPiece(data=data, digests=self._store.digest_staged(blocks))

    def _write(self, block_ids: Sequence[int], piece: StagedPiece) -> bool:
        data = torch.from_numpy(piece.data)
        if self._store.digest_staged(data) != piece.digests:
            return False
        self._store.scatter(block_ids, data)
        return True

    async def _run(self, copy: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, copy)


class WorkerChannels:
    """The channels of one worker process."""

    def __init__(
        self,
        rendezvous: RendezvousClient,
        *,
        address: str,
        deadline_s: float,
        max_in_flight_bytes: int,
    ) -> None:
        """`address` is where gloo listens (see above); `deadline_s` bounds every operation."""
        self._rendezvous = rendezvous
        self._address = address
        self._deadline_s = deadline_s
        self._budget = ByteBudget(max_in_flight_bytes)

    async def open_send(self, request: PairRequest) -> SendChannel:
        if request.channel == "object_store":
            return ObjectStoreSender(request.epoch, self._deadline_s, self._budget)
        return GlooSender(await self._connect(request, SENDER_RANK))

    async def open_receive(self, request: PairRequest) -> ReceiveChannel:
        if request.channel == "object_store":
            return ObjectStoreReceiver(request.epoch, self._deadline_s)
        return GlooReceiver(await self._connect(request, RECEIVER_RANK))

    async def _connect(self, request: PairRequest, rank: int) -> "GlooConnection":
        connection = GlooConnection(request.epoch, rank, self._deadline_s)
        try:
            await connection.run(
                partial(connection.open, self._rendezvous, request.rendezvous_key, self._address)
            )
        except BaseException:
            await connection.close()
            raise
        return connection


class RayStore(dist.Store):
    """torch's key-value store over the rendezvous, in place of a TCP listener.

    Called by gloo, from C++, in the thread that opens the group. Must outlive the group: keep a
    reference to the Python object.
    """

    def __init__(self, client: RendezvousClient, timeout_s: float) -> None:
        super().__init__()
        self._client = client
        self._timeout = timedelta(seconds=timeout_s)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._client.get([key], self._timeout.total_seconds())[0]

    def add(self, key: str, value: int) -> int:
        return self._client.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._client.get(keys, (timeout or self._timeout).total_seconds())

    def check(self, keys: list[str]) -> bool:
        return self._client.has(keys)

    def num_keys(self) -> int:
        return self._client.num_keys()

    def delete_key(self, key: str) -> bool:
        return self._client.delete(key)

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._client.get(keys, self._timeout.total_seconds())

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


class GlooConnection:
    """One end of a 2-rank gloo group, driven by its own thread in one order.

    Gloo cannot be interrupted: every operation has a deadline instead, and after the first failure
    the group is dropped, which the other end sees as a closed connection.
    """

    def __init__(self, epoch: int, rank: int, deadline_s: float) -> None:
        self.epoch = epoch
        self.deadline_s = deadline_s
        self.is_open = True
        self._rank = rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-pair-{epoch}")
        # Touched by the thread only:
        self._store: RayStore | None = None  # gloo may call it as long as the group lives
        self._group: Any = None  # ProcessGroupGloo

    async def run(self, operation: Callable[[], T]) -> T:
        """Queue `operation` for the thread and wait for it; its failure breaks the connection."""
        return await self.start(operation)

    def start(self, operation: Callable[[], T]) -> "asyncio.Future[T]":
        """`run`, but the place in the queue is taken at once."""
        if not self.is_open:
            raise HandoffError(f"the channel of epoch {self.epoch} is closed")
        return asyncio.get_running_loop().run_in_executor(self._thread, self._guard, operation)

    async def close(self) -> None:
        """Refuse new operations, wait for the queued ones (bounded by their deadlines), hang up."""
        self.is_open = False
        await end_thread(self._thread, self._drop)

    # ---- operations, in the thread --------------------------------------------------------------

    def open(self, client: RendezvousClient, key: str, address: str) -> None:
        """Meet the other end, connect, and exchange the epoch once in both directions."""
        gloo: Any = dist.ProcessGroupGloo  # its stubs lack half of it
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.deadline_s)
        options._threads = 1
        options._devices = [gloo.create_device(hostname=address)]
        self._store = RayStore(client, self.deadline_s)
        self._group = gloo(dist.PrefixStore(key, self._store), self._rank, 2, options)
        mine, theirs = torch.tensor([self.epoch]), torch.tensor([-1])
        if self._rank == SENDER_RANK:
            self.send(mine)
            self.receive(theirs)
            self._remove_keys(client, key)
        else:
            self.receive(theirs)
            self.send(mine)
        if theirs.item() != self.epoch:
            raise HandoffError(f"epoch {theirs.item()} met epoch {self.epoch}")

    def send(self, data: Tensor) -> None:
        group = self._require_group()
        self._wait(group.send([data], 1 - self._rank, 0), "send")

    def receive(self, data: Tensor) -> None:
        group = self._require_group()
        self._wait(group.recv([data], 1 - self._rank, 0), "receive")

    def _wait(self, work: Any, verb: str) -> None:  # noqa: ANN401 - torch types it loosely
        if not work.wait(timedelta(seconds=self.deadline_s)):
            raise HandoffError(f"the channel did not {verb} within {self.deadline_s} s")

    def _require_group(self) -> Any:  # noqa: ANN401
        if self._group is None:
            raise HandoffError(f"the channel of epoch {self.epoch} is closed")
        return self._group

    def _remove_keys(self, client: RendezvousClient, key: str) -> None:
        try:
            client.delete_prefix(key)
        except WorkerError as error:  # they expire by themselves
            logger.warning("keys of an open channel stay in the rendezvous: %s", error)

    def _guard(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except WorkerError as error:
            failure = error.with_traceback(None)
        except RuntimeError as error:  # what gloo raises: a closed connection, a deadline
            failure = HandoffError(f"the channel of epoch {self.epoch} broke: {error}")
        # Raised out here and without the frames it came from: they hold the group, which must go
        # now, because dropping it is what hangs up.
        self._drop()
        raise failure

    def _drop(self) -> None:
        self.is_open = False
        self._group = None  # hangs up
        self._store = None


class GlooSender:
    """The sending end of a `gloo_pair`."""

    def __init__(self, connection: GlooConnection) -> None:
        self._connection = connection
        self._order = asyncio.Lock()  # fair: first come, first served
        self._next_seq = 0

    @property
    def kind(self) -> ChannelKind:
        return "gloo_pair"

    @property
    def epoch(self) -> int:
        return self._connection.epoch

    async def send(self, data: PieceBytes | None, deliver: Deliver) -> PieceReply:
        connection = self._connection
        async with self._order:
            if not connection.is_open:
                raise HandoffError(f"the channel of epoch {self.epoch} is closed")
            seq, self._next_seq = self._next_seq, self._next_seq + 1
            # The receiver posts its receive when it has the header: both must be under way.
            reply = asyncio.ensure_future(deliver(seq, []))
            try:
                if data is not None:
                    await connection.run(partial(connection.send, torch.from_numpy(data)))
            except BaseException:
                reply.cancel()
                raise
        return await acknowledged(reply, connection.deadline_s)

    async def close(self) -> None:
        await self._connection.close()


class GlooReceiver:
    """The receiving end of a `gloo_pair`: headers may overtake each other, bytes may not."""

    def __init__(self, connection: GlooConnection) -> None:
        self._connection = connection
        self._next_seq = 0
        self._claimed: set[int] = set()  # numbers from _next_seq on
        self._early: dict[int, asyncio.Future[None]] = {}

    @property
    def epoch(self) -> int:
        return self._connection.epoch

    def claim(self, seq: int) -> bool:
        if seq < self._next_seq or seq in self._claimed:
            return False
        self._claimed.add(seq)
        return True

    async def receive(self, seq: int, num_bytes: int, payload: list[Any]) -> PieceBytes:
        assert seq in self._claimed, f"piece {seq} of epoch {self.epoch} was not claimed"
        if payload:
            raise HandoffError("a gloo piece came with an object reference")
        if seq > self._next_seq:
            await self._wait_for_turn(seq)
        received = self._connection.start(partial(self._receive, num_bytes))
        self._claimed.remove(seq)
        self._next_seq += 1
        self._wake(self._next_seq)
        try:
            return await received
        except WorkerError as error:
            self._fail_early(error.message)
            raise

    async def close(self) -> None:
        self._fail_early("it is closing")
        await self._connection.close()

    def _receive(self, num_bytes: int) -> PieceBytes:
        data: PieceBytes = np.empty(num_bytes, dtype=np.uint8)
        if num_bytes:
            self._connection.receive(torch.from_numpy(data))
        return data

    async def _wait_for_turn(self, seq: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._early[seq] = turn
        try:
            async with asyncio.timeout(self._connection.deadline_s):
                await turn
        except TimeoutError as error:
            raise HandoffError(f"piece {self._next_seq} never came, {seq} did") from error
        finally:
            del self._early[seq]

    def _wake(self, seq: int) -> None:
        turn = self._early.get(seq)
        if turn is not None and not turn.done():
            turn.set_result(None)

    def _fail_early(self, reason: str) -> None:
        for turn in self._early.values():
            if not turn.done():
                turn.set_exception(HandoffError(f"channel of epoch {self.epoch}: {reason}"))

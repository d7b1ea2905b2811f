"""The `gloo_pair` channel: a 2-rank gloo group per (sender, receiver, epoch), bytes over TCP.

What listens where: the two ends meet on a board (rendezvous_store.py), so there is no TCPStore,
which would listen on all interfaces. Gloo itself listens on one port per group end, on the
`address` given and no other: loopback on a single host, the private interface's between hosts.

One thread drives each end, in one order, until something fails. Pieces arrive in host memory, never
in the KV store.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actors.kv_transfer.channels.handshake import SENDER_RANK, Handshake, exchange_handshakes
from actors.kv_transfer.channels.host_staging import pageable
from actors.kv_transfer.channels.pair_ends import PairReceiver, PairSender
from actors.kv_transfer.channels.rendezvous_store import RendezvousStore
from actors.kv_transfer.contracts import OutgoingData, PieceBytes, RendezvousClient, StoredBlocks
from actors.kv_transfer.waits import end_thread
from engine.errors import HandoffError, WorkerError
from engine.messages import ChannelKind

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")

GLOO_PATIENCE = 5  # a listening end waits for the other's connection this many times its timeout


class PairThread:
    """Runs a connection's operations one after the other; the first failure ends it for good."""

    def __init__(self, epoch: int, hang_up: Callable[[], None]) -> None:
        """`hang_up` drops the connection; called in the thread, at least once, idempotent."""
        self.epoch = epoch
        self.is_open = True
        self._hang_up = hang_up
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-pair-{epoch}")

    def start(self, operation: Callable[[], None]) -> "asyncio.Future[None]":
        """Queues `operation`; its place in the order is fixed at once. Its failure breaks the
        connection.

        Raises HandoffError, here or from the future, when the connection is closed or breaks.
        """
        if not self.is_open:
            raise HandoffError(f"the channel of epoch {self.epoch} is closed")
        return asyncio.get_running_loop().run_in_executor(self._thread, self._guard, operation)

    async def close(self) -> None:
        """Refuse new operations, wait for the queued ones (bounded by their deadlines), hang up."""
        self.is_open = False
        await end_thread(self._thread, self._hang_up)

    def _guard(self, operation: Callable[[], None]) -> None:
        try:
            operation()
            return
        except WorkerError as error:
            failure = error.with_traceback(None)
        except RuntimeError as error:  # what torch raises: a closed connection, a deadline
            failure = HandoffError(f"the channel of epoch {self.epoch} broke: {error}")
        # Raised here and without its frames: those hold the group, which must be dropped now,
        # because that closes the connection.
        self.is_open = False
        self._hang_up()
        raise failure


class GlooWire:
    """A gloo group of two; its calls block, each up to a deadline, and one runs at a time.

    Gloo cannot be interrupted, so after a failure it must be closed, which the other end sees.
    """

    device = _CPU

    def __init__(self, handshake: Handshake, deadline_s: float, address: str) -> None:
        """address: where it listens while it opens."""
        self._handshake = handshake
        self._deadline_s = deadline_s
        self._address = address
        self._store: RendezvousStore | None = None  # gloo may call it as long as the group lives
        self._group: Any = None  # ProcessGroupGloo

    def open(self, client: RendezvousClient, key: str) -> None:
        """Meets the other end, connects, exchanges epochs and checks the rate."""
        gloo: Any = dist.ProcessGroupGloo  # its stubs lack half of it
        options = gloo._Options()
        # Of the connecting alone: the store has its own deadline, and so has every operation.
        options._timeout = timedelta(seconds=self._deadline_s / GLOO_PATIENCE)
        options._threads = 1
        options._devices = [gloo.create_device(hostname=self._address)]
        rank = self._handshake.rank
        self._store = RendezvousStore(client, self._deadline_s)
        self._group = gloo(dist.PrefixStore(key, self._store), rank, 2, options)
        exchange_handshakes(self, self._handshake)
        if rank == SENDER_RANK:
            remove_keys(client, key)

    def send(self, data: Tensor) -> None:
        self._wait(self._require_group().send([data], 1 - self._handshake.rank, 0), "send")

    def receive(self, data: Tensor) -> None:
        self._wait(self._require_group().recv([data], 1 - self._handshake.rank, 0), "receive")

    def close(self) -> None:
        """Hangs up."""
        self._group = None
        self._store = None

    def _wait(self, work: Any, verb: str) -> None:  # noqa: ANN401 - torch types it loosely
        if not work.wait(timedelta(seconds=self._deadline_s)):
            raise HandoffError(f"the channel did not {verb} within {self._deadline_s} s")

    def _require_group(self) -> Any:  # noqa: ANN401
        if self._group is None:
            raise HandoffError(f"the channel of epoch {self._handshake.epoch} is closed")
        return self._group


class GlooConnection:
    """One end of a pair: a wire that is driven by its own thread in one order."""

    def __init__(
        self,
        epoch: int,
        rank: int,
        deadline_s: float,
        *,
        address: str,
        floor_gb_s: float = 0.0,
        empty: Callable[[int], PieceBytes] = pageable,
    ) -> None:
        """`empty(num_bytes)` makes a buffer to receive into; address: as of `GlooWire`."""
        self.deadline_s = deadline_s
        handshake = Handshake(epoch=epoch, rank=rank, device=_CPU, floor_gb_s=floor_gb_s)
        self._empty = empty
        self._wire = GlooWire(handshake, deadline_s, address)  # touched by the thread only
        self._thread = PairThread(epoch, self._wire.close)

    @property
    def kind(self) -> ChannelKind:
        return "gloo_pair"

    @property
    def epoch(self) -> int:
        return self._thread.epoch

    @property
    def is_open(self) -> bool:
        return self._thread.is_open

    def start_send(self, staged: PieceBytes) -> "asyncio.Future[None]":
        return self._thread.start(lambda: self._wire.send(torch.from_numpy(staged)))

    def start_receive(self, staged: PieceBytes) -> "asyncio.Future[None]":
        return self._thread.start(lambda: self._wire.receive(torch.from_numpy(staged)))

    def start_nothing(self) -> "asyncio.Future[None]":
        return self._thread.start(lambda: None)

    async def load(self, data: OutgoingData) -> PieceBytes:
        assert not isinstance(data, StoredBlocks), "blocks of a GPU go through host memory first"
        return data

    async def room(self, num_bytes: int, into: Sequence[int] | None) -> PieceBytes:
        return self._empty(num_bytes)

    def release(self, staged: PieceBytes) -> None:
        """Does nothing: host memory is freed with its last reference."""

    async def open(self, client: RendezvousClient, key: str) -> None:
        """Meet the other end, connect, exchange epochs and check the rate."""
        await self._thread.start(lambda: self._wire.open(client, key))

    async def close(self) -> None:
        """Refuse new operations, wait for the queued ones (bounded by their deadlines), hang up."""
        await self._thread.close()


def remove_keys(client: RendezvousClient, key: str) -> None:
    """Removes the board's keys, which an open pair does not need; others expire by themselves."""
    try:
        client.delete_prefix(key)
    except WorkerError as error:
        logger.warning("keys of an open channel stay in the rendezvous: %s", error)


class GlooSender(PairSender[PieceBytes]):
    """The sending end of a `gloo_pair`."""


class GlooReceiver(PairReceiver[PieceBytes]):
    """The receiving end of a `gloo_pair`."""

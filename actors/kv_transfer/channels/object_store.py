"""The `object_store` channel: a piece is an object in Ray's shared memory, sent by reference.

It is the fallback that works wherever Ray does. The bytes alive at any time are bounded, so that KV
is never spilled to a disk; the sender owns the objects, so they die with it. Knows nothing of
blocks.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import ray
from ray.exceptions import RayError

from actors.kv_transfer.channels.host_staging import pageable
from actors.kv_transfer.contracts import (
    Deliver,
    OutgoingData,
    Payload,
    PieceBytes,
    PieceNumbers,
    StoredBlocks,
)
from actors.kv_transfer.waits import acknowledged, end_thread
from engine.errors import HandoffError
from engine.messages import ChannelKind, PieceReply


class ByteBudget:
    """Bounds the bytes alive in the object store, so that KV is never spilled to a disk."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._turn = asyncio.Lock()  # fair, so that a large piece is not overtaken for ever
        self._freed: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Waits for budget, then counts `num_bytes` as used inside the block.

        A piece that is larger than the bound, as a single block may be, goes alone.
        """
        async with self._turn:
            while self.used_bytes and self.used_bytes + num_bytes > self.max_bytes:
                self._freed = asyncio.get_running_loop().create_future()
                await self._freed
            self.used_bytes += num_bytes
        try:
            yield
        finally:
            self.used_bytes -= num_bytes
            if self._freed is not None and not self._freed.done():
                self._freed.set_result(None)


class ObjectStoreSender:
    """The sending end of an `object_store` channel."""

    def __init__(self, epoch: int, deadline_s: float, budget: ByteBudget) -> None:
        self._epoch = epoch
        self._deadline_s = deadline_s
        self._budget = budget
        self._next_seq = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-put-{epoch}")
        self._is_open = True

    @property
    def kind(self) -> ChannelKind:
        return "object_store"

    @property
    def epoch(self) -> int:
        return self._epoch

    async def send(self, data: OutgoingData | None, deliver: Deliver) -> PieceReply:
        assert not isinstance(data, StoredBlocks), "blocks of a GPU go through host memory first"
        num_bytes = 0 if data is None else data.nbytes
        async with self._budget.hold(num_bytes):
            if not self._is_open:
                raise HandoffError(f"the channel of epoch {self._epoch} is closed")
            seq, self._next_seq = self._next_seq, self._next_seq + 1
            payload: Payload = [] if data is None else [await self._put(data)]
            reply = asyncio.ensure_future(deliver(seq, payload))
            return await acknowledged(reply, self._deadline_s)

    async def close(self) -> None:
        self._is_open = False
        await end_thread(self._thread, _nothing)

    async def _put(self, data: PieceBytes) -> object:
        loop = asyncio.get_running_loop()
        try:
            # numpy's uint8 goes through shared memory with one copy; a tensor would take several.
            return await loop.run_in_executor(self._thread, ray.put, data)
        except RayError as error:
            raise HandoffError(f"the object store did not take a piece: {error}") from error


class ObjectStoreReceiver:
    """The receiving end of an `object_store` channel: pieces may come in any order."""

    def __init__(
        self, epoch: int, deadline_s: float, empty: Callable[[int], PieceBytes] = pageable
    ) -> None:
        """`empty(num_bytes)` makes a buffer to receive into."""
        self._epoch = epoch
        self._deadline_s = deadline_s
        self._empty = empty
        self._numbers = PieceNumbers()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-get-{epoch}")
        self._is_open = True

    @property
    def epoch(self) -> int:
        return self._epoch

    def claim(self, seq: int) -> bool:
        return self._numbers.claim(seq)

    async def receive(
        self,
        seq: int,
        num_bytes: int,
        payload: Payload,
        into: Sequence[int] | None = None,
    ) -> PieceBytes:
        if not self._is_open:
            raise HandoffError(f"the channel of epoch {self._epoch} is closed")
        assert seq in self._numbers, f"piece {seq} of epoch {self._epoch} was not claimed"
        if len(payload) != (1 if num_bytes else 0):
            raise HandoffError(f"{len(payload)} objects came for {num_bytes} bytes")
        fetch = partial(self._fetch, num_bytes, payload)
        return await asyncio.get_running_loop().run_in_executor(self._thread, fetch)

    async def close(self) -> None:
        self._is_open = False
        await end_thread(self._thread, _nothing)

    def _fetch(self, num_bytes: int, payload: Payload) -> PieceBytes:
        """Copies the object out of shared memory, so that its bytes are freed at once."""
        data = self._empty(num_bytes)
        if not payload:
            return data
        reference = payload[0]
        if not isinstance(reference, ray.ObjectRef):
            raise HandoffError(f"a piece came as {type(reference).__name__}, not as a reference")
        try:
            array = ray.get(reference, timeout=self._deadline_s)
        except RayError as error:  # lost, its owner died, or not there in time
            raise HandoffError(f"a piece's object cannot be read: {error}") from error
        if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
            raise HandoffError(f"a piece came as {type(array).__name__}, not as bytes")
        if array.shape != (num_bytes,):
            raise HandoffError(f"{num_bytes} bytes were announced, {array.shape} came")
        np.copyto(data, array)
        return data


def _nothing() -> None:
    """Does nothing: the last job of a thread without resources."""

"""The `cuda_ipc` channel: the receiver reads the sender's KV store, two GPUs of one host.

The sender's offer in the opening call describes its store; the receiver maps it, once per channel,
and pulls a piece's blocks straight into the reserved ones. One-sided: the sender only names blocks,
and keeps them until the piece is acknowledged or its own deadline has passed. If it reuses them
too early, or dies, the digests of what was pulled do not match. A mapping outlives its exporter,
whose GPU keeps the memory for it: the channel closes when the sender's process ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from actors.kv_transfer.channels.handshake import PROBE_BYTES, PROBE_ROUNDS, probe_bandwidth
from actors.kv_transfer.channels.sender_process import SenderProcess
from actors.kv_transfer.contracts import (
    ArrivedBlocks,
    Deliver,
    OutgoingData,
    Payload,
    PieceNumbers,
    StoredBlocks,
    UnfitError,
)
from actors.kv_transfer.kv_pieces import KvPieces, copy_blocks
from actors.kv_transfer.waits import acknowledged
from engine.errors import HandoffError
from engine.host_id import host_id
from engine.kv.device_offer import DeviceOffer, map_tensor, offer_tensor
from engine.messages import ChannelKind, PieceReply


class StoreOffer(DeviceOffer, frozen=True, kw_only=True):
    """A KV store, and the host on which alone it can be mapped."""

    host: str


MapStore = Callable[[StoreOffer, Tensor], Tensor]


def check_host(host: str) -> None:
    """Raises UnfitError if what is offered is on another host than this process."""
    if host != host_id():
        raise UnfitError("the sender is on another host")


def offer_store(store: Tensor) -> bytes:
    """Describe `store`, a whole KV store on a GPU. Raises UnfitError if it cannot be shared."""
    try:
        offer = offer_tensor(store)
    except RuntimeError as error:
        raise UnfitError(f"the KV store cannot be shared between processes: {error}") from error
    return msgspec.msgpack.encode(StoreOffer(host=host_id(), **msgspec.structs.asdict(offer)))


class CudaIpcSender:
    """The sending end: names blocks, and waits. So it is wherever ranks get blocks themselves."""

    def __init__(self, epoch: int, deadline_s: float, kind: ChannelKind = "cuda_ipc") -> None:
        self._epoch = epoch
        self._deadline_s = deadline_s
        self._kind = kind
        self._next_seq = 0
        self._is_open = True

    @property
    def kind(self) -> ChannelKind:
        return self._kind

    @property
    def epoch(self) -> int:
        return self._epoch

    async def send(self, data: OutgoingData | None, deliver: Deliver) -> PieceReply:
        if not self._is_open:
            raise HandoffError(f"the channel of epoch {self._epoch} is closed")
        assert data is None or isinstance(data, StoredBlocks), "it names blocks"
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        payload: Payload = [] if data is None else [list(data.block_ids)]
        return await acknowledged(asyncio.ensure_future(deliver(seq, payload)), self._deadline_s)

    async def close(self) -> None:
        self._is_open = False


class Source(Protocol):
    """A sender's store, mapped here; its length is its number of blocks."""

    def __len__(self) -> int: ...


S = TypeVar("S", bound=Source)
S_contra = TypeVar("S_contra", bound=Source, contravariant=True)


class Puller(Protocol[S_contra]):
    """A store that takes blocks out of such a source."""

    @property
    def block_bytes(self) -> int: ...

    async def pull(
        self, source: S_contra, source_ids: Sequence[int], ids: Sequence[int], digests: list[int]
    ) -> bool:
        """Copies blocks of `source` into `ids`, then checks them; returns whether they are right.

        On return, also by an exception, nothing can land there any more.
        """
        ...


class PulledBlocks(ArrivedBlocks, Generic[S]):
    """A piece that lies in the sender's store until it is written, straight from there."""

    def __init__(
        self,
        pieces: Puller[S],
        source: S,
        source_ids: list[int],
        on_end: Callable[["PulledBlocks[S]"], None],
    ) -> None:
        """on_end: called when nothing reads the sender's store for this piece any more."""
        self._pieces = pieces
        self._source = source
        self._source_ids = source_ids
        self._on_end = on_end

    @property
    def nbytes(self) -> int:
        return len(self._source_ids) * self._pieces.block_bytes

    async def write(self, block_ids: Sequence[int], digests: list[int]) -> bool:
        try:
            return await self._pieces.pull(self._source, self._source_ids, block_ids, digests)
        finally:
            self._on_end(self)

    def discard(self) -> None:
        self._on_end(self)


class CudaIpcReceiver(Generic[S]):
    """The receiving end: pieces may come in any order."""

    def __init__(
        self,
        epoch: int,
        pieces: Puller[S],
        source: S,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """source: the sender's store, or its ranks' stores. on_close: gives back what maps it."""
        self._epoch = epoch
        self._pieces = pieces
        self._source: S | None = source  # None = it is closed, and nothing is mapped for it
        self._on_close = on_close
        self._process: SenderProcess | None = None  # None = its end does not matter
        self._closing: asyncio.Task[None] | None = None  # by the end of the sender
        self._numbers = PieceNumbers()
        self._unread: set[PulledBlocks[S]] = set()
        self._all_read = asyncio.Event()
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
    ) -> PulledBlocks[S]:
        if not self._is_open:
            raise HandoffError(f"the channel of epoch {self._epoch} is closed")
        assert seq in self._numbers, f"piece {seq} of epoch {self._epoch} was not claimed"
        assert self._source is not None, "it is open"
        source_ids = self._check(num_bytes, payload, len(self._source))
        piece = PulledBlocks(self._pieces, self._source, source_ids, self._end)
        self._unread.add(piece)
        return piece

    async def close(self) -> None:
        """Waits for pieces that were received: until they end, the sender's store stays mapped."""
        was_open, self._is_open = self._is_open, False
        if self._unread:
            await self._all_read.wait()
        self._source = None
        if self._process is not None:
            self._process.close()
        if was_open and self._on_close is not None:
            await self._on_close()

    def close_with(self, process: SenderProcess) -> None:
        """Closes also when the sender's process ends, and then `process`."""

        def close() -> None:
            self._closing = asyncio.ensure_future(self.close())

        self._process = process
        process.at_end(close)

    def _end(self, piece: PulledBlocks[S]) -> None:
        self._unread.discard(piece)
        if not self._unread and not self._is_open:
            self._all_read.set()

    def _check(self, num_bytes: int, payload: Payload, num_blocks: int) -> list[int]:
        try:
            payloads = msgspec.convert(payload, list[list[int]])
        except msgspec.ValidationError as error:
            raise HandoffError(f"a cuda_ipc piece names no blocks: {error}") from error
        source_ids = payloads[0] if len(payloads) == 1 else []
        if len(payloads) > 1 or len(source_ids) * self._pieces.block_bytes != num_bytes:
            raise HandoffError(f"{len(source_ids)} blocks were named for {num_bytes} bytes")
        if not all(0 <= block_id < num_blocks for block_id in source_ids):
            raise HandoffError(f"blocks {source_ids} of a store that has {num_blocks}")
        return source_ids


async def open_receiver(
    epoch: int,
    offered: bytes,
    pieces: KvPieces,
    *,
    floor_gb_s: float,
    map_offer: MapStore = map_tensor,
) -> CudaIpcReceiver[Tensor]:
    """Map the offered store and check that it can be read fast enough. Raises UnfitError."""
    try:
        offer = msgspec.msgpack.decode(offered, type=StoreOffer)
    except msgspec.DecodeError as error:
        raise UnfitError(f"the sender offers no KV store: {error}") from error
    check_host(offer.host)
    prepare = asyncio.to_thread(_map_and_prove, offer, pieces, floor_gb_s, map_offer)
    return CudaIpcReceiver(epoch, pieces, await prepare)


def _map_and_prove(
    offer: StoreOffer, pieces: KvPieces, floor_gb_s: float, map_offer: MapStore
) -> Tensor:
    try:
        source = map_offer(offer, pieces.tensor)
        if floor_gb_s > 0:
            probe_reading(source, floor_gb_s)
    except RuntimeError as error:  # CUDA refuses: no peer access, another namespace
        raise UnfitError(f"the sender's KV store cannot be read: {error}") from error
    return source


def probe_reading(source: Tensor, floor_gb_s: float) -> None:
    """Read blocks into a scratch, as many as make 1 and 64 MiB; the larger size is judged.

    Raises UnfitError below the floor, RuntimeError if the memory cannot be read.
    """
    block_bytes = source[0].numel() * source.element_size()
    num_bytes, best_s = 0, 0.0
    for proof_bytes in PROBE_BYTES:
        num_blocks = min(source.shape[0], -(-proof_bytes // block_bytes))
        scratch, num_bytes = torch.empty_like(source[:num_blocks]), num_blocks * block_bytes
        best_s = min(_read_s(scratch, source) for _ in range(PROBE_ROUNDS))
    probe_bandwidth(num_bytes, best_s, floor_gb_s)


def _read_s(scratch: Tensor, source: Tensor) -> float:
    """Times one copy on a stream of its own: on the engine's it would include earlier steps."""
    ids = range(scratch.shape[0])
    if not scratch.is_cuda:
        started_s = time.perf_counter()
        copy_blocks(scratch, ids, source, ids)
        return time.perf_counter() - started_s
    stream = torch.cuda.Stream(scratch.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        started_s = time.perf_counter()
        copy_blocks(scratch, ids, source, ids)
        stream.synchronize()
        return time.perf_counter() - started_s

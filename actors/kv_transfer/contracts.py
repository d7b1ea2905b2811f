"""Protocols that both sides of a handoff use: peers, the engine thread, channels, staging.

Protocols and plain records only, so that sender and receiver run in tests without Ray, torch or
threads.

A piece is bytes in host memory, or it stays on the GPU: then the sender's end is `StoredBlocks`,
which names blocks of its KV store, and the receiver's end `ArrivedBlocks`, which knows how to get
them into the reserved blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import HandoffError
from engine.messages import (
    CancelReply,
    CancelTransfer,
    ChannelKind,
    NotNow,
    PairReply,
    PairRequest,
    PieceHeader,
    PieceReply,
    Refused,
    RenewLease,
    Reservation,
    ReserveRequest,
)


class PieceNumbers:
    """Sequence numbers from 0, each taken once."""

    def __init__(self) -> None:
        self._claimed: set[int] = set()  # claimed numbers from `_num_claimed` on
        self._num_claimed = 0  # every number below is claimed

    def claim(self, seq: int) -> bool:
        """Take a piece's number; False, without effect, if it came before."""
        if seq in self:
            return False
        self._claimed.add(seq)
        while self._num_claimed in self._claimed:
            self._claimed.remove(self._num_claimed)
            self._num_claimed += 1
        return True

    def __contains__(self, seq: int) -> bool:
        return seq < self._num_claimed or seq in self._claimed


T = TypeVar("T")

PieceBytes = NDArray[np.uint8]  # [n * block_bytes], contiguous, host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlocks:
    """A piece that is still in the sender's KV store, on a GPU; nothing changes it there."""

    block_ids: tuple[int, ...]
    nbytes: int


class ArrivedBlocks(ABC):
    """A piece that the receiver can have on its GPU, or has in the blocks it was received for."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    async def write(self, block_ids: Sequence[int], digests: list[int]) -> bool:
        """Writes the bytes into `block_ids`; returns whether they digest to `digests`, one per
        block.

        If they do not, the content of the blocks is undefined. On return, also by an exception,
        nothing can land in them any more. Ends the piece, as `discard` does.
        """

    @abstractmethod
    def discard(self) -> None:
        """Give up the piece and what it holds; idempotent."""


OutgoingData = PieceBytes | StoredBlocks
IncomingData = PieceBytes | ArrivedBlocks


class DeclinedError(HandoffError):
    """The decode worker does not take a request, or not any more, and is reached as before."""


class UnfitError(HandoffError):
    """A kind of channel cannot connect two workers: another host, no GPU, too slow.

    Do not ask again until one of them restarts.
    """


# What a call carries beside a piece's header. Only the two ends of a channel know what it is: ids
# of blocks (cuda_ipc), a reference to an object of Ray's (object_store), nothing (a group of two).
Payload = list[object]

# The call that carries a piece's header: (sequence number, payload) -> acknowledgement.
Deliver = Callable[[int, Payload], Awaitable[PieceReply]]


class PieceTaker(Protocol):
    """A decode worker that takes pieces. Its calls raise WorkerError if it is dead."""

    async def receive_pieces(
        self, pieces: Sequence[tuple[PieceHeader, Payload]]
    ) -> list[PieceReply]:
        """Independent pieces that go in one call, each with its payload; answered together."""
        ...


class Peer(PieceTaker, Protocol):
    """A decode worker seen from a prefill worker. Every call raises WorkerError if it is dead."""

    async def reserve(self, request: ReserveRequest) -> Reservation | NotNow | Refused: ...

    async def open_pair(self, request: PairRequest) -> PairReply: ...

    async def cancel_transfer(self, request: CancelTransfer) -> CancelReply: ...

    async def renew(self, request: RenewLease) -> None:
        """Raises HandoffError when the reservation is gone."""
        ...


class EngineCalls(Protocol):
    async def call(self, fn: Callable[[], T]) -> T:
        """Run `fn` between two steps on the engine thread; its exceptions reach the caller."""
        ...


Data = TypeVar("Data", bound=PieceBytes | StoredBlocks | ArrivedBlocks, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPiece(Generic[Data]):
    """A piece out of a store or on its way into one, with the digests of its blocks."""

    data: Data
    digests: list[int]  # one per block


class PieceStore(Protocol):
    """Blocks as pieces; copied by other threads, never on the event loop."""

    async def read(self, block_ids: Sequence[int]) -> StagedPiece[OutgoingData]:
        """Reads the blocks in that order: a copy, or their ids if the store is on a GPU."""
        ...

    async def write(self, block_ids: Sequence[int], piece: StagedPiece[IncomingData]) -> bool:
        """Overwrites the blocks; returns False if the digests differ.

        Their content is undefined then. Host memory is checked first and not written, but for
        several ranks; `ArrivedBlocks` are checked in place. Raises HandoffError if a rank cannot
        get its part of the piece, or does not end its steps in time.
        """
        ...


class SendChannel(Protocol):
    @property
    def kind(self) -> ChannelKind: ...

    @property
    def epoch(self) -> int: ...

    async def send(self, data: OutgoingData | None, deliver: Deliver) -> PieceReply:
        """Send one piece (None = no bytes) and return the receiver's acknowledgement.

        Of concurrent calls, the bytes may move one after the other. Raises HandoffError when the
        channel fails or a deadline passes, WorkerError when the receiver is dead.
        """
        ...

    async def close(self) -> None:
        """Closes the channel; pieces in flight succeed or fail before this returns."""
        ...


class ReceiveChannel(Protocol):
    @property
    def epoch(self) -> int: ...

    def claim(self, seq: int) -> bool:
        """Take a piece's number; False, without effect, if it came before."""
        ...

    async def receive(
        self,
        seq: int,
        num_bytes: int,
        payload: Payload,
        into: Sequence[int] | None = None,
    ) -> IncomingData:
        """Returns the bytes [num_bytes] of the claimed piece `seq`.

        into: the only blocks that they may be written to meanwhile; None = drop the piece. Nothing
        is written there after this has returned or raised, unless the caller `write`s the result.
        Raises HandoffError when the bytes are not as announced, the channel fails, or at the
        deadline; the channel is then of no further use.
        """
        ...

    async def close(self) -> None:
        """Closes the channel; pieces in flight succeed or fail before this returns."""
        ...


class Channels(Protocol):
    """Opens channels; both ends of one are opened at the same time with the same request."""

    async def open_send(self, request: PairRequest) -> SendChannel:
        """The sender's end, ready to use. Raises UnfitError, HandoffError or WorkerError."""
        ...

    async def open_receive(self, request: PairRequest) -> ReceiveChannel:
        """The receiver's end, ready to use. Raises UnfitError, HandoffError or WorkerError."""
        ...


class RendezvousClient(Protocol):
    """The key-value board where two ends meet, used from a thread: calls block, within bounds.

    Calls raise HandoffError when the board or the awaited keys do not answer in time, WorkerError
    when the board is dead.
    """

    def set(self, key: str, value: bytes) -> None: ...

    def add(self, key: str, amount: int) -> int: ...

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]: ...

    def has(self, keys: Sequence[str]) -> bool: ...

    def num_keys(self) -> int: ...

    def delete(self, key: str) -> bool: ...

    def delete_prefix(self, prefix: str) -> int: ...

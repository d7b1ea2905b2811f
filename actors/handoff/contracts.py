"""What the two sides of a handoff need from others: peers, the engine thread, channels, staging.

Protocols only, so that sender and receiver run in tests without Ray, torch or threads.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

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

T = TypeVar("T")

PieceBytes = NDArray[np.uint8]  # [n * block_bytes], contiguous, host memory

# The RPC that carries a piece's header: (sequence number, object references) -> acknowledgement.
Deliver = Callable[[int, list[Any]], Awaitable[PieceReply]]


class Peer(Protocol):
    """A decode worker seen from a prefill worker. Every call raises WorkerError if it is dead."""

    async def reserve(self, request: ReserveRequest) -> Reservation | NotNow | Refused: ...

    async def open_pair(self, request: PairRequest) -> PairReply: ...

    async def receive_piece(self, header: PieceHeader, payload: list[Any]) -> PieceReply: ...

    async def cancel_transfer(self, request: CancelTransfer) -> CancelReply: ...

    async def renew(self, request: RenewLease) -> None:
        """Raises HandoffError when the reservation is gone."""
        ...


class EngineCalls(Protocol):
    async def call(self, fn: Callable[[], T]) -> T:
        """Run `fn` between two steps on the engine thread; its exceptions reach the caller."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPiece:
    """Blocks copied out of a store, with what they must digest to at the other end."""

    data: PieceBytes
    digests: list[int]  # one per block


class PieceStore(Protocol):
    """Blocks as bytes; copied in transfer threads, never on the event loop."""

    async def read(self, block_ids: Sequence[int]) -> StagedPiece:
        """A copy of the blocks, in that order."""
        ...

    async def write(self, block_ids: Sequence[int], piece: StagedPiece) -> bool:
        """Overwrite the blocks; False, and nothing is written, if the digests are not those."""
        ...


class SendChannel(Protocol):
    @property
    def kind(self) -> ChannelKind: ...

    @property
    def epoch(self) -> int: ...

    async def send(self, data: PieceBytes | None, deliver: Deliver) -> PieceReply:
        """Send one piece (None = no bytes) and return the receiver's acknowledgement.

        Pieces of concurrent calls go out in the order of the calls. Raises HandoffError when the
        channel fails or a deadline passes, WorkerError when the receiver is dead.
        """
        ...

    async def close(self) -> None:
        """Give up the channel after what is in flight; the other end notices at once."""
        ...


class ReceiveChannel(Protocol):
    @property
    def epoch(self) -> int: ...

    def claim(self, seq: int) -> bool:
        """Take a piece's number; False, without effect, if it came before."""
        ...

    async def receive(self, seq: int, num_bytes: int, payload: list[Any]) -> PieceBytes:
        """The bytes [num_bytes] of the claimed piece `seq`, in a buffer of their own.

        Raises HandoffError when the bytes are not as announced, the channel fails, or at the
        deadline; the channel is then of no further use.
        """
        ...

    async def close(self) -> None:
        """Give up the channel after what is in flight."""
        ...


class Channels(Protocol):
    """Opens channels; both ends of one are opened at the same time with the same request."""

    async def open_send(self, request: PairRequest) -> SendChannel:
        """The sender's end, ready to use. Raises HandoffError or WorkerError."""
        ...

    async def open_receive(self, request: PairRequest) -> ReceiveChannel:
        """The receiver's end, ready to use. Raises HandoffError or WorkerError."""
        ...

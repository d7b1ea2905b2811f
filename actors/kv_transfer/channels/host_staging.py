"""Host memory for channels that carry it: receive buffers, and copies of a GPU's blocks."""

from collections.abc import Awaitable, Callable

import numpy as np

from actors.kv_transfer.contracts import (
    Deliver,
    OutgoingData,
    PieceBytes,
    SendChannel,
    StoredBlocks,
)
from engine.messages import ChannelKind, PieceReply


def pageable(num_bytes: int) -> PieceBytes:
    """A buffer in ordinary memory."""
    return np.empty(num_bytes, dtype=np.uint8)


class HostStagedSender:
    """A channel of host memory for a worker whose KV store is on a GPU."""

    def __init__(
        self, channel: SendChannel, to_host: Callable[[StoredBlocks], Awaitable[PieceBytes]]
    ) -> None:
        self._channel = channel
        self._to_host = to_host

    @property
    def kind(self) -> ChannelKind:
        return self._channel.kind

    @property
    def epoch(self) -> int:
        return self._channel.epoch

    async def send(self, data: OutgoingData | None, deliver: Deliver) -> PieceReply:
        if isinstance(data, StoredBlocks):
            data = await self._to_host(data)
        return await self._channel.send(data, deliver)

    async def close(self) -> None:
        await self._channel.close()

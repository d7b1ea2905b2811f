"""Pieces that leave for one decode worker at the same moment: one call carries them all.

A step that computes many short prompts ends them together, and each has one small piece. A call
costs both processes more than such a piece, so those that were handed over in one turn of the event
loop share one; a large piece goes by itself, or the small ones would wait for its acknowledgement.
Unlike the batches of a DynamicBatcher, calls do not wait for each other.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from actors.handoff.contracts import PieceTaker
from engine.messages import PieceHeader, PieceReply

BUNDLED_BYTES = 32 * 2**20  # of one piece: 0.1 ms between two GPUs


@dataclass(slots=True, kw_only=True, eq=False)
class _Bundle:
    call: asyncio.Task[list[PieceReply]]
    pieces: list[tuple[PieceHeader, list[Any]]] = field(default_factory=list)
    num_waiting: int = 0


class PieceBundles:
    """The calls of one sender: each takes on pieces until a turn of the event loop ends."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._open: dict[PieceTaker, _Bundle] = {}
        self.num_calls = 0

    async def deliver(
        self, peer: PieceTaker, header: PieceHeader, payload: list[Any]
    ) -> PieceReply:
        """The peer's answer to one piece. Raises WorkerError if it is dead."""
        piece = (header, payload)
        if header.num_blocks * self._block_bytes > BUNDLED_BYTES:
            self.num_calls += 1
            [reply] = await peer.receive_pieces([piece])
            return reply
        bundle = self._open.get(peer)
        if bundle is None:
            # The task starts when this turn is over: pieces of one turn go together.
            bundle = self._open[peer] = _Bundle(call=asyncio.ensure_future(self._send(peer)))
        place = len(bundle.pieces)
        bundle.pieces.append(piece)
        bundle.num_waiting += 1
        try:
            replies = await asyncio.shield(bundle.call)  # who gives up takes nobody along
        finally:
            bundle.num_waiting -= 1
            if not bundle.num_waiting:
                bundle.call.cancel()  # else a silent peer's call would stay while it is silent
        return replies[place]

    async def _send(self, peer: PieceTaker) -> list[PieceReply]:
        bundle = self._open.pop(peer)
        self.num_calls += 1
        return await peer.receive_pieces(bundle.pieces)

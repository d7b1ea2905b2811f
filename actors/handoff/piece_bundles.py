"""Pieces that leave for one decode worker at the same moment: one call carries them all.

A step that computes many short prompts ends them together, and each has one small piece. A call
costs both processes more than such a piece, so those that were handed over in one turn of the event
loop share one; a large piece goes by itself, or the small ones would wait for its acknowledgement.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.handoff.contracts import Peer
from engine.messages import PieceHeader, PieceReply

BUNDLED_BYTES = 32 * 2**20  # of one piece: 0.1 ms between two GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    header: PieceHeader
    payload: list[Any]
    reply: asyncio.Future[PieceReply]


class PieceBundles:
    """The pieces of one sender that wait for the end of the event loop's turn."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._waiting: dict[Peer, list[_Waiting]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self.num_calls = 0

    async def deliver(self, peer: Peer, header: PieceHeader, payload: list[Any]) -> PieceReply:
        """The peer's answer to one piece. Raises WorkerError if it is dead."""
        if header.num_blocks * self._block_bytes > BUNDLED_BYTES:
            self.num_calls += 1
            [reply] = await peer.receive_pieces([(header, payload)])
            return reply
        loop = asyncio.get_running_loop()
        piece = _Waiting(header=header, payload=payload, reply=loop.create_future())
        waiting = self._waiting.setdefault(peer, [])
        waiting.append(piece)
        if len(waiting) == 1:
            loop.call_soon(self._send, peer)
        return await piece.reply

    def _send(self, peer: Peer) -> None:
        pieces = [piece for piece in self._waiting.pop(peer) if not piece.reply.done()]
        if pieces:
            self.num_calls += 1
            call = asyncio.ensure_future(_call(peer, pieces))
            self._calls.add(call)  # the event loop alone would not keep it
            call.add_done_callback(self._calls.discard)


async def _call(peer: Peer, pieces: Sequence[_Waiting]) -> None:
    """Whoever is cancelled meanwhile hears nothing; an error is everybody's."""
    try:
        replies = await peer.receive_pieces([(piece.header, piece.payload) for piece in pieces])
    except Exception as error:  # noqa: BLE001 - raised where the pieces are waited for
        for piece in pieces:
            if not piece.reply.done():
                piece.reply.set_exception(error)
        return
    for piece, reply in zip(pieces, replies, strict=True):
        if not piece.reply.done():
            piece.reply.set_result(reply)

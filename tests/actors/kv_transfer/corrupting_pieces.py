"""Pieces that are wrong on demand."""

from typing import Any

from actors.kv_transfer.contracts import StagedPiece
from actors.kv_transfer.kv_pieces import KvPieces


class CorruptingPieces(KvPieces):
    """Flips one bit of every piece read while `is_on`, after its digest was made."""

    is_on = False

    async def read(self, block_ids: Any) -> StagedPiece:
        piece = await super().read(block_ids)
        if self.is_on:
            piece.data[len(piece.data) // 2] ^= 16
        return piece

"""Pieces that fail on demand, where a sender reads them; for tests."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from actors.kv_transfer.contracts import IncomingData, OutgoingData, PieceStore, StagedPiece
from configs.faults import Fault, FaultKind
from engine.errors import HandoffError

logger = logging.getLogger(__name__)


class FaultyPieces:
    """A store that counts the pieces read from it, from 1."""

    def __init__(self, store: PieceStore, faults: Sequence[Fault]) -> None:
        self._store = store
        self._faults = {fault.number: fault for fault in faults if fault.place == "piece"}
        self._num_reads = 0

    async def read(self, block_ids: Sequence[int]) -> StagedPiece[OutgoingData]:
        """Raises HandoffError in place of a piece that is to be dropped."""
        self._num_reads += 1
        number, fault = self._num_reads, self._faults.get(self._num_reads)
        if fault is None:
            return await self._store.read(block_ids)
        logger.warning("fault on demand: piece %d, %s", number, fault.kind.value)
        await asyncio.sleep(fault.delay_s)
        if fault.kind is FaultKind.DROP:
            raise HandoffError(f"piece {number} was dropped on demand")
        piece = await self._store.read(block_ids)
        if fault.kind is FaultKind.CORRUPT:  # any other digest will do
            piece = replace(piece, digests=[digest ^ 1 for digest in piece.digests])
        return piece

    async def write(self, block_ids: Sequence[int], piece: StagedPiece[IncomingData]) -> bool:
        return await self._store.write(block_ids, piece)

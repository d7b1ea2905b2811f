"""One transfer into D: the blocks reserved for it, which have arrived, and which are being written.

Plain records; engine/kv/handoff_incoming.py keeps them.
"""

from dataclasses import dataclass, field

from engine.messages import WorkerIdentity
from engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockWrite:
    """Leave to write some blocks of a transfer, from `begin_write` to `end_write`."""

    transfer_id: str
    epoch: int
    first_block: int
    block_ids: list[int]

    @property
    def blocks(self) -> range:
        """Positions in the request's block list: [first_block, first_block + n)."""
        return range(self.first_block, self.first_block + len(self.block_ids))


@dataclass(slots=True, kw_only=True, eq=False)
class IncomingTransfer:
    """blocks [0, num_hit_blocks) found here; [num_hit_blocks, num_blocks) to arrive"""

    transfer_id: str
    sender: WorkerIdentity
    request: Request  # holds all reserved blocks
    num_hit_blocks: int
    expires_s: float
    epoch: int = 0  # of the channel in use; 0 = nothing was begun
    arrived: set[int] = field(default_factory=set)  # in this epoch
    writes: list[BlockWrite] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return len(self.request.block_ids)

"""What becomes of the vectors that a model exports in a step, one a line of its batch.

    TokenFeatures    the target's: each token's, to the token's slot
    NextFeatures     a drafter's: of each row that samples, to the slot after its last token, where
                     it stands in until the target computes that token

Queued in the stream of the step, so that whoever is launched later reads them.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv.features import FeaturePlanes
from engine.kv.store import to_device
from engine.kv.tables import BlockTables, concat_ranges
from engine.runner.inputs import InputBatch
from engine.sampling.staging import Staging


class ExportKeeper(Protocol):
    def keep(self, exported: Tensor, batch: InputBatch, blocks: BlockTables) -> None:
        """Queue what is to be done with a launched step's lines; padding may follow them.

        exported: as of `ForwardResult`. blocks: of the rows, with all that the step appended.
        """
        ...


class TokenFeatures:
    """exported: [T, width], a line for each token."""

    def __init__(self, planes: FeaturePlanes) -> None:
        self._planes = planes

    def keep(self, exported: Tensor, batch: InputBatch, blocks: BlockTables) -> None:
        slots, lines = batch.slots, exported[: batch.end_token]
        if batch.end_token > batch.num_tokens:  # rows lie in spans, with padding between them
            index = concat_ranges(batch.first_tokens, batch.attention.num_new_tokens)
            places = to_device(index.tolist(), lines.device)
            slots, lines = slots.index_select(0, places), lines.index_select(0, places)
        self._planes.write(slots, lines)


class NextFeatures:
    """exported: [S, width], a line for each row that samples."""

    def __init__(self, planes: FeaturePlanes, block_size: int) -> None:
        self._planes = planes
        self._block_size = block_size
        self._staging = Staging(planes.device)

    def keep(self, exported: Tensor, batch: InputBatch, blocks: BlockTables) -> None:
        rows, attention = batch.sampling, batch.attention
        nexts = attention.num_computed_tokens[rows] + attention.num_new_tokens[rows]
        has_room = nexts // self._block_size < blocks.num_blocks(batch.rows[rows])
        (lines,) = np.nonzero(has_room)
        if len(lines) == 0:
            return
        nexts, device_rows = nexts[lines], batch.rows[rows[lines]]
        block_ids = blocks.block_at(device_rows, nexts // self._block_size)
        assert block_ids is not None, "rows without room were left out"
        slots = block_ids.astype(np.int64) * self._block_size + nexts % self._block_size
        kept = exported[: len(rows)]
        if len(lines) < len(rows):
            kept = kept.index_select(0, to_device(lines.tolist(), kept.device))
        places = to_device(slots.tolist(), kept.device)
        if batch.behind is not None:
            places = self._behind(batch, rows[lines], nexts, lines, places)
        self._planes.write(places, kept)

    def _behind(
        self,
        batch: InputBatch,
        rows: NDArray[np.int64],
        nexts: NDArray[np.int64],
        lines: NDArray[np.int64],
        slots: Tensor,
    ) -> Tensor:
        """`slots` of the positions `nexts`, but of rows that were moved back where they are now.

        Those are in blocks that the step reads, as they come before the planned end.
        """
        assert batch.behind is not None
        of_rows, planned, of_lines = self._staging.send(rows, nexts, lines)
        behind = batch.behind[of_lines]
        positions = planned - behind
        tensors = batch.attention.device_rows
        places = tensors.cu_blocks[of_rows].long() + positions // self._block_size
        blocks = tensors.block_ids[places.clamp(max=len(tensors.block_ids) - 1)]
        moved = blocks * self._block_size + positions % self._block_size
        return torch.where(behind > 0, moved, slots)

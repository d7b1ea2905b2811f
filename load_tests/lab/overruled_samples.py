"""Makes so many drafts of each row count as were drawn before, whatever the device has sampled.

On a GPU by one kernel and with numbers that lie there already: what it takes the host is part of
the figures of those who measure with it. Tensors are int32 unless stated.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.runner.inputs import InputBatch
from kernels.guessed_steps import JUDGED
from kernels.input_ids import resolve_input_ids

_NUM_DRAWN = 2**14  # rows; then the numbers begin anew
_MOST = 32  # drafts of a row


class OverruledSamples:
    """Samples of one target's steps, overruled; see `GuessedRows.overrule`."""

    def __init__(self, device: torch.device) -> None:
        self._nums_right = torch.zeros(_NUM_DRAWN, dtype=torch.int32, device=device)
        self._num_used = 0

    def draw(self, num_accepted: Callable[[int], int]) -> None:
        """Draw how many drafts count of each row that follows; num_accepted: of at most so many."""
        drawn = [num_accepted(_MOST) for _ in range(_NUM_DRAWN)]
        self._nums_right.copy_(torch.tensor(drawn, dtype=torch.int32))

    def overrule(self, drawn: Tensor, batch: InputBatch, table: Tensor) -> None:
        """Change `drawn` [S] so that as many drafts count as was drawn, and not one more."""
        assert batch.guessed is not None, "its drafts are judged on the device"
        first, self._num_used = self._num_used, self._num_used + batch.num_rows
        if drawn.is_cuda:
            from load_tests.lab.overruled_samples_triton import overrule

            overrule(drawn, batch, table, self._nums_right, first)
            return
        places = torch.arange(batch.num_rows) + first
        nums_right = self._nums_right[places % _NUM_DRAWN].tolist()
        ends, kinds = batch.guessed.cu_lines.tolist(), batch.guessed.kinds.tolist()
        lines = batch.logit_indices
        tokens = torch.arange(len(drawn)) if lines is None else lines.long()
        last = len(batch.input_ids) - 1
        drafts = resolve_input_ids(batch.input_ids[(tokens + 1).clamp(max=last)], table)
        for row, kind in enumerate(kinds):
            start, end = ends[row], ends[row + 1] - 1  # the last line has no draft
            if kind & JUDGED and start < end:
                drawn[start:end] = (drafts[start:end] - 1).abs()  # another token
                right = slice(start, min(start + nums_right[row], end))
                drawn[right] = drafts[right]

"""A captured step of decodes as two batches: halves of its rows, which follow from its size alone.

    rows       [ 0 .............. n // 2 ][ n // 2 ................. n ]
    step       r rows, n // 2 < r <= n, the rest is padding at the end of the second half

Rows with drafts lie in spans of equally many tokens, so the halves' tokens follow from the size,
too. Each half has attention metadata of its own, over views of the same buffers, for its own number
of rows. Before a replay both are refreshed with their part of the step. Steps with prompts are not
captured like this: where their halves meet differs from step to step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from engine.layers.context import ForwardContext
from engine.models.llama import ForwardResult
from engine.runner.graph_sizes import GraphSize
from engine.runner.overlap.batch_splits import BatchSplit, split_sequences
from engine.runner.overlap.two_batches import TwoBatches
from kernels.attention.phased import Phases
from kernels.attention.protocol import AttentionStep, RowTensors

# positions, slots and attention metadata of a step -> the context of its forward pass
MakeContext = Callable[[Tensor, Tensor, Any], ForwardContext]


def split_of(size: GraphSize) -> BatchSplit:
    """size: of two rows or more."""
    split = split_sequences(size.num_rows, size.span_tokens or 1)
    assert split is not None, f"{size} has one row"
    return split


def halves_of_rows(rows: RowTensors) -> tuple[RowTensors, RowTensors]:
    """rows: of a graph whose rows have equally many tokens each, padding too."""
    num_rows = len(rows.num_keys)
    middle = num_rows // 2
    second = rows.part(middle, num_rows)
    # Counted from the half's first token, they are those of the first rows.
    counted = replace(second, cu_tokens=rows.cu_tokens[: num_rows - middle + 1])
    return rows.part(0, middle), counted


class SplitDecodes:
    """What a split graph does where a whole one plans attention and runs the model."""

    def __init__(
        self,
        two_batches: TwoBatches,
        attention: Phases,
        *,
        max_model_len: int,
        make_context: MakeContext,
    ) -> None:
        self._two_batches = two_batches
        self._attention = attention
        self._max_model_len = max_model_len
        self._make_context = make_context

    def open_attention(self, size: GraphSize, rows: RowTensors) -> tuple[Any, Any]:
        """rows: all of the size's."""
        first, second = (self._open_half(size, half) for half in halves_of_rows(rows))
        return first, second

    def _open_half(self, size: GraphSize, half: RowTensors) -> Any:  # noqa: ANN401
        if size.span_tokens is None:
            return self._attention.open_graph(half, max_keys=self._max_model_len)
        max_tokens = len(half.num_keys) * size.span_tokens
        return self._attention.open_verify_graph(
            half, max_keys=self._max_model_len, max_tokens=max_tokens
        )

    def refresh(self, size: GraphSize, metadata: tuple[Any, Any], step: AttentionStep) -> None:
        """step: of more than half of the size's rows, unless another rank has those."""
        split = split_of(size)
        first, second = metadata
        self._attention.refresh(first, _rows_of(step, 0, split.row))
        self._attention.refresh(second, _rows_of(step, split.row, step.num_rows))

    def forward(
        self,
        size: GraphSize,
        input_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        metadata: tuple[Any, Any],
    ) -> ForwardResult:
        """Of all tokens; launches what attention derives from the rows, too."""
        split = split_of(size)
        for part in metadata:
            self._attention.begin(part)
        halves = slice(0, split.token), slice(split.token, size.num_tokens)
        contexts = [
            replace(self._make_context(positions[half], slots[half], part), lane=lane)
            for lane, (half, part) in enumerate(zip(halves, metadata, strict=True))
        ]
        verifies = size.has_line_per_token
        return self._two_batches.forward(input_ids, split, contexts, checks_finite=verifies)


def _rows_of(step: AttentionStep, start: int, end: int) -> AttentionStep:
    """Rows [start, end) of a step on the host; the device's are the graph's.

    Where a step has none of them, a row of one padding token.
    """
    if start >= step.num_rows:
        return AttentionStep(
            num_single_rows=1,
            num_new_tokens=np.ones(1, np.int64),
            num_computed_tokens=np.zeros(1, np.int64),
            cu_blocks=np.arange(2),
            block_ids=step.block_ids,
            device_rows=step.device_rows,
        )
    return AttentionStep(
        num_single_rows=min(max(step.num_single_rows - start, 0), end - start),
        num_new_tokens=step.num_new_tokens[start:end],
        num_computed_tokens=step.num_computed_tokens[start:end],
        cu_blocks=step.cu_blocks[start : end + 1],
        block_ids=step.block_ids,
        device_rows=step.device_rows,
    )

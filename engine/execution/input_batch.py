"""A step's inputs, made from its plan and the rows' tables. Knows no model and no sampling.

Batch order differs from plan order: rows with one new token come first, by growing history, then
the others. Attention then works on contiguous ranges. `plan_rows` undoes the difference.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.request_rows import RequestRows
from engine.execution.step_buffers import HostFields, StepBuffers
from engine.kv.block_tables import BlockTables
from engine.kv.layout import KvLayout
from engine.scheduling.plan import StepPlan
from kernels.attention.protocol import AttentionStep, RowTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """One step: T tokens of R rows, in batch order."""

    # [R]  batch row -> its place in the plan
    plan_rows: NDArray[np.int64]
    # [R]  batch row -> device row
    rows: list[int]
    # [R]  batch row -> its first token in the batch
    first_tokens: NDArray[np.int64]
    attention: AttentionStep
    # [T] int32; -1 - row stands for the row's last sampled token, known only on the device
    input_ids: Tensor
    # [T] int32
    positions: Tensor
    # [T] int32  block * block_size + offset
    slots: Tensor
    # [S]  batch rows that sample
    sampling: NDArray[np.int64]
    # [S] int32  their device rows, on the device
    sampled_rows: Tensor
    # [S] int32  their last tokens, on the device; None = every token, in order
    logit_indices: Tensor | None

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return self.attention.num_tokens


def write_input_batch(
    plan: StepPlan,
    request_rows: RequestRows,
    block_tables: BlockTables,
    layout: KvLayout,
    buffers: StepBuffers,
    *,
    num_padded_rows: int | None = None,
) -> InputBatch:
    """Fill `buffers` and send them; `plan` has rows, its admissions and new blocks were applied.

    `num_padded_rows` (steps of single-token rows only): rows up to it are made harmless, for a
    graph of that many: no keys, no blocks, token 0, nothing written to the store.
    """
    num_new_in_plan = np.array(plan.num_new_tokens, dtype=np.int64)
    num_computed_in_plan = np.array(plan.num_computed_tokens, dtype=np.int64)
    plan_rows = np.lexsort((num_computed_in_plan, num_new_in_plan > 1))
    rows = np.array(plan.rows, dtype=np.int64)[plan_rows]
    num_new, num_computed = num_new_in_plan[plan_rows], num_computed_in_plan[plan_rows]
    _check(plan, rows, num_new, num_computed, request_rows, block_tables, layout)

    # [T] each
    positions = concat_ranges(num_computed, num_new)
    batch_row = np.repeat(np.arange(len(rows)), num_new)
    num_blocks = -(-(num_computed + num_new) // layout.block_size)
    cu_blocks = np.concatenate(([0], np.cumsum(num_blocks)))
    block_ids = block_tables.flatten(rows, num_blocks)
    blocks = block_ids[cu_blocks[batch_row] + positions // layout.block_size].astype(np.int64)

    num_rows, num_tokens = len(rows), len(positions)
    cu_tokens = np.concatenate(([0], np.cumsum(num_new)))
    fields = buffers.write()
    fields["cu_tokens"][: num_rows + 1] = cu_tokens
    fields["num_keys"][:num_rows] = num_computed + num_new
    fields["cu_blocks"][: num_rows + 1] = cu_blocks
    sampling = np.flatnonzero(np.array(plan.samples, dtype=bool)[plan_rows])
    fields["sampled_rows"][: len(sampling)] = rows[sampling]
    fields["logit_indices"][: len(sampling)] = cu_tokens[1:][sampling] - 1
    fields["input_ids"][:num_tokens] = request_rows.input_ids(rows[batch_row], positions)
    fields["positions"][:num_tokens] = positions
    fields["slots"][:num_tokens] = blocks * layout.block_size + positions % layout.block_size
    fields["block_ids"][: len(block_ids)] = block_ids
    num_padded = num_padded_rows or num_rows
    if num_padded > num_rows:
        assert num_tokens == num_rows == len(sampling), f"step {plan.step} cannot be padded"
        _pad(fields, num_rows, num_padded, spare_row=buffers.max_rows)
    buffers.send(len(block_ids))
    return InputBatch(
        plan_rows=plan_rows,
        rows=rows.tolist(),
        first_tokens=cu_tokens[:-1],
        attention=AttentionStep(
            num_single_rows=int((num_new == 1).sum()),
            num_new_tokens=num_new,
            num_computed_tokens=num_computed,
            cu_blocks=cu_blocks,
            block_ids=block_ids,
            device_rows=row_tensors(buffers, num_padded),
        ),
        input_ids=buffers.on_device("input_ids", num_tokens),
        positions=buffers.on_device("positions", num_tokens),
        slots=buffers.on_device("slots", num_tokens),
        sampling=sampling,
        sampled_rows=buffers.on_device("sampled_rows", len(sampling)),
        logit_indices=(
            buffers.on_device("logit_indices", len(sampling))
            if len(sampling) < num_tokens
            else None
        ),
    )


def row_tensors(buffers: StepBuffers, num_rows: int) -> RowTensors:
    """The first `num_rows` rows of `buffers` as attention reads them; all block ids there are."""
    return RowTensors(
        cu_tokens=buffers.on_device("cu_tokens", num_rows + 1),
        num_keys=buffers.on_device("num_keys", num_rows),
        cu_blocks=buffers.on_device("cu_blocks", num_rows + 1),
        block_ids=buffers.on_device("block_ids"),
    )


def concat_ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[starts[0], starts[0] + 1, ...(counts[0] of them), starts[1], ...]."""
    before = np.cumsum(counts) - counts
    ranges: NDArray[np.int64] = np.repeat(starts - before, counts)
    ranges += np.arange(len(ranges))
    return ranges


def _pad(fields: HostFields, start: int, end: int, *, spare_row: int) -> None:
    """Single-token rows [start, end) that change nothing anybody reads."""
    fields["cu_tokens"][start + 1 : end + 1] = np.arange(start + 1, end + 1)
    fields["num_keys"][start:end] = 0
    fields["cu_blocks"][start + 1 : end + 1] = fields["cu_blocks"][start]
    fields["sampled_rows"][start:end] = spare_row
    fields["input_ids"][start:end] = 0
    fields["positions"][start:end] = 0
    fields["slots"][start:end] = -1


def _check(
    plan: StepPlan,
    rows: NDArray[np.int64],
    num_new: NDArray[np.int64],
    num_computed: NDArray[np.int64],
    request_rows: RequestRows,
    block_tables: BlockTables,
    layout: KvLayout,
) -> None:
    """Our own invariants: a plan that breaks one would read or write another row's memory."""
    num_known = request_rows.num_known_tokens(rows)
    num_slots = block_tables.num_blocks(rows) * layout.block_size
    is_wrong = (
        (num_new < 1)
        | (num_computed < 0)
        | (num_computed + num_new > num_known)
        | (num_computed + num_new > num_slots)
    )
    assert not is_wrong.any(), (
        f"step {plan.step}: rows {rows[is_wrong].tolist()} compute {num_new[is_wrong].tolist()}"
        f" tokens after {num_computed[is_wrong].tolist()}, know {num_known[is_wrong].tolist()} and"
        f" have blocks for {num_slots[is_wrong].tolist()}"
    )
    assert len(set(plan.rows)) == len(plan.rows), f"step {plan.step}: a row twice in {plan.rows}"
    assert all(0 <= n <= m for n, m in zip(plan.num_logits, plan.num_new_tokens, strict=True)), (
        f"step {plan.step}: logits {plan.num_logits} of new tokens {plan.num_new_tokens}"
    )
    ends_early = dict(
        zip(rows.tolist(), (num_computed + num_new < num_known).tolist(), strict=True)
    )
    assert not any(s and ends_early[row] for row, s in zip(plan.rows, plan.samples, strict=True)), (
        f"step {plan.step}: a row of {plan.rows} samples before its last known token"
    )

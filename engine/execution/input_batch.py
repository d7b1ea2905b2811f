"""A step's tensors, made from its plan and the rows' tables. Knows no model and no sampling.

Batch order differs from plan order: rows with one new token come first, by growing history, then
the others. Attention then works on contiguous ranges. `logit_indices` undoes the difference, so
that everything a caller sees is in plan order.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.request_rows import RequestRows
from engine.kv.block_tables import BlockTables
from engine.kv.layout import KvLayout
from engine.scheduling.plan import StepPlan
from kernels.attention.protocol import AttentionStep


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """One step: T tokens of R rows, logits at S positions."""

    # [T] int64  on the device
    input_ids: Tensor
    # [T] int64  on the device
    positions: Tensor
    # [2, T] int64  on the device; see kernels/kv_append.py
    kv_lines: Tensor
    # [S] int64  on the device: plan row 0's positions, then plan row 1's, ...
    logit_indices: Tensor
    # host arrays of R rows, in batch order
    attention: AttentionStep
    # [R]  plan row -> its first token in the batch
    first_tokens: NDArray[np.int64]


def build_input_batch(
    plan: StepPlan,
    request_rows: RequestRows,
    block_tables: BlockTables,
    layout: KvLayout,
    device: torch.device,
) -> InputBatch:
    """`plan` has at least one row, and its admissions and new blocks were applied."""
    # Batch order: [R] each.
    num_new_in_plan = np.array(plan.num_new_tokens, dtype=np.int64)
    num_computed_in_plan = np.array(plan.num_computed_tokens, dtype=np.int64)
    order = np.lexsort((num_computed_in_plan, num_new_in_plan > 1))
    rows = np.array(plan.rows, dtype=np.int64)[order]
    num_new, num_computed = num_new_in_plan[order], num_computed_in_plan[order]
    _check(plan, rows, num_new, num_computed, request_rows, block_tables, layout)
    tables = block_tables.of_rows(rows)

    # [T] each.
    batch_row = np.repeat(np.arange(len(rows)), num_new)
    positions = concat_ranges(num_computed, num_new)
    blocks = tables[batch_row, positions // layout.block_size].astype(np.int64)
    k_lines = blocks * (2 * layout.num_layers * layout.block_size) + positions % layout.block_size
    input_ids = request_rows.token_ids(rows[batch_row], positions).astype(np.int64)

    # Plan order: [R] each.
    end_tokens = np.empty_like(num_new)
    end_tokens[order] = np.cumsum(num_new)
    num_logits = np.array(plan.num_logits, dtype=np.int64)
    return InputBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        kv_lines=torch.from_numpy(np.stack((k_lines, k_lines + layout.block_size))).to(device),
        logit_indices=torch.from_numpy(concat_ranges(end_tokens - num_logits, num_logits)).to(
            device
        ),
        attention=AttentionStep(
            num_single_rows=int((num_new == 1).sum()),
            num_new_tokens=num_new,
            num_computed_tokens=num_computed,
            block_tables=tables,
        ),
        first_tokens=end_tokens - num_new_in_plan,
    )


def concat_ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[starts[0], starts[0] + 1, ...(counts[0] of them), starts[1], ...]."""
    before = np.cumsum(counts) - counts
    ranges: NDArray[np.int64] = np.repeat(starts - before, counts)
    ranges += np.arange(len(ranges))
    return ranges


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

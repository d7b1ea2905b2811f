"""Builds a step's inputs from its plan and the rows' tables. Knows no model and no sampling.

Batch order differs from plan order: rows with one new token come first, ordered by growing history,
then the others, those of a few tokens first where attention tells them apart. So attention works on
contiguous ranges. `plan_rows` maps back to plan order.

The integers are written into step_buffers.py's memory; token ids come from request_rows.py.
"""

from dataclasses import dataclass
from operator import le

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.kv.layout import KvLayout
from engine.kv.tables import BlockTables, concat_ranges
from engine.plan import StepPlan
from engine.runner.graph_sizes import GraphSize
from engine.runner.request_rows import RequestRows
from engine.runner.step_buffers import HostFields, StepBuffers, row_tensors
from kernels.attention.protocol import AttentionStep
from kernels.guessed_steps import AHEAD, JUDGED, OPEN_ENDED, GuessedBatch


class InputBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One step: T tokens of R rows, in batch order.

    A msgspec struct, because every decode step copies the last one's batch: a dataclass takes 30
    times as long.
    """

    # [R]  batch row -> its index in the plan
    plan_rows: NDArray[np.int64]
    # [R]  batch row -> device row
    rows: NDArray[np.int64]
    # [R]  batch row -> index of its first token in the batch
    first_tokens: NDArray[np.int64]
    attention: AttentionStep
    # [T] int32; negative = only the device has the id, see `RequestRows.input_ids`
    input_ids: Tensor
    # [T] int32
    positions: Tensor
    # [T] int32  block * block_size + offset
    slots: Tensor
    # [S]  batch rows that sample; one with drafts may be there several times, side by side
    sampling: NDArray[np.int64]
    # [S]  device rows of `sampling`
    sampled_row_list: list[int]
    # [S] int32  `sampled_row_list` on the device
    sampled_rows: Tensor
    # [S] int32  `sampling` on the device
    sampled_lines: Tensor
    # [S] int32  index of the token after which each samples; None = every token, in order
    logit_indices: Tensor | None
    # [S] int32  tokens that come before each of these and were planned but do not; None = all do
    behind: Tensor | None = None
    # Its rows for who judges drafts and moves rows; None = it has no such row.
    guessed: GuessedBatch | None = None
    # int32 [E]  what was sent with it
    extra: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return self.attention.num_tokens

    @property
    def end_token(self) -> int:
        """End of the last row's last token; more than `num_tokens` where rows lie in spans."""
        return int(self.first_tokens[-1] + self.attention.num_new_tokens[-1])


class RowCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a step computes and samples of each row, in batch order."""

    new_tokens: list[int]
    samples: list[int]


def count_rows(plan: StepPlan, max_few_tokens: int = 1) -> RowCounts:
    """As in the batch of `write_input_batch`, whose `max_few_tokens` it is; none without rows."""
    if not plan.rows:
        return RowCounts(new_tokens=[], samples=[])
    rows = _rows_of(plan, None, max_few_tokens)
    return RowCounts(new_tokens=rows.num_new.tolist(), samples=rows.num_samples.tolist())


def write_input_batch(
    plan: StepPlan,
    request_rows: RequestRows,
    block_tables: BlockTables,
    layout: KvLayout,
    buffers: StepBuffers,
    *,
    padded_to: GraphSize | None = None,
    max_few_tokens: int = 1,
    extra: NDArray[np.int32] | None = None,
) -> InputBatch:
    """Write and send a step's inputs; the plan's admissions and new blocks must be applied.

    `plan` has at least one row. `padded_to`: arrange the rows as a graph of that size expects
    them. Its unused part becomes padding: token 0, and nothing is written to the KV store.
    `max_few_tokens`: rows of up to so many new tokens come before longer ones. `extra`: as of
    `StepBuffers.send`.
    """
    rows = _rows_of(plan, padded_to.span_tokens if padded_to else None, max_few_tokens)
    _check(plan, rows, request_rows, block_tables, layout)
    num_blocks = -(-rows.num_keys // layout.block_size)
    cu_blocks = np.concatenate(([0], np.cumsum(num_blocks)))
    block_ids = block_tables.flatten(rows.rows, num_blocks)
    fields = _begin(buffers, rows, cu_blocks, block_ids, padded_to)
    _write_tokens(fields, rows, cu_blocks, block_ids, request_rows, layout.block_size)
    has_guesses = bool(plan.drafts or plan.ahead or plan.open_ended)
    if has_guesses:
        _write_guesses(fields, plan, rows)
    batch = _send(buffers, rows, cu_blocks, block_ids, padded_to, extra)
    if not has_guesses:
        return batch
    return msgspec.structs.replace(batch, guessed=_guessed_batch(buffers, rows))


def write_idle_batch(buffers: StepBuffers, *, padded_to: GraphSize | None = None) -> InputBatch:
    """Write and send the inputs of a rank that has no rows in a step of others: a padding token.

    It attends to the first token of block 0, whatever that is, and writes nothing.
    """
    zero, none = np.zeros(1, np.int64), np.empty(0, np.int64)
    num_span = 1 if padded_to is None else padded_to.span_tokens or 1
    rows = _Rows(
        plan_rows=zero,
        rows=np.array([buffers.max_rows]),
        num_new=np.ones(1, np.int64),
        num_computed=zero,
        num_keys=np.ones(1, np.int64),
        num_samples=zero,
        sampling=none,
        num_after=None,
        cu_tokens=np.arange(2) * num_span,
    )
    cu_blocks, block_ids = np.arange(2), np.zeros(1, np.int32)
    fields = _begin(buffers, rows, cu_blocks, block_ids, padded_to)
    for name, value in (("input_ids", 0), ("positions", 0), ("slots", -1)):
        fields[name][num_span - 1] = value
    return _send(buffers, rows, cu_blocks, block_ids, padded_to)


def _begin(
    buffers: StepBuffers,
    rows: "_Rows",
    cu_blocks: NDArray[np.int64],
    block_ids: NDArray[np.int32],
    padded_to: GraphSize | None,
) -> HostFields:
    """The next host buffer, with all but the tokens of the rows written."""
    fields = buffers.write()
    fields["cu_blocks"][: len(cu_blocks)] = cu_blocks
    fields["block_ids"][: len(block_ids)] = block_ids
    _write_rows(fields, rows)
    if padded_to is not None:
        _pad(fields, rows, padded_to, spare_row=buffers.max_rows)
    return fields


def _send(
    buffers: StepBuffers,
    rows: "_Rows",
    cu_blocks: NDArray[np.int64],
    block_ids: NDArray[np.int32],
    padded_to: GraphSize | None,
    extra: NDArray[np.int32] | None = None,
) -> InputBatch:
    """Send what was written."""
    num_rows, num_tokens, num_sampled = len(rows.rows), rows.end_token, len(rows.sampling)
    # Padding rows have at most one block each, and only in a grid.
    num_block_ids = len(block_ids) + (padded_to.num_rows - num_rows if padded_to else 0)
    on_device = buffers.send(num_block_ids, extra)
    return InputBatch(
        plan_rows=rows.plan_rows,
        rows=rows.rows,
        first_tokens=rows.first_tokens,
        attention=AttentionStep(
            num_single_rows=int((rows.num_new == 1).sum()),
            num_new_tokens=rows.num_new,
            num_computed_tokens=rows.num_computed,
            cu_blocks=cu_blocks,
            block_ids=block_ids,
            device_rows=row_tensors(buffers, padded_to.num_rows if padded_to else num_rows),
        ),
        input_ids=buffers.on_device("input_ids", num_tokens),
        positions=buffers.on_device("positions", num_tokens),
        slots=buffers.on_device("slots", num_tokens),
        sampling=rows.sampling,
        sampled_row_list=rows.rows[rows.sampling].tolist(),
        sampled_rows=buffers.on_device("sampled_rows", num_sampled),
        sampled_lines=buffers.on_device("sampled_lines", num_sampled),
        logit_indices=(
            buffers.on_device("logit_indices", num_sampled) if num_sampled < num_tokens else None
        ),
        extra=on_device,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """A plan's rows in batch order; arrays are [R] unless stated."""

    plan_rows: NDArray[np.int64]
    # device rows
    rows: NDArray[np.int64]
    num_new: NDArray[np.int64]
    num_computed: NDArray[np.int64]
    # num_new + num_computed
    num_keys: NDArray[np.int64]
    num_samples: NDArray[np.int64]
    # [S]  batch rows; each num_samples times
    sampling: NDArray[np.int64]
    # [S]  tokens of its row after each sample's; None = none anywhere
    num_after: NDArray[np.int64] | None
    # [R + 1]  row boundaries as attention sees them: in a span, including the padding before
    cu_tokens: NDArray[np.int64]

    @property
    def first_tokens(self) -> NDArray[np.int64]:
        return self.cu_tokens[1:] - self.num_new

    @property
    def end_token(self) -> int:
        return int(self.cu_tokens[-1])


def _rows_of(plan: StepPlan, span_tokens: int | None, max_few_tokens: int) -> _Rows:
    """Rows in batch order; packed without spans, otherwise each at the end of its own span."""
    num_computed = np.array(plan.num_computed_tokens, dtype=np.int64)
    if plan.is_decode:  # faster, with the same result as the general case
        plan_rows = num_computed.argsort(kind="stable")
        num_new = num_samples = np.ones(len(plan_rows), np.int64)
    else:
        num_new = np.array(plan.num_new_tokens, dtype=np.int64)
        kinds = (num_new > 1).astype(np.int64) + (num_new > max_few_tokens)
        plan_rows = np.lexsort((num_computed, kinds))
        num_new = num_new[plan_rows]
        num_samples = np.array(plan.num_samples, dtype=np.int64)[plan_rows]
    num_computed = num_computed[plan_rows]
    sampling, num_after = np.flatnonzero(num_samples), None
    if plan.drafts and num_samples.max() > 1:
        sampling = np.repeat(np.arange(len(plan_rows)), num_samples)
        num_after = -1 - concat_ranges(-num_samples, num_samples)
    return _Rows(
        plan_rows=plan_rows,
        rows=np.array(plan.rows, dtype=np.int64)[plan_rows],
        num_new=num_new,
        num_computed=num_computed,
        num_keys=num_computed + num_new,
        num_samples=num_samples,
        sampling=sampling,
        num_after=num_after,
        cu_tokens=(
            np.concatenate(([0], np.cumsum(num_new)))
            if span_tokens is None
            else np.arange(len(num_new) + 1) * span_tokens
        ),
    )


def _write_rows(fields: HostFields, rows: _Rows) -> None:
    """Write the fields with one entry per row or per sampling row."""
    num_rows, num_sampled = len(rows.rows), len(rows.sampling)
    fields["cu_tokens"][: num_rows + 1] = rows.cu_tokens
    fields["num_keys"][:num_rows] = rows.num_keys
    fields["sampled_rows"][:num_sampled] = rows.rows[rows.sampling]
    fields["sampled_lines"][:num_sampled] = rows.sampling
    last_tokens = rows.cu_tokens[1:][rows.sampling] - 1
    if rows.num_after is not None:
        last_tokens -= rows.num_after
    fields["logit_indices"][:num_sampled] = last_tokens


def _write_guesses(fields: HostFields, plan: StepPlan, rows: _Rows) -> None:
    """Write the fields of rows whose drafts the device judges, or that it moves."""
    num_rows = len(rows.rows)
    kinds = np.zeros(num_rows, dtype=np.int32)
    kinds[[index for index, _ in plan.drafts]] = JUDGED
    assert not set(plan.ahead) & set(plan.open_ended), f"step {plan.step}: a row is both"
    kinds[plan.ahead] |= AHEAD
    kinds[plan.open_ended] |= OPEN_ENDED
    fields["device_rows"][:num_rows] = rows.rows
    fields["guess_kinds"][:num_rows] = kinds[rows.plan_rows]
    fields["num_new"][:num_rows] = rows.num_new
    cu_lines = fields["cu_lines"][: num_rows + 1]
    cu_lines[0] = 0
    np.cumsum(rows.num_samples, out=cu_lines[1:])


def _guessed_batch(buffers: StepBuffers, rows: _Rows) -> GuessedBatch:
    num_rows = len(rows.rows)
    return GuessedBatch(
        rows=buffers.on_device("device_rows", num_rows),
        kinds=buffers.on_device("guess_kinds", num_rows),
        num_new=buffers.on_device("num_new", num_rows),
        cu_tokens=buffers.on_device("cu_tokens", num_rows + 1),
        cu_lines=buffers.on_device("cu_lines", num_rows + 1),
        num_lines=len(rows.sampling),
    )


def _write_tokens(
    fields: HostFields,
    rows: _Rows,
    cu_blocks: NDArray[np.int64],
    block_ids: NDArray[np.int32],
    request_rows: RequestRows,
    block_size: int,
) -> None:
    """Write the fields with one entry per token: its id, its position and its slot in the store."""
    num_tokens = int(rows.num_new.sum())
    positions, batch_rows = rows.num_computed, np.arange(len(rows.rows))
    if num_tokens > len(batch_rows):
        positions = concat_ranges(rows.num_computed, rows.num_new)
        batch_rows = np.repeat(batch_rows, rows.num_new)
    in_row, offsets = np.divmod(positions, block_size)
    blocks = block_ids[cu_blocks[batch_rows] + in_row]
    places: slice | NDArray[np.int64] = slice(num_tokens)
    if rows.end_token > num_tokens:
        places = concat_ranges(rows.first_tokens, rows.num_new)
    fields["input_ids"][places] = request_rows.input_ids(rows.rows[batch_rows], positions)
    fields["positions"][places] = positions
    fields["slots"][places] = blocks * np.int64(block_size) + offsets


def _pad(fields: HostFields, rows: _Rows, size: GraphSize, *, spare_row: int) -> None:
    """Write padding rows and tokens up to `size`; the step's own tokens are written later."""
    num_rows, num_sampled = len(rows.rows), len(rows.sampling)
    if size.span_tokens is None:
        _pad_rows(fields, num_rows, rows.end_token, size)
        start = rows.end_token
    else:
        _pad_spans(fields, num_rows, size, size.span_tokens)
        start = 0  # every span may begin with padding
    fields["sampled_rows"][num_sampled : size.num_lines] = spare_row
    fields["logit_indices"][num_sampled : size.num_lines] = 0
    fields["input_ids"][start : size.num_tokens] = 0
    fields["positions"][start : size.num_tokens] = 0
    fields["slots"][start : size.num_tokens] = -1


def _pad_rows(fields: HostFields, num_rows: int, end_token: int, size: GraphSize) -> None:
    """Padding rows: one padding token each while there are any, then none; no keys, no blocks."""
    counts = np.arange(1, size.num_rows - num_rows + 1)
    fields["cu_tokens"][num_rows + 1 : size.num_rows + 1] = np.minimum(
        end_token + counts, size.num_tokens
    )
    fields["num_keys"][num_rows : size.num_rows] = 0
    fields["cu_blocks"][num_rows + 1 : size.num_rows + 1] = fields["cu_blocks"][num_rows]


def _pad_spans(fields: HostFields, num_rows: int, size: GraphSize, span_tokens: int) -> None:
    """Padding rows of a grid: one key each, so that every backend computes something for them.

    They read the step's first block, which is always valid, and write nothing (no slot), so they
    cannot affect another row.
    """
    counts = np.arange(1, size.num_rows - num_rows + 1)
    fields["cu_tokens"][num_rows + 1 : size.num_rows + 1] = (num_rows + counts) * span_tokens
    fields["num_keys"][num_rows : size.num_rows] = 1
    num_blocks = int(fields["cu_blocks"][num_rows])
    fields["cu_blocks"][num_rows + 1 : size.num_rows + 1] = num_blocks + counts
    fields["block_ids"][num_blocks : num_blocks + len(counts)] = fields["block_ids"][0]


def _check(
    plan: StepPlan,
    rows: _Rows,
    request_rows: RequestRows,
    block_tables: BlockTables,
    layout: KvLayout,
) -> None:
    """Assert invariants; a plan that breaks one would access another row's memory."""
    num_new, num_computed, num_keys = rows.num_new, rows.num_computed, rows.num_keys
    num_known = request_rows.num_known_tokens(rows.rows)
    num_slots = block_tables.num_blocks(rows.rows) * layout.block_size
    num_given = request_rows.num_given_tokens(rows.rows) if plan.drafts else num_known
    is_wrong = (num_new < 1) | (num_computed < 0) | (num_keys > np.minimum(num_given, num_slots))
    assert not is_wrong.any(), (
        f"step {plan.step}: rows {rows.rows[is_wrong].tolist()} compute"
        f" {num_new[is_wrong].tolist()} tokens after {num_computed[is_wrong].tolist()}, know"
        f" {num_known[is_wrong].tolist()} and have blocks for {num_slots[is_wrong].tolist()}"
    )
    assert len(set(plan.rows)) == len(plan.rows), f"step {plan.step}: a row twice in {plan.rows}"
    has_samples = plan.num_samples == plan.num_new_tokens or (
        min(plan.num_samples) >= 0 and all(map(le, plan.num_samples, plan.num_new_tokens))
    )
    assert has_samples, (
        f"step {plan.step}: samples {plan.num_samples} of new tokens {plan.num_new_tokens}"
    )
    assert not ((rows.num_samples > 0) & (num_keys < num_known)).any(), (
        f"step {plan.step}: a row of {plan.rows} samples before its last known token"
    )

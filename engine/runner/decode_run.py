"""Derives the inputs of a decode step from those of the previous step with the same rows.

    num_keys, positions, slots   + 1
    input_ids                    the row's newest token
    cu_blocks, block_ids         one block more for each row whose token is the first of a block

Everything else is unchanged, on the host and on the device. `write_input_batch` defines a step's
inputs. This is a faster way to the same result, and returns None where more than that has changed.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.kv.tables import BlockTables
from engine.plan import StepPlan
from engine.runner.graph_sizes import GraphSize
from engine.runner.inputs import InputBatch
from engine.runner.request_rows import RequestRows
from engine.runner.step_buffers import HostFields, StepBuffers
from kernels.attention.protocol import AttentionStep

_NO_BLOCKS: NDArray[np.int32] = np.empty(0, dtype=np.int32)


class DecodeInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs written for a step, and the graph size that they are padded to."""

    batch: InputBatch
    size: GraphSize


class _Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """Rows whose new token is the first of a block: C of R rows."""

    # [R]
    crosses: NDArray[np.bool_]
    # [C]  the new block of each
    block_ids: NDArray[np.int32]


class DecodeRun:
    """The last step in the buffers of the decode graphs, and updates from it to the next step."""

    def __init__(
        self,
        buffers: StepBuffers,
        request_rows: RequestRows,
        block_tables: BlockTables,
        block_size: int,
    ) -> None:
        self._buffers = buffers
        self._request_rows = request_rows
        self._block_tables = block_tables
        self._block_size = block_size
        self._plan: StepPlan | None = None  # None = no step to continue from
        self._inputs: DecodeInputs | None = None
        self._has_newest_ids = False  # whether its input ids are each row's newest token

    @property
    def size(self) -> GraphSize | None:
        """That the last step was padded to; None = there is no step to continue from."""
        return None if self._inputs is None else self._inputs.size

    def begin(self, plan: StepPlan, inputs: DecodeInputs) -> None:
        """Record a decode step that was written in full; its rows are padded, not in spans."""
        self._plan, self._inputs = plan, inputs
        self._has_newest_ids = False

    def end(self) -> None:
        """Forget the last step, because rows were admitted or released."""
        self._plan = self._inputs = None

    def go_on(self, plan: StepPlan) -> DecodeInputs | None:
        """Write and send `plan`'s inputs if it continues the last step; otherwise return None.

        The plan's blocks must have been appended. Returns None too, and writes nothing, if the plan
        is invalid; `write_input_batch` then raises the error.
        """
        last = self._inputs
        if self._plan is None or last is None or not _has_same_rows(plan, self._plan):
            return None
        attention = last.batch.attention
        num_computed = np.array(plan.num_computed_tokens, dtype=np.int64)[last.batch.plan_rows]
        num_known = self._request_rows.num_known_tokens(last.batch.rows)
        goes_on = num_computed == attention.num_computed_tokens + 1
        if not (goes_on & (num_known == num_computed + 1)).all():
            return None
        crossing = self._crossing(last.batch.rows, num_computed)
        if crossing is None:
            return None
        batch = self._write(last, num_computed, crossing)
        inputs = DecodeInputs(batch=batch, size=last.size)
        self._plan, self._inputs = plan, inputs
        self._has_newest_ids = True
        return inputs

    def _crossing(
        self, rows: NDArray[np.int64], num_computed: NDArray[np.int64]
    ) -> _Crossing | None:
        """The rows that enter a new block; None if one of them has no block for its token."""
        crosses = num_computed % self._block_size == 0
        if not crosses.any():
            return _Crossing(crosses=crosses, block_ids=_NO_BLOCKS)
        block_ids = self._block_tables.block_at(
            rows[crosses], num_computed[crosses] // self._block_size
        )
        return None if block_ids is None else _Crossing(crosses=crosses, block_ids=block_ids)

    def _write(
        self, last: DecodeInputs, num_computed: NDArray[np.int64], crossing: _Crossing
    ) -> InputBatch:
        batch = last.batch
        num_rows = batch.num_rows
        fields = self._buffers.write_again()
        num_keys, positions, slots = (
            fields[name][:num_rows] for name in ("num_keys", "positions", "slots")
        )
        for values in (num_keys, positions, slots):
            values += 1
        if not self._has_newest_ids:
            fields["input_ids"][:num_rows] = -1 - batch.rows
        cu_blocks, block_ids = batch.attention.cu_blocks, batch.attention.block_ids
        if len(crossing.block_ids) > 0:
            slots[crossing.crosses] = crossing.block_ids * np.int64(self._block_size)
            ends = cu_blocks[1:]
            block_ids = _insert(block_ids, ends[crossing.crosses], crossing.block_ids)
            cu_blocks = cu_blocks.copy()
            cu_blocks[1:] += crossing.crosses.cumsum()
            _write_blocks(fields, cu_blocks, block_ids, last.size)
        self._buffers.send(len(block_ids))
        attention = AttentionStep(
            num_single_rows=num_rows,
            num_new_tokens=batch.attention.num_new_tokens,
            num_computed_tokens=num_computed,
            cu_blocks=cu_blocks,
            block_ids=block_ids,
            device_rows=batch.attention.device_rows,
        )
        return msgspec.structs.replace(batch, attention=attention)


def _has_same_rows(plan: StepPlan, last: StepPlan) -> bool:
    """Whether both plans compute the same numbers of tokens for the same rows in the same order."""
    return (
        plan.rows == last.rows
        and plan.num_new_tokens == last.num_new_tokens
        and plan.num_samples == last.num_samples
    )


def _insert(
    values: NDArray[np.int32], places: NDArray[np.int64], new: NDArray[np.int32]
) -> NDArray[np.int32]:
    """`values` with new[i] inserted before index places[i]; `places` ascends."""
    merged = np.empty(len(values) + len(new), dtype=np.int32)
    is_old = np.ones(len(merged), dtype=bool)
    new_places = places + np.arange(len(new))
    is_old[new_places] = False
    merged[new_places] = new
    merged[is_old] = values
    return merged


def _write_blocks(
    fields: HostFields,
    cu_blocks: NDArray[np.int64],
    block_ids: NDArray[np.int32],
    size: GraphSize,
) -> None:
    """Write the block fields; padding rows have no blocks."""
    fields["cu_blocks"][: len(cu_blocks)] = cu_blocks
    fields["cu_blocks"][len(cu_blocks) : size.num_rows + 1] = cu_blocks[-1]
    fields["block_ids"][: len(block_ids)] = block_ids

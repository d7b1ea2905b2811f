"""Runs a `StepPlan` on one model replica: tensors in, `StepResult` out.

`launch` only queues work: a step's sampled tokens stay on the device, where the next step finds
them, and are copied to the host behind it. So a step may be launched before the one before it was
waited for. Knows no requests: a row is a slot in its tables. What a row is, when it runs and which
blocks it gets, the plan says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.execution.decode_graphs import DecodeGraphs, DecodeOutput
from engine.execution.input_batch import InputBatch, concat_ranges, write_input_batch
from engine.execution.pending_step import EmptyStep, PendingStep
from engine.execution.request_rows import RequestRows
from engine.execution.step_buffers import StepBuffers
from engine.kv.block_tables import BlockTables
from engine.kv.kv_store import KvStore
from engine.kv.layout import KvLayout
from engine.layers.context import ForwardContext, SingleRank
from engine.models.decoder import CausalLM, ForwardResult
from engine.request import SamplingParams
from engine.sampling.sampler import GreedyChoice, SampledTensors
from engine.scheduling.plan import RowAdmission, StepPlan
from kernels.attention.phased import PhasedAttention
from kernels.input_ids import keep_last_tokens, resolve_input_ids
from kernels.sample_rows import greedy


class RowSampler(Protocol):
    """Keeps each row's sampling state; `sample` advances it and only queues work."""

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> None: ...

    def remove(self, row: int) -> None: ...

    def sample(
        self, logits: Tensor, rows: list[int], greedy: GreedyChoice | None = None
    ) -> SampledTensors:
        """logits: [S, vocab], one line for each of `rows`; `greedy`: their argmax, if known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """A step's forward pass, queued."""

    batch: InputBatch
    # [S, vocab]; None = no row samples
    logits: Tensor | None
    greedy: GreedyChoice | None
    # [T] bool; None = the logits tell
    is_finite_token: Tensor | None


class Executor:
    """Owns the model, the KV store and the rows' tables of one worker.

    Not thread-safe: one thread launches steps. Blocks may be read or written through `kv_store`
    by others between steps, as far as the block pool says they are theirs.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        layout: KvLayout,
        num_blocks: int,
        max_rows: int,
        max_model_len: int,
        max_step_tokens: int,
        sampler: RowSampler,
        attention: PhasedAttention,
    ) -> None:
        assert max_model_len <= model.rotary.max_tokens, (
            f"{max_model_len} tokens for a model built for {model.rotary.max_tokens}"
        )
        self.model = model
        self.layout = layout
        self.kv_store = KvStore(layout, num_blocks=num_blocks, device=model.device)
        self._sampler = sampler
        self._attention = attention
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._request_rows = RequestRows(max_rows=max_rows, max_model_len=max_model_len)
        self._max_blocks_per_row = layout.num_blocks_for(max_model_len)
        self._block_tables = BlockTables(
            max_rows=max_rows, max_blocks_per_row=self._max_blocks_per_row
        )
        self._buffers = self._step_buffers(max_step_tokens)
        # [max_rows + 1]  each row's newest sampled token; the last entry belongs to padding
        self._last_tokens = torch.zeros(max_rows + 1, dtype=torch.int32, device=model.device)
        self._graphs: DecodeGraphs | None = None
        self._comm = SingleRank()

    def capture_graphs(self, report: Callable[[str], None]) -> None:
        """From now on, decode steps replay CUDA graphs. Needs a decode backend that can."""
        assert self._attention.can_capture, "the decode backend cannot be captured"
        graphs = DecodeGraphs(
            buffers=self._step_buffers(self._max_rows),
            attention=self._attention,
            max_keys=self._max_model_len,
            compute=lambda num_rows, metadata: self._decode(graphs.buffers, num_rows, metadata),
        )
        with torch.inference_mode():
            graphs.capture(report)
        self._graphs = graphs

    def launch(self, plan: StepPlan) -> PendingStep | EmptyStep:
        """Queue a step: apply admissions and blocks, compute, sample, and keep the tokens.

        A row whose numbers are not finite gets no token and `is_finite` says so; other rows are
        unaffected, and stay so if its blocks are zeroed before they serve anybody else.
        """
        with torch.inference_mode():
            self._apply_rows(plan)
            if not plan.rows:
                return EmptyStep(plan.step)
            computed = self._compute(plan)
            batch, sampled = computed.batch, None
            if computed.logits is not None:
                rows = [batch.rows[index] for index in batch.sampling.tolist()]
                sampled = self._sampler.sample(computed.logits, rows, computed.greedy)
                keep_last_tokens(sampled.token_ids, batch.sampled_rows, self._last_tokens)
                self._request_rows.count_sampled(np.array(rows))
            return PendingStep(plan, batch, sampled, computed.is_finite_token)

    def forward_logits(self, plan: StepPlan) -> Tensor:
        """Run a step without sampling; returns fp32 [sum(num_logits), vocab] in plan order."""
        with torch.inference_mode():
            self._apply_rows(plan)
            batch = self._write_batch(plan, self._buffers)
            hidden = self._forward(batch).hidden
            ends = np.empty_like(batch.first_tokens)
            ends[batch.plan_rows] = batch.first_tokens + batch.attention.num_new_tokens
            num_logits = np.array(plan.num_logits, dtype=np.int64)
            lines = torch.from_numpy(concat_ranges(ends - num_logits, num_logits))
            return self.model.logits(hidden.index_select(0, lines.to(hidden.device))).float()

    # ---- rows -----------------------------------------------------------------------------------

    def _apply_rows(self, plan: StepPlan) -> None:
        """Zero blocks, release rows, admit rows, append blocks."""
        if plan.zero_block_ids:
            self.kv_store.zero(plan.zero_block_ids)
        for row in plan.released_rows:
            self._release(row)
        for admission in plan.admissions:
            self._admit(admission)
        for row, block_ids in zip(plan.rows, plan.new_block_ids, strict=True):
            if block_ids:
                self._append_blocks(row, block_ids)

    def _admit(self, admission: RowAdmission) -> None:
        row, num_prompt = admission.row, admission.num_prompt_tokens
        if self._request_rows.is_occupied(row):
            self._release(row)
        self._request_rows.add(row, admission.token_ids)
        self._append_blocks(row, admission.block_ids)
        self._sampler.add(
            row,
            admission.params,
            admission.token_ids[:num_prompt],
            admission.token_ids[num_prompt:],
        )

    def _release(self, row: int) -> None:
        self._request_rows.remove(row)
        self._block_tables.clear(row)
        self._sampler.remove(row)

    def _append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        assert all(0 <= block_id < self.kv_store.num_blocks for block_id in block_ids), (
            f"row {row}: block ids {list(block_ids)} for a store of {self.kv_store.num_blocks}"
        )
        self._block_tables.append(row, block_ids)

    # ---- one step -------------------------------------------------------------------------------

    def _compute(self, plan: StepPlan) -> _Computed:
        is_decode = all(plan.samples) and max(plan.num_new_tokens) == 1
        if is_decode and self._graphs is not None:
            size = self._graphs.size_for(len(plan.rows))
            batch = self._write_batch(plan, self._graphs.buffers, num_padded_rows=size)
            output = self._graphs.replay(batch)
            return _Computed(
                batch=batch, logits=output.logits, greedy=output.greedy, is_finite_token=None
            )
        batch = self._write_batch(plan, self._buffers)
        result = self._forward(batch, batch.logit_indices, checks_finite=not is_decode)
        samples = len(batch.sampling) > 0
        return _Computed(
            batch=batch,
            logits=self.model.logits(result.hidden) if samples else None,
            greedy=None,
            is_finite_token=result.is_finite,
        )

    def _forward(
        self,
        batch: InputBatch,
        logit_indices: Tensor | None = None,
        *,
        checks_finite: bool = False,
    ) -> ForwardResult:
        """The stream before the final norm, at `logit_indices` (None: at every token)."""
        ctx = self._context(batch.positions, batch.slots, self._attention.plan(batch.attention))
        ids = resolve_input_ids(batch.input_ids, self._last_tokens)
        return self.model.forward(ids, ctx, logit_indices, checks_finite=checks_finite)

    def _decode(self, buffers: StepBuffers, num_rows: int, metadata: Any) -> DecodeOutput:  # noqa: ANN401
        """One token for each of the first `num_rows` rows of `buffers`; what a graph captures."""
        self._attention.begin(metadata)
        ids = resolve_input_ids(buffers.on_device("input_ids", num_rows), self._last_tokens)
        ctx = self._context(
            buffers.on_device("positions", num_rows), buffers.on_device("slots", num_rows), metadata
        )
        logits = self.model.logits(self.model.forward(ids, ctx).hidden)
        return DecodeOutput(logits=logits, greedy=greedy(logits))

    def _context(self, positions: Tensor, slots: Tensor, metadata: Any) -> ForwardContext:  # noqa: ANN401
        return ForwardContext(
            rotary=self.model.rotary_at(positions),
            slots=slots,
            kv_store=self.kv_store.tensor,
            attention=self._attention,
            attention_metadata=metadata,
            comm=self._comm,
        )

    def _write_batch(
        self, plan: StepPlan, buffers: StepBuffers, num_padded_rows: int | None = None
    ) -> InputBatch:
        return write_input_batch(
            plan,
            self._request_rows,
            self._block_tables,
            self.layout,
            buffers,
            num_padded_rows=num_padded_rows,
        )

    def _step_buffers(self, max_tokens: int) -> StepBuffers:
        return StepBuffers(
            max_rows=self._max_rows,
            max_tokens=max_tokens,
            max_block_ids=self._max_rows * self._max_blocks_per_row,
            device=self.model.device,
        )

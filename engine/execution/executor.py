"""Runs a `StepPlan` on one model replica: tensors in, `StepResult` out.

Knows no requests: a row is a slot in its tables. What a row is, when it runs and which blocks it
gets, the plan says.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.execution.input_batch import InputBatch, build_input_batch
from engine.execution.request_rows import RequestRows
from engine.kv.block_tables import BlockTables
from engine.kv.kv_store import KvStore
from engine.kv.layout import KvLayout
from engine.layers.context import ForwardContext, SingleRank
from engine.models.decoder import CausalLM
from engine.request import SamplingParams
from engine.scheduling.plan import RowAdmission, StepPlan, StepResult, TokenLogprobs
from kernels.attention.protocol import AttentionBackend, AttentionShape
from kernels.attention.reference import ReferenceAttention


class Sampled(Protocol):
    """One token per sampled row; where `is_finite` is False the id means nothing."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[TokenLogprobs | None]: ...
    @property
    def is_finite(self) -> list[bool]: ...


class RowSampler(Protocol):
    """Keeps each row's sampling state; `sample` advances it for rows whose logits are finite."""

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> None: ...

    def remove(self, row: int) -> None: ...

    def sample(self, logits: Tensor, rows: list[int]) -> Sampled:
        """logits: fp32 [S, vocab], one line for each of `rows`."""
        ...


class PendingStep:
    """A launched step."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        """The step's result; returns at once, for `launch` computes before it returns."""
        return self._result


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
        sampler: RowSampler,
        attention: AttentionBackend | None = None,
    ) -> None:
        """`attention` None: the reference backend."""
        assert max_model_len <= model.rotary.max_tokens, (
            f"{max_model_len} tokens for a model built for {model.rotary.max_tokens}"
        )
        self.model = model
        self.layout = layout
        self.kv_store = KvStore(layout, num_blocks=num_blocks, device=model.device)
        self._sampler = sampler
        self._attention = attention or build_reference_attention(model, layout)
        self._request_rows = RequestRows(max_rows=max_rows, max_model_len=max_model_len)
        self._block_tables = BlockTables(
            max_rows=max_rows, max_blocks_per_row=layout.num_blocks_for(max_model_len)
        )
        self._comm = SingleRank()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Run a step: apply admissions and blocks, compute, sample, and remember the tokens.

        Computes synchronously: on a CPU there is nothing to overlap with, and what fails, fails
        here. A row whose numbers are not finite gets no token and `is_finite` says so; other rows
        are unaffected, and stay so if its blocks are zeroed before they serve anybody else.
        """
        with torch.inference_mode():
            self._apply_rows(plan)
            if not plan.rows:
                return PendingStep(StepResult(step=plan.step, tokens=[], logprobs=[], is_finite=[]))
            batch = self._build_batch(plan)
            hidden = self._forward(batch)
            is_finite = _finite_chunks(plan, batch, hidden)
            tokens, logprobs = self._sample(plan, batch, hidden, is_finite)
        for row, row_tokens in zip(plan.rows, tokens, strict=True):
            for token_id in row_tokens:
                self._request_rows.append(row, token_id)
        return PendingStep(
            StepResult(step=plan.step, tokens=tokens, logprobs=logprobs, is_finite=is_finite)
        )

    def forward_logits(self, plan: StepPlan) -> Tensor:
        """Run a step without sampling; returns fp32 [sum(num_logits), vocab] in plan order."""
        with torch.inference_mode():
            self._apply_rows(plan)
            batch = self._build_batch(plan)
            hidden = self._forward(batch)
            return self.model.logits(hidden.index_select(0, batch.logit_indices))

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

    def _build_batch(self, plan: StepPlan) -> InputBatch:
        return build_input_batch(
            plan, self._request_rows, self._block_tables, self.layout, self.model.device
        )

    def _forward(self, batch: InputBatch) -> Tensor:
        """Returns the stream before the final norm, [T, hidden]."""
        ctx = ForwardContext(
            rotary=self.model.rotary.angles(batch.positions),
            kv_lines=batch.kv_lines,
            kv_store=self.kv_store.tensor,
            attention=self._attention,
            attention_metadata=self._attention.plan(batch.attention),
            comm=self._comm,
        )
        return self.model.forward(batch.input_ids, ctx)

    def _sample(
        self, plan: StepPlan, batch: InputBatch, hidden: Tensor, is_finite: list[bool]
    ) -> tuple[list[list[int]], list[TokenLogprobs | None]]:
        """Tokens and logprobs by plan row; clears `is_finite` where the logits are not finite."""
        tokens: list[list[int]] = [[] for _ in plan.rows]
        logprobs: list[TokenLogprobs | None] = [None] * len(plan.rows)
        chosen = [index for index, samples in enumerate(plan.samples) if samples]
        if not chosen:
            return tokens, logprobs
        logits = self.model.logits(hidden.index_select(0, _last_tokens(plan, batch, chosen)))
        for line, index in enumerate(chosen):
            if not is_finite[index]:
                # A poisoned chunk whose last position happens to look sound is not sampled either.
                logits[line] = torch.nan
        sampled = self._sampler.sample(logits, [plan.rows[index] for index in chosen])
        for line, index in enumerate(chosen):
            if sampled.is_finite[line]:
                tokens[index] = [sampled.token_ids[line]]
                logprobs[index] = sampled.logprobs[line]
            else:
                is_finite[index] = False
        return tokens, logprobs


def build_reference_attention(model: CausalLM, layout: KvLayout) -> ReferenceAttention:
    """The torch backend for `model` over blocks of `layout`."""
    spec = model.spec
    return ReferenceAttention(
        AttentionShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            layer_windows=spec.layer_windows,
        ),
        block_size=layout.block_size,
        dtype=model.dtype,
        device=model.device,
    )


def _last_tokens(plan: StepPlan, batch: InputBatch, chosen: list[int]) -> Tensor:
    """Index of the last token of each chosen plan row, int64 [len(chosen)]."""
    last = batch.first_tokens[chosen] + np.array(plan.num_new_tokens)[chosen] - 1
    return torch.from_numpy(last).to(batch.logit_indices.device)


def _finite_chunks(plan: StepPlan, batch: InputBatch, hidden: Tensor) -> list[bool]:
    """By plan row: whether all of a chunk's streams [T, hidden] are finite.

    Rows with one token that sample are left to the sampler, which looks at their logits anyway;
    a chunk's earlier tokens have no logits, but their K and V are kept.
    """
    is_finite = [True] * len(plan.rows)
    if all(n == 1 and s for n, s in zip(plan.num_new_tokens, plan.samples, strict=True)):
        return is_finite
    is_finite_token = hidden.float().sum(dim=1).isfinite().cpu().numpy()
    for index, (start, num_new) in enumerate(
        zip(batch.first_tokens.tolist(), plan.num_new_tokens, strict=True)
    ):
        is_finite[index] = bool(is_finite_token[start : start + num_new].all())
    return is_finite

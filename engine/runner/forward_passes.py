"""Takes a step's batch through the model, without a graph: as one batch or as two.

    forward           the whole batch; hidden states at some lines, or everywhere
    forward_to_last   the last layer's queries, and all behind them, for each row's last token alone
    context           what the layers read of a batch, for steps that are captured, too

Knows no plan, no sampling and no graphs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from engine.kv.store import KvStore
from engine.layers.context import Comm, ForwardContext, LastTokens
from engine.layers.row_exchange import RowExchange
from engine.models.llama import CausalLM, ForwardResult
from engine.runner.dp_meetings import Meeting
from engine.runner.dp_steps import DpSteps
from engine.runner.executor_options import ExecutorOptions
from engine.runner.inputs import InputBatch
from engine.runner.last_tokens import LastTokenSteps
from engine.runner.overlap.batch_splits import BatchSplit
from engine.runner.overlap.two_batches import BatchPart, TwoBatches
from kernels.attention.phased import Phases
from kernels.attention.protocol import AttentionStep
from kernels.input_ids import resolve_input_ids


class ForwardPasses:
    """Those of one executor, which sets the attributes before the first step."""

    def __init__(
        self,
        model: CausalLM,
        kv_store: KvStore,
        attention: Phases,
        comm: Comm,
        dp: DpSteps | None,
        *,
        max_rows: int,
        options: ExecutorOptions,
    ) -> None:
        """comm: as of `Executor.comm`. dp: None = all ranks have the same rows."""
        self.attention = attention
        self.two_batches: TwoBatches | None = None  # None = no step is computed as two
        self.model = model
        self.kv_store = kv_store
        self._comm = comm
        self._dp = dp
        self._kv_scales = options.kv_scales
        # As of `ExecutorOptions`. Another one counts from the next step on, on all ranks alike.
        self.min_exchanged_tokens = options.min_exchanged_tokens
        self._last_token_steps = LastTokenSteps(max_rows, model.device)

    def forward(
        self,
        batch: InputBatch,
        last_tokens: Tensor,
        logit_indices: Tensor | None = None,
        *,
        checks_finite: bool = False,
        meeting: Meeting | None = None,
    ) -> ForwardResult:
        """The residual stream after the final norm, at `logit_indices` (None: at every token).

        last_tokens: as of `resolve_input_ids`. meeting: with DP attention.
        """
        exchanges = () if meeting is None else meeting.exchanges
        split = self._split(batch) if meeting is None else meeting.split_of(batch)
        if split is not None:
            assert self.two_batches is not None, "no step is computed as two batches"
            parts = self.two_batches.parts(batch, split)
            return self.two_batches.forward(
                resolve_input_ids(batch.input_ids, last_tokens),
                split,
                self._part_contexts(parts, batch.num_tokens, exchanges or (None, None)),
                [None if logit_indices is None else part.chosen for part in parts],
                checks_finite=checks_finite,
            )
        ctx = replace(
            self._batch_context(batch),
            exchanges=self.exchanges(batch.num_tokens),
            rows=exchanges[0] if exchanges else None,
        )
        ids = resolve_input_ids(batch.input_ids, last_tokens)
        return self.model.forward(ids, ctx, logit_indices, checks_finite=checks_finite)

    def forward_to_last(self, batch: InputBatch, last_tokens: Tensor) -> ForwardResult:
        """The residual stream after the final norm at every row's last token, in batch order."""
        split = self._split(batch)
        if split is not None:
            assert self.two_batches is not None, "no step is computed as two batches"
            parts = self.two_batches.parts(batch, split)
            lasts = [self._last(part.attention, lane) for lane, part in enumerate(parts)]
            contexts = self._part_contexts(parts, batch.num_tokens)
            return self.two_batches.forward(
                resolve_input_ids(batch.input_ids, last_tokens),
                split,
                [replace(ctx, last=last) for ctx, last in zip(contexts, lasts, strict=True)],
                checks_finite=True,
            )
        last = self._last(batch.attention)
        ctx = replace(
            self._batch_context(batch), last=last, exchanges=self.exchanges(batch.num_tokens)
        )
        ids = resolve_input_ids(batch.input_ids, last_tokens)
        return self.model.forward(ids, ctx, checks_finite=True)

    def context(self, positions: Tensor, slots: Tensor, metadata: Any) -> ForwardContext:  # noqa: ANN401
        """positions, slots: int32 [T]. metadata: of the tokens' attention, which made it."""
        return ForwardContext(
            rotary=self.model.rotary_at(positions),
            slots=slots,
            kv_store=self.kv_store.tensor,
            attention=self.attention,
            attention_metadata=metadata,
            comm=self._comm,
            rows=self._dp.padded(len(slots)) if self._dp else None,  # unless the caller knows more
            fused_sums=self._comm.fused_sums,
            kv_scales=self._kv_scales,
            num_layers_before=self.kv_store.layout.num_layers_before,
        )

    def exchanges(self, num_tokens: int) -> bool:
        """Whether ranks share out the tokens of a step of so many."""
        least = self.min_exchanged_tokens
        return least is not None and num_tokens >= least

    def _split(self, batch: InputBatch) -> BatchSplit | None:
        return None if self.two_batches is None else self.two_batches.split(batch)

    def _batch_context(self, batch: InputBatch) -> ForwardContext:
        return self.context(batch.positions, batch.slots, self.attention.plan(batch.attention))

    def _last(self, attention: AttentionStep, lane: int = 0) -> LastTokens:
        """Every row's last token, which alone is computed after the last layer's K and V."""
        step = self._last_token_steps.of(attention)
        ctx = self.context(step.positions, step.slots, self.attention.plan(step.attention))
        return LastTokens(indices=step.indices, ctx=replace(ctx, lane=lane))

    def _part_contexts(
        self,
        parts: Sequence[BatchPart],
        num_tokens: int,
        rows: Sequence[RowExchange | None] = (None, None),
    ) -> list[ForwardContext]:
        """num_tokens: of the whole step, by which all parts decide alike. rows: of each part."""
        exchanges = self.exchanges(num_tokens)
        return [
            replace(
                self.context(part.positions, part.slots, self.attention.plan(part.attention)),
                lane=lane,
                exchanges=exchanges,
                rows=exchange,
                fused_sums=None,
            )
            for lane, (part, exchange) in enumerate(zip(parts, rows, strict=True))
        ]

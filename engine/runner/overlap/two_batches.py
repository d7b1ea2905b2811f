"""Cuts an uncaptured step in two batches and takes both through the model, one beside the other.

    InputBatch --- rule: does it pay? --- split ---> two `BatchPart`s, each with its own attention
    part 0, part 1 --- schedule of the model's operations ---> one ForwardResult, in token order

The parts are derived from the batch's tensors on the device: nothing more is sent. Each part is
planned by attention on its own, and the whole is then not planned. A cut row's second half finds
the first half's K and V in the store, because each stage runs for the first part first.

With DP attention every rank splits its own rows, all ranks in the same steps, and the rows of each
half meet those of the other ranks' for the experts. A rank without rows for a half has a padding
token in it.

Knows no requests and no sampling: whoever asks for hidden states gets them in the same order.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.layers.context import ForwardContext
from engine.layers.operations import Flow
from engine.layers.schedules import (
    DECODE,
    SHARE_PROMPTS,
    InlineLanes,
    Lanes,
    Schedule,
    Stage,
    bind,
    drive,
)
from engine.layers.schedules import prompt_schedule as schedule_of_prompts
from engine.layers.stream_lanes import StreamLanes
from engine.models.llama import CausalLM, ForwardResult
from engine.runner.graphs import OverlapStatistics
from engine.runner.inputs import InputBatch, RowCounts, write_idle_batch
from engine.runner.overlap.batch_splits import BatchSplit, split_sequences, split_step, verifies_all
from engine.runner.overlap.rule import OverlapRule
from engine.runner.step_buffers import StepBuffers
from kernels.attention.protocol import AttentionStep, RowTensors

logger = logging.getLogger(__name__)

_ALL_SECOND = BatchSplit(row=0, token=0)
_PADDING_TOKENS = 1  # of a half without others


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """Tokens of a batch as a step of their own; T, R, S count the part's."""

    # [T] int32
    positions: Tensor
    slots: Tensor
    attention: AttentionStep
    # [S] int32  indices among the part's tokens; None = all
    chosen: Tensor | None


class TwoBatches:
    """Decides which steps are split, and computes those; one per executor."""

    def __init__(
        self, model: CausalLM, rule: OverlapRule, *, threshold: float, block_size: int
    ) -> None:
        """threshold: see `batch_splits`. A model's other ranks have one with an equal rule.

        `rule` may be replaced between steps, on all ranks alike.
        """
        self._model = model
        self.rule = rule
        self._threshold = threshold
        self._block_size = block_size
        self._padding = _padding_part(model.device)
        is_cuda = model.device.type == "cuda"
        self._lanes: Lanes = StreamLanes(model.device) if is_cuda else InlineLanes()
        self._annotate = _nvtx if is_cuda else _no_mark
        schedules = (DECODE, schedule_of_prompts(model.operations))
        self._decode: tuple[Schedule, list[Stage]]
        self._prompts: tuple[Schedule, list[Stage]]
        self._decode, self._prompts = ((s, bind(model.operations, s)) for s in schedules)
        self._exchange: tuple[Schedule, list[Stage]] | None = None
        if model.can_exchange:
            self._exchange = SHARE_PROMPTS, bind(model.exchange_operations, SHARE_PROMPTS)
        self.reset()

    def reset(self) -> None:
        """Count from 0."""
        self._num_steps = self._num_decodes = self._num_prompts = self._num_two_chunk = 0
        self._num_replayed = 0

    def statistics(self) -> OverlapStatistics:
        return OverlapStatistics(
            num_steps=self._num_steps,
            num_split_prompts=self._num_prompts,
            num_split_decodes=self._num_decodes,
            num_two_chunk=self._num_two_chunk,
            num_replayed=self._num_replayed,
        )

    def lag_by(self, lag: int) -> None:
        """How many stages the second half of a decode step is behind; before graphs are captured.

        All ranks get the same.
        """
        schedule, stages = self._decode
        self._decode = replace(schedule, lag=lag), stages

    @contextmanager
    def running_in(self, lanes: Lanes) -> Iterator[None]:
        """Steps that are launched meanwhile run in `lanes`."""
        before, self._lanes = self._lanes, lanes
        try:
            yield
        finally:
            self._lanes = before

    def split(self, batch: InputBatch) -> BatchSplit | None:
        """Where to split a step; None = not at all. Depends on the batch's numbers alone, so that
        all ranks decide alike."""
        row_samples = np.bincount(batch.sampling, minlength=batch.num_rows)
        own = RowCounts(
            new_tokens=batch.attention.num_new_tokens.tolist(), samples=row_samples.tolist()
        )
        splits = self.split_ranks([own])
        return None if splits is None else splits[0]

    def split_ranks(self, ranks: Sequence[RowCounts]) -> list[BatchSplit] | None:
        """Where each of several ranks, some of which may have no rows, splits its own part of a
        step; None = no rank does.

        One whose rows cannot be split has all of them in its second half. A step waits for the
        largest halves, so these decide.
        """
        self._num_steps += 1
        busy = [rows for rows in ranks if rows.new_tokens]
        found = [_split_of(rows, self._threshold) for rows in ranks]
        if not any(found):
            return None
        is_decode = all(verifies_all(rows.new_tokens, rows.samples) for rows in busy)
        splits = [replace(split or _ALL_SECOND, is_decode=is_decode) for split in found]
        num_first = max(split.token for split in splits)
        num_second = max(
            sum(rows.new_tokens) - split.token for rows, split in zip(ranks, splits, strict=True)
        )
        pays = self.rule.pays(num_first, num_second, is_decode=is_decode)
        logger.debug("two batches: split=%s of_ranks=%s new_tokens=%s", pays, splits, ranks)
        if not pays:
            return None
        self._num_decodes += is_decode
        self._num_prompts += not is_decode
        self._num_two_chunk += any(split.is_two_chunk for split in splits)
        return splits

    def splits_decode(self, num_rows: int, row_tokens: int = 1) -> bool:
        """Whether a captured step of so many rows, padding included, is split.

        row_tokens: of each; above 1 = rows with drafts.
        """
        split = split_sequences(num_rows, row_tokens)
        if split is None:
            return False
        pays = self.rule.pays(split.token, num_rows * row_tokens - split.token, is_decode=True)
        logger.debug(
            "two batches in a graph: split=%s row=%d token=%d rows=%d row_tokens=%d",
            *(pays, split.row, split.token, num_rows, row_tokens),
        )
        self._num_replayed += pays
        return pays

    def parts(self, batch: InputBatch, split: BatchSplit) -> tuple[BatchPart, BatchPart]:
        """Both halves; their tensors are views of the batch's or derived on its device.

        A half without tokens is one of padding.
        """
        token, step = split.token, batch.attention
        num_first = int((batch.sampling < split.row).sum())
        lines = batch.logit_indices
        first = second = self._padding
        if token > 0:
            first = BatchPart(
                positions=batch.positions[:token],
                slots=batch.slots[:token],
                attention=first_half(step, split, self._block_size),
                chosen=None if lines is None else lines[:num_first],
            )
        if token < batch.num_tokens:
            second = BatchPart(
                # Copies: kernels are compiled for aligned addresses.
                positions=batch.positions[token:].clone(),
                slots=batch.slots[token:].clone(),
                attention=second_half(step, split),
                chosen=None if lines is None else lines[num_first:] - token,
            )
        return first, second

    def forward(
        self,
        input_ids: Tensor,
        split: BatchSplit,
        contexts: Sequence[ForwardContext],
        chosen: Sequence[Tensor | None] = (None, None),
        *,
        checks_finite: bool,
    ) -> ForwardResult:
        """As `CausalLM.forward` of the whole batch.

        contexts: of its halves, each with its own `lane`. chosen: `BatchPart.chosen` of both, if
        only their hidden states are wanted; None = all, or each row's last where contexts say so.
        """
        schedule, stages = self._decode if split.is_decode else self._prompts
        if contexts[0].exchanges:
            assert self._exchange is not None, "the model has no operations for it"
            schedule, stages = self._exchange
        x, lines_of = self._model.embed(input_ids, contexts[0].comm), chosen
        if self._model.exports_all:
            lines_of = (None, None)
        halves = x[: split.token], x[split.token :]
        flows = [
            Flow(
                ctx=ctx,
                x=half if len(half) else x.new_zeros(_PADDING_TOKENS, x.shape[1]),
                slots=ctx.slots,
                chosen=lines,
                checks_finite=checks_finite,
            )
            for ctx, half, lines in zip(contexts, halves, lines_of, strict=True)
        ]
        drive(stages, flows, self._lanes, lag=schedule.lag, annotate=self._annotate)
        results = [self._model.result(flow) for flow in flows]
        if contexts[0].last is not None:  # a cut row's last token is the second half's
            results[0] = replace(results[0], hidden=results[0].hidden[: split.row])
        kept = [(r, f) for r, f, half in zip(results, flows, halves, strict=True) if len(half)]
        flags = [result.is_finite for result, _ in kept if result.is_finite is not None]
        streams = [flow.entering for _, flow in kept]
        result = ForwardResult(
            hidden=torch.cat([result.hidden for result, _ in kept]),
            is_finite=torch.cat(flags) if flags else None,
        )
        entering = {layer: torch.cat([one[layer] for one in streams]) for layer in streams[0]}
        return self._model.exporting(result, _of_whole(chosen, split), entering)


def _split_of(rows: RowCounts, threshold: float) -> BatchSplit | None:
    """None also of a rank without rows."""
    return split_step(rows.new_tokens, rows.samples, threshold) if rows.new_tokens else None


def _padding_part(device: torch.device) -> BatchPart:
    """What a rank computes where it has nothing for a half."""
    buffers = StepBuffers(max_rows=1, max_tokens=1, max_block_ids=1, device=device)
    batch = write_idle_batch(buffers)
    return BatchPart(
        positions=batch.positions,
        slots=batch.slots,
        attention=batch.attention,
        chosen=batch.logit_indices,
    )


def _of_whole(chosen: Sequence[Tensor | None], split: BatchSplit) -> Tensor | None:
    """Both halves' tokens, counted from the first half's first."""
    first, second = chosen
    if first is None or second is None:
        return None
    return torch.cat((first, second + split.token))


def first_half(step: AttentionStep, split: BatchSplit, block_size: int) -> AttentionStep:
    """The rows before the split, and the beginning of a cut row as a row that ends there."""
    num_rows = split.row + split.is_two_chunk
    num_new = step.num_new_tokens[:num_rows]
    cu_blocks, rows = step.cu_blocks[: num_rows + 1], step.device_rows.part(0, num_rows)
    if split.is_two_chunk:
        num_new, cu_blocks = num_new.copy(), cu_blocks.copy()
        num_new[-1] = split.row_tokens
        num_keys = int(step.num_computed_tokens[split.row]) + split.row_tokens
        cu_blocks[-1] = cu_blocks[-2] - (-num_keys // block_size)
        cu_tokens = rows.cu_tokens.clamp(max=split.token)
        rows = RowTensors(
            cu_tokens=cu_tokens,
            num_keys=rows.num_keys - (rows.cu_tokens[1:] - cu_tokens[1:]),
            cu_blocks=rows.cu_blocks.clamp(max=int(cu_blocks[-1])),
            block_ids=rows.block_ids,
        )
    return AttentionStep(
        num_single_rows=min(step.num_single_rows, num_rows),
        num_new_tokens=num_new,
        num_computed_tokens=step.num_computed_tokens[:num_rows],
        cu_blocks=cu_blocks,
        block_ids=step.block_ids,
        device_rows=rows,
    )


def second_half(step: AttentionStep, split: BatchSplit) -> AttentionStep:
    """The other rows; a cut row's first tokens are history. Block ids still count from the start.

    The device's `cu_blocks` too, as in `RowTensors.part`.
    """
    rows = step.device_rows.part(split.row, step.num_rows)
    num_new, num_computed = (
        numbers[split.row :].copy() for numbers in (step.num_new_tokens, step.num_computed_tokens)
    )
    num_new[0] -= split.row_tokens
    num_computed[0] += split.row_tokens
    return AttentionStep(
        num_single_rows=int((num_new == 1).sum()),
        num_new_tokens=num_new,
        num_computed_tokens=num_computed,
        cu_blocks=step.cu_blocks[split.row :],
        block_ids=step.block_ids,
        device_rows=RowTensors(
            cu_tokens=(rows.cu_tokens - split.token).clamp(min=0),
            num_keys=rows.num_keys.clone(),
            cu_blocks=rows.cu_blocks.clone(),
            block_ids=rows.block_ids,
        ),
    )


def _nvtx(name: str) -> AbstractContextManager[object]:
    mark: Callable[[str], AbstractContextManager[object]] = torch.cuda.nvtx.range
    return mark(name)


def _no_mark(name: str) -> AbstractContextManager[object]:
    return nullcontext()

"""Cuts an uncaptured step in two batches and takes both through the model, one beside the other.

    InputBatch --- rule: does it pay? --- split ---> two `BatchPart`s, each with its own attention
    part 0, part 1 --- schedule of the model's operations ---> one ForwardResult, in token order

The parts are derived from the batch's tensors on the device: nothing more is sent. Each part is
planned by attention on its own, and the whole is then not planned. A cut row's second half finds
the first half's K and V in the store, because each stage runs for the first part first.

Knows no requests and no sampling: whoever asks for hidden states gets them in the same order.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

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
from engine.runner.batch_splits import (
    BatchSplit,
    split_prompts,
    split_rows,
    split_sequences,
    split_verified,
)
from engine.runner.graphs import OverlapStatistics
from engine.runner.inputs import InputBatch
from engine.runner.overlap_rule import OverlapRule
from kernels.attention.protocol import AttentionStep, RowTensors

logger = logging.getLogger(__name__)


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
        self._num_steps += 1
        row_tokens: list[int] = batch.attention.num_new_tokens.tolist()
        split = self._find_split(batch, row_tokens)
        if split is None:
            return None
        num_second = batch.num_tokens - split.token
        pays = self.rule.pays(split.token, num_second, is_decode=split.is_decode)
        logger.debug(
            "two batches: split=%s row=%d token=%d is_two_chunk=%s is_decode=%s new_tokens=%s",
            *(pays, split.row, split.token, split.is_two_chunk, split.is_decode, row_tokens),
        )
        if not pays:
            return None
        self._num_decodes += split.is_decode
        self._num_prompts += not split.is_decode
        self._num_two_chunk += split.is_two_chunk
        return split

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

    def _find_split(self, batch: InputBatch, row_tokens: list[int]) -> BatchSplit | None:
        """Where the halves meet; None if one would be empty."""
        num_single, num_samples = batch.attention.num_single_rows, len(batch.sampling)
        if num_single == batch.num_rows or num_samples == batch.num_tokens:
            return split_verified(row_tokens)
        split = _without_single_ends(split_prompts(row_tokens, self._threshold))
        if split is not None and not _holds_its_samples(batch, split):
            return split_rows(row_tokens)
        return split

    def parts(self, batch: InputBatch, split: BatchSplit) -> tuple[BatchPart, BatchPart]:
        """Both halves; their tensors are views of the batch's or derived on its device."""
        token, step = split.token, batch.attention
        num_first = int((batch.sampling < split.row).sum())
        lines = batch.logit_indices
        return (
            BatchPart(
                positions=batch.positions[:token],
                slots=batch.slots[:token],
                attention=first_half(step, split, self._block_size),
                chosen=None if lines is None else lines[:num_first],
            ),
            BatchPart(
                # Copies: kernels are compiled for aligned addresses.
                positions=batch.positions[token:].clone(),
                slots=batch.slots[token:].clone(),
                attention=second_half(step, split),
                chosen=None if lines is None else lines[num_first:] - token,
            ),
        )

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
        flows = [
            Flow(ctx=ctx, x=half, slots=ctx.slots, chosen=lines, checks_finite=checks_finite)
            for ctx, half, lines in zip(
                contexts, (x[: split.token], x[split.token :]), lines_of, strict=True
            )
        ]
        drive(stages, flows, self._lanes, lag=schedule.lag, annotate=self._annotate)
        first, second = (self._model.result(flow) for flow in flows)
        kept = [flow.entering for flow in flows]
        entering = {layer: torch.cat([streams[layer] for streams in kept]) for layer in kept[0]}
        hidden = first.hidden
        if contexts[0].last is not None:  # a cut row's last token is the second half's
            hidden = hidden[: split.row]
        result = ForwardResult(
            hidden=torch.cat((hidden, second.hidden)),
            is_finite=(
                None
                if first.is_finite is None or second.is_finite is None
                else torch.cat((first.is_finite, second.is_finite))
            ),
        )
        return self._model.exporting(result, _of_whole(chosen, split), entering)


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


def _without_single_ends(split: BatchSplit | None) -> BatchSplit | None:
    """Rows of one token come first in a step, so a cut leaves none behind longer rows."""
    if split is None or split.row_tokens != 1:
        return split
    return BatchSplit(row=split.row, token=split.token - 1) if split.row > 0 else None


def _holds_its_samples(batch: InputBatch, split: BatchSplit) -> bool:
    """Whether all samples of a cut row lie in its second part."""
    if not split.is_two_chunk:
        return True
    left = int(batch.attention.num_new_tokens[split.row]) - split.row_tokens
    return left >= int((batch.sampling == split.row).sum())


def _nvtx(name: str) -> AbstractContextManager[object]:
    mark: Callable[[str], AbstractContextManager[object]] = torch.cuda.nvtx.range
    return mark(name)


def _no_mark(name: str) -> AbstractContextManager[object]:
    return nullcontext()

"""A launched step on its way back: copies to the host, and the `StepResult` made from them.

Copies are queued behind the step in its stream; `wait` blocks until they are there. Knows the
batch's order and nothing of how tokens were computed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.input_batch import InputBatch
from engine.execution.prompt_logprobs import PromptTensors
from engine.execution.step_slots import StepSlot, StepSlots
from engine.execution.written_blocks import WrittenBlocks
from engine.sampling.choice import LabelTensors, LogprobTensors
from engine.scheduling.plan import StepPlan, StepResult, TokenLogprobs

NOT_FINITE = -1  # in place of a token, as `kernels.input_ids` has it
_NOT_SAMPLED = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """What a step leaves on the device for the host."""

    # [S] int32  a token or `NOT_FINITE`; None: no row of the step samples
    drawn: Tensor | None
    # [T] bool; None = the sampled rows' logits say all there is to say
    is_finite_token: Tensor | None
    # Of the few rows that ask; None = there is none.
    logprobs: LogprobTensors | None = None
    labels: LabelTensors | None = None
    prompt: PromptTensors | None = None
    # Of a worker that sends its blocks away; on the host already, or on its way there.
    written: WrittenBlocks | None = None


class PendingStep:
    """A step with rows; its results are final once `wait` returns."""

    def __init__(
        self,
        plan: StepPlan,
        batch: InputBatch,
        slots: StepSlots,
        slot: StepSlot,
        left: StepTensors,
    ) -> None:
        """Queues copies of what is `left`, and stops the timer of `slot` behind them."""
        self._plan = plan
        self._batch = batch
        self._slots = slots
        self._slot = slot
        if left.drawn is not None:
            slot.copy_drawn(left.drawn)
        self._logprobs = left.logprobs.map(_to_host) if left.logprobs else None
        self._labels = left.labels.map(_to_host) if left.labels else None
        self._prompt = left.prompt.map(_to_host) if left.prompt else None
        self._written = left.written
        flags = left.is_finite_token
        self._is_finite_token = None if flags is None else _to_host(flags)
        slot.timer.stop()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._slot.timer.is_done

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host. Called once."""
        duration_s = self._slot.timer.wait()
        if self._written is not None:
            self._written.keep()
        sampled_places = self._batch.plan_rows[self._batch.sampling]
        # [R]  by plan row
        drawn = np.full(self._batch.num_rows, _NOT_SAMPLED, dtype=np.int32)
        drawn[sampled_places] = self._slot.drawn(len(sampled_places))
        self._slots.give_back(self._slot)
        if self._is_finite_token is not None:
            drawn[~self._finite_chunks(self._is_finite_token)] = NOT_FINITE
        if self._prompt is not None:
            drawn[self._prompt.not_finite()] = NOT_FINITE
        token_ids: list[int] = drawn.tolist()
        tokens = [[token_id] if token_id >= 0 else [] for token_id in token_ids]
        labels = self._label_values(sampled_places, token_ids)
        for place in labels:
            tokens[place] = []
        return StepResult(
            step=self._plan.step,
            tokens=tokens,
            logprobs=self._logprob_records(sampled_places.tolist(), token_ids),
            is_finite=(drawn != NOT_FINITE).tolist(),
            duration_s=duration_s,
            labels=labels,
            prompt_logprobs=self._prompt.records() if self._prompt else {},
        )

    def _finite_chunks(self, is_finite_token: Tensor) -> NDArray[np.bool_]:
        """[R] by plan row: whether every token of its chunk was computed from finite numbers."""
        flags = is_finite_token.numpy()
        by_plan_row = np.empty(self._batch.num_rows, dtype=bool)
        by_plan_row[self._batch.plan_rows] = np.logical_and.reduceat(
            flags, self._batch.first_tokens
        )
        return by_plan_row

    def _logprob_records(
        self, sampled_places: list[int], token_ids: list[int]
    ) -> list[TokenLogprobs | None]:
        """[R] of the rows that asked and got a token."""
        by_plan_row: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self._logprobs is not None:
            records = self._logprobs.records(len(sampled_places))
            for place, record in zip(sampled_places, records, strict=True):
                if token_ids[place] >= 0:
                    by_plan_row[place] = record
        return by_plan_row

    def _label_values(
        self, sampled_places: NDArray[np.int64], token_ids: list[int]
    ) -> dict[int, list[float]]:
        """Place in the plan -> what a row that ends with its prompt asked for, if it is finite."""
        if self._labels is None:
            return {}
        places: list[int] = sampled_places.tolist()
        by_line = self._labels.by_line()
        return {places[i]: v for i, v in by_line.items() if token_ids[places[i]] >= 0}


class EmptyStep:
    """A step without rows: it only changed the rows' tables or zeroed blocks."""

    def __init__(self, step: int) -> None:
        self._step = step

    @property
    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return StepResult(step=self._step, tokens=[], logprobs=[], is_finite=[])


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is complete when the stream gets there; on the CPU, the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

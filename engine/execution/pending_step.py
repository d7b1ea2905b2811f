"""A launched step on its way back: copies to the host, and the `StepResult` made from them.

Copies are queued behind the step in its stream; `wait` blocks until they are there. Knows the
batch's order and nothing of how tokens were computed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.execution.input_batch import InputBatch
from engine.execution.step_timer import StepTimer
from engine.sampling.sampler import LogprobTensors, SampledTensors
from engine.scheduling.plan import StepPlan, StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostCopies:
    # [S] int64
    token_ids: Tensor
    # [S] bool
    is_finite: Tensor
    # [T] bool; None = the sampled rows' logits say all there is to say
    is_finite_token: Tensor | None
    logprobs: LogprobTensors | None


class PendingStep:
    """A step with rows; its results are final once `wait` returns."""

    def __init__(
        self,
        plan: StepPlan,
        batch: InputBatch,
        sampled: SampledTensors | None,
        is_finite_token: Tensor | None,
        timer: StepTimer,
    ) -> None:
        """Queues the copies, and stops `timer` behind them.

        `sampled` None: no row of the step samples.
        """
        self._plan = plan
        self._batch = batch
        self._copies = _HostCopies(
            token_ids=_to_host(sampled.token_ids) if sampled else torch.empty(0, dtype=torch.int64),
            is_finite=_to_host(sampled.is_finite) if sampled else torch.empty(0, dtype=torch.bool),
            is_finite_token=None if is_finite_token is None else _to_host(is_finite_token),
            logprobs=sampled.logprobs.map(_to_host) if sampled and sampled.logprobs else None,
        )
        self._timer = timer
        timer.stop()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._timer.is_done

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        duration_s = self._timer.wait()
        num_rows = self._batch.num_rows
        tokens: list[list[int]] = [[] for _ in range(num_rows)]
        logprobs: list[TokenLogprobs | None] = [None] * num_rows
        is_finite = self._finite_chunks()
        places = self._batch.plan_rows[self._batch.sampling].tolist()
        records = self._logprob_records(len(places))
        drawn = zip(
            places, self._copies.token_ids.tolist(), self._copies.is_finite.tolist(), strict=True
        )
        for line, (place, token_id, is_sound) in enumerate(drawn):
            is_finite[place] = is_finite[place] and is_sound
            if is_finite[place]:
                tokens[place] = [token_id]
                logprobs[place] = records[line]
        return StepResult(
            step=self._plan.step,
            tokens=tokens,
            logprobs=logprobs,
            is_finite=is_finite,
            duration_s=duration_s,
        )

    def _finite_chunks(self) -> list[bool]:
        """By plan row: whether every token of its chunk was computed from finite numbers."""
        num_rows = self._batch.num_rows
        if self._copies.is_finite_token is None:
            return [True] * num_rows
        flags = self._copies.is_finite_token.numpy()
        by_batch_row = np.logical_and.reduceat(flags, self._batch.first_tokens)
        by_plan_row = np.empty(num_rows, dtype=bool)
        by_plan_row[self._batch.plan_rows] = by_batch_row
        finite: list[bool] = by_plan_row.tolist()
        return finite

    def _logprob_records(self, num_lines: int) -> list[TokenLogprobs | None]:
        if self._copies.logprobs is None:
            return [None] * num_lines
        return self._copies.logprobs.records(num_lines)


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

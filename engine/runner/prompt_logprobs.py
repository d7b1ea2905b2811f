"""Computes log-probabilities of prompt tokens from a chunk's hidden states, for rows that ask.

The hidden states of a chunk [c, c + n) give the log-probabilities of tokens [c + 1, c + n], as far
as the prompt has them. Logits of that many positions would not fit in memory beside the model. So
they are computed for `_SLICE_POSITIONS` positions at a time and reduced before the next slice.
Finding the best tokens of a slice takes about 30 bytes per logit (0.3 GB for a vocabulary of
152,000). The reduced tensors are small; they stay on the device and are copied to the host
asynchronously, like the sampled tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv.tables import concat_ranges
from engine.plan import RowAdmission, StepPlan
from engine.request import PromptLogprobs
from engine.runner.inputs import InputBatch
from engine.runner.request_rows import RequestRows
from engine.sampling.logprobs import best_tokens
from engine.sampling.staging import Staging

_SLICE_POSITIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """The positions of one row in a step whose hidden states score prompt tokens."""

    plan_row: int
    row: int  # device row
    first: int  # first position; its hidden state scores the next token
    num_positions: int
    num_best: int  # the k that the request asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTensors:
    """Log-probabilities of N prompt tokens, chunk by chunk, on the device or on the host."""

    chunks: list[PromptChunk]
    chosen: Tensor  # fp32 [N]
    ranks: Tensor  # int64 [N]  1 = best
    top_ids: Tensor  # int64 [N, K]  best first, lower id among equals; K = the largest k asked for
    top_values: Tensor  # fp32 [N, K]
    is_finite: Tensor  # bool [N]

    def map(self, copy: Callable[[Tensor], Tensor]) -> "PromptTensors":
        """A copy with `copy` applied to every tensor, for example to bring them to the host."""
        return replace(
            self,
            chosen=copy(self.chosen),
            ranks=copy(self.ranks),
            top_ids=copy(self.top_ids),
            top_values=copy(self.top_values),
            is_finite=copy(self.is_finite),
        )

    def not_finite(self) -> list[int]:
        """Plan rows with a position whose logits are not finite. Reads the tensors."""
        return [c.plan_row for c, at in self._places() if not bool(self.is_finite[at].all())]

    def records(self) -> dict[int, PromptLogprobs]:
        """Log-probabilities by plan row. Reads the tensors."""
        return {
            chunk.plan_row: PromptLogprobs(
                first=chunk.first + 1,
                chosen=self.chosen[at].tolist(),
                ranks=self.ranks[at].tolist(),
                top_ids=self.top_ids[at, : chunk.num_best].tolist(),
                top_logprobs=self.top_values[at, : chunk.num_best].tolist(),
            )
            for chunk, at in self._places()
        }

    def _places(self) -> Iterator[tuple[PromptChunk, slice]]:
        start = 0
        for chunk in self.chunks:
            yield chunk, slice(start, start + chunk.num_positions)
            start += chunk.num_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    num_best: int
    num_prompt_tokens: int


class PromptLogprobRows:
    """The rows whose prompt log-probabilities are asked for, until their prompt is computed.

    Steps without such rows cost nothing. `compute_logits`: hidden [S, hidden] -> logits [S, vocab].
    """

    def __init__(
        self,
        request_rows: RequestRows,
        compute_logits: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        self._request_rows = request_rows
        self._compute_logits = compute_logits
        self._staging = Staging(device)
        self._asked: dict[int, _Asked] = {}

    def add(self, admission: RowAdmission) -> None:
        """Track the row if it asks for them and has no output yet; with output, they were sent."""
        num_best, num_prompt = admission.params.prompt_logprobs, admission.num_prompt_tokens
        if num_best is not None and len(admission.token_ids) == num_prompt:
            self._asked[admission.row] = _Asked(num_best=num_best, num_prompt_tokens=num_prompt)

    def remove(self, row: int) -> None:
        self._asked.pop(row, None)

    def due(self, plan: StepPlan) -> list[PromptChunk]:
        """The step's chunks that score prompt tokens; stops tracking rows whose prompt they end."""
        if not self._asked or self._asked.keys().isdisjoint(plan.rows):
            return []
        chunks = []
        for plan_row, row in enumerate(plan.rows):
            asked = self._asked.get(row)
            if asked is None:
                continue
            first, num_new = plan.num_computed_tokens[plan_row], plan.num_new_tokens[plan_row]
            num_left = asked.num_prompt_tokens - 1 - first
            if num_new > num_left:
                del self._asked[row]
            if num_left > 0:
                chunk = PromptChunk(
                    plan_row=plan_row,
                    row=row,
                    first=first,
                    num_positions=min(num_new, num_left),
                    num_best=asked.num_best,
                )
                chunks.append(chunk)
        return chunks

    def read(self, chunks: list[PromptChunk], batch: InputBatch, hidden: Tensor) -> PromptTensors:
        """Compute the log-probabilities that `chunks` ask for.

        hidden: [T, hidden], the stream after the final norm at every token of the batch.
        """
        counts = np.array([chunk.num_positions for chunk in chunks])
        first = np.array([chunk.first for chunk in chunks])
        rows = np.repeat(np.array([chunk.row for chunk in chunks]), counts)
        targets = self._request_rows.input_ids(rows, concat_ranges(first + 1, counts))
        lines = concat_ranges(_first_lines(chunks, batch), counts)
        line, target = self._staging.send(lines.astype(np.int64), targets.astype(np.int64))
        num_best = max(chunk.num_best for chunk in chunks)
        slices = [
            self._read_slice(hidden.index_select(0, at), wanted, num_best)
            for at, wanted in zip(
                line.split(_SLICE_POSITIONS), target.split(_SLICE_POSITIONS), strict=True
            )
        ]
        chosen, ranks, top_ids, top_values, is_finite = map(torch.cat, zip(*slices, strict=True))
        return PromptTensors(
            chunks=chunks,
            chosen=chosen,
            ranks=ranks,
            top_ids=top_ids,
            top_values=top_values,
            is_finite=is_finite,
        )

    def _read_slice(
        self, hidden: Tensor, token_ids: Tensor, num_best: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The fields of `PromptTensors` for a few positions; token_ids: int64 [P]."""
        logits = self._compute_logits(hidden).float()
        norm = logits.logsumexp(dim=-1, keepdim=True)
        chosen = logits.gather(1, token_ids.unsqueeze(1))
        ranks = 1 + (logits > chosen).sum(dim=-1)
        top_ids = best_tokens(logits, min(num_best, logits.shape[1]))
        top_values = logits.gather(1, top_ids) - norm
        return (chosen - norm).squeeze(1), ranks, top_ids, top_values, norm.isfinite().squeeze(1)


def _first_lines(chunks: list[PromptChunk], batch: InputBatch) -> NDArray[np.int64]:
    """[C]  index of each chunk's first token in the batch."""
    batch_row = np.empty_like(batch.plan_rows)
    batch_row[batch.plan_rows] = np.arange(batch.num_rows)
    return batch.first_tokens[batch_row[[chunk.plan_row for chunk in chunks]]]

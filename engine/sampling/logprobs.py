"""Computes the log-probabilities that clients ask for: of drawn, best and named tokens, of labels.

They are the model's own, from logits before any processing. How the token was chosen is not known
here. A row that asks for labels draws nothing; one gather reads the labels of all rows of a step.
"""

import numpy as np
import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.feature import positions_of, take
from engine.sampling.sampled import LabelTensors, LogprobTensors
from engine.sampling.staging import Staging
from kernels.sampling.choices import GreedyChoice


class Labels:
    """Reads the labels' log-probabilities of prompt-only rows; does not change logits."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._token_ids: dict[int, tuple[int, ...]] = {}  # row -> label ids, perhaps none

    def add(self, row: int, params: SamplingParams) -> None:
        self._token_ids[row] = params.label_token_ids

    def remove(self, row: int) -> None:
        self._token_ids.pop(row, None)

    def read(self, logits: Tensor, rows: list[int]) -> LabelTensors | None:
        """Label log-probabilities of the prompt-only rows in `rows`; None if there is none.

        logits: [S, vocab], unprocessed; not changed.
        """
        positions = positions_of(rows, self._token_ids)
        if not positions:
            return None
        asked = [self._token_ids[rows[p]] for p in positions]
        counts = [len(token_ids) for token_ids in asked]
        lines = np.repeat(np.arange(len(positions)), counts)
        index, line, token_ids = self._staging.send(
            np.array(positions, dtype=np.int64),
            lines.astype(np.int64),
            np.array([i for ids in asked for i in ids], dtype=np.int64),
        )
        part = take(logits, index).float()  # [P, vocab]
        values = part[line, token_ids] - part.logsumexp(dim=-1)[line]
        return LabelTensors(positions=positions, counts=counts, values=values)


class Logprobs:
    """Reads log-probabilities for the rows that ask for them; does not change logits."""

    def __init__(self, vocab_size: int, staging: Staging) -> None:
        self._vocab_size = vocab_size
        self._staging = staging
        self._num_best: dict[int, int] = {}  # row -> k >= 0
        self._named: dict[int, tuple[int, ...]] = {}  # row -> the ids it asks for; not k best then

    def __contains__(self, row: object) -> bool:
        return row in self._num_best

    def add(self, row: int, params: SamplingParams) -> None:
        if params.logprobs is None:
            return
        self._num_best[row] = min(params.logprobs, self._vocab_size)
        if params.logprob_token_ids:
            self._named[row] = params.logprob_token_ids
            self._num_best[row] = len(params.logprob_token_ids)

    def remove(self, row: int) -> None:
        self._num_best.pop(row, None)
        self._named.pop(row, None)

    def read(self, logits: Tensor, rows: list[int], choice: GreedyChoice) -> LogprobTensors | None:
        """Log-probabilities of the rows that asked; None if there is none.

        `choice`: the token of each line. logits: [S, vocab], unprocessed; not changed.
        """
        positions = positions_of(rows, self._num_best)
        if not positions:
            return None
        index = self._staging.indices(positions)
        part = take(logits, index).float()
        logprobs = part.log_softmax(dim=-1)  # [P, vocab]
        token_ids = choice.token_ids.index_select(0, index).unsqueeze(1)
        chosen = logprobs.gather(1, token_ids).squeeze(1)
        is_finite = choice.is_finite.index_select(0, index)
        limits = [self._num_best[rows[i]] for i in positions]
        top_ids = best_tokens(part, max(limits))  # [P, max k]
        named = self._put_named(top_ids, [rows[i] for i in positions])
        top_values = logprobs.gather(1, top_ids)
        num_finite = top_values.isfinite().sum(dim=-1)
        if named is not None:  # their values are listed whatever they are
            num_finite.index_fill_(0, named, top_ids.shape[1])
        return LogprobTensors(
            positions=positions,
            limits=limits,
            chosen=chosen.masked_fill(~is_finite, torch.nan),
            top_ids=top_ids,
            top_values=top_values,
            num_finite=num_finite,
        )

    def _put_named(self, top_ids: Tensor, rows: list[int]) -> Tensor | None:
        """Replaces the best ids of rows that named others, in place; returns the lines of these.

        top_ids: int64 [P, K], of `rows`; K is at least the number that any row named.
        """
        lines = positions_of(rows, self._named)
        if not lines:
            return None
        ids = np.zeros((len(lines), top_ids.shape[1]), dtype=np.int64)
        for line_ids, line in zip(ids, lines, strict=True):
            named = self._named[rows[line]]
            line_ids[: len(named)] = named
        index, values = self._staging.send(np.array(lines, dtype=np.int64), ids)
        top_ids.index_copy_(0, index, values)
        return index


def best_tokens(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row of fp32 [P, vocab], best first, int64 [P, k].

    Equal logits are ordered by lower id. The key's high half is the value as an integer of the same
    order, and its low half is the id. So no two keys are equal and `topk` has no ties to break.
    """
    num_rows, vocab_size = logits.shape
    ids = torch.arange(vocab_size, device=logits.device)
    if k == 0:
        return ids.new_empty((num_rows, 0))
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, which it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(torch.int64) << 32) | (0xFFFFFFFF - ids)
    return 0xFFFFFFFF - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)

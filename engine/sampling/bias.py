"""Raises, lowers or bans logits by token id: logit_bias and min_tokens.

Does not decide when a request ends: the scheduler implements ignore_eos. Here eos and stop ids are
only kept from being drawn too early.
"""

import numpy as np
import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.feature import Ahead, positions_of
from engine.sampling.staging import Staging


class LogitBias:
    """Adds the client's bias to named tokens."""

    def __init__(self, vocab_size: int, staging: Staging) -> None:
        self._vocab_size = vocab_size
        self._staging = staging
        self._biases: dict[int, tuple[Tensor, ...]] = {}  # row -> ids [B], values [B]

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        if not params.logit_bias:
            return False
        ids = list(params.logit_bias)
        assert all(0 <= i < self._vocab_size for i in ids), f"row {row}: logit_bias for {ids}"
        self._biases[row] = self._staging.send(
            np.array(ids, dtype=np.int64),
            np.array(list(params.logit_bias.values()), dtype=np.float32),
        )
        return True

    def remove(self, row: int) -> None:
        self._biases.pop(row, None)

    def apply(self, logits: Tensor, rows: list[int], ahead: Ahead | None = None) -> None:
        for position in positions_of(rows, self._biases):
            ids, values = self._biases[rows[position]]
            logits[position].index_add_(0, ids, values)

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        """Does nothing: a bias does not depend on what was drawn."""


class MinTokens:
    """Bans eos and stop ids until a row has `min_tokens` output tokens; then removes the row."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], staging: Staging) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._staging = staging
        self._banned: dict[int, Tensor] = {}  # row -> ids [B]
        self._num_missing: dict[int, int] = {}  # row -> output tokens still to come, > 0

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        num_missing = params.min_tokens - len(output_ids)
        eos_ids = () if params.ignore_eos else self._eos_token_ids
        # A stop id outside the vocabulary can never be drawn, so it needs no ban.
        stop_ids = [i for i in params.stop_token_ids if 0 <= i < self._vocab_size]
        banned = sorted({*eos_ids, *stop_ids})
        if num_missing <= 0 or not banned:
            return False
        self._num_missing[row] = num_missing
        self._banned[row] = self._staging.indices(banned)
        return True

    def remove(self, row: int) -> None:
        self._num_missing.pop(row, None)
        self._banned.pop(row, None)

    def apply(self, logits: Tensor, rows: list[int], ahead: Ahead | None = None) -> None:
        for position in positions_of(rows, self._banned):
            num_ahead = 0 if ahead is None else len(ahead[position])
            if num_ahead >= self._num_missing[rows[position]]:
                continue
            logits[position].index_fill_(0, self._banned[rows[position]], -torch.inf)

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        for position in positions_of(rows, self._num_missing):
            row = rows[position]
            self._num_missing[row] -= 1
            if self._num_missing[row] == 0:
                self.remove(row)

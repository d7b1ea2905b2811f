"""Logits held to a constraint: before a row samples, whatever would break it becomes impossible.

What may come next is computed on the host, from every token the row has; so a row samples only
after its newest token was heard here (`hear`). All rows of a step share one copy to the device.
Knows no languages of constraints: a matcher says which tokens may come next.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.request import Constraint, SamplingParams
from engine.sampling.feature import positions_of, put, take
from engine.sampling.staging import Staging

_BITS = 32  # of one word of a mask


class Matcher(Protocol):
    """Follows one output, token by token."""

    def accept_token(self, token_id: int) -> bool:
        """The output goes on with this token; False, and no effect, if it may not."""
        ...

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool:
        """Write line `index` of `bitmask` int32 [P, words]: bit i of word w says 32 * w + i may."""
        ...


class Matchers(Protocol):
    """Where matchers come from."""

    def matcher(self, constraint: Constraint) -> Matcher:
        """One for an output without tokens."""
        ...


class NoMatchers:
    """Of a sampler whose rows have no constraints."""

    def matcher(self, constraint: Constraint) -> Matcher:
        raise AssertionError(f"a {constraint.kind.value} constraint, and nothing compiles it here")


class Constraints:
    """Bans every token after which the output could not meet its row's constraint."""

    def __init__(self, vocab_size: int, matchers: Matchers, staging: Staging) -> None:
        self._num_words = -(-vocab_size // _BITS)
        self._vocab_size = vocab_size
        self._source = matchers
        self._staging = staging
        self._matchers: dict[int, Matcher] = {}  # row -> its matcher, at its newest token

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        if params.constraint is None:
            return False
        self._matchers[row] = self._source.matcher(params.constraint)
        for token_id in output_ids:
            self.hear(row, token_id)
        return True

    def remove(self, row: int) -> None:
        self._matchers.pop(row, None)

    def hear(self, row: int, token_id: int) -> None:
        """The row's output goes on with this token, which was sampled under its constraint."""
        is_accepted = self._matchers[row].accept_token(token_id)
        assert is_accepted, f"row {row}: token {token_id} breaks the constraint it was drawn under"

    def apply(self, logits: Tensor, rows: list[int]) -> None:
        positions = positions_of(rows, self._matchers)
        if not positions:
            return
        masks = torch.empty((len(positions), self._num_words), dtype=torch.int32)
        masks.fill_(-1)  # a matcher that allows everything may leave its line alone
        for line, position in enumerate(positions):
            self._matchers[rows[position]].fill_next_token_bitmask(masks, line)
        index, words = self._staging.send(np.array(positions, dtype=np.int64), masks.numpy())
        part = take(logits, index)
        part.masked_fill_(~self._allowed(words), -torch.inf)
        put(logits, index, part)

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        """Their ids are on the device: `hear` tells them once they are known here."""

    def _allowed(self, words: Tensor) -> Tensor:
        """Which tokens may come; int32 [P, words] as bool [P, vocab]."""
        shifts = torch.arange(_BITS, dtype=torch.int32, device=words.device)
        bits = (words.unsqueeze(-1) >> shifts) & 1  # [P, words, 32]
        return bits.view(words.shape[0], -1)[:, : self._vocab_size].bool()

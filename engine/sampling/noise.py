"""The randomness of a draw: Gumbel noise named by (seed, index, token), added to the logits.

Knows where each row stands in its own sequence of draws, and nothing of what is in the batch.
"""

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.feature import positions_of, put, take
from kernels.sample import gumbel


def signed_seed(seed: int) -> int:
    """The low 64 bits of a client's seed, as a signed 64-bit integer."""
    return (seed + 2**63) % 2**64 - 2**63


class GumbelNoise:
    """Adds each drawing row's noise; the row's index is the number of its output tokens so far."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._token_ids = torch.arange(vocab_size, device=device)  # [vocab]
        self._seeds: dict[int, int] = {}  # row -> seed, as a signed 64-bit integer
        self._indices: dict[int, int] = {}  # row -> output tokens so far

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        if params.is_greedy:
            return False
        self._seeds[row] = signed_seed(params.seed)
        self._indices[row] = len(output_ids)
        return True

    def remove(self, row: int) -> None:
        self._seeds.pop(row, None)
        self._indices.pop(row, None)

    def apply(self, logits: Tensor, rows: list[int]) -> None:
        positions = positions_of(rows, self._seeds)
        if not positions:
            return
        members = [rows[position] for position in positions]
        seeds = torch.tensor([self._seeds[row] for row in members], device=logits.device)
        indices = torch.tensor([self._indices[row] for row in members], device=logits.device)
        index = torch.tensor(positions, device=logits.device)
        part = take(logits, index)
        part += gumbel(seeds, indices, self._token_ids)
        put(logits, index, part)

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        """Which tokens were drawn does not matter; `advance` counts that they were."""
        self.advance(rows)

    def advance(self, rows: list[int]) -> None:
        """Those of `rows` that are ours drew a token each."""
        for row in rows:
            if row in self._indices:
                self._indices[row] += 1

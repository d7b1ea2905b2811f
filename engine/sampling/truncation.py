"""Applies temperature and the cuts before a draw: top_k, top_p, min_p.

Every cut is by value: a row gets a threshold and keeps each token at or above it, so equal logits
are kept or dropped together, whatever their ids. Plain torch that reads results back to the host:
the implementation for a CPU and the oracle of `kernels.sampling.limits_triton`, which does the same
on a GPU without waiting. Knows nothing of history, bias or noise. Greedy rows are not handled here.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.feature import Ahead, positions_of, put, take

# Below any meaningful temperature, and far above where fp32 division would give 0 / 0.
SMALLEST_TEMPERATURE = 1e-30
# Number of best tokens that top_p examines first. Most nuclei are smaller, and a full sort of the
# vocabulary costs about twenty times as much.
_FIRST_LOOK_TOKENS = 64


class Temperature:
    """Shifts a row's maximum to 0, then divides: only differences are scaled, so none overflows."""

    def __init__(self) -> None:
        self._temperatures: dict[int, float] = {}  # row -> temperature > 0

    def __contains__(self, row: object) -> bool:
        return row in self._temperatures

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        if params.is_greedy:
            return False
        self._temperatures[row] = max(params.temperature, SMALLEST_TEMPERATURE)
        return True

    def remove(self, row: int) -> None:
        self._temperatures.pop(row, None)

    def apply(self, logits: Tensor, rows: list[int], ahead: Ahead | None = None) -> None:
        positions = positions_of(rows, self._temperatures)
        if not positions:
            return
        index = torch.tensor(positions, device=logits.device)
        part = take(logits, index)
        part -= part.amax(dim=-1, keepdim=True)
        part /= column(self._temperatures, [rows[position] for position in positions], part)
        put(logits, index, part)

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        """Does nothing: a temperature does not depend on what was drawn."""


class TopK:
    """Keeps every token whose logit is at least the k-th largest, including ties at the k-th."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._limits: dict[int, int] = {}  # row -> k, smaller than the vocabulary

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        if params.is_greedy or not 0 < params.top_k < self._vocab_size:
            return False
        self._limits[row] = params.top_k
        return True

    def remove(self, row: int) -> None:
        self._limits.pop(row, None)

    def apply(self, logits: Tensor, rows: list[int], ahead: Ahead | None = None) -> None:
        positions = positions_of(rows, self._limits)
        if not positions:
            return
        limits = [self._limits[rows[position]] for position in positions]
        index = torch.tensor(positions, device=logits.device)
        part = take(logits, index)
        best = part.topk(max(limits), dim=-1).values  # [P, max k], descending
        last = torch.tensor(limits, device=part.device).unsqueeze(1) - 1
        part.masked_fill_(part < best.gather(1, last), -torch.inf)
        put(logits, index, part)

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        """Does nothing: a cut does not depend on what was drawn."""


class TopP:
    """Keeps the smallest set of best tokens whose probability reaches top_p, at least one.

    A token stays if the tokens strictly before it sum to less than top_p. All tokens equal to the
    last one that stays also stay.
    """

    def __init__(self) -> None:
        self._masses: dict[int, float] = {}  # row -> top_p < 1

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        if params.is_greedy or params.top_p >= 1.0:
            return False
        self._masses[row] = params.top_p
        return True

    def remove(self, row: int) -> None:
        self._masses.pop(row, None)

    def apply(self, logits: Tensor, rows: list[int], ahead: Ahead | None = None) -> None:
        positions = positions_of(rows, self._masses)
        if not positions:
            return
        index = torch.tensor(positions, device=logits.device)
        part = take(logits, index)
        listed = [self._masses[rows[position]] for position in positions]
        masses = torch.tensor(listed, dtype=torch.float64, device=part.device).unsqueeze(1)
        part.masked_fill_(part < _nucleus_cutoff(part, masses), -torch.inf)
        put(logits, index, part)

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        """Does nothing: a cut does not depend on what was drawn."""


def _nucleus_cutoff(logits: Tensor, masses: Tensor) -> Tensor:
    """The smallest logit each row keeps, fp32 [P, 1]; logits fp32 [P, vocab], masses [P, 1].

    Examines a row's best 64 tokens, then eight times as many, until its mass is reached. The number
    needed depends on the row alone, so its result does not depend on the other rows.
    """
    vocab_size = logits.shape[1]
    largest = logits.amax(dim=-1, keepdim=True)
    totals = (logits - largest).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    wanted = masses * totals  # [P, 1], in units of the best token's probability
    cutoff = torch.empty_like(largest)
    unsettled = torch.arange(logits.shape[0], device=logits.device)
    num_tokens = _FIRST_LOOK_TOKENS
    while unsettled.numel() > 0:
        num_tokens = min(num_tokens, vocab_size)
        best = logits[unsettled].topk(num_tokens, dim=-1).values  # [U, num_tokens], descending
        reached = (best - largest[unsettled]).exp_().cumsum(dim=-1, dtype=torch.float64)
        # `reached` never decreases: kept are the tokens short of the mass, plus one more.
        num_short = (reached < wanted[unsettled]).sum(dim=-1, keepdim=True)
        cutoff[unsettled] = best.gather(1, num_short.clamp(max=num_tokens - 1))
        if num_tokens == vocab_size:
            break
        unsettled = unsettled[num_short.squeeze(1) == num_tokens]
        num_tokens *= 8
    return cutoff


class MinP:
    """Keeps the tokens whose probability is at least min_p times the largest."""

    def __init__(self) -> None:
        self._log_shares: dict[int, float] = {}  # row -> log(min_p)

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        if params.is_greedy or params.min_p <= 0.0:
            return False
        self._log_shares[row] = math.log(params.min_p)
        return True

    def remove(self, row: int) -> None:
        self._log_shares.pop(row, None)

    def apply(self, logits: Tensor, rows: list[int], ahead: Ahead | None = None) -> None:
        positions = positions_of(rows, self._log_shares)
        if not positions:
            return
        index = torch.tensor(positions, device=logits.device)
        part = take(logits, index)
        log_shares = column(self._log_shares, [rows[position] for position in positions], part)
        part.masked_fill_(part < part.amax(dim=-1, keepdim=True) + log_shares, -torch.inf)
        put(logits, index, part)

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        """Does nothing: a cut does not depend on what was drawn."""


def column(values: Mapping[int, float], rows: Sequence[int], like: Tensor) -> Tensor:
    """The rows' values as [len(rows), 1], with the dtype and device of `like`."""
    listed = [values[row] for row in rows]
    return torch.tensor(listed, dtype=like.dtype, device=like.device).unsqueeze(1)

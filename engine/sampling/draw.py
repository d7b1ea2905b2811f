"""Draws tokens for rows with a temperature: torch features on a CPU, one fused object on a GPU.

Both implement steps 6 to 10 of `Sampler`; the device decides once which one is used. Their
randomness is Gumbel noise that depends on (seed, index, token) and is added to the logits. Knows
nothing of history and bias, which were applied to the logits before.
"""

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.feature import Ahead, LogitFeature, positions_of, put, take
from engine.sampling.staging import Staging
from engine.sampling.truncation import SMALLEST_TEMPERATURE, MinP, Temperature, TopK, TopP
from kernels.sampling.choices import Draws, GreedyChoice
from kernels.sampling.noise import gumbel
from kernels.sampling.rows import greedy


def signed_seed(seed: int) -> int:
    """The low 64 bits of a client's seed, as a signed 64-bit integer."""
    return (seed + 2**63) % 2**64 - 2**63


class GumbelNoise:
    """Adds each drawing row's noise; the noise index is the number of its output tokens so far."""

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

    def apply(
        self,
        logits: Tensor,
        rows: list[int],
        ahead: Ahead | None = None,
        behind: Tensor | None = None,
    ) -> None:
        """behind: as of `Draw.choose`."""
        positions = positions_of(rows, self._seeds)
        if not positions:
            return
        members = [rows[position] for position in positions]
        seeds = torch.tensor([self._seeds[row] for row in members], device=logits.device)
        counts = [self._indices[row] for row in members]
        if ahead is not None:
            counts = [n + len(ahead[p]) for n, p in zip(counts, positions, strict=True)]
        indices = torch.tensor(counts, device=logits.device)
        index = torch.tensor(positions, device=logits.device)
        if behind is not None:
            indices -= behind[index]
        part = take(logits, index)
        part += gumbel(seeds, indices, self._token_ids)
        put(logits, index, part)

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        """Only counts the draws; which tokens were drawn does not matter."""
        self.advance(rows)

    def advance(self, rows: list[int]) -> None:
        """Count one drawn token for each tracked row in `rows`."""
        for row in rows:
            if row in self._indices:
                self._indices[row] += 1


class Draw(Protocol):
    """The rows that have a temperature, and the position of each in its sequence of draws."""

    def __contains__(self, row: object) -> bool: ...

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        """Track the row unless it is greedy; returns whether it is tracked."""
        ...

    def remove(self, row: int) -> None:
        """Forget the row; does nothing if it is not tracked."""
        ...

    def choose(
        self,
        logits: Tensor,
        positions: list[int],
        rows: list[int],
        ahead: Ahead | None = None,
        behind: Tensor | None = None,
    ) -> GreedyChoice:
        """Draw for line `positions[p]` of `logits` [S, vocab] as `rows[p]` asks; [P] results.

        All `rows` must be tracked. Does not change `logits` and advances no row. `ahead`: [P],
        as in `LogitFeature.apply`. `behind`: int32 [P], on the device: so many tokens fewer precede
        a line than `ahead` says; None = it is right.
        """
        ...

    def observe(self, rows: list[int]) -> None:
        """Count one drawn token for each tracked row in `rows`."""
        ...


class TorchDraw:
    """Temperature, cuts and noise as features in plain torch, each waiting for its own results."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._temperature = Temperature()
        self._noise = GumbelNoise(vocab_size, device)
        self._cuts: tuple[LogitFeature, ...] = (
            self._temperature,
            TopK(vocab_size),
            TopP(),
            MinP(),
        )

    def __contains__(self, row: object) -> bool:
        return row in self._temperature

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        for feature in (*self._cuts, self._noise):
            feature.add(row, params, prompt_ids, output_ids)
        return row in self._temperature

    def remove(self, row: int) -> None:
        for feature in (*self._cuts, self._noise):
            feature.remove(row)

    def choose(
        self,
        logits: Tensor,
        positions: list[int],
        rows: list[int],
        ahead: Ahead | None = None,
        behind: Tensor | None = None,
    ) -> GreedyChoice:
        index = torch.tensor(positions, device=logits.device)
        scores = logits.index_select(0, index).float()  # a copy
        for feature in self._cuts:
            feature.apply(scores, rows, ahead)
        self._noise.apply(scores, rows, ahead, behind)
        return greedy(scores)

    def observe(self, rows: list[int]) -> None:
        self._noise.advance(rows)


class FusedDraw:
    """The same as `TorchDraw` by `kernels.sampling.rows_triton`, without waiting.

    Parameters are kept on the host and sent with each step. Rows may come and go while earlier
    steps are still on the GPU, because those have their own copy.
    """

    def __init__(self, vocab_size: int, max_rows: int, staging: Staging) -> None:
        # Imported here because it needs Triton, which only a GPU host must have.
        from kernels.sampling.rows_triton import draw

        self._launch = draw
        self._vocab_size = vocab_size
        self._staging = staging
        self._members: set[int] = set()
        # All [max_rows].
        self._seeds = np.zeros(max_rows, dtype=np.int64)
        self._indices = np.zeros(max_rows, dtype=np.int64)  # output tokens so far
        self._temperatures = np.ones(max_rows, dtype=np.float32)
        self._top_ks = np.zeros(max_rows, dtype=np.int32)  # 0 = no cut
        self._top_ps = np.ones(max_rows, dtype=np.float32)  # 1 = no cut
        self._max_depths = np.zeros(max_rows, dtype=np.float32)  # -log(min_p), inf = no cut

    def __contains__(self, row: object) -> bool:
        return row in self._members

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        if params.is_greedy:
            return False
        self._members.add(row)
        self._seeds[row] = signed_seed(params.seed)
        self._indices[row] = len(output_ids)
        self._temperatures[row] = max(params.temperature, SMALLEST_TEMPERATURE)
        self._top_ks[row] = params.top_k if 0 < params.top_k < self._vocab_size else 0
        self._top_ps[row] = min(params.top_p, 1.0)
        self._max_depths[row] = abs(math.log(params.min_p)) if params.min_p > 0.0 else math.inf
        return True

    def remove(self, row: int) -> None:
        self._members.discard(row)

    def choose(
        self,
        logits: Tensor,
        positions: list[int],
        rows: list[int],
        ahead: Ahead | None = None,
        behind: Tensor | None = None,
    ) -> GreedyChoice:
        members = np.array(rows, dtype=np.int64)
        indices = self._indices[members]
        if ahead is not None:
            indices += [len(drafts) for drafts in ahead]
        lines, seeds, sent_indices, temperatures, top_ks, top_ps, max_depths = self._staging.send(
            np.array(positions, dtype=np.int64),
            self._seeds[members],
            indices,
            self._temperatures[members],
            self._top_ks[members],
            self._top_ps[members],
            self._max_depths[members],
        )
        return self._launch(
            logits,
            Draws(
                lines=lines,
                seeds=seeds,
                indices=sent_indices if behind is None else sent_indices - behind,
                temperatures=temperatures,
                top_ks=top_ks,
                top_ps=top_ps,
                max_depths=max_depths,
            ),
        )

    def observe(self, rows: list[int]) -> None:
        self._indices[[row for row in rows if row in self._members]] += 1


def build_draw(vocab_size: int, max_rows: int, staging: Staging) -> Draw:
    """The implementation for the staging's device."""
    if staging.device.type == "cuda":
        return FusedDraw(vocab_size, max_rows, staging)
    return TorchDraw(vocab_size, staging.device)

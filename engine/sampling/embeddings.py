"""Takes the place of a sampler in a model without a head: an embedding for each row, no token.

The model's "logits" are then the hidden states of the rows' last tokens. Knows no requests: what a
row asked for does not matter.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.sampled import SampledTensors
from kernels.sampling.choices import GreedyChoice


class Embeddings:
    """Makes embeddings; rows have no state."""

    def __init__(self, *, is_normalised: bool) -> None:
        """is_normalised: to a Euclidean length of 1."""
        self._is_normalised = is_normalised

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        """Nothing is kept of a row."""

    def remove(self, row: int) -> None:
        """Nothing was kept."""

    def accept_token(self, row: int, token_id: int) -> None:
        raise AssertionError(f"row {row} has a constraint and a model that generates nothing")

    def append(self, tokens_of_rows: Sequence[tuple[int, list[int]]]) -> None:
        raise AssertionError(f"{tokens_of_rows} had drafts and a model that generates nothing")

    def is_plain(self, rows: list[int]) -> bool:
        return False

    def take(self, rows: list[int], best: GreedyChoice) -> SampledTensors:
        raise AssertionError(f"tokens for rows {rows} of a model that generates nothing")

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: list[int],
        greedy: GreedyChoice | None = None,
        drafts: Mapping[int, Sequence[int]] | None = None,
        behind: Tensor | None = None,
    ) -> SampledTensors:
        """logits: hidden states [S, hidden], one line for each of `rows`; not changed."""
        assert not drafts, "a model that generates nothing has no drafts"
        hidden = logits.float()
        vectors = F.normalize(hidden, dim=-1) if self._is_normalised else hidden
        is_finite = vectors.isfinite().all(dim=-1)
        return SampledTensors(
            token_ids=torch.zeros(len(rows), dtype=torch.int64, device=logits.device),
            is_finite=is_finite,
            logprobs=None,
            embeddings=vectors,
        )

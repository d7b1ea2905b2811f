"""What an executor needs of sampling: rows that come and go, and a choice for each of them."""

from typing import Protocol

from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.choice import SampledTensors
from kernels.sample_rows import GreedyChoice


class RowSampler(Protocol):
    """Keeps each row's sampling state; `sample` and `hear` advance it and only queue work."""

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> None: ...

    def remove(self, row: int) -> None: ...

    def hear(self, row: int, token_id: int) -> None: ...

    def sample(
        self, logits: Tensor, rows: list[int], greedy: GreedyChoice | None = None
    ) -> SampledTensors:
        """logits: [S, vocab], one line for each of `rows`; `greedy`: their argmax, if known."""
        ...

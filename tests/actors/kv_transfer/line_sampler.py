"""A sampler that keeps a hash of every line of logits which one row samples from."""

import hashlib

from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.sampled import SampledTensors
from engine.sampling.sampler import Sampler
from kernels.sampling.choices import GreedyChoice


class LineSampler:
    """The real sampler, and the hash of each line of logits that the watched row samples from."""

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner
        self._prompt: list[int] | None = None
        self._row: int | None = None
        self.lines: list[str] = []

    def watch(self, prompt: list[int]) -> None:
        """No other request has this prompt."""
        self._prompt, self._row, self.lines = prompt, None, []

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        if prompt_ids == self._prompt:
            self._row = row
        elif row == self._row:
            self._row = None
        self._inner.add(row, params, prompt_ids, output_ids)

    def remove(self, row: int) -> None:
        self._row = None if row == self._row else self._row
        self._inner.remove(row)

    def accept_token(self, row: int, token_id: int) -> None:
        self._inner.accept_token(row, token_id)

    def is_plain(self, rows: list[int]) -> bool:
        return False  # else it is given no logits

    def take(self, rows: list[int], best: GreedyChoice) -> SampledTensors:
        return self._inner.take(rows, best)

    def sample(
        self, logits: Tensor, rows: list[int], greedy: GreedyChoice | None = None
    ) -> SampledTensors:
        if self._row in rows:
            line = logits[rows.index(self._row)].float().cpu()
            self.lines.append(hashlib.blake2b(line.numpy().tobytes()).hexdigest())
        return self._inner.sample(logits, rows, greedy)

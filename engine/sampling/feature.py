"""What every sampling feature looks like, and how it finds its rows in a batch.

A feature owns the parameters and the history of the rows that use it, and nothing else; a batch
without such rows costs it one dictionary look-up per row at most. Knows no particular feature.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.request import SamplingParams


class LogitFeature(Protocol):
    """One knob of `SamplingParams`, as something that changes logits."""

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        """Take the row if its parameters ask for this feature; say whether they do."""
        ...

    def remove(self, row: int) -> None:
        """Forget the row; one this feature never took is fine."""
        ...

    def apply(self, logits: Tensor, rows: list[int]) -> None:
        """Change `logits` fp32 [P, vocab] in place, where `rows[p]` is a row of ours."""
        ...

    def observe(self, rows: list[int], token_ids: list[int]) -> None:
        """Row `rows[p]` just drew `token_ids[p]`."""
        ...


def positions_of(rows: Sequence[int], members: Container[int]) -> list[int]:
    """Where in `rows` the members stand, ascending."""
    return [position for position, row in enumerate(rows) if row in members]


def column(values: Mapping[int, float], rows: Sequence[int], like: Tensor) -> Tensor:
    """The rows' values as [len(rows), 1], with the dtype and device of `like`."""
    listed = [values[row] for row in rows]
    return torch.tensor(listed, dtype=like.dtype, device=like.device).unsqueeze(1)


def take(logits: Tensor, positions: list[int]) -> Tensor:
    """The rows of `logits` at ascending `positions`: itself when that is all, else a copy."""
    if len(positions) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.tensor(positions, device=logits.device))


def put(logits: Tensor, positions: list[int], part: Tensor) -> None:
    """Write back what `take` returned."""
    if part is not logits:
        logits.index_copy_(0, torch.tensor(positions, device=logits.device), part)

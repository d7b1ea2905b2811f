"""What every sampling feature looks like, and how it finds its rows in a batch.

A feature owns the parameters and the history of the rows that use it, and nothing else; a batch
without such rows costs it one dictionary look-up per row at most. Knows no particular feature.
"""

from collections.abc import Container, Sequence
from typing import Protocol

from torch import Tensor

from engine.request import SamplingParams


class LogitFeature(Protocol):
    """A sampling parameter as an object that changes logits.

    On a GPU no verb waits for it: what a feature needs of drawn tokens it reads on the device, and
    what it counts on the host does not depend on them.
    """

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        """Take the row if its parameters ask for this feature; returns whether they do."""
        ...

    def remove(self, row: int) -> None:
        """Forget the row; does nothing for one that was never taken."""
        ...

    def apply(self, logits: Tensor, rows: list[int]) -> None:
        """Change `logits` fp32 [P, vocab] in place; this feature has taken every `rows[p]`."""
        ...

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        """Row `rows[p]` just drew `token_ids[p]`; int64 [P] on the logits' device."""
        ...


def positions_of(rows: Sequence[int], members: Container[int]) -> list[int]:
    """Returns the indices in `rows` of the members, ascending."""
    return [position for position, row in enumerate(rows) if row in members]


def take(logits: Tensor, index: Tensor) -> Tensor:
    """The lines of `logits` at ascending `index`: itself when that is all, else a copy."""
    if index.shape[0] == logits.shape[0]:
        return logits
    return logits.index_select(0, index)


def put(logits: Tensor, index: Tensor, part: Tensor) -> None:
    """Write back what `take` returned."""
    if part is not logits:
        logits.index_copy_(0, index, part)

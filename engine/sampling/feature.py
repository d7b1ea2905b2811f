"""Defines the interface of a sampling feature, and helpers to find its rows in a batch.

A feature owns the parameters and the history of the rows that use it, and nothing else. A batch
without such rows costs it at most one dictionary look-up per row. Knows no particular feature.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from engine.request import SamplingParams

# [P]  For each line of logits: draft tokens that come after the row's history and before the line.
Ahead = Sequence[Sequence[int]]


class LogitFeature(Protocol):
    """One parameter of `SamplingParams`, as something that changes logits.

    On a GPU no method waits for the device: a feature reads drawn tokens on the device, and what it
    counts on the host does not depend on them.
    """

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        """Track the row if its parameters use this feature; returns whether they do."""
        ...

    def remove(self, row: int) -> None:
        """Forget the row; does nothing if the feature does not track it."""
        ...

    def apply(self, logits: Tensor, rows: list[int], ahead: Ahead | None = None) -> None:
        """Change `logits` fp32 [P, vocab] in place; line p belongs to `rows[p]`.

        `ahead`: a row may have several lines, each as if its history were longer by `ahead[p]`;
        None = no line has any drafts before it.
        """
        ...

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        """Row `rows[p]` just drew `token_ids[p]`; int64 [P] on the logits' device."""
        ...


def positions_of(rows: Sequence[int], members: Container[int]) -> list[int]:
    """Indices in `rows` of those that are members, ascending."""
    return [position for position, row in enumerate(rows) if row in members]


def lines_ahead(rows: Sequence[int], drafts: Mapping[int, Sequence[int]]) -> Ahead:
    """The drafts before each line, [S]: all of its row's before the last line of that row."""
    num_after = 0
    ahead: list[Sequence[int]] = []
    for place in reversed(range(len(rows))):
        is_last = place + 1 == len(rows) or rows[place + 1] != rows[place]
        num_after = 0 if is_last else num_after + 1
        its_drafts = drafts.get(rows[place], ())
        ahead.append(its_drafts[: len(its_drafts) - num_after])
    return ahead[::-1]


def at(ahead: Ahead | None, positions: Sequence[int]) -> Ahead | None:
    """`ahead` of the lines at `positions`."""
    return None if ahead is None else [ahead[position] for position in positions]


def take(logits: Tensor, index: Tensor) -> Tensor:
    """The lines of `logits` at ascending `index`: `logits` itself if these are all, else a copy."""
    if index.shape[0] == logits.shape[0]:
        return logits
    return logits.index_select(0, index)


def put(logits: Tensor, index: Tensor, part: Tensor) -> None:
    """Write `part`, obtained from `take`, back to `logits`."""
    if part is not logits:
        logits.index_copy_(0, index, part)

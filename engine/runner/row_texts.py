"""The texts of rows on the device, where drafts are looked up behind tokens that no host has seen.

    quoted    of another text, before index 0
    told      what the host knew when it planned      [0, told)
    in flight what the last step gave                 samples [told, told + given)

What is quoted is searched as if it were the beginning of the row's text: its longest match counts,
and that in the row's own text of equal ones. Each rank does so for itself, from the plan and from
what its own last step left.
"""

from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import NEWEST, StepPlan
from engine.speculation.ngram import END, NgramRules
from kernels.guessed_steps import RowStates, TextChanges
from kernels.ngrams import look_up


def text_bytes(max_rows: int, max_len: int, rules: NgramRules) -> int:
    """Memory for the texts of so many rows of so many tokens."""
    return 4 * (max_rows + 1) * (rules.quote_tokens + max_len)


class PackedChanges:
    """What a plan changes in the texts, as `TextChanges` on the host, to be sent."""

    def __init__(self, packed: NDArray[np.int32], num_rows: int, num_pieces: int) -> None:
        self.packed = packed
        self._num_rows = num_rows
        self._num_pieces = num_pieces

    def on_device(self, packed: Tensor) -> TextChanges:
        """packed: a copy of these there."""
        return TextChanges(packed=packed, num_rows=self._num_rows, num_pieces=self._num_pieces)


class RowTexts:
    """Texts of a target's rows, and the lookups of its own drafts in them."""

    def __init__(
        self, states: RowStates, drafts: Tensor, *, max_len: int, rules: NgramRules
    ) -> None:
        """states: of the rows. drafts: [E, max_rows + 1], written. max_len: tokens of a row."""
        self._num_quoted = rules.quote_tokens
        shape = len(states.newest), self._num_quoted + max_len
        self._texts = torch.full(shape, END, dtype=torch.int32, device=drafts.device)
        self._states = states
        self._drafts = drafts
        self._match = {"min_match": rules.min_match, "max_match": rules.max_match}

    def changes_of(self, plan: StepPlan) -> PackedChanges | None:
        """What the rows in `plan` whose drafts are `given` get; None = there is no such row.

        plan: as the host made it; what it is behind is known on the device.
        """
        found = [(index, its) for index, its in plan.drafts if its and its[-1] < NEWEST]
        if not found:
            return None
        of_row: dict[int, list[tuple[int, list[int]]]] = {}
        for row, start, token_ids in plan.texts:
            of_row.setdefault(row, []).append((start + self._num_quoted, token_ids))
        heads: list[int] = []
        pieces: list[int] = []
        texts: list[list[int]] = []
        num_told = 0
        for index, its in found:
            row, num_known = plan.rows[index], plan.num_computed_tokens[index] + 1
            heads += (row, self._num_quoted + num_known, its.count(NEWEST), len(texts))
            for start, token_ids in of_row.pop(row, ()):
                pieces += (start, num_told, len(token_ids))
                texts.append(token_ids)
                num_told += len(token_ids)
        assert not of_row, f"step {plan.step}: texts of rows without drafts in them: {of_row}"
        heads += (0, 0, 0, len(texts))
        packed = np.array([*heads, *pieces, *chain.from_iterable(texts)], dtype=np.int32)
        return PackedChanges(packed, len(found), len(texts))

    def look_up(self, changes: TextChanges) -> None:
        """Queue these changes and the lookups behind them."""
        look_up(self._texts, changes, self._states, self._drafts, **self._match)

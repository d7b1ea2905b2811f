"""Log-probabilities of named tokens as the next one, of rows that end with their prompt.

Such a row draws nothing: whatever it asked for is read here, by one gather for all rows of a step.
They are the model's own, from logits before any processing.
"""

import numpy as np
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.choice import LabelTensors
from engine.sampling.feature import positions_of, take
from engine.sampling.staging import Staging


class Labels:
    """The labels of the rows that ask for no token; changes nothing."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._token_ids: dict[int, tuple[int, ...]] = {}  # row -> may be none

    def add(self, row: int, params: SamplingParams) -> None:
        self._token_ids[row] = params.label_token_ids

    def remove(self, row: int) -> None:
        self._token_ids.pop(row, None)

    def read(self, logits: Tensor, rows: list[int]) -> LabelTensors | None:
        """Of the rows that end here; None if there is none.

        logits: [S, vocab], unprocessed, left as they are.
        """
        positions = positions_of(rows, self._token_ids)
        if not positions:
            return None
        asked = [self._token_ids[rows[p]] for p in positions]
        counts = [len(token_ids) for token_ids in asked]
        lines = np.repeat(np.arange(len(positions)), counts)
        index, line, token_ids = self._staging.send(
            np.array(positions, dtype=np.int64),
            lines.astype(np.int64),
            np.array([i for ids in asked for i in ids], dtype=np.int64),
        )
        part = take(logits, index).float()  # [P, vocab]
        values = part[line, token_ids] - part.logsumexp(dim=-1)[line]
        return LabelTensors(positions=positions, counts=counts, values=values)

"""The executor's memory between steps: the known tokens of each running row.

Host memory: input ids of a step are looked up here. Knows no blocks, no sampling and no requests
beyond their row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class RequestRows:
    """Token ids by row, prompt then output; a row is free or occupied."""

    def __init__(self, *, max_rows: int, max_model_len: int) -> None:
        # [max_rows, max_model_len]
        self._token_ids: NDArray[np.int32] = np.zeros((max_rows, max_model_len), dtype=np.int32)
        # [max_rows]; 0 = the row is free
        self._num_known_tokens: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)

    def add(self, row: int, token_ids: Sequence[int]) -> None:
        """Occupy a free row with all tokens known so far."""
        assert not self.is_occupied(row), f"row {row} is occupied"
        assert 0 < len(token_ids) <= self._token_ids.shape[1], (
            f"row {row}: {len(token_ids)} tokens, the table has room for {self._token_ids.shape[1]}"
        )
        self._token_ids[row, : len(token_ids)] = token_ids
        self._num_known_tokens[row] = len(token_ids)

    def remove(self, row: int) -> None:
        assert self.is_occupied(row), f"row {row} is free already"
        self._num_known_tokens[row] = 0

    def append(self, row: int, token_id: int) -> None:
        """Add a sampled token."""
        length = int(self._num_known_tokens[row])
        assert 0 < length < self._token_ids.shape[1], (
            f"row {row}: no room for a token after {length} of {self._token_ids.shape[1]}"
        )
        self._token_ids[row, length] = token_id
        self._num_known_tokens[row] = length + 1

    def is_occupied(self, row: int) -> bool:
        return bool(self._num_known_tokens[row] > 0)

    def num_known_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Known tokens of each row, [R]; 0 for a free one."""
        return self._num_known_tokens[rows]

    def token_ids(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """Token at each position of each row; both [T]."""
        return self._token_ids[rows, positions]

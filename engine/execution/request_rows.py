"""The executor's memory between steps: the known tokens of each running row.

Tokens that a row was admitted with and has to compute are kept here, on the host. Of sampled ones
only the number is: their ids may still be on their way, so a step takes the newest from a table on
the device. One whose K and V are in the store is never needed again. Knows no blocks, no sampling
and no requests beyond their row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class RequestRows:
    """Token ids by row; a row is free or occupied."""

    def __init__(self, *, max_rows: int, max_model_len: int) -> None:
        # [max_rows, max_model_len]
        self._token_ids: NDArray[np.int32] = np.zeros((max_rows, max_model_len), dtype=np.int32)
        # [max_rows]; 0 = the row is free
        self._num_known_tokens: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        # [max_rows]  [first, end) of them are in the table
        self._first_given: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self._end_given: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)

    def add(self, row: int, token_ids: Sequence[int], num_computed_tokens: int = 0) -> None:
        """Occupy a free row with all tokens known so far; the first ones no step computes again."""
        assert not self.is_occupied(row), f"row {row} is occupied"
        assert 0 < len(token_ids) <= self._token_ids.shape[1], (
            f"row {row}: {len(token_ids)} tokens, the table has room for {self._token_ids.shape[1]}"
        )
        # Thousands of numbers out of a list take the host a while, so only those that are needed.
        first, end = num_computed_tokens, len(token_ids)
        self._token_ids[row, first:end] = token_ids[first:]
        self._first_given[row] = first
        self._num_known_tokens[row] = self._end_given[row] = end

    def remove(self, row: int) -> None:
        assert self.is_occupied(row), f"row {row} is free already"
        self._num_known_tokens[row] = 0

    def count_sampled(self, rows: NDArray[np.int64]) -> None:
        """Each of `rows` [S >= 1] has one token more, sampled by the step just launched."""
        lengths = self._num_known_tokens[rows]
        assert 0 < lengths.min() <= lengths.max() < self._token_ids.shape[1], (
            f"rows {rows.tolist()}: no room for a token after {lengths.tolist()} of"
            f" {self._token_ids.shape[1]}"
        )
        self._num_known_tokens[rows] = lengths + 1

    def is_occupied(self, row: int) -> bool:
        return bool(self._num_known_tokens[row] > 0)

    def num_known_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Known tokens of each row, [R]; 0 for a free one."""
        return self._num_known_tokens[rows]

    def input_ids(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token at each position of each row; both [T]. -1 - row: the row's newest, sampled one."""
        is_given = (self._first_given[rows] <= positions) & (positions < self._end_given[rows])
        assert (is_given | (positions == self._num_known_tokens[rows] - 1)).all(), (
            f"rows {rows[~is_given].tolist()} compute tokens at {positions[~is_given].tolist()},"
            " which they were not given and are not their newest"
        )
        return np.where(is_given, self._token_ids[rows, positions], -1 - rows)

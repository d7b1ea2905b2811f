"""The token ids of each row that a step may have to compute, on the host.

A row has the tokens with which it was admitted and that are still to be computed. Of sampled tokens
it has only the number. Their ids may not have reached the host yet, so a step reads the newest from
a table on the device. A token whose K and V are in the store is not needed again. Drafts are in the
table behind the known tokens, for the steps whose plan names them. Drafts that only the device has
are read from its table, too.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from engine.kv.tables import concat_ranges
from engine.plan import NEWEST


class RequestRows:
    """Token ids by row; a row is free or occupied."""

    def __init__(self, *, max_rows: int, max_model_len: int) -> None:
        # [max_rows, max_model_len]
        self._token_ids: NDArray[np.int32] = np.zeros((max_rows, max_model_len), dtype=np.int32)
        # [max_rows]; 0 = the row is free
        self._num_known_tokens: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        # [max_rows]  the table holds the tokens [first, end) of each row
        self._first_given: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self._end_given: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)

    def add(self, row: int, token_ids: Sequence[int], num_computed_tokens: int = 0) -> None:
        """Occupy a free row with all its known tokens; the first `num_computed_tokens` have KV."""
        assert not self.is_occupied(row), f"row {row} is occupied"
        assert 0 < len(token_ids) <= self._token_ids.shape[1], (
            f"row {row}: {len(token_ids)} tokens, the table has room for {self._token_ids.shape[1]}"
        )
        # Converting a long list is slow, so only the tokens that are still needed are converted.
        first, end = num_computed_tokens, len(token_ids)
        self._token_ids[row, first:end] = token_ids[first:]
        self._first_given[row] = first
        self._num_known_tokens[row] = self._end_given[row] = end

    def put_drafts(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Write token_ids[r] behind the known tokens of each of `rows` [R], which are distinct.

        The rows do not know them.
        """
        self._put(np.array(rows), token_ids)

    def append(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Append token_ids[r], of a step with drafts, to each of `rows` [R], which are distinct."""
        index = np.array(rows)
        self._put(index, token_ids)
        self._num_known_tokens[index] = self._end_given[index]

    def _put(self, rows: NDArray[np.int64], token_ids: Sequence[Sequence[int]]) -> None:
        counts = np.array(list(map(len, token_ids)))
        starts, size = self._num_known_tokens[rows], self._token_ids.shape[1]
        ends = starts + counts
        assert 0 < starts.min() <= ends.max() <= size, (
            f"rows {rows.tolist()}: {counts.tolist()} tokens after {starts.tolist()} of {size}"
        )
        # These rows have sampled tokens that only the device has.
        is_behind = self._end_given[rows] < starts
        self._first_given[rows[is_behind]] = starts[is_behind]
        places = concat_ranges(rows * size + starts, counts)
        self._token_ids.reshape(-1)[places] = list(chain.from_iterable(token_ids))
        self._end_given[rows] = ends

    def remove(self, row: int) -> None:
        assert self.is_occupied(row), f"row {row} is free already"
        self._num_known_tokens[row] = 0

    def count_sampled(self, rows: NDArray[np.int64]) -> None:
        """Count one more token for each of `rows` [S >= 1], sampled by the step just launched."""
        lengths = self._num_known_tokens[rows]
        assert 0 < lengths.min() <= lengths.max() < self._token_ids.shape[1], (
            f"rows {rows.tolist()}: no room for a token after {lengths.tolist()} of"
            f" {self._token_ids.shape[1]}"
        )
        self._num_known_tokens[rows] = lengths + 1

    def is_occupied(self, row: int) -> bool:
        return bool(self._num_known_tokens[row] > 0)

    def num_known_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of known tokens of each row, [R]; 0 for a free one."""
        return self._num_known_tokens[rows]

    def num_given_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of known tokens of each row and of its drafts, [R]."""
        given: NDArray[np.int64] = np.maximum(self._num_known_tokens[rows], self._end_given[rows])
        return given

    def input_ids(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token at each position of each row; both [T].

        Negative: -1 - an index into the device's table of [1 + entries, max_rows + 1] tokens, whose
        first line has each row's newest one.
        """
        first, end = self._first_given[rows], self._end_given[rows]
        in_table = (first <= positions) & (positions < end)
        token_ids = np.where(in_table, self._token_ids[rows, positions], NEWEST)
        num_known = np.where(in_table, end, self._num_known_tokens[rows])
        after = self._token_ids[rows, np.minimum(positions + 1, self._token_ids.shape[1] - 1)]
        is_newest = (positions == num_known - 1) | (in_table & (after != NEWEST))
        is_there = (token_ids != NEWEST) | is_newest
        assert is_there.all(), (
            f"rows {rows[~is_there].tolist()} compute tokens at {positions[~is_there].tolist()},"
            " which they were not given and are not their newest"
        )
        lines = NEWEST - token_ids  # of the table
        return np.where(token_ids >= 0, token_ids, -1 - (lines * (len(self._token_ids) + 1) + rows))

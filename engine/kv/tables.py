"""The block table of the running rows, on the host. Knows no requests and no block contents."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FEW_BLOCKS = 32  # average blocks per row


class BlockTables:
    """Block ids by row: entry i of a row holds its tokens [i * block_size, (i + 1) * block_size).

    Kept on the host, where a step's inputs are made from it.
    """

    def __init__(self, *, max_rows: int, max_blocks_per_row: int) -> None:
        # [max_rows, max_blocks_per_row]; entries past a row's last block are meaningless
        self._table: NDArray[np.int32] = np.zeros((max_rows, max_blocks_per_row), dtype=np.int32)
        self._flat = self._table.reshape(-1)  # the same memory
        # [max_rows]
        self._num_blocks: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)

    def append(self, rows: Sequence[int], counts: Sequence[int], block_ids: Sequence[int]) -> None:
        """Append counts[r] blocks to each of `rows` [R], which are distinct.

        block_ids: [sum of counts], one row's after the other's.
        """
        index = np.array(rows)
        starts = self._num_blocks[index]
        ends = starts + counts
        assert ends.max() <= self._table.shape[1], (
            f"rows {list(rows)}: {ends.tolist()} blocks, the table has room for"
            f" {self._table.shape[1]}"
        )
        places = index * self._table.shape[1] + starts
        if set(counts) != {1}:  # usually each row gets one block, and has one place
            places = concat_ranges(places, ends - starts)
        self._flat[places] = block_ids
        self._num_blocks[index] = ends

    def block_at(
        self, rows: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> NDArray[np.int32] | None:
        """Id of block number indices[r] of each row, [R]; None if any row has fewer blocks."""
        if (indices >= self._num_blocks[rows]).any():
            return None
        block_ids: NDArray[np.int32] = self._table[rows, indices]
        return block_ids

    def clear(self, row: int) -> None:
        self._num_blocks[row] = 0

    def num_blocks(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of blocks of each row, [R]."""
        return self._num_blocks[rows]

    def flatten(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int32]:
        """The first counts[r] block ids of each row, one row after the other, [sum of counts].

        rows, counts: [R], at least one row.
        """
        num_blocks = int(counts.sum())
        if num_blocks > _FEW_BLOCKS * len(rows):
            lengths = zip(rows.tolist(), counts.tolist(), strict=True)
            return np.concatenate([self._table[row, :length] for row, length in lengths])
        # While rows are short, one index per block costs less than one slice per row.
        block_ids: NDArray[np.int32] = self._flat[
            concat_ranges(rows * self._table.shape[1], counts)
        ]
        return block_ids

    def slices(
        self, rows: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> list[int]:
        """Blocks [starts[r], starts[r] + counts[r]) of each row, one row after the other."""
        ends = starts + counts
        assert (ends <= self._num_blocks[rows]).all(), (
            f"rows {rows.tolist()} have no blocks up to {ends.tolist()}"
        )
        places = concat_ranges(rows * self._table.shape[1] + starts, counts)
        ids: list[int] = self._flat[places].tolist()
        return ids

    def block_ids(self, row: int) -> list[int]:
        ids: list[int] = self._table[row, : self._num_blocks[row]].tolist()
        return ids


def concat_ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[starts[0], starts[0] + 1, ...(counts[0] of them), starts[1], ...]."""
    before = np.cumsum(counts) - counts
    ranges: NDArray[np.int64] = np.repeat(starts - before, counts)
    ranges += np.arange(len(ranges))
    return ranges

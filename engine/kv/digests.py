"""Keeps the digest of each block of a store, as of the step that wrote the block last.

Steps record digests (engine/runner/results.py), and the sender of a handoff reads them. So a block
that is changed by mistake in between is noticed by its receiver. Written by the thread that steps;
read by others, for blocks that no step is writing. Knows no tensors and no owners.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.kv.layout import KvPart


class BlockDigests:
    """One digest per block: 64 bits, as computed by `KvStore.digest`."""

    def __init__(
        self,
        num_blocks: int,
        *,
        values: NDArray[np.int64] | None = None,
        is_known: NDArray[np.uint8] | None = None,
    ) -> None:
        """values, is_known: [num_blocks], memory to keep them in; None = memory of its own."""
        self._values = np.zeros(num_blocks, np.int64) if values is None else values
        self._is_known = np.zeros(num_blocks, np.uint8) if is_known is None else is_known

    def keep(self, block_ids: Sequence[int], digests: Sequence[int]) -> None:
        """Record the digests of written blocks; for a repeated block the last entry counts."""
        for block_id, digest in zip(block_ids, digests, strict=True):
            self._values[block_id] = digest
            self._is_known[block_id] = 1

    def of(self, block_ids: Sequence[int]) -> list[int]:
        """Digests in the order given; a step that has been waited for must have written each."""
        ids = np.array(block_ids, dtype=np.int64)
        assert self._is_known[ids].all(), f"of blocks {list(block_ids)} nobody knows the digests"
        digests: list[int] = self._values[ids].tolist()
        return digests


def add_terms(parts: Sequence[KvPart], terms: Sequence[NDArray[np.int64]]) -> list[int]:
    """Digests of whole blocks, of one term a rank.

    Off by the number of ranks that have other bytes than the first one with their heads.
    """
    first: dict[int, NDArray[np.int64]] = {}
    others = np.zeros_like(terms[0])
    for part, found in zip(parts, terms, strict=True):
        others += found != first.setdefault(part.first_head, found)
    for found in first.values():
        others += found
    total: list[int] = others.tolist()
    return total

"""Keeps the digest of each block of a store, as of the step that wrote the block last.

Steps record digests (engine/runner/results.py), and the sender of a handoff reads them. So a block
that is changed by mistake in between is noticed by its receiver. Written by the thread that steps;
read by others, for blocks that no step is writing. Knows no tensors and no owners.
"""

from collections.abc import Sequence


class BlockDigests:
    """One digest per block: 64 bits, as computed by `KvStore.digest`."""

    def __init__(self, num_blocks: int) -> None:
        self._digests: list[int | None] = [None] * num_blocks

    def keep(self, block_ids: Sequence[int], digests: Sequence[int]) -> None:
        """Record the digests of written blocks; for a repeated block the last entry counts."""
        for block_id, digest in zip(block_ids, digests, strict=True):
            self._digests[block_id] = digest

    def of(self, block_ids: Sequence[int]) -> list[int]:
        """Digests in the order given; a step that has been waited for must have written each."""
        known = [self._digests[block_id] for block_id in block_ids]
        digests = [digest for digest in known if digest is not None]
        assert len(digests) == len(known), f"of blocks {list(block_ids)} nobody knows the digests"
        return digests

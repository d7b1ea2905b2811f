"""Digests of a store's blocks, as of the step that wrote each last.

Steps write them (engine/runner/results.py) and senders of blocks read them, so the receiver notices
a block that was changed by mistake in between. Written by the thread that steps,
read by others, about blocks that no step writes meanwhile. Knows no tensors and no owners.
"""

from collections.abc import Sequence


class BlockDigests:
    """Keeps a 64-bit digest of each block, as `KvStore.digest` computes it."""

    def __init__(self, num_blocks: int) -> None:
        self._digests: list[int | None] = [None] * num_blocks

    def keep(self, block_ids: Sequence[int], digests: Sequence[int]) -> None:
        """Stores the digests of written blocks; of a block that occurs twice, the last one."""
        for block_id, digest in zip(block_ids, digests, strict=True):
            self._digests[block_id] = digest

    def of(self, block_ids: Sequence[int]) -> list[int]:
        """Returns the blocks' digests in order; a finished step must have written each block."""
        known = [self._digests[block_id] for block_id in block_ids]
        digests = [digest for digest in known if digest is not None]
        assert len(digests) == len(known), f"of blocks {list(block_ids)} nobody knows the digests"
        return digests

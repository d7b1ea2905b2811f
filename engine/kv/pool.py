"""Tracks which blocks are free and how often each other block is referenced: integers only.

Knows no tensors, no tokens and no hashes. A block is in one of three states:

    free          on the free list
    held          reference count >= 1
    unreferenced  count 0 but not free: its content is cached, until the block is acquired again or
                  freed
"""

from collections.abc import Iterable, Sequence

_FREE = -1  # in place of a reference count, so that a count of 0 can mean "unreferenced"


class BlockPool:
    """Blocks [0, num_blocks), each with a reference count.

    The free list is last in, first out. The block freed last is handed out first, so a lightly
    loaded worker touches few pages of its store, and a use after free shows at once and not only
    after a full turn of the pool. A fresh pool hands out 0, 1, 2, ... A sequence released last
    block first is handed out in its old order, so adjacent blocks stay adjacent and copies of
    several blocks can be merged. The order depends only on the calls made.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self._counts = [_FREE] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end
        self._num_held = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks with at least one reference."""
        return self._num_held

    def reference_count(self, block_id: int) -> int:
        """References to a block; 0 also for a free one."""
        assert block_id >= 0, f"there is no block {block_id}"
        return max(self._counts[block_id], 0)

    def is_free(self, block_id: int) -> bool:
        assert block_id >= 0, f"there is no block {block_id}"
        return self._counts[block_id] == _FREE

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` free blocks with one reference each; None, taking none, if too few."""
        assert num_blocks >= 0, f"{num_blocks} blocks asked for"
        num_left = len(self._free) - num_blocks
        if num_left < 0:
            return None
        block_ids = self._free[num_left:]
        block_ids.reverse()
        del self._free[num_left:]
        counts = self._counts
        for block_id in block_ids:
            counts[block_id] = 1
        self._num_held += num_blocks
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, held or unreferenced; none may be free."""
        counts = self._counts
        for block_id in block_ids:
            assert block_id >= 0, f"there is no block {block_id}"
            count = counts[block_id]
            assert count != _FREE, f"acquiring block {block_id}, which is free"
            if count == 0:
                self._num_held += 1
            counts[block_id] = count + 1

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """Drop one reference to each block; return, in that order, those now unreferenced.

        They are not free yet: the caller either keeps their content or calls `free`.
        """
        counts = self._counts
        unreferenced = []
        for block_id in block_ids:
            assert block_id >= 0, f"there is no block {block_id}"
            count = counts[block_id]
            assert count > 0, f"releasing block {block_id}, which {self._describe(block_id)}"
            counts[block_id] = count - 1
            if count == 1:
                unreferenced.append(block_id)
        self._num_held -= len(unreferenced)
        return unreferenced

    def free(self, block_ids: Sequence[int]) -> None:
        """Put unreferenced blocks on the free list; the last one is handed out first."""
        counts = self._counts
        for block_id in block_ids:
            assert block_id >= 0, f"there is no block {block_id}"
            assert counts[block_id] == 0, (
                f"freeing block {block_id}, which {self._describe(block_id)}"
            )
            counts[block_id] = _FREE
        self._free.extend(block_ids)

    def find_problems(self) -> list[str]:
        """Recount everything; describe where lists and counters disagree. O(num_blocks)."""
        problems = []
        free_by_count = [b for b, count in enumerate(self._counts) if count == _FREE]
        if sorted(self._free) != free_by_count:
            problems.append(f"free list {self._free}, but by their counts free are {free_by_count}")
        num_held = sum(count > 0 for count in self._counts)
        if num_held != self._num_held:
            problems.append(f"{num_held} blocks are referenced, the counter says {self._num_held}")
        return problems

    def _describe(self, block_id: int) -> str:
        count = self._counts[block_id]
        return "is free" if count == _FREE else f"has {count} references"

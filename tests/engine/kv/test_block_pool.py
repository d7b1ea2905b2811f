"""The pool hands out, counts and takes back blocks, and refuses every misuse by name."""

import pytest

from engine.kv.pool import BlockPool


def test_a_fresh_pool_hands_out_blocks_in_order() -> None:
    pool = BlockPool(5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]
    assert (pool.num_free, pool.num_held) == (0, 5)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_what_was_freed_last_is_handed_out_first() -> None:
    pool = BlockPool(7)
    first, second = pool.allocate(3), pool.allocate(2)
    assert first == [0, 1, 2]
    assert second == [3, 4]
    pool.free(pool.release(reversed(second)))
    pool.free(pool.release(reversed(first)))
    assert pool.allocate(7) == [0, 1, 2, 3, 4, 5, 6]


def test_a_block_is_unreferenced_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) == [0, 1]
    pool.acquire([1])
    assert pool.release([1, 0]) == [0]
    assert [pool.reference_count(b) for b in range(3)] == [0, 1, 0]
    assert (pool.num_free, pool.num_held) == (1, 1)
    assert pool.release([1]) == [1]
    assert (pool.num_free, pool.num_held) == (1, 0)


def test_an_unreferenced_block_can_be_acquired_again_and_is_not_free_meanwhile() -> None:
    pool = BlockPool(2)
    assert pool.allocate(2) == [0, 1]
    assert pool.release([1, 0]) == [1, 0]
    assert pool.allocate(1) is None
    assert not pool.is_free(0)
    pool.acquire([0])
    pool.free([1])
    assert pool.is_free(1)
    assert pool.allocate(1) == [1]
    assert pool.find_problems() == []


def test_misuse_is_an_assertion_that_names_the_block() -> None:
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1]
    with pytest.raises(AssertionError, match="releasing block 3, which is free"):
        pool.release([3])
    with pytest.raises(AssertionError, match="acquiring block 2, which is free"):
        pool.acquire([2])
    with pytest.raises(AssertionError, match="freeing block 1, which has 1 references"):
        pool.free([1])
    with pytest.raises(AssertionError, match="no block -1"):
        pool.release([-1])
    pool.release([0])
    with pytest.raises(AssertionError, match="releasing block 0, which has 0 references"):
        pool.release([0])
    pool.free([0])
    with pytest.raises(AssertionError, match="freeing block 0, which is free"):
        pool.free([0])
    with pytest.raises(AssertionError, match="-2 blocks asked for"):
        pool.allocate(-2)
    with pytest.raises(IndexError):
        pool.release([4])
    assert pool.find_problems() == []


def test_a_pool_without_blocks_cannot_be_made() -> None:
    with pytest.raises(AssertionError, match="a pool of 0 blocks"):
        BlockPool(0)


class _PoolThatLosesBlocks(BlockPool):
    def free(self, block_ids: object) -> None:
        self._counts[0] = -1


def test_recounting_finds_a_block_missing_from_the_free_list() -> None:
    pool = _PoolThatLosesBlocks(2)
    assert pool.allocate(1) == [0]
    pool.free(pool.release([0]))
    assert pool.find_problems() == ["free list [1], but by their counts free are [0, 1]"]

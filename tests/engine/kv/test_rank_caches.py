"""The caches of several ranks as one: events of their union, the books of each."""

import random

import pytest

from engine.kv.cache import BlockCache, check_blocks
from engine.kv.index import IndexChanges
from engine.kv.rank_caches import RankCaches

NUM_BLOCKS = 8


def _caches(num_ranks: int = 2) -> RankCaches:
    return RankCaches(
        [
            BlockCache(NUM_BLOCKS, enable_prefix_caching=True, protected_share=0.5)
            for _ in range(num_ranks)
        ]
    )


def _index(cache: BlockCache, block_hash: bytes) -> list[int]:
    block_ids = cache.allocate(1)
    assert block_ids is not None
    cache.index(block_ids[0], block_hash, None)
    return block_ids


def _sets(changes: IndexChanges | None) -> tuple[int, bool, set[bytes], set[bytes]] | None:
    if changes is None:
        return None
    return changes.sequence, changes.is_resync, set(changes.added), set(changes.removed)


def test_a_hash_is_there_as_long_as_any_rank_has_it() -> None:
    caches = _caches()
    first, second = caches.of_rank
    held = _index(first, b"a")
    assert _sets(caches.take_events()) == (0, False, {b"a"}, set())
    also = _index(second, b"a") + _index(second, b"b")
    assert _sets(caches.take_events()) == (1, False, {b"b"}, set())
    first.forget(held)
    assert caches.take_events() is None
    second.forget(also)
    assert _sets(caches.take_events()) == (2, False, set(), {b"a", b"b"})


def test_a_hash_that_moves_between_ranks_is_no_event() -> None:
    caches = _caches()
    first, second = caches.of_rank
    held = _index(first, b"a")
    caches.take_events()
    first.forget(held)
    _index(second, b"a")
    assert caches.take_events() is None


def test_a_reader_of_the_events_knows_the_union() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    caches = _caches(3)
    known: set[bytes] = set()
    for _ in range(400):
        cache = rng.choice(caches.of_rank)
        block_ids = cache.allocate(1)
        assert block_ids is not None
        cache.index(block_ids[0], bytes([rng.randrange(30)]), None)
        cache.release(block_ids)
        if rng.random() < 0.2:
            cache.request_resync()  # as after more changes than a cache keeps
        if rng.random() < 0.2:
            caches.request_resync()
        if rng.random() < 0.5:
            changes = caches.take_events()
            if changes is not None:
                known = set(changes.added) if changes.is_resync else known | set(changes.added)
                known -= set(changes.removed)
            hashes = (bytes([i]) for i in range(30))
            assert known == {h for h in hashes if any(c.match([h]) for c in caches.of_rank)}


def test_the_books_are_those_of_each_rank() -> None:
    caches = _caches()
    block_ids = caches.of_rank[1].allocate(3)
    assert block_ids is not None
    numbered = caches.numbered(1, block_ids)
    assert min(numbered) >= NUM_BLOCKS
    check_blocks(caches, [("a", numbered)])
    with pytest.raises(AssertionError, match="owners"):
        check_blocks(caches, [("a", block_ids)])
    assert (caches.num_blocks, caches.num_available, caches.num_held) == (16, 13, 3)

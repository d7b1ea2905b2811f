"""The cache's books over pool and index: what is available, what is evicted, what is conserved."""

import random

import pytest

from engine.kv.cache import BlockCache
from engine.kv.index import PrefixIndex, _Entry


def _cache(num_blocks: int, *, protected_share: float = 0.8) -> BlockCache:
    return BlockCache(num_blocks, enable_prefix_caching=True, protected_share=protected_share)


def _hashes(name: str, length: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(length)]


def _fill(cache: BlockCache, hashes: list[bytes]) -> list[int]:
    """What a request does: hit, allocate, compute, index. Returns its blocks, held."""
    block_ids = cache.acquire_prefix(hashes)
    num_hit = len(block_ids)
    new_ids = cache.allocate(len(hashes) - num_hit)
    assert new_ids is not None
    block_ids += new_ids
    for i in range(num_hit, len(hashes)):
        cache.index(block_ids[i], hashes[i], hashes[i - 1] if i else None)
    return block_ids


def test_released_blocks_are_found_again_by_content() -> None:
    cache = _cache(9)
    a = _hashes("a", 3)
    block_ids = _fill(cache, a)
    cache.release(block_ids)
    assert (cache.num_free, cache.num_cached_idle, cache.num_held) == (6, 3, 0)
    assert cache.match(a) == block_ids
    assert cache.num_held == 0
    assert cache.acquire_prefix([*a[:2], b"other"]) == block_ids[:2]
    assert (cache.num_free, cache.num_cached_idle, cache.num_held) == (6, 1, 2)
    cache.check_conservation({"r": block_ids[:2]})


def test_blocks_without_content_come_back_in_their_old_order() -> None:
    cache = _cache(8)
    assert cache.allocate(2) == [0, 1]
    assert cache.allocate(4) == [2, 3, 4, 5]
    cache.release([2, 3, 4, 5])
    assert cache.allocate(5) == [2, 3, 4, 5, 6]


class _CountingIndex(PrefixIndex):
    num_queued = 0

    def _enqueue(self, entry: _Entry) -> None:
        self.num_queued += 1
        super()._enqueue(entry)


def test_the_work_of_a_release_is_linear_in_the_blocks_released() -> None:
    cache = _cache(2001)
    index = cache._index = _CountingIndex(2001, max_protected=1000)
    a = _hashes("a", 1001)
    original = _fill(cache, a[:1000])
    cache.release(_fill(cache, a))  # the last block's parents stay held: one step
    assert index.num_queued == 1
    cache.release(original)
    assert index.num_queued == 1001
    copy = cache.allocate(1000)
    assert copy is not None
    last = cache.acquire_prefix(a)[-1:]
    cache.release(cache.match(a[:1000]))
    assert index.num_queued == 2001
    cache.release([*copy, *last])  # walks up once, as far as its own copies go
    assert index.num_queued == 3002
    cache.check_conservation({})


def test_two_holders_of_one_prefix_keep_it_until_both_let_go() -> None:
    cache = _cache(5)
    a = _hashes("a", 2)
    first, second = _fill(cache, a), cache.acquire_prefix(a)
    cache.check_conservation({"first": first, "second": second})
    cache.release(first)
    assert (cache.num_held, cache.num_available) == (2, 3)
    cache.release(second)
    assert (cache.num_held, cache.num_available) == (0, 5)


def test_eviction_takes_only_what_free_blocks_fall_short_of() -> None:
    cache = _cache(10)
    a, b = _hashes("a", 4), _hashes("b", 3)
    cache.release(_fill(cache, a))
    cache.release(_fill(cache, b))
    assert cache.num_free == 3
    held = cache.allocate(3)
    assert held is not None
    assert cache.statistics().num_evicted_blocks == 0
    more = cache.allocate(2)
    assert more is not None
    assert cache.statistics().num_evicted_blocks == 2
    assert (len(cache.match(a)), len(cache.match(b))) == (2, 3)
    cache.check_conservation({"r": [*held, *more]})


def test_refusing_changes_nothing() -> None:
    cache = _cache(6)
    a = _hashes("a", 3)
    held = _fill(cache, _hashes("h", 1))
    cache.release(_fill(cache, a))
    cache.take_events()
    before = cache.statistics()
    assert cache.num_available == 5
    assert cache.allocate(6) is None
    assert cache.statistics() == before
    assert cache.take_events() is None
    assert len(cache.match(a)) == 3
    assert cache.allocate(5) is not None
    assert held == cache.match(_hashes("h", 1))


def test_availability_beside_a_match_leaves_the_match_alone() -> None:
    cache = _cache(8)
    a = _hashes("a", 4)
    holder = _fill(cache, a[:2])
    cache.release(_fill(cache, a))
    match = cache.match(a)
    assert match[:2] == holder
    assert cache.num_available == 6
    assert cache.num_available_without(match) == 4
    assert cache.acquire_prefix(a) == match
    assert cache.num_available == 4


def test_a_prompt_used_twice_survives_a_storm_of_prompts_used_once() -> None:
    cache = _cache(20)
    system = _hashes("system", 5)
    for _ in range(2):
        cache.release(_fill(cache, system))
    for i in range(100):
        cache.release(_fill(cache, _hashes(f"once{i}-", 3)))
    assert len(cache.match(system)) == 5
    assert cache.statistics().num_protected_blocks == 5


def test_a_duplicate_is_freed_on_release_and_its_continuation_is_found_under_the_first() -> None:
    cache = _cache(8)
    a = _hashes("a", 3)
    first, second = cache.allocate(2), cache.allocate(3)
    assert first is not None
    assert second is not None
    for block_ids in (first, second):
        for i, block_id in enumerate(block_ids):
            cache.index(block_id, a[i], a[i - 1] if i else None)
    assert cache.match(a) == [*first, second[2]]
    cache.release(first)
    cache.release(second)
    assert (cache.num_free, cache.num_cached_idle) == (5, 3)
    cache.check_conservation({})
    assert cache.allocate(6) is not None
    assert cache.match(a) == first  # the leaf went, though its parents were let go earlier


def test_forgotten_content_is_not_found_and_its_held_blocks_are_freed_on_release() -> None:
    cache = _cache(8)
    a = _hashes("a", 4)
    held = _fill(cache, a[:2])
    cache.release(_fill(cache, a))
    tail = cache.match(a)[2:]
    assert [cache.num_references(b) for b in [*held, *tail]] == [1, 1, 0, 0]
    assert sorted(cache.forget(held[1:])) == tail
    assert cache.match(a) == held[:1]
    assert (cache.num_free, cache.num_cached_idle, cache.num_held) == (6, 0, 2)
    cache.index(held[1], a[1], a[0])  # recomputed by its holder
    assert cache.match(a) == held
    cache.forget(held)
    cache.release(held)
    assert cache.num_free == 8


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    cache = BlockCache(6, enable_prefix_caching=False, protected_share=0.8)
    a = _hashes("a", 4)
    block_ids = _fill(cache, a)
    assert cache.match(a) == []
    assert cache.acquire_prefix(a) == []
    cache.check_conservation({"r": block_ids})
    cache.release(block_ids)
    assert (cache.num_free, cache.num_cached_idle) == (6, 0)
    assert cache.take_events() is None


def test_statistics_count_lookups_in_blocks() -> None:
    cache = _cache(10, protected_share=0.25)
    a = _hashes("a", 3)
    cache.release(_fill(cache, a))
    held = _fill(cache, [*a, b"tail"])
    cache.release(held[3:])
    figures = cache.statistics()
    assert (figures.num_lookups, figures.num_lookup_blocks, figures.num_hit_blocks) == (2, 7, 3)
    assert (figures.num_blocks, figures.num_free_blocks, figures.num_held_blocks) == (10, 6, 3)
    assert (figures.num_indexed_blocks, figures.num_probationary_blocks) == (4, 1)
    cache.release(held[:3])
    assert cache.statistics().num_protected_blocks == 2
    assert cache.statistics().num_probationary_blocks == 2


def test_a_block_nobody_holds_cannot_be_indexed() -> None:
    cache = _cache(2)
    with pytest.raises(AssertionError, match="block 1 offered as 61, but nobody holds it"):
        cache.index(1, b"a", None)


def test_the_conservation_error_prints_all_terms_and_the_owners() -> None:
    cache = _cache(7)
    cache.release(_fill(cache, _hashes("a", 2)))
    held = cache.allocate(3)
    assert held == [2, 3, 4]
    cache.check_conservation({"r": held})
    with pytest.raises(AssertionError) as caught:
        cache.check_conservation({"r": [2, 3, 3], "s": [1, 99]})
    text = str(caught.value)
    for part in (
        "free 2 + cached idle 2 + held 3 = 7 of 7",
        "block 1 has 0 references, its owners 1",
        "block 3 has 1 references, its owners 2",
        "block 4 has 1 references, its owners 0",
        "block 99 does not exist",
        "owners: {'r': [2, 3, 3], 's': [1, 99]}",
    ):
        assert part in text


def test_a_lost_block_is_reported() -> None:
    cache = _cache(4)
    held = cache.allocate(2)
    assert held is not None
    cache._pool.release(held)
    with pytest.raises(AssertionError, match="= 2 of 4; block 0 is lost: not held"):
        cache.check_conservation({})


@pytest.mark.parametrize("num_blocks", [1, 13, 257])
def test_random_traffic_conserves_every_block(num_blocks: int) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    cache = _cache(num_blocks, protected_share=rng.random())
    owners: dict[str, list[int]] = {}
    for i in range(300):
        hashes = _hashes(f"{rng.randrange(6)}-", rng.randint(1, 9))
        if owners and rng.random() < 0.4:
            cache.release(owners.pop(rng.choice(list(owners))))
        elif len(hashes) <= cache.num_available_without(match := cache.match(hashes)) + len(match):
            owners[f"r{i}"] = _fill(cache, hashes)
        if i % 25 == 0:
            cache.check_conservation(owners)
    for block_ids in owners.values():
        cache.release(block_ids)
    cache.check_conservation({})
    assert cache.num_available == num_blocks, f"seed {seed}"
    assert cache.allocate(num_blocks) is not None

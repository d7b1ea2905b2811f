"""The index finds what it holds and gives up idle blocks in exactly the order it promises."""

import pytest

from engine.kv.index import PrefixIndex


def _hashes(name: str, length: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(length)]


def _insert_chain(index: PrefixIndex, hashes: list[bytes], block_ids: list[int]) -> None:
    for i, block_id in enumerate(block_ids):
        assert index.insert(block_id, hashes[i], hashes[i - 1] if i else None)


def _let_go(index: PrefixIndex, block_ids: list[int]) -> None:
    for block_id in reversed(block_ids):
        index.add_idle(block_id)


def _evict_all(index: PrefixIndex) -> list[list[int]]:
    order = []
    while index.num_idle:
        order.append([block_id for block_id, _ in index.evict()])
        assert index.find_problems() == []
    return order


def test_the_longest_indexed_prefix_matches_and_looking_changes_nothing() -> None:
    index = PrefixIndex(10, max_protected=8)
    a = _hashes("a", 4)
    _insert_chain(index, a, [3, 1, 4])
    _let_go(index, [3, 1, 4])
    assert index.match(a) == [3, 1, 4]
    assert index.match([a[0], b"other", a[2]]) == [3]
    assert index.match(a[1:2]) == [1]
    assert index.match([b"other", a[0]]) == []
    assert index.match([]) == []
    assert _evict_all(index) == [[4], [1], [3]]
    assert index.match(a) == []


def test_duplicate_content_and_orphans_stay_outside() -> None:
    index = PrefixIndex(10, max_protected=8)
    a = _hashes("a", 4)
    _insert_chain(index, a, [0, 1])
    assert not index.insert(5, a[1], a[0])
    assert not index.insert(1, a[1], a[0])
    assert not index.insert(6, a[3], a[2])
    assert 5 not in index
    assert 6 not in index
    assert len(index) == 2
    with pytest.raises(AssertionError, match="block 1 is indexed as 6131, not 78"):
        index.insert(1, b"x", None)


def test_probationary_entries_go_first_and_oldest_first() -> None:
    index = PrefixIndex(10, max_protected=8)
    a, b, c = (_hashes(name, 2) for name in "abc")
    for hashes, block_ids in ((a, [0, 1]), (b, [2, 3]), (c, [4, 5])):
        _insert_chain(index, hashes, block_ids)
        _let_go(index, block_ids)
    index.use([0, 1])
    _let_go(index, [0, 1])
    assert (index.num_probationary, index.num_protected) == (4, 2)
    assert _evict_all(index) == [[3], [2], [5], [4], [1], [0]]


def test_what_is_held_cannot_be_evicted() -> None:
    index = PrefixIndex(10, max_protected=8)
    a = _hashes("a", 3)
    _insert_chain(index, a, [0, 1, 2])
    with pytest.raises(AssertionError, match="nothing is idle"):
        index.evict()
    _let_go(index, [0, 1, 2])
    index.use([0, 1])
    assert _evict_all(index) == [[2]]
    assert index.match(a) == [0, 1]
    with pytest.raises(AssertionError, match="nothing is idle"):
        index.evict()


def test_overflow_demotes_the_oldest_protected_behind_all_on_probation() -> None:
    index = PrefixIndex(10, max_protected=2)
    a, b, c = (_hashes(name, 2) for name in "abc")
    for hashes, block_ids in ((a, [0, 1]), (b, [2, 3])):
        _insert_chain(index, hashes, block_ids)
        index.use(block_ids)
        _let_go(index, block_ids)
    _insert_chain(index, c, [4])
    _let_go(index, [4])
    assert (index.num_probationary, index.num_protected) == (3, 2)
    assert index.find_problems() == []
    # a was demoted before c came; protect it again and b is demoted behind c.
    index.use([0, 1])
    _let_go(index, [0, 1])
    assert _evict_all(index) == [[4], [3], [2], [1], [0]]


def test_without_room_for_protection_the_order_is_plain_lru() -> None:
    index = PrefixIndex(5, max_protected=0)
    a, b = _hashes("a", 2), _hashes("b", 1)
    _insert_chain(index, a, [0, 1])
    index.use([0, 1])
    _let_go(index, [0, 1])
    _insert_chain(index, b, [2])
    _let_go(index, [2])
    assert (index.num_probationary, index.num_protected) == (3, 0)
    assert _evict_all(index) == [[1], [0], [2]]


@pytest.mark.parametrize("max_protected", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("num_uses", [0, 1])
def test_a_parent_let_go_before_its_child_is_still_evicted_after_it(
    max_protected: int, num_uses: int
) -> None:
    """Where the child's holder had its own copy of the parents' content."""
    index = PrefixIndex(6, max_protected=max_protected)
    a = _hashes("a", 4)
    _insert_chain(index, a, [0, 1, 2, 3])
    for _ in range(num_uses):
        index.use([0, 1, 2, 3])
    _let_go(index, [0, 1])
    assert index.insert(5, b"b0", None)
    index.add_idle(5)
    index.add_idle(3)
    index.add_idle(2)
    assert index.find_problems() == []
    order = [block_id for freed in _evict_all(index) for block_id in freed]
    assert [b for b in order if b != 5] == [3, 2, 1, 0]


def test_a_held_child_leaves_with_its_evicted_parent_and_its_idle_children_become_free() -> None:
    index = PrefixIndex(10, max_protected=8)
    a = _hashes("a", 4)
    _insert_chain(index, a, [0, 1, 2, 3])
    _let_go(index, [0, 1])  # whoever holds 2 has its own copies of 0 and 1
    index.add_idle(3)
    assert index.evict() == [(1, a[1]), (3, a[3])]
    assert 2 not in index
    assert index.match(a) == [0]
    assert _evict_all(index) == [[0]]


def test_forgetting_drops_all_descendants_and_frees_the_idle_ones() -> None:
    index = PrefixIndex(10, max_protected=8)
    a = _hashes("a", 3)
    _insert_chain(index, a, [0, 1, 2])
    assert index.insert(3, b"fork", a[0])
    assert index.insert(4, b"b0", None)
    _let_go(index, [2, 3, 4])
    assert sorted(index.forget([1, 9])) == [2]
    assert index.match(a) == [0]
    assert index.match([a[0], b"fork"]) == [0, 3]
    assert index.forget([0, 3, 1]) == [3]
    assert len(index) == 1
    assert index.find_problems() == []
    assert _evict_all(index) == [[4]]


def test_an_idle_block_cannot_become_idle_again() -> None:
    index = PrefixIndex(3, max_protected=1)
    index.insert(0, b"a", None)
    index.add_idle(0)
    with pytest.raises(AssertionError, match="block 0 is idle already"):
        index.add_idle(0)


def test_changes_are_net_and_numbered_without_gaps() -> None:
    index = PrefixIndex(6, max_protected=4)
    assert index.take_changes() is None
    _insert_chain(index, [b"a", b"b", b"c"], [0, 1, 2])
    index.forget([2])
    first = index.take_changes()
    assert first is not None
    assert (first.sequence, first.is_resync) == (0, False)
    assert (first.added, first.removed) == ([b"a", b"b"], [])
    assert index.take_changes() is None
    index.forget([1])
    index.insert(4, b"b", b"a")
    assert index.take_changes() is None
    index.insert(5, b"d", b"b")
    index.forget([4])
    second = index.take_changes()
    assert second is not None
    assert (second.sequence, second.added, second.removed) == (1, [], [b"b"])


def test_too_many_changes_become_a_resync_with_all_that_is_indexed() -> None:
    index = PrefixIndex(3, max_protected=2)
    _insert_chain(index, [b"a", b"b", b"c"], [0, 1, 2])
    assert index.take_changes() is not None
    index.forget([0])
    index.insert(0, b"x", None)
    index.forget([0])
    index.insert(0, b"d", None)
    changes = index.take_changes()
    assert changes is not None
    assert (changes.sequence, changes.is_resync) == (1, True)
    assert (changes.added, changes.removed) == ([b"d"], [])
    index.insert(1, b"e", b"d")
    changes = index.take_changes()
    assert changes is not None
    assert (changes.sequence, changes.is_resync, changes.added) == (2, False, [b"e"])
    index.request_resync()
    changes = index.take_changes()
    assert changes is not None
    assert (changes.sequence, changes.is_resync, changes.added) == (3, True, [b"d", b"e"])


class _IndexWithoutTheWalk(PrefixIndex):
    def add_idle(self, block_id: int) -> None:
        self._enqueue(self._by_block[block_id])


def test_a_parent_queued_before_its_child_is_reported() -> None:
    index = _IndexWithoutTheWalk(3, max_protected=1)
    _insert_chain(index, [b"a", b"b"], [0, 1])
    index.add_idle(0)
    index.add_idle(1)
    assert index.find_problems() == ["block 0 would go before its child 1"]

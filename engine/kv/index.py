"""Finds blocks by the hash of their content, and decides which idle block to evict next.

The index is a forest. An entry is a complete block under its chained hash; its parent is the block
before it in the sequence. Every entry's parent is an entry too, so whatever is indexed can be
found. Knows no tokens, no tensors and no reference counts: its caller says when a block becomes
idle (unreferenced) and when it is used again.

Idle entries wait for eviction in two queues, a segmented LRU after Karedla, Love and Wherry
("Caching strategies to improve disk system performance", IEEE Computer 27(3), 1994). An entry
starts as probationary. A prefix hit, its second use, makes it protected when it is idle next.

    evicted next -> | probationary: oldest ... newest | protected: oldest ... newest | <- last
                    '---- overflow of the protected queue: its oldest goes here ^

Leaf before parent: if an entry C and its parent P are both idle, C stands before P in that order.
1. P becomes idle while C is: P goes to the end of its queue. If C is protected then P is too, since
   a hit on C is a hit on P, and P loses protection only while idle, by 3.
2. C becomes idle while P is (C's holder had its own copy of P's content, or released P first):
   `add_idle` moves P, and P's idle parents, behind C, with C's protection.
3. The oldest protected entry is demoted to the end of the probationary queue: its idle children
   stood before it, so they are probationary already, and its idle parent is still protected.
So the first entry in the order never has an idle child. It can have a held child. That child and
its descendants could not be found any more, so they leave the index with it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Entry:
    block_hash: bytes
    block_id: int
    parent: "_Entry | None"
    children: "dict[int, _Entry]" = field(default_factory=dict)  # by block id
    is_protected: bool = False  # used again since it was indexed or demoted
    is_idle: bool = False  # is in the queue that `is_protected` selects


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexChanges:
    """Changes that a reader must apply to know which hashes are indexed.

    Sequence numbers count up by one from 0; a reader that sees a gap asks for a resync. With
    `is_resync`, `added` is the full content and replaces what the reader had.
    """

    sequence: int
    is_resync: bool
    added: list[bytes]
    removed: list[bytes]  # disjoint from `added`


class _ChangeLog:
    """Net changes since the last `take`; more than `max_changes` of them become a resync."""

    def __init__(self, max_changes: int) -> None:
        self._max_changes = max_changes
        self._was_added: dict[bytes, bool] = {}  # hash -> added (True) or removed
        self._is_resync = False
        self._sequence = 0

    def record(self, block_hash: bytes, *, was_added: bool) -> None:
        if self._is_resync:
            return
        pending = self._was_added
        if pending.get(block_hash, was_added) != was_added:
            del pending[block_hash]  # added and removed, or the reverse: no change
            return
        pending[block_hash] = was_added
        if len(pending) > self._max_changes:
            self.request_resync()

    def request_resync(self) -> None:
        self._is_resync = True
        self._was_added.clear()

    def take(self, indexed: Iterable[bytes]) -> IndexChanges | None:
        if not self._is_resync and not self._was_added:
            return None
        pending = self._was_added
        changes = IndexChanges(
            sequence=self._sequence,
            is_resync=self._is_resync,
            added=list(indexed)
            if self._is_resync
            else [h for h, added in pending.items() if added],
            removed=[h for h, added in pending.items() if not added],
        )
        self._was_added = {}
        self._is_resync = False
        self._sequence += 1
        return changes


class PrefixIndex:
    """Block hash -> block, for at most `num_blocks` blocks, of which `max_protected` idle ones
    are protected. All operations are O(1) per block named, amortised over the blocks inserted.
    """

    def __init__(self, num_blocks: int, *, max_protected: int) -> None:
        assert 0 <= max_protected <= num_blocks, f"{max_protected} of {num_blocks} protected"
        self._max_protected = max_protected
        self._by_hash: dict[bytes, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        # OrderedDict: finding the first entry of a dict is linear in the entries deleted before it.
        self._probationary: OrderedDict[int, _Entry] = OrderedDict()
        self._protected: OrderedDict[int, _Entry] = OrderedDict()
        # A change log longer than the index itself is worse than a resync.
        self._changes = _ChangeLog(max_changes=num_blocks)

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    @property
    def num_probationary(self) -> int:
        return len(self._probationary)

    @property
    def num_protected(self) -> int:
        return len(self._protected)

    @property
    def num_idle(self) -> int:
        """Idle entries; repeated calls of `evict` can evict all of them."""
        return len(self._probationary) + len(self._protected)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest indexed prefix of a chain of hashes; changes nothing."""
        block_ids = []
        by_hash = self._by_hash
        for block_hash in hashes:
            entry = by_hash.get(block_hash)
            if entry is None:
                break
            block_ids.append(entry.block_id)
        return block_ids

    def insert(self, block_id: int, block_hash: bytes, parent: bytes | None) -> bool:
        """Index a held block; returns False if nothing was added.

        Nothing is added if the hash is indexed already (under the same block, or under another one
        with the same content) or if the parent is not indexed.
        """
        known = self._by_block.get(block_id)
        if known is not None:
            assert known.block_hash == block_hash, (
                f"block {block_id} is indexed as {known.block_hash.hex()}, not {block_hash.hex()}"
            )
            return False
        if block_hash in self._by_hash:
            return False
        parent_entry = None
        if parent is not None:
            parent_entry = self._by_hash.get(parent)
            if parent_entry is None:
                return False
        entry = _Entry(block_hash, block_id, parent_entry)
        if parent_entry is not None:
            parent_entry.children[block_id] = entry
        self._by_hash[block_hash] = entry
        self._by_block[block_id] = entry
        self._changes.record(block_hash, was_added=True)
        return True

    def use(self, block_ids: Iterable[int]) -> None:
        """Count a prefix hit: the blocks, a chain from its start, are held now, later protected."""
        for block_id in block_ids:
            entry = self._by_block[block_id]
            if entry.is_idle:
                self._dequeue(entry)
            entry.is_protected = True

    def add_idle(self, block_id: int) -> None:
        """Queue an indexed block that is no longer held for eviction.

        It stands after all other idle blocks of its queue and before its idle parents, which are
        as recent as it is.
        """
        entry = self._by_block[block_id]
        assert not entry.is_idle, f"block {block_id} is idle already"
        self._enqueue(entry)
        # Walks up only where a block was held but not its parent, so at most as far as the holder's
        # own copies of the parents go: constant per block of the released sequence.
        child, parent = entry, entry.parent
        while parent is not None and parent.is_idle:
            self._dequeue(parent)
            parent.is_protected |= child.is_protected
            self._enqueue(parent)
            child, parent = parent, parent.parent

    def evict(self) -> list[tuple[int, bytes]]:
        """Evict the first idle entry; returns the blocks that this frees, at least one, by hash.

        It frees more than one only if a held child of the entry has idle children itself.
        """
        queue = self._probationary or self._protected
        assert queue, "nothing is idle, so nothing can be evicted"
        freed = self._remove_with_descendants(next(iter(queue.values())))
        return [(entry.block_id, entry.block_hash) for entry in freed]

    def forget(self, block_ids: Iterable[int]) -> list[int]:
        """Drop blocks and all their descendants, whose hashes include them.

        Returns the blocks that were idle and are free now. Blocks that are not indexed are skipped.
        """
        free: list[int] = []
        for block_id in block_ids:
            entry = self._by_block.get(block_id)
            if entry is not None:
                free += [entry.block_id for entry in self._remove_with_descendants(entry)]
        return free

    def request_resync(self) -> None:
        """Make the next `take_changes` list every indexed hash."""
        self._changes.request_resync()

    def take_changes(self) -> IndexChanges | None:
        """Net changes since the last call; None if there were none (no number is used up)."""
        return self._changes.take(self._by_hash)

    def find_problems(self) -> list[str]:
        """Describe every inconsistency of the structure. O(indexed blocks)."""
        order = [*self._probationary.values(), *self._protected.values()]
        rank = {entry.block_id: i for i, entry in enumerate(order)}
        problems = []
        if len(self._by_hash) != len(self._by_block):
            problems.append(f"{len(self._by_hash)} hashes for {len(self._by_block)} blocks")
        if len(rank) != len(order) or not rank.keys() <= self._by_block.keys():
            problems.append(f"queues {[entry.block_id for entry in order]} hold strangers or twins")
        if len(self._protected) > self._max_protected:
            problems.append(f"{len(self._protected)} protected, at most {self._max_protected}")
        for entry in self._by_block.values():
            problems += self._problems_of(entry, rank)
        return problems

    def _problems_of(self, entry: _Entry, rank: dict[int, int]) -> list[str]:
        problems = []
        block_id, parent = entry.block_id, entry.parent
        if self._by_hash.get(entry.block_hash) is not entry:
            problems.append(f"block {block_id} cannot be found by its hash")
        queue = self._protected if entry.is_protected else self._probationary
        if entry.is_idle != (block_id in rank) or entry.is_idle != (block_id in queue):
            problems.append(f"block {block_id} is not in the queue its marks name")
        if parent is not None:
            if self._by_block.get(parent.block_id) is not parent:
                problems.append(f"block {block_id} has lost its parent {parent.block_id}")
            if parent.children.get(block_id) is not entry:
                problems.append(f"block {parent.block_id} does not know its child {block_id}")
            if block_id in rank and rank.get(parent.block_id, len(rank)) < rank[block_id]:
                problems.append(f"block {parent.block_id} would go before its child {block_id}")
        return problems

    def _enqueue(self, entry: _Entry) -> None:
        entry.is_idle = True
        if not entry.is_protected:
            self._probationary[entry.block_id] = entry
            return
        self._protected[entry.block_id] = entry
        if len(self._protected) > self._max_protected:
            block_id, oldest = self._protected.popitem(last=False)
            oldest.is_protected = False
            self._probationary[block_id] = oldest

    def _dequeue(self, entry: _Entry) -> None:
        queue = self._protected if entry.is_protected else self._probationary
        del queue[entry.block_id]
        entry.is_idle = False

    def _remove_with_descendants(self, root: _Entry) -> list[_Entry]:
        """Returns those that were idle."""
        if root.parent is not None:
            del root.parent.children[root.block_id]
        free = []
        stack = [root]
        while stack:
            entry = stack.pop()
            stack.extend(entry.children.values())
            if entry.is_idle:
                self._dequeue(entry)
                free.append(entry)
            entry.children = {}  # and no parent: leave no reference cycle
            entry.parent = None
            del self._by_hash[entry.block_hash]
            del self._by_block[entry.block_id]
            self._changes.record(entry.block_hash, was_added=False)
        return free

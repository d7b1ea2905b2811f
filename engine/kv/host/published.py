"""Tells a reader which blocks a host arena holds: all of them once, then what has changed.

Whoever shares the arena sees the same blocks, so one of its workers tells for all. A report costs a
comparison of all words with those of the last one. It takes no lock: a block whose word changes
while its name is read is looked at again for the next report. Any thread, one at a time.
"""

import numpy as np

from engine.kv.host.arena import READY, HostArena, Words
from engine.kv.index import IndexChanges


class PublishedBlocks:
    """The changes of one arena, for one reader: two would take each other's."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._sequence = 0
        self._is_resync = True
        self._seen: Words = np.zeros(arena.num_blocks, dtype=np.uint64)
        self._is_told = np.zeros(arena.num_blocks, dtype=np.bool_)
        self._names: dict[int, bytes] = {}  # block that is told -> its name

    def request_resync(self) -> None:
        """Make the next `take_events` list every block."""
        self._is_resync = True
        self._seen[:] = 0  # no block has this word
        self._is_told[:] = False
        self._names.clear()

    def take_events(self) -> IndexChanges | None:
        """Net changes since the last call; None if there are none."""
        removed, added = [], []
        words = self._arena.words()
        is_other = words != self._seen
        self._seen = words
        is_stored = (words & 0xFF) == READY
        for slot in np.flatnonzero(is_other & (is_stored | self._is_told)).tolist():
            if (old := self._names.pop(slot, None)) is not None:
                removed.append(old)
            name, self._seen[slot] = self._arena.name_in(slot)
            self._is_told[slot] = name is not None
            if name is not None:
                self._names[slot] = name
                added.append(name)
        if not (self._is_resync or removed or added):
            return None
        stays = set(added)
        changes = IndexChanges(
            sequence=self._sequence,
            is_resync=self._is_resync,
            added=added,
            removed=[] if self._is_resync else [name for name in removed if name not in stays],
        )
        self._sequence += 1
        self._is_resync = False
        return changes

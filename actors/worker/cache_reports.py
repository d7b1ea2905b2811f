"""Reports the changes of a worker's prefix cache to the one reader that follows it."""

from typing import Protocol

from engine.messages import BlockChanges


class IndexEvents(Protocol):
    """One batch of changes of an index (engine/kv/index.py)."""

    @property
    def sequence(self) -> int: ...
    @property
    def is_resync(self) -> bool: ...
    @property
    def added(self) -> list[bytes]: ...
    @property
    def removed(self) -> list[bytes]: ...


class EventSource(Protocol):
    """The part of a `BlockCache` that reports its changes."""

    def request_resync(self) -> None: ...
    def take_events(self) -> IndexEvents | None: ...


class CacheReports:
    """Makes the reports of one incarnation, for one reader: two would take each other's changes."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._last: int | None = None  # the number of the last report

    def since(self, cache: EventSource, after: int | None) -> BlockChanges | None:
        """Returns the changes after report `after`, or None if there were none.

        Returns everything that is indexed if another report was made since, or for None.
        """
        if after is None or after != self._last:
            cache.request_resync()
        events = cache.take_events()
        if events is None:
            return None
        self._last = events.sequence
        return BlockChanges(
            incarnation=self._incarnation,
            sequence=events.sequence,
            is_resync=events.is_resync,
            added=events.added,
            removed=events.removed,
        )

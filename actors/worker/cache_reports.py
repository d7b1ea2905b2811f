"""Reports the changes of a worker's prefix cache, and of tiers that it shares, to one reader."""

from typing import Protocol

from engine.messages import BlockChanges, TierReport, TiersAfter


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
    """What reports its changes, as a `BlockCache` does."""

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


class StoredLevel(Protocol):
    """A tier (engine/kv/host/tier.py)."""

    @property
    def place(self) -> str: ...
    @property
    def published(self) -> EventSource: ...
    @property
    def block_s(self) -> float: ...
    @property
    def floor_s(self) -> float: ...


class TierReports:
    """Makes the reports of one incarnation of the tiers that its worker shares with others."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._reports: dict[str, CacheReports] = {}

    def of(self, level: StoredLevel, after: TiersAfter) -> TierReport:
        """Returns a tier's report, with its changes if `after` names it."""
        changes = None
        if level.place in after:
            reports = self._reports.setdefault(level.place, CacheReports(self._incarnation))
            changes = reports.since(level.published, after[level.place])
        return TierReport(
            place=level.place, block_s=level.block_s, floor_s=level.floor_s, blocks=changes
        )

"""One worker's disk tier: its arena's blocks are written behind, and read back when that pays.

Two threads: one writes, in the order of publication, as many blocks to a file as wait, and one
reads. At most `_MAX_QUEUED_BYTES` wait to be written; what comes beyond that is dropped, as is what
has left the arena by then. A disk
that does not answer is not waited for: while a read is under way for longer than predicted, the
next one is predicted to take as much longer, so nothing is read that is sooner computed. After an
error nothing more is written; what cannot be read is forgotten.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.clock import MonotonicClock
from engine.kv.host.arena import HostArena, HostBlock
from engine.kv.host.block_time import BlockTime
from engine.kv.host.disk import DiskBlock, DiskFiles, Row
from engine.kv.host.lane import Lane
from engine.kv.index import IndexChanges

logger = logging.getLogger(__name__)

_MAX_QUEUED_BYTES = 2**28
_GROUP_BYTES = 2**25  # of a file, at most
_HOPED_BYTES_S = 10e9  # of a read
_REFRESH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStatistics:
    """Counters of this worker since the start, in blocks; then what it knows to be there."""

    num_written: int
    num_dropped: int  # came faster than they could be written, or had left the arena
    num_loaded: int  # read, checked on the device
    read_s: float  # of all reads together
    num_evicted: int
    num_void_files: int  # torn, or of another form; removed
    num_blocks: int


class DiskTier:
    """Writes and reads of one worker. The stepping thread calls what says nothing else."""

    def __init__(self, files: DiskFiles, arena: HostArena) -> None:
        self._files = files
        self._arena = arena
        self.read_time = BlockTime(arena.block_bytes / _HOPED_BYTES_S, MonotonicClock())
        self.num_loaded = 0
        self._read_s = 0.0
        self._num_written = self._num_dropped = 0
        self._waiting: deque[HostBlock] = deque()  # to be written
        self.num_reading = 0
        self._refreshed_s = time.monotonic()
        self._read_since_s: float | None = None
        self._is_writing = True  # False after an error
        self._told: set[bytes] | None = None  # None = tell everything
        self._told_changes = -1  # of the index of files, when it was told last
        self._sequence = 0
        found = files.folder.stat()
        self.place = f"{arena.place}/{found.st_dev}/{found.st_ino}"
        self._write_lane, self._read_lane = Lane("disk writes"), Lane("disk reads")

    @property
    def max_blocks(self) -> int:
        """So many blocks the files may hold, about."""
        return self._files.num_bytes // self._arena.block_bytes

    # ---- writing ---------------------------------------------------------------------------------

    def write_behind(self, blocks: Sequence[HostBlock]) -> None:
        """Queues blocks of the arena; those that are there already are left out."""
        new = [block for block in blocks if self._files.get(block.block_hash) is None]
        room = max(0, _MAX_QUEUED_BYTES // self._arena.block_bytes - len(self._waiting))
        kept = new[:room] if self._is_writing else []
        self._num_dropped += len(new) - len(kept)
        self._waiting.extend(kept)
        if kept:
            self._write_lane.post(self._write)

    def _write(self) -> None:
        """On the writing thread: all that waits, which may be nothing by now."""
        if not self._is_writing:
            return
        try:
            self._files.refresh(time.monotonic())
            while group := self._next_group():
                self._write_group(group)
        except OSError as error:
            logger.error("%s is written to no more: %s", self._files.folder, error)
            self._is_writing = False
            self._num_dropped += len(self._waiting)
            self._waiting.clear()

    def _next_group(self) -> list[HostBlock]:
        """The blocks that have waited longest; empty = none wait."""
        most = max(1, _GROUP_BYTES // self._arena.block_bytes)
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def _write_group(self, group: Sequence[HostBlock]) -> None:
        copies: list[tuple[bytes, int, Row]] = []
        for block in group:
            row = self._arena.blocks[block.slot].copy()
            if self._arena.is_unchanged(block) and self._files.get(block.block_hash) is None:
                copies.append((block.block_hash, block.digest, row))
        is_written = bool(copies) and self._files.write(copies)
        self._num_written += len(copies) if is_written else 0
        self._num_dropped += len(group) - len(copies) * is_written

    # ---- reading ---------------------------------------------------------------------------------

    def get(self, block_hash: bytes) -> DiskBlock | None:
        """Where a block is, as far as this worker knows: it looks every second, by and by."""
        if (now_s := time.monotonic()) - self._refreshed_s > _REFRESH_S:
            self._refreshed_s = now_s
            self._write_lane.post(self._write)
        return self._files.get(block_hash)

    def read_seconds(self, num_blocks: int) -> float:
        """Predicted time until so many more would be read."""
        since_s = self._read_since_s
        stalled_s = 0.0 if since_s is None else time.monotonic() - since_s
        return stalled_s + self.read_time.predicted_s * (self.num_reading + num_blocks)

    def post(self, job: Callable[[], None]) -> None:
        """Runs a job that reads, on the reading thread."""
        self._read_lane.post(job)

    def read(self, block: DiskBlock, row: Row) -> bool:
        """Copies a block to memory; False if it is gone. On the reading thread."""
        self._read_since_s = began_s = time.monotonic()
        is_read = self._files.read(block, row)
        self._read_since_s = None
        took_s = time.monotonic() - began_s
        self._read_s += took_s
        self.read_time.learn(took_s, 1)
        return is_read

    def forget(self, block: DiskBlock) -> None:
        """A block was not what was stored."""
        self._files.forget(block)

    # ---- observation and end ---------------------------------------------------------------------

    def request_resync(self) -> None:
        self._told = None

    def take_events(self) -> IndexChanges | None:
        """Net changes since the last call, as of the index's; see `PublishedBlocks`."""
        before, num_changes = self._told, self._files.num_changes
        if before is not None and num_changes == self._told_changes:
            return None  # a set of all names is not made for nothing
        self._told = now = self._files.hashes()
        self._told_changes = num_changes
        if now == before:
            return None
        sequence, self._sequence = self._sequence, self._sequence + 1
        return IndexChanges(
            sequence=sequence,
            is_resync=before is None,
            added=list(now - before if before else now),
            removed=list(before - now if before else ()),
        )

    def statistics(self) -> DiskStatistics:
        return DiskStatistics(
            num_written=self._num_written,
            num_dropped=self._num_dropped,
            num_loaded=self.num_loaded,
            read_s=self._read_s,
            num_evicted=self._files.num_evicted,
            num_void_files=self._files.num_void,
            num_blocks=self._files.num_blocks,
        )

    def close(self) -> None:
        """Writes what waits, unless the disk hangs."""
        for lane in (self._write_lane, self._read_lane):
            lane.close()

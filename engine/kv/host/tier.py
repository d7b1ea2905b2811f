"""One worker's host tier: what its device cache evicts goes to the arena, and comes back from it.

    save     blocks that leave: copied at once, digested beside the steps, published by `settle`
    load     found blocks: copied and checked beside the steps, piece by piece and in order

Blocks leave when they are evicted. A decode worker stores those of an answer when that has ended:
on its device nobody looks for them, and the prompt's the prefill worker has or has stored.

Called on the thread that steps. Two threads beside it wait for copies and make digests, one for
each direction, so that a load never waits for a save. The tier only ever loses blocks: if no block
of the arena is to be had, or another process is in the way, an evicted block is dropped.

Copies that nobody comes back for are a waste. So a quarter of the evicted blocks is stored until a
worker has ever found one, many in a row: where blocks are looked for, one is found soon. And when
as many were evicted as the arena holds, and none was found meanwhile, a sixteenth is stored until
one is. If what comes back does so too late for the arena, that keeps some of it there, where
storing all would have kept none: bimodal insertion (Qureshi et al., "Adaptive insertion policies
for high performance caching", ISCA 2007).

Knows no requests, no device cache and no tensors.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Literal, Protocol

from engine.clock import Clock, MonotonicClock
from engine.kv.host.arena import HostArena, HostBlock
from engine.kv.host.block_time import BlockTime
from engine.kv.host.disk import DiskBlock
from engine.kv.host.disk_tier import DiskStatistics, DiskTier
from engine.kv.host.lane import Lane
from engine.kv.host.published import PublishedBlocks

logger = logging.getLogger(__name__)

Copy = Callable[[Sequence[int], Sequence[int]], list[int]]
Problem = Literal["corrupt", "gone", "failed"]
Stores = Literal["evicted", "answers"]  # what the device's cache evicts; what answers have filled

_PIECE_BYTES = 2**24  # of a load's pieces, at least
_PIECES_SHARE = 4  # of a load is the largest piece
_MAX_WRITING_SHARE = 4  # at most 1/4 of the arena is being written by one worker
_HOPED_BYTES_S = (
    50e9  # of a load; one that is slower costs little (engine/scheduling/host_loads.py)
)
_LOAD_FLOOR_S = 0.5e-3  # handing a load over to its thread, and hearing of its end
_COUNT_EVERY_S = 0.1
_FIRST_SHARE, _NUM_FIRST_RUNS = 4, 16  # before anything was found, 1/4 is stored, in so many runs
_WAITED_SHARE = 16  # steps wait for the bus until 1/16 of the arena was evicted without a find
_TRIED_SHARE = 16  # where nothing is found any more, 1/16 of what is evicted is stored
_NO_WORD = 0  # of no block: there was none for it
_COUNTED = ("stored", "known", "dropped", "skipped", "loaded", "corrupt", "gone")

CLOCK = MonotonicClock()


class BlockMover(Protocol):
    """See engine/kv/host/movers.py."""

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Callable[[], list[int]]: ...

    def begin_load(self) -> Copy: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """Counters of this worker since the start, in blocks; then the arena's present sizes.

    The first four add up to all that were evicted, but for those that are being saved.
    """

    num_stored: int
    num_known: int  # evicted from the device, and in the arena already
    num_dropped: int  # evicted, and not stored: the arena had no room now, or the tier is off
    num_skipped: int  # evicted, and not stored: nothing that is stored is ever found
    num_loaded: int  # into blocks of the device, and checked
    num_corrupt: int  # loaded, and not what was stored
    num_gone: int  # evicted from the arena while they were loaded
    block_bytes: int
    num_blocks: int
    num_ready: int
    disk: DiskStatistics | None


@dataclass(frozen=True, slots=True)
class StoredLevel:
    """Blocks that can be loaded, and how fast."""

    place: str  # equal for all workers that share them
    published: PublishedBlocks | DiskTier
    block_s: float
    floor_s: float


class HostLoad:
    """Blocks on their way into the device; the fields are written by the loading thread.

    Whoever reads both reads `is_over` first.
    """

    def __init__(
        self,
        blocks: Sequence[HostBlock],
        block_ids: Sequence[int],
        files: dict[int, DiskBlock] | None = None,
    ) -> None:
        """files: where block i is read from first, into a block of the arena taken for it."""
        assert len(blocks) == len(block_ids), f"{len(blocks)} blocks into {len(block_ids)}"
        self.blocks = blocks
        self.block_ids = block_ids
        self.files = files or {}
        self.num_read = 0  # of `files`
        self.num_landed = 0  # from the first one on: there, and checked
        self.problem: Problem | None = None  # of block `num_landed`, which ended it
        self.is_cancelled = False
        self.has_ended = False  # no thread has anything to do with it any more
        self._lock = Lock()
        self._is_reading = False  # a file, or waits for that
        self._is_let_go = False  # while it read: it must not touch the device any more

    @property
    def is_over(self) -> bool:
        """Whether the device's blocks are not touched any more."""
        return self.has_ended or self._is_let_go

    @property
    def num_left(self) -> int:
        """Blocks that are still to be moved."""
        is_ending = self.is_over or self.is_cancelled
        return 0 if is_ending else len(self.blocks) - self.num_landed

    def cancel(self) -> None:
        """What is not under way need not come; over at once if a file is being read."""
        with self._lock:
            self.is_cancelled = True
            self._is_let_go = self._is_let_go or self._is_reading

    def resume(self) -> None:
        """Go on after all, unless it is over already."""
        with self._lock:
            self.is_cancelled = self._is_let_go

    def begin_reading(self) -> None:
        """A file is read next: a disk may hang, and must not keep the device's blocks then."""
        with self._lock:
            self._is_reading = True
            self._is_let_go = self.is_cancelled

    def may_move(self) -> bool:
        """Whether to go on, with blocks of the device."""
        with self._lock:
            self._is_reading = False
            return not self.is_cancelled and self.problem is None


class Save:
    """Blocks that left and are not published yet; once `is_over`, the device's are not read."""

    def __init__(
        self,
        slots: list[int],
        hashes: list[bytes],
        wait: Callable[[], list[int]],
        *,
        is_from_disk: bool = False,
    ) -> None:
        self.slots = slots
        self.hashes = hashes
        self.wait = wait
        self.is_from_disk = is_from_disk
        self.digests: list[int] | None = None  # None after its end: it failed
        self.is_over = False


class HostTier:
    """Saves and loads of one worker."""

    def __init__(
        self,
        arena: HostArena,
        mover: BlockMover,
        disk: DiskTier | None = None,
        *,
        num_staged: int | None = None,
        stores: Stores = "evicted",
        clock: Clock = CLOCK,
        lane: Callable[[str], Lane] = Lane,
    ) -> None:
        """disk: None = what leaves the arena is lost. lane: makes the thread of a name.

        num_staged: so many blocks `mover` saves at a time without holding up steps; None = any
        number. stores: what its owners are to give to `save`.
        """
        self.stores = stores
        self._clock = clock
        self._arena = arena
        self._disk = disk
        self._mover = mover
        self._num_staged = num_staged
        self._saves: deque[Save] = deque()
        self._saving: set[bytes] = set()
        self._loads: list[HostLoad] = []
        self._load_time = BlockTime(arena.block_bytes / _HOPED_BYTES_S, clock)
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._num_in_vain = 0  # blocks evicted since a worker has found one
        self._num_hits = arena.num_hits
        self._counted = -_COUNT_EVERY_S, 0  # when, and how many blocks were stored
        self._published = PublishedBlocks(arena)
        self._is_off = False
        self._wake: Callable[[], None] = _nothing
        self._save_lane = lane("host saves")
        self._load_lane = lane("host loads")

    def wrap_mover(self, wrap: Callable[[BlockMover], BlockMover]) -> None:
        """Wrap what moves blocks; call it before the first step."""
        self._mover = wrap(self._mover)

    def on_progress(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on another thread, when `settle` or a load has something new."""
        self._wake = wake

    def now_s(self) -> float:
        """By the clock that loads are timed with."""
        return self._clock.now_s()

    @property
    def is_active(self) -> bool:
        """Whether something is under way, for which `settle` must be called again."""
        return bool(self._saves or self._loads)

    # ---- out of the device ----------------------------------------------------------------------

    def save(self, evicted: Sequence[tuple[int, bytes]]) -> None:
        """Takes blocks (id, hash) that leave, of each sequence the last ones first.

        The next step may overwrite them.
        """
        self.begin_save(evicted)

    def begin_save(self, evicted: Sequence[tuple[int, bytes]]) -> Save | None:
        """As `save`; returns what is copied, None if nothing is."""
        if self._is_off:
            self._counts["dropped"] += len(evicted)
            return None
        num_in_vain = self._count_evicted(len(evicted))
        if self._is_in_vain(num_in_vain):
            self._counts["skipped"] += len(evicted)
            return None
        hashes = [name for _, name in reversed(evicted)]  # a sequence's first go last
        is_new = [name not in self._saving and not self._arena.num_found([name]) for name in hashes]
        self._arena.touch([name for name, new in zip(hashes, is_new, strict=True) if not new])
        new = [block for block, new in zip(reversed(evicted), is_new, strict=True) if new]
        self._counts["known"] += len(evicted) - len(new)
        slots = self._arena.take(max(0, min(len(new), self._room(num_in_vain))))
        self._counts["dropped"] += len(new) - len(slots)
        new = new[: len(slots)]
        if not new:
            return None
        wait = self._mover.save([block_id for block_id, _ in new], slots)
        save = Save(slots, [name for _, name in new], wait)
        self._saving.update(save.hashes)
        self._saves.append(save)
        self._save_lane.post(lambda: self._finish(save))
        return save

    def _room(self, num_in_vain: int) -> int:
        """How many blocks may be saved now; none if it is negative."""
        num_writing = sum(len(save.slots) for save in self._saves)
        room = max(1, self._arena.num_blocks // _MAX_WRITING_SHARE) - num_writing
        was_found_lately = num_in_vain * _WAITED_SHARE < self._arena.num_blocks
        if self._num_staged is None or self._num_hits == 0 or was_found_lately:
            return room
        num_staged = sum(len(save.slots) for save in self._saves if not save.is_over)
        return min(room, self._num_staged - num_staged)

    def _count_evicted(self, num_blocks: int) -> int:
        """Counts more evicted blocks; returns how many were evicted since a worker found one."""
        if (num_hits := self._arena.num_hits) != self._num_hits:
            self._num_hits, self._num_in_vain = num_hits, 0
        num_before = self._num_in_vain
        self._num_in_vain += num_blocks
        return num_before

    def _is_in_vain(self, num_in_vain: int) -> bool:
        """Whether not to store more blocks after so many, because nothing is ever found."""
        num_blocks = self._arena.num_blocks
        if self._disk is not None:
            num_blocks += self._disk.max_blocks
        num_rounds, place = divmod(num_in_vain, num_blocks)
        if num_rounds > 0:
            return place * _TRIED_SHARE >= num_blocks
        run = place * _NUM_FIRST_RUNS * _FIRST_SHARE // num_blocks
        return self._num_hits == 0 and run % _FIRST_SHARE > 0

    def _finish(self, save: Save) -> None:
        try:
            save.digests = save.wait()
        except Exception:
            logger.exception("the host tier is switched off: a block could not be saved")
            self._is_off = True
        finally:
            save.is_over = True
            self._wake()

    def settle(self) -> None:
        """Publishes what has been saved, and removes what was found to be wrong."""
        while self._saves and self._saves[0].is_over and self._publish(self._saves[0]):
            self._saving.difference_update(self._saves.popleft().hashes)
        if any(load.has_ended for load in self._loads):
            ended = [load for load in self._loads if load.has_ended]
            self._loads = [load for load in self._loads if load not in ended]
            for load in ended:
                self._end(load)

    def _publish(self, save: Save) -> bool:
        """False if another process is in the way."""
        if save.digests is None:
            self._arena.give_back(save.slots)
            self._counts["dropped"] += len(save.slots)
            return True
        num_new = self._arena.publish(save.slots, save.hashes, save.digests)
        if num_new is not None and not save.is_from_disk:
            self._counts["stored"] += num_new
            self._counts["known"] += len(save.slots) - num_new  # another worker was sooner
            if self._disk is not None:
                self._disk.write_behind([b for h in save.hashes for b in self._arena.find([h])])
        return num_new is not None

    # ---- into the device ------------------------------------------------------------------------

    def look(self, hashes: Sequence[bytes]) -> list[HostBlock | DiskBlock]:
        """The blocks of the longest stored prefix of a chain of hashes; changes nothing."""
        if self._is_off:
            return []
        found: list[HostBlock | DiskBlock] = [*self._arena.find(hashes)]
        if self._disk is None:
            return found
        for block_hash in hashes[len(found) :]:
            block = next(iter(self._arena.find([block_hash])), None) or self._disk.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, hashes: Sequence[bytes]) -> list[HostBlock | DiskBlock]:
        """`look`; counts as a use of the blocks."""
        found = self.look(hashes)
        if found:
            self._arena.touch([block.block_hash for block in found])
            self.note_hit()
        return found

    def note_hit(self) -> None:
        """Storing is worth while: all that is evicted next is stored."""
        self._arena.note_hit()

    def levels(self) -> list[StoredLevel]:
        """What others may know of where blocks are; none if nothing can be loaded. Any thread."""
        if self._is_off:
            return []
        block_s = self._load_time.predicted_s
        host = StoredLevel(self._arena.place, self._published, block_s, _LOAD_FLOOR_S)
        if self._disk is None:
            return [host]
        block_s += self._disk.read_time.predicted_s
        return [host, StoredLevel(self._disk.place, self._disk, block_s, _LOAD_FLOOR_S)]

    @staticmethod
    def num_on_disk(blocks: Sequence[HostBlock | DiskBlock]) -> int:
        """How many of found blocks would be read from files."""
        return sum(isinstance(block, DiskBlock) for block in blocks)

    def load_seconds(self, blocks: Sequence[HostBlock | DiskBlock]) -> float:
        """Predicted time until these blocks would be loaded, in turns with those under way."""
        num_blocks = len(blocks)
        num_moved = num_blocks + sum(min(num_blocks, load.num_left) for load in self._loads)
        host_s = _LOAD_FLOOR_S + self._load_time.predicted_s * num_moved
        num_on_disk = self.num_on_disk(blocks)
        if self._disk is None or num_on_disk == 0:
            return host_s
        return host_s + self._disk.read_seconds(num_on_disk)

    def load(self, blocks: Sequence[HostBlock | DiskBlock], block_ids: Sequence[int]) -> HostLoad:
        """Begins to copy found blocks into blocks of the device that the caller holds."""
        load = HostLoad(*self._with_room(blocks, block_ids))
        copy = self._mover.begin_load()
        self._loads.append(load)
        if self._disk is not None:
            self._disk.num_reading += len(load.files)
        self._load_lane.post(lambda: self._run(load, copy, 0))
        return load

    def _with_room(
        self, blocks: Sequence[HostBlock | DiskBlock], block_ids: Sequence[int]
    ) -> tuple[list[HostBlock], Sequence[int], dict[int, DiskBlock]]:
        """Takes blocks of the arena for those on disk; what finds none is gone by then."""
        files = {i: block for i, block in enumerate(blocks) if isinstance(block, DiskBlock)}
        slots = iter(self._arena.take(len(files)))
        room = []
        for block in blocks:
            if isinstance(block, DiskBlock):
                slot = next(slots, None)
                block = (
                    HostBlock(0, _NO_WORD, block.block_hash, block.digest)
                    if slot is None
                    else self._arena.taken(slot, block.block_hash, block.digest)
                )
            room.append(block)
        return room, block_ids, files

    def _run(self, load: HostLoad, copy: Copy, first: int) -> None:
        """On the loading thread: the next piece of a load, read from a file first if it is in one.

        The piece after it comes when other loads have had theirs: who waits for a load gives up
        unless it gets on, so none waits for the end of another.
        """
        try:
            if load.may_move():
                end = self._end_of_next(load, first)
                if self._disk is not None and first in load.files and load.num_read <= first:
                    load.begin_reading()
                    self._disk.post(partial(self._read, load, copy, first, end))
                    return
                self._run_piece(load, copy, first, end)
                if end < len(load.blocks) and load.may_move():
                    self._load_lane.post(lambda: self._run(load, copy, end))
                    self._wake()
                    return
        except Exception:
            logger.exception("the host tier is switched off: a block could not be loaded")
            self._fail(load)
        load.has_ended = True
        self._wake()

    def _end_of_next(self, load: HostLoad, first: int) -> int:
        """Of the piece that begins with block `first`; beside other loads it is a short one."""
        num_blocks, is_alone = len(load.blocks), len(self._loads) == 1
        size = piece_size(first if is_alone else 0, num_blocks, self._arena.block_bytes)
        return _end_of_piece(load, first, min(first + size, num_blocks))

    def _read(self, load: HostLoad, copy: Copy, first: int, end: int) -> None:
        """On the disk's reading thread: the blocks of a piece, into the arena."""
        assert self._disk is not None, "a block is on disk"
        try:
            for i in range(first, end):
                if load.is_cancelled:
                    break
                block = load.blocks[i]
                is_ours = self._arena.is_unchanged(block)
                if not (is_ours and self._disk.read(load.files[i], self._arena.blocks[block.slot])):
                    if i == first:  # else what was read is loaded first
                        load.problem = "gone"
                    break
                load.num_read = i + 1
        except Exception:
            logger.exception("the host tier is switched off: a block could not be read")
            self._fail(load)
        self._load_lane.post(lambda: self._run(load, copy, first))

    def _fail(self, load: HostLoad) -> None:
        load.problem = "failed"
        self._is_off = True

    def _run_piece(
        self,
        load: HostLoad,
        copy: Copy,
        first: int,
        end: int,
    ) -> None:
        blocks, block_ids = load.blocks[first:end], load.block_ids[first:end]
        began_s = self._clock.now_s()
        digests = copy([block.slot for block in blocks], block_ids)
        self._load_time.learn(self._clock.now_s() - began_s, len(blocks))
        for block, digest in zip(blocks, digests, strict=True):
            if not self._arena.is_unchanged(block):
                load.problem = "gone"
                return
            if digest != block.digest:
                load.problem = "corrupt"
                return
            load.num_landed += 1

    def _end(self, load: HostLoad) -> None:
        self._counts["loaded"] += load.num_landed
        wrong = load.files.get(load.num_landed)
        if load.problem == "gone":
            self._counts["gone"] += 1
        elif load.problem == "corrupt":
            self._counts["corrupt"] += 1
            logger.error("%s: a block is not what was stored; it is dropped", self._arena.name)
            if wrong is None:
                self._arena.drop(load.blocks[load.num_landed])
            elif self._disk is not None:
                self._disk.forget(wrong)
        if self._disk is not None and load.files:
            self._disk.num_reading -= len(load.files)
            self._disk.num_loaded += sum(i < load.num_landed for i in load.files)
            self._keep_read(load)

    def _keep_read(self, load: HostLoad) -> None:
        """Publishes what was read from files and has landed; frees what was taken for the rest."""
        taken = [i for i in load.files if load.blocks[i].word != _NO_WORD]
        good = [load.blocks[i] for i in taken if i < load.num_landed]
        self._arena.give_back([load.blocks[i].slot for i in taken if i >= load.num_landed])
        if good:
            slots, hashes = [b.slot for b in good], [b.block_hash for b in good]
            save = Save(slots, hashes, list, is_from_disk=True)
            save.digests, save.is_over = [b.digest for b in good], True
            self._saves.append(save)

    # ---- observation and end --------------------------------------------------------------------

    def statistics(self) -> TierStatistics:
        counts = {f"num_{name}": number for name, number in self._counts.items()}
        return TierStatistics(
            **counts,
            disk=None if self._disk is None else self._disk.statistics(),
            block_bytes=self._arena.block_bytes,
            num_blocks=self._arena.num_blocks,
            num_ready=self._num_ready(),
        )

    def _num_ready(self) -> int:
        """Counted now and then: it takes time linear in the arena, and is asked at every step."""
        now_s = self._clock.now_s()
        if now_s - self._counted[0] >= _COUNT_EVERY_S:
            self._counted = now_s, self._arena.num_ready
        return self._counted[1]

    def check_conservation(self) -> None:
        """See `HostArena.check_conservation`; no other process may be changing the arena."""
        taken = [slot for save in self._saves for slot in save.slots]
        for load in self._loads:
            words = [load.blocks[i] for i in load.files]
            taken += [block.slot for block in words if block.word != _NO_WORD]
        self._arena.check_conservation(taken)

    def leave(self) -> None:
        """Leaves the arena just before the process ends; any thread."""
        self._is_off = True
        self._arena.leave()

    def close(self) -> None:
        """Leaves the arena; nothing may be called afterwards. Idempotent."""
        self._is_off = True
        for lane in (self._save_lane, self._load_lane):
            lane.close()
        if self._disk is not None:
            self._disk.close()
        self._arena.close()


def piece_size(num_landed: int, num_blocks: int, block_bytes: int) -> int:
    """Blocks of the next piece of a load of `num_blocks`: as many as have landed, within bounds.

    Each piece is waited for by itself, and then for the kernel that digests it, which on a GPU may
    wait for those of a step. So later pieces are larger than the first, which shows soon that the
    load gets on. A quarter lands in time if loading takes up to 0.7 of computing (host_loads.py).
    """
    largest = min(num_landed, -(-num_blocks // _PIECES_SHARE))
    return max(-(-_PIECE_BYTES // block_bytes), largest)


def _end_of_piece(load: HostLoad, first: int, end: int) -> int:
    """So that all of a piece is in the arena, or none."""
    is_there = first not in load.files or first < load.num_read
    for i in range(first, end):
        if (i not in load.files or i < load.num_read) != is_there:
            return i
    return end


def _nothing() -> None:
    """Nobody waits for progress: the owner looks by itself."""

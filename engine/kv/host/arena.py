"""The blocks of KV in one machine's shared memory, for all its workers: who owns each, and what
is in it.

A block is one piece of bytes over all layers, as on the device. Each has a word, which says all
about its state, and which is stored whole:

    word = sequence << 16 | owner << 8 | state         the sequence counts the word's changes

    state     owner      may be changed by                                      holding
    FREE      nobody     whoever refills its pool: the reserve                  SHARED
    FREE      worker w   w (takes it), others (steal half of w's)               w's pool lock
    WRITING   worker w   w alone, which copies a block into it                  nothing
    READY     nobody     whoever evicts it, or found it to be wrong             SHARED

So each block is in one place at any time, and a process that dies between two stores leaves all of
them somewhere. What a dead worker had free or half-written goes back to the reserve; what it has
published stays. **Publication**: bytes, name and check are there before the word says READY, and
the index finds the block after that. A **reader** takes no lock. It notes the word, copies, and
looks at the word again: if that has changed, the bytes are not what it looked for. Whether they
are what was stored, the check says, which binds them to their name.

A worker takes blocks from its own pool. An empty pool refills from the reserve; else it steals
half of another worker's, if that has more than a few; else what was used longest ago is evicted.
The index is a table of buckets of eight places, by hash. A place is a hint: it counts only if the
block it names is READY under that hash. So nothing in it can be torn, and what overflows a bucket
is evicted.

One thread of a process uses an arena; `is_unchanged` may be called by any. Knows no tensors.
"""

import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.kv.hashes import HASH_BYTES
from engine.kv.host.arena_blocks import ArenaOffer, Rows, blocks_in, touch_pages
from engine.kv.host.shared_file import KEY, MAX_MEMBERS, SHARED, BusyError, SharedFile, pool_byte

FREE, WRITING, READY = 0, 1, 2
NOBODY = 0xFF
REFILL_BLOCKS = 64  # taken at a time from the reserve, and at least by eviction
MIN_POOL_BLOCKS = 8  # a pool of so many is not stolen from

_MAGIC = 0x4C4150534B563101  # its last byte is the version
_HEADER = struct.Struct("<QQQ16s")  # magic, blocks, bytes of each, what else must be equal
_HEADER_BYTES = 4096
_HITS = 2048  # offset of a counter in the header's page
_ALIGNMENT = 2 * 2**20  # of the blocks: pages of that size, where the kernel has them
_WAYS = 8  # places of a bucket
_PLACES_PER_BLOCK = 4
_EVICTED_SHARE = 1024  # of a large arena, evicted at a time: finding the oldest reads all of it
_INDEX_WAIT_S = 2e-3  # on a thread that steps
_JOIN_WAIT_S = 5.0

Words = NDArray[np.uint64]
Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block that was found: it is what it was as long as its word is `word`."""

    slot: int
    word: int
    block_hash: bytes
    digest: int  # int64, as `KvStore.digest`


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaTerms:
    """Where all blocks are; `num_blocks` is their sum."""

    num_blocks: int
    num_reserve: int
    num_pool: dict[int, int]  # worker -> free blocks
    num_writing: dict[int, int]  # worker -> blocks that it copies to
    num_ready: int

    @property
    def total(self) -> int:
        pools, writing = sum(self.num_pool.values()), sum(self.num_writing.values())
        return self.num_reserve + pools + writing + self.num_ready


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    """Where things are in the file, in bytes from its start."""

    num_blocks: int
    num_buckets: int
    words: int  # uint64 [num_blocks]
    used: int  # uint64 [num_blocks]: when each was stored or found last, in ns
    checks: int  # uint64 [num_blocks]
    hashes: int  # [num_blocks, HASH_BYTES]
    table: int  # uint32 [num_buckets, _WAYS]: a block's number + 1; 0 = empty
    blocks: int
    size: int

    @classmethod
    def of(cls, num_bytes: int, block_bytes: int) -> "_Geometry":
        """As many blocks as fit; 0 if none does."""
        per_block = 3 * 8 + HASH_BYTES + 4 * _PLACES_PER_BLOCK + block_bytes
        spare = _HEADER_BYTES + 4 * _WAYS + _ALIGNMENT
        num_blocks = max(0, (num_bytes - spare) // per_block)
        num_buckets = -(-num_blocks * _PLACES_PER_BLOCK // _WAYS)
        words = _HEADER_BYTES
        table = words + num_blocks * (3 * 8 + HASH_BYTES)
        end = table + 4 * _WAYS * num_buckets
        blocks = -(-end // _ALIGNMENT) * _ALIGNMENT
        return cls(
            num_blocks=num_blocks,
            num_buckets=num_buckets,
            words=words,
            used=words + 8 * num_blocks,
            checks=words + 16 * num_blocks,
            hashes=words + 24 * num_blocks,
            table=table,
            blocks=blocks,
            size=blocks + num_blocks * block_bytes,
        )


class HostArena:
    """One worker's end of the arena."""

    def __init__(self, name: str, *, num_bytes: int, block_bytes: int, fingerprint: bytes) -> None:
        """Creates or joins the arena `name` of at most `num_bytes`, all of them taken now.

        fingerprint: of what must be equal for all who share it; 16 bytes. Raises ConfigError if
        that differs, there is no such room, or it holds less than one block.
        """
        self._geometry = place = _Geometry.of(num_bytes, block_bytes)
        if place.num_blocks == 0:
            raise ConfigError(f"{KEY}: {num_bytes} bytes hold no block of {block_bytes}; raise it")
        self.num_blocks = place.num_blocks
        self.block_bytes = block_bytes
        header = _HEADER.pack(_MAGIC, place.num_blocks, block_bytes, fingerprint)
        self._file = SharedFile(name, place.size, lambda memory: _initialise(memory, place, header))
        self.member = self._file.member
        self._is_closed = False
        self._taken: dict[int, int] = {}  # block -> its word: another one, and it is not ours
        self._own: list[int] = []  # were in this worker's pool when it was looked through
        self._memory = memory = memoryview(self._file.map)
        self._words = memory[place.words : place.used].cast("Q")
        self._used = memory[place.used : place.checks].cast("Q")
        self._checks = memory[place.checks : place.hashes].cast("Q")
        self._hashes = memory[place.hashes : place.table]
        self._table = memory[place.table : place.table + 4 * _WAYS * place.num_buckets].cast("I")
        self._hits = memory[_HITS : _HITS + 8].cast("Q")
        self._all_words: Words = np.frombuffer(self._words, dtype=np.uint64)
        self._all_used: Words = np.frombuffer(self._used, dtype=np.uint64)
        self._clear_up()
        touch_pages(memory)

    def _clear_up(self) -> None:
        """Returns what an earlier process had that had this number. Raises ConfigError."""
        try:
            self._give_back(self.member, _JOIN_WAIT_S)
        except BusyError as error:
            self._file.close()
            raise ConfigError(
                f"{KEY}: a process holds {error} and does not get on; stop it"
            ) from error

    @property
    def name(self) -> str:
        return self._file.path.name

    @property
    def place(self) -> str:
        """Equal for those who share this arena, whatever their machine, and for nobody else."""
        return self._file.place

    @property
    def blocks(self) -> Rows:
        """[num_blocks, block_bytes] all of them; write only to those that `take` returned."""
        return blocks_in(self._memory, self.offer)

    @property
    def offer(self) -> ArenaOffer:
        """Of this worker's memory, to its other ranks; good until it is closed."""
        return ArenaOffer(
            pid=os.getpid(),
            fd=self._file.fd,
            blocks_at=self._geometry.blocks,
            num_blocks=self.num_blocks,
            block_bytes=self.block_bytes,
        )

    # ---- reading ---------------------------------------------------------------------------------

    def find(self, hashes: Sequence[bytes]) -> list[HostBlock]:
        """The blocks of the longest stored prefix of a chain of hashes; changes nothing."""
        found = []
        for block_hash in hashes:
            block = self._block_of(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_found(self, hashes: Sequence[bytes]) -> int:
        """`len(find(hashes))`, at less cost."""
        for number, block_hash in enumerate(hashes):
            if self._slot_of(block_hash) is None:
                return number
        return len(hashes)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Counts as a use of the blocks of a chain: the first is evicted last."""
        now_ns = time.monotonic_ns() + len(hashes)
        for number, block_hash in enumerate(hashes):
            slot = self._slot_of(block_hash)
            if slot is not None:
                self._used[slot] = now_ns - number

    @property
    def num_hits(self) -> int:
        """Changes when a worker has found blocks that it wants; two counts may fall together."""
        return self._hits[0]

    def note_hit(self) -> None:
        self._hits[0] = (self._hits[0] + 1) % 2**64

    def is_unchanged(self, block: HostBlock) -> bool:
        """Whether a block has been all the time what it was when it was found. Any thread."""
        return self._words[block.slot] == block.word

    def _block_of(self, block_hash: bytes) -> HostBlock | None:
        slot = self._slot_of(block_hash)
        if slot is None:
            return None
        word = self._words[slot]
        check = self._checks[slot]
        if word & 0xFF != READY or self._hash_of(slot) != block_hash:
            return None
        return HostBlock(slot, word, block_hash, _signed(check ^ _name_of(block_hash)))

    def _slot_of(self, block_hash: bytes) -> int | None:
        first = self._bucket_of(block_hash)
        for place in self._table[first : first + _WAYS]:
            if 0 < place <= self.num_blocks:
                slot = place - 1
                if self._hash_of(slot) == block_hash and self._words[slot] & 0xFF == READY:
                    return slot
        return None

    # ---- writing ---------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> list[int]:
        """Takes blocks to write to; fewer, perhaps none, if there are not so many now.

        Evicts if no block is free. They belong to this worker until `publish` or `give_back`.
        """
        taken: list[int] = []
        while len(taken) < num_blocks:
            if not self._own and not self._refill(num_blocks - len(taken)):
                break
            with self._locked(pool_byte(self.member)) as is_held:
                if not is_held:
                    break
                taken += self._take_own(num_blocks - len(taken))
        return taken

    def _take_own(self, num_blocks: int) -> list[int]:
        """Of what was in the pool, unless it has been stolen; the pool's lock is held."""
        free = np.array(self._own[:num_blocks], dtype=np.int64)
        del self._own[:num_blocks]
        free = free[self._is(free, FREE, self.member)]
        self._move(free, WRITING, self.member)
        taken: list[int] = free.tolist()
        self._taken.update((slot, self._words[slot]) for slot in taken)
        return taken

    def taken(self, slot: int, block_hash: bytes, digest: int) -> HostBlock:
        """A block that `take` returned, under a name: unchanged while it is this worker's."""
        return HostBlock(slot, self._taken[slot], block_hash, digest)

    def publish(
        self, slots: Sequence[int], hashes: Sequence[bytes], digests: Sequence[int]
    ) -> int | None:
        """Makes written blocks known by their hashes, of which the first is evicted last.

        A block whose hash another worker has published meanwhile is given back. One that is
        another's, because this worker has left, is not touched. Returns how many were new; None,
        with nothing done, if another process is in the way.
        """
        with self._locked(SHARED) as is_held:
            if not is_held:
                return None
            now_ns, num_new = time.monotonic_ns() + len(slots), 0
            for number, (slot, name, digest) in enumerate(zip(slots, hashes, digests, strict=True)):
                if not self._let_go(slot):
                    continue
                if self._slot_of(name) is not None:
                    self._move_one(slot, FREE, self.member)
                    continue
                self._hashes[slot * HASH_BYTES : (slot + 1) * HASH_BYTES] = name
                self._checks[slot] = _unsigned(digest) ^ _name_of(name)
                self._used[slot] = now_ns - number
                self._enter(slot, name)
                self._move_one(slot, READY, NOBODY)
                num_new += 1
        return num_new

    def give_back(self, slots: Sequence[int]) -> None:
        """Frees blocks that were taken and will not be published."""
        for slot in slots:
            if self._let_go(slot):
                self._move_one(slot, FREE, self.member)

    def _let_go(self, slot: int) -> bool:
        """Whether a block that was taken is still this worker's; asked once for each."""
        return self._taken.pop(slot) == self._words[slot]

    def drop(self, block: HostBlock) -> bool:
        """Removes a block whose content is wrong; False if it is gone, or not to be had now."""
        with self._locked(SHARED) as is_held:
            if not is_held or not self.is_unchanged(block):
                return False
            self._evict(np.array([block.slot]))
        return True

    # ---- pools -----------------------------------------------------------------------------------

    def _refill(self, num_wanted: int) -> bool:
        """Finds free blocks for this worker's pool; False if there are none to be had now."""
        # One look at all words: where most blocks are stored, few are left to be told apart.
        others = np.flatnonzero((self._all_words & 0xFF) != READY)
        self._own = others[self._is(others, FREE, self.member)].tolist()
        if self._own:
            return True
        is_there = self._take_reserve(others)
        if is_there is None:
            return False  # another process is in the way, and would be in what follows
        if is_there or self._steal(others) or self._bury_dead(others):
            return True
        return self._evict_oldest(num_wanted)

    def _take_reserve(self, others: Slots) -> bool | None:
        """others: blocks that may be free; None = another process is in the way."""
        if not self._is(others, FREE, NOBODY).any():
            return False
        with self._locked(SHARED) as is_held:
            if not is_held:
                return None
            free = others[self._is(others, FREE, NOBODY)][:REFILL_BLOCKS]
            self._move(free, FREE, self.member)
        self._own = free.tolist()
        return len(free) > 0

    def _steal(self, others: Slots) -> bool:
        """Takes half of the next pool that has more than a few."""
        words = self._all_words[others]
        owners = (words[(words & 0xFF) == FREE] >> 8) & 0xFF
        sizes = np.bincount(owners.astype(np.int64), minlength=MAX_MEMBERS)
        for step in range(1, MAX_MEMBERS):
            victim = (self.member + step) % MAX_MEMBERS
            if sizes[victim] <= MIN_POOL_BLOCKS:
                continue
            with self._locked(pool_byte(victim)) as is_held:
                if not is_held:
                    continue
                theirs = others[self._is(others, FREE, victim)]
                if len(theirs) > MIN_POOL_BLOCKS:
                    stolen = theirs[: len(theirs) // 2]
                    self._move(stolen, FREE, self.member)
                    self._own = stolen.tolist()
                    return True
        return False

    def _bury_dead(self, others: Slots) -> bool:
        """Returns what dead workers had to the reserve, and takes of it."""
        for owner in np.unique((self._all_words[others] >> 8) & 0xFF).tolist():
            if owner < MAX_MEMBERS:
                with self._file.dead(owner) as is_dead, suppress(BusyError):
                    if is_dead:
                        self._give_back(owner, _INDEX_WAIT_S)
        return bool(self._take_reserve(others))

    def _give_back(self, member: int, wait_s: float) -> None:
        """Returns to the reserve what a member had that is gone, or is this one."""
        left = np.concatenate([self._slots(FREE, member), self._slots(WRITING, member)])
        if len(left) > 0:
            with self._file.locked(pool_byte(member), wait_s), self._file.locked(SHARED, wait_s):
                left = np.concatenate([self._slots(FREE, member), self._slots(WRITING, member)])
                self._move(left, FREE, NOBODY)

    def _evict_oldest(self, num_wanted: int) -> bool:
        with self._locked(SHARED) as is_held:
            if not is_held:
                return False
            ready = np.flatnonzero((self._all_words & 0xFF) == READY)
            most = max(REFILL_BLOCKS, num_wanted, self.num_blocks // _EVICTED_SHARE)
            num_blocks = min(len(ready), most, 1 + self.num_blocks // 16)
            if num_blocks == 0:
                return False
            oldest = ready[np.argpartition(self._all_used[ready], num_blocks - 1)[:num_blocks]]
            oldest.sort()  # neighbours are copied together
            self._evict(oldest)
        self._own = oldest.tolist()
        return True

    # ---- the index -------------------------------------------------------------------------------

    def _bucket_of(self, block_hash: bytes) -> int:
        """Index of a bucket's first place in the table."""
        return int.from_bytes(block_hash[8:], "little") % self._geometry.num_buckets * _WAYS

    def _enter(self, slot: int, block_hash: bytes) -> None:
        """Points to a block; SHARED is held. In a full bucket, what was used longest ago goes."""
        first = self._bucket_of(block_hash)
        ways = range(first, first + _WAYS)
        place = next((p for p in ways if not self._points(p, first)), None)
        if place is None:
            place = min(ways, key=lambda p: self._used[self._table[p] - 1])
            self._evict(np.array([self._table[place] - 1]))
        self._table[place] = slot + 1

    def _points(self, place: int, first: int) -> bool:
        """Whether a place of the bucket that begins at `first` points to a block of it."""
        slot = self._table[place] - 1
        if not 0 <= slot < self.num_blocks or self._words[slot] & 0xFF != READY:
            return False
        return self._bucket_of(self._hash_of(slot)) == first

    def _evict(self, slots: Slots) -> None:
        """Frees READY blocks into this worker's pool; SHARED is held."""
        self._move(slots, FREE, self.member)
        for slot in slots.tolist():
            first = self._bucket_of(self._hash_of(slot))
            for place in range(first, first + _WAYS):
                if self._table[place] == slot + 1:
                    self._table[place] = 0

    # ---- words -----------------------------------------------------------------------------------

    def _slots(self, state: int, owner: int) -> Slots:
        return np.flatnonzero((self._all_words & 0xFFFF) == (owner << 8 | state))

    def _is(self, slots: Slots, state: int, owner: int) -> NDArray[np.bool_]:
        is_so: NDArray[np.bool_] = (self._all_words[slots] & 0xFFFF) == (owner << 8 | state)
        return is_so

    def _move(self, slots: Slots, state: int, owner: int) -> None:
        sequence = (self._all_words[slots] >> 16) + 1
        self._all_words[slots] = sequence << 16 | (owner << 8 | state)

    def _move_one(self, slot: int, state: int, owner: int) -> None:
        self._words[slot] = ((self._words[slot] >> 16) + 1) << 16 | owner << 8 | state

    def _hash_of(self, slot: int) -> bytes:
        return bytes(self._hashes[slot * HASH_BYTES : (slot + 1) * HASH_BYTES])

    @contextmanager
    def _locked(self, byte: int) -> Iterator[bool]:
        """Whether the lock is held; a step must not wait long for another process."""
        try:
            with self._file.locked(byte, _INDEX_WAIT_S):
                yield True
        except BusyError:
            yield False

    # ---- observation -----------------------------------------------------------------------------

    def words(self) -> Words:
        """A copy of all words: where one differs from an earlier copy, something has changed."""
        return self._all_words.copy()

    def name_in(self, slot: int) -> tuple[bytes | None, int]:
        """What block `slot` stores, None = nothing that can be found, and its word. Any thread."""
        word = self._words[slot]
        name = self._hash_of(slot)
        if word & 0xFF != READY or self._words[slot] != word:
            return None, word
        return name, word

    def hashes(self) -> list[bytes]:
        """Names of all blocks that are stored."""
        ready = np.flatnonzero((self._all_words & 0xFF) == READY)
        return [self._hash_of(slot) for slot in ready.tolist()]

    @property
    def num_ready(self) -> int:
        """Blocks that are stored."""
        return len(self._slots(READY, NOBODY))

    def terms(self) -> ArenaTerms:
        """Counts all blocks; exact while nobody changes them."""
        members = range(MAX_MEMBERS)
        pools = {m: len(self._slots(FREE, m)) for m in members}
        writing = {m: len(self._slots(WRITING, m)) for m in members}
        return ArenaTerms(
            num_blocks=self.num_blocks,
            num_reserve=len(self._slots(FREE, NOBODY)),
            num_pool={m: n for m, n in pools.items() if n},
            num_writing={m: n for m, n in writing.items() if n},
            num_ready=self.num_ready,
        )

    def check_conservation(self, taken: Sequence[int]) -> None:
        """Checks that reserve + pools + being written + stored = all, and that `taken` are ours.

        taken: what this worker has taken and neither published nor given back. Raises
        AssertionError with all terms. No other process may be changing the arena.
        """
        terms = self.terms()
        own = self._slots(WRITING, self.member).tolist()
        problems = [] if terms.total == self.num_blocks else [f"{terms.total} blocks in all"]
        if sorted(own) != sorted(taken):
            problems.append(f"blocks {own} are marked as this worker's, it writes {sorted(taken)}")
        for place, entry in enumerate(self._table):
            slot = entry - 1
            first = place // _WAYS * _WAYS
            if entry and self._words[slot] & 0xFF == READY and not self._points(place, first):
                problems.append(f"place {place} points to block {slot}, of another bucket")
        assert not problems, f"host blocks: {terms}; {'; '.join(problems)}"

    def close(self) -> None:
        """Returns what this worker had to the reserve and leaves; the last one removes the arena.

        Idempotent.
        """
        if not self._is_closed:
            self._is_closed = True
            with suppress(BusyError):
                self._give_back(self.member, _JOIN_WAIT_S)
            self._file.close()

    def leave(self) -> None:
        """Is dead for the others from now on, before the process ends; any thread.

        What it still writes, to a block that is another's by then, no check will pass, and
        `publish` leaves that block alone.
        """
        with suppress(BusyError):
            self._file.leave()


def _initialise(memory: memoryview, place: _Geometry, header: bytes) -> bool:
    """Makes a new arena, all of it reserve; False if the memory holds something else."""
    found = bytes(memory[: len(header)])
    if found == header:
        return True
    if any(found):
        return False
    words = np.frombuffer(memory[place.words : place.used], dtype=np.uint64)
    words[:] = NOBODY << 8 | FREE
    memory[: len(header)] = header  # last: without it, the next one makes it anew
    return True


def _name_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "little")


def _unsigned(digest: int) -> int:
    return digest & (2**64 - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value

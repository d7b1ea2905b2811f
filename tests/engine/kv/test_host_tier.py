"""Blocks from a device's store into the arena and back: what arrives, and what never does."""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from threading import Event

import pytest
import torch

from engine.clock import ManualClock
from engine.cost_model import PRIOR
from engine.kv.host import tier as tier_module
from engine.kv.host.arena import HostArena, HostBlock
from engine.kv.host.block_time import BlockTime
from engine.kv.host.lane import Lane
from engine.kv.host.movers import BlockMover, build_mover, runs
from engine.kv.host.shared_file import FOLDER, PREFIX
from engine.kv.host.tier import HostLoad, HostTier, piece_size
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from tests.engine.kv.arena_process import name_of
from tests.harness.seeds import fresh_random

LAYOUT = KvLayout.with_heads(
    num_layers=2, block_size=3, num_kv_heads=1, head_dim=5, dtype="float32"
)
NUM_BLOCKS = 40


class World:
    """One worker's store, arena and tier."""

    def __init__(self, name: str, num_arena_blocks: int) -> None:
        self.store = KvStore(LAYOUT, num_blocks=NUM_BLOCKS, device=torch.device("cpu"))
        self.store.tensor.copy_(torch.randn(self.store.tensor.shape))
        self.arena = HostArena(
            name,
            num_bytes=num_arena_blocks * (LAYOUT.block_bytes + 56) + 2**21 + 4128,
            block_bytes=LAYOUT.block_bytes,
            fingerprint=bytes(16),
        )
        assert self.arena.num_blocks == num_arena_blocks
        self.arena.note_hit()  # else little is stored
        self.mover = StoppedMover(build_mover(self.store, self.arena.blocks))
        self.clock = ManualClock()
        self.tier = HostTier(self.arena, self.mover, clock=self.clock)

    def save(self, block_ids: Sequence[int]) -> None:
        self.tier.save([(block_id, name_of(block_id)) for block_id in block_ids])

    def settle(self) -> None:
        """Until nothing is under way."""
        self._drain(self.tier._save_lane)
        self._drain(self.tier._load_lane)
        while not all(load.has_ended for load in self.tier._loads):  # its next piece is posted
            self._drain(self.tier._load_lane)
        self.tier.settle()
        assert not self.tier.is_active
        self.tier.check_conservation()

    @staticmethod
    def _drain(lane: Lane) -> None:
        """Waits for the jobs posted so far."""
        is_idle = Event()
        lane.post(is_idle.set)
        assert is_idle.wait(30)

    def load(self, numbers: Sequence[int], block_ids: Sequence[int]) -> HostLoad:
        blocks = self.tier.find([name_of(number) for number in numbers])
        assert len(blocks) == len(numbers)
        return self.tier.load(blocks, block_ids)


class StoppedMover:
    """A mover that does something else before each piece that it loads."""

    def __init__(self, mover: BlockMover) -> None:
        self._mover = mover
        self.before_piece: Callable[[], None] = lambda: None
        self.save = mover.save

    def begin_load(self) -> Callable[[Sequence[int], Sequence[int]], list[int]]:
        copy = self._mover.begin_load()

        def load(slots: Sequence[int], block_ids: Sequence[int]) -> list[int]:
            self.before_piece()
            return copy(slots, block_ids)

        return load


class NoMover:
    """Of a tier that is only asked."""

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Callable[[], list[int]]:
        raise AssertionError("a tier that is only asked moved blocks")

    def begin_load(self) -> Callable[[Sequence[int], Sequence[int]], list[int]]:
        raise AssertionError("a tier that is only asked moved blocks")


@pytest.fixture
def world() -> Iterator[World]:
    name = f"test-tier-{os.getpid()}-{random.randrange(2**32)}"
    world = World(name, 64)
    yield world
    world.tier.close()
    assert not (FOLDER / f"{PREFIX}{name}").exists()


def test_blocks_come_back_with_every_bit_and_their_digests(world: World) -> None:
    world.store.tensor[3, 0, 0, 0, 0, 0] = float("nan")
    before = world.store.tensor.clone()
    world.save([5, 3, 9])
    world.store.zero([5, 3, 9])  # as the next step may, at once
    assert world.arena.num_found([name_of(3)]) == 0, "it is not published yet"
    world.settle()
    load = world.load([3, 5, 9], [20, 9, 0])
    world.settle()
    assert (load.num_landed, load.is_over, load.problem) == (3, True, None)
    after = world.store.tensor[[20, 9, 0]].view(torch.uint8)
    assert torch.equal(after, before[[3, 5, 9]].view(torch.uint8))
    assert world.store.digests.of([20, 9, 0]) == world.store.digest([20, 9, 0])
    statistics = world.tier.statistics()
    assert (statistics.num_stored, statistics.num_loaded, statistics.num_dropped) == (3, 3, 0)


def test_what_is_stored_already_is_not_copied_again(world: World) -> None:
    world.save([1, 2])
    world.save([2, 3])  # the first is still under way
    assert world.arena.terms().num_writing == {world.arena.member: 3}
    world.settle()
    world.save([3])
    statistics = world.tier.statistics()
    assert (statistics.num_stored, statistics.num_known) == (3, 2)
    assert world.arena.drop(world.arena.find([name_of(2)])[0])
    world.save([2])  # what has left the arena is new
    world.settle()
    assert world.arena.num_found([name_of(2)]) == 1


@pytest.mark.parametrize("byte", [0, 1, LAYOUT.block_bytes // 2, LAYOUT.block_bytes - 1])
def test_a_flipped_bit_is_found_and_the_block_never_again(world: World, byte: int) -> None:
    world.save(range(10))
    world.settle()
    (found,) = world.arena.find([name_of(4)])
    world.arena.blocks[found.slot, byte] ^= 1 << random.randrange(8)
    load = world.load(range(10), range(20, 30))
    world.settle()
    assert (load.num_landed, load.problem) == (4, "corrupt")
    assert torch.equal(world.store.tensor[20:24], world.store.tensor[0:4])
    assert world.arena.num_found([name_of(4)]) == 0
    assert world.arena.num_found([name_of(5)]) == 1
    assert world.tier.statistics().num_corrupt == 1


@pytest.mark.parametrize("field", ["_checks", "_hashes"])
def test_a_flipped_bit_beside_the_bytes_is_found_too(world: World, field: str) -> None:
    world.save([7])
    world.settle()
    (found,) = world.arena.find([name_of(7)])
    if field == "_checks":
        world.arena._checks[found.slot] ^= 1 << random.randrange(64)
        load = world.load([7], [20])
        world.settle()
        assert (load.num_landed, load.problem) == (0, "corrupt")
    else:
        world.arena._hashes[found.slot * 16 + 3] ^= 1
        assert world.arena.num_found([name_of(7)]) == 0


def test_bytes_of_another_block_do_not_pass_for_this_one(world: World) -> None:
    """All of it is whole, and under the wrong name."""
    world.save([1, 2])
    world.settle()
    one, two = (world.arena.find([name_of(number)])[0].slot for number in (1, 2))
    world.arena.blocks[one] = world.arena.blocks[two]
    world.arena._checks[one] = world.arena._checks[two]
    load = world.load([1], [20])
    world.settle()
    assert load.problem == "corrupt"


def test_a_block_that_is_evicted_while_it_is_loaded_does_not_land(world: World) -> None:
    world.save(range(8))
    world.settle()
    found = world.arena.find([name_of(5)])
    world.mover.before_piece = lambda: world.arena.drop(found[0]) and None
    load = world.load(range(8), range(20, 28))
    world.settle()
    assert (load.num_landed, load.problem) == (5, "gone")
    assert world.tier.statistics().num_gone == 1


def test_a_cancelled_load_ends_and_a_failed_one_switches_the_tier_off(world: World) -> None:
    world.save(range(8))
    world.settle()
    load = world.load(range(8), range(20, 28))
    load.cancel()
    world.settle()
    assert load.is_over

    def fail() -> None:
        raise RuntimeError("the device is away")

    world.mover.before_piece = fail
    load = world.load(range(8), range(20, 28))
    world.settle()
    assert (load.num_landed, load.is_over, load.problem) == (0, True, "failed")
    assert world.tier.find([name_of(0)]) == []
    assert world.tier.levels() == [], "placement must not count on it"
    world.save([30])
    statistics = world.tier.statistics()
    assert (statistics.num_stored, statistics.num_dropped) == (8, 1)


def test_what_finds_no_room_is_dropped_the_beginning_of_a_sequence_last(world: World) -> None:
    taken = world.arena.take(60)
    world.save([9, 8, 7, 6, 5, 4, 3, 2, 1, 0])  # a sequence, evicted from its end
    world.arena.give_back(taken)
    world.settle()
    assert world.arena.num_found([name_of(number) for number in range(10)]) == 4
    assert world.tier.statistics().num_dropped == 6


@pytest.mark.parametrize("is_evicted_again", [False, True])
def test_what_is_found_or_evicted_again_stays_in_the_arena(
    world: World, *, is_evicted_again: bool
) -> None:
    for number in range(4):
        world.save(range(10 * number, 10 * number + 4))
        world.settle()
    world.arena.take(64 - 16)
    if is_evicted_again:
        world.save([0])
    else:
        assert world.tier.find([name_of(0)])
    world.arena.take(1)  # evicts a few
    assert world.arena.num_ready < 16
    assert world.arena.num_found([name_of(0)]) == 1


def test_a_worker_writes_to_a_quarter_of_the_arena_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_copied = Event()
    save = world.mover.save

    def save_late(block_ids: Sequence[int], slots: Sequence[int]) -> Callable[[], list[int]]:
        wait = save(block_ids, slots)
        return lambda: wait() if is_copied.wait(30) else []

    monkeypatch.setattr(world.mover, "save", save_late)
    world.save(range(12))
    world.save(range(12, 20))
    world.save([20])
    is_copied.set()
    world.settle()
    statistics = world.tier.statistics()
    assert (statistics.num_stored, statistics.num_dropped) == (64 // 4, 5)


@pytest.mark.parametrize("is_first", [True, False])
def test_who_cancels_around_the_begin_of_a_read_has_the_blocks_at_once(is_first: bool) -> None:
    load = HostLoad([], [])
    for act in (load.cancel, load.begin_reading) if is_first else (load.begin_reading, load.cancel):
        assert not load.is_over
        act()
    assert load.is_over
    assert not load.may_move(), "the device's blocks are others' by then"
    load.resume()
    assert not load.may_move()


def test_every_evicted_block_is_counted_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(range(4))
    slots = world.arena.take(1)  # another worker stores the same block meanwhile
    world.arena.publish(slots, [name_of(2)], [0])
    world.settle()
    counts = world.tier.statistics()
    assert (counts.num_stored, counts.num_known, counts.num_dropped) == (3, 1, 0)

    def fail() -> list[int]:
        raise RuntimeError("the device is away")

    monkeypatch.setattr(world.mover, "save", lambda block_ids, slots: fail)
    world.save(range(4, 9))
    world.settle()
    world.save(range(9, 11))
    counts = world.tier.statistics()
    assert (counts.num_stored, counts.num_known, counts.num_dropped) == (3, 1, 7)


def _evict(world: World, numbers: range, group: int = 4) -> int:
    """In groups; returns how many were stored."""
    before = world.tier.statistics().num_stored
    for first in numbers[::group]:
        world.tier.save([(i % NUM_BLOCKS, name_of(i)) for i in range(first, first + group)])
        world.settle()
    return world.tier.statistics().num_stored - before


def test_where_nothing_is_ever_found_a_sixteenth_is_stored(world: World) -> None:
    assert _evict(world, range(64)) == 64, "the arena holds as many"
    assert _evict(world, range(100, 100 + 16 * 64)) == 16 * 4
    world.tier.find([name_of(10**6)])
    assert _evict(world, range(2000, 2000 + 64)) == 4, "it was not there"
    assert world.tier.find(world.arena.hashes()[:1])
    assert _evict(world, range(3000, 3064)) == 64
    assert world.tier.statistics().num_skipped == 17 * 60


def test_a_quarter_is_stored_until_something_was_ever_found(world: World) -> None:
    world.arena._hits[0] = 0
    world.tier._num_hits = 0
    assert _evict(world, range(64), group=1) == 16
    assert _evict(world, range(100, 164), group=1) == 4, "and a sixteenth after that"
    assert world.tier.find(world.arena.hashes()[:1])
    assert _evict(world, range(200, 264), group=1) == 64


def test_what_another_worker_finds_counts_as_found(world: World) -> None:
    other = HostArena(
        world.arena.name.removeprefix(PREFIX),
        num_bytes=64 * (LAYOUT.block_bytes + 56) + 2**21 + 4128,
        block_bytes=LAYOUT.block_bytes,
        fingerprint=bytes(16),
    )
    world.save(range(40))
    world.settle()
    world.save(range(20))
    other.note_hit()
    world.tier.save([(i, name_of(100 + i)) for i in range(20)])
    world.settle()
    other.close()
    assert world.tier.statistics().num_skipped == 0


@pytest.mark.parametrize("num_bytes", [2**14, 2359296], ids=["small", "of 8 billion parameters"])
def test_a_tier_that_has_loaded_nothing_yet_is_tried(num_bytes: int) -> None:
    """Else it would never learn how fast it is."""
    name = f"test-tier-{os.getpid()}-{random.randrange(2**32)}"
    arena = HostArena(name, num_bytes=2**24, block_bytes=num_bytes, fingerprint=bytes(16))
    tier = HostTier(arena, NoMover())
    num_blocks = 64
    blocks = [HostBlock(0, 0, name_of(number), 0) for number in range(num_blocks)]
    assert tier.load_seconds(blocks) < 0.5 * PRIOR.seconds(16 * num_blocks, 0)
    tier.close()


def test_a_load_that_was_held_up_is_not_the_last(world: World) -> None:
    world.save([1])
    world.settle()
    blocks = world.arena.find([name_of(1)])
    at_first_s = world.tier.load_seconds(blocks)
    world.mover.before_piece = lambda: world.clock.advance(2.0)
    world.load([1], [20])
    world.settle()
    assert at_first_s < world.tier.load_seconds(blocks) < 2 * at_first_s, "it was one alone"
    for _ in range(400):
        world.load([1], [20])
        world.settle()
    assert world.tier.load_seconds(blocks) > 1.0, "all are slow"
    world.clock.advance(60.0)
    assert world.tier.load_seconds(blocks) == pytest.approx(at_first_s)


def test_loads_take_turns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a load gives up unless it gets on: no load waits for the end of another."""
    monkeypatch.setattr(tier_module, "_PIECE_BYTES", LAYOUT.block_bytes)
    for first in (0, 10):
        world.save(range(first, first + 10))
        world.settle()
    are_both_begun, landed = Event(), list[tuple[int, int]]()

    def note() -> None:
        assert are_both_begun.wait(30)
        landed.append((long.num_landed, short.num_landed))

    world.mover.before_piece = note
    blocks = world.tier.find([name_of(number) for number in range(20)])
    eight_s = world.tier.load_seconds(blocks[:8])
    long = world.tier.load(blocks[:16], range(20, 36))
    assert world.tier.load_seconds(blocks[16:]) == eight_s, "four, and four of the other load"
    short = world.tier.load(blocks[16:], range(36, 40))
    are_both_begun.set()
    world.settle()
    assert landed[:8] == [(i + j, i) for i in range(4) for j in range(2)]
    assert (long.num_landed, short.num_landed) == (16, 4)
    loaded = world.store.gather(range(20, 40))
    assert torch.equal(loaded, world.store.gather(range(20)))


def test_a_load_that_was_given_up_is_no_longer_waited_for(world: World) -> None:
    world.save(range(4))
    world.settle()
    is_held, goes_on = Event(), Event()

    def hold() -> None:
        is_held.set()
        assert goes_on.wait(30)

    world.mover.before_piece = hold
    blocks = world.tier.find([name_of(number) for number in range(4)])
    alone_s = world.tier.load_seconds(blocks)
    load = world.tier.load(blocks, range(20, 24))
    assert is_held.wait(30)
    assert world.tier.load_seconds(blocks) > alone_s
    load.cancel()
    assert world.tier.load_seconds(blocks) == alone_s
    goes_on.set()
    world.settle()


def test_what_was_slow_is_hoped_to_be_faster_from_second_to_second() -> None:
    """What is too slow to be tried is not measured; a host that was busy may be idle by now."""
    clock = ManualClock()
    time = BlockTime(1e-3, clock)
    for _ in range(30):
        time.learn(6.4, 100)
    slow_s = time.predicted_s
    assert slow_s > 20e-3
    for number in range(1, 5):
        clock.advance(1.0)
        assert time.predicted_s - 1e-3 == pytest.approx((slow_s - 1e-3) / 2**number)


def test_a_piece_counts_by_its_blocks() -> None:
    """Of two speeds the one of more blocks: what a piece takes besides must not count for each."""
    clock = ManualClock()
    time = BlockTime(1e-3, clock)
    for _ in range(30):
        time.learn(4e-3, 1)
        time.learn(100e-3, 100)
    assert 1e-3 < time.predicted_s < 1.1e-3


@pytest.mark.parametrize("num_blocks", [1, 7, 8, 9, 100, 1777])
def test_pieces_grow_to_a_quarter_of_a_load(num_blocks: int) -> None:
    landed, sizes = 0, list[int]()
    while landed < num_blocks:
        sizes.append(min(piece_size(landed, num_blocks, 2359296), num_blocks - landed))
        landed += sizes[-1]
    assert max(sizes) <= max(8, -(-num_blocks // 4))
    assert sizes[0] == min(8, num_blocks)
    assert len(sizes) <= 12, "each is waited for by itself"


def test_where_blocks_were_found_but_not_lately_no_step_waits_for_the_bus(world: World) -> None:
    """Of a save of many blocks the first of a sequence are stored, as many as can be staged."""
    tier = HostTier(world.arena, world.mover, num_staged=6)
    world.tier, unstaged = tier, world.tier
    numbers = list(range(20))
    assert tier.find([name_of(99)]) == []
    world.arena.note_hit()
    tier.save([(i, name_of(i)) for i in reversed(numbers[:10])])
    world.settle()
    assert tier.statistics().num_dropped == 0, "one was found just now"
    tier.save([(i, name_of(i)) for i in reversed(numbers[10:])])
    world.settle()
    assert [world.arena.num_found([name_of(i)]) for i in numbers] == [1] * 16 + [0] * 4
    assert tier.statistics().num_dropped == 4
    unstaged.close()


def test_neighbours_on_both_sides_are_copied_together() -> None:
    assert list(runs([], [])) == []
    assert list(runs([4, 5, 6, 9, 10], [1, 2, 7, 8, 9])) == [(4, 1, 2), (6, 7, 1), (9, 8, 2)]
    rng = fresh_random()
    numbers = range(30)
    pairs = [
        (i + rng.choice([0, 40]), j)
        for i, j in zip(numbers, rng.choices(numbers, k=30), strict=True)
    ]
    found = list(runs([i for i, _ in pairs], [j for _, j in pairs]))
    assert [(i + k, j + k) for i, j, n in found for k in range(n)] == pairs


def test_progress_is_told_from_other_threads(world: World) -> None:
    told: list[None] = []
    world.tier.on_progress(lambda: told.append(None))
    world.save([1])
    world.settle()
    num_told = len(told)
    world.load([1], [20])
    world.settle()
    assert 0 < num_told < len(told)

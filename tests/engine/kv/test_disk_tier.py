"""Files below the arena: what comes back, after whatever befell them, and what never does."""

import fcntl
import os
import random
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.kv.host.arena import HostArena
from engine.kv.host.disk import DiskBlock, DiskFiles, Row, kept_key
from engine.kv.host.disk_tier import DiskTier
from engine.kv.host.lane import Lane
from engine.kv.host.movers import build_mover
from engine.kv.host.tier import HostTier
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from tests.engine.kv.arena_process import name_of
from tests.harness.seeds import fresh_random

LAYOUT = KvLayout.with_heads(
    num_layers=2, block_size=3, num_kv_heads=1, head_dim=5, dtype="float32"
)
SIZE = LAYOUT.block_bytes
NAMESPACE = bytes(range(16))
NUM_ARENA_BLOCKS = 16


def _files(path: Path, num_bytes: int = 2**20, namespace: bytes = NAMESPACE) -> DiskFiles:
    return DiskFiles(path, num_bytes=num_bytes, block_bytes=SIZE, namespace=namespace)


def _row(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)


def _write(files: DiskFiles, numbers: range) -> None:
    assert files.write([(name_of(i), -i, _row(i)) for i in numbers])


def _is_whole(files: DiskFiles, number: int) -> bool:
    block = files.get(name_of(number))
    row = np.zeros(SIZE, dtype=np.uint8)
    if block is None or not files.read(block, row):
        return False
    assert block.digest == -number
    return bool((row == _row(number)).all())


def _drain(lane: Lane) -> None:
    """Waits for the jobs posted so far."""
    is_idle = Event()
    lane.post(is_idle.set)
    assert is_idle.wait(30)


class World:
    """A worker whose arena is much smaller than what it evicts."""

    def __init__(self, path: Path, num_bytes: int = 2**20) -> None:
        self.store = KvStore(LAYOUT, num_blocks=80, device=torch.device("cpu"))
        generator = torch.Generator().manual_seed(1)
        self.store.tensor.copy_(torch.randn(self.store.tensor.shape, generator=generator))
        self.arena = HostArena(
            f"test-disk-{os.getpid()}-{random.randrange(2**32)}",
            num_bytes=NUM_ARENA_BLOCKS * (SIZE + 56) + 2**21 + 4128,
            block_bytes=SIZE,
            fingerprint=bytes(16),
        )
        self.files = _files(path, num_bytes)
        self.disk = DiskTier(self.files, self.arena)
        mover = build_mover(self.store, self.arena.blocks)
        self.tier = HostTier(self.arena, mover, self.disk)

    def save(self, numbers: range) -> None:
        self.arena.note_hit()  # all is worth storing
        self.tier.save([(i, name_of(i)) for i in reversed(numbers)])
        self.settle()

    def settle(self) -> None:
        """Until nothing is under way; a load goes from thread to thread and back."""
        for _ in range(50):
            for lane in (
                self.tier._save_lane,
                self.tier._load_lane,
                self.disk._read_lane,
                self.disk._write_lane,
            ):
                _drain(lane)
            self.tier.settle()
            if not self.tier.is_active:
                break
        self.tier.check_conservation()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def world(path: Path) -> Iterator[World]:
    world = World(path)
    yield world
    world.tier.close()


def test_what_left_the_arena_comes_back_from_files_with_every_bit(world: World) -> None:
    before = world.store.tensor.clone()
    for first in (0, 4, 8, 12, 16, 20):  # the arena holds 16 of them
        world.save(range(first, first + 4))
    world.store.zero(list(range(24)))
    chain = [name_of(i) for i in range(8)]
    found = world.tier.find(chain)
    assert len(found) == 8
    assert any(isinstance(block, DiskBlock) for block in found)
    load = world.tier.load(found, list(range(40, 48)))
    world.settle()
    assert (load.num_landed, load.is_over, load.problem) == (8, True, None)
    assert torch.equal(world.store.tensor[40:48], before[:8])
    assert world.store.digests.of(range(40, 48)) == world.store.digest(list(range(40, 48)))
    assert world.arena.num_found(chain) == 8, "it is in the arena again"
    statistics = world.tier.statistics()
    assert world.disk.read_time.predicted_s != SIZE / 10e9, "it learns from what was read"
    assert statistics.disk is not None
    assert (statistics.num_stored, statistics.disk.num_written) == (24, 24)
    assert statistics.disk.num_loaded == sum(isinstance(block, DiskBlock) for block in found)


@pytest.mark.parametrize("harm", ["bit", "cut", "removed"])
def test_a_harmed_file_is_never_used(world: World, path: Path, harm: str) -> None:
    for first in range(0, 32, 4):
        world.save(range(first, first + 4))
    chain = [name_of(i) for i in range(8)]
    number = next(i for i in range(8) if world.arena.num_found([name_of(i)]) == 0)
    block = world.files.get(name_of(number))
    assert block is not None
    file = path / block.file
    data = bytearray(file.read_bytes())
    data[block.offset + 5] ^= 4
    if harm == "removed":
        file.unlink()
    else:
        file.write_bytes(data if harm == "bit" else data[: block.offset + 7])
    load = world.tier.load(world.tier.find(chain), list(range(40, 48)))
    world.settle()
    assert load.num_landed <= number
    assert load.problem == ("corrupt" if harm == "bit" else "gone")
    assert world.files.get(name_of(number)) is None
    assert world.arena.num_found([name_of(number)]) == 0
    good = world.store.tensor[40 : 40 + load.num_landed]
    assert torch.equal(good, world.store.tensor[: load.num_landed])


def test_what_was_read_before_a_file_that_is_gone_is_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(0, 32, 4):
        world.save(range(first, first + 4))
    blocks = [block for i in range(4) if (block := world.files.get(name_of(i))) is not None]
    read = world.files.read

    def read_but_the_third(block: DiskBlock, row: Row) -> bool:
        return block is not blocks[2] and read(block, row)

    monkeypatch.setattr(world.files, "read", read_but_the_third)
    load = world.tier.load(blocks, [40, 41, 42, 43])
    world.settle()
    assert (load.num_landed, load.problem) == (2, "gone")
    assert torch.equal(world.store.tensor[40:42], world.store.tensor[:2])
    assert world.tier.statistics().num_corrupt == 0


def test_a_disk_that_hangs_keeps_no_block_of_the_device(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has given up the load needs them to compute."""
    for first in range(0, 32, 4):
        world.save(range(first, first + 4))
    found = [world.files.get(name_of(i)) for i in range(4)]
    blocks = [block for block in found if block is not None]
    assert world.arena.num_found([name_of(0)]) == 0
    begins, answers = Event(), Event()
    read = world.files.read

    def hang(block: DiskBlock, row: Row) -> bool:
        begins.set()
        assert answers.wait(30)
        return read(block, row)

    monkeypatch.setattr(world.files, "read", hang)
    load = world.tier.load(blocks, [40, 41, 42, 43])
    assert begins.wait(30)
    assert not load.is_over
    load.cancel()
    assert load.is_over
    world.store.tensor[40:44] = 7.0  # others have them
    load.resume()
    world.tier.settle()
    assert world.tier.is_active, "the disk may still write to blocks of the arena"
    world.tier.check_conservation()
    answers.set()
    world.settle()
    assert not world.tier.is_active
    assert (load.num_landed, load.is_over, load.problem) == (0, True, None)
    assert bool((world.store.tensor[40:44] == 7.0).all())


def test_a_stalled_read_makes_reading_unworthy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.disk.read_seconds(1) < 0.1
    assert world.disk.read_seconds(3) == pytest.approx(3 * world.disk.read_seconds(1))
    world.disk.num_reading = 5
    assert world.disk.read_seconds(1) == pytest.approx(6 * world.disk.read_time.predicted_s)
    world.disk._read_since_s = 0.0  # it began long ago
    monkeypatch.setattr("engine.kv.host.disk_tier.time.monotonic", lambda: 9.0)
    assert world.disk.read_seconds(1) > 9.0


def test_a_disk_that_fails_is_said_so_once_and_looked_at_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(world.files, "write", fail)
    monkeypatch.setattr(world.files, "refresh", fail)
    for first in (0, 4, 8):
        world.save(range(first, first + 4))
        world.disk._refreshed_s = 0.0
        world.disk.get(name_of(99))
        world.settle()
    assert [record.message for record in caplog.records if "no more" in record.message] == [
        f"{world.files.folder} is written to no more: no such device"
    ]
    assert world.disk.statistics().num_written == 0


def test_what_waits_to_be_written_is_bounded_and_what_has_left_the_arena_is_not_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.kv.host.disk_tier._MAX_QUEUED_BYTES", 5 * SIZE)
    may_write = Event()
    world.disk._write_lane.post(lambda: may_write.wait(30) and None)
    world.arena.note_hit()
    world.tier.save([(i, name_of(i)) for i in range(4)])  # a quarter of the arena at a time
    _drain(world.tier._save_lane)
    world.tier.settle()
    world.tier.save([(i, name_of(i)) for i in range(4, 8)])
    _drain(world.tier._save_lane)
    world.tier.settle()
    (gone,) = world.arena.find([name_of(1)])
    assert world.arena.drop(gone)
    may_write.set()
    world.settle()
    statistics = world.disk.statistics()
    assert (statistics.num_written, statistics.num_dropped) == (4, 4)
    assert world.files.get(name_of(1)) is None


def test_writers_of_a_machine_take_turns_and_leave_no_part_of_a_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _files(path)
    make_room = files._make_room

    def make_room_alone(lock: int, size: int) -> None:
        with (path / "lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        make_room(lock, size)

    monkeypatch.setattr(files, "_make_room", make_room_alone)
    _write(files, range(2))
    with pytest.raises(TypeError):
        files.write([(name_of(9), 0, SimpleNamespace(data=None))])  # type: ignore[list-item]
    assert not (path / "part").exists()
    assert (files.num_blocks, files.get(name_of(9))) == (2, None)


def test_reading_a_file_counts_as_a_use_of_it(path: Path) -> None:
    files = _files(path, 3 * (4096 + SIZE))
    for number in range(3):
        _write(files, range(number, number + 1))
        block = files.get(name_of(number))
        assert block is not None
        os.utime(path / block.file, ns=(number, number))
    assert _is_whole(files, 0)
    _write(files, range(3, 4))  # in place of two
    assert [files.get(name_of(i)) is not None for i in range(4)] == [True, False, False, True]


def test_a_restart_finds_what_was_written_and_another_key_nothing(path: Path) -> None:
    _write(_files(path), range(5))
    assert [_is_whole(_files(path), i) for i in range(6)] == [True] * 5 + [False]
    assert _files(path, namespace=bytes(16)).num_blocks == 0
    key = kept_key(path)
    assert (kept_key(path), len(key)) == (key, 32)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    assert (modes, stat.S_IMODE(path.stat().st_mode)) == ({0o600}, 0o700)


def test_a_folder_that_others_can_open_is_refused(path: Path) -> None:
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="other users can open"):
        _files(path)


def test_a_torn_head_voids_the_file(path: Path) -> None:
    rng = fresh_random()
    _write(_files(path), range(3))
    (file,) = path.glob("*.kv")
    whole = file.read_bytes()
    for _ in range(20):
        data = bytearray(whole)
        data[rng.randrange(40 + 3 * 24 + 16)] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        files = _files(path)
        assert (files.num_blocks, files.num_void, file.exists()) == (0, 1, False)
    for size in (0, 10, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert _files(path).num_blocks == 0


def test_files_used_longest_ago_go_first_and_the_bound_holds(path: Path) -> None:
    files = _files(path, 5 * (4096 + 2 * SIZE))
    for number in range(0, 10, 2):
        _write(files, range(number, number + 2))
    for i, number in enumerate([2, 4, 6, 8, 0]):  # the second one is the oldest now
        block = files.get(name_of(number))
        assert block is not None
        os.utime(path / block.file, ns=(i, i))
    other = _files(path, 5 * (4096 + 2 * SIZE), bytes(16))
    _write(other, range(50, 52))
    files._listed = (-9.0, -1)
    files.refresh(0.0)
    assert files.get(name_of(2)) is None
    assert _is_whole(files, 0)
    assert sum(file.stat().st_size for file in path.glob("*.kv")) <= 5 * (4096 + 2 * SIZE)
    assert not files.write([(name_of(i), 0, _row(i)) for i in range(200)]), "it cannot fit"


def test_writers_list_a_folder_when_it_seems_full_and_stay_below_its_bound(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_bytes = 4096 + SIZE
    writers = [_files(path, 64 * file_bytes) for _ in range(2)]
    listings = []
    found = DiskFiles._found
    monkeypatch.setattr(DiskFiles, "_found", lambda self: listings.append(self) or found(self))
    for number in range(200):
        _write(writers[number % 2], range(number, number + 1))
        if number == 30:
            next(path.glob("*.kv")).unlink()  # counts until the folder is listed
        if number == 40:
            (path / "lock").write_bytes(b"")  # as a writer finds it that is the first
        assert len(list(path.glob("*.kv"))) <= 64
    # The first write, the one after the count was lost, and one for each 4 files once it is full.
    assert 20 < len(listings) < 50


KILLED = """
import sys
from hashlib import blake2b
from pathlib import Path
import numpy as np
from engine.kv.host.disk import DiskFiles
def block(j):
    name = blake2b(j.to_bytes(8, "little"), digest_size=16).digest()
    return name, -j, np.random.default_rng(j).integers(0, 256, size, dtype=np.uint8)
size = int(sys.argv[2])
files = DiskFiles(
    Path(sys.argv[1]), num_bytes=2**30, block_bytes=size, namespace=bytes(range(16))
)
print("begun", flush=True)
for i in range(4, 10**6, 8):
    files.write([block(j) for j in range(i, i + 8)])
"""


@pytest.mark.parametrize("number", [0, pytest.param(5, marks=pytest.mark.nightly)])
def test_what_a_killed_writer_leaves_is_whole_or_not_found(path: Path, number: int) -> None:
    _write(_files(path), range(4))
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), str(SIZE)], stdout=subprocess.PIPE, text=True
    ) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "begun\n"
            while len(list(path.glob("*.kv"))) < 5 + number:
                assert writer.poll() is None
        finally:
            writer.kill()
    (path / "part").write_bytes(b"left by one that died")
    files = _files(path, 2**30)
    assert files.num_blocks >= 8
    assert files.num_void == 0
    assert all(_is_whole(files, i) for i in range(files.num_blocks))
    _write(files, range(10**6, 10**6 + 1))
    assert not (path / "part").exists()

"""Blocks in shared memory: who owns them, what is found, and what the death of a worker leaves."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.kv.host import arena as arena_module
from engine.kv.host import shared_file
from engine.kv.host.arena import MIN_POOL_BLOCKS, REFILL_BLOCKS, HostArena
from engine.kv.host.published import PublishedBlocks
from engine.kv.host.shared_file import (
    FOLDER,
    PREFIX,
    UNUSED_S,
    UnusedFiles,
    claimed,
    remove_if_unused,
)
from tests.engine.kv.arena_process import (
    BLOCK_BYTES,
    FINGERPRINT,
    NUM_BYTES,
    content_of,
    digest_of,
    name_of,
    open_arena,
    store,
)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{os.getpid()}-{random.randrange(2**32)}"
    yield name
    (FOLDER / f"{PREFIX}{name}").unlink(missing_ok=True)


def _check_stored(arena: HostArena) -> int:
    """Every block that can be found is what its name says; returns how many there are."""
    names = arena.hashes()
    for block in (block for name in names for block in arena.find([name])):
        content = arena.blocks[block.slot].tobytes()
        assert content == content_of(block.block_hash)
        assert digest_of(content) == block.digest
    return len(names)


def test_all_workers_find_what_one_has_stored(name: str) -> None:
    one, two = open_arena(name), open_arena(name)
    names = store(one, range(5))
    assert one.member != two.member
    assert [block.block_hash for block in two.find([*names, name_of(9)])] == names
    assert two.num_found(names) == 5
    assert two.num_found([name_of(9), *names]) == 0
    assert _check_stored(two) == 5
    assert two.terms().total == two.num_blocks
    one.close()
    assert two.num_found(names) == 5
    two.close()


def test_the_last_to_leave_removes_the_file(name: str) -> None:
    one, two = open_arena(name), open_arena(name)
    path = FOLDER / f"{PREFIX}{name}"
    two.leave()
    two.close()
    assert path.exists()
    assert not remove_if_unused(name)
    one.close()
    one.close()
    assert not path.exists()


def test_a_pool_refills_from_the_reserve_then_steals_half_then_evicts(name: str) -> None:
    one, two = open_arena(name), open_arena(name)
    two.give_back(two.take(1))
    assert two.terms().num_pool == {two.member: REFILL_BLOCKS}
    taken = one.take(one.num_blocks - REFILL_BLOCKS)
    assert one.terms().num_pool == {two.member: REFILL_BLOCKS}, "the reserve is not empty yet"
    assert one.take(1)
    assert one.terms().num_pool[two.member] == REFILL_BLOCKS // 2
    while one.terms().num_pool[two.member] > MIN_POOL_BLOCKS:
        assert one.take(1)
    one.take(one.num_blocks)
    assert one.take(1) == []
    assert one.terms().num_pool[two.member] <= MIN_POOL_BLOCKS, "the last few are not stolen"
    names = [name_of(number) for number in range(20)]
    one.publish(taken[:20], names, range(20))
    one.touch(names[:2])
    assert one.take(1), "what is stored can be evicted"
    assert one.num_found(names[:2]) == 2
    assert one.terms().total == one.num_blocks
    one.close()
    two.close()


def test_a_small_pool_is_left_to_its_worker_where_others_could_evict(name: str) -> None:
    one, two = open_arena(name), open_arena(name)
    slots = one.take(one.num_blocks)
    assert one.publish(slots, [name_of(number) for number in range(len(slots))], [0] * len(slots))
    kept = two.take(1)  # evicts as many as it may, and keeps the rest
    num_left = two.terms().num_pool[two.member]
    two.give_back(two.take(num_left - MIN_POOL_BLOCKS)[:0])
    assert two.terms().num_pool == {two.member: MIN_POOL_BLOCKS}
    assert one.take(1), "what is stored can be evicted"
    assert two.terms().num_pool[two.member] == MIN_POOL_BLOCKS
    two.give_back(kept)
    one.close()
    two.close()


def test_a_block_that_is_another_by_the_time_it_is_read_is_not_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = open_arena(name)
    (found,) = arena.find(store(arena, range(1)))
    where_is = arena._slot_of

    def replace_it(block_hash: bytes) -> int | None:
        slot = where_is(block_hash)
        monkeypatch.undo()
        assert arena.drop(found)
        store(arena, range(1, 65))  # another one takes its place
        return slot

    monkeypatch.setattr(arena, "_slot_of", replace_it)
    assert arena.find([name_of(0)]) == []
    arena.close()


def test_what_was_used_longest_ago_is_evicted_and_a_chain_from_its_end(name: str) -> None:
    arena = open_arena(name)
    chains = [range(100 * chain, 100 * chain + 20) for chain in range(3)]
    names = [store(arena, chain) for chain in chains]
    spare = arena.take(arena.num_blocks - 60)
    assert len(spare) == arena.num_blocks - 60
    arena.touch(names[0])
    arena.take(30)
    found = [arena.num_found(chain) for chain in names]
    assert found[1] <= found[2] <= found[0] == 20
    assert sum(found) < 60
    left = [sum(bool(arena.find([name])) for name in chain) for chain in names]
    assert left == found, "a block is left whose beginning is gone"
    arena.close()


def test_a_chain_that_was_used_again_is_evicted_from_its_end(name: str) -> None:
    arena = open_arena(name)
    chain = store(arena, range(40))
    arena.take(arena.num_blocks - 40)
    arena.touch(chain)
    assert arena.take(1)
    num_left = arena.num_found(chain)
    assert 0 < num_left < 40
    assert arena.terms().num_ready == num_left, "a block is left whose beginning is gone"
    arena.close()


def test_a_block_that_was_evicted_is_noticed_even_if_it_came_back(name: str) -> None:
    arena = open_arena(name)
    (found,) = arena.find(store(arena, range(1)))
    assert arena.is_unchanged(found)
    assert arena.drop(found)
    assert not arena.drop(found)
    assert not arena.find([name_of(0)])
    store(arena, range(1))
    (again,) = arena.find([name_of(0)])
    assert not arena.is_unchanged(found)
    assert arena.is_unchanged(again)
    arena.close()


def test_changes_are_told_once_and_all_again_to_who_asks_for_all(name: str) -> None:
    arena = open_arena(name)
    published = PublishedBlocks(arena)
    names = store(arena, range(3))
    first = published.take_events()
    assert first is not None
    assert (first.is_resync, sorted(first.added), first.removed) == (True, sorted(names), [])
    assert published.take_events() is None
    assert arena.drop(arena.find(names[:1])[0])
    new = store(arena, range(3, 5))
    second = published.take_events()
    assert second is not None
    assert (second.is_resync, sorted(second.added), second.removed) == (
        False,
        sorted(new),
        names[:1],
    )
    published.request_resync()
    third = published.take_events()
    assert third is not None
    assert (third.is_resync, sorted(third.added)) == (True, sorted(names[1:] + new))
    arena.close()


def test_a_name_is_stored_once(name: str) -> None:
    one, two = open_arena(name), open_arena(name)
    store(one, range(3))
    slots = two.take(2)
    assert two.publish(slots, [name_of(2), name_of(3)], [0, 0]) == 1
    assert two.terms().num_ready == 4
    two.check_conservation([])
    one.close()
    two.close()


def test_a_bucket_that_overflows_loses_what_was_used_longest_ago(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_PLACES_PER_BLOCK", 1)
    monkeypatch.setattr(arena_module, "_WAYS", 1)
    arena = open_arena(name)
    for start in range(0, arena.num_blocks, 16):
        names = store(arena, range(start, start + 16))
        assert arena.find(names[-1:])
    arena.check_conservation([])
    assert arena.terms().num_ready == _check_stored(arena) < arena.num_blocks * 0.9
    arena.close()


@pytest.mark.parametrize("seed", range(3))
def test_no_history_of_several_workers_loses_or_doubles_a_block(name: str, seed: int) -> None:
    rng = random.Random(seed)
    workers = [open_arena(name) for _ in range(3)]
    taken: list[list[int]] = [[], [], []]
    for _ in range(150):
        i = rng.randrange(3)
        arena, mine = workers[i], taken[i]
        match rng.randrange(6):
            case 0:
                mine += arena.take(rng.choice([1, 3, 40, 200]))
            case 1 | 2:
                part = [mine.pop() for _ in range(min(len(mine), rng.randrange(30)))]
                names = [name_of(rng.randrange(400)) for _ in part]
                for slot, block_name in zip(part, names, strict=True):
                    arena.blocks[slot] = np.frombuffer(content_of(block_name), dtype=np.uint8)
                arena.publish(part, names, [digest_of(content_of(n)) for n in names])
            case 3:
                arena.give_back([mine.pop() for _ in range(min(len(mine), rng.randrange(30)))])
            case 4:
                found = arena.find([name_of(rng.randrange(400))])
                assert all(arena.drop(block) for block in found)
            case 5 if rng.random() < 0.2:
                arena.close()
                workers[i], taken[i] = open_arena(name), []
        for worker, own in zip(workers, taken, strict=True):
            worker.check_conservation(own)
    assert _check_stored(workers[0]) == workers[0].terms().num_ready
    for worker in workers:
        worker.close()


# ---- other processes ----------------------------------------------------------------------------


class _Death(BaseException):
    """Of a process: what it held is free, and nothing of it runs any more."""


def _die_at_line(number: int, act: Callable[[], object]) -> bool:
    """Whether `act` ran so many lines of the arena's code, and died there."""
    num_lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != arena_module.__file__:
            return None
        num_lines += event == "line"
        if num_lines == number:
            raise _Death
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except _Death:
        return True
    finally:
        sys.settrace(before)
    return False


def test_who_dies_anywhere_in_publishing_leaves_blocks_that_are_found_or_free(name: str) -> None:
    heir = open_arena(name)
    number, is_dead = 0, True
    while is_dead:
        number += 1
        arena = open_arena(name)
        numbers = range(3 * number, 3 * number + 3)
        slots = arena.take(len(numbers))
        names = [name_of(i) for i in numbers]
        for slot, block_name in zip(slots, names, strict=True):
            arena.blocks[slot] = list(content_of(block_name))
        digests = [digest_of(content_of(block_name)) for block_name in names]
        is_dead = _die_at_line(number, partial(arena.publish, slots, names, digests))
        arena._file.leave()
        assert all(heir.num_found([block_name]) for block_name in heir.hashes())
    assert number > 100
    assert _check_stored(heir) == heir.terms().num_ready
    assert len(heir.take(heir.num_blocks)) == heir.num_blocks
    heir.close()


@contextmanager
def _killed_after(name: str, task: str) -> Iterator[None]:
    """A process that uses the arena until the block ends, and is killed then."""
    command = [sys.executable, "-m", "tests.engine.kv.arena_process", name, task]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


def test_what_a_killed_worker_was_writing_comes_back_and_is_never_found(name: str) -> None:
    arena = open_arena(name)
    arena.give_back(arena.take(3))
    with _killed_after(name, "stuck"):
        kept = store(arena, range(3))
        assert kept, "blocks of its own pool need a lock that the other does not have"
        num_writing = sum(arena.terms().num_writing.values())
        assert num_writing == 5 + 3, "SHARED is taken: nothing is published"
    taken = arena.take(arena.num_blocks)
    assert len(taken) == arena.num_blocks - 3
    assert arena.terms().num_reserve == 0
    arena.close()


def test_who_has_left_publishes_nothing_of_what_is_anothers_by_then(name: str) -> None:
    gone, heir = open_arena(name), open_arena(name)
    slots = gone.take(3)
    gone.leave()
    assert set(slots) < set(heir.take(heir.num_blocks))
    words = list(heir._words)
    names = [name_of(number) for number in range(3)]
    assert gone.publish(slots[:2], names[:2], [1, 2]) == 0
    gone.give_back(slots[2:])
    assert list(heir._words) == words
    assert heir.num_found(names) == 0
    heir.close()


def test_who_finds_a_lock_held_for_good_does_not_stay_a_member(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_JOIN_WAIT_S", 0.0)
    one, two = open_arena(name), open_arena(name)
    two.take(1)
    two._file.leave()
    with one._file.locked(shared_file.SHARED, 0.0), pytest.raises(ConfigError, match="get on"):
        open_arena(name)
    one._file.leave()
    assert not one._file.path.exists()


def test_two_workers_share_an_arena_and_one_is_killed_while_it_stores(name: str) -> None:
    arena = open_arena(name)
    with _killed_after(name, "busy"):
        for number in range(100):  # it stores, steals and evicts meanwhile
            store(arena, range(10**6 + 8 * number, 10**6 + 8 * number + 8))
            for block in arena.find(arena.hashes()[:4]):
                content = arena.blocks[block.slot].tobytes()
                expected = content_of(block.block_hash)
                is_right = digest_of(content) == block.digest and content == expected
                assert is_right or not arena.is_unchanged(block)
    assert _check_stored(arena) > 0
    terms = arena.terms()
    assert terms.total == arena.num_blocks
    arena.take(arena.num_blocks)
    assert set(arena.terms().num_writing) == {arena.member}
    arena.close()


def test_what_killed_processes_left_is_found_again_or_removed(name: str) -> None:
    with _killed_after(name, "busy"):
        pass
    path = FOLDER / f"{PREFIX}{name}"
    arena = open_arena(name)
    assert _check_stored(arena) > 0
    arena.close()
    assert not path.exists()
    with _killed_after(name, "stuck"):
        pass
    assert remove_if_unused(name)
    assert not path.exists()
    assert not remove_if_unused(name)


def test_a_file_goes_when_nobody_has_used_it_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_file, "FOLDER", tmp_path)
    arenas = {name: open_arena(name) for name in ("used", "left", "kept", "joined")}
    for name in ("left", "kept", "joined"):
        file = arenas[name]._file  # its lock goes as when its process is killed
        shared_file._unlock(file.fd, shared_file._FIRST_MEMBER + file.member)
    unused = UnusedFiles(keep="kept")
    assert unused.remove(100.0) == []
    assert unused.remove(99.0 + UNUSED_S) == []
    again = open_arena("joined")
    assert unused.remove(100.0 + UNUSED_S) == ["left"]
    assert unused.remove(200.0 + UNUSED_S) == []
    again.close()
    arenas["used"].close()
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}kept"]


def test_a_file_stays_for_a_process_that_still_loads_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_file, "FOLDER", tmp_path)
    unused = UnusedFiles(keep="")
    with claimed("absent"):
        assert unused.remove(0.0) == []
    arena = open_arena("left")
    shared_file._unlock(arena._file.fd, shared_file._FIRST_MEMBER + arena._file.member)
    with claimed("left"), claimed("left"):  # two that restart
        assert unused.remove(100.0) == unused.remove(900.0) == []
        assert not remove_if_unused("left")
        # A claim is no member with which another layout would have to agree.
        other = HostArena("left", num_bytes=NUM_BYTES, block_bytes=512, fingerprint=FINGERPRINT)
        other.close()
        assert (tmp_path / f"{PREFIX}left").exists()
    assert unused.remove(1000.0) == []
    assert unused.remove(1000.0 + UNUSED_S) == ["left"]


# ---- refusals -----------------------------------------------------------------------------------


def test_an_arena_of_another_layout_is_refused_while_it_is_used(name: str) -> None:
    arena = open_arena(name)
    for other in ({"fingerprint": b"g" * 16}, {"block_bytes": 512}, {"num_bytes": 2 * NUM_BYTES}):
        given = {"num_bytes": NUM_BYTES, "block_bytes": BLOCK_BYTES, "fingerprint": FINGERPRINT}
        with pytest.raises(ConfigError, match=r"cache\.host_gib: .* another model, layout or size"):
            HostArena(name, **(given | other))  # type: ignore[arg-type]
    assert store(arena, range(2))
    size = Path(FOLDER / f"{PREFIX}{name}").stat().st_size
    arena._file.leave()
    arena._file.path.touch(mode=0o600)
    arena._file.path.write_bytes(b"x" * size)  # what nobody uses is made anew
    again = open_arena(name)
    assert again.terms().num_reserve == again.num_blocks
    again.close()


def test_a_file_that_others_made_or_can_open_is_neither_joined_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_file, "FOLDER", tmp_path)
    name = "theirs"
    path = tmp_path / f"{PREFIX}{name}"
    path.touch()
    unused = UnusedFiles(keep="")
    for mode, user in ((0o666, os.geteuid()), (0o600, os.geteuid() + 1)):
        path.chmod(mode)
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        with pytest.raises(ConfigError, match="other users can read or change"):
            open_arena(name)
        assert not remove_if_unused(name)
        unused.remove(100.0)
        assert name not in unused.remove(100.0 + UNUSED_S)
    assert path.exists()


def test_who_joins_waits_longer_for_a_larger_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    first = open_arena(name)

    def sleep(_: float) -> None:
        now_s[0] += 1.0

    monkeypatch.setattr(shared_file.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(shared_file.time, "sleep", sleep)
    is_locked = first._file.locked(shared_file._LIFE, 0.0)
    with is_locked, pytest.raises(ConfigError, match="does not get on"):
        shared_file.SharedFile(name, 64 * 2**30, lambda _: True)
    assert now_s[0] >= 4 * 64
    first.close()


def test_too_little_room_is_refused_before_anything_is_written(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no room for .* GiB .*--shm-size"):
        open_arena(name, num_bytes=2**50)
    assert not (FOLDER / f"{PREFIX}{name}").exists()
    with pytest.raises(ConfigError, match="hold no block of 256"):
        open_arena(name, num_bytes=2**20)

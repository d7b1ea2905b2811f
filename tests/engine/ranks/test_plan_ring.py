"""The ring between real processes: whole, in order, awake in time, and nothing left of the dead."""

import hashlib
import itertools
import os
import random
import select
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.ranks import plan_ring
from engine.ranks.plan_ring import NUM_SLOTS, SLOT_BYTES, PlanRing, PlanRingReader, RingError
from load_tests.testbed.deployed import wait_until
from tests.engine.ranks.ring_ends import PATIENCE_S, STUCK_S, RingProcess

RING_BYTES = NUM_SLOTS * SLOT_BYTES
EDGES = (0, 1, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 2 * SLOT_BYTES, RING_BYTES + 1)


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@contextmanager
def processes(*commands: tuple[object, ...]) -> Iterator[list[RingProcess]]:
    started = [RingProcess(*command) for command in commands]
    try:
        yield started
    finally:
        for process in started:
            process.kill()


@contextmanager
def in_process(name: str, stuck_s: float = PATIENCE_S) -> Iterator[tuple[PlanRing, PlanRingReader]]:
    """A ring whose reader is in this process."""
    with PlanRing(name, 1, stuck_s) as ring:
        accepting = threading.Thread(target=ring.accept, args=(PATIENCE_S,))
        accepting.start()
        reader = PlanRingReader(name, 0, PATIENCE_S, stuck_s)
        accepting.join()
        try:
            yield ring, reader
        finally:
            reader.close()


def traces(name: str) -> list[str]:
    """Where a ring can still be seen on this machine; its memory has no name."""
    found = [line for line in Path("/proc/net/unix").read_text().splitlines() if name in line]
    return found + [entry for entry in os.listdir("/dev/shm") if name in entry]


def test_every_reader_gets_every_message_whole_and_in_order(name: str, rng: random.Random) -> None:
    sizes = [*EDGES[1:], *(rng.randrange(1, 3 * SLOT_BYTES) for _ in range(40))]
    sizes += [rng.randrange(1, 200) for _ in range(400)]  # the ring goes round many times
    rng.shuffle(sizes)
    messages = [rng.randbytes(size) for size in sizes]
    digest, expected = hashlib.blake2b(digest_size=8), []
    for message in messages:
        digest.update(message)
        expected.append(digest.hexdigest())
    pauses = (0.0, 0.0, 0.005)
    commands = [("reader", name, number, pause) for number, pause in enumerate(pauses)]
    with PlanRing(name, len(pauses), PATIENCE_S) as ring, processes(*commands) as readers:
        assert {ring.accept(PATIENCE_S) for _ in pauses} == set(range(len(pauses)))
        assert {ring.pid(number) for number in range(3)} == {reader.pid for reader in readers}
        for message in messages:
            ring.write(message)
            if rng.random() < 0.05:
                time.sleep(0.003)  # readers fall asleep
        ring.write(b"")
        for reader in readers:
            assert reader.rest() == ["ready", *expected]
    assert traces(name) == []


def test_a_reader_at_the_writer_s_heels_is_woken_and_sees_no_half_of_a_message(
    name: str, rng: random.Random
) -> None:
    """Each message comes while its reader looks for it, or just when it stops looking."""
    num_messages, digest, expected = 2000, hashlib.blake2b(digest_size=8), []
    with PlanRing(name, 1, PATIENCE_S) as ring, processes(("reader", name, 0, 0.0)) as [reader]:
        ring.accept(PATIENCE_S)
        for number in range(1, num_messages + 1):
            message = rng.randbytes(rng.choice((1, SLOT_BYTES)))
            digest.update(message)
            expected.append(digest.hexdigest())
            until_s = time.perf_counter() + rng.uniform(0.0, 1.5) * plan_ring.SPIN_S
            while time.perf_counter() < until_s:
                pass
            ring.write(message)
            began_s = time.perf_counter()
            while not ring._all_took(number):
                assert time.perf_counter() < began_s + PATIENCE_S, f"asleep: message {number}"
        ring.write(b"")
        assert reader.rest() == ["ready", *expected]


@pytest.mark.parametrize("after_look", [1, 2])
def test_a_message_that_comes_between_a_look_and_sleep_wakes_its_reader(
    name: str, after_look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_ring, "SPIN_S", 0.0)
    with in_process(name) as (ring, reader):
        look, num_looks = reader._has_piece, itertools.count(1)

        def look_and_be_late() -> bool:
            seen = look()
            if next(num_looks) == after_look:
                ring.write(b"x")
            return seen

        monkeypatch.setattr(reader, "_has_piece", look_and_be_late)
        began_s = time.monotonic()
        assert reader.read(timeout_s=PATIENCE_S) == b"x"
        assert time.monotonic() - began_s < PATIENCE_S / 2, "it slept and was not woken"


def test_a_message_that_comes_just_before_the_writer_s_end_is_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both between the reader's last look and its sleep."""
    monkeypatch.setattr(plan_ring, "SPIN_S", 0.0)
    with in_process(name) as (ring, reader):
        look, num_looks = reader._has_piece, itertools.count(1)

        def look_and_miss() -> bool:
            seen = look()
            if next(num_looks) == 2:
                ring.write(b"last words")
                ring._readers[0].close()
            return seen

        monkeypatch.setattr(reader, "_has_piece", look_and_miss)
        assert reader.read() == b"last words"
        with pytest.raises(RingError, match="dead"):
            reader.read()


def test_a_reader_that_waits_takes_no_processor_time(name: str) -> None:
    with in_process(name) as (ring, reader):
        began_s = time.thread_time()
        assert reader.read(timeout_s=0.5) is None
        assert time.thread_time() - began_s < 0.05
        ring.write(b"later")
        assert reader.read(timeout_s=PATIENCE_S) == b"later"


def test_a_reader_that_is_killed_is_reported_and_stops_the_writer(name: str) -> None:
    with (
        PlanRing(name, 2, PATIENCE_S) as ring,
        processes(("reader", name, 0, 0.0), ("reader", name, 1, 0.0)) as readers,
    ):
        numbers = {
            ring.pid(number): number
            for number in (ring.accept(PATIENCE_S), ring.accept(PATIENCE_S))
        }
        os.kill(readers[1].pid, signal.SIGKILL)
        assert ring.wait_reports(PATIENCE_S) == [(numbers[readers[1].pid], None)]
        assert ring.wait_reports(0.05) == []  # once
        with pytest.raises(RingError, match="dead"):
            ring.write(bytes(RING_BYTES + 1))
    assert traces(name) == []


def test_a_reader_that_is_stopped_holds_the_writer_no_longer_than_its_patience(name: str) -> None:
    with PlanRing(name, 1, STUCK_S) as ring, processes(("reader", name, 0, 0.0)) as [reader]:
        ring.accept(PATIENCE_S)
        os.kill(reader.pid, signal.SIGSTOP)
        for _ in range(NUM_SLOTS):
            ring.write(b"x")
        began_s = time.monotonic()
        with pytest.raises(RingError, match=r"reader \[0\] took nothing"):
            ring.write(b"x")
        assert time.monotonic() - began_s >= STUCK_S
    assert traces(name) == []


def test_a_writer_that_is_killed_ends_a_reader_asleep_and_leaves_nothing(name: str) -> None:
    with processes(("writer", name, 5)) as [writer]:
        assert writer.line() == "ready"
        with closing(PlanRingReader(name, 0, PATIENCE_S, PATIENCE_S)) as reader:
            assert reader.writer_pid == writer.pid
            assert reader.read(PATIENCE_S) == bytes(5)
            assert not reader.wait_end(0.05)
            killing = threading.Timer(0.1, os.kill, (writer.pid, signal.SIGKILL))
            killing.start()
            with pytest.raises(RingError, match="dead"):
                reader.read()
            killing.join()
            assert reader.wait_end(0.0)
    assert traces(name) == []


@pytest.mark.parametrize(
    ("end", "stuck_s", "why"),
    [(signal.SIGKILL, PATIENCE_S, "dead"), (signal.SIGSTOP, STUCK_S, "unfinished")],
)
def test_a_message_that_its_writer_does_not_finish_is_an_error(
    name: str, end: signal.Signals, stuck_s: float, why: str
) -> None:
    with processes(("writer", name, RING_BYTES + 1)) as [writer]:
        assert writer.line() == "ready"
        with closing(PlanRingReader(name, 0, PATIENCE_S, stuck_s)) as reader:
            last_slot = reader._memory.slot_line(NUM_SLOTS)
            wait_until(lambda: reader._memory.words[last_slot] != 0, "the ring is full", PATIENCE_S)
            os.kill(writer.pid, end)
            with pytest.raises(RingError, match=why):
                reader.read()


def test_a_reader_s_last_words_come_before_its_death(name: str) -> None:
    with in_process(name) as (ring, reader):
        ring.write(b"unread wakes and messages")
        reader.report(b"one")
        reader.report(b"two")
        reader._sock.close()
        told = [report for _ in range(3) for report in ring.wait_reports(PATIENCE_S)]
        assert told == [(0, b"one"), (0, b"two"), (0, None)]


def test_reports_in_turn_wait_for_the_writer_and_are_not_lost(name: str) -> None:
    sent = [bytes([number]) * 50_000 for number in range(64)]
    with in_process(name) as (ring, reader):
        reporting = threading.Thread(target=lambda: [reader.report_in_turn(one) for one in sent])
        reporting.start()
        told: list[bytes | None] = []
        while len(told) < len(sent):
            told += [report for _, report in ring.wait_reports(PATIENCE_S)]
        reporting.join(PATIENCE_S)
        assert told == sent


def test_a_report_in_turn_says_that_nobody_reads_or_lives(name: str) -> None:
    with in_process(name, STUCK_S) as (ring, reader):
        with suppress(BlockingIOError):
            while True:
                reader._sock.send(bytes(50_000))
        with pytest.raises(RingError, match="read nothing"):
            reader.report_in_turn(bytes(50_000))
        ring._readers[0].close()
        with pytest.raises(RingError, match="dead"):
            reader.report_in_turn(b"one")


def test_a_number_is_given_once_and_strangers_find_no_ring(name: str) -> None:
    with in_process(name) as (ring, _):
        refused = []

        def join() -> None:
            with pytest.raises(RingError, match=r"does not take|cannot be reached"):
                PlanRingReader(name, 0, PATIENCE_S, STUCK_S)
            refused.append(True)

        thread = threading.Thread(target=join)
        thread.start()
        assert select.select([ring._listener], [], [], PATIENCE_S)[0], "it has not come"
        with pytest.raises(RingError, match="no further rank"):
            ring.accept(0.2)
        thread.join(PATIENCE_S)
        assert refused
    with pytest.raises(RingError, match="cannot be reached"):
        PlanRingReader(name, 0, PATIENCE_S, STUCK_S)


def test_another_kind_of_processor_is_refused_in_words(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_ring.platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match=r"workers\.tensor_parallel_size.*x86-64.*aarch64"):
        PlanRing(name, 1, STUCK_S)


class _Stops:
    """A clock of a process that is stopped in its first sleep, for longer than any patience."""

    def __init__(self, on_next_sleep: Callable[[], object]) -> None:
        self._now_s = 0.0
        self._num_sleeps = 0
        self._on_next_sleep = on_next_sleep

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._num_sleeps += 1
        self._now_s += 100 * PATIENCE_S if self._num_sleeps == 1 else seconds
        if self._num_sleeps == 2:
            self._on_next_sleep()


def test_a_writer_that_was_stopped_gives_readers_time_to_go_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_process(name) as (ring, reader):
        for number in range(NUM_SLOTS):
            ring.write(bytes([number]))
        monkeypatch.setattr(plan_ring, "time", _Stops(reader.read))
        ring.write(b"more than the ring has room for")
        assert [reader.read() for _ in range(NUM_SLOTS)][-1] == b"more than the ring has room for"


class _StopsAtLook:
    """A clock of a process that is stopped while it looks for the third time."""

    def __init__(self, on_next_look: Callable[[], object]) -> None:
        self._num_looks = 0
        self._on_next_look = on_next_look

    def monotonic(self) -> float:
        self._num_looks += 1
        if self._num_looks == 4:
            self._on_next_look()
        return 0.0 if self._num_looks < 3 else 100 * PATIENCE_S


def test_a_reader_that_was_stopped_gives_the_writer_time_to_read_its_reports(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_process(name, STUCK_S) as (ring, reader):
        with suppress(BlockingIOError):
            while True:
                reader._sock.send(bytes(50_000))
        monkeypatch.setattr(plan_ring, "time", _StopsAtLook(ring.wait_reports))
        reader.report_in_turn(b"the last one")
        told: list[bytes | None] = []
        while b"the last one" not in told:
            told += [report for _, report in ring.wait_reports(PATIENCE_S)]

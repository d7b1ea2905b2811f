"""Ranks that stand still are noticed, and those that are slow are not."""

import threading
import uuid

import pytest

from engine.ranks.heartbeat import LOADING_S, LOOKS, Heartbeat
from engine.ranks.plan_ring import PlanRing, PlanRingReader
from tests.engine.ranks.ring_ends import PATIENCE_S


def watcher_of(counts: dict[int, int], *, has_loaded: bool = True) -> Heartbeat:
    reads = {rank: lambda rank=rank: counts[rank] for rank in counts}  # type: ignore[misc]
    watcher = Heartbeat(lambda: None, reads, 60.0, lambda _: None)
    if has_loaded:
        watcher.loaded()
    return watcher


def test_the_rank_whose_count_stays_is_named() -> None:
    counts = {1: 0, 2: 0, 3: 0}
    watcher = watcher_of(counts)
    found = []
    for _ in range(LOOKS + 1):
        counts[1], counts[3] = counts[1] + 1, counts[3] + 1
        found.append(watcher.look())
    assert found == [None] * LOOKS + [2]


def test_a_rank_that_beats_now_and_then_is_not_blamed() -> None:
    counts = {1: 0}
    watcher = watcher_of(counts)
    for number in range(5 * LOOKS):
        counts[1] += number % (LOOKS - 1) == 0
        assert watcher.look() is None


def test_a_rank_that_loads_may_be_silent_for_longer() -> None:
    watcher = watcher_of({1: 0}, has_loaded=False)
    found = [watcher.look() for _ in range(int(LOOKS * LOADING_S / 60.0) + 1)]
    assert found == [None] * (len(found) - 1) + [1]


def test_a_silence_while_the_model_loaded_counts_no_more_afterwards() -> None:
    watcher = watcher_of({1: 0}, has_loaded=False)
    assert [watcher.look() for _ in range(LOOKS + 1)] == [None] * (LOOKS + 1)
    watcher.loaded()
    assert [watcher.look() for _ in range(LOOKS + 1)] == [None] * LOOKS + [1]


@pytest.mark.parametrize("silent", ["writer", "reader"])
def test_each_side_of_the_ring_sees_whether_the_other_beats(silent: str) -> None:
    name, ended, found = f"test-{uuid.uuid4().hex}", threading.Event(), list[int]()

    def on_silence(rank: int) -> None:
        found.append(rank)
        ended.set()

    with PlanRing(name, 2, PATIENCE_S) as ring:
        readers = list[PlanRingReader]()

        def connect() -> None:
            readers.extend(
                PlanRingReader(name, number, PATIENCE_S, PATIENCE_S) for number in (0, 1)
            )

        connecting = threading.Thread(target=connect)
        connecting.start()
        for _ in range(2):
            ring.accept(PATIENCE_S)
        connecting.join()
        if silent == "writer":
            theirs = {0: lambda: readers[1].writer_beats}
            watching = Heartbeat(readers[1].beat, theirs, 0.1, on_silence)
        else:
            theirs = {1: lambda: ring.beats(0), 2: lambda: ring.beats(1)}
            watching = Heartbeat(lambda: (ring.beat(), readers[0].beat()), theirs, 0.1, on_silence)
        watching.start()
        watching.loaded()
        assert ended.wait(PATIENCE_S)
        watching.stop()
        counts = readers[0].writer_beats, ring.beats(0), ring.beats(1)
        for reader in readers:
            reader.close()
    assert found == [0 if silent == "writer" else 2]
    assert [count > 0 for count in counts] == (
        [False, False, True] if silent == "writer" else [True, True, False]
    )

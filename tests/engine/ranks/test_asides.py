"""What ranks do beside their steps: every one answers once, or the gang has ended."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import HandoffError, WorkerError
from engine.ranks.asides import Work
from tests.harness.asked_ranks import PATIENCE_S, AskedRanks


def says(rank: int) -> Work:
    return lambda work: bytes([rank]) + work


def test_all_ranks_answer_what_many_threads_ask_at_once() -> None:
    """Answers longer than a report, and than a slot of the ring."""
    works = [random.randbytes(random.randrange(200_000)) for _ in range(12)]
    with AskedRanks([says(1), says(2)]) as ranks, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda work: ranks.asides.ask(work, says(0)), works))
    assert found == [[bytes([rank]) + work for rank in range(3)] for work in works]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_an_error_is_raised_when_every_rank_has_ended_its_work(who: int) -> None:
    has_failed, is_over = threading.Event(), [False] * 3

    def worker(rank: int) -> Work:
        def do(work: bytes) -> bytes:
            if work == b"fine":
                return work
            if rank == who:
                has_failed.set()
                raise HandoffError("no memory")
            assert has_failed.wait(PATIENCE_S)
            is_over[rank] = True
            return b""

        return do

    with AskedRanks([worker(1), worker(2)]) as ranks:
        with pytest.raises(HandoffError, match="no memory"):
            ranks.asides.ask(b"fail", worker(0))
        assert sum(is_over) == 2
        assert ranks.asides.ask(b"fine", worker(0)) == [b"fine"] * 3


def test_a_rank_that_dies_ends_the_wait_for_it() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def hang(_: bytes) -> bytes:
        begun.set()
        may_end.wait(PATIENCE_S)
        return b""

    with AskedRanks([says(1), hang]) as ranks:

        def own(_: bytes) -> bytes:
            assert begun.wait(PATIENCE_S)
            ranks.end(2)
            return b""

        with pytest.raises(WorkerError, match="rank 2"):
            ranks.asides.ask(b"", own)
        may_end.set()
        assert [end.rank for end in ranks.ends] == [2]

"""What ranks do beside their steps: every one answers once, or the gang has ended."""

import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import msgspec
import pytest

from engine.errors import HandoffError, WorkerError
from engine.plan import StepPlan, StepResult
from engine.ranks.following import Follower
from engine.ranks.leading import LeadingExecutor
from engine.ranks.plan_ring import PlanRing, PlanRingReader, RingError
from engine.ranks.rank_tasks import NUM_THREADS, TaskThreads, Work, in_thread
from engine.ranks.ring_messages import RankTask, Stop
from tests.harness.asked_ranks import PATIENCE_S, AskedRanks, in_threads

NO_REPORTS: Any = None
NO_ROWS = StepPlan(
    step=0,
    rows=[],
    num_new_tokens=[],
    num_computed_tokens=[],
    num_samples=[],
    new_block_ids=[],
)


def says(rank: int) -> Work:
    return lambda work: bytes([rank]) + work


def test_all_ranks_answer_what_many_threads_ask_at_once() -> None:
    """Answers longer than a report, and than a slot of the ring."""
    works = [random.randbytes(random.randrange(200_000)) for _ in range(12)]
    with AskedRanks(in_threads(says(1), says(2))) as ranks, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda work: ranks.rank_tasks.ask(work, says(0)), works))
    assert found == [[bytes([rank]) + work for rank in range(3)] for work in works]


def test_a_load_does_not_wait_for_saves_that_are_still_being_copied() -> None:
    has_loaded = threading.Event()

    def work(asked: bytes) -> bytes:
        if asked == b"load":
            has_loaded.set()
        else:
            assert has_loaded.wait(PATIENCE_S), "saves kept it from its thread"
        return b""

    with AskedRanks(in_threads(work), kinds=("host save", "host load")) as ranks:
        saves = [ranks.rank_tasks.begin(b"save", "host save") for _ in range(2 * NUM_THREADS)]
        ranks.rank_tasks.begin(b"load", "host load")()
        assert [wait() for wait in saves] == [[b""]] * len(saves)


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

    with AskedRanks(in_threads(worker(1), worker(2))) as ranks:
        with pytest.raises(HandoffError, match="no memory"):
            ranks.rank_tasks.ask(b"fail", worker(0))
        assert sum(is_over) == 2
        assert ranks.rank_tasks.ask(b"fine", worker(0)) == [b"fine"] * 3


def test_a_rank_that_dies_ends_the_wait_for_it() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def hang(_: bytes) -> bytes:
        begun.set()
        may_end.wait(PATIENCE_S)
        return b""

    with AskedRanks(in_threads(says(1), hang)) as ranks:

        def own(_: bytes) -> bytes:
            assert begun.wait(PATIENCE_S)
            ranks.end(2)
            return b""

        with pytest.raises(WorkerError, match="rank 2"):
            ranks.rank_tasks.ask(b"", own)
        may_end.set()
        assert [end.rank for end in ranks.ends] == [2]


def test_a_report_that_cannot_be_read_ends_its_rank_and_the_wait() -> None:
    def garble(_: bytes) -> bytes:
        ranks.readers[1].report_in_turn(b"no report")
        return b""

    with AskedRanks(in_threads(garble)) as ranks:
        with pytest.raises(WorkerError, match="rank 1: its report cannot be taken"):
            ranks.rank_tasks.ask(b"", says(0))
        assert [(end.rank, end.is_dead) for end in ranks.ends] == [(1, False)]


def test_a_rank_that_cannot_answer_ends() -> None:
    """Else the first would wait for it for ever."""

    class FullRing:
        def report_in_turn(self, _: bytes) -> None:
            raise RingError("read nothing")

    failed, failures = threading.Event(), list[Exception]()

    def end(failure: Exception) -> None:
        failures.append(failure)
        failed.set()

    ring: Any = FullRing()
    TaskThreads(ring, {"heads": in_thread(says(1))}, end).begin(RankTask(0, b""))
    assert failed.wait(PATIENCE_S)
    assert [str(failure) for failure in failures] == ["read nothing"]


class OneStep:
    """An executor whose steps have ended at once."""

    is_done = True

    def launch(self, plan: StepPlan) -> "OneStep":
        return self

    def wait(self) -> StepResult:
        return StepResult(step=0, tokens=[], logprobs=[], is_finite=[])


def test_a_digest_of_a_step_waits_behind_answers_and_is_not_lost() -> None:
    name = f"test-{uuid.uuid4().hex}"
    step, reports = OneStep(), list[bytes | None]()
    with PlanRing(name, 1, PATIENCE_S) as ring:
        accepting = threading.Thread(target=ring.accept, args=(PATIENCE_S,))
        accepting.start()
        with closing(PlanRingReader(name, 0, PATIENCE_S, PATIENCE_S)) as reader:
            accepting.join()
            num_answers = 0
            with suppress(BlockingIOError):
                while True:
                    num_answers += reader._sock.send(bytes(50_000)) > 0
            LeadingExecutor(step, ring, NO_REPORTS, compare_every=1, patience_s=PATIENCE_S).launch(
                NO_ROWS
            )
            ring.write(msgspec.msgpack.encode(Stop()))
            following = threading.Thread(target=Follower(step, reader, print).run)
            following.start()
            following.join(0.05)  # the digest waits, or is lost by now
            while len(reports) <= num_answers and (told := ring.wait_reports(PATIENCE_S)):
                reports += [report for _, report in told]
            following.join(PATIENCE_S)
    assert len(reports) == num_answers + 1

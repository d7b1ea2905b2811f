"""A leader with its scheduler, and followers in processes of their own, on devices of integers."""

import os
import random
import signal
import subprocess
import sys
import threading
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.core import Executor
from engine.errors import WorkerError
from engine.ranks.leading import LeadingExecutor
from engine.ranks.plan_ring import PlanRing, PlanRingReader
from engine.ranks.rank_reports import RankEnd, RankReports
from engine.request import Constraint, ConstraintKind, SamplingParams
from tests.engine.ranks.following_process import digest_of, make_replica
from tests.engine.ranks.ring_ends import PATIENCE_S, ROOT
from tests.engine.scheduling.replica import Replica, prompt_of

STUCK_S = 1.0
NUM_RANKS = 3


class Ranks:
    """A replica that leads followers."""

    def __init__(self, ring: PlanRing, *, compare_every: int, stuck_s: float) -> None:
        self.replica: Replica = make_replica()
        self.replica.executor.is_idle = True
        self.ends: list[RankEnd] = []
        self.has_ended = threading.Event()
        self.ring = ring
        self.reports = RankReports(ring, NUM_RANKS, self._note)
        self.leading: LeadingExecutor
        self._compare_every = compare_every
        self._stuck_s = stuck_s

    def rank_of(self, pid: int) -> int:
        [rank] = [reader + 1 for reader in range(NUM_RANKS - 1) if self.ring.pid(reader) == pid]
        return rank

    def begin(self) -> None:
        self.reports.start()
        self.replica.core.wrap_executor(self._lead)

    def _lead(self, executor: Executor) -> LeadingExecutor:
        self.leading = LeadingExecutor(
            executor,
            self.ring,
            self.reports,
            compare_every=self._compare_every,
            patience_s=self._stuck_s,
        )
        return self.leading

    def _note(self, end: RankEnd) -> None:
        self.ends.append(end)
        self.has_ended.set()

    def work(self, rng: random.Random, num_requests: int) -> None:
        """Requests of any kind, until all have ended."""
        for number in range(num_requests):
            self.replica.add(
                str(number), prompt_of(rng.randrange(1, 40), number), params=drawn(rng)
            )
        while self.replica.core.has_work:
            self.replica.step()


def drawn(rng: random.Random) -> SamplingParams:
    """Values of all types that the parameters have; the device of integers takes no notice."""
    return SamplingParams(
        max_tokens=rng.randrange(1, 9),
        ignore_eos=True,
        temperature=rng.random(),
        seed=rng.randrange(2**63),
        logit_bias={rng.randrange(99): rng.uniform(-9, 9) for _ in range(rng.randrange(4))},
        stop_token_ids=tuple(rng.randrange(99) for _ in range(rng.randrange(3))),
        label_token_ids=(),
    )


@contextmanager
def gang(
    fault: str = "none", at_launch: int = 0, *, compare_every: int = 1, stuck_s: float = PATIENCE_S
) -> Iterator[tuple[Ranks, list[subprocess.Popen[str]]]]:
    """The leader, and its followers; the last of them has the fault."""
    name = f"test-{uuid.uuid4().hex}"
    followers = []
    with PlanRing(name, NUM_RANKS - 1, stuck_s) as ring:
        for number in range(NUM_RANKS - 1):
            faulty = fault if number == NUM_RANKS - 2 else "none"
            command = ["tests.engine.ranks.following_process", name, number, faulty, at_launch]
            followers.append(
                subprocess.Popen(
                    [sys.executable, "-m", *map(str, command)],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        ranks = Ranks(ring, compare_every=compare_every, stuck_s=stuck_s)
        try:
            for _ in followers:
                ring.accept(PATIENCE_S)
            ranks.begin()
            yield ranks, followers
        finally:
            for follower in followers:
                follower.kill()
                follower.communicate(timeout=PATIENCE_S)
            assert ranks.has_ended.wait(PATIENCE_S), "the reports' thread ends with its followers"


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize("compare_every", [1, 3])
def test_followers_launch_what_the_leader_launches(rng: random.Random, compare_every: int) -> None:
    with gang(compare_every=compare_every) as (ranks, followers):
        ranks.work(rng, 30)
        constraint = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer"}')
        ranks.leading.compile(constraint)
        ranks.leading.stop()
        told = [follower.communicate(timeout=PATIENCE_S)[0].strip() for follower in followers]
        plans = ranks.replica.executor.plans
    assert len(plans) > 20
    assert told == [f"{digest_of(plans)} {digest_of([constraint])}"] * len(followers)


def test_a_rank_with_other_tokens_ends_the_step_in_which_it_drifted(rng: random.Random) -> None:
    """Before anybody gets a token of it."""
    with gang("drift", 5) as (ranks, _):
        with pytest.raises(WorkerError, match=r"step \d+: ranks \[2\] have other tokens"):
            ranks.work(rng, 30)
        assert ranks.replica.executor.num_waited == 5


def test_a_rank_that_drifted_is_noticed_with_the_step_after_a_comparison(
    rng: random.Random,
) -> None:
    with gang("drift", 6, compare_every=3) as (ranks, _):
        with pytest.raises(WorkerError, match=r"step \d+: ranks \[2\] have other tokens"):
            ranks.work(rng, 30)
        assert ranks.replica.executor.num_waited == 7


def test_a_rank_that_raises_says_why(rng: random.Random) -> None:
    with gang("raise", 5) as (ranks, _):
        with pytest.raises(WorkerError, match="rank 2: RuntimeError: told to"):
            ranks.work(rng, 30)
        assert ranks.has_ended.wait(PATIENCE_S)
        assert ranks.ends == [RankEnd(rank=2, reason="RuntimeError: told to")]


@pytest.mark.parametrize("compare_every", [1, 10**6])
def test_a_rank_that_hangs_is_noticed_in_time(rng: random.Random, compare_every: int) -> None:
    """By the step that is compared, or by the ring that it leaves full."""
    hanging = gang("hang", 5, compare_every=compare_every, stuck_s=STUCK_S)
    with (
        hanging as (ranks, _),
        pytest.raises(WorkerError, match=r"followed within 1 s|took nothing for 1 s"),
    ):
        ranks.work(rng, 60)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_told_of_at_once(rng: random.Random, victim: int) -> None:
    with gang() as (ranks, followers):
        ranks.work(rng, 3)
        os.kill(followers[victim].pid, signal.SIGKILL)
        assert ranks.has_ended.wait(PATIENCE_S)
        assert ranks.ends == [RankEnd(rank=ranks.rank_of(followers[victim].pid), is_dead=True)]
        with pytest.raises(WorkerError, match="dead"):
            ranks.work(rng, 30)


@pytest.mark.parametrize(("is_draft", "kind"), [(False, "step"), (True, "pass")])
def test_what_ranks_do_not_report_in_time_is_named(is_draft: bool, kind: str) -> None:
    """What drafts counts its passes by itself."""
    ring = PlanRing(f"test-{uuid.uuid4().hex}", NUM_RANKS - 1, STUCK_S)
    reports = RankReports(ring, NUM_RANKS, lambda end: None)
    try:
        with pytest.raises(WorkerError, match=rf"^{kind} 7: only ranks \[\] of \[2\] followed"):
            reports.wait_results(7, is_draft, [2], timeout_s=0.0)
    finally:
        ring.close()


class _Stopped:
    """A condition that is waited for while the process is stopped, and goes on with the others."""

    def __init__(self, on_going_on: Callable[[], object]) -> None:
        self._on_going_on = on_going_on
        self._num_waits = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_for(self, is_over: Callable[[], object], timeout_s: float) -> object:
        self._num_waits += 1
        if self._num_waits == 2:
            self._on_going_on()
        return is_over()


def test_ranks_that_were_stopped_and_go_on_still_report() -> None:
    """The leader's time was over when it went on; nobody had run in it."""
    reports = RankReports(Namespace(), 2, lambda end: None)  # type: ignore[arg-type]
    said = reports._digests
    stopped: Any = _Stopped(lambda: said.setdefault(7, {}).update({1: b"digest"}))
    reports._changed = stopped
    assert reports.wait_digests(7, timeout_s=STUCK_S) == {1: b"digest"}


def test_a_report_that_cannot_be_read_is_the_end_of_its_rank() -> None:
    """It would else be the end of the thread that notices deaths."""
    name = f"test-{uuid.uuid4().hex}"
    with PlanRing(name, 1, PATIENCE_S) as ring:
        accepting = threading.Thread(target=ring.accept, args=(PATIENCE_S,))
        accepting.start()
        reader = PlanRingReader(name, 0, PATIENCE_S, PATIENCE_S)
        accepting.join()
        reports = RankReports(ring, 2, lambda _: None)
        reports.start()
        reader.report(b"\xc1")
        end = reports.wait_end(PATIENCE_S)
        reader.close()
    assert end is not None
    assert end.rank == 1
    assert "cannot be taken" in end.reason

"""Passes of a model that drafts, led and followed among the steps; without a ring's memory."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest

from engine.plan import StepPlan, StepResult
from engine.ranks.following import Follower
from engine.ranks.leading import LeadingExecutor
from engine.ranks.rank_tasks import RankTasks
from engine.ranks.ring_messages import RankTask
from engine.ranks.step_counts import StepCounts


@dataclass
class Line:
    """Both ends of a ring: what one side writes the other one reads."""

    messages: deque[bytes] = field(default_factory=deque)

    def write(self, message: bytes) -> None:
        self.messages.append(message)

    def read(self, timeout_s: float | None = None) -> bytes:
        return self.messages.popleft()


@dataclass
class Noting:
    """An executor that takes notes; `name` says whose plans they are."""

    name: str
    events: list[str]
    max_in_flight: int = 2

    def launch(self, plan: StepPlan) -> "NotedStep":
        self.events.append(f"{self.name} {plan.step}")
        return NotedStep(f"{self.name} {plan.step}", plan.step, self.events)

    def give_drafts(self, place: int) -> None:
        self.events.append(f"give {place}")


@dataclass
class NotedStep:
    name: str
    step: int
    events: list[str]

    @property
    def is_done(self) -> bool:
        raise AssertionError("nobody asks")

    def wait(self) -> StepResult:
        self.events.append(f"wait {self.name}")
        return StepResult(step=self.step, tokens=[], logprobs=[], is_finite=[])


def _plan(step: int) -> StepPlan:
    return StepPlan(
        step=step,
        rows=[0],
        num_new_tokens=[1],
        num_computed_tokens=[0],
        num_samples=[1],
        new_block_ids=[[]],
    )


def _lead(line: Any, steps: StepCounts, events: list[str]) -> list[Any]:
    """A step, three passes, whose drafts are given, and the step after: all in flight."""
    leading = LeadingExecutor(
        Noting("step", events), line, None, compare_every=64, patience_s=1.0, steps=steps
    )  # type: ignore[arg-type]
    passes = leading.lead_drafts(Noting("pass", events, max_in_flight=4))
    launched: list[Any] = [leading.launch(_plan(0))]
    for number in range(3):
        launched.append(passes.launch(_plan(number)))
        passes.give_drafts(number)
    launched.append(leading.launch(_plan(1)))
    leading.stop()
    return launched


def test_a_follower_launches_passes_where_the_leader_does() -> None:
    line, ours, theirs = Line(), list[str](), list[str]()
    launched = _lead(line, StepCounts(), ours)
    follower: Any = line
    drafts = Noting("pass", theirs, max_in_flight=2)
    Follower(Noting("step", theirs), follower, print, drafts=drafts).run()
    assert [event for event in theirs if "wait" not in event] == ours
    # As many are in flight there, once the next one was launched.
    assert theirs.index("pass 2") < theirs.index("wait pass 0") < theirs.index("give 2")
    waited = [event for event in theirs if "wait" in event]
    assert waited == [f"wait {name}" for name in ours if "give" not in name]
    assert len(launched) == len(waited)


def test_a_follower_launches_a_step_before_it_takes_the_result_of_an_older_one() -> None:
    """That one has ended, and the device waits for the launch."""
    line, theirs = Line(), list[str]()
    leading = LeadingExecutor(Noting("step", []), line, None, compare_every=64, patience_s=1.0)  # type: ignore[arg-type]
    for number in range(4):
        leading.launch(_plan(number))
    leading.stop()
    follower: Any = line
    Follower(Noting("step", theirs), follower, print).run()
    launched = ["step 0", "step 1", "step 2", "wait step 0", "step 3", "wait step 1"]
    assert theirs == [*launched, "wait step 2", "wait step 3"]


@pytest.mark.parametrize(
    ("compare_every", "asked"),
    [(2, [[], [], [1], [1], [1, 3]]), (1, [[0], [0, 1], [0, 1, 2]])],
)
def test_ranks_are_asked_what_a_step_came_to_when_the_next_one_has_ended(
    compare_every: int, asked: list[list[int]]
) -> None:
    """Or at once where no result may be given out before."""
    of_steps: list[int] = []

    def wait_digests(step: int, timeout_s: float) -> dict[int, object]:
        of_steps.append(step)
        return {1: ANY}

    reports: Any = SimpleNamespace(wait_digests=wait_digests)
    leading = LeadingExecutor(
        Noting("step", []), Line(), reports, compare_every=compare_every, patience_s=1.0
    )  # type: ignore[arg-type]
    found = []
    for step in [leading.launch(_plan(number)) for number in range(len(asked))]:
        step.wait()
        found.append(list(of_steps))
    assert found == asked


def test_a_step_that_was_waited_for_has_ended_all_passes_before_it() -> None:
    """Whoever moves blocks waits until other ranks have ended as many."""
    steps = StepCounts()
    first, *passes, last = _lead(Line(), steps, [])
    assert (steps.num_launched, steps.num_ended) == (5, 0)
    first.wait()
    assert steps.num_ended == 1
    last.wait()
    assert steps.num_ended == 5
    passes[0].wait()  # its drafts were given, so nobody was in a hurry
    assert steps.num_ended == 5


def test_work_beside_steps_begins_once_the_steps_have_ended_that_the_leader_had_ended() -> None:
    """And before any step that the leader launches later."""
    line, steps, events = Line(), StepCounts(), list[str]()
    tasks = RankTasks(line.write, lambda number: [])
    leading = LeadingExecutor(
        Noting("step", []), line, None, compare_every=64, patience_s=1.0, steps=steps
    )  # type: ignore[arg-type]
    first, _ = leading.launch(_plan(0)), leading.launch(_plan(1))
    tasks.begin(b"at once", "host save", steps.num_ended)
    first.wait()
    tasks.begin(b"later", "host save", steps.num_ended)
    leading.launch(_plan(2))
    leading.stop()

    def begin(task: RankTask) -> None:
        events.append(task.work.decode())

    follower: Any = line
    Follower(Noting("step", events), follower, print, None, begin).run()
    assert events[:6] == ["step 0", "step 1", "at once", "wait step 0", "later", "step 2"]

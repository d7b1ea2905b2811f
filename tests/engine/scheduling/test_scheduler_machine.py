"""The scheduler under random histories, against an oracle that knows no scheduling; and proof that
the comparison can fail: each of a list of planted bugs must be found by the same machine, and by
the assertion that is there for it. All of it with one step at a time, and with the next one
launched before the last is waited for.
"""

from typing import Any

import msgspec
import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from configs.schema import LapsConfig
from engine.plan import StepResult
from engine.request import SamplingParams
from engine.scheduling.contracts import StepOutput
from engine.scheduling.drafting import Drafting
from engine.scheduling.finish import Ending, SampledTokens
from engine.scheduling.in_flight import StepInFlight
from engine.scheduling.scheduler import DEFAULT_LAPS, Scheduler
from engine.speculation.drafter import FixedDrafts
from tests.engine.scheduling import planted_bugs
from tests.engine.scheduling.world import BLOCK_SIZE, CONFIG, World
from tests.harness.drafters import DeviceGuesser
from tests.harness.fakes import VOCAB_SIZE

# One of few prompts for each length, so that prefixes are shared.
PROMPTS = st.builds(
    lambda length, bits: [1 + (bits >> (i // BLOCK_SIZE) & 1) for i in range(length)],
    st.one_of(st.integers(1, 14), st.integers(15, 39)),
    st.sampled_from([0, 0b10, 0b100, 0b1000]),
)
PARAMS = st.builds(SamplingParams, max_tokens=st.integers(1, 18), ignore_eos=st.booleans())
PICK = st.integers(0, 99)


class EveryRowInFull(SampledTokens):
    """What the scheduler does with tokens, without the short way for decodes that go on."""

    def append_all(
        self, step: StepInFlight, result: StepResult, output: StepOutput
    ) -> list[Ending]:
        return super().append_all(msgspec.structs.replace(step, num_decodes=0), result, output)


class SchedulerMachine(RuleBasedStateMachine):
    scheduler_class: type[Scheduler] = Scheduler
    overlap = False
    laps = DEFAULT_LAPS
    config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.world = self._build_world()
        self.history: list[tuple[str, dict[str, Any]]] = []
        self.is_sound = True

    def _build_world(self) -> World:
        return World(self.scheduler_class, overlap=self.overlap, laps=self.laps, config=self.config)

    def do(self, operation: str, **arguments: Any) -> None:
        self.history.append((operation, arguments))
        self.is_sound = False  # until the operation has ended without a complaint
        getattr(self.world, operation)(**arguments)
        self.world.check()
        self.is_sound = True

    @initialize(prompts=st.lists(PROMPTS, min_size=2, max_size=5), params=PARAMS)
    def start_busy(self, prompts: list[list[int]], params: SamplingParams) -> None:
        for prompt in prompts:
            self.do(
                "add",
                prompt=prompt,
                params=params,
                num_children=1,
                priority=0,
                patience_s=None,
                moves=False,
            )

    @rule(
        prompt=PROMPTS,
        params=PARAMS,
        num_children=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        patience_s=st.sampled_from([None, None, 0.5, 3.0]),
        moves=st.booleans(),
    )
    def add(self, **arguments: Any) -> None:
        self.do("add", **arguments)

    @precondition(lambda self: self.world.live("scheduler"))
    @rule(pick=PICK, fault=st.sampled_from(["abort", "migrate", "poison"]), delay=st.integers(0, 5))
    def disturb(self, pick: int, fault: str, delay: int) -> None:
        if fault == "poison":
            self.do("poison", pick=pick, num_ahead=delay)
        else:
            self.do(fault, pick=pick)

    @rule(num_blocks=st.integers(0, 9))
    def squeeze(self, num_blocks: int) -> None:
        self.do("squeeze", num_blocks=num_blocks)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0]))
    def wait(self, seconds: float) -> None:
        self.do("wait", seconds=seconds)

    @rule(
        num_steps=st.sampled_from([1, 2, 5, 12]),
        handoffs=st.sampled_from(["receive", "receive", "reserve", "give_up", None]),
    )
    def step(self, num_steps: int, handoffs: str | None) -> None:
        for _ in range(num_steps):
            self.do("step")
            if handoffs is not None and self.world.live("outbox"):
                self.do(handoffs, pick=num_steps)

    @precondition(lambda self: len(self.world.live("scheduler")) > 7)
    @rule()
    def drain(self) -> None:
        self.do("drain")

    def teardown(self) -> None:
        if not self.is_sound:
            return  # a second failure would hide the first
        self.do("drain")
        twin = self._build_world()
        twin.scheduler._sampled = EveryRowInFull(twin.scheduler._finish_rules)
        for operation, arguments in self.history:
            getattr(twin, operation)(**arguments)
        assert twin.executor.plans == self.world.executor.plans, "a twin planned otherwise"
        assert twin.outputs == self.world.outputs, "a twin answered otherwise"


class OverlappedMachine(SchedulerMachine):
    overlap = True


SHORT_FIRST = LapsConfig(
    queue="laps",
    laps_length_threshold=5,
    max_long_wait_s=0.5,
)


class SpeculatingMachine(OverlappedMachine):
    """Rows are planned before the drafts of their step in flight are judged, and others held."""

    config = msgspec.structs.replace(CONFIG, max_num_batched_tokens=9)

    def _build_world(self) -> World:
        guesser = DeviceGuesser(
            lambda _: [], vocab_size=VOCAB_SIZE, error_rate=0.3, silence_rate=0.1
        )
        return World(
            self.scheduler_class,
            overlap=True,
            config=self.config,
            drafting=Drafting(guesser, FixedDrafts(3), holds=True),
        )


class ExclusiveMachine(OverlappedMachine):
    laps = SHORT_FIRST


class FillMachine(OverlappedMachine):
    laps = msgspec.structs.replace(SHORT_FIRST, mix="fill")


# Short requests overtake, and long ones give way: most histories are short of rows and of blocks.
RESERVING = msgspec.structs.replace(CONFIG, max_num_seqs=3, short_share=0.3)


class ReservingMachine(OverlappedMachine):
    scheduler_class = planted_bugs.KeepsItsBounds
    laps = LapsConfig(laps_length_threshold=9)
    config = RESERVING


class ReservingShortFirstMachine(SchedulerMachine):
    scheduler_class = planted_bugs.KeepsItsBounds
    laps = SHORT_FIRST
    config = RESERVING


def test_a_handoff_may_be_over_before_its_retraction_is_answered() -> None:
    """One step preempts the prompt, finds all of it cached, and completes it."""
    machine = ReservingShortFirstMachine()
    prompts = [([1], 0), ([1], 0), ([1], 0), ([1] * 6, 0), ([1] * 38, 0), ([1] * 36, -1)]
    moving = [1] * 8 + [2] * 4 + [1] * 4

    def add(prompt: list[int], priority: int, *, moves: bool) -> None:
        params = SamplingParams(max_tokens=2 if moves else 1)
        machine.do(
            "add",
            prompt=prompt,
            params=params,
            num_children=1,
            priority=priority,
            patience_s=None,
            moves=moves,
        )

    for prompt, priority in prompts:
        add(prompt, priority, moves=False)
    machine.do("wait", seconds=0.1)
    add(moving, 0, moves=True)
    machine.do("wait", seconds=1.0)
    machine.do("drain")


SETTINGS = settings(
    deadline=None,
    database=None,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
MACHINES = (
    SchedulerMachine,
    OverlappedMachine,
    SpeculatingMachine,
    ExclusiveMachine,
    FillMachine,
    ReservingMachine,
    ReservingShortFirstMachine,
)
for _machine in MACHINES:
    _machine.TestCase.settings = settings(SETTINGS, max_examples=20)
WIDE = settings(SETTINGS, max_examples=2000)
TestSchedulerUnderRandomHistories = pytest.mark.slow(SchedulerMachine.TestCase)
TestOverlappedSchedulerUnderRandomHistories = pytest.mark.slow(OverlappedMachine.TestCase)
TestSpeculationUnderRandomHistories = pytest.mark.slow(SpeculatingMachine.TestCase)

TestShortFirstUnderRandomHistories = pytest.mark.slow(ExclusiveMachine.TestCase)
TestReserveUnderRandomHistories = pytest.mark.slow(ReservingMachine.TestCase)
TestReserveShortFirstUnderRandomHistories = pytest.mark.slow(ReservingShortFirstMachine.TestCase)
TestFilledStepsUnderRandomHistories = pytest.mark.slow(FillMachine.TestCase)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_scheduler_under_many_random_histories(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=WIDE)


def at_night(planted: type[Scheduler], named: str) -> ParameterSet:
    """A case of which some like it are tried by day."""
    return pytest.param(planted, named, marks=pytest.mark.nightly)


def _find(planted: type[Scheduler], machine: type[SchedulerMachine]) -> None:
    """Run the machine on a planted bug; the failure it meets is raised."""
    planted_machine = type("PlantedMachine", (machine,), {"scheduler_class": planted})
    # The first failure is enough (no shrinking), and it is the same on every day.
    options = settings(SETTINGS, max_examples=200, phases=[Phase.generate], derandomize=True)
    run_state_machine_as_test(planted_machine, settings=options)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [SchedulerMachine, OverlappedMachine])
@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (planted_bugs.AbortKeepsTheBlocks, "references, its owners"),
        at_night(planted_bugs.CountsOneBlockTooFew, "has no block"),
        at_night(
            planted_bugs.IndexesBeforeTheStepHasRun,
            "needs .* in block .*, finds Written|are indexed before their step",
        ),
        at_night(planted_bugs.CountsTokensAnewAfterPreemption, "TokenRecord.* after "),
        at_night(planted_bugs.TakesOneTokenMoreThanTheBudget, "the budget is 7"),
        at_night(planted_bugs.PreemptionKeepsTheProgress, "needs .* in block .*, finds Written"),
        at_night(planted_bugs.RowsAreLost, "rows: . free and . running"),
        at_night(planted_bugs.HitsTheWholePrompt, "computes what nobody knows"),
        at_night(planted_bugs.PoisonedBlocksAreNotZeroed, "holds NaN"),
        at_night(
            planted_bugs.PoisonedBlocksCanBeFound,
            "needs .* in block .*, finds Written|are indexed before their step",
        ),
        at_night(planted_bugs.AsksForASpareBlock, "nothing moves"),
        (planted_bugs.TwinsDecideDifferently, "a twin planned otherwise"),
        at_night(planted_bugs.PausesOneTokenTooSoon, r"is in \(prompts, decodes\)"),
        at_night(planted_bugs.WhoLeavesIsPlannedOn, "one that has left is planned on"),
        (planted_bugs.ADecodeThatEndsIsPassedOver, "named as gone"),
    ],
)
def test_the_machine_finds_a_planted_bug(
    planted: type[Scheduler], named: str, machine: type[SchedulerMachine]
) -> None:
    with pytest.raises(AssertionError, match=named):
        _find(planted, machine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "named"),
    [
        at_night(planted_bugs.WhoIsBackGivesWayAtOnce, "made . tokens"),
        (planted_bugs.TheFirstGivesWay, "was the first"),
    ],
)
def test_the_machine_finds_who_gives_way_beyond_its_bounds(
    planted: type[Scheduler], named: str
) -> None:
    with pytest.raises(AssertionError, match=named):
        _find(planted, ReservingMachine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (planted_bugs.EmitsTheTokenAfterTheLast, "of a request that is over"),
        at_night(planted_bugs.IndexesWhatIsStillInFlight, "are indexed before their step"),
        at_night(planted_bugs.PreemptsWithAStepInFlight, "are indexed before their step"),
        (planted_bugs.FreesBlocksOfAStepInFlight, "of a step in flight are available"),
        at_night(planted_bugs.FreesBlocksOfAStepInFlightTwice, "releasing block ., which is free"),
        at_night(planted_bugs.GoesOnPastItsLastToken, r"is in \(prompts, decodes\)"),
        at_night(planted_bugs.ZeroedBlocksAreFreeAtOnce, "references, its owners"),
        at_night(planted_bugs.AnnouncesWhatIsStillInFlight, "may be read, a step writes them"),
    ],
)
def test_the_machine_finds_a_bug_that_needs_a_step_in_flight(
    planted: type[Scheduler], named: str
) -> None:
    with pytest.raises(AssertionError, match=named):
        _find(planted, OverlappedMachine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "named"),
    [
        at_night(planted_bugs.TokensInFlightAreForgotten, "goes on at|computes what nobody knows"),
        (planted_bugs.WhoLeavesStaysAhead, "drafting remembers"),
    ],
)
def test_the_machine_finds_a_bug_of_rows_planned_ahead(
    planted: type[Scheduler], named: str
) -> None:
    with pytest.raises(AssertionError, match=named):
        _find(planted, SpeculatingMachine)

"""The scheduler under random histories, against an oracle that knows no scheduling; and proof that
the comparison can fail: each of a list of planted bugs must be found by the same machine. All of it
with one step at a time, and with the next one launched before the last is waited for.
"""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from configs.schema import SchedulerConfig
from engine.request import Request, RequestKey, SamplingParams
from engine.scheduling.contracts import StepOutput
from engine.scheduling.finish import FinishRules
from engine.scheduling.plan import StepPlan, TokenLogprobs
from engine.scheduling.request_blocks import RequestBlocks
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.steps_in_flight import StepsInFlight
from tests.engine.scheduling.world import BLOCK_SIZE, World

# One of few prompts for each length, so that prefixes are shared.
PROMPTS = st.builds(
    lambda length, bits: [1 + (bits >> (i // BLOCK_SIZE) & 1) for i in range(length)],
    st.one_of(st.integers(1, 14), st.integers(15, 39)),
    st.sampled_from([0, 0b10, 0b100, 0b1000]),
)
PARAMS = st.builds(SamplingParams, max_tokens=st.integers(1, 18), ignore_eos=st.booleans())
PICK = st.integers(0, 99)


class SchedulerMachine(RuleBasedStateMachine):
    scheduler_class: type[Scheduler] = Scheduler
    overlap = False

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.scheduler_class, overlap=self.overlap)
        self.history: list[tuple[str, dict[str, Any]]] = []
        self.is_sound = True

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
        twin = World(self.scheduler_class, overlap=self.overlap)
        for operation, arguments in self.history:
            getattr(twin, operation)(**arguments)
        assert twin.executor.plans == self.world.executor.plans


class OverlappedMachine(SchedulerMachine):
    overlap = True


# ---- planted bugs --------------------------------------------------------------------------------


class AbortKeepsTheBlocks(Scheduler):
    def abort(self, key: RequestKey) -> bool:
        requests = [r for r in self._all_requests() if r.key == key]
        for request in requests:
            self._cache._pool.acquire(request.block_ids)
        return super().abort(key)


class WithPlantedBlocks(Scheduler):
    """A scheduler whose `RequestBlocks` have the bug."""

    blocks_class: type[RequestBlocks]

    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._blocks = self.blocks_class(parts["cache"], parts["hasher"], parts["block_size"])


class CountsOneBlockTooFew(WithPlantedBlocks):
    class blocks_class(RequestBlocks):  # noqa: N801 - an attribute
        def num_missing(self, request: Request) -> int:
            return max(0, super().num_missing(request) - 1)


class IndexesBeforeTheStepHasRun(Scheduler):
    def _acquire_blocks(self, request: Request) -> bool:
        is_admitted = super()._acquire_blocks(request)
        if is_admitted:
            self._blocks.hash_full(request)
            for i in range(request.num_indexed_blocks, request.num_known_tokens // BLOCK_SIZE):
                parent = request.block_hashes[i - 1] if i else None
                self._cache.index(request.block_ids[i], request.block_hashes[i], parent)
        return is_admitted


class CountsTokensAnewAfterPreemption(Scheduler):
    def _append(
        self,
        request: Request,
        token_id: int,
        logprobs: TokenLogprobs | None,
        output: StepOutput,
    ) -> None:
        super()._append(request, token_id, logprobs, output)
        ingress_id, record = output.tokens[-1]
        if request.num_preemptions > 0:
            output.tokens[-1] = ingress_id, msgspec.structs.replace(record, index=record.index + 1)


class TakesOneTokenMoreThanTheBudget(Scheduler):
    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        generous = msgspec.structs.replace(config, max_step_tokens=config.max_step_tokens + 1)
        super().__init__(generous, **parts)


class PreemptionKeepsTheProgress(Scheduler):
    def _preempt(self, request: Request) -> None:
        num_computed_tokens = request.num_computed_tokens
        super()._preempt(request)
        request.num_computed_tokens = num_computed_tokens

    def _acquire_blocks(self, request: Request) -> bool:
        num_computed_tokens = request.num_computed_tokens
        is_admitted = super()._acquire_blocks(request)
        request.num_computed_tokens = max(num_computed_tokens, request.num_computed_tokens)
        return is_admitted


class RowsAreLost(Scheduler):
    def _unseat(self, request: Request) -> None:
        del self._running[request.key]
        request.row = None


class HitsTheWholePrompt(Scheduler):
    def _acquire_blocks(self, request: Request) -> bool:
        request.tokens.append(0)
        is_admitted = super()._acquire_blocks(request)
        request.tokens.pop()
        return is_admitted


class PoisonedBlocksAreNotZeroed(Scheduler):
    def plan(self, now_s: float) -> StepPlan | None:
        self._cache.release(self._blocks.take_poisoned())
        return super().plan(now_s)


class PoisonedBlocksCanBeFound(Scheduler):
    def _end_as_poisoned(self, request: Request, output: StepOutput) -> None:
        super()._end_as_poisoned(request, output)
        poisoned = self._blocks.poisoned_block_ids
        for i, block_id in enumerate(poisoned[: len(request.block_hashes)]):
            parent = request.block_hashes[i - 1] if i else None
            self._cache.index(block_id, request.block_hashes[i], parent)


class AsksForASpareBlock(Scheduler):
    def _acquire_blocks(self, request: Request) -> bool:
        num_blocks = -(-request.num_known_tokens // BLOCK_SIZE)
        is_last = num_blocks == self._cache.num_blocks
        return not is_last and super()._acquire_blocks(request)


class TwinsDecideDifferently(Scheduler):
    """As if an order came from a set or from addresses: every other instance turns it round."""

    num_built = 0

    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        type(self).num_built += 1
        self._turns_round = self.num_built % 2 == 0

    def plan(self, now_s: float) -> StepPlan | None:
        if self._turns_round:
            self._running = dict(reversed(self._running.items()))
        return super().plan(now_s)


# ---- planted bugs that need a step in flight -----------------------------------------------------


class EmitsTheTokenAfterTheLast(Scheduler):
    """What comes for a request that has left is not dropped."""

    def _has_left(self, request: Request) -> bool:
        return False

    def _unseat(self, request: Request) -> None:
        self._running[request.key] = request
        super()._unseat(request)


class IndexesWhatIsStillInFlight(WithPlantedBlocks):
    class blocks_class(RequestBlocks):  # noqa: N801 - an attribute
        def index_full(self, request: Request, num_computed_tokens: int) -> None:
            num_tokens = min(request.num_computed_tokens, request.num_known_tokens)
            super().index_full(request, num_tokens)


class PreemptsWithAStepInFlight(Scheduler):
    """And takes a request that is back in a row for the one that the step computed."""

    def _grow_rows(self, runnable: list[Request]) -> dict[int, list[int]] | None:
        in_flight, self._in_flight = self._in_flight, StepsInFlight()
        grown = super()._grow_rows(runnable)
        self._in_flight = in_flight
        return grown


class FreesBlocksOfAStepInFlight(Scheduler):
    def _leave(self, request: Request) -> None:
        in_flight, self._in_flight = self._in_flight, StepsInFlight()
        super()._leave(request)
        self._in_flight = in_flight


class FreesBlocksOfAStepInFlightTwice(Scheduler):
    def _leave(self, request: Request) -> None:
        block_ids = list(request.block_ids)
        super()._leave(request)
        self._cache.release(block_ids)


class GoesOnPastItsLastToken(Scheduler):
    def __init__(self, config: SchedulerConfig, **parts: Any) -> None:
        super().__init__(config, **parts)

        class Rules(FinishRules):
            def can_go_on(self, request: Request) -> bool:
                return True

        self._finish_rules = Rules(parts["eos_token_ids"], parts["max_model_len"])


class ZeroedBlocksAreFreeAtOnce(WithPlantedBlocks):
    class blocks_class(RequestBlocks):  # noqa: N801 - an attribute
        def take_poisoned(self) -> list[int]:
            block_ids = super().take_poisoned()
            self._cache.release(block_ids)
            return block_ids


SETTINGS = settings(
    deadline=None,
    database=None,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
SchedulerMachine.TestCase.settings = settings(SETTINGS, max_examples=100)
OverlappedMachine.TestCase.settings = settings(SETTINGS, max_examples=100)
TestSchedulerUnderRandomHistories = pytest.mark.slow(SchedulerMachine.TestCase)
TestOverlappedSchedulerUnderRandomHistories = pytest.mark.slow(OverlappedMachine.TestCase)


def _find(planted: type[Scheduler], machine: type[SchedulerMachine]) -> None:
    """Run the machine on a planted bug; the failure it meets is raised."""
    planted_machine = type("PlantedMachine", (machine,), {"scheduler_class": planted})
    # The first failure is enough (no shrinking), and it is the same on every day.
    options = settings(SETTINGS, max_examples=200, phases=[Phase.generate], derandomize=True)
    run_state_machine_as_test(planted_machine, settings=options)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [SchedulerMachine, OverlappedMachine])
@pytest.mark.parametrize(
    "planted",
    [
        AbortKeepsTheBlocks,
        CountsOneBlockTooFew,
        IndexesBeforeTheStepHasRun,
        CountsTokensAnewAfterPreemption,
        TakesOneTokenMoreThanTheBudget,
        PreemptionKeepsTheProgress,
        RowsAreLost,
        HitsTheWholePrompt,
        PoisonedBlocksAreNotZeroed,
        PoisonedBlocksCanBeFound,
        AsksForASpareBlock,
        TwinsDecideDifferently,
    ],
)
def test_the_machine_finds_a_planted_bug(
    planted: type[Scheduler], machine: type[SchedulerMachine]
) -> None:
    with pytest.raises(AssertionError):
        _find(planted, machine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "planted",
    [
        EmitsTheTokenAfterTheLast,
        IndexesWhatIsStillInFlight,
        PreemptsWithAStepInFlight,
        FreesBlocksOfAStepInFlight,
        FreesBlocksOfAStepInFlightTwice,
        GoesOnPastItsLastToken,
        ZeroedBlocksAreFreeAtOnce,
    ],
)
def test_the_machine_finds_a_bug_that_needs_a_step_in_flight(planted: type[Scheduler]) -> None:
    with pytest.raises(AssertionError):
        _find(planted, OverlappedMachine)

"""The scheduler under random histories, against an oracle that knows no scheduling; and proof that
the comparison can fail: each of a list of planted bugs must be found by the same machine.
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
from engine.scheduling.plan import StepPlan, TokenLogprobs
from engine.scheduling.scheduler import Scheduler
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

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.scheduler_class)
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
        twin = World(self.scheduler_class)
        for operation, arguments in self.history:
            getattr(twin, operation)(**arguments)
        assert twin.executor.plans == self.world.executor.plans


# ---- planted bugs --------------------------------------------------------------------------------


class AbortKeepsTheBlocks(Scheduler):
    def abort(self, key: RequestKey) -> bool:
        requests = [r for r in self._all_requests() if r.key == key]
        for request in requests:
            self._cache._pool.acquire(request.block_ids)
        return super().abort(key)


class CountsOneBlockTooFew(Scheduler):
    def _num_missing_blocks(self, request: Request) -> int:
        return max(0, super()._num_missing_blocks(request) - 1)


class IndexesBeforeTheStepHasRun(Scheduler):
    def _acquire_blocks(self, request: Request) -> bool:
        is_admitted = super()._acquire_blocks(request)
        if is_admitted:
            self._hasher.extend(request)
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
        self._cache.release(self._poisoned_block_ids)
        self._poisoned_block_ids = []
        return super().plan(now_s)


class PoisonedBlocksCanBeFound(Scheduler):
    def _end_as_poisoned(self, request: Request, output: StepOutput) -> None:
        super()._end_as_poisoned(request, output)
        for i, block_id in enumerate(self._poisoned_block_ids[: len(request.block_hashes)]):
            parent = request.block_hashes[i - 1] if i else None
            self._cache.index(block_id, request.block_hashes[i], parent)


class AsksForASpareBlock(Scheduler):
    def _acquire_blocks(self, request: Request) -> bool:
        is_last = self._num_blocks_for(request.num_known_tokens) == self._cache.num_blocks
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


SETTINGS = settings(
    deadline=None,
    database=None,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
SchedulerMachine.TestCase.settings = settings(SETTINGS, max_examples=100)
TestSchedulerUnderRandomHistories = pytest.mark.slow(SchedulerMachine.TestCase)


@pytest.mark.slow
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
def test_the_machine_finds_a_planted_bug(planted: type[Scheduler]) -> None:
    machine = type("PlantedMachine", (SchedulerMachine,), {"scheduler_class": planted})
    # The first failure is enough (no shrinking), and it is the same on every day.
    options = settings(SETTINGS, max_examples=200, phases=[Phase.generate], derandomize=True)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=options)

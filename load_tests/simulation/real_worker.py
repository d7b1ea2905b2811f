"""The whole scheduler on a virtual clock: the truth that the light worker is held against.

Every step is planned and committed by `engine.scheduling.scheduler.Scheduler` over a `BlockCache`,
decodes one by one. Tokens have no meaning, and nothing is cached for later prompts.
"""

import math
from collections import deque
from dataclasses import dataclass

from configs.resolved import ResolvedScheduler
from engine.kv.cache import BlockCache
from engine.plan import StepPlan, StepResult
from engine.request import Request, RequestKey
from engine.scheduling.contracts import StepOutput
from engine.scheduling.finish import FinishRules
from engine.scheduling.scheduler import Scheduler
from load_tests.simulation.worker import Load, Outcome, WorkerSpec

BLOCK_SIZE = 16  # tokens
ANY_TOKEN_ID = 7


@dataclass(slots=True)
class HandoffSink:
    """Takes prompts whose KV belongs elsewhere, and gives their blocks up at once."""

    cache: BlockCache
    num_unreserved_blocks: int = 0

    def start(self, request: Request) -> None:
        """Room elsewhere is none of this worker's business."""

    def advance(self, request: Request) -> None:
        """Blocks that move before the last one cost nothing here."""

    def retract(self, key: RequestKey) -> None:
        """Likewise."""

    def add(self, request: Request) -> None:
        self.cache.release(request.block_ids)
        request.block_ids = []

    def drop(self, key: RequestKey) -> None:
        """Nothing is kept here."""


class NoHasher:
    """Nothing is found again, so nothing has a name."""

    def extend(self, request: Request) -> None:
        raise AssertionError(f"{request.key} is hashed without a prefix cache")


class RealWorker:
    """A `Worker` that is the engine's scheduler, with costs instead of a device."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        num_blocks = spec.max_kv_tokens // BLOCK_SIZE
        cache = BlockCache(num_blocks, enable_prefix_caching=False, protected_share=0.5)
        self._scheduler = Scheduler(
            ResolvedScheduler(
                max_num_batched_tokens=spec.max_num_batched_tokens,
                max_num_seqs=spec.max_rows,
                max_waiting=10**6,
                short_share=spec.short_share,
            ),
            cache=cache,
            hasher=NoHasher(),
            handoff_queue=HandoffSink(cache),
            block_size=BLOCK_SIZE,
            finish_rules=FinishRules((), num_blocks * BLOCK_SIZE),
            laps=spec.laps,
            graph_token_sizes=spec.graph_token_sizes,
        )
        # The engine fits these to its steps; here they are known.
        self._scheduler._prompts.model.costs = spec.known_costs
        self._requests: dict[RequestKey, Request] = {}
        self._in_flight: deque[tuple[StepPlan, float]] = deque()  # with the time of its end
        self.num_step_tokens = 0  # computed in all steps
        self._is_idle = True
        self._has_ended = False  # a step did, since the last plan
        self._due_s = math.inf  # when the next step is to be planned; commits may come before
        self.next_plan_s = math.inf

    def add(self, request: Request, now_s: float) -> None:
        """A prompt arrives."""
        if not self._spec.keeps_decodes:
            request.decode_worker = "another"
        self._requests[request.key] = request
        self._scheduler.add(request)
        if self._is_idle:
            self._is_idle = False
            self._due_s = self.next_plan_s = now_s

    def plan(self, now_s: float) -> Outcome:
        """Commit what ended, then plan the next step if that is due."""
        outcome = Outcome()
        while self._in_flight and self._in_flight[0][1] <= now_s:
            plan, end_s = self._in_flight.popleft()
            self._tell(self._scheduler.commit(plan, result_of(plan)), end_s, outcome)
            self._has_ended = True
        if now_s >= self._due_s:
            if self._has_ended and self._spec.predicts:  # told with the next plan, as over there
                outcome.load = self.load()
            self._has_ended = False
            self._plan_step(now_s)
        end_s = self._in_flight[0][1] if self._in_flight else math.inf
        self.next_plan_s = min(self._due_s, end_s)
        return outcome

    def _plan_step(self, now_s: float) -> None:
        self._is_idle = False
        free_s = self._in_flight[-1][1] if self._in_flight else -math.inf
        next_plan = self._scheduler.plan(now_s)
        if next_plan is not None:
            self.num_step_tokens += next_plan.num_tokens
            start_s = max(now_s + self._spec.host_s, free_s)
            end_s = start_s + self._scheduler.newest_step_s
            self._in_flight.append((next_plan, end_s))
            self._due_s = self._spec.plan_s(start_s, end_s)
        elif self._in_flight:
            self._due_s = free_s
        else:
            self._is_idle = True
            until_s = self._scheduler.deferred_until_s
            self._due_s = math.inf if until_s is None else until_s

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.statistics().num_preemptions

    def load(self) -> Load:
        """Walks the queue."""
        counts = self._scheduler.statistics()
        queued = self._scheduler.queued_work()
        return Load(counts.num_queued_tokens, counts.num_waiting, queued)

    def _tell(self, output: StepOutput, end_s: float, outcome: Outcome) -> None:
        assert not output.failures, f"{output.failures}"
        for _, record in output.tokens:
            if record.index == 0:
                outcome.first_tokens.append((self._requests[record.key], end_s))
        for key in output.left:
            outcome.finished.append((self._requests.pop(key), end_s))


def result_of(plan: StepPlan) -> StepResult:
    """Every row that samples draws the same token."""
    return StepResult(
        step=plan.step,
        tokens=[[ANY_TOKEN_ID] if samples else [] for samples in plan.num_samples],
        logprobs=[None] * len(plan.rows),
        is_finite=[True] * len(plan.rows),
    )

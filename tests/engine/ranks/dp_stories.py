"""Engines of exact models with DP attention: the first rank schedules for all, by the real ring.

Other processes import this file, which is why it leaves out what takes seconds: transformers.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from configs.schema import SchedulerConfig
from engine.clock import MonotonicClock
from engine.core import EngineCore, Executor, PendingStep, StepScheduler
from engine.kv.cache import BlockCache, check_blocks
from engine.kv.hashes import RequestHasher
from engine.kv.rank_caches import RankCaches
from engine.layers.context import SINGLE_RANK, Comm
from engine.messages import FailureRecord, TokenRecord
from engine.models.registry import AS_PUBLISHED, WeightSource, build_model
from engine.plan import StepPlan, empty_plan
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.runner import executor as runner
from engine.runner.executor_options import ExecutorOptions
from engine.runner.graph_sizes import ragged_sizes, verify_sizes
from engine.runner.overlap.rule import OverlapRule
from engine.sampling.sampler import Sampler
from engine.scheduling.dp_scheduler import DpScheduler
from engine.scheduling.drafting import Drafting
from engine.scheduling.finish import FinishRules
from engine.scheduling.scheduler import Scheduler
from engine.speculation.drafter import Drafter, FixedDrafts
from tests.engine.ranks.exact_models import build_exact
from tests.engine.runner.graph_story import RerunRecorder
from tests.engine.runner.step_driver import StepDriver
from tests.harness.fakes import RecordingHandoffQueue
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import RankProcesses

DP_ATTENTION = WeightSource(sharing="dp_attention")
BLOCK_SIZE = 4
NUM_BLOCKS = 24
MAX_ROWS = 4
MAX_TOKENS = 16  # of a step
MAX_MODEL_LEN = 80
MAX_DRAFTS = 3
EVERY_STEP = OverlapRule(min_prompt_tokens=2, min_decode_rows=2)
_numbers = itertools.count()


def build_executor(
    comm: Comm,
    folder: Path,
    source: WeightSource,
    *,
    captures: bool,
    captures_prompts: bool = False,
    captures_drafts: bool = False,
    overlaps: bool = False,
) -> runner.Executor:
    """captures_prompts: and shared experts are computed in a stream of their own.

    overlaps: every step that can be is computed as two batches. Rows may have drafts.
    """
    model, attention = build_exact(folder, comm.rank, captures=captures, source=source)
    spec = model.spec
    executor = runner.Executor(
        model,
        layout=spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32"),
        num_blocks=NUM_BLOCKS,
        max_rows=MAX_ROWS,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_TOKENS,
        sampler=Sampler(spec.vocab_size, MAX_ROWS, spec.eos_token_ids, model.device),
        attention=attention,
        options=ExecutorOptions(
            max_drafts=MAX_DRAFTS, second_stream_tokens=MAX_TOKENS if captures_prompts else 0
        ),
        comm=comm,
    )
    if overlaps:
        executor.overlap_two_batches(EVERY_STEP, threshold=0.48)
    if captures:
        prompts = ragged_sizes(MAX_ROWS, MAX_TOKENS) if captures_prompts else None
        drafts = verify_sizes(MAX_ROWS, MAX_TOKENS) if captures_drafts else []
        executor.capture_graphs(RerunRecorder(), lambda _: None, prompts=prompts, verify=drafts)
    if captures and overlaps:
        given = RerunRecorder(), lambda _: None
        executor.capture_split_decodes(*given, min_rows=2)
        executor.capture_split_verification(*given, min_tokens=2)
    return executor


class _Recorded:
    """An executor that keeps the plans."""

    def __init__(self, executor: Executor, plans: list[StepPlan]) -> None:
        self._executor, self._plans = executor, plans

    def launch(self, plan: StepPlan) -> PendingStep:
        self._plans.append(plan)
        return self._executor.launch(plan)


class ExactEngine:
    """A step loop over an exact model, whose books are checked after every step."""

    def __init__(
        self,
        executor: Executor,
        caches: Sequence[BlockCache],
        schedulers: Sequence[Scheduler],
        hasher: RequestHasher,
        *,
        overlap: bool,
    ) -> None:
        """With several schedulers, one for each rank."""
        self.caches = RankCaches(caches)
        self.schedulers = schedulers
        self.scheduler: StepScheduler = schedulers[0]
        if len(schedulers) > 1:
            self.scheduler = DpScheduler(schedulers, self.caches, hasher, BLOCK_SIZE)
        self.plans: list[StepPlan] = []
        self.core = EngineCore(
            self.scheduler, _Recorded(executor, self.plans), MonotonicClock(), overlap=overlap
        )
        self.records: dict[RequestKey, list[TokenRecord]] = {}
        self.failures: list[FailureRecord] = []

    def request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        key = RequestKey(f"{next(_numbers):032x}")
        self.records[key] = []
        return Request(
            spec=RequestSpec(params=params),
            key=key,
            ingress_id="test",
            tokens=list(prompt),
            num_prompt_tokens=len(prompt),
            arrival_s=MonotonicClock().now_s(),
        )

    def add(
        self, prompt: Sequence[int], params: SamplingParams, rank: int | None = None
    ) -> RequestKey:
        """rank: None = where the scheduler puts it."""
        request = self.request(prompt, params)
        (self.scheduler if rank is None else self.schedulers[rank]).add(request)
        return request.key

    def step(self) -> None:
        output = self.core.step()
        for _, record in output.tokens:
            self.records[record.key].append(record)
        self.failures += [failure for _, failure in output.failures]
        owners = self.scheduler.owners()
        if len(self.schedulers) == 1:
            check_blocks(self.caches.of_rank[0], owners)
        else:
            check_blocks(self.caches, owners)

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def tokens(self, key: RequestKey) -> list[int]:
        found = self.records[key]
        assert [record.index for record in found] == list(range(len(found)))
        return [record.token_id for record in found]


def _books(
    num_ranks: int, drafting: Drafting | None = None
) -> tuple[list[BlockCache], list[Scheduler], RequestHasher]:
    caches = [
        BlockCache(NUM_BLOCKS, enable_prefix_caching=True, protected_share=0.5)
        for _ in range(num_ranks)
    ]
    hasher = RequestHasher(bytes(range(16)), model="m", dtype="float32", block_size=BLOCK_SIZE)
    limits = SchedulerConfig(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_ROWS)
    schedulers = [
        Scheduler(
            limits,
            cache=cache,
            hasher=hasher,
            handoff_queue=RecordingHandoffQueue(),
            block_size=BLOCK_SIZE,
            finish_rules=FinishRules((), MAX_MODEL_LEN),
            drafting=drafting,
        )
        for cache in caches
    ]
    return caches, schedulers, hasher


def engine_of_one_rank(folder: Path) -> ExactEngine:
    executor = build_executor(SINGLE_RANK, folder, AS_PUBLISHED, captures=False)
    return ExactEngine(executor, *_books(1), overlap=False)


class DpEngine(LedRanks):
    """The engine of `ranks`, for as long as the context is open."""

    def __init__(
        self,
        ranks: RankProcesses,
        folder: Path,
        *,
        captures: bool = False,
        captures_prompts: bool = False,
        captures_drafts: bool = False,
        overlap: bool = False,
        overlaps: bool = False,
        fault: str | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """overlap: steps are launched ahead. overlaps: as of `build_executor`.

        fault: a mistake of the other ranks, see `planted`.
        """
        captures = captures or captures_prompts or captures_drafts
        given = folder, captures, captures_prompts, captures_drafts, overlaps
        super().__init__(ranks, _build_exact, *given, is_exact=True, fault=fault)
        self.engine: ExactEngine
        self.executor: runner.Executor
        self._build = partial(_build_exact, ranks.comm, *given)
        self._overlap = overlap
        policy = None if drafter is None else FixedDrafts(MAX_DRAFTS)
        self._drafting = Drafting(drafter, policy, holds=overlap)

    def __enter__(self) -> Self:
        super().__enter__()
        size = self.ranks.comm.rank.size
        self.executor = self._build()
        leading = self.lead(self.executor)
        books = _books(size, self._drafting)
        self.engine = ExactEngine(leading, *books, overlap=self._overlap)
        return self


def _build_exact(
    comm: Comm,
    folder: Path,
    captures: bool,
    captures_prompts: bool,
    captures_drafts: bool,
    overlaps: bool,
) -> runner.Executor:
    return build_executor(
        comm,
        folder,
        DP_ATTENTION,
        captures=captures,
        captures_prompts=captures_prompts,
        captures_drafts=captures_drafts,
        overlaps=overlaps,
    )


def logits_of_halves(comm: Comm, folder: Path, overlaps: bool) -> list[Tensor]:
    """Of steps with prompts and of decodes, where ranks have other rows; in real numbers."""
    device = torch.device("cpu")
    own = comm.rank
    model = build_model(folder, dtype=torch.float32, device=device, rank=own, source=DP_ATTENTION)
    drivers = [StepDriver(model, seed=2, comm=comm) for _ in range(2)]
    ours = drivers[own.index].executor  # the others only make plans
    if overlaps:
        ours.overlap_two_batches(EVERY_STEP, threshold=0.48)
    for rank, lengths in enumerate(((9, 50, 2, 1), (31,))):
        for row, length in enumerate(lengths):
            drivers[rank].admit(row, [(5 * place + row) % 130 for place in range(length)])
    found = []
    steps: tuple[tuple[dict[int, int], dict[int, int]], ...] = (
        ({0: 8, 1: 30}, {0: 29}),
        ({1: 19, 2: 1, 3: 1}, {0: 1}),
        ({0: 1, 1: 1}, {0: 1}),
    )
    for first, second in steps:
        plans = [driver.plan(new) for driver, new in zip(drivers, (first, second), strict=True)]
        found.append(ours.forward_logits(empty_plan(0, plans), of_all_tokens=True))
    counts = ours.statistics().two_batches
    assert counts is None or (counts.num_split_prompts, counts.num_split_decodes) == (2, 1)
    return found

"""What scheduling costs the host: plan, commit and encoding of decode steps, without a device.

    python -m load_tests.lab.bench_scheduler
    python -m load_tests.lab.bench_scheduler --rows 32 --prompt-tokens 1024 --no-prefix-cache
    python -m load_tests.lab.bench_scheduler --drafts 4

All rows decode together, and each step is planned before the one in front of it is committed, as an
engine with overlap does. Tokens come from nowhere, so only the host's work is timed. --drafts: each
row has so many in every step, as `speculation.ngrams_on_device` has it, and all are accepted.
"""

import argparse
import gc
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise

from configs.resolved import ResolvedScheduler
from engine.kv.cache import BlockCache
from engine.kv.hashes import RequestHasher
from engine.messages import LoadReport, StepMessage, TokenRecord, encode
from engine.plan import StepPlan, StepResult
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.contracts import SchedulerStatistics
from engine.scheduling.drafting import Drafting
from engine.scheduling.finish import FinishRules
from engine.scheduling.scheduler import Scheduler
from engine.speculation.controller import SpeculationController
from engine.speculation.drafter import RequestNgrams
from engine.speculation.rules import SpeculationRules
from load_tests.tables import Figure, describe_machine, median_figure, render

EOS_TOKEN_ID, DRAWN_TOKEN_ID = 151_645, 7
# The prompts, the first step in which every row decodes, and those that show what drafts are worth.
NUM_WARM_UP_STEPS = 8
STEP_S = 0.01  # of any step, so that drafts cost nothing and all are worth having


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What decodes, and for how long."""

    num_rows: int
    num_prompt_tokens: int  # of the shortest; the others have up to a block more
    num_steps: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    num_drafts: int = 0  # of each row in each step

    @property
    def max_model_len(self) -> int:
        """Room for every row until the last step, and for one more block."""
        num_steps = self.num_steps + NUM_WARM_UP_STEPS
        return self.num_prompt_tokens + num_steps * (1 + self.num_drafts) + 2 * self.block_size


@dataclass(frozen=True, slots=True)
class Durations:
    """In microseconds: entering of all rows, then the parts of every step."""

    add_us: list[float] = field(default_factory=list)
    plan_us: list[float] = field(default_factory=list)
    commit_us: list[float] = field(default_factory=list)
    report_us: list[float] = field(default_factory=list)
    encode_us: list[float] = field(default_factory=list)
    settle_us: list[float] = field(default_factory=list)

    @property
    def of_step(self) -> tuple[list[float], ...]:
        """The parts of a step, in their order."""
        return self.plan_us, self.commit_us, self.report_us, self.encode_us, self.settle_us

    def figures(self) -> list[Figure]:
        """One line a part, and their sum in a step."""
        names = "plan", "commit", "report", "encode", "settle"
        parts = dict(zip(names, self.of_step, strict=True))
        sums_us = [sum(step) for step in zip(*self.of_step, strict=True)]
        return [
            *(median_figure(name, part_us, "us/step") for name, part_us in parts.items()),
            median_figure("sum of these", sums_us, "us/step"),
            median_figure("add", self.add_us, "us/request"),
        ]


class Bench:
    """One scheduler with a row and blocks for every request, and a step in flight."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._scheduler = _build_scheduler(batch)
        self._rng = random.Random(0)

    def run(self) -> Durations:
        """Time `num_steps` steps of all rows, after the warm-up and without older garbage."""
        durations = Durations()
        for i in range(self._batch.num_rows):
            request = self._request(i)
            start_s = time.thread_time()
            self._scheduler.add(request)
            durations.add_us.append(1e6 * (time.thread_time() - start_s))
        in_flight = self._plan()
        for _ in range(NUM_WARM_UP_STEPS):
            in_flight = self._step(in_flight, None)
        gc.collect()
        for _ in range(self._batch.num_steps):
            in_flight = self._step(in_flight, durations)
        return durations

    def _step(self, in_flight: StepPlan, durations: Durations | None) -> StepPlan:
        """Plan a step, settle the one `in_flight`, and say what came of it; returns the plan.

        durations: gets its parts; None = the step is not timed and need not have all rows.
        """
        result = _result_of(in_flight)
        times_s = [time.thread_time()]
        plan = self._scheduler.plan(0.0)
        times_s.append(time.thread_time())
        output = self._scheduler.commit(in_flight, result)
        times_s.append(time.thread_time())
        counts = self._scheduler.statistics()
        times_s.append(time.thread_time())
        encode(step_message([record for _, record in output.tokens], counts))
        times_s.append(time.thread_time())
        self._scheduler.settle_drafts()
        times_s.append(time.thread_time())
        if durations is not None:
            for part_us, (start_s, end_s) in zip(durations.of_step, pairwise(times_s), strict=True):
                part_us.append(1e6 * (end_s - start_s))
            num_tokens = len(output.tokens)
            num_due = self._batch.num_rows * (1 + self._batch.num_drafts)
            assert num_tokens == num_due, f"a step of {num_tokens} tokens, {num_due} are due"
        return self._plan() if plan is None else plan  # all rows were held for their first drafts

    def _plan(self) -> StepPlan:
        plan = self._scheduler.plan(0.0)
        assert plan is not None, "nothing could run"
        return plan

    def _request(self, index: int) -> Request:
        """Rows reach the ends of blocks one after the other, not all in the same step."""
        num_tokens = self._batch.num_prompt_tokens + index % self._batch.block_size
        return Request(
            spec=RequestSpec(
                params=SamplingParams(max_tokens=self._batch.max_model_len, temperature=0.0)
            ),
            key=RequestKey(f"{index:032x}"),
            ingress_id="ingress",
            tokens=self._rng.choices(range(EOS_TOKEN_ID), k=num_tokens - 3) + [DRAWN_TOKEN_ID] * 3,
            num_prompt_tokens=num_tokens,
            arrival_s=0.0,
        )


def _build_scheduler(batch: Batch) -> Scheduler:
    max_blocks_per_row = batch.max_model_len // batch.block_size + 1
    return Scheduler(
        ResolvedScheduler(
            # All prompts in one step, and all drafts.
            max_num_batched_tokens=batch.num_rows * batch.max_model_len,
            max_num_seqs=batch.num_rows,
            max_waiting=batch.num_rows,
        ),
        cache=BlockCache(
            # More than they need: drafts leave the share of short requests alone.
            2 * batch.num_rows * max_blocks_per_row,
            enable_prefix_caching=batch.enable_prefix_caching,
            protected_share=0.5,
        ),
        hasher=RequestHasher(
            bytes(range(32)), model="m", dtype="bfloat16", block_size=batch.block_size
        ),
        handoff_queue=_NoHandoffs(),
        block_size=batch.block_size,
        finish_rules=FinishRules((EOS_TOKEN_ID,), batch.max_model_len),
        drafting=_build_drafting(batch.num_drafts),
    )


def _build_drafting(num_drafts: int) -> Drafting | None:
    if num_drafts == 0:
        return None
    rules = SpeculationRules(max_drafts=num_drafts, first_drafts=num_drafts)
    return Drafting(RequestNgrams(on_device=True), SpeculationController(rules))


class _NoHandoffs:
    """For requests that stay."""

    num_unreserved_blocks = 0

    def start(self, request: Request) -> None:
        raise AssertionError(f"{request.key} stays")

    def advance(self, request: Request) -> None:
        """What stays has nothing to send."""

    def retract(self, key: RequestKey) -> None:
        """Likewise."""

    def add(self, request: Request) -> None:
        raise AssertionError(f"{request.key} stays")

    def drop(self, key: RequestKey) -> None:
        raise AssertionError(f"{key} stays")


def _result_of(plan: StepPlan) -> StepResult:
    """Every row that samples draws the same token, also after each of its drafts."""
    return StepResult(
        step=plan.step,
        tokens=[[DRAWN_TOKEN_ID] * num_samples for num_samples in plan.num_samples],
        duration_s=STEP_S,
        logprobs=[None] * len(plan.rows),
        is_finite=[True] * len(plan.rows),
    )


def step_message(tokens: list[TokenRecord], counts: SchedulerStatistics) -> StepMessage:
    load = LoadReport(
        queued_tokens=counts.num_queued_tokens,
        num_waiting=counts.num_waiting,
        num_running=counts.num_running,
        num_free_blocks=0,
        num_blocks=0,
    )
    return StepMessage(worker="w", incarnation="0", step_seq=0, load=load, tokens=tokens)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--drafts", type=int, default=0, help="of each row in each step")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    batch = Batch(
        num_rows=args.rows,
        num_prompt_tokens=args.prompt_tokens,
        num_steps=args.steps,
        block_size=args.block_size,
        enable_prefix_caching=not args.no_prefix_cache,
        num_drafts=args.drafts,
    )
    print(render(Bench(batch).run().figures()))
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))


if __name__ == "__main__":
    main()

"""One replica around a scheduler, without a model: adds requests, steps, and keeps the answers."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from configs.schema import LapsConfig, SchedulerConfig
from engine.clock import ManualClock
from engine.core import EngineCore
from engine.kv.cache import BlockCache, check_blocks
from engine.kv.hashes import RequestHasher
from engine.messages import FailureRecord, TokenRecord
from engine.plan import StepPlan
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.contracts import StepOutput
from engine.scheduling.drafting import Drafting
from engine.scheduling.finish import FinishRules
from engine.scheduling.scheduler import DEFAULT_LAPS, Scheduler
from tests.engine.scheduling.in_flight import check_blocks_in_flight
from tests.engine.scheduling.running_rows import check_running
from tests.harness.drafters import on_device
from tests.harness.fakes import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    FakeExecutor,
    RecordingHandoffQueue,
    expected_output,
)

BLOCK_SIZE = 4
HASH_KEY = bytes(range(16))
FIVE_TOKENS = SamplingParams(max_tokens=5, ignore_eos=True)


def params_of(max_tokens: int, **given: Any) -> SamplingParams:
    """Parameters of a request that only its length ends, unless told otherwise."""
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **given})


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Tokens that are neither eos nor, in practice, those of another length or seed."""
    return random.Random(f"{num_tokens} {seed}").choices(range(1, VOCAB_SIZE), k=num_tokens)


def _hasher(num_ahead: int) -> RequestHasher:
    return RequestHasher(
        HASH_KEY, model="m", dtype="float32", block_size=BLOCK_SIZE, num_ahead=num_ahead
    )


class Replica:
    """`step` checks the books of all blocks after every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        max_rows: int = 4,
        max_num_batched_tokens: int = 16,
        max_waiting: int = 64,
        unreserved_share: float = 0.25,
        short_share: float = 0.05,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        overlap: bool = False,
        defers_planning: bool = False,
        laps: LapsConfig = DEFAULT_LAPS,
        graph_token_sizes: Sequence[int] = (),
        drafting: Drafting | None = None,
        num_hashed_ahead: int = 0,
    ) -> None:
        self.clock = ManualClock()
        self.cache = BlockCache(
            num_blocks, enable_prefix_caching=enable_prefix_caching, protected_share=0.5
        )
        self.handoff_queue = RecordingHandoffQueue()
        self.max_model_len = max_model_len
        self.executor = FakeExecutor(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_rows=max_rows,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_in_flight=1 + int(overlap),
            draft=on_device(drafting),
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_rows,
                max_waiting=max_waiting,
                unreserved_share=unreserved_share,
                short_share=short_share,
            ),
            cache=self.cache,
            hasher=_hasher(num_hashed_ahead),
            handoff_queue=self.handoff_queue,
            block_size=BLOCK_SIZE,
            finish_rules=FinishRules((EOS_TOKEN_ID,), max_model_len),
            laps=laps,
            graph_token_sizes=graph_token_sizes,
            drafting=drafting,
        )
        parts = self.scheduler, self.executor, self.clock
        self.core = EngineCore(*parts, overlap=overlap, defers_planning=defers_planning)
        self.records: dict[RequestKey, list[TokenRecord]] = {}
        self.failures: dict[RequestKey, FailureRecord] = {}
        self.left: list[RequestKey] = []
        self.lent: list[int] = []  # blocks that the test holds itself

    # ---- requests -------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        child: int = 0,
        emitted: Sequence[int] = (),
        params: SamplingParams = FIVE_TOKENS,
        **fields: Any,
    ) -> Request:
        """Queue a request; `emitted` are its output tokens of an earlier attempt.

        fields: of the request or of its spec; `deadline_s` and `ttft_deadline_s` on the clock.
        """
        now_s = self.clock.now_s()
        spec = {
            name: fields.pop(name) for name in ("priority", "salt", "max_drafts") if name in fields
        }
        for name_of_time in ("deadline_s", "ttft_deadline_s"):
            at_s = fields.pop(name_of_time, None)
            spec[name_of_time] = None if at_s is None else at_s - now_s
        request = Request(
            spec=RequestSpec(params=params, **spec),
            key=RequestKey(name, child, int(bool(emitted))),
            ingress_id=fields.pop("ingress_id", "ingress-a"),
            tokens=[*prompt, *emitted],
            num_prompt_tokens=len(prompt),
            num_emitted_tokens=len(emitted),
            arrival_s=now_s,
            **fields,
        )
        self.scheduler.add(request)
        self.clock.advance(0.001)
        return request

    def expected(self, request: Request) -> list[int]:
        """The whole output of a request, by the oracle."""
        prompt = request.tokens[: request.num_prompt_tokens]
        return expected_output(prompt, request.params, max_model_len=self.max_model_len)[0]

    def output(self, request: Request) -> list[int]:
        """Tokens emitted so far; their indices must go up by one."""
        records = self.records.get(request.key, [])
        first = request.num_emitted_tokens
        assert [r.index for r in records] == list(range(first, first + len(records)))
        return [r.token_id for r in records]

    # ---- steps ----------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        output = self.core.step()
        for _, record in output.tokens:
            self.records.setdefault(record.key, []).append(record)
        for _, failure in output.failures:
            assert failure.key not in self.failures
            self.failures[failure.key] = failure
        self.left += output.left
        self.check()
        return output

    def run(self, max_steps: int = 200) -> int:
        """Step until there is no work; returns how many steps that took."""
        for num_steps in range(max_steps):
            if not self.core.has_work:
                return num_steps
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.scheduler.statistics()}")

    @property
    def last_plan(self) -> StepPlan:
        return self.executor.plans[-1]

    def chunks(self) -> Iterator[list[int]]:
        """New tokens per row of every step so far."""
        for plan in self.executor.plans:
            yield plan.num_new_tokens

    def check(self) -> None:
        owners = [*self.scheduler.owners(), ("the test", self.lent)]
        owners += [(f"outbox {key}", r.block_ids) for key, r in self.handoff_queue.held.items()]
        check_blocks(self.cache, owners)
        check_blocks_in_flight(self.cache, self.executor)
        check_running(self.scheduler)

    def check_idle(self) -> None:
        """Nothing is held by anybody, and every row is free."""
        assert not self.core.has_work
        assert self.cache.num_held == 0
        assert self.scheduler.num_free_rows == self.scheduler._config.max_num_seqs

"""A scheduler in a small world of requests, handoffs and faults, each answer checked on arrival.

Every operation is deterministic in its arguments, so that a history can be replayed. One replica
plays both ends of a handoff: a prompt that leaves through the outbox may come back by `join`, in
other blocks.
"""

from dataclasses import dataclass, field
from typing import Literal

from configs.schema import LapsConfig, SchedulerConfig
from engine.clock import ManualClock
from engine.core import EngineCore
from engine.errors import CapacityError
from engine.kv.cache import BlockCache, check_blocks
from engine.kv.hashes import RequestHasher
from engine.kv.transfer import HandoffReady, OutgoingEvent, OutgoingHandoffs
from engine.messages import FailureRecord, TokenRecord
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.contracts import StepOutput
from engine.scheduling.drafting import Drafting
from engine.scheduling.finish import FinishRules
from engine.scheduling.scheduler import DEFAULT_LAPS, Scheduler
from tests.engine.scheduling.fake_host_tier import FakeHostTier
from tests.engine.scheduling.in_flight import check_blocks_in_flight
from tests.engine.scheduling.reading_sender import ReadingSender
from tests.engine.scheduling.running_rows import check_running
from tests.harness.drafters import on_device
from tests.harness.fakes import EOS_TOKEN_ID, FakeExecutor, expected_output

BLOCK_SIZE = 4
NUM_BLOCKS = 10
MAX_MODEL_LEN = NUM_BLOCKS * BLOCK_SIZE  # one request may need all there is
CONFIG = SchedulerConfig(
    max_num_batched_tokens=7, max_num_seqs=2, max_waiting=12, unreserved_share=0.4
)
MAX_DRAIN_STEPS = 600


@dataclass(slots=True)
class Story:
    """What a request was promised and what it got."""

    prompt: list[int]
    params: SamplingParams
    expected: list[int]
    finish: Literal["stop", "length"]
    deadline_s: float | None
    decode_worker: str | None
    num_migrated: int = 0  # tokens that an earlier attempt emitted
    tokens: list[int] = field(default_factory=list)  # of this attempt
    is_poisoned: bool = False
    is_first_due: bool = True  # its next token is the first of the attempt
    phase: Literal["scheduler", "outbox", "over"] = "scheduler"


class World:
    def __init__(
        self,
        scheduler_class: type[Scheduler],
        *,
        overlap: bool,
        laps: LapsConfig = DEFAULT_LAPS,
        config: SchedulerConfig = CONFIG,
        host_tier: FakeHostTier | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.config = config
        self.host_tier = host_tier
        self.clock = ManualClock()
        self.cache = BlockCache(
            NUM_BLOCKS,
            enable_prefix_caching=True,
            protected_share=0.5,
            on_evict=host_tier.save if host_tier and host_tier.stores == "evicted" else None,
        )
        self.executor = FakeExecutor(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_rows=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            max_in_flight=1 + int(overlap),
            draft=on_device(drafting),
        )
        if host_tier is not None:
            host_tier.executor = self.executor
        self.ready: dict[RequestKey, HandoffReady] = {}
        self.sender = ReadingSender()
        self.outgoing = OutgoingHandoffs(self.cache, self._on_outgoing)
        self.scheduler = scheduler_class(
            config,
            cache=self.cache,
            hasher=RequestHasher(
                bytes(range(16)), model="m", dtype="float32", block_size=BLOCK_SIZE
            ),
            handoff_queue=self.outgoing,
            block_size=BLOCK_SIZE,
            finish_rules=FinishRules((EOS_TOKEN_ID,), MAX_MODEL_LEN),
            laps=laps,
            host_tier=host_tier,
            drafting=drafting,
        )
        self.core = EngineCore(self.scheduler, self.executor, self.clock, overlap=overlap)
        self.stories: dict[RequestKey, Story] = {}
        self.lent: list[int] = []
        self.outputs: list[StepOutput] = []

    # ---- operations -----------------------------------------------------------------------------

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        num_children: int,
        priority: int,
        patience_s: float | None,
        moves: bool,
    ) -> None:
        name = f"{len(self.stories):04}"
        for child in range(num_children):
            seed = len(self.stories)
            given = SamplingParams(
                max_tokens=params.max_tokens, ignore_eos=params.ignore_eos, seed=seed
            )
            expected, finish = expected_output(prompt, given, max_model_len=MAX_MODEL_LEN)
            story = Story(
                prompt=prompt,
                params=given,
                expected=expected,
                finish=finish,
                deadline_s=None if patience_s is None else self.clock.now_s() + patience_s,
                decode_worker="decode-0" if moves else None,
            )
            self._enter(RequestKey(name, child), story, priority)

    def migrate(self, pick: int) -> None:
        """A live request is given up here and tried again, with the tokens its client has."""
        key, story = self._pick(pick, "scheduler")
        self.abort(pick)
        again = Story(
            prompt=story.prompt,
            params=story.params,
            expected=story.expected,
            finish=story.finish,
            deadline_s=None,
            decode_worker=story.decode_worker,
            num_migrated=story.num_migrated + len(story.tokens),
            is_poisoned=story.is_poisoned,  # its seed is the same
        )
        self._enter(RequestKey(key.request_id, key.child, key.attempt + 1), again, 0)

    def abort(self, pick: int) -> None:
        key, story = self._pick(pick, "scheduler")
        assert self.scheduler.abort(key)
        assert not self.scheduler.abort(key)
        story.phase = "over"

    def poison(self, pick: int, num_ahead: int) -> None:
        """The request will meet a non-finite number at a position it has yet to compute."""
        _, story = self._pick(pick, "scheduler")
        num_known = len(story.prompt) + story.num_migrated + len(story.tokens)
        self.executor.poison(story.params.seed, max(0, num_known - 1 + num_ahead))
        story.is_poisoned = True

    def reserve(self, pick: int) -> None:
        """Some decode worker has room."""
        key, _ = self._pick(pick, "outbox")
        self.outgoing.mark_reserved(key)

    def give_up(self, pick: int) -> None:
        """A handoff ends badly."""
        key, story = self._pick(pick, "outbox")
        self._release(key, story)

    def receive(self, pick: int) -> None:
        """A handoff ends well: its blocks are copied here, as far as there is room."""
        key, story = self._pick(pick, "outbox")
        ready = self.ready[key]
        block_ids = self.cache.allocate(len(ready.block_ids))
        if block_ids is None:
            return
        self.executor.copy_blocks(ready.block_ids, block_ids)
        self._release(key, story)
        story.phase = "scheduler"
        story.decode_worker = None
        tokens = story.prompt + self._output(story)
        self.scheduler.join(
            Request(
                spec=RequestSpec(params=story.params),
                key=key,
                ingress_id="ingress",
                tokens=tokens,
                num_prompt_tokens=len(story.prompt),
                num_emitted_tokens=len(tokens) - len(story.prompt),
                num_computed_tokens=len(tokens) - 1,
                arrival_s=self.clock.now_s(),
                block_ids=block_ids,
            )
        )

    def squeeze(self, num_blocks: int) -> None:
        """Somebody else (a reservation) holds this many blocks from now on, or fewer."""
        self.cache.release(self.lent)
        self.lent = self.cache.allocate(min(num_blocks, self.cache.num_available)) or []

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def step(self) -> None:
        self.sender.answer(self.outgoing)
        num_plans, num_waited = len(self.executor.plans), self.executor.num_waited
        held_elsewhere = self.ready or self.lent or self._is_loading
        must_move = self.core.has_work and not held_elsewhere
        output = self.core.step()
        self.outputs.append(output)
        for _, record in output.tokens:
            self._receive_token(record)
        for _, failure in output.failures:
            self._receive_failure(failure)
        self._check_left(output)
        waited = self.executor.plans[num_waited : self.executor.num_waited]
        has_moved = len(self.executor.plans) > num_plans or bool(waited)
        assert output.has_progressed == has_moved
        must_move = must_move and not output.failures and not self.sender.num_unanswered
        must_move = must_move and not self._is_loading
        assert has_moved or not must_move, f"nothing moves: {self.scheduler.statistics()}"
        assert output.num_scheduled_tokens == sum(plan.num_tokens for plan in waited)

    def drain(self) -> None:
        """Nothing arrives any more: all must end, in a bounded number of steps."""
        self.squeeze(0)
        for _ in range(MAX_DRAIN_STEPS):
            if not self.core.has_work and not self.ready and not self.sender.num_unanswered:
                break
            self.step()
            self.check()
            if self.ready:
                self.receive(0)
                self.check()
            if self.ready:
                self.give_up(0)
        assert not self.core.has_work, f"livelock: {self.scheduler.statistics()}"
        assert len(self.outgoing) == 0, f"handoffs without a request: {len(self.outgoing)}"
        assert all(story.phase == "over" for story in self.stories.values())
        self.check()
        assert self.cache.num_available == NUM_BLOCKS
        kept = self.scheduler.drafting.kept_keys()
        assert not kept, f"drafting remembers {kept}"

    # ---- what must hold at any time -------------------------------------------------------------

    def check(self) -> None:
        owners = [*self.scheduler.owners(), *self.outgoing.owners(), ("others", self.lent)]
        check_blocks(self.cache, owners)
        check_blocks_in_flight(self.cache, self.executor)
        check_running(self.scheduler)
        self.sender.check(self.executor, BLOCK_SIZE, self._computed_tokens)
        counts = self.scheduler.statistics()
        num_here = sum(story.phase == "scheduler" for story in self.stories.values())
        assert counts.num_waiting + counts.num_running == num_here
        assert counts.num_running == self.scheduler.num_running
        num_free = self.scheduler.num_free_rows
        assert num_free + counts.num_running == self.config.max_num_seqs, (
            f"rows: {num_free} free and {counts.num_running} running of {self.config.max_num_seqs}"
        )
        assert sorted(self.scheduler.requests_of("ingress")) == sorted(
            key for key, story in self.stories.items() if story.phase == "scheduler"
        )
        assert counts.num_output_tokens == sum(len(s.tokens) for s in self.stories.values())
        live = {key for key, story in self.stories.items() if story.phase != "over"}
        live |= self.sender.ending
        assert set(self.outgoing.keys_of("ingress")) <= live

    def live(self, phase: Literal["scheduler", "outbox"]) -> list[RequestKey]:
        return [key for key, story in self.stories.items() if story.phase == phase]

    # ---- parts ----------------------------------------------------------------------------------

    @property
    def _is_loading(self) -> bool:
        return self.host_tier is not None and self.host_tier.is_active

    def _enter(self, key: RequestKey, story: Story, priority: int) -> None:
        emitted = story.expected[: story.num_migrated]
        is_full = self.scheduler.statistics().num_waiting >= self.config.max_waiting
        try:
            self.scheduler.add(
                Request(
                    spec=RequestSpec(
                        params=story.params, deadline_s=story.deadline_s, priority=priority
                    ),
                    key=key,
                    ingress_id="ingress",
                    tokens=story.prompt + emitted,
                    num_prompt_tokens=len(story.prompt),
                    num_emitted_tokens=len(emitted),
                    arrival_s=self.clock.now_s(),
                    decode_worker=story.decode_worker,
                )
            )
        except CapacityError:
            assert is_full
            story.phase = "over"
        else:
            assert not is_full
        self.stories[key] = story

    def _pick(self, pick: int, phase: Literal["scheduler", "outbox"]) -> tuple[RequestKey, Story]:
        keys = self.live(phase)
        assert keys, f"no request is in {phase}: the replay has taken another course"
        key = keys[pick % len(keys)]
        return key, self.stories[key]

    def _release(self, key: RequestKey, story: Story) -> None:
        self.outgoing.release(key)
        self.sender.forget(key)
        del self.ready[key]
        story.phase = "over"

    def _on_outgoing(self, event: OutgoingEvent) -> None:
        assert self.stories[event.key].decode_worker == "decode-0"
        self.sender.on_event(event)
        if isinstance(event, HandoffReady):
            self.ready[event.key] = event

    def _computed_tokens(self, key: RequestKey) -> list[int]:
        """Of a request that moves: all that has KV when it does."""
        story = self.stories[key]
        return story.prompt + story.expected[: story.num_migrated]

    def _output(self, story: Story) -> list[int]:
        return story.expected[: story.num_migrated] + story.tokens

    def _receive_token(self, record: TokenRecord) -> None:
        story = self.stories[record.key]
        assert story.phase == "scheduler", f"{record} of a request that is {story.phase}"
        assert record.index == len(self._output(story)), f"{record} after {self._output(story)}"
        story.tokens.append(record.token_id)
        assert record.token_id == story.expected[record.index], f"{record}: {story.expected}"
        is_last = record.index == len(story.expected) - 1
        assert record.finish == (story.finish if is_last else None), f"{record}: {story.expected}"
        assert (record.num_cached_tokens is not None) == story.is_first_due
        story.is_first_due = False
        if record.finish is not None:
            story.phase = "over"
        elif record.key in self.ready:
            story.phase = "outbox"

    def _receive_failure(self, failure: FailureRecord) -> None:
        story = self.stories[failure.key]
        assert story.phase == "scheduler", f"{failure} of a request that is {story.phase}"
        story.phase = "over"
        if failure.code == "timeout":
            assert story.deadline_s is not None
            assert self.clock.now_s() > story.deadline_s
        else:
            assert failure.code == "non_finite_logits"
            assert story.is_poisoned

    def _check_left(self, output: StepOutput) -> None:
        """Named once: whoever finished, failed or moved on in this step."""
        moved = {r.key for _, r in output.tokens if self.stories[r.key].phase != "scheduler"}
        due = [*moved, *(failure.key for _, failure in output.failures)]
        assert sorted(output.left) == sorted(due), f"named as gone: {output.left}, but gone: {due}"

"""Who runs in the next step. One scheduler for prefill, decode and unified workers.

Each step: running rows first grow to hold what they know (the newest are preempted if blocks run
out), every decode gets its token, running prompts continue in chunks, then waiting requests are
admitted while rows, tokens and blocks last. A role is only where requests enter and leave:

    add()  -> waiting -> running -> finished                    (unified)
    add()  -> waiting -> running -> OutgoingHandoffs            (prefill: after the first token)
    join() -> running -> finished                               (decode: KV arrived)

A preempted request goes back to `waiting` and recomputes here, whatever the role.

`plan` advances `num_computed_tokens` to include the step it describes; `commit` offers the blocks
that step completed to the prefix index and appends what it sampled. One earlier plan may be in
flight: the token a row samples there is what it computes next. If that token must be the last, the
row pauses; if it turns out to be (eos), the row's next result is dropped. Knows no tensors, no Ray
and no text.
"""

from collections.abc import Iterator

from configs.schema import SchedulerConfig
from engine.errors import CapacityError
from engine.kv.block_cache import BlockCache
from engine.messages import TokenRecord
from engine.request import Request, RequestKey
from engine.scheduling.contracts import BlockHasher, Outbox, SchedulerStatistics, StepOutput
from engine.scheduling.finish import FinishRules
from engine.scheduling.plan import StepPlan, StepResult, TokenLogprobs
from engine.scheduling.plan_building import build_plan
from engine.scheduling.request_blocks import RequestBlocks
from engine.scheduling.row_slots import RowSlots, row_of
from engine.scheduling.steps_in_flight import StepInFlight, StepsInFlight
from engine.scheduling.waiting import WaitingQueue

Chunk = tuple[Request, int]  # who computes, and how many tokens


class Scheduler:
    """Continuous batching per iteration over one `BlockCache`.

    Mutated only by the thread that steps the engine.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        cache: BlockCache,
        hasher: BlockHasher,
        outbox: Outbox,
        block_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        assert config.max_rows <= config.max_step_tokens, (
            f"{config.max_rows} rows cannot each decode in {config.max_step_tokens} tokens"
        )
        assert max_model_len <= cache.num_blocks * block_size, (
            f"a context of {max_model_len} tokens cannot fit {cache.num_blocks} blocks"
        )
        self._config = config
        self._cache = cache
        self._outbox = outbox
        self._block_size = block_size
        self._finish_rules = FinishRules(eos_token_ids, max_model_len)
        self._waiting = WaitingQueue()
        self._running: dict[RequestKey, Request] = {}  # oldest admission first
        self._rows = RowSlots(config.max_rows)
        self._blocks = RequestBlocks(cache, hasher, block_size)
        self._expired: list[Request] = []
        self._in_flight = StepsInFlight()
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_prompt_tokens_computed = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0

    # ---- entering and leaving -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request whose tokens have no KV here. Raises CapacityError when full."""
        self._finish_rules.apply(request)
        num_known, limit = request.num_known_tokens, request.max_known_tokens
        assert num_known < limit, (
            f"{request.key}: {num_known} known tokens leave no room below {limit}"
        )
        assert request.key not in self._running, f"{request.key} runs already"
        if len(self._waiting) >= self._config.max_waiting:
            raise CapacityError(f"the worker's queue holds {len(self._waiting)} requests")
        self._blocks.hash_full(request)
        self._waiting.add(request)

    def join(self, request: Request) -> None:
        """Take a request whose KV is here already: all known tokens but the newest are computed.

        Its blocks are referenced by the request. It runs from the next step on, or waits and is
        recomputed if no row is free (its blocks stay in the prefix index).
        """
        assert request.num_uncomputed_tokens == 1, f"{request.key}: {request.num_computed_tokens}"
        self._finish_rules.apply(request)
        self._blocks.hash_full(request)
        self._blocks.index_full(request, request.num_computed_tokens)
        self._running[request.key] = request
        if self._rows.num_free > 0:
            self._rows.give(request)
        else:
            self._preempt(request)

    def abort(self, key: RequestKey) -> bool:
        """Forget a request and free what it holds; False if it is not here (any more)."""
        request = self._waiting.remove(key)
        if request is None:
            request = self._running.get(key)
            if request is None:
                return False
            self._unseat(request)
        self._leave(request)
        return True

    def requests_of(self, ingress_id: str) -> list[RequestKey]:
        """Keys of every request of one ingress, waiting or running."""
        return [r.key for r in self._all_requests() if r.ingress_id == ingress_id]

    # ---- one step -------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """Decide the next step; None when nothing can run before a step in flight is committed.

        At most one earlier plan is not committed yet.
        """
        assert len(self._in_flight) <= 1, f"{len(self._in_flight)} steps are in flight"
        runnable = self._runnable()
        grown = self._grow_rows(runnable)
        if grown is None:
            return None
        prompts = [request for request in runnable if request.is_prefilling]
        chosen = [r for r in runnable if not r.is_prefilling] if prompts else runnable
        num_new_tokens = [1] * len(chosen)
        budget = self._config.max_step_tokens - len(chosen)
        for request, num_tokens in self._chunks(prompts, budget, now_s):
            chosen.append(request)
            num_new_tokens.append(num_tokens)
        zero_block_ids = self._blocks.take_poisoned()
        if not chosen and not zero_block_ids:
            return None
        return self._start_step(chosen, num_new_tokens, grown, zero_block_ids)

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Settle the oldest step: append sampled tokens, index blocks, end what is finished."""
        assert plan.step == result.step, f"plan {plan.step} got result {result.step}"
        output = StepOutput(num_scheduled_tokens=plan.num_tokens, has_progressed=True)
        step = self._in_flight.pop()
        self._cache.release(step.zero_block_ids)  # no sooner: a handoff may write what it gets
        for request, num_computed, is_finite, token_ids, logprobs in step.rows(plan, result):
            if self._has_left(request):
                continue  # aborted since, or ended by the step before: whatever came is dropped
            if not is_finite:
                self._end_as_poisoned(request, output)
                continue
            # Not `request.num_computed_tokens`: a later step may be counted there already.
            self._blocks.index_full(request, num_computed)
            for token_id in token_ids:
                self._append(request, token_id, logprobs, output)
        for i, block_ids in step.left_block_ids.items():
            self._blocks.let_go(block_ids, is_finite=result.is_finite[i])
        return output

    def take_expired(self) -> StepOutput:
        """Requests that `plan` gave up because their deadline had passed."""
        output = StepOutput()
        for request in self._expired:
            output.fail(request, "the deadline passed in the worker's queue", "timeout")
        self._expired = []
        return output

    # ---- observation ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether requests are here, a step is in flight or blocks are to be zeroed."""
        is_idle = not self._running and len(self._waiting) == 0 and len(self._in_flight) == 0
        return not is_idle or bool(self._blocks.poisoned_block_ids)

    @property
    def num_free_rows(self) -> int:
        return self._rows.num_free

    @property
    def num_running(self) -> int:
        return len(self._running)

    def owners(self) -> Iterator[tuple[str, list[int]]]:
        """Every holder of block references in this scheduler, for the conservation law."""
        for request in self._all_requests():
            if request.block_ids:
                yield f"request {request.key}", request.block_ids
        if self._blocks.poisoned_block_ids:
            yield "poisoned", self._blocks.poisoned_block_ids
        yield from self._in_flight.owners()

    def statistics(self) -> SchedulerStatistics:
        running_tokens = sum([request.num_uncomputed_tokens for request in self._runnable()])
        return SchedulerStatistics(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_queued_tokens=self._waiting.num_tokens + running_tokens,
            num_preemptions=self._num_preemptions,
            num_steps=self._num_steps,
            num_prompt_tokens_computed=self._num_prompt_tokens_computed,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
        )

    # ---- parts of plan --------------------------------------------------------------------------

    def _grow_rows(self, runnable: list[Request]) -> dict[int, list[int]] | None:
        """Blocks for every token of these running rows, by row, for those that were too short.

        While there are too few blocks, the newest is preempted, and leaves `runnable`. The count is
        exact: what a preemption frees is seen before the next one is chosen.
        None, and no effect, if one is due while a step is in flight: its commit may free blocks,
        and a preemption before it would lose what it samples, for a lone row again and again.
        """
        missing = self._blocks.missing(runnable)
        while sum(missing.values()) > self._cache.num_available:
            if len(self._in_flight) > 0:
                return None
            self._preempt(runnable.pop())  # all that run, in this case: the last is the newest
            missing = self._blocks.missing(runnable)
        grown: dict[int, list[int]] = {}
        for request, num_blocks in missing.items():
            block_ids = self._blocks.grow(request, num_blocks)
            if not self._rows.is_entering(request):  # else its admission carries them
                grown[row_of(request)] = block_ids
        return grown

    def _chunks(self, prompts: list[Request], budget: int, now_s: float) -> Iterator[Chunk]:
        """Who computes how much of its prompt within `budget` tokens: who runs, then who waits."""
        for request in prompts:
            num_tokens = min(request.num_uncomputed_tokens, budget)
            if num_tokens > 0:
                budget -= num_tokens
                yield request, num_tokens
        yield from self._admit(budget, now_s)

    def _admit(self, budget: int, now_s: float) -> Iterator[Chunk]:
        """Move waiting requests to rows, in order, until tokens, rows or blocks run out.

        Yields each with the number of tokens its first chunk computes.
        """
        for request in self._waiting:
            if budget <= 0 or self._rows.num_free == 0 or self._is_outbox_full():
                return
            if request.deadline_s is not None and now_s > request.deadline_s:
                self._waiting.remove(request.key)
                self._leave(request)
                self._expired.append(request)
                continue
            if self._has_prefilling_sibling(request):
                continue  # it will find the shared prompt in the prefix index
            if not self._acquire_blocks(request):
                return  # strictly in order: a younger, smaller request must not starve this one
            self._waiting.remove(request.key)
            self._running[request.key] = request
            self._rows.give(request)
            num_left = request.max_known_tokens - request.num_known_tokens
            if request.decode_worker is not None and num_left > 1:  # the first token stays here
                self._outbox.start(request)
            num_tokens = min(request.num_uncomputed_tokens, budget)
            budget -= num_tokens
            yield request, num_tokens

    def _acquire_blocks(self, request: Request) -> bool:
        """Blocks for a request that waits; False, and no effect, without room.

        Room means: afterwards every running row can still grow by one block, so that an admission
        does not cause a preemption right away.
        """
        if not self._blocks.acquire(request, num_spare_blocks=len(self._running)):
            return False
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self._num_cached_tokens += request.num_cached_tokens
        return True

    def _start_step(
        self,
        chosen: list[Request],
        counts: list[int],
        grown: dict[int, list[int]],
        zero_block_ids: list[int],
    ) -> StepPlan:
        """Make the plan, of `counts` new tokens by row, and count its step as in flight."""
        plan = build_plan(self._num_steps, chosen, counts, grown, zero_block_ids, self._rows)
        for request, num_tokens in zip(chosen, counts, strict=True):
            num_prompt_left = request.num_prompt_tokens - request.num_computed_tokens
            if num_prompt_left > 0:
                self._num_prompt_tokens_computed += min(num_tokens, num_prompt_left)
            request.num_computed_tokens += num_tokens
        self._in_flight.add(StepInFlight(requests=chosen, zero_block_ids=zero_block_ids))
        self._num_steps += 1
        return plan

    # ---- parts of commit ------------------------------------------------------------------------

    def _append(
        self,
        request: Request,
        token_id: int,
        logprobs: TokenLogprobs | None,
        output: StepOutput,
    ) -> None:
        """Add one sampled token: emit it, and end or hand over the request where it is due."""
        index = request.num_output_tokens
        is_first = index == request.num_emitted_tokens  # of those that come from here
        request.tokens.append(token_id)
        self._num_output_tokens += 1
        finish, stop_token_id = self._finish_rules.reason(request, token_id)
        record = TokenRecord(
            key=request.key,
            index=index,
            token_id=token_id,
            logprobs=logprobs,
            num_cached_tokens=request.num_cached_tokens if is_first else None,
            finish=finish,
            stop_token_id=stop_token_id,
        )
        output.tokens.append((request.ingress_id, record))
        if finish is not None:
            self._unseat(request)
            self._leave(request)
            output.left.append(request.key)
        elif request.decode_worker is not None:
            self._unseat(request)
            self._outbox.add(request)
            output.left.append(request.key)

    def _end_as_poisoned(self, request: Request, output: StepOutput) -> None:
        """End a request whose logits were not finite, and keep its KV from ever being read.

        A step in flight may write more of it; the one that zeroes the blocks will run after that.
        """
        self._unseat(request)
        request.block_ids = self._blocks.set_aside(request.block_ids)
        self._leave(request)
        output.fail(request, "the model produced a non-finite value", "non_finite_logits")

    def _unseat(self, request: Request) -> None:
        """Take a running request out of its row."""
        del self._running[request.key]
        self._rows.take_back(request)

    def _leave(self, request: Request) -> None:
        """A request ends in this worker without moving on: free all it holds."""
        if request.decode_worker is not None:
            self._outbox.drop(request.key)
        block_ids = self._blocks.take(request)
        if self._in_flight.is_computing(request):
            self._in_flight.hold(request, block_ids)
        else:
            self._cache.release(block_ids)

    def _preempt(self, request: Request) -> None:
        """Give up a running request's row and blocks; it will recompute what it knows."""
        assert not self._in_flight.is_computing(request), f"{request.key} is in flight"
        self._unseat(request)
        self._cache.release(self._blocks.take(request))
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.add(request)

    # ---- questions ------------------------------------------------------------------------------

    def _all_requests(self) -> Iterator[Request]:
        yield from self._running.values()
        yield from self._waiting

    def _runnable(self) -> list[Request]:
        """Running requests with a token to compute next, oldest admission first."""
        return list(filter(self._finish_rules.can_go_on, self._running.values()))

    def _has_left(self, request: Request) -> bool:
        """Whether a request that a step computed for has no row any more."""
        return request.row is None

    def _is_outbox_full(self) -> bool:
        limit = self._config.unreserved_share * self._cache.num_blocks
        return self._outbox.num_unreserved_blocks > limit

    def _has_prefilling_sibling(self, request: Request) -> bool:
        """Whether another choice of the same request is computing the prompt they share."""
        num_shared_blocks = (request.num_prompt_tokens - 1) // self._block_size
        return request.key.child > 0 and any(
            other.key.request_id == request.key.request_id
            and other.num_indexed_blocks < num_shared_blocks
            for other in self._running.values()
        )

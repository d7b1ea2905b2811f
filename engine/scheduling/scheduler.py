"""Who runs in the next step. One scheduler for prefill, decode and unified workers.

Each step: running rows first grow to hold what they know (the newest are preempted if blocks run
out), every decode gets its token, running prompts continue in chunks, then waiting requests are
admitted while rows, tokens and blocks last. A role is only where requests enter and leave:

    add()  -> waiting -> running -> finished                    (unified)
    add()  -> waiting -> running -> OutgoingHandoffs            (prefill: after the first token)
    join() -> running -> finished                               (decode: KV arrived)

A preempted request goes back to `waiting` and recomputes here, whatever the role.

`plan` advances `num_computed_tokens` to include the step in flight; `commit` appends what was
sampled and only then offers blocks to the prefix index. Knows no tensors, no Ray and no text.
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
from engine.scheduling.row_slots import RowSlots, row_of
from engine.scheduling.waiting import WaitingQueue


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
        self._hasher = hasher
        self._outbox = outbox
        self._block_size = block_size
        self._finish_rules = FinishRules(eos_token_ids, max_model_len)
        self._waiting = WaitingQueue()
        self._running: dict[RequestKey, Request] = {}  # oldest admission first
        self._rows = RowSlots(config.max_rows)
        # Not finite; held here until the plan that zeroes them, so that nobody gets them before.
        self._poisoned_block_ids: list[int] = []
        self._expired: list[Request] = []
        self._in_flight: list[Request] = []  # parallel to the rows of the plan in flight
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_prompt_tokens_computed = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0

    # ---- entering and leaving -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request whose tokens have no KV here. Raises CapacityError when full."""
        limit = self._finish_rules.max_known_tokens(request)
        assert request.num_known_tokens < limit, (
            f"{request.key}: {request.num_known_tokens} known tokens leave no room below {limit}"
        )
        assert request.key not in self._running, f"{request.key} runs already"
        if len(self._waiting) >= self._config.max_waiting:
            raise CapacityError(f"the worker's queue holds {len(self._waiting)} requests")
        self._hasher.extend(request)
        self._waiting.add(request)

    def join(self, request: Request) -> None:
        """Take a request whose KV is here already: all known tokens but the newest are computed.

        Its blocks are referenced by the request. It runs from the next step on, or waits and is
        recomputed if no row is free (its blocks stay in the prefix index).
        """
        assert request.num_uncomputed_tokens == 1, f"{request.key}: {request.num_computed_tokens}"
        self._hasher.extend(request)
        self._index_full_blocks(request)
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
        """Decide the next step; None when no request can run and no block needs zeroing."""
        zero_block_ids, self._poisoned_block_ids = self._poisoned_block_ids, []
        self._cache.release(zero_block_ids)  # this very plan may use them, once zeroed
        grown = self._grow_running_rows()
        chosen = [(request, 1) for request in self._running.values() if not request.is_prefilling]
        budget = self._config.max_step_tokens - len(chosen)
        for request in self._running.values():
            if request.is_prefilling and budget > 0:
                num_tokens = min(request.num_uncomputed_tokens, budget)
                chosen.append((request, num_tokens))
                budget -= num_tokens
        chosen.extend(self._admit(budget, now_s))
        if not chosen and not zero_block_ids:
            return None
        return self._build_plan(chosen, grown, zero_block_ids)

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Settle a step: append sampled tokens, index complete blocks, end what is finished."""
        assert plan.step == result.step, f"plan {plan.step} got result {result.step}"
        output = StepOutput(num_scheduled_tokens=plan.num_tokens)
        for i, request in enumerate(self._in_flight):
            if request.row != plan.rows[i] or request.key not in self._running:
                continue  # aborted or preempted while the step ran
            if not result.is_finite[i]:
                self._end_as_poisoned(request, output)
                continue
            self._index_full_blocks(request)
            for token_id in result.tokens[i]:
                self._append(request, token_id, result.logprobs[i], output)
        self._in_flight = []
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
        return bool(self._running) or len(self._waiting) > 0 or bool(self._poisoned_block_ids)

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
        if self._poisoned_block_ids:
            yield "poisoned", self._poisoned_block_ids

    def statistics(self) -> SchedulerStatistics:
        running_tokens = sum(r.num_uncomputed_tokens for r in self._running.values())
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

    def _grow_running_rows(self) -> dict[RequestKey, list[int]]:
        """Blocks for every known token of the running rows, preempting the newest as needed.

        The count is exact: blocks freed by a preemption are seen before the next one is chosen.
        """
        while self._running:
            missing = {key: self._num_missing_blocks(r) for key, r in self._running.items()}
            if sum(missing.values()) <= self._cache.num_available:
                break
            self._preempt(next(reversed(self._running.values())))
        grown: dict[RequestKey, list[int]] = {}
        for request in self._running.values():
            num_missing = self._num_missing_blocks(request)
            if num_missing > 0:
                block_ids = self._cache.allocate(num_missing)
                assert block_ids is not None, "counted above"
                request.block_ids.extend(block_ids)
                if not self._rows.is_entering(request):  # else its admission carries them
                    grown[request.key] = block_ids
        return grown

    def _admit(self, budget: int, now_s: float) -> Iterator[tuple[Request, int]]:
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
            num_left = self._finish_rules.max_known_tokens(request) - request.num_known_tokens
            if request.decode_worker is not None and num_left > 1:  # the first token stays here
                self._outbox.start(request)
            num_tokens = min(request.num_uncomputed_tokens, budget)
            budget -= num_tokens
            yield request, num_tokens

    def _acquire_blocks(self, request: Request) -> bool:
        """Reference cached blocks and allocate the rest; False, and no effect, without room.

        Room means: afterwards every running row can still grow by one block, so that an admission
        does not cause a preemption right away. One token at least stays to be computed.
        """
        hashes = request.block_hashes[: (request.num_known_tokens - 1) // self._block_size]
        hit_ids = self._cache.match(hashes)
        num_missing = self._num_blocks_for(request.num_known_tokens) - len(hit_ids)
        if self._cache.num_available_beside(hit_ids) < num_missing + len(self._running):
            return False
        hit_ids = self._cache.acquire_prefix(hashes)
        new_ids = self._cache.allocate(num_missing)
        assert new_ids is not None, f"{request.key}: {num_missing} blocks were counted"
        request.block_ids = hit_ids + new_ids
        request.num_indexed_blocks = len(hit_ids)
        request.num_computed_tokens = len(hit_ids) * self._block_size
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self._num_cached_tokens += request.num_cached_tokens
        return True

    def _build_plan(
        self,
        chosen: list[tuple[Request, int]],
        grown: dict[RequestKey, list[int]],
        zero_block_ids: list[int],
    ) -> StepPlan:
        reaches_end = [n == request.num_uncomputed_tokens for request, n in chosen]
        admissions, released_rows = self._rows.take_changes()
        plan = StepPlan(
            step=self._num_steps,
            zero_block_ids=zero_block_ids,
            admissions=admissions,
            released_rows=released_rows,
            rows=[row_of(request) for request, _ in chosen],
            num_new_tokens=[num_tokens for _, num_tokens in chosen],
            num_computed_tokens=[request.num_computed_tokens for request, _ in chosen],
            num_logits=[int(ends) for ends in reaches_end],
            samples=reaches_end,
            new_block_ids=[grown.get(request.key, []) for request, _ in chosen],
        )
        for request, num_tokens in chosen:
            num_prompt_left = request.num_prompt_tokens - request.num_computed_tokens
            self._num_prompt_tokens_computed += max(0, min(num_tokens, num_prompt_left))
            request.num_computed_tokens += num_tokens
        self._in_flight = [request for request, _ in chosen]
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
        is_first_here = request.num_output_tokens == request.num_emitted_tokens
        index = request.num_output_tokens
        request.tokens.append(token_id)
        self._num_output_tokens += 1
        finish, stop_token_id = self._finish_rules.reason(request, token_id)
        record = TokenRecord(
            key=request.key,
            index=index,
            token_id=token_id,
            logprobs=logprobs,
            num_cached_tokens=request.num_cached_tokens if is_first_here else None,
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

    def _index_full_blocks(self, request: Request) -> None:
        """Offer the blocks that are complete now; called only when their KV is known to be good."""
        num_full = request.num_computed_tokens // self._block_size
        if num_full <= request.num_indexed_blocks:
            return
        self._hasher.extend(request)
        for i in range(request.num_indexed_blocks, num_full):
            parent = request.block_hashes[i - 1] if i else None
            self._cache.index(request.block_ids[i], request.block_hashes[i], parent)
        request.num_indexed_blocks = num_full

    def _end_as_poisoned(self, request: Request, output: StepOutput) -> None:
        """End a request whose logits were not finite, and keep its KV from ever being read."""
        self._unseat(request)
        self._cache.forget(request.block_ids)
        # A block others still read stays as it is; the rest must not carry NaN into a later owner,
        # where even a masked position would spread it (0 * NaN).
        is_shared = {b: self._cache.num_references(b) > 1 for b in request.block_ids}
        self._poisoned_block_ids += [b for b, shared in is_shared.items() if not shared]
        request.block_ids = [b for b, shared in is_shared.items() if shared]
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
        self._release_blocks(request)

    def _release_blocks(self, request: Request) -> None:
        self._cache.release(request.block_ids)
        request.block_ids = []
        request.num_indexed_blocks = 0

    def _preempt(self, request: Request) -> None:
        """Give up a running request's row and blocks; it will recompute what it knows."""
        self._unseat(request)
        self._release_blocks(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.add(request)

    # ---- questions ------------------------------------------------------------------------------

    def _all_requests(self) -> Iterator[Request]:
        yield from self._running.values()
        yield from self._waiting

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _num_missing_blocks(self, request: Request) -> int:
        return self._num_blocks_for(request.num_known_tokens) - len(request.block_ids)

    def _is_outbox_full(self) -> bool:
        limit = self._config.unreserved_share * self._cache.num_blocks
        return self._outbox.num_unreserved_blocks > limit

    def _has_prefilling_sibling(self, request: Request) -> bool:
        """Whether another choice of the same request is computing the prompt they share."""
        num_shared_tokens = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        return request.key.child > 0 and any(
            other.key.request_id == request.key.request_id
            and other.num_computed_tokens < num_shared_tokens
            for other in self._running.values()
        )

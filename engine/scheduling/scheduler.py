"""Decides which requests run in the next step, for prefill, decode and unified workers alike.

Each step: decodes with full blocks get a new block, then every decode computes its token, then
prompts compute in the order of the queue, and waiting ones are admitted as long as rows, tokens and
blocks suffice. Long requests are preempted if blocks run out or a short request does not fit, see
`short_reserve`. The role only determines where requests enter and leave:

    add()  -> waiting -> running -> finished                    (unified)
    add()  -> waiting -> running -> OutgoingHandoffs            (prefill: after the first token)
    join() -> running -> finished                               (decode: KV arrived)

A preempted request goes back to `waiting` and recomputes here, whatever the role.

    plan()      decodes      a block for each that is full; preempt if blocks run out (`capacity`)
                prompts      what fits the step's budget, in the queue's order (`admission`)
                drafts       for the decodes, in what is left of the budget (`drafting`)
                -> StepPlan  the requests' progress now includes the step (`running`, `in_flight`)
    commit()    time         to the cost model (`prompt_scheduling`)
                no token     these requests fail
                tokens       to their requests, and to the clients (`finish`)
                blocks       those that the step has filled, to the prefix index (`request_blocks`)
                last token   these requests leave
                -> StepOutput

One earlier plan may be in flight: the token that a row samples there is the one it computes next.
If that token will be its last by length, the row pauses. If the token turns out to be its last
(eos), the result of the row's next step is dropped. A row with drafts may wait for its token
instead, and no other row waits with it; so does one with a constraint, in a worker that drafts.
Knows no tensors, no Ray and no text.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace

import msgspec

from configs.resolved import ResolvedLaps, ResolvedScheduler
from engine.cost_model import StepCosts, StepWork
from engine.errors import CapacityError
from engine.kv.cache import BlockCache, BlockTerms
from engine.plan import StepPlan, StepResult
from engine.request import Request, RequestKey
from engine.scheduling.admission import Admission
from engine.scheduling.budget import StepBudget
from engine.scheduling.capacity import Capacity, SchedulerState
from engine.scheduling.contracts import BlockHasher, HandoffQueue, SchedulerStatistics, StepOutput
from engine.scheduling.counters import SchedulerCounters
from engine.scheduling.drafting import NO_DRAFTS, Drafting, PlannedDrafts, StepRoom
from engine.scheduling.finish import Ending, FinishRules, SampledTokens
from engine.scheduling.host_loads import HostLoadStatistics, HostTier, build_host_loads
from engine.scheduling.in_flight import StepInFlight, StepsInFlight
from engine.scheduling.prompt_scheduling import PromptScheduling, QueuedWork
from engine.scheduling.request_blocks import RequestBlocks
from engine.scheduling.running import (
    Chunk,
    DecodeColumns,
    RowSlots,
    RunningRequests,
    build_plan,
    row_of,
)
from engine.scheduling.short_reserve import ShortReserve
from engine.turns import Turns, run_alone

DEFAULT_LAPS = ResolvedLaps()


class Scheduler:
    """Continuous batching at step granularity over one `BlockCache`; engine thread only."""

    def __init__(
        self,
        config: ResolvedScheduler,
        *,
        cache: BlockCache,
        hasher: BlockHasher,
        handoff_queue: HandoffQueue,
        block_size: int,
        finish_rules: FinishRules,
        laps: ResolvedLaps = DEFAULT_LAPS,
        graph_token_sizes: Sequence[int] = (),
        drafting: Drafting | None = None,
        host_tier: HostTier | None = None,
    ) -> None:
        """graph_token_sizes: sizes of prompt steps in tokens, ascending, that need no padding.

        drafting: None = no request gets drafts. host_tier: where blocks are that left a device;
        None = nowhere.
        """
        _check_limits(config, finish_rules.max_model_len, cache.num_blocks, block_size)
        self._config = config
        self._cache = cache
        self._handoff_queue = handoff_queue
        self._block_size = block_size
        self._finish_rules = finish_rules
        self._sampled = SampledTokens(self._finish_rules)
        self._running = RunningRequests()
        self._rows = RowSlots(config.max_num_seqs)
        self._blocks = RequestBlocks(cache, hasher, block_size)
        max_step_tokens = config.max_num_batched_tokens
        self._host_loads = build_host_loads(host_tier, cache, block_size, max_step_tokens)
        self._prompts = PromptScheduling(
            laps, count_uncached=self._num_uncached, graph_token_sizes=graph_token_sizes
        )
        self._waiting = self._prompts.queue
        self.drafting = Drafting(None, None) if drafting is None else drafting
        self._reserve = ShortReserve(
            config.short_share,
            threshold=laps.laps_length_threshold,
            num_blocks=cache.num_blocks,
            max_rows=config.max_num_seqs,
            order=self._prompts.order,
            max_long_wait_s=laps.max_long_wait_s,
        )
        self._in_flight = StepsInFlight()
        self._counters = SchedulerCounters()
        state = SchedulerState(
            cache=cache,
            blocks=self._blocks,
            rows=self._rows,
            running=self._running,
            waiting=self._waiting,
            reserve=self._reserve,
            handoff_queue=handoff_queue,
        )
        self._capacity = Capacity(config.unreserved_share, state)
        self._admission = Admission(
            state, self._capacity, self._host_loads, self._prompts.model, self._counters
        )
        self.deferred_until_s: float | None = None  # set if the last `plan` waits for short prompts

    # ---- entering and leaving -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request whose tokens have no KV here; CapacityError if the queue is full."""
        self._finish_rules.apply(request)
        num_known, limit = request.num_known_tokens, request.max_known_tokens
        assert num_known < limit + request.params.is_prompt_only, (
            f"{request.key}: {num_known} known tokens leave no room below {limit}"
        )
        assert request.key not in self._running, f"{request.key} runs already"
        if self.is_queue_full:
            raise CapacityError(f"the worker's queue holds {len(self._waiting)} requests")
        if not request.needs_whole_prompt:  # else blocks are hashed when it has filled them
            self._blocks.hash_full(request)
        self._host_loads.arrived(request, self.costs)
        self._prompts.arrived(request)
        self._reserve.add(request)

    def join(self, request: Request) -> None:
        """Take a request whose KV is here: all known tokens except the newest are computed.

        The request already references its blocks. It runs from the next step on. If no row is free
        it waits and is recomputed; its blocks stay in the prefix index.
        """
        assert request.num_uncomputed_tokens == 1, f"{request.key}: {request.num_computed_tokens}"
        # As for every decode, so that its tokens take the fast path of `SampledTokens`.
        stays_as_it_came = request.decode_worker is None and request.num_cached_tokens is None
        assert stays_as_it_came, f"{request.key} has a prompt to compute here"
        self._finish_rules.apply(request)
        self._blocks.hash_full(request)
        self._blocks.index_later(request, request.num_computed_tokens)
        self.drafting.arrived(request)
        self._running.add(request)
        if self._rows.num_free > 0:
            self._rows.give(request)
            self._running.begin_decode(request)
        else:
            self._preempt(request)

    def abort(self, key: RequestKey) -> bool:
        """Remove a request and free what it holds; False if it is not here (any more)."""
        request = self._admission.stop_waiting(key)
        if request is None:
            if (request := self._running.get(key)) is None:
                return False
            self._unseat(request)
            self._host_loads.ended(request)
        self._leave(request)
        return True

    def requests_of(self, ingress_id: str) -> list[RequestKey]:
        """Keys of every request of one ingress, waiting or running."""
        return [r.key for r in self._all_requests() if r.ingress_id == ingress_id]

    # ---- one step -------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step; None when nothing can run before a step in flight is committed.

        At most one earlier plan may be uncommitted.
        """
        return run_alone(self.planning(now_s))

    def planning(self, now_s: float) -> Turns[StepPlan | None]:
        """As `plan`, in turns: others plan while what drafts here computes."""
        assert len(self._in_flight) <= 1, f"{len(self._in_flight)} steps are in flight"
        self._blocks.nonfinite_block_ids += self._host_loads.settle()
        if self.waits_for_held_rows():
            return None
        if self.num_held_rows > 0 and len(self._running.decode_columns) and not self.has_prompts:
            self.drafting.count_going_on()
        if (grown := self._grow_rows()) is None:
            return None
        decodes = self._running.decode_columns
        max_tokens = self._config.max_num_batched_tokens - len(decodes)
        can_admit = self._rows.num_free > 0 and not self._capacity.is_outbox_full(for_short=True)
        budget = self._prompts.open_budget(now_s, max_tokens, decodes.work, can_admit=can_admit)
        # Wait for more short prompts only if the device would have nothing else to do.
        is_idle = len(self._running) == len(self._in_flight) == 0
        self.deferred_until_s = self._prompts.must_defer_until_s(now_s) if is_idle else None
        chunks = [] if self.deferred_until_s is not None else list(self._admission.chunks(budget))
        if self._reserve.is_asked:
            self._reserve.end_step()
        zero_block_ids = self._blocks.take_nonfinite()
        if len(decodes) == 0 and not chunks and not zero_block_ids:
            return None
        drafts = yield from self._plan_drafts(decodes, budget, grown)
        return self._start_step(decodes, chunks, grown, zero_block_ids, budget.work, drafts)

    def catch_up(self) -> None:
        """Do what a commit left over, so that its tokens did not wait; call it as steps compute.

        Adds the blocks of joined requests to the prefix index, and fits the cost model if it is
        time.
        """
        self._blocks.flush_deferred_index()
        self._prompts.model.fit_if_due()

    def settle_drafts(self) -> None:
        """Tell the drafts' policy of committed steps: the next plan needs it.

        Call it while the host has nothing else to do.
        """
        self.drafting.settle()

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Commit the oldest step: append sampled tokens, index blocks, end finished requests.

        Results for a request without a row are dropped: it was aborted since, or was ended by the
        step before. One for which nothing could be drawn fails. If it had drafts, one of these may
        be why: it is queued again, and gets none any more.
        """
        assert plan.step == result.step, f"plan {plan.step} got result {result.step}"
        output = StepOutput(num_scheduled_tokens=plan.num_tokens, has_progressed=True)
        step = self._in_flight.pop()
        self._counters.committed(plan.num_tokens)
        if result.duration_s is not None:
            # What its drafts cost besides is learned by their policy, and would count twice.
            surcharge_s = step.planned_drafts.surcharge_s
            self._prompts.observe(step.work, max(0.0, result.duration_s - surcharge_s))
        self._cache.release(step.zero_block_ids)  # not earlier: a handoff could write to them
        for i in step.without_token(result):
            self._end_without_token(step, i, result, output)
        endings = self._append_sampled(step, result, output)
        for request, num_computed_tokens in step.filled:  # hashes may cover what was sampled
            if request.row is not None:
                self._blocks.index_full(request, num_computed_tokens)
                self._handoff_queue.advance(request)
        for ending in endings:
            self._end(ending, output)
        self._running.resume(step.held)
        for i, block_ids in step.left_block_ids.items():
            self._blocks.let_go(block_ids, is_finite=result.is_finite[i])
        planned = step.planned_drafts
        self.drafting.read([*(step.requests[i] for i in planned.guessed), *step.held])
        return output

    def take_expired(self) -> StepOutput:
        """Failures of the requests that `plan` dropped because their deadline had passed."""
        output = StepOutput()
        for request in self._admission.take_expired():
            self._leave(request)
            output.fail(request, "the deadline passed in the worker's queue", "timeout")
        return output

    # ---- observation ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether requests are here, a step is in flight or blocks must be zeroed."""
        is_idle = len(self._running) == len(self._waiting) == len(self._in_flight) == 0
        is_loading = self._host_loads.is_active
        return not is_idle or is_loading or bool(self._blocks.nonfinite_block_ids)

    @property
    def look_due_s(self) -> float | None:
        """When `plan` must be called even if nothing happens until then; None = at no time."""
        return self._host_loads.due_s

    @property
    def is_queue_full(self) -> bool:
        """Whether `add` raises CapacityError."""
        return len(self._waiting) >= self._config.max_waiting

    @property
    def is_held_for_drafts(self) -> bool:
        """Whether a row waits for a step in flight because drafts need its newest token."""
        return self.num_held_rows > 0

    @property
    def num_held_rows(self) -> int:
        """Rows that wait for a step in flight because drafts need their newest tokens."""
        return 0 if self.drafting.drafter is None else self._in_flight.num_held_rows

    @property
    def has_prompts(self) -> bool:
        """Whether the next step may compute some of a prompt."""
        can_admit = len(self._waiting) > 0 and self._rows.num_free > 0
        return len(self._running.prompts) > 0 or can_admit

    def waits_for_held_rows(self, num_elsewhere: int = 0) -> bool:
        """Whether the decodes wait for the step in flight to end; prompts do not wait for it.

        num_elsewhere: held rows of other ranks.
        """
        if self.drafting.drafter is None or self.has_prompts:
            return False
        decodes, num_held = self._running.decode_columns.work, self.num_held_rows
        return self.drafting.pays_to_wait(
            decodes, num_held, self.costs, num_elsewhere=num_elsewhere
        )

    @property
    def num_free_rows(self) -> int:
        return self._rows.num_free

    @property
    def num_running(self) -> int:
        return len(self._running)

    def count_idle(self, seconds: float) -> None:
        """The device had nothing to do before the step just planned, because rows were held."""
        self.drafting.count_idle(seconds)

    @property
    def waited_s(self) -> float:
        """Of the last `plan`, for the device to compute drafts; steps before have to end first."""
        return self.drafting.waited_s

    def count_late(self, seconds: float) -> None:
        """So long the device waited before the step that is committed next, launched too late.

        To be told before each commit, also of 0 seconds.
        """
        self.drafting.count_late(seconds)

    def owners(self) -> Iterator[tuple[str, list[int]]]:
        """Every holder of block references in this scheduler, for the check that none is lost."""
        for request in self._all_requests():
            if request.block_ids:
                yield f"request {request.key}", request.block_ids
        if self._blocks.nonfinite_block_ids:
            yield "nonfinite", self._blocks.nonfinite_block_ids
        yield from self._in_flight.owners()
        yield from self._host_loads.owners()

    def host_statistics(self) -> HostLoadStatistics | None:
        """Of loads from the host tier; None = there is none."""
        return self._host_loads.statistics()

    @property
    def costs(self) -> StepCosts:
        """The cost model's coefficients as fitted so far."""
        return self._prompts.model.costs

    def learn(self, samples: Iterable[tuple[StepWork, float]]) -> None:
        """Fit the cost model to steps measured before the first request: work, seconds."""
        self._prompts.model.learn(samples)

    @property
    def newest_step_s(self) -> float:
        """Predicted duration of the step launched last; a step must be in flight."""
        newest = self._in_flight.newest
        return self.costs.step_seconds(newest.work) + newest.planned_drafts.surcharge_s

    def queued_work(self) -> QueuedWork:
        """Predicted seconds of queued work; takes time linear in the queue and the rows."""
        queued = self._prompts.queued_work(self._running.prompts.values())
        return replace(queued, room_s=self._capacity.seconds_until_room(self.costs))

    def statistics(self) -> SchedulerStatistics:
        return self._counters.statistics(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_queued_tokens=self._waiting.num_tokens + self._running.num_queued_tokens,
            num_output_tokens=self._sampled.num_tokens,
        )

    # ---- parts of plan --------------------------------------------------------------------------

    def _grow_rows(self) -> dict[int, list[int]] | None:
        """Allocate a block for every decode whose blocks are full; returns row -> new block ids.

        Preempts requests while blocks are too few, for these or for waiting requests. The count is
        exact: blocks that a preemption frees are counted before the next victim is chosen.
        Returns None, without effect, if a preemption is due while a step is in flight. Its commit
        may free blocks, and a preemption before it would lose the sampled token; a lone row would
        lose it again and again.
        """
        while True:
            full = self._blocks.full(
                self._running.decode_columns.at_block_boundary(self._block_size)
            )
            num_left = self._cache.num_available - len(full)
            is_asked = len(self._waiting) > 0 or self._reserve.is_asked
            if num_left >= self._reserve.num_blocks and not is_asked:
                break
            victim, is_for_others = self._capacity.victim(full, num_left)
            if victim is None:
                break
            if len(self._in_flight) > 0:
                return None
            self._counters.num_preemptions_for_others += is_for_others
            self._preempt(victim)
        grown = self._blocks.grow(full)
        # The admission of an entering row lists all its blocks.
        return {row_of(r): ids for r, ids in grown if not self._rows.is_entering(r)}

    def _plan_drafts(
        self, decodes: DecodeColumns, budget: StepBudget, grown: dict[int, list[int]]
    ) -> Turns[PlannedDrafts]:
        """Drafts for the decodes, from what prompts left of the step; adds blocks to `grown`."""
        if self.drafting.drafter is None:
            return NO_DRAFTS
        num_lines_left = self._num_lines_left(budget)
        num_left = budget.num_tokens_left
        room = StepRoom(
            work=budget.work,
            costs=self.costs,
            max_tokens=num_left if num_lines_left is None else min(num_left, num_lines_left),
            is_short_waiting=self._reserve.is_short_waiting,
            blocks=self._blocks,
            num_spare_blocks=self._reserve.num_blocks + len(self._running),
            num_held_rows=self._in_flight.num_held_rows,
            max_model_len=self._finish_rules.max_model_len,
            prompt_graph_tokens=() if num_lines_left is None else self._prompts.graph_token_sizes,
            max_prompt_step_s=budget.max_step_s,
        )
        drafts = yield from self.drafting.planning(decodes.requests, room)
        for request, block_ids in drafts.new_blocks:
            if not self._rows.is_entering(request):
                grown[row_of(request)] = grown.get(row_of(request), []) + block_ids
        return drafts

    def _num_lines_left(self, budget: StepBudget) -> int | None:
        """Of logits, in the graph of a step with prompts; None = the step replays no such graph."""
        sizes = self._prompts.graph_token_sizes
        if budget.num_prompts == 0 or not sizes or budget.work.num_new_tokens > sizes[-1]:
            return None
        num_lines = min(self._config.max_num_seqs, self._prompts.max_graph_rows)
        num_left = num_lines - budget.work.num_decode_rows - budget.num_prompts
        return num_left if num_left >= 0 else None

    def _start_step(
        self,
        decodes: DecodeColumns,
        chunks: list[Chunk],
        grown: dict[int, list[int]],
        zero_block_ids: list[int],
        work: StepWork,
        drafts: PlannedDrafts,
    ) -> StepPlan:
        """Build the plan, count its step as in flight, and advance the progress of its requests."""
        verified = self.drafting.take_verified(decodes.requests)
        columns = decodes, chunks, grown, zero_block_ids, self._rows
        plan = build_plan(self._counters.num_steps, *columns, drafts, verified)
        if places := self.drafting.drafter_chunks(chunks):
            plan = msgspec.structs.replace(plan, drafter_rows=[len(decodes) + i for i in places])
        # How many tokens these have after the step is known once it has ended: `Drafting.commit`.
        guessed = {decodes.requests[index].key for index in drafts.guessed}
        decodes.advance()
        at_boundary = decodes.at_block_boundary(self._block_size)
        filled = [(r, r.num_computed_tokens) for r in at_boundary if r.key not in guessed]
        decodes.advance_drafts(drafts.drafts)
        filled += self._advance_prompts(chunks)
        begun = self._begin_decodes(chunks)
        at_last = self._running.decode_columns.at_last_token(self._finish_rules)
        self._running.pause([r for r in at_last if r.key not in guessed])
        to_hold = self.drafting.to_hold(decodes.requests, begun, drafts)
        if self.drafting.drafter is not None:
            to_hold = self._running.decode_columns.constrained + to_hold
        step = StepInFlight(
            requests=decodes.requests + [request for request, _ in chunks],
            num_decodes=len(decodes),
            zero_block_ids=zero_block_ids,
            filled=filled,
            work=drafts.work(work),
            held=self._running.hold(to_hold),
            planned_drafts=drafts,
        )
        self._in_flight.add(step)
        self._counters.num_steps += 1
        return plan

    def _advance_prompts(self, chunks: Sequence[Chunk]) -> list[tuple[Request, int]]:
        """Count the chunks as computed; returns as `StepInFlight.filled`."""
        filled = []
        for request, num_tokens in chunks:
            self._counters.computes(request, num_tokens)
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens % self._block_size < num_tokens:
                filled.append((request, request.num_computed_tokens))
        return filled

    def _begin_decodes(self, chunks: Sequence[Chunk]) -> list[Request]:
        """Move requests whose prompts are computed now to the decodes; returns them."""
        begun = [r for r, _ in chunks if r.num_computed_tokens == r.num_known_tokens]
        for request in begun:
            self._running.begin_decode(request)
        return begun

    # ---- parts of commit ------------------------------------------------------------------------

    def _end_without_token(
        self, step: StepInFlight, index: int, result: StepResult, output: StepOutput
    ) -> None:
        """End a request for which nothing could be drawn; begin it anew if drafts may be why."""
        request, is_finite = step.requests[index], result.is_finite[index]
        self._leave_without_token(request, is_finite=is_finite)
        if index in step.planned_drafts.drafts:
            self._queue_without_drafts(request)
        else:
            why = _why_nothing_was_drawn(is_finite=is_finite)
            output.fail(request, why, "non_finite_logits")

    def _end(self, ending: Ending, output: StepOutput) -> None:
        """Let a request go that has its last token here: for good, or to another worker."""
        request, finish = ending
        self._unseat(request)
        if finish is not None:
            self.drafting.finish(request)
            self._host_loads.ended(request)
            self._leave(request)
        else:
            self._handoff_queue.add(request)
        output.left.append(request.key)

    def _append_sampled(
        self, step: StepInFlight, result: StepResult, output: StepOutput
    ) -> list[Ending]:
        drafting, planned = self.drafting, step.planned_drafts
        known_before = drafting.nums_known(step.requests, planned)
        endings = self._sampled.append_all(step, result, output)
        advanced = drafting.commit(step.requests, planned, known_before, result)
        for request in advanced:
            self._blocks.index_full(request, len(request.tokens) - 1)
        if advanced:
            self._running.count_again()
            self._pause_at_last(advanced)
        return endings

    def _pause_at_last(self, advanced: Iterable[Request]) -> None:
        """Plan no more steps for those whose step in flight is now known to give the last token."""
        due_one = [r for r in advanced if r.num_computed_tokens == len(r.tokens)]
        decoding = [r for r in due_one if r.key in self._running.decodes]
        self._running.pause(self._finish_rules.at_last_token(decoding))

    def _queue_without_drafts(self, request: Request) -> None:
        """Queue a copy: a step in flight may go on from `request`, whose results are dropped."""
        again = copy(request)
        self.drafting.bar(again)
        self._queue_again(again)

    def _leave_without_token(self, request: Request, *, is_finite: bool) -> None:
        """Take out a request; set its blocks aside to be zeroed if its numbers are not finite.

        A step in flight may write more of them; the step that zeroes the blocks runs after it.
        """
        self._unseat(request)
        if not is_finite:
            request.block_ids = self._blocks.set_aside(request.block_ids)
        self._leave(request)

    def _unseat(self, request: Request) -> None:
        """Remove a running request and free its row."""
        self._running.remove(request)
        self._rows.take_back(request)
        self.drafting.unseat(request)

    def _leave(self, request: Request) -> None:
        """Free all that a request holds when it ends in this worker without moving on."""
        self.drafting.forget(request)
        if request.decode_worker is not None:
            self._handoff_queue.drop(request.key)
        block_ids = self._blocks.take(request)
        if self._in_flight.is_computing(request):
            self._in_flight.hold(request, block_ids)
        else:
            self._cache.release(block_ids)

    def _preempt(self, request: Request) -> None:
        """Free a running request's row and blocks and queue it."""
        assert not self._in_flight.is_computing(request), f"{request.key} is in flight"
        # If it joined just now, its blocks must be found again.
        self._blocks.flush_deferred_index()
        self._unseat(request)
        self._handoff_queue.retract(request.key)
        self._cache.release(self._blocks.take(request))
        self._queue_again(request)

    def _queue_again(self, request: Request) -> None:
        """Queue a request that has lost its row and blocks; it recomputes its known tokens."""
        request.start_over()
        self._counters.num_preemptions += 1
        self._host_loads.arrived(request, self.costs)
        self._waiting.add(request)
        self._reserve.add(request)

    # ---- requests that join ---------------------------------------------------------------------

    def is_short(self, num_known_tokens: int) -> bool:
        """Whether a request with so many tokens may overtake others within the reserve."""
        return self._capacity.is_short(num_known_tokens)

    def terms_of_joining(
        self, request: Request, num_promised_rows: int, *, overtakes: bool
    ) -> BlockTerms | None:
        """See `Capacity.terms_of_joining`."""
        return self._capacity.terms_of_joining(request, num_promised_rows, overtakes=overtakes)

    def make_way(self, request: Request) -> None:
        """Record a request that could not `join`: if short, the next step may preempt for it."""
        self._reserve.ask(request)

    # ---- questions ------------------------------------------------------------------------------

    def _num_uncached(self, request: Request) -> int:
        """Tokens that a waiting request has to compute, as the queue counts them."""
        return self._host_loads.num_uncached(request, self._blocks.num_uncached(request))

    def _all_requests(self) -> Iterator[Request]:
        yield from self._running
        yield from self._waiting


def _check_limits(
    config: ResolvedScheduler, max_model_len: int, num_blocks: int, block_size: int
) -> None:
    assert config.max_num_seqs <= config.max_num_batched_tokens, (
        f"{config.max_num_seqs} rows cannot each decode in {config.max_num_batched_tokens} tokens"
    )
    assert max_model_len <= num_blocks * block_size, (
        f"a context of {max_model_len} tokens cannot fit {num_blocks} blocks"
    )


def _why_nothing_was_drawn(*, is_finite: bool) -> str:
    """Reason for the client; a constraint that cannot follow the output allows no token."""
    if not is_finite:
        return "the model produced a non-finite value"
    return "the constraint on the output allows no token any more"

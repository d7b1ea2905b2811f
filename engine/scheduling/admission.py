"""Which waiting requests enter the next step: each gets a row and blocks, in the queue's order.

A waiting request enters if a row is free and its blocks suffice on the terms of `Capacity`. It
stays in the queue while a running request computes a prefix that both share, and while blocks of
its prefix come from the host tier. What is refused for want of rows or blocks is not overtaken by
what is queued behind it, but for the long request that it overtook itself; short requests may
overtake long ones within their reserve. Knows no drafts and no steps in flight.
"""

from collections.abc import Iterator

from engine.cost_model import CostModel
from engine.request import Request, RequestKey
from engine.scheduling.budget import StepBudget
from engine.scheduling.capacity import Capacity, SchedulerState
from engine.scheduling.counters import SchedulerCounters
from engine.scheduling.host_loads import HostLoads, NoHostLoads
from engine.scheduling.running import Chunk


class Admission:
    """Moves requests of one scheduler from its queue to its rows."""

    def __init__(
        self,
        state: SchedulerState,
        capacity: Capacity,
        host_loads: HostLoads | NoHostLoads,
        cost_model: CostModel,
        counters: SchedulerCounters,
    ) -> None:
        self._state = state
        self._capacity = capacity
        self._host_loads = host_loads
        self._cost_model = cost_model
        self._counters = counters
        self._expired: list[Request] = []

    def chunks(self, budget: StepBudget) -> Iterator[Chunk]:
        """Yield the prompts of a step and their chunk lengths, in the order of the queue."""
        running, waiting = self._state.running, self._state.waiting
        for candidate in waiting.candidates(list(running.prompts.values()), budget):
            request, _ = candidate
            if request.key in waiting and not self._admit(request, budget):
                continue
            yield request, budget.grant(candidate)

    def stop_waiting(self, key: RequestKey, now_s: float | None = None) -> Request | None:
        """Take a request out of the queue; None if it is not waiting. now_s: it is admitted."""
        self._state.reserve.remove(key)
        self._host_loads.forget(key, now_s)
        return self._state.waiting.remove(key)

    def take_expired(self) -> list[Request]:
        """Requests that `chunks` took out of the queue because their deadline had passed."""
        expired, self._expired = self._expired, []
        return expired

    def _admit(self, request: Request, budget: StepBudget) -> bool:
        """Move a waiting request to a row; False if that is not possible now."""
        state = self._state
        if request.deadline_s is not None and budget.now_s > request.deadline_s:
            self.stop_waiting(request.key)
            self._expired.append(request)
            return False
        if state.running.has_prefilling_sibling(request, state.blocks.block_size):
            state.reserve.skipped(request)
            return False  # later it will hit the shared prompt in the prefix index
        is_long = state.reserve.is_long(request)
        if is_long and budget.is_closed_for_long(request):
            return False
        is_full = state.rows.num_free == 0 or self._capacity.is_outbox_full(for_short=not is_long)
        if not is_full and self._is_loading(request, budget.now_s):
            state.reserve.skipped(request)
            return False  # the next ones go first meanwhile
        if is_full or not self._acquire_blocks(request, budget.now_s):
            state.reserve.refused(request)
            # Who was overtaken may be why this one is refused, so it is still offered a place.
            overtaken = state.reserve.overtaken_by(request)
            if is_long and state.reserve.first_short is not None:
                budget.refuse_long(but=overtaken)  # short ones may still enter within the reserve
            else:  # a younger, smaller request must not starve this one
                budget.refuse(request, but=overtaken)
            return False
        self._enter(request, budget.now_s)
        return True

    def _is_loading(self, request: Request, now_s: float) -> bool:
        """Whether a request that could enter waits for the host tier; begins to load if it pays."""
        state = self._state
        state.blocks.flush_deferred_index()
        self._host_loads.begin(
            request,
            lambda: self._capacity.terms(request, state.rows.num_free, now_s=now_s),
            now_s,
            self._cost_model.costs,
        )
        return self._host_loads.is_awaited(request.key, now_s)

    def _acquire_blocks(self, request: Request, now_s: float) -> bool:
        """Acquire blocks for a waiting request; False, without effect, if they do not suffice.

        They suffice if afterwards every running row can still grow by one block, so that an
        admission does not cause a preemption right away. A short request may cause one.
        """
        blocks = self._state.blocks
        blocks.flush_deferred_index()
        terms = self._capacity.terms(request, self._state.rows.num_free, now_s=now_s)
        if terms is None or not blocks.acquire(
            request,
            num_spare_blocks=terms.num_spare_blocks,
            max_new_blocks=terms.max_new_blocks,
        ):
            return False
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self._counters.num_cached_tokens += request.num_cached_tokens
        return True

    def _enter(self, request: Request, now_s: float) -> None:
        """Give a request that has its blocks a row, and announce its KV if that will move."""
        self.stop_waiting(request.key, now_s)
        self._state.running.add(request)
        self._state.rows.give(request)
        if request.started_s is None:
            request.started_s = now_s
        num_left = request.max_known_tokens - request.num_known_tokens
        if request.decode_worker is not None and num_left > 1:  # the first token stays here
            self._state.handoff_queue.start(request)

"""What fits on one worker: on which terms a request enters, who gives way, when there is room.

Answers questions about rows and blocks that others own and change; changes nothing itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.cost_model import StepCosts
from engine.kv.cache import BlockCache, BlockTerms
from engine.request import Request
from engine.scheduling.contracts import HandoffQueue
from engine.scheduling.request_blocks import RequestBlocks
from engine.scheduling.running import RowSlots, RunningRequests
from engine.scheduling.short_reserve import Holdings, ShortReserve
from engine.scheduling.wait_prediction import Room, num_steps_left, steps_until
from engine.scheduling.waiting import PromptQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """The blocks, rows and requests of one scheduler; its parts share them."""

    cache: BlockCache
    blocks: RequestBlocks
    rows: RowSlots
    running: RunningRequests
    waiting: PromptQueue
    reserve: ShortReserve
    handoff_queue: HandoffQueue


class Capacity:
    """Of one scheduler, over its rows, requests and blocks."""

    def __init__(self, unreserved_share: float, state: SchedulerState) -> None:
        """unreserved_share: of all blocks, for finished prompts that nobody has room for yet."""
        self._unreserved_share = unreserved_share
        self._cache = state.cache
        self._blocks = state.blocks
        self._rows = state.rows
        self._running = state.running
        self._waiting = state.waiting
        self._reserve = state.reserve
        self._handoff_queue = state.handoff_queue

    def is_short(self, num_known_tokens: int) -> bool:
        """Whether a request with so many tokens may overtake others within the reserve."""
        return self._reserve.is_on and num_known_tokens <= self._reserve.threshold

    def terms_of_joining(
        self, request: Request, num_promised_rows: int, *, overtakes: bool
    ) -> BlockTerms | None:
        """Conditions for holding blocks for a request that is to `join`; None = not now.

        `num_promised_rows`: free rows promised to other joining requests. `overtakes`: whether an
        earlier request that is to join was refused. Waiting requests (preempted here) go first,
        but short ones may overtake them within their reserve.
        """
        num_free_rows = self._rows.num_free - num_promised_rows
        must_wait = len(self._waiting) > 0 or overtakes
        if num_free_rows <= 0 or (must_wait and not self.is_short(request.num_known_tokens)):
            return None
        terms = self.terms(request, num_free_rows, overtakes=overtakes)
        if terms is None:
            return None
        num_spare = terms.num_spare_blocks + num_promised_rows
        return BlockTerms(num_spare_blocks=num_spare, max_new_blocks=terms.max_new_blocks)

    def terms(
        self,
        request: Request,
        num_free_rows: int,
        *,
        overtakes: bool = False,
        now_s: float = -math.inf,
    ) -> BlockTerms | None:
        """Conditions for giving a request a row and blocks; walks the rows if these are short.

        `overtakes`, `now_s`: as of `ShortReserve.terms`.
        """
        entering = [r for r in (request, self._reserve.first_long) if r is not None]
        num_available = self._cache.num_available
        is_ample = not overtakes and self._has_room(entering, num_available, num_free_rows)
        if is_ample:
            return BlockTerms(num_spare_blocks=len(self._running))
        if not self._reserve.is_on:
            if self._reserve.overtakes_aged(request, now_s):
                return None
            return BlockTerms(num_spare_blocks=len(self._running))
        held = self._reserve.holdings(self._running)
        return self._reserve.terms(request, held, num_free_rows, overtakes=overtakes, now_s=now_s)

    def victim(self, full: Sequence[Request], num_left: int) -> tuple[Request | None, bool]:
        """The next request to preempt, and whether it is preempted for a waiting request.

        A victim is needed if `full` cannot grow by a block each, or a waiting request does not fit.
        `num_left` blocks are available after that growth; negative = so many are missing.
        Walks the rows only if rows or blocks are short.
        """
        reserve = self._reserve
        if not reserve.is_on:
            return (self._running.newest if num_left < 0 else None), False
        short, long = reserve.first_short, reserve.first_long
        waiting = [request for request in (short, long) if request is not None]
        if not (waiting or full) or (
            waiting and self._has_room(waiting, num_left, self._rows.num_free)
        ):
            return None, False
        held = reserve.holdings(self._running)
        num_short_full = sum([not reserve.is_long(request) for request in full])
        must_shrink = num_left < 0
        if num_left < reserve.num_blocks and num_short_full < len(full):
            must_shrink |= num_left < reserve.num_kept_blocks(held) - num_short_full
        if must_shrink:
            if (last := reserve.last_long(held)) is not None:
                return last, False
            if num_left < 0:
                first = reserve.first_running_long(held)
                return self._running.newest_other_than(first), False
        if not waiting or self.is_outbox_full(for_short=True):
            return None, False
        return self._victim_for_waiting(short, long, held, num_left), True

    def seconds_until_room(self, costs: StepCosts) -> float:
        """Predicted seconds until all waiting requests and one more fit outside the reserve."""
        num_waiting = len(self._waiting)
        num_blocks = self._waiting.num_tokens // self._blocks.block_size + num_waiting + 1
        num_steps = steps_until(
            Room(num_rows=num_waiting + 1, num_blocks=num_blocks + self._reserve.num_blocks),
            Room(num_rows=self._rows.num_free, num_blocks=self._cache.num_available),
            [(num_steps_left(r), len(r.block_ids)) for r in self._running],
        )
        return num_steps * costs.step_seconds(self._running.decode_columns.work)

    def is_outbox_full(self, *, for_short: bool) -> bool:
        """Whether finished prompts without a reservation hold more blocks than the limit."""
        limit = self._unreserved_share * self._cache.num_blocks
        limit += self._reserve.num_blocks if for_short else 0
        return self._handoff_queue.num_unreserved_blocks > limit

    def _has_room(
        self, requests: Sequence[Request], num_available: int, num_free_rows: int
    ) -> bool:
        """Whether all of these could enter at once, leaving a row and the whole reserve free."""
        num_needed = sum([self._blocks.num_blocks_for(r) for r in requests])
        num_kept = self._reserve.num_blocks + len(self._running)
        return num_free_rows > len(requests) and num_available >= num_needed + num_kept

    def _victim_for_waiting(
        self, short: Request | None, long: Request | None, held: Holdings, num_left: int
    ) -> Request | None:
        """The victim for the first waiting short or long request, if that one does not fit."""
        reserve, has_row = self._reserve, self._rows.num_free > 0
        if short is not None and reserve.may_give_way(held):
            num_needed = self._blocks.num_needed(short)
            if not has_row or num_left < num_needed + held.num_short:
                victim = reserve.victim_for_short(held, num_needed)
                if victim is not None:
                    return victim
        if long is not None and held.longs:
            num_kept = reserve.num_kept_blocks(held) + len(self._running)
            if not has_row or num_left < self._blocks.num_needed(long) + num_kept:
                return reserve.victim_for_long(long, held)
        return None

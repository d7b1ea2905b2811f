"""Keeps a share of a worker's blocks and rows for short requests; picks whom to preempt for them.

A request is *long* here when it knows more than `threshold` tokens: what counts is what it holds
now, not what its prompt was. `share` of the blocks and of the rows is the reserve:

    a long one is admitted, and a long decode grows, only beside what short ones do not use of it;
    a short one overtakes a long one that waits only within it;
    a row is not kept idle: a long one may have the last, until a short one asks for it.

Who is preempted is always long and the last in `order` (the queue's): for a long decode that would
grow into the reserve, for a short request that finds no room within it, or for a long request that
waits although one behind it in `order` runs. The last two pass over who has made fewer than
`threshold` tokens since it was preempted last, and the second the first in order.

Bounds, for a request that needs no more blocks than there are:
- The long request that is first in order is never preempted for anybody. If it waits, those behind
  it give way one by one, short ones take no more than the reserve, and nobody is admitted before it
  once only short ones run. So it runs after a bounded time, then the next one is first: nobody
  starves, unless ever more come that are more important.
- A request that has made n tokens was preempted for others at most n / `threshold` + 1 times.
  A short one causes at most one preemption for each block and row that it takes.

Knows no prefix cache and no steps: callers say how many blocks are available.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.kv.cache import BlockTerms
from engine.request import Request, RequestKey
from engine.scheduling.waiting import Order, WaitingQueue

ASKING_STEPS = 4  # how long blocks are freed and kept for a request on another worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The running requests by length, each by admission."""

    short: list[Request]
    longs: list[Request]

    @property
    def num_short(self) -> int:
        return len(self.short)

    @property
    def num_short_blocks(self) -> int:
        """Distinct blocks of the short requests; walks them."""
        return len({block_id for request in self.short for block_id in request.block_ids})


class ShortReserve:
    """The rules of one worker, and its waiting requests by length; share 0 = nothing is kept."""

    def __init__(
        self, share: float, *, threshold: int, num_blocks: int, max_rows: int, order: Order
    ) -> None:
        self.is_on = share > 0.0
        self.num_blocks = int(share * num_blocks)
        self.num_rows = math.ceil(share * max_rows)
        self.threshold = threshold
        self._sort_key = order
        self._short = WaitingQueue(order)
        self._long = WaitingQueue(order)
        self.is_asked = False  # a short request on another worker waits for blocks here
        self._asking: Request | None = None
        self._num_steps_asking = 0

    def is_long(self, request: Request) -> bool:
        return request.num_known_tokens > self.threshold

    # ---- who waits ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Adds a waiting request; it gets no tokens while it waits."""
        if self.is_on:
            (self._long if self.is_long(request) else self._short).add(request)

    def remove(self, key: RequestKey) -> None:
        """Forgets a request that waits no more."""
        for queue in (self._short, self._long):
            queue.remove(key)

    def ask(self, request: Request) -> None:
        """Counts a short request that waits on another worker, for the next few steps."""
        if self.is_on and not self.is_long(request):
            self._asking, self._num_steps_asking, self.is_asked = request, ASKING_STEPS, True

    def end_step(self) -> None:
        """Notes that a step was planned; requests of other workers must ask again."""
        self._num_steps_asking -= 1
        if self._num_steps_asking <= 0:
            self._asking, self.is_asked = None, False

    @property
    def first_short(self) -> Request | None:
        """Returns the first waiting short request; None if there is none or it is off."""
        return self._short.first or self._asking

    @property
    def first_long(self) -> Request | None:
        return self._long.first

    # ---- who may enter --------------------------------------------------------------------------

    def holdings(self, running: Iterable[Request]) -> Holdings:
        """Returns the running requests by length; walks them: ask only when it matters."""
        short: list[Request] = []
        longs: list[Request] = []
        for request in running:
            (longs if self.is_long(request) else short).append(request)
        return Holdings(short=short, longs=longs)

    def num_kept_blocks(self, held: Holdings) -> int:
        """Returns the blocks of the reserve that short requests do not use."""
        return max(0, self.num_blocks - held.num_short_blocks)

    def terms(
        self, request: Request, held: Holdings, num_free_rows: int, *, overtakes: bool = False
    ) -> BlockTerms | None:
        """Returns the terms for a request when rows or blocks are scarce; None = not now.

        overtakes: it passes a long one that waits on another worker.
        """
        num_running = held.num_short + len(held.longs)
        if self.is_long(request):
            if num_free_rows <= self._num_kept_rows(held):
                return None
            num_kept = self.num_kept_blocks(held) if held.longs else 0
            return BlockTerms(num_spare_blocks=num_running + num_kept)
        if not (overtakes or self._is_overtaking(request)):
            return BlockTerms(num_spare_blocks=held.num_short)
        if not held.longs or (num_free_rows <= 1 and held.num_short >= self.num_rows):
            return None
        return BlockTerms(
            num_spare_blocks=held.num_short, max_new_blocks=self.num_kept_blocks(held)
        )

    def _num_kept_rows(self, held: Holdings) -> int:
        """Rows that a long request may not take, because a short one is about to."""
        is_due = self.first_short is not None and held.num_short < self.num_rows
        return int(is_due and bool(held.longs))

    def _is_overtaking(self, request: Request) -> bool:
        first = self.first_long
        return first is not None and self._sort_key(first) < self._sort_key(request)

    # ---- who gives way --------------------------------------------------------------------------

    def last_long(self, held: Holdings) -> Request | None:
        """Returns the long request to preempt so that others can grow; None if at most one runs."""
        return self._last(held.longs) if len(held.longs) > 1 else None

    def first_running_long(self, held: Holdings) -> Request | None:
        """Returns the running long request that is never preempted: the first in order."""
        return min(held.longs, key=self._sort_key, default=None)

    def may_give_way(self, held: Holdings) -> bool:
        """Whether some request could be preempted for a short one; cheaper than finding which."""
        return held.num_short < self.num_rows and len(held.longs) > 1

    def victim_for_short(self, held: Holdings, num_new_blocks: int) -> Request | None:
        """Returns whom to preempt for a short request of `num_new_blocks`; None = it waits."""
        if num_new_blocks > self.num_kept_blocks(held):
            return None
        first = self.first_running_long(held)
        return self._last([r for r in held.longs if r is not first and self._has_progressed(r)])

    def victim_for_long(self, request: Request, held: Holdings) -> Request | None:
        """Returns the request to preempt for a long one that precedes it in order."""
        sort_key = self._sort_key(request)
        return self._last(
            [r for r in held.longs if self._sort_key(r) > sort_key and self._has_progressed(r)]
        )

    def _has_progressed(self, request: Request) -> bool:
        return request.num_known_tokens - request.num_known_at_preemption >= self.threshold

    def _last(self, requests: list[Request]) -> Request | None:
        """Returns the last request in order; among equals the one admitted last."""
        return max(reversed(requests), key=self._sort_key, default=None)

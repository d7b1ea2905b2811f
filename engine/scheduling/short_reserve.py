"""Reserves a share of a worker's blocks and rows for short requests, and picks preemption victims.

A request is *long* here when it has more than `threshold` known tokens: its current size counts,
not the length of its prompt. `share` of the blocks and of the rows is the reserve:

    a long request is admitted, and a long decode grows, only outside the part of the reserve that
    short requests do not use;
    a short request overtakes a waiting long one only within the reserve;
    a long request overtakes another that has waited `max_long_wait_s` only where both fit;
    no row is kept idle: a long request may take the last one until a short request waits for it.

With a `share` of 0 nothing is reserved and nobody is preempted for another; but whoever overtakes a
long request that has waited `max_long_wait_s`, short or long, enters only where both fit.

A request that was preempted has waited since it arrived. One that waits for something else than
room, such as a prefix that another request computes, keeps nobody from entering.

A victim is always long and the last in `order` (the queue's). It is preempted for a long decode
that would grow into the reserve, for a short request that does not fit within it, or for a long
request that waits although one behind it in `order` runs. The last two cases skip requests that
have made fewer than `threshold` tokens since their last preemption; the second also skips the
first long request in order.

Bounds, for a request that needs no more blocks than there are:
- The long request that is first in order is never preempted for another. If it waits, those behind
  it are preempted one by one, short requests take no more than the reserve, and nothing is admitted
  before it once only short requests run. Other long ones that the queue offers sooner (most of
  their tokens are cached, or they are due earlier) take what it needs for `max_long_wait_s` at
  most, and until the queue offers it a place then. So it runs after a bounded time, and then the
  next one is first. No request starves unless more important ones keep arriving.
- With a `share` of 0 it waits, beyond `max_long_wait_s`, for those that run to end.
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

ASKING_STEPS = 4  # steps for which a request that waits on another worker counts here


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The running requests by length, each list in admission order."""

    short: list[Request]
    longs: list[Request]

    @property
    def num_short(self) -> int:
        return len(self.short)

    @property
    def num_short_blocks(self) -> int:
        """Number of distinct blocks of short requests; takes time linear in their blocks."""
        return len({block_id for request in self.short for block_id in request.block_ids})


class ShortReserve:
    """The reserve of one worker, and its waiting requests by length; share 0 = no reserve."""

    def __init__(
        self,
        share: float,
        *,
        threshold: int,
        num_blocks: int,
        max_rows: int,
        order: Order,
        max_long_wait_s: float,
    ) -> None:
        self.is_on = share > 0.0
        self.num_blocks = int(share * num_blocks)
        self.num_rows = math.ceil(share * max_rows)
        self.threshold = threshold
        self._sort_key = order
        self._max_long_wait_s = max_long_wait_s
        self._short = WaitingQueue(order)
        self._long = WaitingQueue(order)
        self._refused: set[RequestKey] = set()  # long ones that found no room when offered last
        self.is_asked = False  # whether a short request on another worker asked lately
        self._asking: Request | None = None
        self._num_steps_asking = 0

    def is_long(self, request: Request) -> bool:
        return request.num_known_tokens > self.threshold

    # ---- waiting requests ------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """The request waits from now on; its known tokens do not change while it does."""
        (self._long if self.is_long(request) else self._short).add(request)

    def remove(self, key: RequestKey) -> None:
        """The request no longer waits."""
        self._refused.discard(key)
        for queue in (self._short, self._long):
            queue.remove(key)

    def refused(self, request: Request) -> None:
        """The request was offered a place and found no row, or not enough blocks."""
        if self.is_long(request):
            self._refused.add(request.key)

    def skipped(self, request: Request) -> None:
        """The request was offered a place and waits for something else."""
        self._refused.discard(request.key)

    def ask(self, request: Request) -> None:
        """Count a short request that waits on another worker as waiting here for a few steps."""
        if self.is_on and not self.is_long(request):
            self._asking, self._num_steps_asking, self.is_asked = request, ASKING_STEPS, True

    def end_step(self) -> None:
        """Count down the steps of the asking request; one that still waits will ask again."""
        self._num_steps_asking -= 1
        if self._num_steps_asking <= 0:
            self._asking, self.is_asked = None, False

    @property
    def first_short(self) -> Request | None:
        """The first waiting short request; None = there is none, or the reserve is off."""
        return (self._short.first or self._asking) if self.is_on else None

    @property
    def is_short_waiting(self) -> bool:
        """Whether a short request waits, with or without a reserve; or one asks (reserve only)."""
        return len(self._short) > 0 or self._asking is not None

    @property
    def first_long(self) -> Request | None:
        return self._long.first

    # ---- admission -------------------------------------------------------------------------------

    def holdings(self, running: Iterable[Request]) -> Holdings:
        """Running requests by length; linear time, so call it only if rows or blocks are short."""
        short: list[Request] = []
        longs: list[Request] = []
        for request in running:
            (longs if self.is_long(request) else short).append(request)
        return Holdings(short=short, longs=longs)

    def num_kept_blocks(self, held: Holdings) -> int:
        """Blocks of the reserve that short requests do not use."""
        return max(0, self.num_blocks - held.num_short_blocks)

    def terms(
        self,
        request: Request,
        held: Holdings,
        num_free_rows: int,
        *,
        overtakes: bool = False,
        now_s: float = -math.inf,
    ) -> BlockTerms | None:
        """Conditions for giving a request a row and blocks when these are short; None = not now.

        overtakes: whether a long request that waits on another worker is overtaken. now_s: -inf =
        none that waits here has waited for long.
        """
        num_running = held.num_short + len(held.longs)
        if self.is_long(request):
            if num_free_rows <= self._num_kept_rows(held) or self.overtakes_aged(request, now_s):
                return None
            num_kept = self.num_kept_blocks(held) if held.longs else 0
            return BlockTerms(num_spare_blocks=num_running + num_kept)
        if not overtakes and self.overtaken_by(request) is None:
            return BlockTerms(num_spare_blocks=held.num_short)
        if not held.longs or (num_free_rows <= 1 and held.num_short >= self.num_rows):
            return None
        return BlockTerms(
            num_spare_blocks=held.num_short, max_new_blocks=self.num_kept_blocks(held)
        )

    def _num_kept_rows(self, held: Holdings) -> int:
        """1 if a long request must leave the last row to a short one that is about to take it."""
        is_due = self.first_short is not None and held.num_short < self.num_rows
        return int(is_due and bool(held.longs))

    def overtaken_by(self, request: Request) -> Request | None:
        """The first waiting long request, if it is before `request` in order."""
        first = self.first_long
        is_before = first is not None and self._sort_key(first) < self._sort_key(request)
        return first if is_before else None

    def overtakes_aged(self, request: Request, now_s: float) -> bool:
        """Whether the first waiting long request precedes `request` and waits for room too long."""
        first = self.overtaken_by(request)
        if first is None or first.key not in self._refused:
            return False
        return now_s - first.arrival_s >= self._max_long_wait_s

    # ---- preemption ------------------------------------------------------------------------------

    def last_long(self, held: Holdings) -> Request | None:
        """The victim when long decodes must grow; None if at most one long request runs."""
        return self._last(held.longs) if len(held.longs) > 1 else None

    def first_running_long(self, held: Holdings) -> Request | None:
        """The first running long request in order, which is never preempted for another."""
        return min(held.longs, key=self._sort_key, default=None)

    def may_give_way(self, held: Holdings) -> bool:
        """Whether a victim for a short request can exist; cheaper than `victim_for_short`."""
        return held.num_short < self.num_rows and len(held.longs) > 1

    def victim_for_short(self, held: Holdings, num_new_blocks: int) -> Request | None:
        """The victim for a short request that needs `num_new_blocks`; None = it has to wait."""
        if num_new_blocks > self.num_kept_blocks(held):
            return None
        first = self.first_running_long(held)
        return self._last([r for r in held.longs if r is not first and self._has_progressed(r)])

    def victim_for_long(self, request: Request, held: Holdings) -> Request | None:
        """The victim for a long request: one behind it in order; None = there is none."""
        sort_key = self._sort_key(request)
        return self._last(
            [r for r in held.longs if self._sort_key(r) > sort_key and self._has_progressed(r)]
        )

    def _has_progressed(self, request: Request) -> bool:
        return request.num_known_tokens - request.num_known_at_preemption >= self.threshold

    def _last(self, requests: list[Request]) -> Request | None:
        """The last in order; of equals, the one admitted last."""
        return max(reversed(requests), key=self._sort_key, default=None)

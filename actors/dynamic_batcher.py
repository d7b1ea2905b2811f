"""Gathers concurrent calls into batches for a worker that takes one batch at a time.

While the worker is busy, waiting costs nothing, so calls gather until it is done; when it is idle,
calls that arrive together go at once. Knows neither tokenizers nor Ray.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.clock import Clock, MonotonicClock

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatistics:
    """Counters since the start."""

    num_batches: int
    num_items: int
    largest_batch: int
    num_queued: int  # now


@dataclass(slots=True, eq=False)
class _Call(Generic[Item, Result]):
    item: Item
    arrival_s: float
    result: asyncio.Future[Result]


async def wait_at_most(event: asyncio.Event, timeout_s: float) -> None:
    """Return once `event` is set or `timeout_s` have passed."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass


class DynamicBatcher(Generic[Item, Result]):
    """Calls `run` with batches of at most `max_batch_size` items, one batch at a time.

    A batch leaves when it is full, when its oldest item has waited `wait_timeout_s`, or at once
    when nothing was running or queued as it arrived. The queue is bounded by its callers, each of
    which waits for its own result. All methods belong to one event loop.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        max_batch_size: int,
        wait_timeout_s: float,
        clock: Clock | None = None,
        wait: Callable[[asyncio.Event, float], Awaitable[None]] = wait_at_most,
    ) -> None:
        self._run = run
        self._max_batch_size = max_batch_size
        self._wait_timeout_s = wait_timeout_s
        self._clock = clock or MonotonicClock()
        self._wait = wait
        self._queue: deque[_Call[Item, Result]] = deque()
        self._is_full = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._num_batches = 0
        self._num_items = 0
        self._largest_batch = 0

    def statistics(self) -> BatchStatistics:
        return BatchStatistics(
            num_batches=self._num_batches,
            num_items=self._num_items,
            largest_batch=self._largest_batch,
            num_queued=len(self._queue),
        )

    async def submit(self, item: Item) -> Result:
        """The result for `item`; raises what `run` raised for its batch."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        call = _Call(item, self._clock.now_s(), result)
        self._queue.append(call)
        if len(self._queue) >= self._max_batch_size:
            self._is_full.set()
        if self._worker is None:
            # The task starts after this round of the loop, so calls made together go together.
            self._worker = loop.create_task(self._work())
        return await call.result

    async def _work(self) -> None:
        """Run batches until the queue is empty; the first leaves at once."""
        try:
            await self._run_batch(self._take())
            while self._queue:
                await self._gather()
                await self._run_batch(self._take())
        finally:
            self._worker = None

    async def _gather(self) -> None:
        remaining_s = self._queue[0].arrival_s + self._wait_timeout_s - self._clock.now_s()
        if len(self._queue) < self._max_batch_size and remaining_s > 0:
            self._is_full.clear()
            await self._wait(self._is_full, remaining_s)

    def _take(self) -> list[_Call[Item, Result]]:
        """Takes the next batch; leaves out calls whose caller has gone."""
        num_taken = min(len(self._queue), self._max_batch_size)
        calls = [self._queue.popleft() for _ in range(num_taken)]
        return [call for call in calls if not call.result.done()]

    async def _run_batch(self, calls: Sequence[_Call[Item, Result]]) -> None:
        if not calls:
            return
        self._num_batches += 1
        self._num_items += len(calls)
        self._largest_batch = max(self._largest_batch, len(calls))
        try:
            results = await self._run([call.item for call in calls])
            assert len(results) == len(calls), f"{len(results)} results for {len(calls)} items"
        except Exception as error:  # noqa: BLE001 - every caller gets it; the next batch goes on
            for call in calls:
                if not call.result.done():
                    call.result.set_exception(error)
            return
        for call, result in zip(calls, results, strict=True):
            if not call.result.done():
                call.result.set_result(result)

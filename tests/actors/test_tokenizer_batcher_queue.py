"""Gathering calls into batches, without waiting on a clock."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from actors.dynamic_batcher import BatchStatistics, DynamicBatcher, wait_at_most
from engine.clock import ManualClock


class Worker:
    """A `run` that records its batches and finishes each only when told."""

    def __init__(self, *, is_blocked: bool = True) -> None:
        self.batches: list[list[int]] = []
        self._is_blocked = is_blocked
        self._may_finish: asyncio.Queue[None] = asyncio.Queue()

    async def run(self, items: Sequence[int]) -> list[str]:
        self.batches.append(list(items))
        if self._is_blocked:
            await self._may_finish.get()
        if -1 in items:
            raise ValueError("a broken batch")
        return [f"<{item}>" for item in items]

    def finish_one(self) -> None:
        self._may_finish.put_nowait(None)


class ManualWait:
    """Stands for the time-out: returns when the event is set or when `expire` is called."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []
        self._expired = asyncio.Event()

    async def __call__(self, event: asyncio.Event, timeout_s: float) -> None:
        self.timeouts.append(timeout_s)
        self._expired.clear()
        waits = [asyncio.ensure_future(e.wait()) for e in (event, self._expired)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def expire(self) -> None:
        self._expired.set()


class Bench:
    """A batcher of at most three items, its worker, clock and time-outs."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.clock = ManualClock()
        self.wait = ManualWait()
        self.batcher: DynamicBatcher[int, str] = DynamicBatcher(
            worker.run, max_batch_size=3, wait_timeout_s=0.5, clock=self.clock, wait=self.wait
        )
        self.calls: list[asyncio.Task[str]] = []

    def submit(self, *items: int) -> None:
        loop = asyncio.get_running_loop()
        self.calls += [loop.create_task(self.batcher.submit(item)) for item in items]

    async def finish_one(self) -> None:
        self.worker.finish_one()
        await settle()

    async def results(self) -> list[str | BaseException]:
        return await asyncio.gather(*self.calls, return_exceptions=True)


async def settle() -> None:
    """Let everything that can run without time passing run."""
    for _ in range(30):
        await asyncio.sleep(0)


def on_a_bench(test: Callable[[Bench], Awaitable[None]], *, is_blocked: bool = True) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await test(Bench(Worker(is_blocked=is_blocked)))

    asyncio.run(main())


def test_a_call_to_an_idle_batcher_goes_at_once() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(1)
        await settle()
        assert bench.worker.batches == [[1]]
        await bench.finish_one()
        bench.submit(2)
        await settle()
        assert bench.worker.batches == [[1], [2]]
        await bench.finish_one()
        assert await bench.results() == ["<1>", "<2>"]
        assert bench.wait.timeouts == []

    on_a_bench(test)


def test_calls_that_arrive_together_share_one_batch() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(1, 2, 3)
        assert await bench.results() == ["<1>", "<2>", "<3>"]
        assert bench.worker.batches == [[1, 2, 3]]
        assert bench.wait.timeouts == []

    on_a_bench(test, is_blocked=False)


def test_calls_during_a_batch_gather_until_they_fill_the_next() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(1)
        await settle()
        bench.submit(2)
        await settle()
        await bench.finish_one()
        assert bench.worker.batches == [[1]], "2 waits for company"
        bench.submit(3)
        await settle()
        assert bench.worker.batches == [[1]]
        bench.submit(4)
        await settle()
        assert bench.worker.batches == [[1], [2, 3, 4]]
        await bench.finish_one()
        assert await bench.results() == ["<1>", "<2>", "<3>", "<4>"]

    on_a_bench(test)


def test_an_unfilled_batch_leaves_when_its_oldest_call_has_waited_enough() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(1)
        await settle()
        bench.submit(2)
        await settle()
        bench.clock.advance(0.2)
        await bench.finish_one()
        assert bench.wait.timeouts == [pytest.approx(0.3)], "the running batch's time counts"
        assert bench.worker.batches == [[1]]
        bench.wait.expire()
        await settle()
        assert bench.worker.batches == [[1], [2]]
        await bench.finish_one()
        assert await bench.results() == ["<1>", "<2>"]

    on_a_bench(test)


def test_a_later_call_does_not_make_the_oldest_wait_longer() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(1)
        await settle()
        bench.submit(2)
        await settle()
        bench.clock.advance(0.2)
        bench.submit(3)
        await settle()
        bench.clock.advance(0.1)
        await bench.finish_one()
        assert bench.wait.timeouts == [pytest.approx(0.2)]
        bench.wait.expire()
        await settle()
        assert bench.worker.batches == [[1], [2, 3]]
        await bench.finish_one()
        assert await bench.results() == ["<1>", "<2>", "<3>"]

    on_a_bench(test)


def test_calls_that_already_waited_through_a_long_batch_wait_no_more() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(1)
        await settle()
        bench.submit(2)
        await settle()
        bench.clock.advance(0.5)
        await bench.finish_one()
        assert bench.worker.batches == [[1], [2]]
        assert bench.wait.timeouts == []
        await bench.finish_one()
        await bench.results()

    on_a_bench(test)


def test_a_crowd_leaves_in_order_in_full_batches_and_one_rest() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(*range(8))
        await settle()
        bench.wait.expire()
        assert await bench.results() == [f"<{item}>" for item in range(8)]
        assert bench.worker.batches == [[0, 1, 2], [3, 4, 5], [6, 7]]
        assert bench.batcher.statistics() == BatchStatistics(
            num_batches=3, num_items=8, largest_batch=3, num_queued=0
        )

    on_a_bench(test, is_blocked=False)


def test_a_caller_that_gave_up_is_left_out() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(1)
        await settle()
        bench.submit(2, 3, 4)
        await settle()
        bench.calls[2].cancel()
        await bench.finish_one()
        assert bench.worker.batches == [[1], [2, 4]]
        bench.calls[1].cancel()
        await bench.finish_one()
        first, second, third, fourth = await bench.results()
        assert (first, fourth) == ("<1>", "<4>")
        assert isinstance(second, asyncio.CancelledError)
        assert isinstance(third, asyncio.CancelledError)

    on_a_bench(test)


def test_when_everybody_gave_up_nothing_runs_and_later_calls_do() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(1)
        await settle()
        bench.submit(2)
        await settle()
        bench.calls[1].cancel()
        bench.clock.advance(1)
        await bench.finish_one()
        assert bench.worker.batches == [[1]]
        bench.submit(3)
        await settle()
        assert bench.worker.batches == [[1], [3]]
        await bench.finish_one()
        assert (await bench.results())[2] == "<3>"

    on_a_bench(test)


def test_a_batch_that_fails_fails_its_callers_and_nobody_else() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(1, -1)
        await settle()
        bench.submit(5, 6, 7)
        first, second, *others = await bench.results()
        assert isinstance(first, ValueError)
        assert isinstance(second, ValueError)
        assert others == ["<5>", "<6>", "<7>"]

    on_a_bench(test, is_blocked=False)


def test_a_run_that_loses_a_result_is_an_error_not_a_hang() -> None:
    async def lossy(items: Sequence[int]) -> list[int]:
        return list(items)[1:]

    async def main() -> None:
        batcher: DynamicBatcher[int, int] = DynamicBatcher(
            lossy, max_batch_size=3, wait_timeout_s=1
        )
        async with asyncio.timeout(20):
            with pytest.raises(AssertionError, match="0 results for 1 items"):
                await batcher.submit(1)

    asyncio.run(main())


def test_waiting_ends_with_the_event_or_the_time_out() -> None:
    async def main() -> None:
        event = asyncio.Event()
        await wait_at_most(event, 0.001)
        assert not event.is_set()
        event.set()
        async with asyncio.timeout(20):
            await wait_at_most(event, 10_000)

    asyncio.run(main())

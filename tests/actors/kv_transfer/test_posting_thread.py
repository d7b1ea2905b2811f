"""The thread that posts ahead: order, the first failure, deadlines, aborts."""

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from actors.kv_transfer.channels import posting_thread
from actors.kv_transfer.channels.posting_thread import PostingThread
from engine.errors import HandoffError

PATIENT_S = 1000.0


class Device:
    """Operations that are over when the test says so."""

    def __init__(self, deadline_s: float) -> None:
        self.posted: list[int] = []
        self.num_over = 0  # the first so many
        self.num_cuts = 0
        self.has_cut = threading.Event()
        self.before_cut: Callable[[], object] = lambda: None
        self.drained: list[int] = []
        self.has_posted = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.now_s: float | None = None  # None: time goes by itself
        self.thread = PostingThread(3, deadline_s, self._cut, self._clock)

    def start(self, number: int) -> "asyncio.Future[None]":
        def post() -> Callable[[], bool]:
            self.posted.append(number)
            self.loop.call_soon_threadsafe(self.has_posted.set)
            return lambda: number < self.num_over

        return self.thread.start("send", post, lambda: self._drain(number))

    async def wait_posted(self, number: int) -> None:
        while len(self.posted) < number:
            self.has_posted.clear()
            await self.has_posted.wait()

    def _clock(self) -> float:
        return time.monotonic() if self.now_s is None else self.now_s

    def _drain(self, number: int) -> None:
        self.drained.append(number)

    def _cut(self) -> None:
        """As on a GPU: what is aborted ends, too."""
        self.before_cut()
        self.num_cuts += 1
        self.num_over = 10**9
        self.has_cut.set()


def on_device(scenario: Callable[[Device], Awaitable[None]], deadline_s: float = PATIENT_S) -> None:
    async def main() -> None:
        device = Device(deadline_s)
        async with asyncio.timeout(30):
            await scenario(device)
            await device.thread.close()
        assert device.num_cuts == 1
        assert not device.thread.is_open
        assert "kv-pair-3" not in [thread.name for thread in threading.enumerate()]

    asyncio.run(main())


async def failures_of(waiting: "list[asyncio.Future[None]]") -> list[str]:
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(failure, HandoffError) for failure in ended), ended
    return [str(failure) for failure in ended]


def test_everything_is_posted_before_the_first_is_over_and_ends_in_order() -> None:
    async def scenario(device: Device) -> None:
        ended: list[int] = []
        waiting = [device.start(number) for number in range(5)]
        for number, future in enumerate(waiting):
            future.add_done_callback(lambda _, number=number: ended.append(number))
        await device.wait_posted(5)
        assert ended == []
        device.num_over = 2
        await waiting[1]
        assert ended == [0, 1]
        assert not waiting[2].done()
        device.num_over = 5
        await waiting[4]
        assert ended == device.posted == [0, 1, 2, 3, 4]

    on_device(scenario)


def test_an_operation_that_cannot_be_posted_ends_all_that_is_under_way() -> None:
    async def scenario(device: Device) -> None:
        waiting = [device.start(number) for number in range(2)]

        def refuse() -> Callable[[], bool]:
            raise RuntimeError("NCCL communicator was aborted")

        waiting.append(device.thread.start("send", refuse))
        assert all("was aborted" in failure for failure in await failures_of(waiting))
        with pytest.raises(HandoffError, match="epoch 3 did not send"):
            device.start(9)
        assert device.posted == [0, 1]

    on_device(scenario)


def test_a_mistake_of_ours_ends_the_connection_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(device: Device) -> None:
        def slip() -> Callable[[], bool]:
            raise KeyError("slot")

        assert "slot" in (await failures_of([device.thread.start("send", slip)]))[0]
        assert "unexpected" in caplog.text

    on_device(scenario)


def test_an_operation_that_is_not_over_at_its_deadline_ends_all() -> None:
    async def scenario(device: Device) -> None:
        waiting = [device.start(number) for number in range(3)]
        device.num_over = 1
        await waiting[0]
        await device.wait_posted(3)
        device.now_s = time.monotonic() + PATIENT_S
        device.thread._watch()
        assert all("did not send" in failure for failure in await failures_of(waiting[1:]))

    on_device(scenario)


def test_each_operation_has_the_deadline_from_when_it_is_the_oldest() -> None:
    async def scenario(device: Device) -> None:
        device.now_s = 0.0
        waiting = [device.start(number) for number in range(2)]
        await device.wait_posted(2)
        device.now_s = 0.9 * PATIENT_S
        device.num_over = 1
        await waiting[0]
        device.now_s = 1.8 * PATIENT_S
        device.thread._watch()
        assert device.thread.is_open
        device.now_s = 1.95 * PATIENT_S
        device.thread._watch()
        await failures_of(waiting[1:])

    on_device(scenario)


def test_a_post_that_waits_for_a_device_does_not_hold_up_the_deadline() -> None:
    async def scenario(device: Device) -> None:
        def post() -> Callable[[], bool]:
            assert device.has_cut.wait(30), "nobody cut it"
            raise RuntimeError("aborted")

        waiting = [device.start(0), device.thread.start("send", post)]
        await failures_of(waiting)

    on_device(scenario, deadline_s=0.2)


def test_nothing_that_waited_goes_on_before_the_abort_is_over() -> None:
    async def scenario(device: Device) -> None:
        order: list[str] = []
        device.before_cut = lambda: (gate.wait(30), order.append("cut"))
        gate = threading.Event()

        def post() -> Callable[[], bool]:
            device.loop.call_soon_threadsafe(device.has_posted.set)
            try:
                device.thread.wait("greet", lambda: lambda: False)
            finally:
                order.append("goes on")
            raise AssertionError("it was waited for without an end")

        waiting = device.thread.start("open", post)
        await device.has_posted.wait()
        closing = asyncio.ensure_future(device.thread.close())
        device.loop.call_later(0.05, gate.set)
        await closing
        await failures_of([waiting])
        assert order == ["cut", "goes on"]

    on_device(scenario)


def test_an_abort_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting_thread, "ABORT_S", 0.01)

    async def scenario(device: Device) -> None:
        gate = threading.Event()
        device.before_cut = lambda: gate.wait(30)
        waiting = [device.start(number) for number in range(2)]
        await device.wait_posted(2)
        await device.thread.close()
        await failures_of(waiting)
        gate.set()
        await asyncio.to_thread(device.has_cut.wait, 30)

    on_device(scenario)


def test_what_an_abort_ends_is_a_failure_though_the_device_calls_it_over() -> None:
    async def scenario(device: Device) -> None:
        waiting = [device.start(number) for number in range(3)]
        await device.wait_posted(2)
        await asyncio.to_thread(device.thread.abort)
        assert device.num_over > 3
        await failures_of(waiting)
        assert device.drained == [0, 1, 2], "something may still touch memory"

    on_device(scenario)


def test_closing_ends_what_is_under_way_and_waits_for_an_abort_by_another() -> None:
    async def scenario(device: Device) -> None:
        waiting = [device.start(number) for number in range(random.randint(0, 3))]
        await asyncio.gather(
            device.thread.close(), asyncio.to_thread(device.thread.abort), device.thread.close()
        )
        await failures_of(waiting)

    on_device(scenario)


def test_one_that_waits_within_a_post_ends_at_the_deadline() -> None:
    async def scenario(device: Device) -> None:
        def post() -> Callable[[], bool]:
            device.thread.wait("greet", lambda: lambda: False)
            raise AssertionError("it was waited for without an end")

        [failure] = await failures_of([device.thread.start("open", post)])
        assert "did not greet" in failure

    on_device(scenario, deadline_s=0.2)

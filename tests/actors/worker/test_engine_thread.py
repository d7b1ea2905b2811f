"""The engine's thread: calls run between steps, failures are told once, and it ends when closed."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from actors.worker.engine_thread import EngineThread, _Call
from configs.schema import LapsConfig
from engine.core import EngineCore
from engine.cost_model import PRIOR
from engine.errors import CapacityError, WorkerError
from engine.plan import StepPlan, StepResult
from engine.scheduling.contracts import StepOutput
from tests.engine.scheduling.replica import Replica, params_of, prompt_of
from tests.harness.fakes import FakePendingStep


class Host:
    """An engine in its thread; what it says is kept, and waited for without sleeping."""

    def __init__(self, replica: Replica, core: EngineCore | None = None) -> None:
        self.replica = replica
        self.log: list[str] = []
        self.outputs: list[StepOutput] = []
        self.failures: list[BaseException] = []
        self.has_failed = threading.Event()
        self.is_idle = threading.Event()
        self.thread = EngineThread(
            core or replica.core, on_step=self._on_step, on_failure=self._on_failure
        )

    @property
    def tokens(self) -> list[int]:
        return [record.token_id for output in self.outputs for _, record in output.tokens]

    def _on_step(self, output: StepOutput) -> None:
        self.log.append("step")
        self.outputs.append(output)
        if not self.replica.core.has_work:
            self.is_idle.set()

    def _on_failure(self, error: BaseException) -> None:
        self.failures.append(error)
        self.has_failed.set()


class _GatedStep:
    """A step whose result comes only when the test lets it."""

    def __init__(self, step: FakePendingStep, executor: "_GatedExecutor") -> None:
        self._step = step
        self._executor = executor

    def wait(self) -> StepResult:
        self._executor.is_waiting.set()
        assert self._executor.may_end.wait(20)
        return self._step.wait()


class _GatedExecutor:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.is_waiting = threading.Event()
        self.may_end = threading.Event()

    def launch(self, plan: StepPlan) -> _GatedStep:
        return _GatedStep(self._replica.executor.launch(plan), self)


def _wait_for_closing(thread: EngineThread) -> None:
    with thread._wake:
        assert thread._wake.wait_for(lambda: thread._is_closing, 20)


def _refuse_to_idle() -> None:
    raise AssertionError("the thread idles although a step can be launched or committed")


def _run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):  # a hang is a failure, not a wait
            await scenario()

    asyncio.run(bounded())


async def _wait(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 20), "nothing happened in 20 s"


def test_requests_that_are_added_by_a_call_run_to_their_end() -> None:
    async def scenario() -> None:
        host = Host(Replica())
        host.thread.start()
        host.is_idle.clear()
        request = await host.thread.call(lambda: host.replica.add("a", prompt_of(5)))
        await _wait(host.is_idle)
        host.thread.close()
        assert host.tokens == host.replica.expected(request)
        assert host.failures == []

    _run(scenario)


def test_a_call_returns_its_result_and_runs_on_the_engine_thread() -> None:
    async def scenario() -> None:
        host = Host(Replica())
        host.thread.start()
        names = await asyncio.gather(
            *(host.thread.call(lambda: threading.current_thread().name) for _ in range(5))
        )
        host.thread.close()
        assert set(names) == {"engine"}

    _run(scenario)


def test_an_exception_in_a_call_reaches_its_caller_and_nobody_else() -> None:
    def refuse() -> None:
        raise CapacityError("full")

    async def scenario() -> None:
        host = Host(Replica())
        host.thread.start()
        with pytest.raises(CapacityError, match="full"):
            await host.thread.call(refuse)
        assert await host.thread.call(lambda: 7) == 7
        host.thread.close()
        assert host.failures == []

    _run(scenario)


def test_posted_calls_run_in_order_between_two_steps() -> None:
    class SlowExecutor:
        """A step that ends only when the test lets it."""

        def __init__(self, replica: Replica) -> None:
            self.replica = replica
            self.has_started = threading.Event()
            self.may_end = threading.Event()

        def launch(self, plan: StepPlan) -> FakePendingStep:
            self.has_started.set()
            assert self.may_end.wait(20)
            return self.replica.executor.launch(plan)

    async def scenario() -> None:
        replica = Replica()
        executor = SlowExecutor(replica)
        host = Host(replica, EngineCore(replica.scheduler, executor, replica.clock, overlap=False))
        request = replica.add("a", prompt_of(5))
        host.thread.start()
        await _wait(executor.has_started)
        for name in "xyz":
            host.thread.post(lambda name=name: host.log.append(name))  # type: ignore[misc]
        abort = asyncio.create_task(host.thread.call(lambda: replica.scheduler.abort(request.key)))
        await asyncio.sleep(0)
        assert host.log == []
        executor.may_end.set()
        assert await abort
        await host.thread.call(lambda: None)
        host.thread.close()
        assert host.log[:5] == ["step", "x", "y", "z", "step"]
        assert host.tokens == replica.expected(request)[:1]

    _run(scenario)


def test_requests_that_cannot_run_wait_for_the_call_that_makes_room() -> None:
    async def scenario() -> None:
        replica = Replica(num_blocks=4, max_model_len=16)
        replica.lent = replica.cache.allocate(4) or []
        host = Host(replica)
        host.thread.start()
        request = await host.thread.call(lambda: replica.add("a", prompt_of(5)))
        await host.thread.call(lambda: None)
        assert host.tokens == []
        host.is_idle.clear()
        await host.thread.call(lambda: replica.cache.release(replica.lent))
        await _wait(host.is_idle)
        host.thread.close()
        assert host.tokens == replica.expected(request)

    _run(scenario)


def test_overlapped_requests_run_to_their_end_without_an_idle_wait() -> None:
    async def scenario() -> None:
        replica = Replica(max_rows=1, overlap=True)
        host = Host(replica)
        requests = [replica.add(name, prompt_of(5, i)) for i, name in enumerate("ab")]
        host.thread._idle = _refuse_to_idle  # type: ignore[method-assign]
        host.thread.start()
        await _wait(host.is_idle)
        host.thread.close()
        assert host.failures == []
        assert host.tokens == [token for r in requests for token in replica.expected(r)]

    _run(scenario)


def test_closing_commits_the_step_in_flight_and_tells_its_tokens() -> None:
    async def scenario() -> None:
        replica = Replica(overlap=True)
        executor = _GatedExecutor(replica)
        host = Host(replica, EngineCore(replica.scheduler, executor, replica.clock, overlap=True))
        request = replica.add("a", prompt_of(5), params=params_of(50))
        host.thread.start()
        await _wait(executor.is_waiting)
        closing = asyncio.create_task(asyncio.to_thread(host.thread.close))
        await asyncio.to_thread(_wait_for_closing, host.thread)
        executor.may_end.set()
        await closing
        num_launched = len(replica.executor.plans)
        assert (num_launched, replica.executor.num_waited) == (2, 2)
        assert host.tokens == replica.expected(request)[:2]
        assert host.failures == []

    _run(scenario)


class _BrokenExecutor:
    def launch(self, plan: StepPlan) -> FakePendingStep:
        raise ZeroDivisionError(f"the device failed in step {plan.step}")


def _broken_host() -> Host:
    replica = Replica()
    core = EngineCore(replica.scheduler, _BrokenExecutor(), replica.clock, overlap=False)
    return Host(replica, core)


def test_a_failing_step_is_told_once_and_ends_the_thread() -> None:
    async def scenario() -> None:
        host = _broken_host()
        host.thread.start()
        await host.thread.call(lambda: host.replica.add("a", prompt_of(5)))
        await _wait(host.has_failed)
        host.thread.close()
        assert [str(error) for error in host.failures] == ["the device failed in step 0"]
        assert host.outputs == []

    _run(scenario)


def test_a_failing_posted_call_is_an_engine_failure() -> None:
    async def scenario() -> None:
        host = Host(Replica())
        host.thread.start()
        host.thread.post(lambda: 1 / 0)
        await _wait(host.has_failed)
        assert [type(error) for error in host.failures] == [ZeroDivisionError]

    _run(scenario)


def test_after_a_failure_nobody_waits_for_an_answer() -> None:
    async def scenario() -> None:
        host = _broken_host()
        host.replica.add("a", prompt_of(5))
        waiting = asyncio.create_task(host.thread.call(lambda: 7))
        await asyncio.sleep(0)
        host.thread.start()
        await _wait(host.has_failed)
        assert await waiting == 7  # it ran before the step that failed
        with pytest.raises(WorkerError):
            await host.thread.call(lambda: None)
        with pytest.raises(WorkerError):
            host.thread.post(lambda: None)

    _run(scenario)


def test_closing_ends_the_thread_and_answers_calls_that_will_not_run() -> None:
    # They were dropped, and whoever awaited one waited for ever.
    async def scenario() -> None:
        host = Host(Replica())
        waiting = asyncio.create_task(host.thread.call(lambda: None))
        await asyncio.sleep(0)
        host.thread.close()  # before it ever ran
        with pytest.raises(WorkerError, match="ended"):
            await waiting
        with pytest.raises(WorkerError, match="closing"):
            await host.thread.call(lambda: None)

    _run(scenario)


def test_closing_twice_or_an_idle_thread_returns() -> None:
    async def scenario() -> None:
        host = Host(Replica())
        host.thread.start()
        await host.thread.call(lambda: None)
        host.thread.close()
        host.thread.close()
        assert host.failures == []
        assert not host.thread._thread.is_alive()

    _run(scenario)


def test_a_caller_that_gave_up_does_not_disturb_the_engine() -> None:
    async def scenario() -> None:
        host = Host(Replica())
        given_up = asyncio.create_task(host.thread.call(lambda: 1))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        host.thread.start()
        assert await host.thread.call(lambda: 2) == 2
        host.thread.close()
        assert host.failures == []

    _run(scenario)


def test_who_arrives_while_a_step_computes_takes_part_in_the_next() -> None:
    """With a step in flight the next is planned late; calls run meanwhile."""

    async def scenario() -> None:
        laps = LapsConfig(queue="laps", laps_length_threshold=10)
        replica = Replica(
            num_blocks=600,
            max_num_batched_tokens=512,
            max_model_len=1200,
            overlap=True,
            defers_planning=True,
            laps=laps,
        )
        fitted = msgspec.structs.replace(PRIOR, num_samples=1)
        replica.scheduler._prompts.model.costs = fitted
        host = Host(replica)
        host.thread.start()
        await host.thread.call(lambda: replica.add("long", prompt_of(900), params=params_of(1)))
        # The clock stands still, so a second step is never due: calls run all the same.
        while await host.thread.call(lambda: len(replica.executor.plans)) < 1:
            pass
        short = await host.thread.call(
            lambda: replica.add("short", prompt_of(8), params=params_of(1))
        )
        assert await host.thread.call(lambda: len(replica.executor.plans)) == 1
        replica.executor.is_idle = True  # from now on every step has ended when it is asked for
        host.is_idle.clear()
        await _wait(host.is_idle)
        host.thread.close()
        assert replica.executor.plans[1].num_new_tokens == [8]
        records = [record for output in host.outputs for _, record in output.tokens]
        mine = [record.token_id for record in records if record.key == short.key]
        assert mine == replica.expected(short)

    _run(scenario)


def _with_a_window(num_requests: int) -> Replica:
    """Its clock stands still until a test moves it."""
    laps = LapsConfig(
        queue="laps",
        window="fixed",
        fixed_window_s=0.005,
        fixed_window_requests=num_requests,
    )
    return Replica(defers_planning=True, laps=laps)


def test_a_window_ends_when_it_is_over_and_not_after_an_idle_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        replica = _with_a_window(num_requests=9)
        host = Host(replica)
        monkeypatch.setattr(host.thread, "_idle", _refuse_to_idle)
        host.thread.start()
        await host.thread.call(lambda: replica.add("a", prompt_of(5)))
        assert await host.thread.call(lambda: len(replica.executor.plans)) == 0
        host.is_idle.clear()
        await host.thread.call(lambda: replica.clock.advance(0.005))
        await _wait(host.is_idle)
        host.thread.close()
        assert host.failures == []

    _run(scenario)


def test_a_window_ends_with_the_request_that_fills_it() -> None:
    async def scenario() -> None:
        replica = _with_a_window(num_requests=2)
        host = Host(replica)
        host.thread.start()
        await host.thread.call(lambda: replica.add("a", prompt_of(5)))
        host.is_idle.clear()
        await host.thread.call(lambda: replica.add("b", prompt_of(6)))
        await _wait(host.is_idle)  # although no time has passed
        host.thread.close()
        assert replica.executor.plans[0].num_new_tokens == [5, 6]

    _run(scenario)


@pytest.mark.parametrize("comes", ["before the turn", "after the look for calls"])
def test_a_request_ends_the_window_that_it_fills_whenever_it_comes(
    monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    replica = _with_a_window(num_requests=2)
    thread = Host(replica).thread  # not started: its turn is played here
    replica.add("a", prompt_of(5))
    assert not replica.core.step().has_progressed, "the window is open"
    fill = _Call(run=lambda: replica.add("b", prompt_of(6)), drop=lambda: None)
    looks: list[float] = []

    def look(_timeout_s: float) -> None:
        assert not looks, "it waits on, although no time passes"
        looks.append(_timeout_s)

    class LateLock:
        """The call comes when the thread has looked for calls."""

        wait = staticmethod(look)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            thread._calls.append(fill)

    if comes == "before the turn":
        thread._calls.append(fill)
    monkeypatch.setattr(thread, "_wake", LateLock())
    thread._gather(has_called=thread._run_calls())
    replica.core.step()
    assert replica.executor.plans[0].num_new_tokens == [5, 6]


def test_news_that_come_just_before_the_engine_waits_are_not_slept_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = Host(Replica()).thread  # not started: its turns are played here
    waits: list[float] = []
    monkeypatch.setattr(thread._wake, "wait", waits.append)
    thread.wake()
    thread._idle()
    assert waits == []
    thread.post(lambda: None)
    assert thread._wait_for_work(), "a turn begins"
    thread._run_calls()
    thread._idle()
    assert len(waits) == 1, "nothing has happened since"

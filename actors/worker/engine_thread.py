"""The engine's own thread: it steps while there is work and runs calls between steps.

The actor's event loop never blocks on the engine: it posts closures here and gets futures back,
and each step's output is delivered to it as one call. Fail-stop: an exception in a step is
reported once and the thread ends; the owner exits the process, because a device that failed once
answers wrongly afterwards.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from engine.core import EngineCore
from engine.errors import WorkerError
from engine.scheduling.contracts import StepOutput

T = TypeVar("T")

# Upper bound of an idle wait; only deadlines in the queue need it, because calls wake the thread.
IDLE_WAIT_S = 0.05
# A step may end sooner than predicted, so the device is asked this often.
GATHER_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class _Call:
    """One of the two functions is called, once, on the engine thread or after its end."""

    run: Callable[[], object]
    drop: Callable[[], object]


class EngineThread:
    """Owns the thread that alone touches scheduler, cache and executor."""

    def __init__(
        self,
        core: EngineCore,
        *,
        on_step: Callable[[StepOutput], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Both functions are called on the engine thread.

        `on_step` is called after every turn, also an empty one, when the step in flight has ended.
        """
        self._core = core
        self._on_step = on_step
        self._on_failure = on_failure
        self._calls: deque[_Call] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._num_turns = 0
        self._is_busy = False
        self._has_news = False  # since the turn began
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the steps in flight; calls not yet run are dropped. Idempotent."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._drop_calls()

    @property
    def turn(self) -> int | None:
        """Number of the present turn; None while there is nothing to do. From any thread."""
        return self._num_turns if self._is_busy else None

    def post(self, fn: Callable[[], object]) -> None:
        """Run `fn` between two steps; an exception in it is an engine failure.

        Raises WorkerError once the engine is closing or has failed.
        """
        self._post(_Call(run=fn, drop=_nothing))

    async def call(self, fn: Callable[[], T]) -> T:
        """Run `fn` between two steps and return its result; its exceptions reach the caller.

        Raises WorkerError if the engine ends before it could run.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = fn()
            except Exception as error:  # noqa: BLE001 - delivered to the caller below
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_settle, future, result)

        def drop() -> None:
            loop.call_soon_threadsafe(_fail, future, WorkerError("the engine has ended"))

        self._post(_Call(run=run, drop=drop))
        return await future

    def wake(self) -> None:
        """Something that is no call has happened: an engine that waits looks again."""
        with self._wake:
            self._has_news = True
            self._wake.notify()

    def _post(self, call: _Call) -> None:
        with self._wake:
            if self._is_closing:
                raise WorkerError("the engine is closing")
            self._calls.append(call)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._gather(has_called=self._run_calls())
                output = self._core.step()
                self._on_step(output)
                can_run = output.has_progressed or self._core.waits_for_others
                if not can_run and self._core.has_work:
                    self._idle()
            last = self._core.settle()
            if last.has_progressed:
                self._on_step(last)
            self._is_busy = False
        except BaseException as error:  # noqa: BLE001 - the owner ends the process
            with self._wake:
                self._is_closing = True
            self._on_failure(error)
            self._drop_calls()

    def _wait_for_work(self) -> bool:
        """Block while there is neither a call nor a request; False when closing."""
        with self._wake:
            while not (self._is_closing or self._calls or self._core.has_work):
                self._is_busy = False
                self._wake.wait()
            self._num_turns += 1
            self._is_busy = True
            self._has_news = False
            return not self._is_closing

    def _gather(self, *, has_called: bool) -> None:
        """Runs calls as they come until the next step is due; requests that arrive now take part in
        it.

        On an idle device a call may be what the window waits for, so the scheduler is asked again.
        `has_called`: calls have run since the last step.
        """
        while (left_s := self._core.defer_s()) > 0.0:
            if has_called and self._core.waits_for_others:
                return
            with self._wake:
                if self._is_closing:
                    return
                if not self._calls:
                    self._wake.wait(min(left_s, GATHER_POLL_S))
            has_called = self._run_calls()

    def _idle(self) -> None:
        """Waits for a call or news when no request can run: nothing else frees blocks or rows."""
        with self._wake:
            if not (self._calls or self._is_closing or self._has_news):
                self._wake.wait(self._core.idle_s(IDLE_WAIT_S))

    def _run_calls(self) -> bool:
        """Runs all calls; returns whether there were any."""
        has_called = bool(self._calls)
        while self._calls:
            self._calls.popleft().run()
        return has_called

    def _drop_calls(self) -> None:
        """Fails the calls that have not run."""
        while self._calls:
            self._calls.popleft().drop()


def _nothing() -> None:
    """Does nothing: no caller waits for a posted call."""


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # else the caller was cancelled
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)

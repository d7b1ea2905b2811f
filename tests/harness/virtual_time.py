"""Virtual time: it moves only when nothing else can happen.

So deadlines of minutes cost nothing, and a wait that nothing ends fails at once instead of hanging.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from engine.clock import ManualClock

T = TypeVar("T")


class _VirtualSelector(selectors.SelectSelector):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        assert timeout is not None, "everybody waits for something that nothing will do"
        self._clock.advance(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__(_VirtualSelector(clock))
        self._virtual_clock = clock

    def time(self) -> float:
        return self._virtual_clock.now_s()


def run_virtual(clock: ManualClock, main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time; fails if tasks are left over or errors went unnoticed."""
    loop = VirtualTimeLoop(clock)
    problems: list[str] = []
    loop.set_exception_handler(lambda _, context: problems.append(str(context)))
    try:
        result = loop.run_until_complete(main)
        loop.run_until_complete(asyncio.sleep(0))
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks are left: {left}"
    finally:
        for task in asyncio.all_tasks(loop):  # only after a failure
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))
        loop.close()
    assert not problems, problems
    return result

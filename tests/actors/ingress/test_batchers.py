"""Which batcher is asked, and what is said when none answers in time."""

import asyncio
from typing import cast

import pytest

from actors.ingress.prompt_tokens import CHECK_TIMEOUT_S, Batchers
from actors.rpc.handles import BatcherHandle
from engine.clock import ManualClock
from engine.errors import CapacityError, WorkerError
from engine.messages import ConstraintVerdict
from engine.request import Constraint, ConstraintKind
from tests.harness.virtual_time import run_virtual

CONSTRAINT = Constraint(ConstraintKind.REGEX, "a+")


class Checker:
    """Takes so long for a check, or is dead."""

    def __init__(self, seconds: float = 0.0, *, is_dead: bool = False) -> None:
        self._seconds = seconds
        self._is_dead = is_dead
        self.num_asked = 0

    async def check(self, constraint: Constraint) -> ConstraintVerdict:
        self.num_asked += 1
        await asyncio.sleep(self._seconds)
        if self._is_dead:
            raise WorkerError("tokenizer-0 died")
        return ConstraintVerdict()


def check_with(*checkers: Checker) -> None:
    clock = ManualClock()

    async def find(name: str) -> BatcherHandle:
        return cast("BatcherHandle", checkers[int(name)])

    async def main() -> None:
        batchers = Batchers(find, patience_s=5.0, clock=clock)
        batchers.update([str(i) for i in range(len(checkers))])
        await batchers.check(CONSTRAINT)

    run_virtual(clock, main())


def test_a_check_by_a_batcher_that_died_is_another_s() -> None:
    dead, alive = Checker(is_dead=True), Checker(CHECK_TIMEOUT_S / 2)
    check_with(dead, alive)
    assert (dead.num_asked, alive.num_asked) == (1, 1)


def test_a_check_that_waits_for_too_long_is_not_begun_anew_elsewhere() -> None:
    busy, idle = Checker(2 * CHECK_TIMEOUT_S), Checker()
    with pytest.raises(CapacityError, match="too many constraints"):
        check_with(busy, idle)
    assert (busy.num_asked, idle.num_asked) == (1, 0)

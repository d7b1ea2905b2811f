"""A worker that is to leave: who is refused, when the rest is handed over, and when it may go."""

import asyncio
import random

import pytest

from actors.worker.draining import HAND_OVER_S, Draining
from actors.worker.token_streams import TokenStreams
from configs.schema import LifetimesConfig
from engine.clock import ManualClock
from engine.errors import CapacityError
from engine.messages import FailureRecord, LoadReport
from engine.request import RequestKey
from tests.actors.kv_transfer.handoff_simulation import World, simulate

FIRST, SECOND = RequestKey("a" * 32), RequestKey("a" * 32, 0, 1)
IDLE = LoadReport(queued_tokens=0, num_waiting=0, num_running=0, num_free_blocks=1, num_blocks=1)


class Leaving:
    def __init__(self) -> None:
        self.clock = ManualClock(random.uniform(1.0, 99.0))
        self.num_hand_overs = 0
        self.draining = Draining("decode-0", self.clock, self._hand_over)

    async def _hand_over(self) -> None:
        self.num_hand_overs += 1

    def may_leave(self, *, is_idle: bool = False, has_unread: bool = False) -> bool:
        return asyncio.run(self.draining.may_leave(is_idle=is_idle, has_unread=has_unread))


class TestLeaving:
    def test_a_worker_that_was_not_told_stays_and_takes_everything(self) -> None:
        leaving = Leaving()
        leaving.draining.check(FIRST)
        assert not leaving.may_leave(is_idle=True)

    def test_one_that_is_idle_leaves_at_once(self) -> None:
        leaving = Leaving()
        leaving.draining.begin(60.0)
        assert leaving.may_leave(is_idle=True)
        assert leaving.num_hand_overs == 0

    def test_what_runs_has_the_first_grace_that_was_given(self) -> None:
        leaving = Leaving()
        leaving.draining.begin(7.0)
        leaving.draining.begin(900.0)
        assert not leaving.may_leave()
        leaving.clock.advance(7.1)
        assert not leaving.may_leave()
        assert leaving.num_hand_overs == 1

    def test_it_leaves_when_all_was_read_and_hands_over_once(self) -> None:
        leaving = Leaving()
        leaving.draining.begin(7.0)
        leaving.clock.advance(7.1)
        assert [leaving.may_leave(has_unread=True) for _ in range(3)] == [False] * 3
        assert leaving.may_leave()
        assert leaving.num_hand_overs == 1

    def test_an_ingress_that_does_not_read_is_not_waited_for_for_ever(self) -> None:
        leaving = Leaving()
        leaving.draining.begin(7.0)
        leaving.clock.advance(7.0 + HAND_OVER_S + 0.1)
        assert [leaving.may_leave(has_unread=True) for _ in range(2)] == [False, True]


class TestRefusing:
    def test_first_attempts_are_refused_and_those_that_found_nobody_else_are_not(self) -> None:
        leaving = Leaving()
        leaving.draining.begin(7.0)
        with pytest.raises(CapacityError, match="decode-0 is draining"):
            leaving.draining.check(FIRST)
        leaving.draining.check(SECOND)

    def test_after_the_hand_over_nobody_is_taken(self) -> None:
        leaving = Leaving()
        leaving.draining.begin(7.0)
        leaving.clock.advance(7.1)
        assert not leaving.may_leave()
        with pytest.raises(CapacityError):
            leaving.draining.check(SECOND)

    def test_a_draining_decode_worker_grants_no_room(self) -> None:
        async def scenario(world: World) -> None:
            world.receiver._refusal = lambda key: "decode-0 is draining" if key.attempt == 0 else ""
            request = world.start(1, range(9))
            world.finish(request)
            await world.settled()
            assert "draining" in world.failures[request.key].reason
            assert world.failures[request.key].retryable

        simulate(scenario)


def test_what_was_handed_over_is_unread_until_its_ingress_reads_it() -> None:
    async def scenario() -> None:
        streams = TokenStreams(
            worker="decode-0",
            incarnation="i",
            config=LifetimesConfig(),
            clock=ManualClock(),
            load=lambda: IDLE,
            on_silent=lambda _: None,
            on_overflow=lambda _, key: None,
        )
        reader = streams.read("ingress-0")
        await anext(reader)
        assert (streams.clients(), streams.has_unread) == (["ingress-0"], False)
        failure = FailureRecord(key=FIRST, reason="drained", retryable=True)
        streams.publish([], [("ingress-0", failure)])
        assert streams.has_unread
        await anext(reader)
        assert not streams.has_unread

    asyncio.run(scenario())

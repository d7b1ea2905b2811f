"""The sending end of a pair: what may overtake what, and when it gives its connection up."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from actors.kv_transfer.channels import pair_ends
from actors.kv_transfer.channels.pair_ends import PairSender
from actors.kv_transfer.contracts import OutgoingData, PieceBytes
from engine.errors import HandoffError
from engine.messages import ChannelKind, PieceReply

ACCEPTED = PieceReply(outcome="accepted")
REFUSED = PieceReply(outcome="failed", reason="not wanted", is_retryable=True)
DATA = np.zeros(1, dtype=np.uint8)


class Line:
    """A connection whose sends are over when the test says so, in their order."""

    kind: ChannelKind = "gloo_pair"
    epoch = 1
    deadline_s = 10.0

    def __init__(self) -> None:
        self.is_open = True
        self.sends: list[asyncio.Future[Any]] = []

    async def load(self, data: OutgoingData) -> PieceBytes:
        assert isinstance(data, np.ndarray)
        return data

    async def room(self, num_bytes: int, into: Sequence[int] | None) -> PieceBytes:
        return np.zeros(num_bytes, dtype=np.uint8)

    def release(self, staged: PieceBytes) -> None:
        """Nothing is held."""

    def start_send(self, staged: PieceBytes) -> "asyncio.Future[None]":
        self.sends.append(asyncio.get_running_loop().create_future())
        return self.sends[-1]

    def start_receive(self, staged: PieceBytes) -> "asyncio.Future[None]":
        raise AssertionError("this is the sending end")

    def start_nothing(self) -> "asyncio.Future[None]":
        raise AssertionError("likewise")

    async def close(self) -> None:
        self.is_open = False
        for sending in self.sends:
            if not sending.done():
                sending.set_exception(HandoffError("closed"))


class World:
    """A sender, and a receiver that answers a piece when the test says so."""

    def __init__(self) -> None:
        self.line = Line()
        self.sender = PairSender(self.line)
        self.answers: list[asyncio.Future[PieceReply]] = []
        self.told = asyncio.Condition()

    async def deliver(self, seq: int, payload: list[Any]) -> PieceReply:
        assert (seq, payload) == (len(self.answers), [])
        self.answers.append(asyncio.get_running_loop().create_future())
        async with self.told:
            self.told.notify_all()
        return await self.answers[seq]

    def send(self) -> "asyncio.Task[PieceReply]":
        return asyncio.create_task(self.sender.send(DATA, self.deliver))

    async def wait_told(self, number: int) -> None:
        """Until the receiver has so many headers."""
        async with self.told:
            await self.told.wait_for(lambda: len(self.answers) == number)


def in_world(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scenario(World())

    asyncio.run(main())


def test_headers_go_ahead_of_the_bytes_in_front_of_theirs() -> None:
    async def scenario(world: World) -> None:
        sent = [world.send() for _ in range(3)]
        await world.wait_told(3)
        assert [sending.done() for sending in world.line.sends] == [False] * 3
        for sending, answer in zip(world.line.sends, world.answers, strict=True):
            sending.set_result(None)
            answer.set_result(ACCEPTED)
        assert await asyncio.gather(*sent) == [ACCEPTED] * 3

    in_world(scenario)


def test_a_piece_refused_while_another_moves_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes may have to wait for long: that says nothing about the connection."""
    monkeypatch.setattr(pair_ends, "ANSWERED_S", 0.0)

    async def scenario(world: World) -> None:
        first, second = world.send(), world.send()
        await world.wait_told(2)
        world.answers[1].set_result(REFUSED)
        for _ in range(50):  # turns, of which giving up would take a few
            await asyncio.sleep(0)
        assert world.line.is_open
        assert not second.done()
        for sending in world.line.sends:
            sending.set_result(None)
        world.answers[0].set_result(ACCEPTED)
        assert await asyncio.gather(first, second) == [ACCEPTED, REFUSED]
        assert world.line.is_open

    in_world(scenario)


def test_a_piece_that_is_answered_for_and_does_not_leave_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair_ends, "ANSWERED_S", 0.01)

    async def scenario(world: World) -> None:
        sending = world.send()
        await world.wait_told(1)
        world.answers[0].set_result(REFUSED)
        with pytest.raises(HandoffError):
            await sending
        assert not world.line.is_open

    in_world(scenario)

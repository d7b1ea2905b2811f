"""Pieces that share a call: who shares with whom, and whose answer is whose."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from actors.kv_transfer.pieces_out import BUNDLED_BYTES, PieceBundles
from engine.errors import WorkerError
from engine.messages import PieceHeader, PieceReply
from engine.request import RequestKey

BLOCK_BYTES = 2**20
SMALL, LARGE = 3, BUNDLED_BYTES // BLOCK_BYTES + 1  # blocks

HEADER = PieceHeader(
    transfer_id="t",
    key=RequestKey("r"),
    sender="prefill-0",
    sender_incarnation="1",
    epoch=1,
    seq=0,
    first_block=0,
    num_blocks=SMALL,
    digests=[],
)


class RecordingPeer:
    """Answers each piece with its number, when it may."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.was_called, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None

    async def receive_pieces(
        self, pieces: Sequence[tuple[PieceHeader, list[Any]]]
    ) -> list[PieceReply]:
        self.calls.append([header.seq for header, _ in pieces])
        self.was_called.set()
        assert all(payload == [header.seq] for header, payload in pieces)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return [PieceReply(outcome="accepted", reason=str(header.seq)) for header, _ in pieces]


class World:
    def __init__(self) -> None:
        self.bundles = PieceBundles(BLOCK_BYTES)
        self.peer, self.other = RecordingPeer(), RecordingPeer()

    def send(
        self, seq: int, num_blocks: int = SMALL, peer: RecordingPeer | None = None
    ) -> "asyncio.Task[PieceReply]":
        header = msgspec.structs.replace(HEADER, seq=seq, num_blocks=num_blocks)
        return asyncio.create_task(self.bundles.deliver(peer or self.peer, header, [seq]))


def in_world(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scenario(World())

    asyncio.run(main())


def test_small_pieces_of_one_moment_share_a_call_and_each_has_its_own_answer() -> None:
    async def scenario(world: World) -> None:
        sent = [world.send(seq) for seq in range(9)]
        sent.append(world.send(100, peer=world.other))
        replies = await asyncio.gather(*sent)
        assert [reply.reason for reply in replies] == [*map(str, range(9)), "100"]
        assert (world.peer.calls, world.other.calls) == ([list(range(9))], [[100]])
        await world.send(9)  # at another moment
        assert world.peer.calls[1:] == [[9]]
        assert world.bundles.num_calls == 3

    in_world(scenario)


def test_a_large_piece_goes_by_itself() -> None:
    async def scenario(world: World) -> None:
        sent = [world.send(0), world.send(1, LARGE), world.send(2, LARGE - 1), world.send(3, 0)]
        await asyncio.gather(*sent)
        assert sorted(world.peer.calls) == [[0, 2, 3], [1]]

    in_world(scenario)


def test_an_error_is_everybody_s_and_the_next_piece_is_tried() -> None:
    async def scenario(world: World) -> None:
        world.peer.error = WorkerError("decode-0 died")
        ended = await asyncio.gather(world.send(0), world.send(1), return_exceptions=True)
        assert [str(error) for error in ended] == ["decode-0 died"] * 2
        world.peer.error = None
        assert (await world.send(2)).reason == "2"

    in_world(scenario)


@pytest.mark.parametrize("is_on_its_way", [False, True])
def test_who_gives_up_takes_nobody_along(*, is_on_its_way: bool) -> None:
    async def scenario(world: World) -> None:
        world.peer.may_answer.clear()
        sent = [world.send(seq) for seq in range(3)]
        await asyncio.sleep(0)  # all three wait for the end of this turn
        if is_on_its_way:
            await world.peer.was_called.wait()
        sent[1].cancel()
        await asyncio.sleep(0)
        world.peer.may_answer.set()
        ended = await asyncio.gather(*sent, return_exceptions=True)
        assert isinstance(ended[1], asyncio.CancelledError)
        replies = [reply for reply in ended if isinstance(reply, PieceReply)]
        assert [reply.reason for reply in replies] == ["0", "2"]
        assert sum(map(len, world.peer.calls)) >= 2

    in_world(scenario)


@pytest.mark.parametrize("is_on_its_way", [False, True])
def test_a_call_that_nobody_waits_for_ends(*, is_on_its_way: bool) -> None:
    async def scenario(world: World) -> None:
        world.peer.may_answer.clear()
        sent = [world.send(seq) for seq in range(3)]
        await asyncio.sleep(0)
        if is_on_its_way:
            await world.peer.was_called.wait()
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        world.peer.may_answer.set()
        assert (await world.send(3)).reason == "3"
        assert world.peer.calls[-1] == [3]

    in_world(scenario)

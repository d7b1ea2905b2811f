"""Pieces that stay on a GPU, seen from the receiver's event loop: refused, orphaned, fenced."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from actors.kv_transfer.contracts import ArrivedBlocks, StagedPiece
from actors.kv_transfer.receiver import HandoffReceiver
from engine.messages import (
    CancelTransfer,
    PairRequest,
    PieceHeader,
    Reservation,
)
from tests.actors.kv_transfer.handoff_simulation import LoopEngine
from tests.engine.kv.handoff_world import LAYOUT, RECEIVER, SENDER, Decode, asking, key_of
from tests.harness.handoff_network import CONFIG
from tests.harness.virtual_time import run_virtual


class FakeCopy(ArrivedBlocks):
    """A piece whose copy takes a second."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.written: list[int] | None = None
        self.num_discards = 0
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def nbytes(self) -> int:
        return self._num_bytes

    async def write(self, block_ids: Sequence[int], digests: list[int]) -> bool:
        self.started.set()
        await asyncio.sleep(1.0)
        self.written = list(block_ids)
        self.ended.set()
        return True

    def discard(self) -> None:
        self.num_discards += 1


class OneChannel:
    """Any kind, for a receiver: each piece is a FakeCopy."""

    epoch = 1

    def __init__(self) -> None:
        self.pieces: list[FakeCopy] = []
        self.into: list[Sequence[int] | None] = []
        self.has_received = asyncio.Event()

    def claim(self, seq: int) -> bool:
        return seq == len(self.pieces)

    async def receive(
        self,
        seq: int,
        num_bytes: int,
        payload: list[Any],
        into: Sequence[int] | None = None,
    ) -> FakeCopy:
        self.pieces.append(FakeCopy(num_bytes))
        self.into.append(into)
        self.has_received.set()
        return self.pieces[-1]

    async def close(self) -> None:
        await asyncio.sleep(0)

    async def open_receive(self, request: PairRequest) -> "OneChannel":
        return self

    async def open_send(self, request: PairRequest) -> Any:
        raise AssertionError("this is the receiver")


class InPlace:
    async def read(self, block_ids: Sequence[int]) -> StagedPiece:
        raise AssertionError("this is the receiver")

    async def write(self, block_ids: Sequence[int], piece: StagedPiece) -> bool:
        assert isinstance(piece.data, ArrivedBlocks)
        return await piece.data.write(block_ids, piece.digests)


class World:
    def __init__(self, decode_side: Decode) -> None:
        self.decode = decode_side
        self.engine = LoopEngine()
        self.channel = OneChannel()
        self.num_grants = 0
        self.receiver = HandoffReceiver(
            RECEIVER,
            CONFIG,
            engine=self.engine,
            incoming=decode_side.incoming,
            channels=self.channel,
            store=InPlace(),
            on_grant=self._on_grant,
        )

    def _on_grant(self) -> None:
        self.num_grants += 1

    async def reserve(self) -> Reservation:
        await self.receiver.open_pair(
            PairRequest(sender=SENDER, channel="cuda_ipc", epoch=1, rendezvous_key="k/")
        )
        answer = await self.receiver.reserve(asking(1, range(3 * LAYOUT.block_size)))
        assert isinstance(answer, Reservation)
        return answer

    def header(self, reservation: Reservation, **changes: Any) -> PieceHeader:
        values: dict[str, Any] = {
            "transfer_id": reservation.transfer_id,
            "key": key_of(1),
            "sender": SENDER.name,
            "sender_incarnation": SENDER.incarnation,
            "epoch": 1,
            "seq": 0,
            "first_block": 0,
            "num_blocks": 3,
            "digests": [0, 0, 0],
            "first_token_id": 5,
        }
        return PieceHeader(**(values | changes))


def simulate(scenario: Any) -> None:
    side = Decode(num_blocks=10, max_rows=4)

    async def main() -> None:
        world = World(side)
        await scenario(world)
        await world.receiver.close()
        for key in list(side.scheduler.running):
            side.scheduler.finish(key)
        assert side.cache.num_held == 0
        side.check()

    run_virtual(side.clock, main())


def test_a_grant_is_fenced_before_it_is_told() -> None:
    async def scenario(world: World) -> None:
        await world.reserve()
        assert world.num_grants == 1

    simulate(scenario)


def test_a_piece_larger_than_host_pieces_may_be_is_taken_between_gpus() -> None:
    async def scenario(world: World) -> None:
        reservation = await world.reserve()
        assert 3 * LAYOUT.block_bytes > CONFIG.piece_bytes
        reply = await world.receiver.receive_piece(world.header(reservation), [])
        assert reply.outcome == "committed"
        [piece] = world.channel.pieces
        assert piece.num_discards > 0
        assert world.channel.into == [piece.written], "it was received for other blocks"

    simulate(scenario)


@pytest.mark.parametrize("changes", [{"first_block": 2}, {"transfer_id": "gone"}])
def test_a_piece_without_leave_to_write_gives_its_staging_back(changes: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        reservation = await world.reserve()
        reply = await world.receiver.receive_piece(world.header(reservation, **changes), [])
        assert reply.outcome == "failed"
        [piece] = world.channel.pieces
        assert piece.written is None
        assert piece.num_discards > 0
        assert world.channel.into == [None], "it may be written while it is received"

    simulate(scenario)


def test_a_piece_is_written_while_a_step_goes_on_and_commits_at_its_end() -> None:
    async def scenario(world: World) -> None:
        reservation = await world.reserve()
        world.engine.between_steps.clear()
        taking = asyncio.ensure_future(world.receiver.receive_piece(world.header(reservation), []))
        async with asyncio.timeout(60):
            await world.channel.has_received.wait()
            await world.channel.pieces[0].ended.wait()
        assert not taking.done()
        assert not world.decode.scheduler.running
        world.engine.between_steps.set()
        assert (await taking).outcome == "committed"
        assert list(world.decode.scheduler.running) == [key_of(1)]

    simulate(scenario)


def test_blocks_stay_reserved_while_a_pull_lands_in_them() -> None:
    async def scenario(world: World) -> None:
        reservation = await world.reserve()
        taking = asyncio.ensure_future(world.receiver.receive_piece(world.header(reservation), []))
        await world.channel.has_received.wait()
        [piece] = world.channel.pieces
        await piece.started.wait()
        await world.receiver.cancel_transfer(CancelTransfer(key=key_of(1)))
        assert world.decode.cache.num_held == 3, "freed under the pull"
        assert piece.written is None
        reply = await taking
        assert (reply.outcome, reply.is_retryable) == ("failed", False)
        assert piece.written is not None
        assert world.decode.cache.num_held == 0

    simulate(scenario)

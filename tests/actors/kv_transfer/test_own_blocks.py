"""Blocks to and from workers whose ranks have blocks of their own, over what every channel uses.

The oracle is indexing, as in test_rank_pieces.py; threads stand in for processes.
"""

import asyncio
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from actors.kv_transfer.channels.nccl_pair import NcclPairs
from actors.kv_transfer.channels.rank_ipc import offer_ranks, open_rank_receiver
from actors.kv_transfer.contracts import StagedPiece, StoredBlocks
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.own_blocks import OwnBlockPieces
from actors.kv_transfer.rank_pieces import OneRank, RankPieces
from engine.errors import HandoffError
from engine.kv.device_offer import DeviceOffer
from engine.kv.layout import KvLayout
from engine.messages import PieceReply
from tests.actors.kv_transfer.fake_pair_group import Wires
from tests.actors.kv_transfer.rank_workers import NUM_BLOCKS, Worker, new_worker
from tests.actors.kv_transfer.test_channels_local import LocalBoard
from tests.actors.kv_transfer.test_nccl_pair import request_of, settings
from tests.actors.kv_transfer.test_rank_pieces import OFFER, arrived, offer_of, whole_digests

WHOLE = KvLayout.with_heads(num_layers=2, block_size=3, num_kv_heads=4, head_dim=4, dtype="float32")
LATENTS = KvLayout.latent(num_layers=3, block_size=2, width=6, dtype="bfloat16")
# (ranks, whether each has blocks of its own) of the sender and of the receiver
SIDES = [
    ((2, True), (2, True)),
    ((3, True), (1, False)),
    ((1, False), (2, True)),
    ((2, True), (4, False)),
    ((2, False), (3, True)),
]


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def _worker(size: int, has_own_blocks: bool, whole: KvLayout = WHOLE) -> Worker:
    return new_worker(size, whole, 0.05, of_ranks=OwnBlockPieces if has_own_blocks else RankPieces)


class Move:
    """Random blocks of one rank of one worker, on their way to one rank of another."""

    def __init__(
        self,
        sides: tuple[tuple[int, bool], tuple[int, bool]],
        rng: random.Random,
        whole: KvLayout = WHOLE,
    ) -> None:
        self.sender, self.receiver = (_worker(*side, whole) for side in sides)
        self.number = rng.randint(1, NUM_BLOCKS)
        self.from_ids = self._drawn(self.sender, rng)
        self.to_ids = self._drawn(self.receiver, rng)
        drawn = torch.randn(self.number, *whole.block_shape)
        self.blocks = drawn.to(self.sender.stores[0].dtype)
        self.sender.compute(self.from_ids, self.blocks)
        self.digests = whole_digests(whole, self.blocks)

    def _drawn(self, worker: Worker, rng: random.Random) -> list[int]:
        first = rng.randrange(len(worker.stores)) * NUM_BLOCKS if worker.has_own_blocks else 0
        return [first + block for block in rng.sample(range(NUM_BLOCKS), self.number)]

    def has_arrived(self) -> bool:
        """Whether the blocks are where they belong, and nowhere else."""
        found = [store.tensor.clone() for store in self.receiver.stores]
        expected = [torch.zeros_like(tensor) for tensor in found]
        receiver = self.receiver
        if receiver.has_own_blocks:
            rank = self.to_ids[0] // NUM_BLOCKS
            expected[rank][[block % NUM_BLOCKS for block in self.to_ids]] = self.blocks
        else:
            for rank, tensor in enumerate(expected):
                tensor[self.to_ids] = self.blocks[..., receiver.heads(rank), :]
        return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("whole", [WHOLE, LATENTS], ids=["heads", "latents"])
def test_a_piece_moves_through_host_memory(
    sides: tuple[tuple[int, bool], tuple[int, bool]], whole: KvLayout, rng: random.Random
) -> None:
    """As over gloo and the object store."""
    move = Move(sides, rng, whole)

    async def run() -> list[bool]:
        piece = await move.sender.pieces.read(move.from_ids)
        assert piece.digests == move.digests
        is_right = await move.receiver.pieces.write(move.to_ids, arrived(piece))
        assert move.has_arrived()
        wrong = StagedPiece(data=arrived(piece).data, digests=[d ^ 4 for d in piece.digests])
        return [is_right, await move.receiver.pieces.write(move.to_ids, wrong)]

    assert asyncio.run(run()) == [True, False]


@pytest.mark.parametrize("sides", SIDES)
def test_a_piece_is_pulled_from_the_store_of_its_rank(
    sides: tuple[tuple[int, bool], tuple[int, bool]], rng: random.Random
) -> None:
    """As by CUDA IPC; a map of the offers stands in for CUDA's."""
    move = Move(sides, rng)
    given = move.receiver.pieces
    pieces = OneRank(given) if isinstance(given, KvPieces) else given
    assert isinstance(pieces, OneRank | RankPieces | OwnBlockPieces)

    async def pull(digests: list[int]) -> bool:
        offered, map_offer = _offer(move.sender)
        channel = await open_rank_receiver(1, offered, pieces, floor_gb_s=1e-9, map_offer=map_offer)
        assert channel.claim(0)
        num_bytes = move.number * WHOLE.block_bytes
        data = await channel.receive(0, num_bytes, [move.from_ids], move.to_ids)
        piece = StagedPiece(data=data, digests=digests)
        return await move.receiver.pieces.write(move.to_ids, piece)

    assert asyncio.run(pull(move.digests))
    assert move.has_arrived()
    assert not asyncio.run(pull([move.digests[0] ^ 2, *move.digests[1:]]))


def _offer(sender: Worker):  # type: ignore[no-untyped-def]  # noqa: ANN202 - as `offer_of`
    pieces = sender.pieces
    if not isinstance(pieces, OwnBlockPieces):
        return offer_of(sender)

    def offer(rank: int) -> DeviceOffer:
        return msgspec.structs.replace(OFFER, num_blocks=NUM_BLOCKS, handle=bytes([rank]))

    stores = [replace(one, device=offer(rank)) for rank, one in enumerate(pieces.stores)]
    offered = offer_ranks(stores, has_own_blocks=True)
    return offered, lambda offer, _: sender.stores[offer.handle[0]].tensor


@pytest.mark.parametrize("sides", SIDES[:3])
def test_a_piece_goes_through_a_staging_slot_of_each_rank_0(
    sides: tuple[tuple[int, bool], tuple[int, bool]], rng: random.Random
) -> None:
    """As over NCCL, which a queue stands in for."""
    move = Move(sides, rng)
    given = settings(piece_bytes=NUM_BLOCKS * WHOLE.block_bytes)
    wires, board = Wires(), LocalBoard()

    async def run() -> bool:
        sides = move.sender, move.receiver
        ends = [NcclPairs(one.pieces, given, wires.make_group) for one in sides]  # type: ignore[arg-type]
        sending, receiving = await asyncio.gather(
            ends[0].open_send(request_of(1), board), ends[1].open_receive(request_of(1), board)
        )
        written: list[bool] = []

        async def deliver(seq: int, payload: list[object]) -> PieceReply:
            assert receiving.claim(seq)
            num_bytes = move.number * WHOLE.block_bytes
            data = await receiving.receive(seq, num_bytes, payload, move.to_ids)
            written.append(await data.write(move.to_ids, move.digests))  # type: ignore[union-attr]
            return PieceReply(outcome="accepted")

        num_bytes = move.number * WHOLE.block_bytes
        named = StoredBlocks(block_ids=tuple(move.from_ids), nbytes=num_bytes)
        await sending.send(named, deliver)
        await asyncio.gather(sending.close(), receiving.close())
        return written == [True]

    assert asyncio.run(run())
    assert move.has_arrived()


def test_a_rank_that_is_behind_is_waited_for_if_it_has_the_blocks(rng: random.Random) -> None:
    worker = _worker(2, True)
    worker.steps.num_launched = worker.steps.num_ended = 1
    worker.compute([2], torch.randn(1, *WHOLE.block_shape))
    worker.compute([NUM_BLOCKS + 2], torch.randn(1, *WHOLE.block_shape))
    piece = asyncio.run(worker.pieces.read([2]))
    assert isinstance(piece.data, np.ndarray)
    with pytest.raises(HandoffError, match="rank 1 has ended 0 steps, not 1"):
        asyncio.run(worker.pieces.read([NUM_BLOCKS + 2]))
    behind = worker.stores[1].shared
    assert behind is not None
    behind.count_step()
    assert asyncio.run(worker.pieces.read([NUM_BLOCKS + 2])).digests != piece.digests


def test_blocks_of_several_ranks_are_no_piece() -> None:
    worker = _worker(2, True)
    for block_ids in ([NUM_BLOCKS - 1, NUM_BLOCKS], [2 * NUM_BLOCKS], [-1]):
        with pytest.raises(HandoffError, match="not all of one rank"):
            asyncio.run(worker.pieces.read(block_ids))

"""Blocks between workers of any numbers of ranks: every head gets to every rank that holds it.

The oracle is indexing: what a worker of one rank has, sliced by heads. The ranks' stores are shared
as processes share them, through a second mapping of the same memory.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from actors.kv_transfer import rank_pieces
from actors.kv_transfer.channels.cuda_ipc import StoreOffer
from actors.kv_transfer.channels.nccl_pair import NcclPairs
from actors.kv_transfer.channels.rank_ipc import RanksOffer, offer_ranks, open_rank_receiver
from actors.kv_transfer.contracts import (
    IncomingData,
    OutgoingData,
    StagedPiece,
    StoredBlocks,
    UnfitError,
)
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.rank_pieces import OneRank, RankPieces
from engine.errors import ConfigError, HandoffError
from engine.host_id import host_id
from engine.kv.device_offer import DeviceOffer
from engine.kv.layout import KvDtype, KvLayout
from engine.kv.store import KvStore
from engine.messages import PieceReply
from tests.actors.kv_transfer.fake_pair_group import Wires
from tests.actors.kv_transfer.gpu_stand_in import random_blocks
from tests.actors.kv_transfer.rank_workers import CPU, NUM_BLOCKS, Worker, new_worker
from tests.actors.kv_transfer.test_channels_local import LocalBoard
from tests.actors.kv_transfer.test_nccl_pair import request_of, settings

OFFER = DeviceOffer(
    num_blocks=1,
    first_element=0,
    handle=b"",
    storage_bytes=0,
    storage_offset_bytes=0,
    counter_handle=b"",
    counter_offset=0,
    event_handle=b"",
    is_event_due=False,
)


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def layout_of(num_heads: int, dtype: KvDtype = "float32", width: int = 4) -> KvLayout:
    return KvLayout.with_heads(
        num_layers=2, block_size=3, num_kv_heads=num_heads, head_dim=width, dtype=dtype
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("num_heads", "from_size", "to_size"),
    [(4, 1, 2), (4, 2, 1), (4, 2, 2), (4, 2, 4), (4, 4, 2), (2, 1, 4), (2, 4, 2), (1, 2, 4)],
)
def test_every_head_reaches_every_rank_that_holds_it(
    num_heads: int, from_size: int, to_size: int, dtype: KvDtype, rng: random.Random
) -> None:
    """Of fewer heads than ranks, several ranks hold the same one."""
    whole = layout_of(num_heads, dtype, width=8)
    sender, receiver = new_worker(from_size, whole), new_worker(to_size, whole)
    number = rng.randint(1, NUM_BLOCKS)
    from_ids, to_ids = (rng.sample(range(NUM_BLOCKS), number) for _ in range(2))
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    blocks = torch.randn(number, *whole.block_shape, generator=generator)
    blocks = (100 + 40 * blocks).clamp(0, 255).to(receiver.stores[0].dtype)
    sender.compute(from_ids, blocks)
    before = [store.tensor.clone() for store in receiver.stores]

    async def move() -> bool:
        piece = await sender.pieces.read(from_ids)
        assert piece.digests == whole_digests(whole, blocks)
        return await receiver.pieces.write(to_ids, arrived(piece))

    assert asyncio.run(move())
    others = [block for block in range(NUM_BLOCKS) if block not in to_ids]
    for rank, store in enumerate(receiver.stores):
        assert torch.equal(store.tensor[to_ids], blocks[..., receiver.heads(rank), :])
        assert torch.equal(store.tensor[others], before[rank][others])


def whole_digests(whole: KvLayout, blocks: torch.Tensor) -> list[int]:
    """As a worker of one rank computes them."""
    return KvStore(whole, num_blocks=1, device=CPU).digest_staged(blocks)


def arrived(piece: StagedPiece[OutgoingData]) -> StagedPiece[IncomingData]:
    assert isinstance(piece.data, np.ndarray)
    return StagedPiece(data=piece.data, digests=piece.digests)


@pytest.mark.parametrize(
    ("num_heads", "from_size", "to_size"),
    [
        (4, 1, 2),
        (4, 2, 2),
        (4, 2, 4),
        (4, 4, 2),
        (2, 4, 2),
        (2, 1, 4),
        (1, 4, 2),
        (4, 2, 1),
        (1, 2, 1),
    ],
)
def test_heads_pulled_from_ranks_that_offer_their_stores_are_the_same(
    num_heads: int,
    from_size: int,
    to_size: int,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As between GPUs of one host; a map of the offers stands in for CUDA's."""
    monkeypatch.setattr(rank_pieces, "GATHER_BYTES", rng.choice([1, 1000, 2**30]))
    whole = layout_of(num_heads)
    sender, receiver = new_worker(from_size, whole), new_worker(to_size, whole)
    number = rng.randint(1, NUM_BLOCKS)
    from_ids, to_ids = (rng.sample(range(NUM_BLOCKS), number) for _ in range(2))
    blocks = torch.randn(number, *whole.block_shape)
    sender.compute(from_ids, blocks)
    digests = whole_digests(whole, blocks)
    pieces = receiver.pieces
    assert isinstance(pieces, RankPieces | KvPieces)

    async def pull(digests: list[int]) -> bool:
        offered, map_offer = offer_of(sender)
        puller = pieces if isinstance(pieces, RankPieces) else OneRank(pieces)
        channel = await open_rank_receiver(1, offered, puller, floor_gb_s=1e-9, map_offer=map_offer)
        assert channel.claim(0)
        data = await channel.receive(0, number * whole.block_bytes, [from_ids], to_ids)
        return await receiver.pieces.write(to_ids, StagedPiece(data=data, digests=digests))

    assert asyncio.run(pull(digests))
    for rank, store in enumerate(receiver.stores):
        assert torch.equal(store.tensor[to_ids], blocks[..., receiver.heads(rank), :])
    assert not asyncio.run(pull([digests[0] ^ 2, *digests[1:]]))


@pytest.mark.parametrize(
    ("num_heads", "from_size", "to_size"), [(4, 1, 2), (4, 2, 1), (4, 2, 4), (1, 4, 2)]
)
def test_heads_go_through_a_staging_slot_of_each_rank_0(
    num_heads: int, from_size: int, to_size: int, rng: random.Random
) -> None:
    """As over NCCL, which a queue stands in for; then with a flipped bit, and with a late rank."""
    whole = layout_of(num_heads)
    sender, receiver = new_worker(from_size, whole), new_worker(to_size, whole, deadline_s=0.05)
    number = rng.randint(1, NUM_BLOCKS)
    from_ids, to_ids = (rng.sample(range(NUM_BLOCKS), number) for _ in range(2))
    blocks = torch.randn(number, *whole.block_shape)
    sender.compute(from_ids, blocks)
    digests = whole_digests(whole, blocks)
    wires, board = Wires(), LocalBoard()
    given = settings(piece_bytes=NUM_BLOCKS * whole.block_bytes)

    async def move() -> list[bool]:
        ends = [NcclPairs(one.pieces, given, wires.make_group) for one in (sender, receiver)]  # type: ignore[arg-type]
        sending, receiving = await asyncio.gather(
            ends[0].open_send(request_of(1), board), ends[1].open_receive(request_of(1), board)
        )
        written: list[bool] = []

        async def deliver(seq: int, payload: list[object]) -> PieceReply:
            assert receiving.claim(seq)
            num_bytes = number * whole.block_bytes
            data = await receiving.receive(seq, num_bytes, payload, to_ids)
            written.append(await data.write(to_ids, digests))  # type: ignore[union-attr]
            return PieceReply(outcome="accepted")

        named = StoredBlocks(block_ids=tuple(from_ids), nbytes=number * whole.block_bytes)
        try:
            await sending.send(named, deliver)
            for rank, store in enumerate(receiver.stores):
                assert torch.equal(store.tensor[to_ids], blocks[..., receiver.heads(rank), :])
            wires.flips = rng.randrange(number * whole.block_bytes), 1 << rng.randrange(8)
            await sending.send(named, deliver)
            if to_size > 1:
                receiver.steps.num_launched = 1
                receiver.pieces.fence()  # type: ignore[attr-defined]
                with pytest.raises(HandoffError, match="ended 0 steps"):
                    await sending.send(named, deliver)
        finally:
            await asyncio.gather(sending.close(), receiving.close())
        return written

    assert asyncio.run(move()) == [True, False]


def offer_of(sender: Worker) -> tuple[bytes, Callable[[DeviceOffer, torch.Tensor], torch.Tensor]]:
    """What the sender's rank 0 offers, and what maps it: a store's number is in its handle."""

    def offer(rank: int) -> DeviceOffer:
        return msgspec.structs.replace(OFFER, num_blocks=NUM_BLOCKS, handle=bytes([rank]))

    def map_offer(offer: DeviceOffer, like: torch.Tensor) -> torch.Tensor:
        tensor = sender.stores[offer.handle[0]].tensor
        assert like.shape[1:] == tensor.shape[1:]
        assert like.stride() == tensor.stride()
        return tensor

    if len(sender.stores) == 1:
        one = StoreOffer(host=host_id(), **msgspec.structs.asdict(offer(0)))
        return msgspec.msgpack.encode(one), map_offer
    assert isinstance(sender.pieces, RankPieces)
    stores = [replace(one, device=offer(rank)) for rank, one in enumerate(sender.pieces.stores)]
    return offer_ranks(stores), map_offer


def test_stores_in_host_memory_are_not_offered_to_other_gpus() -> None:
    worker = new_worker(2, layout_of(2))
    assert isinstance(worker.pieces, RankPieces)
    with pytest.raises(UnfitError, match="host memory"):
        offer_ranks(worker.pieces.stores)


@pytest.mark.parametrize(
    ("offered", "named"),
    [
        (b"no offer", "no KV store"),
        (msgspec.msgpack.encode(RanksOffer(host="elsewhere", ranks=[])), "host"),
    ],
)
def test_an_offer_that_cannot_be_mapped_is_unfit(offered: bytes, named: str) -> None:
    pieces = new_worker(2, layout_of(2)).pieces
    assert isinstance(pieces, RankPieces)
    with pytest.raises(UnfitError, match=named):
        asyncio.run(open_rank_receiver(1, offered, pieces, floor_gb_s=0.0))


@pytest.mark.parametrize("from_size", [1, 2])
def test_a_rank_with_other_bytes_than_announced_is_noticed(
    from_size: int, rng: random.Random
) -> None:
    """On either side, in one bit of one head; the sum of the digests tells."""
    whole = layout_of(2)
    for side in ("sender", "receiver"):
        sender, receiver = new_worker(from_size, whole), new_worker(4, whole)
        [block] = random_blocks(1, sender.stores[0], rng)
        sender.compute([block], torch.randn(1, *whole.block_shape))
        if side == "sender":  # after its step, before it is read
            words = sender.stores[-1].tensor[block].view(torch.int32).view(-1)
            words[rng.randrange(len(words))] ^= 1 << rng.randrange(31)

        async def move(sender: Worker, receiver: Worker, block: int, side: str) -> bool:
            piece = await sender.pieces.read([block])
            if side == "receiver":  # one of the ranks that hold the same head
                _forget_writes(receiver, rng.randrange(4))
            return await receiver.pieces.write([3], arrived(piece))

        assert not asyncio.run(move(sender, receiver, block, side))


def _forget_writes(worker: Worker, rank: int) -> None:
    pieces = worker.pieces
    assert isinstance(pieces, RankPieces)
    store = pieces.stores[rank].store
    store.scatter = lambda block_ids, data: None  # type: ignore[method-assign]


def test_a_read_waits_for_ranks_that_are_behind(rng: random.Random) -> None:
    """Rank 0 has the result of a step that another rank has not ended."""
    worker = new_worker(2, layout_of(2), deadline_s=0.05)
    worker.compute([5], torch.randn(1, *worker.whole.block_shape))
    worker.steps.num_launched = worker.steps.num_ended = 2
    behind = worker.stores[1].shared
    assert behind is not None
    behind.count_step()
    with pytest.raises(HandoffError, match="rank 1 has ended 1 steps, not 2"):
        asyncio.run(worker.pieces.read([5]))
    behind.count_step()
    assert asyncio.run(worker.pieces.read([5])).digests


def test_a_write_waits_for_steps_launched_before_its_blocks_were_granted() -> None:
    """They may still write there. What was launched later does not."""
    whole = layout_of(2)
    sender, worker = new_worker(1, whole), new_worker(2, whole, deadline_s=0.05)
    sender.compute([1], torch.randn(1, *whole.block_shape))
    piece = asyncio.run(sender.pieces.read([1]))
    worker.steps.num_launched = 1
    worker.pieces.fence()  # type: ignore[attr-defined]
    worker.steps.num_launched = 2
    with pytest.raises(HandoffError, match="rank 1 has ended 0 steps, not 1"):
        asyncio.run(worker.pieces.write([2], arrived(piece)))
    ended = worker.stores[1].shared
    assert ended is not None
    ended.count_step()
    assert asyncio.run(worker.pieces.write([2], arrived(piece)))


def test_heads_that_share_a_word_of_the_digest_are_refused() -> None:
    whole = layout_of(4, "bfloat16", width=1)
    with pytest.raises(ConfigError, match=r"2 bytes .*words of 8.*tensor_parallel_size"):
        new_worker(2, whole)

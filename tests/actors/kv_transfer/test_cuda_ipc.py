"""The receiver's end of `cuda_ipc` over a store that is mapped by a fake."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from actors.kv_transfer import kv_pieces
from actors.kv_transfer.channels.cuda_ipc import (
    CudaIpcReceiver,
    CudaIpcSender,
    StoreOffer,
    host_id,
    open_receiver,
)
from actors.kv_transfer.contracts import StagedPiece, UnfitError
from actors.kv_transfer.kv_pieces import KvPieces
from engine.errors import HandoffError
from engine.kv.store import KvStore
from engine.messages import PieceReply
from tests.actors.kv_transfer.gpu_stand_in import LAYOUT, random_blocks, random_store, stored

ACCEPTED = PieceReply(outcome="accepted")
OFFER = StoreOffer(
    host=host_id(),
    num_blocks=11,
    first_element=0,
    handle=b"h",
    storage_bytes=0,
    storage_offset_bytes=0,
    counter_handle=b"",
    counter_offset=0,
    event_handle=b"",
    is_event_due=False,
)


class Ends:
    """A sender's store, a receiver's store, and the channel between them."""

    def __init__(self, rng: random.Random) -> None:
        self.source, self.target = random_store(11, rng), random_store(19, rng)
        self.pieces = KvPieces(self.target)
        self.sender = CudaIpcSender(3, deadline_s=60.0)
        self.receiver = CudaIpcReceiver(3, self.pieces, self.source.tensor)

    async def move(self, from_ids: list[int], to_ids: list[int], digests: list[int]) -> bool:
        written: list[bool] = []

        async def deliver(seq: int, payload: list[Any]) -> PieceReply:
            payload = msgspec.msgpack.decode(msgspec.msgpack.encode(payload))
            assert self.receiver.claim(seq)
            assert not self.receiver.claim(seq)
            num_bytes = len(to_ids) * self.pieces.block_bytes
            data = await self.receiver.receive(seq, num_bytes, payload)
            assert data.nbytes == num_bytes
            piece = StagedPiece(data=data, digests=digests)
            written.append(await self.pieces.write(to_ids, piece))
            return ACCEPTED

        assert await self.sender.send(stored(from_ids, self.pieces), deliver) == ACCEPTED
        return written[0]


def with_ends(scenario: Callable[[Ends, random.Random], Awaitable[None]]) -> None:
    async def main() -> None:
        rng = random.Random()
        ends = Ends(rng)
        await scenario(ends, rng)
        await ends.sender.close()
        await ends.receiver.close()
        with pytest.raises(HandoffError, match="closed"):
            await ends.receiver.receive(0, 0, [])
        ends.pieces.close()

    asyncio.run(main())


@pytest.fixture(params=["at once", "in parts"])
def _parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven blocks in one part, or in parts of 2, 4, 4 and 1."""
    if request.param == "in parts":
        monkeypatch.setattr(kv_pieces, "FIRST_PULL_BYTES", 2 * LAYOUT.block_bytes)
        monkeypatch.setattr(kv_pieces, "MAX_PULL_BYTES", 4 * LAYOUT.block_bytes)


@pytest.mark.usefixtures("_parts")
def test_pulled_blocks_are_bit_for_bit_the_sender_s() -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        for number in (1, 4, 11):
            from_ids = random_blocks(number, ends.source, rng)
            to_ids = random_blocks(number, ends.target, rng)
            assert await ends.move(from_ids, to_ids, ends.source.digest(from_ids))
            assert torch.equal(ends.target.tensor[to_ids], ends.source.tensor[from_ids])

    with_ends(scenario)


@pytest.mark.usefixtures("_parts")
def test_bytes_that_changed_since_they_were_digested_are_noticed() -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        from_ids, to_ids = random_blocks(11, ends.source, rng), random_blocks(11, ends.target, rng)
        digests = ends.source.digest(from_ids)
        for changed in range(11):
            block = ends.source.tensor[from_ids[changed]].view(-1).view(torch.uint8)
            byte, flipped = rng.randrange(block.numel()), 1 << rng.randrange(8)
            block[byte] ^= flipped
            assert not await ends.move(from_ids, to_ids, digests), f"block {changed}"
            block[byte] ^= flipped
        assert await ends.move(from_ids, to_ids, digests)

    with_ends(scenario)


@pytest.mark.parametrize(
    "payload", [[], [[1]], [[1, 2, 3]], [[1, 11]], [[-1, 2]], [[1, 2], [1, 2]], ["ab"], [[1, "2"]]]
)
def test_a_payload_that_does_not_name_two_blocks_of_the_store_is_refused(
    payload: list[Any],
) -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        assert ends.receiver.claim(0)
        with pytest.raises(HandoffError, match="block"):
            await ends.receiver.receive(0, 2 * ends.pieces.block_bytes, payload)

    with_ends(scenario)


def test_a_silent_receiver_ends_a_send_at_the_deadline() -> None:
    async def main() -> None:
        sender = CudaIpcSender(1, deadline_s=0.05)

        async def deliver(seq: int, payload: list[Any]) -> PieceReply:
            await asyncio.sleep(1000)
            return ACCEPTED

        with pytest.raises(HandoffError, match="acknowledgement"):
            await sender.send(None, deliver)

    asyncio.run(main())


class TestOpening:
    def open(
        self,
        offered: bytes,
        map_offer: Callable[[StoreOffer, Tensor], Tensor],
        floor_gb_s: float = 0.0,
    ) -> CudaIpcReceiver:
        async def main() -> CudaIpcReceiver:
            pieces = KvPieces(random_store(5, random.Random()))
            return await open_receiver(
                1, offered, pieces, floor_gb_s=floor_gb_s, map_offer=map_offer
            )

        return asyncio.run(main())

    def _source(self, offer: StoreOffer, mine: Tensor) -> Tensor:
        return random_store(offer.num_blocks, random.Random()).tensor

    def test_an_offer_of_this_host_opens_above_its_floor(self) -> None:
        assert self.open(msgspec.msgpack.encode(OFFER), self._source, 1e-9).epoch == 1

    def test_below_its_floor_the_kind_is_unfit(self) -> None:
        with pytest.raises(UnfitError, match="floors_gb_s"):
            self.open(msgspec.msgpack.encode(OFFER), self._source, 1e9)

    def test_another_host_is_unfit(self) -> None:
        elsewhere = msgspec.structs.replace(OFFER, host="elsewhere")
        with pytest.raises(UnfitError, match="host"):
            self.open(msgspec.msgpack.encode(elsewhere), self._source)

    @pytest.mark.parametrize("offered", [b"", b"\xff", msgspec.msgpack.encode({"host": 1})])
    def test_what_is_no_offer_is_unfit(self, offered: bytes) -> None:
        with pytest.raises(UnfitError, match="no KV store"):
            self.open(offered, self._source)

    def test_memory_that_cannot_be_mapped_is_unfit(self) -> None:
        def refuse(offer: StoreOffer, mine: Tensor) -> Tensor:
            raise RuntimeError("peer access is not supported")

        with pytest.raises(UnfitError, match="peer access"):
            self.open(msgspec.msgpack.encode(OFFER), refuse)

    def test_a_fitting_store_is_what_the_offer_says(self) -> None:
        seen: list[int] = []

        def map_offer(offer: StoreOffer, mine: Tensor) -> Tensor:
            seen.append(offer.num_blocks)
            store: KvStore = random_store(offer.num_blocks, random.Random())
            return store.tensor

        self.open(msgspec.msgpack.encode(OFFER), map_offer)
        assert seen == [11]

"""The receiver's end of `cuda_ipc` over a store that is mapped by a fake."""

import asyncio
import os
import random
import subprocess
import weakref
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from actors.kv_transfer import kv_pieces
from actors.kv_transfer.channels import worker_channels
from actors.kv_transfer.channels.cuda_ipc import (
    CudaIpcReceiver,
    CudaIpcSender,
    PulledBlocks,
    StoreOffer,
    open_receiver,
)
from actors.kv_transfer.channels.worker_channels import DeviceChannels, WorkerChannels
from actors.kv_transfer.contracts import ReceiveChannel, StagedPiece, UnfitError
from actors.kv_transfer.kv_pieces import KvPieces
from configs.schema import FloorsConfig
from engine.errors import HandoffError
from engine.host_id import host_id
from engine.kv.store import KvStore
from engine.messages import PieceReply
from tests.actors.kv_transfer.gpu_stand_in import LAYOUT, random_blocks, random_store, stored
from tests.actors.kv_transfer.test_channels_local import LocalBoard, pair_request
from tests.harness.seeds import fresh_random

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
        rng = fresh_random()
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


class TestEndOfTheSender:
    """Its GPU keeps the memory of a dead process for as long as another one maps it."""

    @pytest.fixture
    def sender(self) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(["sleep", "1000"]) as process:
            yield process
            process.kill()

    def open(
        self,
        sender: subprocess.Popen[bytes],
        scenario: Callable[[ReceiveChannel, Any], Any],
        offer: StoreOffer = OFFER,
    ) -> None:
        """Runs a scenario over a channel and what tells whether the store is mapped."""

        async def main() -> None:
            source = random_store(11, fresh_random()).tensor
            mapped = [source]
            mapping = Mapping(source)
            del source
            pieces = KvPieces(random_store(5, fresh_random()))
            nccl: Any = None
            channels = WorkerChannels(
                LocalBoard(),
                address="127.0.0.1",
                deadline_s=1.0,
                max_in_flight_bytes=1,
                floors_gb_s=FloorsConfig(cuda_ipc=0.0),
                device=DeviceChannels(pieces=pieces, nccl=nccl),
            )
            request = pair_request(1, channel="cuda_ipc")
            request = msgspec.structs.replace(
                request,
                offer=msgspec.msgpack.encode(offer),
                sender=msgspec.structs.replace(request.sender, pid=sender.pid),
            )
            with pytest.MonkeyPatch.context() as patch:
                opened = partial(open_receiver, map_offer=lambda *_: mapped.pop())
                patch.setattr(worker_channels, "open_receiver", opened)
                channel = await channels.open_receive(request)
            async with asyncio.timeout(20):
                await scenario(channel, mapping)
                await channel.close()
                await mapping.gone.wait()

        asyncio.run(main())

    def test_its_store_is_mapped_no_longer(self, sender: subprocess.Popen[bytes]) -> None:
        async def scenario(channel: ReceiveChannel, mapping: Mapping) -> None:
            assert not mapping.gone.is_set()
            sender.kill()
            await mapping.gone.wait()
            assert channel.claim(0)
            with pytest.raises(HandoffError, match="closed"):
                await channel.receive(0, 0, [])

        self.open(sender, scenario)

    def test_a_piece_that_came_is_read_first(self, sender: subprocess.Popen[bytes]) -> None:
        async def scenario(channel: ReceiveChannel, mapping: Mapping) -> None:
            assert channel.claim(0)
            data = await channel.receive(0, 2 * LAYOUT.block_bytes, [[3, 4]])
            sender.kill()
            sender.wait()
            for _ in range(2):
                await asyncio.sleep(0)  # the loop looks at what has happened
            assert isinstance(channel, CudaIpcReceiver)
            assert channel._closing is not None
            assert isinstance(data, PulledBlocks)
            assert not await data.write([0, 1], [1, 2]), "its digests were right"
            del data

        self.open(sender, scenario)

    def test_a_channel_that_is_closed_watches_nobody(self, sender: subprocess.Popen[bytes]) -> None:
        async def scenario(channel: ReceiveChannel, mapping: Mapping) -> None:
            before = set(os.listdir("/proc/self/fd"))
            await channel.close()
            assert len(before - set(os.listdir("/proc/self/fd"))) == 1

        self.open(sender, scenario)

    def test_one_that_cannot_be_watched_is_served(
        self, sender: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scenario(channel: ReceiveChannel, mapping: Mapping) -> None:
            assert not mapping.gone.is_set()

        sender.kill()
        sender.wait()
        self.open(sender, scenario)
        assert "would not be noticed" in caplog.text

    def test_one_on_another_host_is_not_missed_here(
        self, sender: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scenario(channel: ReceiveChannel, mapping: Mapping) -> None:
            raise AssertionError("it opened")

        sender.kill()
        sender.wait()
        elsewhere = msgspec.structs.replace(OFFER, host="another")
        with pytest.raises(UnfitError, match="another host"):
            self.open(sender, scenario, elsewhere)
        assert not caplog.records


class Mapping:
    """Whether a tensor is still there."""

    def __init__(self, tensor: Tensor) -> None:
        self.gone, loop = asyncio.Event(), asyncio.get_running_loop()
        # A thread may be the last to have it.
        self._tensor = weakref.ref(tensor, lambda _: loop.call_soon_threadsafe(self.gone.set))


class TestOpening:
    def open(
        self,
        offered: bytes,
        map_offer: Callable[[StoreOffer, Tensor], Tensor],
        floor_gb_s: float = 0.0,
    ) -> CudaIpcReceiver:
        async def main() -> CudaIpcReceiver:
            pieces = KvPieces(random_store(5, fresh_random()))
            return await open_receiver(
                1, offered, pieces, floor_gb_s=floor_gb_s, map_offer=map_offer
            )

        return asyncio.run(main())

    def _source(self, offer: StoreOffer, mine: Tensor) -> Tensor:
        return random_store(offer.num_blocks, fresh_random()).tensor

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
            store: KvStore = random_store(offer.num_blocks, fresh_random())
            return store.tensor

        self.open(msgspec.msgpack.encode(OFFER), map_offer)
        assert seen == [11]

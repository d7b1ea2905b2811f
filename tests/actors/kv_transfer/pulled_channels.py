"""Channels of the simulation by which decode workers get blocks from prefill workers themselves.

They pull from stores that they map, as by `cuda_ipc`, or ask the ranks that have them. A map of the
stores stands in for CUDA's, a loop over the ranks for the ring that asks them, and calls for Ray's.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from actors.kv_transfer.channels.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from actors.kv_transfer.channels.host_staging import HostStagedSender
from actors.kv_transfer.channels.rank_ipc import RankOffer, RanksOffer, open_rank_receiver
from actors.kv_transfer.contracts import ReceiveChannel, SendChannel
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.rank_links import Giver, GiversOffer, HeadGiver
from actors.kv_transfer.rank_pieces import OneRank, RankPieces
from actors.kv_transfer.rank_pulls import Linking, Order, PullsByRanks, RankPuller
from engine.errors import WorkerError
from engine.host_id import host_id
from engine.kv.device_offer import DeviceOffer
from engine.messages import ChannelKind, PairRequest
from engine.ranks.rank import Rank
from engine.ranks.rank_tasks import Work
from engine.ranks.shared_stores import part_of
from tests.actors.kv_transfer.rank_workers import Worker
from tests.actors.kv_transfer.test_rank_pieces import OFFER
from tests.harness.handoff_network import CONFIG, FakeChannels, Faults

Reach = Callable[[str], object]
NO_WIRES: Any = None


class InlineTasks:
    """Rank after rank does what is asked."""

    def __init__(self, others: list[Work], reach: Reach) -> None:
        self._others = others
        self._reach = reach

    def ask(self, work: bytes, own: Work) -> list[bytes]:
        answers = []
        for rank, do in enumerate([own, *self._others]):
            self._reach(f"rank {rank} is asked")
            answers.append(do(work))
            self._reach(f"rank {rank} has answered")
        return answers


class InlinePulls(PullsByRanks):
    """All in virtual time."""

    async def _ask_in_thread(self, work: Order) -> list[bytes]:
        await asyncio.sleep(0)
        return self._ask(work)


class PulledChannels(FakeChannels):
    """Beside `cuda_ipc` there are those of host memory."""

    def __init__(self, faults: Faults, receiver: Callable[[], Worker], reach: Reach) -> None:
        """receiver: the decode worker of now. reach: notes its moments."""
        super().__init__(faults)
        self.senders: list[Worker] = []
        self._receiver = receiver
        self._reach = reach
        self._ends: list[CudaIpcSender | CudaIpcReceiver[object]] = []

    @property
    def num_open(self) -> int:
        return super().num_open + sum(end._is_open for end in self._ends)

    def offer(self, kind: ChannelKind) -> bytes:
        """Of the newest sender."""
        worker = self.senders[-1]
        ranks = []
        for rank in range(len(worker.stores)):
            handle = bytes([len(self.senders) - 1, rank])
            store = msgspec.structs.replace(
                OFFER, num_blocks=worker.stores[0].num_blocks, handle=handle
            )
            part = part_of(Rank(rank, len(worker.stores)), worker.whole)
            ranks.append(RankOffer(part=part, store=store))
        return msgspec.msgpack.encode(RanksOffer(host=host_id(), ranks=ranks))

    async def open_send(self, request: PairRequest) -> SendChannel:
        if request.channel != "cuda_ipc":
            channel = await super().open_send(request)
            pieces = self.senders[-1].pieces
            assert isinstance(pieces, KvPieces | RankPieces)
            return HostStagedSender(channel, pieces.to_host)
        await asyncio.sleep(0)
        sender = CudaIpcSender(request.epoch, CONFIG.transfer_deadline_s)
        self._ends.append(sender)
        return sender

    async def open_receive(self, request: PairRequest) -> ReceiveChannel:
        if request.channel != "cuda_ipc":
            return await super().open_receive(request)
        pieces = self._receiver().pieces
        if isinstance(pieces, RankPieces):
            pulls = self._by_ranks(pieces)
            channel: CudaIpcReceiver[object] = await pulls.open(request.epoch, request.offer, 0.0)
        else:
            assert isinstance(pieces, KvPieces)
            channel = await open_rank_receiver(
                request.epoch,
                request.offer,
                OneRank(pieces),
                floor_gb_s=0.0,
                map_offer=self._map,
            )
        self._ends.append(channel)
        return channel

    def _by_ranks(self, pieces: RankPieces) -> PullsByRanks:
        own, *others = [
            RankPuller(one.part, KvPieces(one.store), self._map) for one in pieces.stores
        ]
        return InlinePulls(pieces, InlineTasks([one.do for one in others], self._reach), own)

    def _map(self, offer: DeviceOffer, like: torch.Tensor) -> torch.Tensor:
        sender, rank = offer.handle
        return self.senders[sender].stores[rank].tensor


class AskedChannels(PulledChannels):
    """Whatever their kind, what is asked for comes as an answer."""

    def __init__(
        self, faults: Faults, receiver: Callable[[], Worker], reach: Reach, reach_giver: Reach
    ) -> None:
        """reach_giver: notes moments of the sender, and says whether one is of wrong bytes."""
        super().__init__(faults, receiver, reach)
        self.num_dead = 0  # senders
        self._reach_giver = reach_giver

    def offer(self, kind: ChannelKind) -> bytes:
        worker, number = self.senders[-1], len(self.senders) - 1
        parts = [
            part_of(Rank(r, len(worker.stores)), worker.whole) for r in range(len(worker.stores))
        ]
        givers = [Giver(part, f"{number} {rank}") for rank, part in enumerate(parts)]
        return msgspec.msgpack.encode(GiversOffer(worker.stores[0].num_blocks, givers))

    async def open_send(self, request: PairRequest) -> SendChannel:
        await asyncio.sleep(0)
        sender = CudaIpcSender(request.epoch, CONFIG.transfer_deadline_s, request.channel)
        self._ends.append(sender)
        return sender

    async def open_receive(self, request: PairRequest) -> ReceiveChannel:
        pieces = self._receiver().pieces
        assert isinstance(pieces, KvPieces | RankPieces)
        pulls = self._by_ranks(OneRank(pieces) if isinstance(pieces, KvPieces) else pieces)
        answered = msgspec.structs.replace(request, channel="object_store")
        channel: CudaIpcReceiver[object] = await pulls.open_links(answered)
        self._ends.append(channel)
        return channel

    def _by_ranks(self, pieces: RankPieces | OneRank) -> PullsByRanks:
        stores = self._receiver().stores
        linking = Linking(wires=NO_WIRES, find=lambda actor: partial(self._ask, actor), reader="")
        own, *others = [
            RankPuller(part, KvPieces(store), index=rank, linking=linking)
            for rank, (part, store) in enumerate(zip(pieces.parts, stores, strict=True))
        ]
        return InlinePulls(pieces, InlineTasks([one.do for one in others], self._reach), own)

    def _ask(self, actor: str, order: bytes) -> Callable[[], Any]:
        number, rank = map(int, actor.split())
        worker = self.senders[number]

        def answer() -> Any:
            is_wrong = number >= self.num_dead and self._reach_giver(f"rank {rank} is read")
            if number < self.num_dead:
                raise WorkerError("it is dead")
            part = part_of(Rank(rank, len(worker.stores)), worker.whole)
            data = HeadGiver(part, KvPieces(worker.stores[rank]), NO_WIRES).do(order)
            assert data is not None
            data[-1] ^= 4 * bool(is_wrong)
            return data

        return answer

"""KV channels of a worker: bytes of whole blocks from a prefill worker to a decode worker.

A channel carries pieces (runs of blocks) from one sender to one receiver and counts them by
sequence number. The piece's header goes by a call, the bytes beside it:

    cuda_ipc      two GPUs of one host: the receiver reads the sender's store (cuda_ipc.py), or the
                  stores of its ranks (rank_ipc.py)
    nccl_pair     two GPUs: a 2-rank NCCL group per (sender, receiver, epoch) (nccl_pair.py)
    gloo_pair     a 2-rank gloo group per (sender, receiver, epoch) over TCP (gloo_pair.py)
    object_store  bytes as an object in Ray's shared memory (object_store.py)

With `handoff.pull_by_ranks` a channel of any kind only names blocks, and the ranks of the receiver
get their heads from those of the sender (rank_pulls.py).

Any failure ends a channel for good: it closes, and the next one has a higher epoch. Which kind is
used is the sender's choice (channel_choice.py). Knows no requests, no reservations and no owners of
blocks.
"""

from dataclasses import dataclass
from typing import Any

from actors.kv_transfer.channels.cuda_ipc import (
    CudaIpcReceiver,
    CudaIpcSender,
    offer_store,
    open_receiver,
)
from actors.kv_transfer.channels.gloo_pair import GlooConnection, GlooReceiver, GlooSender
from actors.kv_transfer.channels.handshake import RECEIVER_RANK, SENDER_RANK
from actors.kv_transfer.channels.host_staging import HostStagedSender, pageable
from actors.kv_transfer.channels.nccl_pair import NcclPairs, NcclSettings
from actors.kv_transfer.channels.object_store import (
    ByteBudget,
    ObjectStoreReceiver,
    ObjectStoreSender,
)
from actors.kv_transfer.channels.rank_ipc import is_of_ranks, offer_ranks, open_rank_receiver
from actors.kv_transfer.channels.sender_process import SenderProcess
from actors.kv_transfer.contracts import (
    ReceiveChannel,
    RendezvousClient,
    SendChannel,
    UnfitError,
)
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.own_blocks import OwnBlockPieces
from actors.kv_transfer.rank_pieces import OneRank, RankPieces
from actors.kv_transfer.rank_pulls import PullsByRanks
from configs.schema import FloorsConfig, HandoffConfig
from engine.messages import ChannelKind, PairRequest

# Of a worker of one rank, of several that share its blocks, and of several that do not.
Pieces = KvPieces | RankPieces | OwnBlockPieces


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChannels:
    """What channels need on a worker whose KV store is on a GPU."""

    pieces: Pieces
    nccl: NcclPairs

    def offer(self) -> bytes:
        """What a receiver maps for `cuda_ipc`. Raises UnfitError."""
        if isinstance(self.pieces, RankPieces):
            return offer_ranks(self.pieces.stores)
        if isinstance(self.pieces, OwnBlockPieces):
            return offer_ranks(self.pieces.stores, has_own_blocks=True)
        return offer_store(self.pieces.tensor)

    async def open_ipc(self, request: PairRequest, floor_gb_s: float) -> CudaIpcReceiver[Any]:
        epoch, offer, pieces = request.epoch, request.offer, self.pieces
        if isinstance(pieces, RankPieces | OwnBlockPieces):
            return await open_rank_receiver(epoch, offer, pieces, floor_gb_s=floor_gb_s)
        if is_of_ranks(offer):
            return await open_rank_receiver(epoch, offer, OneRank(pieces), floor_gb_s=floor_gb_s)
        return await open_receiver(epoch, offer, pieces, floor_gb_s=floor_gb_s)


def device_channels(pieces: Pieces, config: HandoffConfig) -> DeviceChannels | None:
    """Returns what channels of a GPU need; None when what `pieces` reads is in host memory."""
    if not pieces.is_on_gpu:
        return None
    settings = NcclSettings(
        deadline_s=config.transfer_deadline_s,
        piece_bytes=config.device_piece_bytes,
        max_ctas=config.nccl_max_ctas,
        max_pairs=config.max_nccl_pairs,
        floor_gb_s=config.floors_gb_s.nccl_pair,
    )
    return DeviceChannels(pieces=pieces, nccl=NcclPairs(pieces, settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRanks:
    """What a worker needs where ranks get their heads from ranks."""

    offer: bytes = b""  # of a sender: its ranks
    pulls: PullsByRanks | None = None  # of a receiver


class WorkerChannels:
    """The channels of one worker process."""

    def __init__(
        self,
        rendezvous: RendezvousClient,
        *,
        address: str,
        deadline_s: float,
        max_in_flight_bytes: int,
        floors_gb_s: FloorsConfig | None = None,
        device: DeviceChannels | None = None,
        by_ranks: ByRanks | None = None,
    ) -> None:
        """`address` is where gloo listens; `deadline_s` bounds every operation.

        `device`: None = the KV store is in host memory. `by_ranks`: None = rank 0 moves the heads
        of all ranks.
        """
        self._rendezvous = rendezvous
        self._address = address
        self._deadline_s = deadline_s
        self._floors_gb_s = floors_gb_s or FloorsConfig()
        self._device = device
        self._by_ranks = by_ranks
        self._empty = device.pieces.empty if device else pageable
        self._budget = ByteBudget(max_in_flight_bytes)

    def offer(self, kind: ChannelKind) -> bytes:
        """Returns what a request to open `kind` tells the receiver. Raises UnfitError."""
        if kind == "cuda_ipc":
            return self._require_device().offer()
        return b"" if self._by_ranks is None else self._by_ranks.offer

    async def open_send(self, request: PairRequest) -> SendChannel:
        if self._by_ranks is not None:
            return CudaIpcSender(request.epoch, self._deadline_s, request.channel)
        match request.channel:
            case "cuda_ipc":
                self._require_device()
                return CudaIpcSender(request.epoch, self._deadline_s)
            case "nccl_pair":
                return await self._require_device().nccl.open_send(request, self._rendezvous)
            case "gloo_pair":
                return self._staged(GlooSender(await self._connect(request, SENDER_RANK)))
            case "object_store":
                sender = ObjectStoreSender(request.epoch, self._deadline_s, self._budget)
                return self._staged(sender)

    async def open_receive(self, request: PairRequest) -> ReceiveChannel:
        if request.channel == "cuda_ipc":
            return await self._open_mapped(request)
        if self._by_ranks is not None and self._by_ranks.pulls is not None:
            return await self._by_ranks.pulls.open_links(request)
        match request.channel:
            case "nccl_pair":
                return await self._require_device().nccl.open_receive(request, self._rendezvous)
            case "gloo_pair":
                return GlooReceiver(await self._connect(request, RECEIVER_RANK))
            case "object_store":
                return ObjectStoreReceiver(request.epoch, self._deadline_s, self._empty)

    async def _open_mapped(self, request: PairRequest) -> ReceiveChannel:
        device, floor_gb_s = self._require_device(), self._floors_gb_s.cuda_ipc
        process = SenderProcess(request.sender.name, request.sender.pid)
        try:
            if self._by_ranks is not None and self._by_ranks.pulls is not None:
                pulls = self._by_ranks.pulls
                channel = await pulls.open(request.epoch, request.offer, floor_gb_s)
            else:
                channel = await device.open_ipc(request, floor_gb_s)
        except BaseException:
            process.close()
            raise
        channel.close_with(process)
        return channel

    def _require_device(self) -> DeviceChannels:
        if self._device is None:
            raise UnfitError("a KV store in host memory has no channels between GPUs")
        return self._device

    def _staged(self, channel: SendChannel) -> SendChannel:
        if self._device is None:
            return channel
        return HostStagedSender(channel, self._device.pieces.to_host)

    async def _connect(self, request: PairRequest, rank: int) -> GlooConnection:
        connection = GlooConnection(
            request.epoch,
            rank,
            self._deadline_s,
            address=self._address,
            floor_gb_s=self._floors_gb_s.gloo_pair,
            empty=self._empty,
        )
        try:
            await connection.open(self._rendezvous, request.rendezvous_key)
        except BaseException:
            await connection.close()
            raise
        return connection

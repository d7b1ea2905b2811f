"""The `cuda_ipc` channel from a worker of several ranks, to one, or the other way.

The sender offers the stores of all its ranks. The receiver's rank 0 maps them, as it has mapped its
own ranks' stores, and copies each head from one to the other, all on one host.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from actors.kv_transfer.channels.cuda_ipc import (
    CudaIpcReceiver,
    StoreOffer,
    check_host,
    probe_reading,
)
from actors.kv_transfer.contracts import UnfitError
from actors.kv_transfer.own_blocks import OwnBlockPieces, OwnBlockSources
from actors.kv_transfer.rank_pieces import OneRank, RankPieces, RankSources, Sources
from engine.host_id import host_id
from engine.kv.device_offer import DeviceOffer, map_tensor
from engine.kv.layout import KvLayout, KvPart
from engine.ranks.shared_stores import RankStore

MapStore = Callable[[DeviceOffer, Tensor], Tensor]


class RankOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's store."""

    part: KvPart
    store: DeviceOffer


class RanksOffer(msgspec.Struct, frozen=True, kw_only=True):
    """All stores of a sender, and the host on which alone they can be mapped."""

    host: str
    ranks: list[RankOffer]
    has_own_blocks: bool = False  # each rank has other blocks, and whole ones


def offer_ranks(stores: Sequence[RankStore], *, has_own_blocks: bool = False) -> bytes:
    """Describe the stores of all ranks. Raises UnfitError if they are not on GPUs."""
    ranks = [RankOffer(part=one.part, store=one.device) for one in stores if one.device is not None]
    if len(ranks) < len(stores):
        raise UnfitError("KV stores in host memory have no channels between GPUs")
    offer = RanksOffer(host=host_id(), ranks=ranks, has_own_blocks=has_own_blocks)
    return msgspec.msgpack.encode(offer)


async def open_rank_receiver(
    epoch: int,
    offered: bytes,
    pieces: RankPieces | OwnBlockPieces | OneRank,
    *,
    floor_gb_s: float,
    map_offer: MapStore = map_tensor,
) -> CudaIpcReceiver[Sources]:
    """Map the offered stores; the first must be read fast enough. Raises UnfitError."""
    offer = read_offer(offered, pieces.whole)
    check_host(offer.host)

    def prepare() -> Sources:
        try:
            tensors = [_map(one, pieces, map_offer) for one in offer.ranks]
            if floor_gb_s > 0:
                probe_reading(tensors[0], floor_gb_s)
        except RuntimeError as error:  # CUDA refuses: no peer access, another namespace
            raise UnfitError(f"the sender's KV stores cannot be read: {error}") from error
        if offer.has_own_blocks:
            return OwnBlockSources(tensors, pieces.whole)
        return RankSources([(one.part, t) for one, t in zip(offer.ranks, tensors, strict=True)])

    return CudaIpcReceiver(epoch, pieces, await asyncio.to_thread(prepare))


def is_of_ranks(offered: bytes) -> bool:
    """Whether it is what several ranks offer."""
    try:
        msgspec.msgpack.decode(offered, type=RanksOffer)
    except msgspec.DecodeError:
        return False
    return True


def read_offer(offered: bytes, whole: KvLayout) -> RanksOffer:
    """Of several ranks, or of a sender of one. Raises UnfitError."""
    try:
        return msgspec.msgpack.decode(offered, type=RanksOffer)
    except msgspec.DecodeError:
        pass
    try:
        one = msgspec.msgpack.decode(offered, type=StoreOffer)
    except msgspec.DecodeError as error:
        raise UnfitError(f"the sender offers no KV store: {error}") from error
    part = KvPart(whole=whole, first_head=0, num_heads=whole.block_shape[3])
    return RanksOffer(host=one.host, ranks=[RankOffer(part=part, store=one)])


def _map(
    offer: RankOffer, pieces: RankPieces | OwnBlockPieces | OneRank, map_offer: MapStore
) -> Tensor:
    *outer, _, width = pieces.whole.block_shape
    shape = 1, *outer, offer.part.num_heads, width
    like = torch.empty(shape, dtype=pieces.dtype, device=pieces.device)
    return map_offer(offer.store, like)

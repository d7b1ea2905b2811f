"""Heads that the ranks which hold them get themselves, straight from ranks of the sender.

Rank 0 of the receiver alone decides. It asks every rank of its worker (engine/ranks/rank_tasks.py):

    map     a channel opens: each rank maps those of the sender's stores that have heads of its own
    link    the same, where they cannot be mapped: each rank links to those ranks (rank_links.py)
    pull    a piece: each rank copies its heads into its own store, and digests them there
    drop    the channel is closed

So of equal sizes each rank pulls from one, and bytes go between the two of a pair only; where
several of the sender's ranks hold a head, those of the receiver that hold it take turns. A rank
answers with its digests, one a block: its terms of the whole block's. Rank 0 adds the terms up and
compares their sum with the sender's; of ranks that hold the same heads it compares term by term.

A piece is over when every rank has answered, right or wrong: until then something could land. If a
rank fails, the piece does, and is sent again under a new epoch; if one ends, the worker does.
"""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from actors.kv_transfer.channels.cuda_ipc import CudaIpcReceiver, check_host, probe_reading
from actors.kv_transfer.channels.rank_ipc import MapStore, RankOffer, RanksOffer, read_offer
from actors.kv_transfer.contracts import UnfitError
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.rank_links import (
    FindRank,
    Giver,
    GiversOffer,
    HeadLink,
    LinkedSources,
    Wires,
    read_givers,
)
from actors.kv_transfer.rank_pieces import OneRank, RankPieces, RankSources
from actors.kv_transfer.waits import to_the_end
from engine.errors import HandoffError, WorkerError
from engine.kv.device_offer import map_tensor
from engine.kv.digests import add_terms
from engine.kv.layout import KvPart
from engine.messages import ChannelKind, PairRequest
from engine.ranks.rank_tasks import OneRankTasks, RankTasks

R = TypeVar("R", RankOffer, Giver)  # a rank of the sender


class MapSource(msgspec.Struct, frozen=True, tag=True):
    """A sender's stores, under a number; each rank shows that it reads its first one fast."""

    number: int
    offer: RanksOffer
    floor_gb_s: float


class LinkSource(msgspec.Struct, frozen=True, tag=True):
    """A sender's ranks, under a number; each rank links to those that have heads of its own."""

    number: int
    offer: GiversOffer
    kind: ChannelKind
    epoch: int
    key: str  # begins those of the wires, which meet by them


class PullBlocks(msgspec.Struct, frozen=True, tag=True):
    """Blocks of a source into blocks of the ranks' own."""

    number: int
    source_ids: list[int]
    block_ids: list[int]


class DropSource(msgspec.Struct, frozen=True, tag=True):
    """No piece of it begins any more."""

    number: int


Order = MapSource | LinkSource | PullBlocks | DropSource
_orders = msgspec.msgpack.Decoder(Order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linking:
    """How a rank links to others."""

    wires: Wires
    find: FindRank
    reader: str  # the name of this rank's actor


class RankPuller:
    """One rank's part; called from any thread."""

    def __init__(
        self,
        part: KvPart,
        pieces: KvPieces,
        map_offer: MapStore = map_tensor,
        *,
        index: int = 0,
        linking: Linking | None = None,
    ) -> None:
        """pieces: of this rank's store, which holds `part`. index: of the rank in its worker.

        linking: None = the sender's stores can always be mapped.
        """
        self._part = part
        self._index = index
        self._pieces = pieces
        self._map_offer = map_offer
        self._linking = linking
        self._sources: dict[int, RankSources | LinkedSources] = {}

    def do(self, work: bytes) -> bytes:
        """Does what rank 0 asks. Raises HandoffError.

        Returns the digests of pulled blocks, or why a link is unfit.
        """
        match _orders.decode(work):
            case MapSource(number, offer, floor_gb_s):
                self._sources[number] = self._map(offer, floor_gb_s)
            case LinkSource() as order:
                try:
                    self._sources[order.number] = self._link(order)
                except UnfitError as error:  # an answer, since errors lose their kind on the way
                    return error.message.encode()
            case PullBlocks(number, source_ids, block_ids):
                return self._pull(number, source_ids, block_ids)
            case DropSource(number):
                if (source := self._sources.pop(number, None)) is not None:
                    source.close()
        return b""

    def _link(self, order: LinkSource) -> LinkedSources:
        """Raises HandoffError if one of them cannot be reached, UnfitError if one is too slow."""
        assert self._linking is not None, "the sender's stores can be mapped"
        linking, links = self._linking, list[HeadLink]()
        try:
            for giver in self._one_of_each(order.offer.ranks):
                common, ask = _common(giver.part, self._part), linking.find(giver.actor)
                links.append(HeadLink(common, self._pieces, ask))
                if order.kind != "object_store":
                    key = f"{order.key}{giver.part.first_head}-{self._index}/"
                    wires, reader = linking.wires, linking.reader
                    links[-1].open(wires, order.kind, order.epoch, key, reader)
        except WorkerError as error:
            LinkedSources(links).close()
            if isinstance(error, UnfitError):
                raise
            raise HandoffError(error.message) from error  # this worker is as well as ever
        return LinkedSources(links)

    def _map(self, offer: RanksOffer, floor_gb_s: float) -> RankSources:
        """Raises UnfitError if a store cannot be read, or not fast enough."""
        needed = self._one_of_each(offer.ranks)
        try:
            stores = [(one.part, self._map_one(one)) for one in needed]
            if floor_gb_s > 0:
                probe_reading(stores[0][1], floor_gb_s)
        except RuntimeError as error:  # CUDA refuses: no peer access, another namespace
            raise UnfitError(f"the sender's KV stores cannot be read: {error}") from error
        return RankSources(stores)

    def _one_of_each(self, ranks: Sequence[R]) -> list[R]:
        """A rank of the sender for each part with heads of this one's."""
        holders: dict[int, list[R]] = {}  # by the part's first head
        for one in ranks:
            if _overlap(one.part, self._part):
                holders.setdefault(one.part.first_head, []).append(one)
        return [those[self._index % len(those)] for those in holders.values()]

    def _map_one(self, offer: RankOffer) -> Tensor:
        *outer, _, width = self._part.whole.block_shape
        shape = 1, *outer, offer.part.num_heads, width
        mine = self._pieces.tensor
        like = torch.empty(shape, dtype=mine.dtype, device=mine.device)
        return self._map_offer(offer.store, like)

    def _pull(self, number: int, source_ids: list[int], block_ids: list[int]) -> bytes:
        source = self._sources.get(number)
        if source is None:
            raise HandoffError("the channel is closed")

        try:
            stores, ids = source.read(source_ids)
        except WorkerError as error:
            raise HandoffError(error.message) from error  # likewise

        def copy(some: slice) -> None:
            stores.copy_to(self._pieces.tensor, self._part, block_ids[some], ids[some])

        # Without a fence: rank 0 asks once steps that may still write there have ended everywhere,
        # or has fenced its own when it granted the blocks.
        return np.array(self._pieces.pull_digests(copy, block_ids), np.int64).tobytes()


class RankedSource:
    """A sender's stores, which every rank has mapped under this number."""

    def __init__(self, number: int, num_blocks: int) -> None:
        self.number = number
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        return self._num_blocks


class PullsByRanks:
    """Rank 0's part: asks all ranks for their heads, and compares digests."""

    def __init__(
        self, pieces: RankPieces | OneRank, tasks: RankTasks | OneRankTasks, own: RankPuller
    ) -> None:
        """own: what rank 0 does itself."""
        self._pieces = pieces
        self._parts = pieces.parts
        self._tasks = tasks
        self._own = own
        self._numbers = itertools.count()

    @property
    def block_bytes(self) -> int:
        return self._pieces.block_bytes

    async def open(
        self, epoch: int, offered: bytes, floor_gb_s: float
    ) -> CudaIpcReceiver[RankedSource]:
        """Every rank maps what is offered. Raises UnfitError, WorkerError if a rank ends."""
        offer = read_offer(offered, self._pieces.whole)
        check_host(offer.host)
        number = next(self._numbers)
        order = MapSource(number, offer, floor_gb_s)
        source = RankedSource(number, min(one.store.num_blocks for one in offer.ranks))
        try:
            return await self._open(epoch, order, source)
        except HandoffError as error:
            raise UnfitError(error.message) from error

    async def open_links(self, request: PairRequest) -> CudaIpcReceiver[RankedSource]:
        """Every rank links to those of the sender. Raises UnfitError, HandoffError, WorkerError."""
        offer, number = read_givers(request.offer), next(self._numbers)
        order = LinkSource(number, offer, request.channel, request.epoch, request.rendezvous_key)
        return await self._open(request.epoch, order, RankedSource(number, offer.num_blocks))

    async def _open(
        self, epoch: int, order: MapSource | LinkSource, source: RankedSource
    ) -> CudaIpcReceiver[RankedSource]:
        try:
            refusals = await to_the_end(asyncio.ensure_future(self._ask_in_thread(order)))
            if any(refusals):
                raise UnfitError(next(filter(None, refusals)).decode())
        except BaseException:
            await self._drop(source)
            raise
        return CudaIpcReceiver(epoch, self, source, on_close=lambda: self._drop(source))

    async def pull(
        self,
        source: RankedSource,
        source_ids: Sequence[int],
        ids: Sequence[int],
        digests: list[int],
    ) -> bool:
        """Every rank copies its heads into `ids`; whether what lies there then is right."""
        work = PullBlocks(source.number, list(source_ids), list(ids))
        terms = await self._pieces.when_writable(lambda: self._ask(work))
        found = add_terms(self._parts, [np.frombuffer(one, np.int64) for one in terms])
        return found == digests

    async def _drop(self, source: RankedSource) -> None:
        with suppress(WorkerError):  # a rank has ended, and this worker ends, too
            await to_the_end(asyncio.ensure_future(self._ask_in_thread(DropSource(source.number))))

    async def _ask_in_thread(self, work: Order) -> list[bytes]:
        """In a thread, however far the steps are: nothing is written."""
        return await asyncio.to_thread(self._ask, work)

    def _ask(self, work: Order) -> list[bytes]:
        return self._tasks.ask(msgspec.msgpack.encode(work), self._own.do)


def _overlap(one: KvPart, other: KvPart) -> bool:
    first, end = one.first_head, one.first_head + one.num_heads
    return first < other.first_head + other.num_heads and other.first_head < end


def _common(one: KvPart, other: KvPart) -> KvPart:
    """The heads that both have, at least one."""
    first = max(one.first_head, other.first_head)
    end = min(one.heads.stop, other.heads.stop)
    return KvPart(whole=one.whole, first_head=first, num_heads=end - first)

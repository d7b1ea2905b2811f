"""Heads that a rank of a receiver gets straight from a rank of the sender, over any channel.

The rank that needs heads asks the rank that has them, by a call of Ray's to its actor; rank 0 of
neither side takes part. What it asked for comes

    object_store  as the answer, through Ray's shared memory
    gloo_pair     over a gloo group of these two ranks, from host memory to host memory
    nccl_pair     over an NCCL group of the two, from GPU to GPU

and is a staged store then, which is read as one that is mapped (rank_pulls.py). A link moves one
piece at a time. Like a store that is mapped, blocks that are asked for must stay until the piece is
acknowledged; if they do not, its digests differ.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from actors.kv_transfer.channels.gloo_pair import GlooWire
from actors.kv_transfer.channels.handshake import RECEIVER_RANK, SENDER_RANK, Handshake
from actors.kv_transfer.channels.nccl_wire import NcclWire
from actors.kv_transfer.contracts import PieceBytes, RendezvousClient, UnfitError
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.rank_pieces import RankSources
from configs.schema import HandoffConfig
from engine.errors import HandoffError, WorkerError
from engine.kv.layout import KvPart
from engine.messages import ChannelKind

AskRank = Callable[[bytes], Callable[[], object]]  # order -> what waits for its answer
FindRank = Callable[[str], AskRank]  # the actor that has this name now


class Giver(msgspec.Struct, frozen=True):
    """A rank of the sender."""

    part: KvPart
    actor: str  # its name


class GiversOffer(msgspec.Struct, frozen=True):
    """All ranks of a sender."""

    num_blocks: int
    ranks: list[Giver]


class Heads(msgspec.Struct, frozen=True):
    """Some heads of the whole model, of blocks."""

    block_ids: list[int]
    first: int
    number: int


class OpenWire(msgspec.Struct, frozen=True, tag=True):
    """Opens the sending end; an older one to the same reader is closed."""

    kind: ChannelKind
    epoch: int
    key: str
    reader: str


class SendHeads(msgspec.Struct, frozen=True, tag=True):
    """Sends heads over the wire of this key."""

    key: str
    heads: Heads


class GiveHeads(msgspec.Struct, frozen=True, tag=True):
    """Returns heads as the answer."""

    heads: Heads


class CloseWire(msgspec.Struct, frozen=True, tag=True):
    key: str


_orders = msgspec.msgpack.Decoder(OpenWire | SendHeads | GiveHeads | CloseWire)


class Wire(Protocol):
    """One end of a connection of two ranks; its calls block, within bounds."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        ...

    def open(self, client: RendezvousClient, key: str) -> None: ...

    def send(self, data: Tensor) -> None: ...

    def receive(self, data: Tensor) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """Makes the ends of one rank's wires."""

    rendezvous: RendezvousClient
    address: str  # where gloo listens
    config: HandoffConfig
    device: torch.device  # of this rank's store
    _nccl: list[NcclWire] = field(default_factory=list)  # each takes memory of the GPU
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def opened(self, kind: ChannelKind, epoch: int, key: str, end: int) -> Wire:
        """end: SENDER_RANK or RECEIVER_RANK. Raises HandoffError, WorkerError."""
        wire = self._new(kind, epoch, end)
        try:
            wire.open(self.rendezvous, key)
        except RuntimeError as error:  # torch's
            wire.close()
            raise HandoffError(f"a wire did not open: {error}") from None
        except BaseException:
            wire.close()
            raise
        return wire

    def _new(self, kind: ChannelKind, epoch: int, end: int) -> Wire:
        config, floors = self.config, self.config.floors_gb_s
        if kind == "nccl_pair":
            handshake = Handshake(
                epoch=epoch, rank=end, device=self.device, floor_gb_s=floors.nccl_pair
            )
            return self._counted(
                NcclWire(handshake, config.transfer_deadline_s, max_ctas=config.nccl_max_ctas)
            )
        assert kind == "gloo_pair", f"there are no wires of kind {kind}"
        handshake = Handshake(
            epoch=epoch, rank=end, device=GlooWire.device, floor_gb_s=floors.gloo_pair
        )
        return GlooWire(handshake, config.transfer_deadline_s, self.address)

    def _counted(self, wire: NcclWire) -> NcclWire:
        """Raises HandoffError if it is one more than may be open."""
        most = self.config.max_nccl_pairs
        with self._counting:
            self._nccl[:] = [one for one in self._nccl if one.is_open]
            if len(self._nccl) >= most:
                raise HandoffError(f"{most} nccl pairs are open already (handoff.max_nccl_pairs)")
            self._nccl.append(wire)
        return wire


class HeadGiver:
    """A rank of the sender; called from any thread."""

    def __init__(self, part: KvPart, pieces: KvPieces, wires: Wires) -> None:
        """pieces: of this rank's store, which holds `part`."""
        self._part = part
        self._pieces = pieces
        self._wires = wires
        self._open: dict[str, tuple[str, Wire]] = {}  # key -> its reader, and the wire
        self._newest: dict[str, int] = {}  # reader -> the epoch of the last wire it asked for
        self._changing = threading.Lock()  # of both; nothing waits for a wire with it

    def do(self, order: bytes) -> PieceBytes | None:
        """Does what a rank of a receiver asks. Raises HandoffError, WorkerError."""
        match _orders.decode(order):
            case GiveHeads(heads):
                given: PieceBytes = self._read(heads, torch.device("cpu")).view(-1).numpy()
                return given
            case OpenWire(kind, epoch, key, reader):
                self._close_older(reader, epoch)
                wire = self._wires.opened(kind, epoch, key, SENDER_RANK)
                with self._changing:
                    self._open[key] = reader, wire
            case SendHeads(key, heads):
                self._send(key, heads)
            case CloseWire(key):
                self._close(key)
        return None

    def _send(self, key: str, heads: Heads) -> None:
        """A failure closes the wire, so that the reader does not wait."""
        with self._changing:
            if key not in self._open:
                raise HandoffError("the wire is closed")
            _, wire = self._open[key]
        try:
            wire.send(self._read(heads, wire.device))
        except RuntimeError as error:  # torch's
            self._close(key)
            raise HandoffError(f"a wire broke: {error}") from None
        except WorkerError:
            self._close(key)
            raise

    def _read(self, heads: Heads, device: torch.device) -> Tensor:
        """uint8 [num_blocks, bytes of these heads of a block]."""
        first, last = heads.first - self._part.first_head, heads.first + heads.number
        if first < 0 or last > self._part.heads.stop:
            raise HandoffError(f"heads {heads.first} to {last - 1} are of another rank")
        return self._pieces.copy_heads(heads.block_ids, slice(first, first + heads.number), device)

    def _close(self, key: str) -> None:
        with self._changing:
            found = self._open.pop(key, None)
        if found is not None:
            found[1].close()

    def _close_older(self, reader: str, epoch: int) -> None:
        """Raises HandoffError if it is the older one: its order came late."""
        with self._changing:
            newest = self._newest.get(reader, 0)
            if epoch <= newest:
                raise HandoffError(f"epoch {epoch} is not newer than {newest}")
            self._newest[reader] = epoch
            keys = [key for key, (whose, _) in self._open.items() if whose == reader]
        for key in keys:
            self._close(key)


class HeadLink:
    """From one rank of the sender to this one; called from any thread."""

    def __init__(self, part: KvPart, pieces: KvPieces, ask: AskRank) -> None:
        """part: the heads that both have. pieces: of this rank's store. ask: that rank."""
        self.part = part
        self._pieces = pieces
        self._ask = ask
        self._key = ""  # "" = no wire was asked for
        self._wire: Wire | None = None  # None = what is asked for comes as an answer
        self._turn = threading.Lock()

    def open(self, wires: Wires, kind: ChannelKind, epoch: int, key: str, reader: str) -> None:
        """Opens both ends of a wire. Raises UnfitError, HandoffError, WorkerError."""
        self._key = key
        theirs = self._order(OpenWire(kind, epoch, key, reader))
        try:
            self._wire = wires.opened(kind, epoch, key, RECEIVER_RANK)
        except WorkerError as error:
            try:
                theirs()  # or it could open after it was closed
            except UnfitError:
                raise
            except WorkerError as other:
                both = f"{error.message}; the other end: {other.message}"
                raise HandoffError(both) from error
            raise
        theirs()

    def fetch(self, block_ids: list[int]) -> Tensor:
        """[n, *block_shape] of the part, on the device of the store. Raises HandoffError."""
        heads = Heads(block_ids, self.part.first_head, self.part.num_heads)
        with self._turn:
            data = self._received(heads) if self._wire is not None else self._answered(heads)
        return self._pieces.blocks_of(data, self.part.num_heads)

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
        if self._key:  # the other end may be open though this one failed to
            with suppress(WorkerError):  # it is dead
                self._order(CloseWire(self._key))  # nobody waits for it

    def _received(self, heads: Heads) -> Tensor:
        assert self._wire is not None
        buffer = self._pieces.buffer(len(heads.block_ids), heads.number, self._wire.device)
        sent = self._order(SendHeads(self._key, heads))
        try:
            self._wire.receive(buffer)
        except RuntimeError as error:  # torch's
            self._wire.close()
            raise HandoffError(f"a wire broke: {error}") from None
        except WorkerError:
            self._wire.close()
            raise
        sent()
        return buffer

    def _answered(self, heads: Heads) -> Tensor:
        data = self._order(GiveHeads(heads))()
        buffer = self._pieces.buffer(len(heads.block_ids), heads.number, torch.device("cpu"))
        if not isinstance(data, np.ndarray) or data.nbytes != buffer.numel():
            raise HandoffError(f"{buffer.numel()} bytes were asked for, and others came")
        buffer.view(-1).numpy()[:] = data
        return buffer

    def _order(self, order: OpenWire | SendHeads | GiveHeads | CloseWire) -> Callable[[], object]:
        return self._ask(msgspec.msgpack.encode(order))


class LinkedSources:
    """The ranks of a sender that have heads of this rank, each behind a link."""

    def __init__(self, links: list[HeadLink]) -> None:
        self._links = links

    def read(self, block_ids: list[int]) -> tuple[RankSources, list[int]]:
        """Stores that hold these blocks, and their ids there."""
        stores = [(link.part, link.fetch(block_ids)) for link in self._links]
        return RankSources(stores), list(range(len(block_ids)))

    def close(self) -> None:
        for link in self._links:
            link.close()


def read_givers(offered: bytes) -> GiversOffer:
    """Raises UnfitError."""
    try:
        return msgspec.msgpack.decode(offered, type=GiversOffer)
    except msgspec.DecodeError as error:
        raise UnfitError(f"the sender offers no ranks: {error}") from error

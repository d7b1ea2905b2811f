"""The KV stores of all ranks of a worker, mapped by rank 0, which moves KV in and out of them.

Each rank keeps its heads' blocks in memory that rank 0 maps: host memory, or its GPU's by CUDA IPC.
So no other rank takes part in a transfer, and none can hold one up. When blocks may be read or
written follows from steps: a rank counts those that it has ended (`SharedMemory`).
"""

from dataclasses import dataclass

import msgspec
from torch import Tensor

from engine.errors import WorkerError
from engine.kv.device_offer import DeviceOffer, map_tensor, offer_tensor
from engine.kv.layout import KvLayout, KvPart
from engine.kv.shared_memory import MemoryOffer
from engine.kv.store import KvStore
from engine.layers.context import Comm
from engine.ranks.agreement import BUILD_PATIENCE_S, meet
from engine.ranks.rank import WHOLE_MODEL, Rank


class _StoreOffer(msgspec.Struct, frozen=True, kw_only=True):
    memory: MemoryOffer
    device: DeviceOffer | None  # None = the blocks lie in the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStore:
    """One rank's part of all blocks, mapped in this process or its own."""

    part: KvPart
    store: KvStore
    device: DeviceOffer | None = None  # None = its blocks are in host memory

    @property
    def num_ended_steps(self) -> int:
        assert self.store.shared is not None, "it was shared when the engine was built"
        return self.store.shared.num_finished_steps


def part_of(rank: Rank, whole: KvLayout) -> KvPart:
    """The KV heads that a rank holds; of fewer heads than ranks several ranks hold the same."""
    heads = rank.share(whole.block_shape[3], "KV heads", unit=1)
    return KvPart(whole=whole, first_head=heads.start, num_heads=heads.stop - heads.start)


def share_stores(
    comm: Comm, store: KvStore, whole: KvLayout, *, has_own_blocks: bool = False
) -> tuple[RankStore, ...]:
    """Shares this rank's store with rank 0. Returns all stores there, and nothing elsewhere.

    has_own_blocks: each rank has whole blocks, and other ones. Every rank calls it once, before its
    first step. Raises ConfigError, WorkerError.
    """
    size = comm.rank.size
    parts = [part_of(WHOLE_MODEL if has_own_blocks else Rank(i, size), whole) for i in range(size)]
    memory = store.share(parts[comm.rank.index])
    try:
        device = offer_tensor(store.tensor) if store.tensor.is_cuda else None
    except RuntimeError as error:
        raise WorkerError(f"the KV of a rank cannot be shared with rank 0: {error}") from error
    offer = msgspec.msgpack.encode(_StoreOffer(memory=memory, device=device))
    encoded = comm.gather_bytes(offer, BUILD_PATIENCE_S)
    stores = []
    if comm.rank.index == 0:
        offers = [msgspec.msgpack.decode(data, type=_StoreOffer) for data in encoded]
        stores = [RankStore(part=parts[0], store=store, device=offers[0].device)]
        stores += [_attach(rank, offers[rank], store, parts[rank]) for rank in range(1, size)]
    meet(comm)  # until rank 0 has opened all files
    assert store.shared is not None, "it is shared now"
    store.shared.close_file()
    return tuple(stores)


def _attach(index: int, offer: _StoreOffer, mine: KvStore, part: KvPart) -> RankStore:
    tensor: Tensor | None = None
    if offer.device is not None:
        try:
            tensor = map_tensor(offer.device, mine.tensor)
        except RuntimeError as error:
            raise WorkerError(f"the KV of rank {index} cannot be mapped: {error}") from error
    store = KvStore.attached(offer.memory, part, mine.layout, tensor)
    return RankStore(part=part, store=store, device=offer.device)

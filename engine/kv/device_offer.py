"""A KV store on a GPU, mapped by another process of the same host (CUDA IPC)."""

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor


class DeviceOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Tells another process of the same host how to map a KV store; a few hundred bytes."""

    num_blocks: int
    first_element: int  # of the store in its allocation
    handle: bytes  # CUDA's, of the allocation
    storage_bytes: int
    storage_offset_bytes: int
    counter_handle: bytes  # torch's count of importers, in shared memory
    counter_offset: int
    event_handle: bytes
    is_event_due: bool  # wait for the event before the first read


def offer_tensor(store: Tensor) -> DeviceOffer:
    """Describe `store`, a whole KV store on a GPU. Raises RuntimeError if it cannot be shared."""
    _, fields = reduce_tensor(store)  # type: ignore[no-untyped-call]
    return DeviceOffer(
        num_blocks=store.shape[0],
        first_element=fields[3],
        handle=fields[7],
        storage_bytes=fields[8],
        storage_offset_bytes=fields[9],
        counter_handle=fields[11],
        counter_offset=fields[12],
        event_handle=fields[13],
        is_event_due=fields[14],
    )


def map_tensor(offer: DeviceOffer, mine: Tensor) -> Tensor:
    """The offered store, mapped on the GPU of `mine`, of whose block shape and dtype it is."""
    mapped: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        Tensor,
        torch.Size((offer.num_blocks, *mine.shape[1:])),
        mine.stride(),
        offer.first_element,
        torch.storage.TypedStorage,
        mine.dtype,
        mine.device.index,  # the exporter counts its GPUs otherwise
        offer.handle,
        offer.storage_bytes,
        offer.storage_offset_bytes,
        False,
        offer.counter_handle,
        offer.counter_offset,
        offer.event_handle,
        offer.is_event_due,
    )
    return mapped

"""Reads and writes one vector a token in the planes that a layout adds for a drafter's features.

    token at slot s = block * block_size + offset   ->   store[block, model's layers:, :, offset]

The vector is cut into the planes in order; the rest of the last layer is zero. In a store of e4m3
numbers the planes hold the bytes of a vector, which keeps its own dtype. Where ranks hold heads of
the planes, each holds these heads' parts of the vector, and all gather it to read. So a block's
heads move between any numbers of ranks. Knows nothing of what the vectors mean.
"""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.kv.layout import KvPart
from engine.kv.store import KvStore


class Gathers(Protocol):
    """Part of `engine.layers.context.Comm`."""

    def all_gather(self, x: Tensor) -> Tensor: ...


class FeaturePlanes:
    """Vectors of `width` elements in a store whose layout has room for them."""

    def __init__(
        self,
        store: KvStore,
        width: int,
        dtype: torch.dtype,
        *,
        part: KvPart | None = None,
        comm: Gathers | None = None,
    ) -> None:
        """dtype: of the vectors. part: the heads of `store`, and comm: to all ranks; None = it has
        all heads.
        """
        num_layers, num_planes, self._block_size, num_own, plane_width = store.layout.block_shape
        num_heads = num_own if part is None else part.whole.block_shape[3]
        self._first_layer = num_layers - store.layout.num_feature_layers
        self._shape = (num_layers - self._first_layer, num_planes, num_heads, plane_width)
        num_numbers = store.layout.num_feature_layers * num_planes * num_heads * plane_width
        self._num_kept = width * dtype.itemsize // store.dtype.itemsize  # numbers of the store
        self._num_padding = num_numbers - self._num_kept
        assert self._num_padding >= 0, f"no room for {width} elements in {store.layout}"
        self._dtype = dtype
        self._own_heads = slice(None) if part is None else part.heads
        self._comm = None if num_own == num_heads else comm
        self._store = store
        self.width = width

    @property
    def device(self) -> torch.device:
        return self._store.tensor.device

    def write(self, slots: Tensor, values: Tensor) -> None:
        """slots: [T] integer, distinct, none negative. values: [T, width]."""
        numbers = values.to(self._dtype).contiguous().view(self._store.dtype)
        parts = F.pad(numbers, (0, self._num_padding)).view(-1, *self._shape)
        blocks, offsets = self._places(slots)
        self._planes[blocks, :, :, offsets] = parts[..., self._own_heads, :]

    def read(self, slots: Tensor) -> Tensor:
        """slots: [T] integer, on every rank; returns [T, width], of a negative slot anything."""
        blocks, offsets = self._places(slots.clamp(min=0))
        parts = self._planes[blocks, :, :, offsets]
        if self._comm is not None:
            parts = _all_heads(parts, self._shape[2], self._comm)
        return parts.flatten(1)[:, : self._num_kept].contiguous().view(self._dtype)

    @property
    def _planes(self) -> Tensor:
        """[blocks, layers of features, planes, block_size, heads, width]"""
        return self._store.tensor[:, self._first_layer :]

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        places = slots.long()
        return places // self._block_size, places % self._block_size


def _all_heads(own: Tensor, num_heads: int, comm: Gathers) -> Tensor:
    """own: [T, layers, planes, heads, width] of each rank; returns the same of all `num_heads`."""
    by_rank = comm.all_gather(own).view(-1, *own.shape)
    num_alike = len(by_rank) * own.shape[3] // num_heads  # ranks that hold the same heads
    return torch.cat(by_rank[::num_alike].unbind(), dim=3)

"""Reads and writes one vector a token in the planes that a layout adds for a drafter's features.

    token at slot s = block * block_size + offset   ->   store[block, model's layers:, :, offset]

The vector is cut into the planes in order; the rest of the last layer is zero. Knows nothing of
what the vectors mean.
"""

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.kv.store import KvStore


class FeaturePlanes:
    """Vectors of `width` elements in a store whose layout has room for them."""

    def __init__(self, store: KvStore, width: int) -> None:
        num_layers, num_planes, self._block_size, num_heads, plane_width = store.layout.block_shape
        self._first_layer = num_layers - store.layout.num_feature_layers
        self._shape = (num_layers - self._first_layer, num_planes, num_heads, plane_width)
        num_padding = store.layout.num_feature_layers * num_planes * num_heads * plane_width - width
        assert num_padding >= 0, f"no room for {width} elements in {store.layout}"
        self._num_padding = num_padding
        self._store = store
        self.width = width

    @property
    def device(self) -> torch.device:
        return self._store.tensor.device

    def write(self, slots: Tensor, values: Tensor) -> None:
        """slots: [T] integer, distinct, none negative. values: [T, width]."""
        parts = F.pad(values.to(self._store.dtype), (0, self._num_padding)).view(-1, *self._shape)
        blocks, offsets = self._places(slots)
        self._planes[blocks, :, :, offsets] = parts

    def read(self, slots: Tensor) -> Tensor:
        """slots: [T] integer; returns [T, width], of a negative slot anything."""
        blocks, offsets = self._places(slots.clamp(min=0))
        return self._planes[blocks, :, :, offsets].flatten(1)[:, : self.width]

    @property
    def _planes(self) -> Tensor:
        """[blocks, layers of features, planes, block_size, heads, width]"""
        return self._store.tensor[:, self._first_layer :]

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        places = slots.long()
        return places // self._block_size, places % self._block_size

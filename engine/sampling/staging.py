"""Copies small arrays from the host to the device without waiting, several arrays per copy.

A plain copy of a Python list to a GPU waits for everything launched before it. A copy from
page-locked memory does not, but that memory must outlive the copy. Torch's page-locked allocator
ensures this: it records the stream that reads a buffer, and reuses the buffer only when that read
is complete. So any number of steps may be in flight. Knows nothing of the content.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Every array starts at a multiple of this, so that no kernel gets an unaligned pointer.
_ALIGNMENT_BYTES = 16


class Staging:
    """Sends arrays to one device, through pinned memory if it is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_pinned = device.type == "cuda"

    def send(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        """The arrays as device tensors of the same shape and dtype, by one copy.

        Returns before the copy is complete; work launched later on the current stream sees it. The
        caller may change the arrays at once.
        """
        starts = [0]
        for array in arrays:
            starts.append(starts[-1] + -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self._is_pinned)
        host_bytes = buffer.numpy()
        for start, array in zip(starts, arrays, strict=False):
            host_bytes[start : start + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        on_device = buffer.to(self.device, non_blocking=True)
        return tuple(
            _as_array(on_device[start : start + array.nbytes], array)
            for start, array in zip(starts, arrays, strict=False)
        )

    def indices(self, positions: list[int]) -> Tensor:
        """The positions as int64 [P] on the device."""
        (index,) = self.send(np.array(positions, dtype=np.int64))
        return index


def _as_array(raw: Tensor, like: NDArray[Any]) -> Tensor:
    """The bytes `raw`, uint8 [nbytes], as a tensor with the shape and dtype of `like`."""
    typed = raw.view(_torch_dtype(like.dtype))
    return typed if like.ndim == 1 else typed.view(like.shape)


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype

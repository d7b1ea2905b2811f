"""Small integers to and from a GPU, queued on the current stream without waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor

# All of one size: torch keeps page-locked memory by size, and makes more in milliseconds.
_MIN_NUMBERS = 4096


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n] on `device`, as soon as the current stream is there."""
    values = torch.tensor(numbers, dtype=torch.int64)
    if device.type != "cuda":
        return values
    return _page_locked(len(values)).copy_(values).to(device, non_blocking=True)


def to_host(numbers: Tensor) -> Tensor:
    """int64 [n] in host memory, as soon as the current stream is there."""
    if not numbers.is_cuda:
        return numbers
    return _page_locked(len(numbers)).copy_(numbers, non_blocking=True)


def _page_locked(number: int) -> Tensor:
    room = max(number, _MIN_NUMBERS)
    return torch.empty(room, dtype=torch.int64, pin_memory=True)[:number]

"""4-bit numbers in bytes, in the order in which kernels read them.

A row of K numbers is cut into runs of 2 * half. Byte j of a run holds number j of it in its low
bits and number half + j in its high bits, so a tile of bytes is two tiles of adjacent columns, and
no number changes its place when the bytes are taken apart. No run crosses a group of scales unless
both of its halves are whole groups (sizes.py).
"""

import torch
from torch import Tensor


def pack_int4(numbers: Tensor, half: int) -> Tensor:
    """numbers: [N, K] of 0 to 15, any integer dtype; returns [N, K / 2] uint8."""
    runs = numbers.to(torch.uint8).reshape(len(numbers), -1, 2, half)
    low, high = runs.unbind(2)
    return torch.flatten(low | (high << 4), 1)


def unpack_int4(packed: Tensor, half: int) -> Tensor:
    """The inverse of `pack_int4`: [N, K] uint8."""
    runs = packed.reshape(len(packed), -1, half)
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)

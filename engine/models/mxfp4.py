"""The numbers of MXFP4 (OCP microscaling formats 1.0): 32 of four bits share a power of two.

    w = e2m1(b) * 2^(s - 127)      a byte holds two of them, the first in its low half

Every product is exact in bfloat16 and fp32. Knows no names and no models.
"""

import torch
from torch import Tensor

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks: uint8 [rows, n, 16], scales: uint8 [rows, n]; returns bfloat16 [rows, 32 n].

    The result is that of transformers' `convert_moe_packed_tensors` before its transposition.
    """
    values = torch.tensor((*_SIZES, *(-size for size in _SIZES)), dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=1).to(blocks.device)
    numbers = pairs[blocks.int()]  # [rows, n, 16, 2]
    powers = (scales.int() - _BIAS)[:, :, None, None]
    return torch.ldexp(numbers, powers).view(len(blocks), -1)

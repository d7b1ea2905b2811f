"""The twins in torch of sums over ranks: from the parts of all ranks to what every rank has."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reference import rms_norm_add


def sum_over_ranks(parts: Sequence[Tensor]) -> Tensor:
    """parts: [...] of each rank; returns their sum in rank order, floats in fp32, rounded once."""
    first, *others = parts
    total = first.to(torch.float32 if first.is_floating_point() else first.dtype, copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)


def sum_add_norm(
    parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """parts: [T, n] of each rank; returns (rms_norm(x), x), x = their sum + residual."""
    return rms_norm_add(sum_over_ranks(parts), residual, weight, eps)

"""A quantised weight in memory, and the numbers it stands for.

    w[n, k] = (q[n, k] - z[n, k / columns]) * s[n / rows, k / columns]

q are the stored numbers (e4m3, or 0 to 15), s the scales in fp32, z the zero points (0 for e4m3, 8
where there are none). Products and differences are exact in fp32 for scales of 16 bits or powers of
two; w is rounded once, to the dtype that the model computes in.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.quant.int4 import unpack_int4

MIDDLE = 8  # the zero point of 4-bit numbers without zero points of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """How to read the data of a quantised linear map."""

    values: Tensor  # [ceil(out / rows), ceil(in / columns)] fp32
    rows: int  # outputs that share a scale
    columns: int  # inputs that share a scale
    dtype: torch.dtype  # of the inputs and outputs
    # Whether the inputs may be rounded to FP8 where that is faster.
    quantizes_inputs: bool
    zeros: Tensor | None = None  # as `values`, uint8; 4 bits only
    half: int = 0  # of a run of 4-bit numbers, see `kernels.quant.int4`
    order: Tensor | None = None  # [in] int64: column j of the data is for input order[j]

    def from_row(self, start: int) -> "Scales":
        """The scales of the outputs from `start` on, as views of the same memory."""
        assert start % self.rows == 0, f"row {start} cuts a tile of {self.rows} rows"
        first = start // self.rows
        zeros = None if self.zeros is None else self.zeros[first:]
        return replace(self, values=self.values[first:], zeros=zeros)


def dequantize(data: Tensor, scales: Scales) -> Tensor:
    """The weight as a matrix in `scales.dtype`, [out, in], inputs in their own order."""
    is_packed = data.dtype is torch.uint8
    numbers = unpack_int4(data, scales.half) if is_packed else data
    num_rows, num_columns = numbers.shape
    weight = numbers.float()
    if is_packed:
        zeros: Tensor | int = MIDDLE
        if scales.zeros is not None:
            zeros = _spread(scales.zeros.float(), scales, num_rows, num_columns)
        weight -= zeros
    weight *= _spread(scales.values, scales, num_rows, num_columns)
    weight = weight.to(scales.dtype)
    if scales.order is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, scales.order, weight)


def _spread(values: Tensor, scales: Scales, num_rows: int, num_columns: int) -> Tensor:
    """One value for each weight, or for each row where a row has one."""
    if scales.rows > 1:
        values = values.repeat_interleave(scales.rows, dim=0)[:num_rows]
    if values.shape[1] > 1:
        values = values.repeat_interleave(scales.columns, dim=1)[:, :num_columns]
    return values


def compacted(scales: Scales) -> Scales:
    """The same without zero points of 8 and an order that changes nothing."""
    zeros, order = scales.zeros, scales.order
    if zeros is not None and bool((zeros == MIDDLE).all()):
        zeros = None
    if order is not None and torch.equal(order, torch.arange(len(order), device=order.device)):
        order = None
    return replace(scales, zeros=zeros, order=order)

"""A quantised weight in memory, and the numbers it stands for.

    w[n, k] = (q[n, k] - z[n, k / columns]) * s[n / rows, k / columns] * f[n]

q are the stored numbers (e4m3, e2m1, or 0 to 15), s the scales (fp32, with numbers of e2m1 e8m0 or
e4m3), z the zero points (0 for floats, 8 where there are none), f a factor (1 where there is none).
Products and differences are exact in fp32 for scales of 16 bits or powers of two; w is rounded
once, to the dtype that the model computes in.

Experts' weights have one more dimension before the others, in the numbers and in all of `Scales`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.quant.int4 import unpack_int4

MIDDLE = 8  # the zero point of 4-bit numbers without zero points of their own
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and with the highest of four bits negative


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """How to read the data of a quantised linear map."""

    values: Tensor  # [ceil(out / rows), ceil(in / columns)] fp32; e8m0, e4m3 with e2m1
    rows: int  # outputs that share a scale
    columns: int  # inputs that share a scale
    dtype: torch.dtype  # of the inputs and outputs
    # Whether the inputs may be rounded to FP8 where that is faster.
    quantizes_inputs: bool
    zeros: Tensor | None = None  # as `values`, uint8; integers of 4 bits only
    half: int = 0  # of a run of 4-bit numbers, see `kernels.quant.int4`
    is_e2m1: bool = False  # whether numbers of 4 bits are floats
    factors: Tensor | None = None  # [out] fp32
    order: Tensor | None = None  # [in] int64: column j of the data is for input order[j]

    def from_row(self, start: int) -> "Scales":
        """The scales of the outputs from `start` on, as views of the same memory."""
        assert start % self.rows == 0, f"row {start} cuts a tile of {self.rows} rows"
        first = start // self.rows
        zeros = None if self.zeros is None else self.zeros[first:]
        factors = None if self.factors is None else self.factors[start:]
        return replace(self, values=self.values[first:], zeros=zeros, factors=factors)

    def tears(self, rows: Tensor) -> bool:
        """Whether outputs in the order of `rows`, int64 [out], would leave their tile."""
        places = torch.arange(len(rows), device=rows.device)
        return self.rows > 1 and not torch.equal(rows // self.rows, places // self.rows)

    def reordered(self, rows: Tensor) -> "Scales":
        """A copy for outputs in an order that tears no tile."""
        factors = None if self.factors is None else self.factors[rows]
        if self.rows > 1:
            return replace(self, factors=factors)
        zeros = None if self.zeros is None else self.zeros[rows]
        values = self.values.view(torch.uint8)[rows].view(self.values.dtype)
        return replace(self, values=values, zeros=zeros, factors=factors)

    def by_expert(self, num_experts: int) -> "Scales":
        """The scales of outputs of `num_experts` experts, one after the other, as views."""
        return self._each(lambda tensor: tensor.view(num_experts, -1, *tensor.shape[1:]))

    def of_expert(self, expert: int) -> "Scales":
        """Of scales `by_expert`, those of one."""
        order = None if self.order is None else self.order[expert]
        return replace(self._each(lambda tensor: tensor[expert]), order=order)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Scales":
        """All that outputs have, changed."""
        zeros, factors = self.zeros, self.factors
        return replace(
            self,
            values=change(self.values),
            zeros=None if zeros is None else change(zeros),
            factors=None if factors is None else change(factors),
        )


def dequantize(data: Tensor, scales: Scales) -> Tensor:
    """The weight as a matrix in `scales.dtype`, [out, in], inputs in their own order."""
    is_packed = data.dtype is torch.uint8
    numbers = unpack_int4(data, scales.half) if is_packed else data
    num_rows, num_columns = numbers.shape
    weight = e2m1_values(numbers) if scales.is_e2m1 else numbers.float()
    if is_packed and not scales.is_e2m1:
        zeros: Tensor | int = MIDDLE
        if scales.zeros is not None:
            zeros = _spread(scales.zeros.float(), scales, num_rows, num_columns)
        weight -= zeros
    weight *= _spread(scales.values.float(), scales, num_rows, num_columns)
    if scales.factors is not None:
        weight *= scales.factors[:, None]
    weight = weight.to(scales.dtype)
    if scales.order is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, scales.order, weight)


def e2m1_values(numbers: Tensor) -> Tensor:
    """numbers: uint8 of 0 to 15; what they stand for, fp32."""
    sizes = torch.tensor((*_E2M1, *(-size for size in _E2M1)), device=numbers.device)
    return sizes[numbers.int()]


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
    if order is not None:
        in_order = torch.arange(order.shape[-1], device=order.device)
        if torch.equal(order, in_order.expand_as(order)):
            order = None
    return replace(scales, zeros=zeros, order=order)

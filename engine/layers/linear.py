"""Linear maps as objects, and the weights that they are built of (build_linear.py).

A call names the lane that it runs in. Calls of different lanes may overlap in time (on two streams,
for two batches at once); calls of one lane run one after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.layers.quantized_weight import Scales
from kernels.linear.packed import pack_weight, packed_linear
from kernels.quant.coded_tokens import CodedTokens, InputForm

NUM_LANES = 2


class WeightFormat(Enum):
    """How the numbers of a linear map are stored; `build_linear` has a map for each format."""

    DENSE = "a matrix in the dtype of the model"
    FP8 = "e4m3, with scales of tiles"
    INT4 = "two numbers a byte, with scales and zero points of groups of inputs"
    FP4 = "two numbers in e2m1 a byte, with scales of groups of inputs"


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The data of a linear map; `format` says how to read `data`."""

    data: Tensor  # DENSE, FP8: [out, in]; INT4, FP4: [out, in / 2]; before that [experts]
    bias: Tensor | None = None  # [out]
    format: WeightFormat = WeightFormat.DENSE
    scales: Scales | None = None  # None where DENSE

    def rows(self, start: int) -> "LinearWeight":
        """The outputs from `start` on, as views of the same memory."""
        bias = None if self.bias is None else self.bias[start:]
        scales = None if self.scales is None else self.scales.from_row(start)
        return LinearWeight(self.data[start:], bias, self.format, scales)

    def reordered(self, rows: Tensor) -> "LinearWeight":
        """A copy with its outputs in the order of `rows`, int64 [out]."""
        bias = None if self.bias is None else self.bias[rows]
        scales = None if self.scales is None else self.scales.reordered(rows)
        # As bytes: numbers of 8 bits cannot be gathered on every device.
        data = self.data.view(torch.uint8)[rows].view(self.data.dtype)
        return LinearWeight(data, bias, self.format, scales)

    def by_expert(self, num_experts: int) -> "LinearWeight":
        """Outputs of experts that follow one another, by expert: views of the same memory."""
        bias = None if self.bias is None else self.bias.view(num_experts, -1)
        scales = None if self.scales is None else self.scales.by_expert(num_experts)
        data = self.data.view(num_experts, -1, self.data.shape[1])
        return LinearWeight(data, bias, self.format, scales)


class Linear(Protocol):
    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        """x: [T, in]; returns [T, out]."""
        ...


class CodedReader(Protocol):
    """What also takes inputs in FP8, which a norm before it has coded."""

    def form(self, num_tokens: int) -> InputForm | None:
        """How the norm codes so many tokens; None = it leaves them as they are."""
        ...

    def of_coded(self, x: CodedTokens, lane: int = 0) -> Tensor:
        """As the call itself, of inputs in that form."""
        ...


def _is_coded_reader(reader: object) -> TypeGuard[CodedReader]:
    """Asked twice a layer, where `isinstance` of a protocol takes longer than a small product."""
    return hasattr(reader, "of_coded")


def form_of(reader: object, num_tokens: int) -> InputForm | None:
    """How the norm before `reader`, a `CodedReader` or not, may code so many tokens."""
    return reader.form(num_tokens) if _is_coded_reader(reader) else None


def product(linear: Linear, x: Tensor | CodedTokens, lane: int) -> Tensor:
    """x: [T, in], coded where `form_of` says so; returns [T, out]."""
    if isinstance(x, Tensor):
        return linear(x, lane)
    assert _is_coded_reader(linear), f"{type(linear)} takes no coded inputs"
    return linear.of_coded(x, lane)


class DenseLinear:
    """y = x @ weight.T + bias, with the weight as published."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """y = x @ weight.T + bias from a packed copy of the weight; the original is not kept."""

    __slots__ = ("_bias", "_packed_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed_weight = pack_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        return packed_linear(x, self._packed_weight, self._bias)


class TwiceHeldLinear:
    """A small weight held in both forms: dense for one row, packed for more."""

    __slots__ = ("_dense", "_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._dense = DenseLinear(weight, bias)
        self._packed = PackedLinear(weight, bias)

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        return self._dense(x) if x.shape[0] == 1 else self._packed(x)


class Gated:
    """activation(gate) * up in two steps: one product for gate and up, then the activation."""

    __slots__ = ("_activation", "_gate_up")

    def __init__(self, gate_up: Linear, activation: Callable[[Tensor], Tensor]) -> None:
        """activation: [T, 2 n] = [gate | up] to [T, n]."""
        self._gate_up = gate_up
        self._activation = activation

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        return self._activation(self._gate_up(x, lane))


class Identity:
    """y = x."""

    __slots__ = ()

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        return x

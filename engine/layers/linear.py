"""Linear maps as objects: the form in which a weight is held is chosen when the model is built.

A call names the lane that it runs in. Calls of different lanes may overlap in time (on two streams,
for two batches at once); calls of one lane run one after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeGuard

import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.quantized_weight import Scales, dequantize
from kernels.linear.packed import can_pack, pack_weight, packed_linear
from kernels.ops import Ops
from kernels.quant.coded_tokens import CodedTokens, InputForm

# A weight of up to this many elements (1 MiB of fp32) may still be in cache at the next step. Then
# a plain product of one row is faster than the packed one, and holding both forms costs little.
# Larger weights come from memory; there the packed form is as fast or faster (measured 1.2 to 2.5
# times).
_MAX_TWICE_HELD_ELEMENTS = 2**18


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


def build_linear(weight: LinearWeight, *, is_deterministic: bool = False) -> Linear:
    """The map x -> x @ weight.T + bias.

    With `is_deterministic` a token's result on a GPU does not depend on the batch it is in; a CPU
    makes no such promise. Raises ConfigError if that is impossible for this weight on a GPU.
    """
    match weight.format:
        case WeightFormat.DENSE:
            return _build_dense(weight.data, weight.bias, is_deterministic)
        case WeightFormat.FP8 | WeightFormat.INT4 | WeightFormat.FP4:
            assert weight.scales is not None, f"{weight.format} without scales"
            if weight.data.device.type == "cuda":
                from engine.layers.quantized_cuda import QuantizedLinear

                return QuantizedLinear(weight, is_deterministic=is_deterministic)
            # A CPU has no products of such numbers: they are made a matrix once.
            dense = dequantize(weight.data, weight.scales)
            return _build_dense(dense, weight.bias, is_deterministic)


def _build_dense(weight: Tensor, bias: Tensor | None, is_deterministic: bool) -> Linear:
    if weight.device.type == "cuda":
        return _build_cuda(weight, bias, is_deterministic)
    if not can_pack(weight):
        return DenseLinear(weight, bias)
    if weight.numel() <= _MAX_TWICE_HELD_ELEMENTS:
        return TwiceHeldLinear(weight, bias)
    return PackedLinear(weight, bias)


def build_gated(weight: LinearWeight, ops: Ops, *, is_deterministic: bool = False) -> Linear:
    """The map x -> silu(gate) * up, [T, n]; weight: [2 n, in], gate's rows before up's.

    Otherwise as `build_linear`.
    """
    is_dense = weight.format is WeightFormat.DENSE
    if not is_dense and weight.data.device.type == "cuda":
        from engine.layers.quantized_cuda import QuantizedLinear

        return QuantizedLinear(weight, ops, is_deterministic=is_deterministic)
    if is_dense and weight.data.device.type == "cuda" and not is_deterministic:
        from engine.layers.linear_cuda import FastestGated
        from kernels.linear.small import supports_small

        if supports_small(weight.data):
            return FastestGated(weight.data, weight.bias, ops)
    return Gated(build_linear(weight, is_deterministic=is_deterministic), ops.silu_mul)


def _build_cuda(weight: Tensor, bias: Tensor | None, is_deterministic: bool) -> Linear:
    from engine.layers.linear_cuda import FastestLinear, InvariantLinear
    from kernels.linear.invariant import supports_invariant
    from kernels.linear.small import supports_small

    if is_deterministic:
        if not supports_invariant(weight):
            raise ConfigError(
                f"deterministic mode: a weight {list(weight.shape)} in {weight.dtype} has no "
                "batch-invariant product; it takes bfloat16 or float16 with a multiple of 16 inputs"
            )
        return InvariantLinear(weight, bias)
    return FastestLinear(weight, bias) if supports_small(weight) else DenseLinear(weight, bias)

"""Linear maps as objects: how a weight is held is chosen once, when the model is built."""

from typing import Protocol

import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from kernels.packed_linear import can_pack, pack_weight, packed_linear

# Up to this many elements (1 MiB of fp32) a weight may still be in cache at the next step: then a
# plain product of one row beats the packed one, and holding the weight twice costs little. Larger
# ones come from memory, where the packed form is read at least as fast (measured 1.2 to 2.5 times).
_MAX_TWICE_HELD_ELEMENTS = 2**18


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in]; returns [T, out]."""
        ...


class DenseLinear:
    """y = x @ weight.T + bias, weight as published."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """The same from a reordered copy, the only one kept."""

    __slots__ = ("_bias", "_packed_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed_weight = pack_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return packed_linear(x, self._packed_weight, self._bias)


class TwiceHeldLinear:
    """A small weight held in both forms: dense for one row, packed for more."""

    __slots__ = ("_dense", "_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._dense = DenseLinear(weight, bias)
        self._packed = PackedLinear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._dense(x) if x.shape[0] == 1 else self._packed(x)


def build_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """weight: [out, in], bias: [out] or None."""
    if not can_pack(weight):
        return DenseLinear(weight, bias)
    if weight.numel() <= _MAX_TWICE_HELD_ELEMENTS:
        return TwiceHeldLinear(weight, bias)
    return PackedLinear(weight, bias)

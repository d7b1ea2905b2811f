"""Linear maps on a CUDA device: few tokens by our kernels, many by the library.

Imported only for weights on such a device, because the kernels need Triton.
"""

import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from kernels.linear_invariant import invariant_linear
from kernels.linear_small import (
    faster_up_to,
    small_gated_linear,
    small_linear,
    tile_counters,
)
from kernels.ops import Ops


class SmallBatchLinear:
    """y = x @ weight.T + bias, a few tokens as fast as the weight is read."""

    __slots__ = ("_bias", "_counters", "_max_small_tokens", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in] that `supports_small`. Calls must not overlap in time."""
        self._weight = weight
        self._bias = bias
        self._max_small_tokens = faster_up_to(weight, gated=False)
        self._counters = tile_counters(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > self._max_small_tokens:
            return F.linear(x, self._weight, self._bias)
        return small_linear(x, self._weight, self._bias, self._counters)


class SmallBatchGated:
    """silu(gate) * up, gate and up from one weight; one kernel for few tokens."""

    __slots__ = ("_bias", "_counters", "_max_small_tokens", "_ops", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Ops) -> None:
        """weight: [2 n, in] that `supports_small`, gate's rows first. Calls must not overlap."""
        self._weight = weight
        self._bias = bias
        self._ops = ops
        self._max_small_tokens = faster_up_to(weight, gated=True)
        self._counters = tile_counters(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in]; returns [T, n]."""
        if x.shape[0] > self._max_small_tokens:
            return self._ops.silu_mul(F.linear(x, self._weight, self._bias))
        return small_gated_linear(x, self._weight, self._bias, self._counters)


class InvariantLinear:
    """y = x @ weight.T + bias; a token's result does not depend on the batch, bit by bit."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in] that `supports_invariant`."""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return invariant_linear(x, self._weight, self._bias)

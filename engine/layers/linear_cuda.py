"""Linear maps on a CUDA device: our kernels where they measured faster, otherwise the library.

Imported only for weights on a CUDA device, because the kernels need Triton.
"""

from enum import Enum

import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.layers.linear import NUM_LANES
from kernels.linear.invariant import invariant_linear
from kernels.linear.large import (
    faster_from,
    large_gated_linear,
    large_linear,
    num_multiprocessors,
    supports_large,
)
from kernels.linear.medium import MediumConfig, choose_config, medium_gated_linear, medium_linear
from kernels.linear.medium import faster_for as medium_for
from kernels.linear.small import faster_up_to as small_up_to
from kernels.linear.small import small_gated_linear, small_linear, tile_counters
from kernels.ops import Ops


class Kernel(Enum):
    """The implementation that computes a product."""

    SMALL = "few tokens: kernels.linear.small"
    MEDIUM = "some tokens: kernels.linear.medium"
    LARGE = "many tokens: kernels.linear.large"
    LIBRARY = "all others: cuBLAS"


class _Choice:
    """Selects the kernel that measured fastest for a weight, by the number of tokens."""

    __slots__ = ("_large_from", "_medium_for", "_num_multiprocessors", "_num_rows", "_small_to")

    def __init__(self, weight: Tensor, *, gated: bool) -> None:
        """weight: [out, in] that `supports_small`."""
        has_tma = supports_large(weight)
        self._small_to = small_up_to(weight, gated=gated)
        self._large_from = faster_from(weight, gated=gated) if has_tma else None
        self._num_rows = weight.shape[0]
        self._num_multiprocessors = num_multiprocessors(weight.device)
        self._medium_for = range(0)
        if has_tma:
            self._medium_for = medium_for(weight, self._num_multiprocessors, gated=gated)

    def kernel(self, num_tokens: int) -> Kernel:
        if num_tokens <= self._small_to:
            return Kernel.SMALL
        if num_tokens in self._medium_for:
            return Kernel.MEDIUM
        is_large = self._large_from is not None and num_tokens >= self._large_from
        return Kernel.LARGE if is_large else Kernel.LIBRARY

    def medium_config(self, num_tokens: int) -> MediumConfig:
        return choose_config(num_tokens, self._num_rows, self._num_multiprocessors)


class FastestLinear:
    """y = x @ weight.T + bias, by the kernel that measured fastest for the number of tokens."""

    __slots__ = ("_bias", "_choice", "_counters", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in] that `supports_small`."""
        self._weight = weight
        self._bias = bias
        self._choice = _Choice(weight, gated=False)
        self._counters = [tile_counters(weight.device) for _ in range(NUM_LANES)]

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        num_tokens = x.shape[0]
        match self._choice.kernel(num_tokens):
            case Kernel.SMALL:
                return small_linear(x, self._weight, self._bias, self._counters[lane])
            case Kernel.MEDIUM:
                config = self._choice.medium_config(num_tokens)
                return medium_linear(x, self._weight, self._bias, config)
            case Kernel.LARGE:
                return large_linear(x, self._weight, self._bias)
            case Kernel.LIBRARY:
                return F.linear(x, self._weight, self._bias)


class FastestGated:
    """silu(gate) * up from one weight; in one kernel of ours where that measured faster."""

    __slots__ = ("_bias", "_choice", "_counters", "_ops", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Ops) -> None:
        """weight: [2 n, in] that `supports_small`, gate's rows first."""
        self._weight = weight
        self._bias = bias
        self._ops = ops
        self._choice = _Choice(weight, gated=True)
        self._counters = [tile_counters(weight.device) for _ in range(NUM_LANES)]

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        """x: [T, in]; returns [T, n]."""
        num_tokens = x.shape[0]
        match self._choice.kernel(num_tokens):
            case Kernel.SMALL:
                return small_gated_linear(x, self._weight, self._bias, self._counters[lane])
            case Kernel.MEDIUM:
                config = self._choice.medium_config(num_tokens)
                return medium_gated_linear(x, self._weight, self._bias, config)
            case Kernel.LARGE:
                return large_gated_linear(x, self._weight, self._bias)
            case Kernel.LIBRARY:
                return self._ops.silu_mul(F.linear(x, self._weight, self._bias))


class InvariantLinear:
    """y = x @ weight.T + bias; a token's result is bitwise equal in any batch."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in] that `supports_invariant`."""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        return invariant_linear(x, self._weight, self._bias)

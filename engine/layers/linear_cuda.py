"""Linear maps on a CUDA device: our kernels where they measured faster, else the library.

Imported only for weights on such a device, because the kernels need Triton.
"""

import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from kernels.linear_invariant import invariant_linear
from kernels.linear_large import (
    LargeConfig,
    TokenRange,
    faster_ranges,
    large_gated_linear,
    large_linear,
    supports_large,
)
from kernels.linear_small import (
    faster_up_to,
    small_gated_linear,
    small_linear,
    tile_counters,
)
from kernels.ops import Ops


class FastestLinear:
    """y = x @ weight.T + bias, by whichever kernel measured fastest for the number of tokens."""

    __slots__ = ("_bias", "_counters", "_large_ranges", "_max_small_tokens", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in] that `supports_small`. Calls must not overlap in time."""
        self._weight = weight
        self._bias = bias
        self._max_small_tokens = faster_up_to(weight, gated=False)
        self._large_ranges = _large_ranges(weight, gated=False)
        self._counters = tile_counters(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        num_tokens = x.shape[0]
        if num_tokens <= self._max_small_tokens:
            return small_linear(x, self._weight, self._bias, self._counters)
        config = _config_for(num_tokens, self._large_ranges)
        if config is not None:
            return large_linear(x, self._weight, self._bias, config=config)
        return F.linear(x, self._weight, self._bias)


class FastestGated:
    """silu(gate) * up, gate and up from one weight; where a kernel of ours is faster, by one."""

    __slots__ = ("_bias", "_counters", "_large_ranges", "_max_small_tokens", "_ops", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Ops) -> None:
        """weight: [2 n, in] that `supports_small`, gate's rows first. Calls must not overlap."""
        self._weight = weight
        self._bias = bias
        self._ops = ops
        self._max_small_tokens = faster_up_to(weight, gated=True)
        self._large_ranges = _large_ranges(weight, gated=True)
        self._counters = tile_counters(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in]; returns [T, n]."""
        num_tokens = x.shape[0]
        if num_tokens <= self._max_small_tokens:
            return small_gated_linear(x, self._weight, self._bias, self._counters)
        config = _config_for(num_tokens, self._large_ranges)
        if config is not None:
            return large_gated_linear(x, self._weight, self._bias, config)
        return self._ops.silu_mul(F.linear(x, self._weight, self._bias))


def _large_ranges(weight: Tensor, *, gated: bool) -> tuple[TokenRange, ...]:
    return faster_ranges(weight, gated=gated) if supports_large(weight) else ()


def _config_for(num_tokens: int, ranges: tuple[TokenRange, ...]) -> LargeConfig | None:
    fitting = (r.config for r in ranges if r.first <= num_tokens <= r.last)
    return next(fitting, None)


class InvariantLinear:
    """y = x @ weight.T + bias; a token's result does not depend on the batch, bit by bit."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in] that `supports_invariant`."""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return invariant_linear(x, self._weight, self._bias)

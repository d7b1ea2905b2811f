"""Chooses the form in which a weight is held, when a model is built: by its format and device."""

from torch import Tensor

from engine.errors import ConfigError
from engine.layers.linear import (
    DenseLinear,
    Gated,
    Linear,
    LinearWeight,
    PackedLinear,
    TwiceHeldLinear,
    WeightFormat,
)
from engine.layers.quantized_weight import dequantize
from kernels.linear.packed import can_pack
from kernels.ops import Ops

# A weight of up to this many elements (1 MiB of fp32) may still be in cache at the next step. Then
# a plain product of one row is faster than the packed one, and holding both forms costs little.
# Larger weights come from memory; there the packed form is as fast or faster (measured 1.2 to 2.5
# times).
_MAX_TWICE_HELD_ELEMENTS = 2**18


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

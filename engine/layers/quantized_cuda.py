"""Linear maps with quantised weights on a CUDA device; imported only there, as it needs Triton.

What runs, by format, scales, number of tokens:

    format  inputs may be rounded   1 to 64  65 to 511  512 and more  deterministic
    FP8     yes, tiles of 128       weights  blocks     blocks        one tiling
    FP8     yes, a scale a row      weights  rows       rows          one tiling
    FP8     else                    weights  weights    matrix        one tiling
    4 bits  -                       weights  weights    matrix        one tiling

    weights     inputs as they are, weights decoded in registers: `fp8_linear`, `int4_linear`
    one tiling  the same with one tiling for any number of tokens
    blocks      inputs rounded to e4m3 in groups of 128, `fp8_blocks`; Hopper only
    rows        inputs rounded to e4m3 token by token, cuBLAS or CUTLASS by torch; bfloat16 only
    matrix      weights decoded to a buffer in the inputs' dtype, and cuBLAS

So an answer's first token may come from rounded inputs and the others from inputs as they are; in
deterministic mode nothing but weights is rounded.
"""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.linear import NUM_LANES, LinearWeight, WeightFormat
from engine.layers.operations import Op, plain_mlp
from engine.layers.quantized_weight import Scales, compacted
from kernels.device import device_properties
from kernels.linear.small import tile_counters
from kernels.ops import Ops
from kernels.quant.fp8_blocks import TILE_COLUMNS, fp8_blocks, supports_blocks
from kernels.quant.fp8_linear import (
    INVARIANT,
    MAX_ONE_TILE,
    Fp8Operand,
    QuantConfig,
    fp8_linear,
    supports_fp8,
)
from kernels.quant.int4_linear import FourBitOperand, int4_linear, join_zeros, supports_int4
from kernels.quant.steps import MAX_SMALL, Codes
from kernels.quant.to_matrix import fp8_matrix, int4_matrix
from kernels.quant.token_groups import quantize_tokens

ROUNDED_FROM = MAX_ONE_TILE + 1  # tokens
# A matrix is written and read again, four bytes a weight: that is little beside so many products.
MATRIX_FROM = 512
_E4M3_CAPABILITY = (8, 9)


class Product(Protocol):
    """x @ weight.T + bias in two ways."""

    many_from: int  # tokens from which `many` is used

    def few(
        self, x: Tensor, counters: Tensor, config: QuantConfig | None, *, gated: bool
    ) -> Tensor:
        """By weights decoded in registers; any number of tokens."""
        ...

    def many(self, x: Tensor) -> Tensor: ...


class RoundedProduct(Product, Protocol):
    """A product whose inputs are rounded where there are many tokens."""

    group: int  # columns of an input that share a scale

    def of_rounded(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """codes, scales: from `quantize_tokens` by `group`; returns [T, out] in `dtype`."""
        ...


class Fp8Matrix:
    """FP8 weights, inputs as they are."""

    many_from = MATRIX_FROM

    def __init__(self, weight: Fp8Operand) -> None:
        self.weight = weight

    def few(
        self, x: Tensor, counters: Tensor, config: QuantConfig | None, *, gated: bool
    ) -> Tensor:
        return fp8_linear(x, self.weight, counters, config, gated=gated)

    def many(self, x: Tensor) -> Tensor:
        return F.linear(x, fp8_matrix(self.weight, x.dtype), self.weight.bias)


class Fp8Blocks(Fp8Matrix):
    """FP8 weights in tiles of 128 columns; the inputs of many tokens are rounded likewise."""

    many_from = ROUNDED_FROM
    group = TILE_COLUMNS

    def many(self, x: Tensor) -> Tensor:
        return self.of_rounded(*quantize_tokens(x, self.group), x.dtype)

    def of_rounded(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return fp8_blocks(codes, scales, self.weight, dtype)


class Fp8Rows(Fp8Matrix):
    """FP8 weights with a scale a row; the inputs of many tokens are rounded likewise."""

    many_from = ROUNDED_FROM

    def __init__(self, weight: Fp8Operand) -> None:
        super().__init__(weight)
        self._row_scales = weight.scales.view(1, -1)
        self.group = weight.codes.shape[1]

    def many(self, x: Tensor) -> Tensor:
        return self.of_rounded(*quantize_tokens(x, self.group), x.dtype)

    def of_rounded(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        # Without fast accumulation: the matrix units' own sums have too few bits.
        y = torch._scaled_mm(
            codes,
            self.weight.codes.t(),
            scale_a=scales.view(-1, 1),
            scale_b=self._row_scales,
            out_dtype=dtype,
            use_fast_accum=False,
        )
        return y if self.weight.bias is None else y.add_(self.weight.bias)


class FourBitMatrix:
    """4-bit weights, inputs as they are."""

    many_from = MATRIX_FROM

    def __init__(self, weight: FourBitOperand) -> None:
        self.weight = weight

    def few(
        self, x: Tensor, counters: Tensor, config: QuantConfig | None, *, gated: bool
    ) -> Tensor:
        return int4_linear(x, self.weight, counters, config, gated=gated)

    def many(self, x: Tensor) -> Tensor:
        return F.linear(x, int4_matrix(self.weight, x.dtype), self.weight.bias)


class QuantizedLinear:
    """y = x @ weight.T + bias, or silu(gate) * up of it, by the table above."""

    __slots__ = ("_config", "_counters", "_many_from", "_ops", "_order", "product")

    def __init__(
        self, weight: LinearWeight, ops: Ops | None = None, *, is_deterministic: bool = False
    ) -> None:
        """ops: for the gate; None = not gated. Raises ConfigError if no kernel reads the weight."""
        assert weight.scales is not None, f"{weight.format} without scales"
        scales = compacted(weight.scales)
        self.product = _product(weight, scales)
        self._many_from = None if is_deterministic else self.product.many_from
        self._config = INVARIANT if is_deterministic else None
        self._order = scales.order
        self._ops = ops
        self._counters = [tile_counters(weight.data.device) for _ in range(NUM_LANES)]

    @property
    def rounded(self) -> RoundedProduct | None:
        """The product of inputs that are rounded before; None = this map rounds none."""
        is_rounding = isinstance(self.product, Fp8Blocks | Fp8Rows) and self._many_from is not None
        return self.product if is_rounding else None  # type: ignore[return-value]

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        """x: [T, in]; returns [T, out], or [T, out / 2] if gated."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        if self._many_from is None or x.shape[0] < self._many_from:
            is_gated = self._ops is not None
            return self.product.few(x, self._counters[lane], self._config, gated=is_gated)
        y = self.product.many(x)
        return y if self._ops is None else self._ops.silu_mul(y)


class RoundedMlp:
    """`GatedMlp` that rounds down's inputs in the kernel of the gate where there are many tokens.

    The numbers are those of `GatedMlp`; a launch and a tensor less.
    """

    __slots__ = ("_down", "_gated", "_rounded")

    token_sizes: tuple[int, ...] = ()  # as of `GatedMlp`

    def __init__(
        self, gated: QuantizedLinear, down: QuantizedLinear, rounded: RoundedProduct
    ) -> None:
        """rounded: of `down`."""
        self._gated = gated
        self._down = down
        self._rounded = rounded

    def __call__(self, x: Tensor, lane: int = 0, slots: Tensor | None = None) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]; padding is computed as all else."""
        many_from = max(self._gated.product.many_from, self._rounded.many_from)
        if x.shape[0] < many_from:
            return self._down(self._gated(x, lane), lane)
        gate_up = self._gated.product.many(x)
        codes, scales = quantize_tokens(gate_up, self._rounded.group, gated=True)
        return self._rounded.of_rounded(codes, scales, x.dtype)

    def operations(self) -> tuple[Op, ...]:
        return plain_mlp(self)


def check_dtype(scales: Scales) -> None:
    """Raises ConfigError for inputs that quantised weights are not multiplied with."""
    if scales.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            "model.dtype: on a GPU quantised weights are multiplied with bfloat16 or float16,"
            f" not with {scales.dtype}"
        )


def _product(weight: LinearWeight, scales: Scales) -> Product:
    check_dtype(scales)
    if weight.format in (WeightFormat.INT4, WeightFormat.FP4):
        return FourBitMatrix(_four_bit_operand(weight, scales))
    operand = _fp8_operand(weight, scales)
    if not scales.quantizes_inputs:
        return Fp8Matrix(operand)
    if scales.values.shape[1] > 1:
        return Fp8Blocks(operand) if supports_blocks(operand) else Fp8Matrix(operand)
    capability = device_properties(weight.data.device).capability
    can_round = capability is not None and capability >= _E4M3_CAPABILITY
    can_multiply = scales.rows == 1 and scales.dtype is torch.bfloat16
    return Fp8Rows(operand) if can_round and can_multiply else Fp8Matrix(operand)


def _fp8_operand(weight: LinearWeight, scales: Scales) -> Fp8Operand:
    if not supports_fp8(weight.data, scales.columns):
        raise unreadable(weight, f"tiles of {scales.columns} inputs")
    return Fp8Operand(
        codes=weight.data,
        scales=scales.values,
        tile_rows=scales.rows,
        tile_columns=scales.columns,
        bias=weight.bias,
    )


def _four_bit_operand(weight: LinearWeight, scales: Scales) -> FourBitOperand:
    if not supports_int4(weight.data, scales.half):
        raise unreadable(weight, f"groups of {scales.columns} inputs")
    codes, values = four_bit_codes(scales)
    return FourBitOperand(
        packed=weight.data,
        scales=values,
        codes=codes,
        half=scales.half,
        group=scales.columns,
        factors=scales.factors,
        bias=weight.bias,
    )


def four_bit_codes(scales: Scales) -> tuple[Codes, Tensor]:
    """How 4-bit weights are coded, and their scales as kernels take them.

    scales: `compacted`. Raises ConfigError for scales that leave no room for zero points.
    """
    if scales.is_e2m1:
        values = scales.values.view(torch.uint8)
        if scales.factors is not None:
            return Codes.NVFP4, values
        is_small = bool((values <= MAX_SMALL).all())
        return (Codes.MXFP4_SMALL if is_small else Codes.MXFP4), values
    words = join_zeros(scales.values, scales.zeros)
    if words is None:
        raise ConfigError(
            "4-bit weights with zero points have scales in float32; on a GPU they must be in"
            " bfloat16 or float16"
        )
    return (Codes.INT4 if scales.zeros is None else Codes.INT4_ZEROS), words


def unreadable(weight: LinearWeight, groups: str) -> ConfigError:
    """The error for a weight that no kernel reads."""
    num_rows, width = weight.data.shape[-2:]
    columns = width if weight.format is WeightFormat.FP8 else 2 * width
    return ConfigError(
        f"a {weight.format.name} weight of {num_rows} outputs and {columns} inputs in {groups} is"
        " not computed on a GPU: sizes must be multiples of 16, with 4 bits a rank's inputs of 32;"
        " groups must be multiples of 16"
    )

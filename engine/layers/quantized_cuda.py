"""Linear maps with quantised weights on a CUDA device; imported only there, as it needs Triton.

What runs, by format, scales, number of tokens:

    format  inputs may be rounded   1 to 16  17 to 64  65 to 511  512 and more  deterministic
    FP8     yes, tiles of 128       pieces   rounded   blocks     blocks        one tiling
    FP8     yes, a scale a row      pieces   rounded   rows       rows          one tiling
    FP8     else                    pieces   pieces    weights    matrix        one tiling
    4 bits  -                       pieces   weights   weights    matrix        one tiling

    pieces      inputs as they are, in two FP8 numbers each: `fp8_few`, `int4_joined`; Hopper and
                bfloat16 only, integers of 4 bits in groups of whole runs only, else weights. A
                gate of FP8 weights leaves pieces of e5m2: off by 0.25 % where bfloat16, to which
                it is not rounded, is by 0.17 % (`kernels.quant.coded_tokens`)
    rounded     inputs rounded to e4m3 as for blocks or rows: `fp8_few`; where there are no pieces
                weights
    one token   inputs as they are, no matrix units: `one_token`; in place of pieces where nothing
                has coded the input, of FP8 with a scale a row and of 4 bits with few rows: faster
                there alone
    weights     inputs as they are, weights decoded in registers: `fp8_linear`, `int4_linear`
    one tiling  the same with one tiling for any number of tokens
    blocks      inputs rounded to e4m3 in groups of 128, `fp8_blocks`; Hopper only
    rows        inputs rounded to e4m3 token by token, cuBLAS or CUTLASS by torch; bfloat16 only
    matrix      weights decoded to a buffer in the inputs' dtype, and cuBLAS

Inputs are coded by the norm before a product (`form`, `of_coded`) or else before it, with the same
result (of one token added in another order). So a token may come from rounded inputs in a step of
many and from inputs as they are in one of few; in deterministic mode nothing but weights is
rounded.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from engine.layers.linear import NUM_LANES, LinearWeight, WeightFormat
from engine.layers.operations import Op, coded_operations
from engine.layers.quantized_operands import check_dtype, four_bit_operand, fp8_operand
from engine.layers.quantized_weight import Scales, compacted
from kernels.device import device_properties
from kernels.linear.small import tile_counters
from kernels.ops import Ops
from kernels.quant import fp8_few
from kernels.quant.coded_tokens import CodedTokens, InputForm
from kernels.quant.fp8_blocks import TILE_COLUMNS, fp8_blocks, supports_blocks
from kernels.quant.fp8_few import MAX_TOKENS as MAX_FEW_TOKENS
from kernels.quant.fp8_few import fp8_few_gate, fp8_few_linear, supports_few
from kernels.quant.fp8_linear import (
    INVARIANT,
    MAX_ONE_TILE,
    Fp8Operand,
    QuantConfig,
    fp8_linear,
)
from kernels.quant.int4_joined import MAX_TOKENS as MAX_JOINED_TOKENS
from kernels.quant.int4_joined import int4_joined_linear, supports_joined
from kernels.quant.int4_linear import FourBitOperand, int4_linear
from kernels.quant.one_token import fp8_one_token, int4_one_token
from kernels.quant.to_matrix import fp8_matrix, int4_matrix
from kernels.quant.token_groups import code_tokens

# Fewer tokens take no longer as they are: then a product waits for the weights.
ROUNDED_FROM = 17
MANY_FROM = MAX_ONE_TILE + 1  # tokens; from so many on inputs are rounded on every GPU
# A matrix is written and read again, four bytes a weight: that is little beside so many products.
MATRIX_FROM = 512
# Up to so many rows of 4-bit weights one token is faster without matrix units.
ONE_TOKEN_ROWS = 4096
# Up to so many columns the matrix units' own sums are taken, which have fewer bits than fp32: on an
# H200 they are 12 % faster, with more columns no faster.
UNIT_SUMS_TO = 8192
_E4M3_CAPABILITY = (8, 9)


class Product(Protocol):
    """x @ weight.T + bias in two ways."""

    many_from: int  # tokens from which `many` is used

    def few(
        self, x: Tensor, counters: Tensor, config: QuantConfig | None, *, gated: bool
    ) -> Tensor:
        """Of inputs as they are, any number of tokens; config: of weights decoded in registers."""
        ...

    def many(self, x: Tensor) -> Tensor: ...

    def form(self, num_tokens: int) -> InputForm | None:
        """How the inputs of so many tokens are best coded before; None = not at all."""
        ...

    def of_few(self, x: CodedTokens, counters: Tensor, *, gated: bool) -> Tensor:
        """`few` of x as `form` says."""
        ...

    def codes_gate(self, num_tokens: int) -> bool:
        """Whether the gate of so many tokens, as `form` says, can leave its result coded."""
        ...


class Fp8Matrix:
    """FP8 weights, inputs as they are."""

    many_from = MATRIX_FROM

    def __init__(self, weight: Fp8Operand, dtype: torch.dtype) -> None:
        """dtype: of inputs and outputs."""
        self.weight = weight
        self._dtype = dtype
        self._few_form: InputForm | None = None
        if supports_few(weight, dtype):
            self._few_form = InputForm(pieces=2, group=weight.codes.shape[1])

    def few(
        self, x: Tensor, counters: Tensor, config: QuantConfig | None, *, gated: bool
    ) -> Tensor:
        num_tokens = len(x)
        takes_codes = config is None and num_tokens <= MAX_FEW_TOKENS
        form = self.form(num_tokens) if takes_codes else None
        if form is None:
            return fp8_linear(x, self.weight, counters, config, gated=gated)
        if self._is_of_one(num_tokens):
            return fp8_one_token(x, self.weight, gated=gated)
        return self.of_few(code_tokens(x, form), counters, gated=gated)

    def _is_of_one(self, num_tokens: int) -> bool:
        """Whether so many tokens that nothing has coded take no matrix units."""
        return num_tokens == 1 and self.weight.scales.shape[1] == 1

    def many(self, x: Tensor) -> Tensor:
        return F.linear(x, fp8_matrix(self.weight, x.dtype), self.weight.bias)

    def form(self, num_tokens: int) -> InputForm | None:
        return self._few_form if num_tokens <= MAX_FEW_TOKENS else None

    def of_few(self, x: CodedTokens, counters: Tensor, *, gated: bool) -> Tensor:
        return fp8_few_linear(x, self.weight, self._dtype, counters, gated=gated)

    def codes_gate(self, num_tokens: int) -> bool:
        form = self.form(num_tokens)
        if form is None or num_tokens > MAX_FEW_TOKENS or self._is_of_one(num_tokens):
            return False
        return fp8_few.codes_gate(num_tokens, form.pieces, self.weight)


class Fp8Rounding(Fp8Matrix, ABC):
    """FP8 weights; the inputs of many tokens are rounded."""

    many_from = MANY_FROM

    def __init__(self, weight: Fp8Operand, dtype: torch.dtype, group: int) -> None:
        """group: columns of a rounded input that share a scale."""
        super().__init__(weight, dtype)
        self.many_form = InputForm(pieces=1, group=group)
        self._rounded_from = MANY_FROM if self._few_form is None else ROUNDED_FROM

    def form(self, num_tokens: int) -> InputForm | None:
        return self.many_form if num_tokens >= self._rounded_from else super().form(num_tokens)

    def many(self, x: Tensor) -> Tensor:
        return self.of_rounded(code_tokens(x, self.many_form))

    @abstractmethod
    def of_rounded(self, x: CodedTokens) -> Tensor:
        """x: in `many_form`; returns [T, out]."""


class Fp8Blocks(Fp8Rounding):
    """FP8 weights in tiles of 128 columns; the inputs of many tokens are rounded likewise."""

    def __init__(self, weight: Fp8Operand, dtype: torch.dtype) -> None:
        super().__init__(weight, dtype, TILE_COLUMNS)

    def of_rounded(self, x: CodedTokens) -> Tensor:
        return fp8_blocks(x.codes[0], x.scales, self.weight, self._dtype)


class Fp8Rows(Fp8Rounding):
    """FP8 weights with a scale a row; the inputs of many tokens are rounded likewise."""

    def __init__(self, weight: Fp8Operand, dtype: torch.dtype) -> None:
        num_columns = weight.codes.shape[1]
        super().__init__(weight, dtype, num_columns)
        self._row_scales = weight.scales.view(1, -1)
        self._sums_in_units = num_columns <= UNIT_SUMS_TO

    def of_rounded(self, x: CodedTokens) -> Tensor:
        y = torch._scaled_mm(
            x.codes[0],
            self.weight.codes.t(),
            scale_a=x.scales.view(-1, 1),
            scale_b=self._row_scales,
            out_dtype=self._dtype,
            use_fast_accum=self._sums_in_units,
        )
        return y if self.weight.bias is None else y.add_(self.weight.bias)


class FourBitMatrix:
    """4-bit weights, inputs as they are."""

    many_from = MATRIX_FROM

    def __init__(self, weight: FourBitOperand, dtype: torch.dtype) -> None:
        """dtype: of inputs and outputs."""
        self.weight = weight
        self._dtype = dtype
        self._num_rows, row_bytes = weight.packed.shape
        self._few_form: InputForm | None = None
        if supports_joined(weight, dtype):
            self._few_form = InputForm(pieces=2, group=2 * row_bytes)

    def few(
        self, x: Tensor, counters: Tensor, config: QuantConfig | None, *, gated: bool
    ) -> Tensor:
        form = self.form(len(x)) if config is None else None
        if form is None:
            return int4_linear(x, self.weight, counters, config, gated=gated)
        if len(x) == 1 and self._num_rows <= ONE_TOKEN_ROWS:
            return int4_one_token(x, self.weight, gated=gated)
        return self.of_few(code_tokens(x, form), counters, gated=gated)

    def many(self, x: Tensor) -> Tensor:
        return F.linear(x, int4_matrix(self.weight, x.dtype), self.weight.bias)

    def form(self, num_tokens: int) -> InputForm | None:
        return self._few_form if num_tokens <= MAX_JOINED_TOKENS else None

    def of_few(self, x: CodedTokens, counters: Tensor, *, gated: bool) -> Tensor:
        return int4_joined_linear(x, self.weight, self._dtype, counters, gated=gated)

    def codes_gate(self, num_tokens: int) -> bool:
        return False


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
    def takes_coded(self) -> bool:
        """Whether there may be a `form` for some number of tokens."""
        return self._many_from is not None and self._order is None

    def form(self, num_tokens: int) -> InputForm | None:
        """How the inputs of so many tokens may be coded for `of_coded`; None = not at all."""
        return self.product.form(num_tokens) if self.takes_coded else None

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        """x: [T, in]; returns [T, out], or [T, out / 2] if gated."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        if self._many_from is None or x.shape[0] < self._many_from:
            is_gated = self._ops is not None
            return self.product.few(x, self._counters[lane], self._config, gated=is_gated)
        y = self.product.many(x)
        return y if self._ops is None else self._ops.silu_mul(y)

    def of_coded(self, x: CodedTokens, lane: int = 0) -> Tensor:
        """x: [T, in] as `form` says; otherwise as the call."""
        if x.num_tokens < self.product.many_from:
            is_gated = self._ops is not None
            return self.product.of_few(x, self._counters[lane], gated=is_gated)
        y = self.of_rounded(x)
        return y if self._ops is None else self._ops.silu_mul(y)

    def of_rounded(self, x: CodedTokens) -> Tensor:
        """x: [T, in], rounded, of many tokens; returns [T, out], before any gate."""
        assert isinstance(self.product, Fp8Rounding)
        return self.product.of_rounded(x)

    def coded_gate(self, x: CodedTokens, lane: int) -> CodedTokens:
        """silu(gate) * up, [T, out / 2], coded in as many pieces as x; only after `codes_gate`."""
        assert isinstance(self.product, Fp8Matrix)
        return fp8_few_gate(x, self.product.weight, self._counters[lane])

    def codes_gate(self, num_tokens: int) -> bool:
        """Whether the gate of so many tokens can leave its result coded."""
        return self.product.codes_gate(num_tokens)


class CodedMlp:
    """`GatedMlp` whose gate codes its result for the product after it.

    A launch and a tensor less. With rounded inputs of many tokens the numbers are `GatedMlp`'s.
    """

    __slots__ = ("_down", "_gated")

    token_sizes: tuple[int, ...] = ()  # as of `GatedMlp`

    def __init__(self, gated: QuantizedLinear, down: QuantizedLinear) -> None:
        self._gated = gated
        self._down = down

    def form(self, num_tokens: int) -> InputForm | None:
        """See `CodedReader`."""
        form, down = self._gated.form(num_tokens), self._down.form(num_tokens)
        return form if _pieces(form) == _pieces(down) else None

    def __call__(self, x: Tensor, lane: int = 0, slots: Tensor | None = None) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]; padding is computed as all else."""
        form = self.form(x.shape[0])
        if form is not None and form.pieces == 1:
            return self.of_coded(code_tokens(x, form), lane)
        return self._down(self._gated(x, lane), lane)

    def of_coded(self, x: CodedTokens, lane: int = 0) -> Tensor:
        """x: [T, hidden] as `form` says; otherwise as the call."""
        num_tokens = x.num_tokens
        form = self._down.form(num_tokens)
        assert form is not None, "no form of so many tokens"
        if self._gated.codes_gate(num_tokens):
            inner = self._gated.coded_gate(x, lane)
        elif num_tokens >= MANY_FROM:
            inner = code_tokens(self._gated.of_rounded(x), form, gated=True)
        else:
            return self._down(self._gated.of_coded(x, lane), lane)
        return self._down.of_coded(inner, lane)

    def operations(self) -> tuple[Op, ...]:
        return coded_operations(self)


def _pieces(form: InputForm | None) -> int | None:
    return None if form is None else form.pieces


def _product(weight: LinearWeight, scales: Scales) -> Product:
    check_dtype(scales)
    if weight.format in (WeightFormat.INT4, WeightFormat.FP4):
        return FourBitMatrix(four_bit_operand(weight, scales), scales.dtype)
    operand, dtype = fp8_operand(weight, scales), scales.dtype
    capability = device_properties(weight.data.device).capability
    has_e4m3 = capability is not None and capability >= _E4M3_CAPABILITY
    if not scales.quantizes_inputs or not has_e4m3:
        return Fp8Matrix(operand, dtype)
    if scales.values.shape[1] > 1:
        return Fp8Blocks(operand, dtype) if supports_blocks(operand) else Fp8Matrix(operand, dtype)
    can_multiply = scales.rows == 1 and dtype is torch.bfloat16
    return Fp8Rows(operand, dtype) if can_multiply else Fp8Matrix(operand, dtype)

"""Quantised weights for kernel tests, and the matrix that each stands for, in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.linear import LinearWeight, WeightFormat
from engine.layers.quantized_weight import Scales, e2m1_values
from kernels.quant.int4 import pack_int4
from kernels.quant.sizes import choose_half


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """x [T, K] with a gap between its rows, a quantised weight [N, K] and its exact matrix."""

    x: Tensor
    weight: LinearWeight
    exact: Tensor  # [N, K] float64


def inputs(num_tokens: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(num_tokens, num_columns + 24, device=device).to(dtype)[:, 8:-16]


def _bias(num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(num_rows, device=device).to(dtype)


def fp8_case(
    shape: tuple[int, int, int],
    tile: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    with_bias: bool = False,
    quantizes_inputs: bool = False,
) -> Case:
    """shape: T, N, K. Numbers of all sizes, subnormal ones and both signs included."""
    num_tokens, num_rows, num_columns = shape
    sizes = torch.exp2(torch.empty(num_rows, num_columns, device=device).uniform_(-12, 8.8))
    codes = (sizes * torch.randn_like(sizes).sign()).clamp(-448, 448).to(torch.float8_e4m3fn)
    rows, columns = tile
    height, width = -(-num_rows // rows), -(-num_columns // columns)
    scales = torch.rand(height, width, device=device).add_(0.1).mul_(num_columns**-0.5 / 100)
    spread = scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    weight = LinearWeight(
        codes,
        _bias(num_rows, dtype, device) if with_bias else None,
        WeightFormat.FP8,
        Scales(
            values=scales, rows=rows, columns=columns, dtype=dtype,
            quantizes_inputs=quantizes_inputs,
        ),
    )  # fmt: skip
    exact = codes.float().double() * spread[:num_rows, :num_columns]
    return Case(x=inputs(num_tokens, num_columns, dtype, device), weight=weight, exact=exact)


def int4_case(
    shape: tuple[int, int, int],
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_zeros: bool = True,
    with_bias: bool = False,
    has_order: bool = False,
) -> Case:
    """shape: T, N, K. Every number and every zero point occurs; scales are float16's."""
    num_tokens, num_rows, num_columns = shape
    numbers = torch.randint(16, (num_rows, num_columns), dtype=torch.uint8, device=device)
    num_groups = num_columns // group
    zeros = torch.randint(16, (num_rows, num_groups), dtype=torch.uint8, device=device)
    scales = torch.rand(num_rows, num_groups, device=device).add_(0.1).half().float()
    scales = (scales * num_columns**-0.5 / 8).half().float()
    middle = zeros.double().repeat_interleave(group, 1) if has_zeros else 8.0
    exact = (numbers.double() - middle) * scales.double().repeat_interleave(group, 1)
    half = choose_half(num_columns, group)
    order = torch.randperm(num_columns, device=device) if has_order else None
    if order is not None:
        exact = torch.empty_like(exact).index_copy_(1, order, exact)
    weight = LinearWeight(
        pack_int4(numbers, half),
        _bias(num_rows, dtype, device) if with_bias else None,
        WeightFormat.INT4,
        Scales(
            values=scales, rows=1, columns=group, dtype=dtype, quantizes_inputs=False,
            zeros=zeros if has_zeros else None, half=half, order=order,
        ),
    )  # fmt: skip
    return Case(x=inputs(num_tokens, num_columns, dtype, device), weight=weight, exact=exact)


def fp4_case(
    shape: tuple[int, int, int],
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    with_bias: bool = False,
    has_large: bool = False,
) -> Case:
    """shape: T, N, K; group: 32 = MXFP4, 16 = NVFP4. Every number occurs, scales of all kinds.

    has_large: whether one scale of MXFP4 is more than 2.
    """
    num_tokens, num_rows, num_columns = shape
    numbers = torch.randint(16, (num_rows, num_columns), dtype=torch.uint8, device=device)
    scale_shape = (num_rows, num_columns // group)
    factors = None
    if group == 32:
        exponents = torch.randint(116, 125, scale_shape, device=device)
        exponents -= num_columns.bit_length() // 2
        if has_large:
            exponents[0, 0] = 129
        values = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    else:
        sizes = torch.exp2(torch.empty(scale_shape, device=device).uniform_(-9, 8.7))
        values = sizes.to(torch.float8_e4m3fn)  # subnormal ones too
        factors = torch.rand(num_rows, device=device).add_(0.5).mul_(num_columns**-0.5 / 400)
    half = choose_half(num_columns, group)
    exact = e2m1_values(numbers).double() * values.float().double().repeat_interleave(group, 1)
    if factors is not None:
        exact *= factors.double()[:, None]
    weight = LinearWeight(
        pack_int4(numbers, half),
        _bias(num_rows, dtype, device) if with_bias else None,
        WeightFormat.FP4,
        Scales(
            values=values, rows=1, columns=group, dtype=dtype, quantizes_inputs=False, half=half,
            is_e2m1=True, factors=factors,
        ),
    )  # fmt: skip
    return Case(x=inputs(num_tokens, num_columns, dtype, device), weight=weight, exact=exact)

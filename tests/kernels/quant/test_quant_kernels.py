"""Kernels of quantised weights, against float64 of the same quantised numbers."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.build_linear import build_gated, build_linear
from engine.layers.linear import LinearWeight, WeightFormat
from engine.layers.quantized_weight import Scales, dequantize
from kernels.ops import Ops
from kernels.quant.int4 import pack_int4, unpack_int4
from kernels.quant.sizes import choose_half
from kernels.reference import TorchOps
from tests.harness.gpus import gpu
from tests.kernels.interpreter import run_interpreted
from tests.kernels.linear.linear_cases import (
    CPU,
    GPU,
    assert_near,
    exact_gated,
    exact_product,
    poison,
)
from tests.kernels.quant.quant_cases import Case, fp4_case, fp8_case, int4_case

MODULE = "tests.kernels.quant.test_quant_kernels"


def test_packed_numbers_are_taken_apart_again() -> None:
    for num_columns, group, half in (
        (256, 128, 64),
        (192, 64, 32),
        (96, 96, 16),
        (64, 32, 32),
        (192, 96, 16),
        (256, 64, 64),
    ):
        assert choose_half(num_columns, group) == half
        numbers = torch.randint(16, (7, num_columns), dtype=torch.uint8)
        assert torch.equal(unpack_int4(pack_int4(numbers, half), half), numbers)


def test_a_weight_is_dequantised_by_its_formula() -> None:
    for case in (
        fp8_case((1, 80, 96), (32, 64), torch.float32, CPU),
        fp8_case((1, 33, 50), (1, 50), torch.float32, CPU),
        int4_case((1, 48, 192), 64, torch.float32, CPU, has_order=True),
        int4_case((1, 48, 64), 32, torch.float32, CPU, has_zeros=False),
        fp4_case((1, 48, 192), 32, torch.float32, CPU),
        fp4_case((1, 33, 64), 16, torch.float32, CPU),
    ):
        assert case.weight.scales is not None
        assert torch.equal(dequantize(case.weight.data, case.weight.scales), case.exact.float())


# ---- on a CPU ------------------------------------------------------------------------------------


def _check(ours: Tensor, case: Case, *, gated: bool = False) -> None:
    bias = case.weight.bias
    exact = exact_gated if gated else exact_product
    assert_near(ours, exact(case.x, case.exact, bias), case.x.dtype)


def check_fp8_interpreted() -> None:
    from engine.layers.quantized_operands import fp8_operand
    from kernels.linear.small import tile_counters
    from kernels.quant.fp8_linear import QuantConfig, fp8_linear

    counters = tile_counters(CPU)
    plain, parts = QuantConfig(block_m=16), QuantConfig(block_m=16, block_k=32, split_k=3)
    tiles = QuantConfig(block_m=16, block_n=64, block_k=64)
    for shape, tile, dtype, cut in (
        ((1, 80, 256), (128, 128), torch.float32, plain),  # one tile of rows, cut short
        ((5, 96, 160), (1, 160), torch.float32, parts),  # a scale a row
        ((19, 80, 112), (32, 32), torch.float16, tiles),  # two tiles of tokens, columns cut short
        ((3, 64, 208), (64, 128), torch.float32, None),
    ):
        for gated in (False, True):
            case = fp8_case(shape, tile, dtype, CPU, with_bias=gated)
            assert case.weight.scales is not None
            operand = fp8_operand(case.weight, case.weight.scales)
            _check(fp8_linear(case.x, operand, counters, cut, gated=gated), case, gated=gated)
            assert not counters.any(), "a call left its counts behind"


def check_int4_interpreted() -> None:
    from engine.layers.quantized_operands import four_bit_operand
    from kernels.linear.small import tile_counters
    from kernels.quant.fp8_linear import QuantConfig
    from kernels.quant.int4_linear import int4_linear

    counters = tile_counters(CPU)
    plain, parts = QuantConfig(block_m=16), QuantConfig(block_m=16, split_k=2)
    for shape, group, has_zeros, dtype, cut in (
        ((1, 80, 256), 128, True, torch.float32, plain),
        ((5, 96, 192), 64, True, torch.float16, parts),  # three runs in two parts
        ((19, 80, 128), 32, False, torch.float32, plain),  # two tiles of tokens
        ((3, 64, 96), 96, True, torch.float32, None),  # one group
        ((2, 64, 192), 96, True, torch.float32, None),  # groups of no power of two
    ):
        for gated in (False, True):
            case = int4_case(shape, group, dtype, CPU, has_zeros=has_zeros, with_bias=gated)
            assert case.weight.scales is not None
            operand = four_bit_operand(case.weight, case.weight.scales)
            _check(int4_linear(case.x, operand, counters, cut, gated=gated), case, gated=gated)
            assert not counters.any(), "a call left its counts behind"


def check_fp4_interpreted() -> None:
    from engine.layers.quantized_operands import four_bit_operand
    from kernels.linear.small import tile_counters
    from kernels.quant.fp8_linear import QuantConfig
    from kernels.quant.int4_linear import int4_linear
    from kernels.quant.to_matrix import int4_matrix

    counters = tile_counters(CPU)
    plain, parts = QuantConfig(block_m=16), QuantConfig(block_m=16, split_k=2)
    for shape, group, dtype, cut, gated in (
        ((1, 80, 128), 32, torch.float32, plain, True),
        ((5, 64, 96), 16, torch.float16, parts, False),  # three runs in two parts
        ((3, 64, 96), 32, torch.float32, None, False),  # runs of two halves of a group
        ((3, 64, 32), 32, torch.float32, None, True),  # one group
    ):
        case = fp4_case(shape, group, dtype, CPU, with_bias=gated)
        assert case.weight.scales is not None
        operand = four_bit_operand(case.weight, case.weight.scales)
        _check(int4_linear(case.x, operand, counters, cut, gated=gated), case, gated=gated)
        matrix = dequantize(case.weight.data, case.weight.scales)
        assert torch.equal(int4_matrix(operand, dtype), matrix)
        assert not counters.any(), "a call left its counts behind"


def check_rounding_interpreted() -> None:
    from kernels.quant.coded_tokens import InputForm, decoded, reference
    from kernels.quant.token_groups import code_tokens

    for num_tokens, num_columns, group in ((3, 384, 128), (5, 200, 200), (1, 64, 64)):
        x = torch.randn(num_tokens, num_columns + 24)[:, 8:-16]
        x = x * torch.exp2(torch.randn(num_tokens, 1) * 5)
        x[-1, :128] = 0
        x[0, 5:60] *= 1e-4  # subnormal numbers
        x = x.bfloat16().float()
        for pieces in (1, 2):
            form = InputForm(pieces=pieces, group=group)
            ours, theirs = code_tokens(x, form), reference(x, form)
            assert torch.equal(ours.codes.float(), theirs.codes.float())
            assert torch.equal(ours.scales, theirs.scales)
        off, sizes = decoded(ours) - x, x.abs().view(num_tokens, -1, group)
        largest = sizes.amax(2, keepdim=True)
        off = off.abs().view_as(sizes)
        assert not off[sizes >= largest * 2**-13].any(), "two pieces are all of a bfloat16"
        assert (off <= largest * 2**-18).all()


def check_rounding_gated_interpreted() -> None:
    """Rounding on the way, and products of it, are those of the gate's own result."""
    from engine.layers.quantized_cuda import Fp8Blocks, Fp8Rows
    from engine.layers.quantized_operands import fp8_operand
    from kernels.quant.token_groups import code_tokens, quantize_tokens
    from kernels.silu_mul import silu_mul

    for dtype in (torch.float32, torch.float16):
        for num_tokens, num_columns, group in ((3, 384, 128), (5, 200, 200)):
            gate_up = torch.randn(num_tokens, 2 * num_columns + 24)[:, 8:-16].to(dtype) * 3
            gate_up[-1, :64] = 0
            fused = quantize_tokens(gate_up, group, gated=True)
            apart = quantize_tokens(silu_mul(gate_up), group)
            assert torch.equal(fused[0].float(), apart[0].float())
            assert torch.equal(fused[1], apart[1])
    for kind, tile in ((Fp8Blocks, (64, 128)), (Fp8Rows, (1, 256))):
        weight = fp8_case((1, 96, 256), tile, torch.float32, CPU, with_bias=True).weight
        assert weight.scales is not None
        product = kind(fp8_operand(weight, weight.scales), torch.float32)
        gate_up = torch.randn(70, 512)
        ours = product.of_rounded(code_tokens(gate_up, product.many_form, gated=True))
        assert torch.equal(ours, product.many(silu_mul(gate_up)))


def check_blocks_interpreted() -> None:
    from engine.layers.quantized_operands import fp8_operand
    from kernels.quant.fp8_blocks import BlocksConfig, fp8_blocks, reference
    from kernels.quant.token_groups import quantize_tokens

    cut = BlocksConfig(block_m=16, block_n=32, group_m=2)
    for shape in ((37, 80, 256), (16, 128, 208)):
        case = fp8_case(shape, (64, 128), torch.float32, CPU, with_bias=True)
        assert case.weight.scales is not None
        operand = fp8_operand(case.weight, case.weight.scales)
        codes, scales = quantize_tokens(case.x, 128)
        ours = fp8_blocks(codes, scales, operand, torch.float32, cut)
        assert_near(ours, reference(codes, scales, operand), torch.float32)
        _near_rounded(ours, case)


def check_matrix_interpreted() -> None:
    from engine.layers.quantized_operands import four_bit_operand, fp8_operand
    from kernels.quant.to_matrix import fp8_matrix, int4_matrix

    for tile in ((32, 64), (1, 144)):
        weight = fp8_case((1, 80, 144), tile, torch.float16, CPU).weight
        assert weight.scales is not None
        ours = fp8_matrix(fp8_operand(weight, weight.scales), torch.float16)
        assert torch.equal(ours, dequantize(weight.data, weight.scales))
    for group, has_zeros in ((64, True), (192, False)):
        weight = int4_case((1, 80, 192), group, torch.float16, CPU, has_zeros=has_zeros).weight
        assert weight.scales is not None
        ours = int4_matrix(four_bit_operand(weight, weight.scales), torch.float16)
        assert torch.equal(ours, dequantize(weight.data, weight.scales))


def check_layers_interpreted() -> None:
    """Which product is taken by the number of tokens, and the order of inputs."""
    from engine.layers.quantized_cuda import Fp8Blocks, Fp8Rows, QuantizedLinear
    from engine.layers.quantized_operands import fp8_operand

    for num_tokens in (5, 515):
        for case in (
            fp8_case((num_tokens, 96, 64), (32, 32), torch.float16, CPU, with_bias=True),
            int4_case((num_tokens, 96, 64), 32, torch.float16, CPU, has_order=True),
        ):
            for ops in (None, OPS):
                linear = QuantizedLinear(case.weight, ops)
                _check(linear(case.x), case, gated=ops is not None)
    case = int4_case((70, 64, 128), 64, torch.float16, CPU, has_order=True)
    linear = QuantizedLinear(case.weight, is_deterministic=True)
    whole = linear(case.x)
    _check(whole, case)
    for start, end in ((0, 1), (3, 20), (60, 70)):
        assert torch.equal(linear(case.x[start:end]), whole[start:end])
    for kind, tile in ((Fp8Blocks, (64, 128)), (Fp8Rows, (1, 256))):
        case = fp8_case((70, 96, 256), tile, torch.float32, CPU, with_bias=True)
        assert case.weight.scales is not None
        product = kind(fp8_operand(case.weight, case.weight.scales), torch.float32)
        _near_rounded(product.many(case.x), case)


def _near_rounded(ours: Tensor, case: Case) -> None:
    """Three bits of inputs: 1.8 % of a normal number's size on average, 2.5 % of a sum of many."""
    exact = exact_product(case.x, case.exact, case.weight.bias)
    error = float((ours.double() - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.035, f"off by {error}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fp8", "int4", "fp4", "rounding", "rounding_gated", "blocks", "matrix", "layers"]
)
def test_interpreted_kernels_are_their_formula(name: str) -> None:
    run_interpreted(f"{MODULE}:check_{name}_interpreted")


# ---- on a GPU ------------------------------------------------------------------------------------

# Odd token counts in every bucket and in several tiles; rows that are and are not whole tiles.
SHAPES = [(1, 4096, 4096), (3, 6144, 4096), (16, 4096, 12288), (17, 1040, 4096), (33, 272, 768)]
SHAPES += [(64, 24576, 4096), (65, 1024, 512), (200, 4096, 4096), (777, 2064, 1024)]
OPS = cast("Ops", TorchOps())


def _built(case: Case, *, gated: bool, is_deterministic: bool = False) -> Callable[..., Tensor]:
    if gated:
        return build_gated(case.weight, OPS, is_deterministic=is_deterministic)
    return build_linear(case.weight, is_deterministic=is_deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tile", [(128, 128), (1, None), (64, 32)])
def test_fp8_weights_are_multiplied_as_in_float64(
    tile: tuple[int, int | None], gated: bool, dtype: torch.dtype
) -> None:
    for index, shape in enumerate(SHAPES):
        case = fp8_case(shape, (tile[0], tile[1] or shape[2]), dtype, GPU, with_bias=index % 2 == 0)
        for is_deterministic in (False, True):
            product = _built(case, gated=gated, is_deterministic=is_deterministic)
            poison(2 * shape[0] * shape[1])
            _check(product(case.x), case, gated=gated)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("group", "has_zeros"), [(128, True), (64, False), (32, True), (None, True)]
)
def test_int4_weights_are_multiplied_as_in_float64(
    group: int | None, has_zeros: bool, gated: bool, dtype: torch.dtype
) -> None:
    for index, shape in enumerate(SHAPES):
        case = int4_case(
            shape, group or shape[2], dtype, GPU, has_zeros=has_zeros, with_bias=index % 2 == 0,
            has_order=index % 3 == 0,
        )  # fmt: skip
        for is_deterministic in (False, True):
            product = _built(case, gated=gated, is_deterministic=is_deterministic)
            poison(2 * shape[0] * shape[1])
            _check(product(case.x), case, gated=gated)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("group", [16, 32])
def test_fp4_weights_are_multiplied_as_in_float64(
    group: int, gated: bool, dtype: torch.dtype
) -> None:
    for index, shape in enumerate(SHAPES):
        case = fp4_case(
            shape, group, dtype, GPU, with_bias=index % 2 == 0, has_large=index % 3 == 0
        )
        for is_deterministic in (False, True):
            product = _built(case, gated=gated, is_deterministic=is_deterministic)
            poison(2 * shape[0] * shape[1])
            _check(product(case.x), case, gated=gated)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(128, 128), (1, None)])
def test_inputs_of_many_tokens_are_rounded_with_fp8_weights(tile: tuple[int, int | None]) -> None:
    for num_tokens in (65, 128, 333, 1024):
        for num_rows, num_columns in ((4096, 4096), (6144, 4096), (4096, 12288), (1024, 512)):
            shape = (num_tokens, num_rows, num_columns)
            case = fp8_case(
                shape, (tile[0], tile[1] or num_columns), torch.bfloat16, GPU, with_bias=True,
                quantizes_inputs=True,
            )  # fmt: skip
            poison(2 * num_tokens * num_rows)
            _near_rounded(build_linear(case.weight)(case.x), case)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(128, 128), (1, None)])
def test_rounding_in_the_gate_changes_no_bit(tile: tuple[int, int | None]) -> None:
    """Of many tokens; of 17 to 64 its groups are smaller, and of fewer nothing is rounded."""
    from engine.layers.mlp import GatedMlp, build_mlp
    from engine.layers.quantized_cuda import CodedMlp
    from kernels.fused import TritonOps

    def made(num_rows: int, num_columns: int) -> LinearWeight:
        return fp8_case(
            (1, num_rows, num_columns), (tile[0], tile[1] or num_columns), torch.bfloat16, GPU,
            quantizes_inputs=True,
        ).weight  # fmt: skip

    up, down, ops = made(2 * 1536, 1024), made(1024, 1536), TritonOps()
    fused = build_mlp(up, down, ops)
    assert isinstance(fused, CodedMlp)
    apart = GatedMlp(gated=build_gated(up, ops), down=build_linear(down))
    for num_tokens in (1, 16, 65, 333, 1024):
        x = torch.randn(num_tokens, 1024, device=GPU, dtype=torch.bfloat16)
        assert torch.equal(fused(x), apart(x))
    fixed = build_mlp(up, down, ops, is_deterministic=True)
    assert isinstance(fixed, GatedMlp), "nothing is rounded in deterministic mode"


@pytest.mark.gpu
def test_sums_of_rows_of_fp8_lose_less_than_rounding_does() -> None:
    """The matrix units' own sums, which have fewer bits than fp32, are taken where faster."""
    from engine.layers.quantized_cuda import Fp8Rows, QuantizedLinear
    from kernels.quant.coded_tokens import decoded
    from kernels.quant.token_groups import code_tokens

    for shape in ((17, 4096, 4096), (64, 6144, 4096), (300, 4096, 12288)):
        case = fp8_case(shape, (1, shape[2]), torch.bfloat16, GPU, quantizes_inputs=True)
        linear = build_linear(case.weight)
        assert isinstance(linear, QuantizedLinear)
        assert isinstance(linear.product, Fp8Rows)
        coded = code_tokens(case.x, linear.product.many_form)
        exact = decoded(coded) @ case.exact.double().T
        ours = linear.product.of_rounded(coded)
        error = float((ours.double() - exact).norm() / exact.norm())
        assert error < 0.013, f"{shape}: off by {error}, half of what rounding costs"


@pytest.mark.gpu
def test_blocks_of_fp8_are_summed_in_fp32() -> None:
    from engine.layers.quantized_operands import fp8_operand
    from kernels.quant.fp8_blocks import fp8_blocks, reference
    from kernels.quant.token_groups import quantize_tokens

    for shape in ((65, 4096, 4096), (300, 1040, 12288), (128, 24576, 4096)):
        case = fp8_case(shape, (128, 128), torch.bfloat16, GPU, with_bias=True)
        assert case.weight.scales is not None
        operand = fp8_operand(case.weight, case.weight.scales)
        codes, scales = quantize_tokens(case.x, 128)
        ours = fp8_blocks(codes, scales, operand, torch.bfloat16)
        assert_near(ours, reference(codes, scales, operand), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    from kernels.quant.coded_tokens import InputForm, reference
    from kernels.quant.token_groups import quantize_tokens

    for num_tokens, num_columns, group in ((1, 4096, 128), (77, 12288, 128), (9, 12288, 12288)):
        x = torch.randn(num_tokens, num_columns + 24, device=GPU)[:, 8:-16]
        x = (x * torch.exp2(torch.randn(num_tokens, 1, device=GPU) * 2)).to(dtype)
        codes, scales = quantize_tokens(x, group)
        exact = reference(x, InputForm(pieces=1, group=group))
        torch.testing.assert_close(scales, exact.scales, rtol=5e-7, atol=0)
        # A division that is rounded otherwise may end on the other side of a tie.
        differ = (codes.float() != exact.codes[0].float()).float().mean()
        assert differ < 1e-4, f"{differ:.2%} of the numbers differ"


@pytest.mark.gpu
def test_a_decoded_matrix_is_equal_in_every_bit() -> None:
    from engine.layers.quantized_operands import four_bit_operand, fp8_operand
    from kernels.quant.to_matrix import fp8_matrix, int4_matrix

    for dtype in (torch.bfloat16, torch.float16):
        for tile in ((128, 128), (1, 4112)):
            weight = fp8_case((1, 1040, 4112), tile, dtype, GPU).weight
            assert weight.scales is not None
            ours = fp8_matrix(fp8_operand(weight, weight.scales), dtype)
            assert torch.equal(ours, dequantize(weight.data, weight.scales))
        for group in (32, 128, 4096):
            weight = int4_case((1, 1040, 4096), group, dtype, GPU).weight
            assert weight.scales is not None
            ours = int4_matrix(four_bit_operand(weight, weight.scales), dtype)
            assert torch.equal(ours, dequantize(weight.data, weight.scales))
        for group in (16, 32):
            weight = fp4_case((1, 1040, 4096), group, dtype, GPU).weight
            assert weight.scales is not None
            ours = int4_matrix(four_bit_operand(weight, weight.scales), dtype)
            assert torch.equal(ours, dequantize(weight.data, weight.scales))


def _cases(num_tokens: int) -> list[Case]:
    shape = (num_tokens, 6144, 4096)
    return [
        fp8_case(shape, (128, 128), torch.bfloat16, GPU, quantizes_inputs=True),
        fp8_case(shape, (1, 4096), torch.bfloat16, GPU, quantizes_inputs=True),
        int4_case(shape, 128, torch.bfloat16, GPU),
        fp4_case(shape, 16, torch.bfloat16, GPU),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
def test_in_deterministic_mode_a_token_has_the_same_bits_in_any_batch(gated: bool) -> None:
    for case in _cases(1500):
        product = _built(case, gated=gated, is_deterministic=True)
        whole = product(case.x)
        for start, end in ((0, 1), (5, 22), (100, 163), (77, 334), (700, 1500)):
            assert torch.equal(product(case.x[start:end]), whole[start:end])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 128, 600])
def test_quantised_products_in_a_graph_wait_for_each_other(num_tokens: int) -> None:
    """Each product starts before its input is there; a missing wait would read old values."""
    for case, back in zip(_cases(num_tokens), _back(num_tokens), strict=True):
        gated, down = _built(case, gated=True), _built(back, gated=False)
        x = case.x.contiguous()

        def chain(gated=gated, down=down, x=x) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: ANN001
            y = x
            for _ in range(3):
                y = down(gated(y)) * 8
            return y

        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain()
        for _ in range(5):
            x.normal_()
            captured.fill_(torch.nan)
            graph.replay()
            assert torch.equal(captured, chain())


def _back(num_tokens: int) -> list[Case]:
    """Weights from the outputs of gated ones of 6144 rows to their inputs."""
    shape = (num_tokens, 4096, 3072)
    return [
        fp8_case(shape, (128, 128), torch.bfloat16, GPU, quantizes_inputs=True),
        fp8_case(shape, (1, 3072), torch.bfloat16, GPU, quantizes_inputs=True),
        int4_case(shape, 128, torch.bfloat16, GPU),
        fp4_case(shape, 16, torch.bfloat16, GPU),
    ]


@pytest.mark.gpu
def test_what_no_kernel_reads_is_refused_by_its_sizes() -> None:
    with pytest.raises(ConfigError, match="40 outputs and 64 inputs"):
        build_linear(fp8_case((1, 40, 64), (1, 64), torch.bfloat16, GPU).weight)
    with pytest.raises(ConfigError, match="float32"):
        build_linear(fp8_case((1, 48, 64), (1, 64), torch.float32, GPU).weight)
    scales = Scales(
        values=torch.rand(48, 2, device=GPU), rows=1, columns=64, dtype=torch.bfloat16, half=64,
        quantizes_inputs=False, zeros=torch.full((48, 2), 3, dtype=torch.uint8, device=GPU),
    )  # fmt: skip
    data = torch.zeros(48, 64, dtype=torch.uint8, device=GPU)
    with pytest.raises(ConfigError, match="scales in float32"):
        build_linear(LinearWeight(data, None, WeightFormat.INT4, scales))
    damaged = fp8_case((1, 48, 64), (1, 64), torch.bfloat16, GPU).weight
    damaged.data.view(torch.uint8)[47, 63] = 0xFF
    with pytest.raises(ConfigError, match="NaN"):
        build_linear(damaged)


# ---- compiled for GPUs that are not here ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A100 40GB", "L4", "H200"])
def test_kernels_compile_within_the_shared_memory(name: str) -> None:
    from kernels.linear.small import tile_counters
    from kernels.quant import fp8_linear, int4_linear
    from kernels.quant.steps import Codes
    from tests.kernels.cross_compile import compiled_for

    device = gpu(name)
    counters = tile_counters(CPU)
    codes = torch.empty(6144, 4096, dtype=torch.float8_e4m3fn)
    fp8 = fp8_linear.Fp8Operand(
        codes=codes, scales=torch.empty(48, 32), tile_rows=128, tile_columns=128
    )
    int4 = int4_linear.FourBitOperand(
        packed=torch.empty(6144, 2048, dtype=torch.uint8),
        scales=torch.empty(6144, 32, dtype=torch.int32),
        half=64, group=128, codes=Codes.INT4_ZEROS,
    )  # fmt: skip
    four_bits = [int4]
    for codes, group in ((Codes.MXFP4, 32), (Codes.MXFP4_SMALL, 32), (Codes.NVFP4, 16)):
        scales = torch.empty(6144, 4096 // group, dtype=torch.uint8)
        factors = torch.empty(6144) if codes is Codes.NVFP4 else None
        four_bits.append(
            replace(int4, codes=codes, scales=scales, half=group, group=group, factors=factors)
        )
    with compiled_for(device, fp8_linear, int4_linear) as found:
        for num_tokens in (1, 64, 200):
            x = torch.empty(num_tokens, 4096, dtype=torch.bfloat16)
            fp8_linear.fp8_linear(x, fp8, counters)
            for operand in four_bits:
                int4_linear.int4_linear(x, operand, counters)
    assert set(found) == {"_fp8_linear_kernel", "_int4_linear_kernel"}
    assert max(found.values()) <= device.shared_memory_per_block_bytes


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int4 rows", "int4 groups", "fp8 rows"])
def test_no_step_decodes_too_early_and_no_sum_depends_on_a_place(form: str) -> None:
    """A product in flight at the end of a step would read what the next step decodes.

    Of two products that are added, a compiler fuses either, and not the same for every token.
    """
    from kernels.linear.small import tile_counters
    from kernels.quant import fp8_linear, int4_linear
    from kernels.quant.steps import Codes
    from tests.kernels.cross_compile import compiled_for

    kept: list[Any] = []
    x = torch.empty(64, 512, dtype=torch.bfloat16)
    group = 32 if form == "int4 groups" else 512
    with compiled_for(gpu("H200"), fp8_linear, int4_linear, kept=kept):
        if form == "fp8 rows":
            codes = torch.empty(512, 512, dtype=torch.float8_e4m3fn)
            fp8 = fp8_linear.Fp8Operand(
                codes=codes, scales=torch.empty(512, 1), tile_rows=1, tile_columns=group
            )
            fp8_linear.fp8_linear(x, fp8, tile_counters(CPU), fp8_linear.INVARIANT)
        else:
            int4 = int4_linear.FourBitOperand(
                packed=torch.empty(512, 256, dtype=torch.uint8),
                scales=torch.empty(512, 512 // group, dtype=torch.int32),
                half=choose_half(512, group), group=group, codes=Codes.INT4_ZEROS,
            )  # fmt: skip
            int4_linear.int4_linear(x, int4, tile_counters(CPU), fp8_linear.INVARIANT)
    code = kept[0].asm["ttgir"]
    products = re.findall(r"(%\w+) = ttng\.warp_group_dot .*: tensor<.*#ttg\.dot_op", code)
    assert products, "no product with its left operand in registers"
    pending = re.findall(r"(%\w+):?\d* = ttng\.warp_group_dot_wait .*pendings = [1-9]", code)
    for yielded in re.findall(r"scf\.yield ([^:]*) :", code):
        names = {name.partition("#")[0] for name in yielded.split(", ")}
        assert not names & {*products, *pending}, f"in flight: {names & {*products, *pending}}"
    ptx = kept[0].asm["ptx"]
    added = re.findall(r"fma\.rn\.f32\s+%r\d+, %r\d+, %r\d+, (%r\d+);", ptx)
    assert added, "no scale is applied"
    assert not {*added} & {*re.findall(r"mul(?:\.rn)?\.f32\s+(%r\d+),", ptx)}

"""Products of FP8 weights with pieces and groups of the inputs side by side."""

from typing import Any

import pytest
import torch

from kernels.quant.coded_tokens import CodedTokens, InputForm, decoded
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
from tests.kernels.quant.quant_cases import Case, fp8_case, int4_case

MODULE = "tests.kernels.quant.test_joined"
# Of a sum in fp32 from matrix units that add 128 products in fewer bits.
MAX_SUM_ERROR = 1e-3


def _operand(case: Case) -> Any:
    from engine.layers.quantized_cuda import _fp8_operand

    assert case.weight.scales is not None
    return _fp8_operand(case.weight, case.weight.scales)


# ---- on a CPU ------------------------------------------------------------------------------------


def check_products_interpreted() -> None:
    """Parts of columns, groups within a step and of several steps, tiles; columns cut short."""
    from kernels.linear.small import tile_counters
    from kernels.quant.fp8_joined import fp8_joined_gate, fp8_joined_linear
    from kernels.quant.fp8_linear import QuantConfig
    from kernels.quant.token_groups import code_tokens

    counters = tile_counters(CPU)
    plain = QuantConfig(block_m=8, block_n=64)
    parts = QuantConfig(block_m=8, block_n=64, block_k=64, split_k=3)
    for shape, tile, group, cut in (
        ((1, 80, 256), (128, 128), 256, None),
        ((1, 64, 256), (1, 256), 32, None),  # four groups a step
        ((5, 96, 160), (1, 160), 160, parts),
        ((5, 128, 192), (32, 64), 64, plain),
        ((7, 64, 208), (64, 128), 208, plain),
        ((2, 64, 384), (32, 192), 384, plain),  # tiles that no power of two divides
        ((7, 64, 256), (1, 256), 32, parts),
        ((3, 64, 256), (64, 128), 32, plain),
    ):
        for gated in (False, True):
            case = fp8_case(shape, tile, torch.float32, CPU, with_bias=gated)
            x, operand = case.x.bfloat16().float(), _operand(case)
            coded = code_tokens(x, InputForm(pieces=2, group=group))
            rounded = code_tokens(x, InputForm(pieces=1, group=group))
            exact = exact_gated if gated else exact_product
            for given, meant in (
                (coded, x),
                (x.contiguous(), x),
                (rounded, decoded(rounded).float()),
            ):
                ours = fp8_joined_linear(given, operand, torch.float32, counters, cut, gated=gated)
                assert_near(ours, exact(meant, case.exact, case.weight.bias), torch.float32)
            assert not counters.any(), "a call left its counts behind"
        if cut is not None and shape[1] % cut.block_n == 0:
            # Pieces have nine bits, e4m3 has four.
            for given, meant, limit in ((coded, x, 1.5e-3), (rounded, decoded(rounded), 0.04)):
                gate = fp8_joined_gate(given, operand, counters, cut)
                assert gate.group == cut.block_n // 2
                assert gate.is_rounded == given.is_rounded
                wanted = exact_gated(meant, case.exact, case.weight.bias)
                error = float((decoded(gate) - wanted).norm() / wanted.norm())
                assert error < limit, f"off by {error}"
            assert not counters.any(), "a call left its counts behind"


def check_int4_interpreted() -> None:
    """Zero points and none, groups of one run and of all, parts of columns, the last one short."""
    from engine.layers.quantized_cuda import _four_bit_operand
    from kernels.linear.small import tile_counters
    from kernels.quant.fp8_linear import QuantConfig
    from kernels.quant.int4_joined import int4_joined_linear
    from kernels.quant.token_groups import code_tokens

    counters = tile_counters(CPU)
    parts = QuantConfig(block_m=8, block_n=64, split_k=2)
    for shape, group, has_zeros, cut in (
        ((1, 80, 256), 128, True, None),
        ((5, 64, 384), 384, False, parts),
        ((7, 96, 384), 128, True, parts),
    ):
        for gated in (False, True):
            case = int4_case(shape, group, torch.float32, CPU, has_zeros=has_zeros, with_bias=gated)
            assert case.weight.scales is not None
            operand = _four_bit_operand(case.weight, case.weight.scales)
            x = case.x.bfloat16().float()
            coded = code_tokens(x, InputForm(pieces=2, group=shape[2]))
            ours = int4_joined_linear(coded, operand, torch.float32, counters, cut, gated=gated)
            exact = exact_gated if gated else exact_product
            assert_near(ours, exact(x, case.exact, case.weight.bias), torch.float32)
        assert not counters.any(), "a call left its counts behind"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["products", "int4"])
def test_interpreted_kernels_are_their_formula(name: str) -> None:
    run_interpreted(f"{MODULE}:check_{name}_interpreted")


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 16, 64])
def test_weights_meet_the_units_of_fp8(num_tokens: int) -> None:
    """Both pieces in each product; bytes of four bits are read as e4m3."""
    from kernels.linear.small import tile_counters
    from kernels.quant import fp8_joined, int4_joined
    from kernels.quant.fp8_linear import Fp8Operand
    from kernels.quant.int4_linear import FourBitOperand
    from kernels.quant.steps import Codes
    from tests.kernels.cross_compile import compiled_for

    kept: list[Any] = []
    device, counters = gpu("H200"), tile_counters(CPU)
    x = CodedTokens(
        codes=torch.empty(2, num_tokens, 4096, dtype=torch.float8_e4m3fn),
        scales=torch.empty(1, num_tokens), group=4096,
    )  # fmt: skip
    with compiled_for(device, fp8_joined, int4_joined, kept=kept) as found:
        fp8 = Fp8Operand(
            codes=torch.empty(24576, 4096, dtype=torch.float8_e4m3fn),
            scales=torch.empty(24576, 1), tile_rows=1, tile_columns=4096,
        )  # fmt: skip
        fp8_joined.fp8_joined_gate(x, fp8, counters)
        int4 = FourBitOperand(
            packed=torch.empty(4096, 2048, dtype=torch.uint8),
            scales=torch.empty(4096, 32, dtype=torch.int32), half=64, group=128, codes=Codes.INT4,
        )  # fmt: skip
        int4_joined.int4_joined_linear(x, int4, torch.bfloat16, counters)
    assert max(found.values()) <= device.shared_memory_per_block_bytes
    for made in kept:
        products = [line for line in made.asm["ptx"].splitlines() if "wgmma.mma_async" in line]
        assert products, "other matrix units than Hopper's"
        assert all(f"n{max(16, 2 * num_tokens)}k32" in line for line in products)
        assert all("e4m3.e4m3" in line for line in products), "a weight is converted"


# ---- on a GPU ------------------------------------------------------------------------------------

SHAPES = [(1, 24576, 4096), (3, 6144, 4096), (16, 4096, 12288), (17, 1040, 4096), (64, 4096, 768)]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(128, 128), (1, None)])
def test_products_are_those_of_the_inputs_as_they_are(tile: tuple[int, int | None]) -> None:
    from kernels.linear.small import tile_counters
    from kernels.quant.fp8_joined import codes_gate, fp8_joined_gate, fp8_joined_linear
    from kernels.quant.token_groups import code_tokens

    counters = tile_counters(GPU)
    for shape in SHAPES:
        tiles = (tile[0], tile[1] or shape[2])
        case = fp8_case(shape, tiles, torch.bfloat16, GPU, with_bias=True)
        operand = _operand(case)
        for group in (shape[2], 32, 64, 128, 0):
            coded = code_tokens(case.x, InputForm(pieces=2, group=group)) if group else case.x
            for gated in (False, True):
                exact = (exact_gated if gated else exact_product)(
                    case.x, case.exact, case.weight.bias
                )
                poison(2 * shape[0] * shape[1])
                ours = fp8_joined_linear(coded, operand, torch.float32, counters, gated=gated)
                error = float((ours.double() - exact).norm() / exact.norm())
                assert error < MAX_SUM_ERROR, f"{shape}, {group}: off by {error}"
            if group and codes_gate(shape[0], operand):
                gate = decoded(fp8_joined_gate(coded, operand, counters))
                assert float((gate - exact).norm() / exact.norm()) < 3e-3
    assert not counters.any(), "a call left its counts behind"


@pytest.mark.gpu
@pytest.mark.parametrize("has_zeros", [False, True])
def test_products_of_integers_are_those_of_the_inputs_as_they_are(has_zeros: bool) -> None:
    from engine.layers.quantized_cuda import _four_bit_operand
    from kernels.linear.small import tile_counters
    from kernels.quant.int4_joined import int4_joined_linear
    from kernels.quant.token_groups import code_tokens

    counters = tile_counters(GPU)
    for shape in SHAPES:
        case = int4_case(shape, 128, torch.bfloat16, GPU, has_zeros=has_zeros, with_bias=True)
        assert case.weight.scales is not None
        operand = _four_bit_operand(case.weight, case.weight.scales)
        coded = code_tokens(case.x, InputForm(pieces=2, group=shape[2]))
        for gated in (False, True):
            exact = (exact_gated if gated else exact_product)(case.x, case.exact, case.weight.bias)
            poison(2 * shape[0] * shape[1])
            ours = int4_joined_linear(coded, operand, torch.float32, counters, gated=gated)
            error = float((ours.double() - exact).norm() / exact.norm())
            assert error < MAX_SUM_ERROR, f"{shape}: off by {error}"
    assert not counters.any(), "a call left its counts behind"

"""Products of integers of four bits with inputs in two FP8 pieces."""

from typing import Any, cast

import pytest
import torch

from engine.layers.linear import form_of
from kernels.ops import Ops
from kernels.quant.coded_tokens import CodedTokens, InputForm
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
from tests.kernels.quant.quant_cases import int4_case

MODULE = "tests.kernels.quant.test_int4_joined"
# Of a sum in fp32 from matrix units that add 128 products in fewer bits.
MAX_SUM_ERROR = 1e-3


# ---- on a CPU ------------------------------------------------------------------------------------


def check_int4_interpreted() -> None:
    """Zero points and none, groups of one run and of all, parts of columns, the last one short."""
    from engine.layers.quantized_operands import four_bit_operand
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
            operand = four_bit_operand(case.weight, case.weight.scales)
            x = case.x.bfloat16().float()
            coded = code_tokens(x, InputForm(pieces=2, group=shape[2]))
            ours = int4_joined_linear(coded, operand, torch.float32, counters, cut, gated=gated)
            exact = exact_gated if gated else exact_product
            assert_near(ours, exact(x, case.exact, case.weight.bias), torch.float32)
        assert not counters.any(), "a call left its counts behind"


def check_layers_interpreted() -> None:
    """Few tokens take it, coded before or not; one token of a small weight needs no pieces."""
    from engine.layers import quantized_cuda
    from engine.layers.quantized_cuda import CodedMlp, QuantizedLinear
    from kernels.quant.token_groups import code_tokens

    patch = pytest.MonkeyPatch()
    patch.setattr(quantized_cuda, "supports_joined", lambda *_: True)
    taken: list[str] = []
    for name in ("int4_joined_linear", "int4_one_token", "int4_linear"):
        product = getattr(quantized_cuda, name)

        def record(*args: Any, name: str = name, product: Any = product, **kwargs: Any) -> Any:
            taken.append(name)
            return product(*args, **kwargs)

        patch.setattr(quantized_cuda, name, record)
    up, down = (int4_case((1, rows, 256), 128, torch.float16, CPU) for rows in (512, 96))
    gated = QuantizedLinear(up.weight, cast("Ops", TorchOps()))
    back = QuantizedLinear(down.weight)
    mlp = CodedMlp(gated, back)
    form = InputForm(pieces=2, group=256)
    assert mlp.form(1) == mlp.form(16) == form
    assert mlp.form(17) is None
    for num_tokens in (1, 9, 17):
        x = torch.randn(num_tokens, 256).bfloat16().half()
        inner = exact_gated(x, up.exact, None)
        exact = exact_product(inner, down.exact, None)
        ways = [mlp(x)] + ([mlp.of_coded(code_tokens(x, form))] if num_tokens < 17 else [])
        for ours in ways:
            assert float((ours.double() - exact).norm() / exact.norm()) < 2e-3
    joined, one, weights = "int4_joined_linear", "int4_one_token", "int4_linear"
    assert taken == [one, one, joined, one, *[joined] * 4, weights, weights]
    fixed = QuantizedLinear(up.weight, is_deterministic=True)
    assert form_of(fixed, 9) is None
    patch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "layers"])
def test_interpreted_kernels_are_their_formula(name: str) -> None:
    run_interpreted(f"{MODULE}:check_{name}_interpreted")


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 16, 64])
def test_weights_meet_the_units_of_fp8(num_tokens: int) -> None:
    """Both pieces in each product; bytes of four bits are read as e4m3."""
    from kernels.linear.small import tile_counters
    from kernels.quant import int4_joined
    from kernels.quant.int4_linear import FourBitOperand
    from kernels.quant.steps import Codes
    from tests.kernels.cross_compile import compiled_for

    kept: list[Any] = []
    device, counters = gpu("H200"), tile_counters(CPU)
    x = CodedTokens(
        codes=torch.empty(2, num_tokens, 4096, dtype=torch.float8_e4m3fn),
        scales=torch.empty(1, num_tokens), group=4096,
    )  # fmt: skip
    with compiled_for(device, int4_joined, kept=kept) as found:
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
@pytest.mark.parametrize("has_zeros", [False, True])
def test_products_of_integers_are_those_of_the_inputs_as_they_are(has_zeros: bool) -> None:
    from engine.layers.quantized_operands import four_bit_operand
    from kernels.linear.small import tile_counters
    from kernels.quant.int4_joined import int4_joined_linear
    from kernels.quant.token_groups import code_tokens

    counters = tile_counters(GPU)
    for shape in SHAPES:
        case = int4_case(shape, 128, torch.bfloat16, GPU, has_zeros=has_zeros, with_bias=True)
        assert case.weight.scales is not None
        operand = four_bit_operand(case.weight, case.weight.scales)
        coded = code_tokens(case.x, InputForm(pieces=2, group=shape[2]))
        for gated in (False, True):
            exact = (exact_gated if gated else exact_product)(case.x, case.exact, case.weight.bias)
            poison(2 * shape[0] * shape[1])
            ours = int4_joined_linear(coded, operand, torch.float32, counters, gated=gated)
            error = float((ours.double() - exact).norm() / exact.norm())
            assert error < MAX_SUM_ERROR, f"{shape}: off by {error}"
    assert not counters.any(), "a call left its counts behind"

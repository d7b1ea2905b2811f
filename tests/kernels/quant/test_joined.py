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
from tests.kernels.quant.quant_cases import Case, fp8_case

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
            gate = fp8_joined_gate(coded, operand, counters, cut)
            assert gate.group == cut.block_n // 2
            wanted = exact_gated(x, case.exact, case.weight.bias)
            error = float((decoded(gate) - wanted).norm() / wanted.norm())
            assert error < 1.5e-3, f"off by {error}: pieces have nine bits"
            assert not counters.any(), "a call left its counts behind"


@pytest.mark.slow
def test_interpreted_kernels_are_their_formula() -> None:
    run_interpreted(f"{MODULE}:check_products_interpreted")

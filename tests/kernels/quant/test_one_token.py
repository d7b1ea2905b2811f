"""Products of one token and FP8 weights, without matrix units."""

import re
from typing import Any

import pytest
import torch

from tests.harness.gpus import gpu
from tests.kernels.interpreter import run_interpreted
from tests.kernels.linear.linear_cases import CPU, GPU, assert_near, exact_gated, exact_product
from tests.kernels.quant.quant_cases import Case, fp8_case

MODULE = "tests.kernels.quant.test_one_token"


def _operand(case: Case) -> Any:
    from engine.layers.quantized_cuda import _fp8_operand

    assert case.weight.scales is not None
    return _fp8_operand(case.weight, case.weight.scales)


def _check(case: Case, cut: Any, *, gated: bool) -> None:
    from kernels.quant.one_token import fp8_one_token

    exact = exact_gated if gated else exact_product
    ours = fp8_one_token(case.x, _operand(case), cut, gated=gated)
    assert_near(ours, exact(case.x, case.exact, case.weight.bias), case.x.dtype)


# ---- on a CPU ------------------------------------------------------------------------------------


def check_products_interpreted() -> None:
    """Rows and columns cut short, a scale a row, scales of tiles that no power of two divides."""
    from kernels.quant.fp8_linear import QuantConfig

    narrow = QuantConfig(block_m=1, block_n=32, block_k=128)
    for rows, columns, tile, dtype, cut in (
        (80, 256, (128, 128), torch.float32, narrow),
        (48, 528, (1, 528), torch.float32, None),
        (48, 384, (32, 192), torch.float16, narrow),
        (64, 208, (16, 48), torch.float32, narrow),
    ):
        for gated in (False, True):
            case = fp8_case((1, rows, columns), tile, dtype, CPU, with_bias=gated)
            _check(case, cut, gated=gated)


@pytest.mark.slow
def test_interpreted_kernel_is_its_formula() -> None:
    run_interpreted(f"{MODULE}:check_products_interpreted")


def check_layers_interpreted() -> None:
    """With the switch one token is multiplied so, and no norm codes it; more tokens as before."""
    from engine.layers import quantized_cuda
    from engine.layers.quantized_cuda import QuantizedLinear
    from kernels.quant.one_token import fp8_one_token

    case = fp8_case((1, 96, 128), (1, 128), torch.float16, CPU)
    patch, calls = pytest.MonkeyPatch(), 0

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return fp8_one_token(*args, **options)

    patch.setattr(quantized_cuda, "supports_pieces", lambda *_: True)
    patch.setattr(quantized_cuda, "fp8_one_token", counted)
    linear = QuantizedLinear(case.weight)
    fixed = QuantizedLinear(case.weight, is_deterministic=True)
    for is_on in (False, True):
        patch.setattr(quantized_cuda, "ONE_TOKEN", is_on)
        assert (linear.form(1) is None) == is_on
        assert linear.form(2) is not None
        exact = exact_product(case.x, case.exact, None)
        for each in (linear, fixed):
            assert_near(each(case.x), exact, torch.float16)
    assert calls == 1, "once, and never in deterministic mode"
    patch.undo()


@pytest.mark.slow
def test_one_switch_chooses_it() -> None:
    run_interpreted(f"{MODULE}:check_layers_interpreted")


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(1, 4096), (128, 128)])
def test_threads_of_the_loop_share_nothing(tile: tuple[int, int]) -> None:
    """Loads of 16 bytes; numbers are exchanged between threads after the loop alone."""
    from kernels.quant import one_token
    from kernels.quant.fp8_linear import Fp8Operand
    from tests.kernels.cross_compile import compiled_for

    rows, columns = tile
    weight = Fp8Operand(
        codes=torch.empty(4096, 4096, dtype=torch.float8_e4m3fn),
        scales=torch.empty(4096 // rows, 4096 // columns), tile_rows=rows, tile_columns=columns,
    )  # fmt: skip
    kept: list[Any] = []
    with compiled_for(gpu("H200"), one_token, kept=kept):
        one_token.fp8_one_token(torch.empty(1, 4096, dtype=torch.bfloat16), weight)
    (made,) = kept
    code = made.asm["ptx"]
    (loop,) = re.findall(r"\n(\$L\w+):.*?\n(.*)bra\s+\1;", code, re.DOTALL)
    assert "fma.rn.f32" in loop[1] or "mul.f32" in loop[1]
    for exchange in ("shfl", "st.shared"):
        assert exchange not in loop[1]
    assert "cp.async.cg.shared.global" in loop[1]
    assert "mma" not in code


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(1, None), (128, 128), (32, 64)])
def test_products_are_those_of_the_weights(tile: tuple[int, int | None]) -> None:
    from kernels.quant.fp8_linear import QuantConfig

    cuts = [
        QuantConfig(block_m=1, block_n=n, block_k=k, num_warps=warps, num_stages=stages)
        for n, k, warps, stages in ((8, 512, 4, 9), (16, 1024, 4, 5), (32, 512, 8, 5))
    ]
    for rows, columns in ((24576, 4096), (4096, 12288), (1040, 784), (6144, 4096)):
        for gated in (False, True):
            case = fp8_case(
                (1, rows, columns), (tile[0], tile[1] or columns), torch.bfloat16, GPU,
                with_bias=gated,
            )  # fmt: skip
            _check(case, None, gated=gated)
            for cut in cuts:
                _check(case, cut, gated=gated)

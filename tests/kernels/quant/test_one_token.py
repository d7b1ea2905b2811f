"""Products of one token and quantised weights, without matrix units."""

import re
from typing import Any

import pytest
import torch

from engine.layers.linear import WeightFormat
from tests.harness.gpus import gpu
from tests.kernels.interpreter import run_interpreted
from tests.kernels.linear.linear_cases import CPU, GPU, assert_near, exact_gated, exact_product
from tests.kernels.quant.quant_cases import Case, fp8_case, int4_case

MODULE = "tests.kernels.quant.test_one_token"


def _check(case: Case, cut: Any, *, gated: bool) -> None:
    from engine.layers.quantized_operands import four_bit_operand, fp8_operand
    from kernels.quant.one_token import fp8_one_token, int4_one_token

    assert case.weight.scales is not None
    if case.weight.format is WeightFormat.FP8:
        fp8 = fp8_operand(case.weight, case.weight.scales)
        ours = fp8_one_token(case.x, fp8, cut, gated=gated)
    else:
        int4 = four_bit_operand(case.weight, case.weight.scales)
        ours = int4_one_token(case.x, int4, cut, gated=gated)
    exact = exact_gated if gated else exact_product
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


def check_int4_interpreted() -> None:
    """A group is a run, half a run, several runs or a row, with zero points and without."""
    from kernels.quant.fp8_linear import QuantConfig

    narrow = QuantConfig(block_m=1, block_n=32, block_k=64)
    for rows, columns, group, has_zeros, dtype, cut in (
        (80, 256, 128, True, torch.float32, narrow),
        (48, 384, 64, True, torch.float16, None),
        (64, 576, 32, False, torch.float32, narrow),
        (80, 288, 288, True, torch.float32, narrow),
    ):
        for gated in (False, True):
            case = int4_case(
                (1, rows, columns), group, dtype, CPU, has_zeros=has_zeros, with_bias=gated
            )
            _check(case, cut, gated=gated)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["products", "int4"])
def test_interpreted_kernels_are_their_formula(name: str) -> None:
    run_interpreted(f"{MODULE}:check_{name}_interpreted")


def check_layers_interpreted() -> None:
    """One token that nothing coded, and FP8 weights with a scale a row; nothing else."""
    from engine.layers import quantized_cuda
    from engine.layers.quantized_cuda import QuantizedLinear

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("with matrix units")

    rows = fp8_case((1, 96, 128), (1, 128), torch.float16, CPU)
    tiles = fp8_case((1, 128, 256), (128, 128), torch.float16, CPU)
    int4 = int4_case((1, 96, 128), 32, torch.float16, CPU)
    patch = pytest.MonkeyPatch()
    patch.setattr(quantized_cuda, "supports_few", lambda *_: True)
    for name in ("fp8_linear", "fp8_few_linear", "int4_linear"):
        patch.setattr(quantized_cuda, name, refuse)
    linear = QuantizedLinear(rows.weight)
    assert linear.form(1) is not None, "a norm may code it for pieces"
    assert_near(linear(rows.x), exact_product(rows.x, rows.exact, None), torch.float16)
    others = [(linear, rows.x.expand(2, -1)), (QuantizedLinear(tiles.weight), tiles.x)]
    others += [(QuantizedLinear(int4.weight), int4.x)]
    others += [(QuantizedLinear(rows.weight, is_deterministic=True), rows.x)]
    for other, x in others:
        with pytest.raises(AssertionError, match="with matrix units"):
            other(x)
    patch.undo()


@pytest.mark.slow
def test_layers_choose_it_where_it_is_faster() -> None:
    run_interpreted(f"{MODULE}:check_layers_interpreted")


def _loops(code: str) -> list[str]:
    """What is between a label and a branch back to it."""
    places: dict[str, int] = {}  # label -> its line
    found, lines = [], code.splitlines()
    for number, line in enumerate(lines):
        if label := re.match(r"(\$L\w+):", line):
            places[label[1]] = number
        branch = re.search(r"\bbra\S*\s+(\$L\w+);", line)
        if branch and branch[1] in places:
            found.append("\n".join(lines[places[branch[1]] : number]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8 rows", "fp8 tiles", "int4", "int4 zeros"])
def test_threads_of_the_loop_share_nothing(form: str) -> None:
    """Numbers are exchanged between threads after the loop alone."""
    from kernels.quant import one_token
    from kernels.quant.fp8_linear import Fp8Operand
    from kernels.quant.int4_linear import FourBitOperand
    from kernels.quant.steps import Codes
    from tests.kernels.cross_compile import compiled_for

    kept: list[Any] = []
    x = torch.empty(1, 4096, dtype=torch.bfloat16)
    with compiled_for(gpu("H200"), one_token, kept=kept):
        if form.startswith("fp8"):
            rows, columns = (1, 4096) if form == "fp8 rows" else (128, 128)
            fp8 = Fp8Operand(
                codes=torch.empty(4096, 4096, dtype=torch.float8_e4m3fn),
                scales=torch.empty(4096 // rows, 4096 // columns),
                tile_rows=rows, tile_columns=columns,
            )  # fmt: skip
            one_token.fp8_one_token(x, fp8)
        else:
            int4 = FourBitOperand(
                packed=torch.empty(4096, 2048, dtype=torch.uint8),
                scales=torch.empty(4096, 32, dtype=torch.int32), half=64, group=128,
                codes=Codes.INT4 if form == "int4" else Codes.INT4_ZEROS,
            )  # fmt: skip
            one_token.int4_one_token(x, int4)
    (loop,) = _loops(kept[0].asm["ptx"])
    assert "cp.async.cg.shared.global" in loop, "loads of less than 16 bytes"
    for exchange in ("shfl", "st.shared", "mma"):
        assert exchange not in loop


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fp8 rows", "fp8 tiles", "int4", "int4 zeros"])
def test_products_are_those_of_the_weights(form: str) -> None:
    from kernels.quant.fp8_linear import QuantConfig

    cuts = [
        QuantConfig(block_m=1, block_n=n, block_k=k, num_warps=warps, num_stages=stages)
        for n, k, warps, stages in ((8, 512, 4, 9), (16, 1024, 4, 5), (32, 512, 8, 5))
    ]
    for rows, columns in ((24576, 4096), (4096, 12288), (1040, 896), (6144, 4096)):
        shape = (1, rows, columns)
        for gated in (False, True):
            if form.startswith("fp8"):
                tile = (1, columns) if form == "fp8 rows" else (128, 128)
                case = fp8_case(shape, tile, torch.bfloat16, GPU, with_bias=gated)
            else:
                has_zeros = form == "int4 zeros"
                case = int4_case(
                    shape, 128, torch.bfloat16, GPU, has_zeros=has_zeros, with_bias=gated
                )
            for cut in (None, *cuts):
                _check(case, cut, gated=gated)

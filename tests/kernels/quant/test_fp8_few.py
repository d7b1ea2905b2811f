"""Inputs in FP8, in pieces or rounded: coded by a norm or a gate before a product, multiplied."""

import random
import re
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.layers.build_linear import build_gated, build_linear
from engine.layers.linear import form_of
from engine.layers.mlp import GatedMlp
from kernels.ops import Ops
from kernels.quant.coded_tokens import WIDE, CodedTokens, InputForm, decoded, reference
from kernels.reference import TorchOps, rms_norm_add
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

MODULE = "tests.kernels.quant.test_fp8_few"
OPS = cast("Ops", TorchOps())
# Of a sum in fp32 from matrix units that add 128 products in fewer bits.
MAX_SUM_ERROR = 1e-3


def _exact_mlp(x: Tensor, up: Case, down: Case) -> Tensor:
    inner = exact_gated(x, up.exact, up.weight.bias)
    return exact_product(inner, down.exact, down.weight.bias)


# ---- on a CPU ------------------------------------------------------------------------------------


def _operand(case: Case) -> Any:
    from engine.layers.quantized_operands import fp8_operand

    assert case.weight.scales is not None
    return fp8_operand(case.weight, case.weight.scales)


def check_products_interpreted() -> None:
    """Parts of columns, groups within a step and of several steps, tiles; columns cut short."""
    from kernels.linear.small import tile_counters
    from kernels.quant.fp8_few import fp8_few_gate, fp8_few_linear
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
            wide = reference(x, WIDE)
            for given, meant in (
                (coded, x), (rounded, decoded(rounded).float()), (wide, decoded(wide).float())
            ):  # fmt: skip
                ours = fp8_few_linear(given, operand, torch.float32, counters, cut, gated=gated)
                assert_near(ours, exact(meant, case.exact, case.weight.bias), torch.float32)
            assert not counters.any(), "a call left its counts behind"
        if cut is not None and shape[1] % cut.block_n == 0:
            for given, meant in ((coded, x), (rounded, decoded(rounded))):
                gate = fp8_few_gate(given, operand, counters, cut)
                assert gate.group == (cut.block_n // 2 if given.is_rounded else 0)
                assert gate.is_rounded == given.is_rounded
                wanted = exact_gated(meant, case.exact, case.weight.bias)
                off = (decoded(gate) - wanted).abs()
                if given.is_rounded:  # e4m3 has four bits
                    assert float(off.norm() / wanted.norm()) < 0.04
                else:  # pieces of e5m2, see below; and what a sum in fp32 is off by
                    near = most_off(wanted) + 1e-5 * wanted.abs().max()
                    assert (off <= near).all(), f"off by {float((off / near).max())} of that"
            assert not counters.any(), "a call left its counts behind"


def check_norms_interpreted() -> None:
    from kernels.fused import TritonOps

    ops = TritonOps()
    for num_tokens, n, group in ((3, 200, 200), (2, 384, 128), (1, 128, 128)):
        for pieces in (1, 2):
            form = InputForm(pieces=pieces, group=group)
            x, residual = torch.randn(2, num_tokens, n + 8)[:, :, :n].half().unbind()
            weight = torch.randn(n).half()
            wanted, wanted_sum = TorchOps().rms_norm_coded(x, residual, weight, 1e-6, form)
            alone, _ = ops.rms_norm_coded(wanted_sum, None, weight, 1e-6, form)
            ours, our_sum = ops.rms_norm_coded(x, residual, weight, 1e-6, form)
            assert torch.equal(our_sum, wanted_sum)
            for coded in (ours, alone):
                assert coded.scales.shape == wanted.scales.shape
                error = (decoded(coded) - decoded(wanted)).norm() / decoded(wanted).norm()
                assert error < 5e-3, f"off by {error}: the norm is rounded to the other side"


def check_not_finite_interpreted() -> None:
    """In both forms; the tokens beside are coded as they were."""
    from kernels.quant.token_groups import code_tokens

    for pieces in (1, 2):
        form = InputForm(pieces=pieces, group=64)
        x = torch.randn(3, 128)
        others = decoded(code_tokens(x, form))[::2]
        for bad in (torch.nan, torch.inf, -torch.inf):
            x[1, 77] = bad
            ours = decoded(code_tokens(x, form))
            assert not ours[1, 77].isfinite(), f"{bad} became {ours[1, 77]}"
            assert torch.equal(ours[::2], others)


def most_off(x: Tensor) -> Tensor:
    """By how much pieces of e5m2 may be off: each number's 2^-7th part, or 2^-16.

    Both but for the rounding to float16, of eleven bits, on the way.
    """
    return torch.maximum(x.double().abs() / 2**7, torch.tensor(2.0**-16)) * (1 + 2**-7)


def test_pieces_of_e5m2_are_near_every_number() -> None:
    """Without a scale; what is not finite stays so."""
    x = torch.randn(3, 4096) * torch.exp2(torch.empty(3, 4096).uniform_(-30, 19))
    x = x.clamp(-9e5, 9e5)
    off = (decoded(reference(x, WIDE)) - x.double()).abs()
    assert (off <= most_off(x)).all()
    bad = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1e7]])
    assert not decoded(reference(bad, WIDE)).isfinite().any()


def check_layers_interpreted() -> None:
    """Which maps take which form, and a feed-forward part of coded inputs."""
    from engine.layers import quantized_cuda
    from engine.layers.quantized_cuda import CodedMlp, QuantizedLinear
    from kernels.quant.token_groups import code_tokens

    patch = pytest.MonkeyPatch()
    patch.setattr(quantized_cuda, "supports_few", lambda *_: True)
    for tile in ((1, None), (64, 64)):
        made = partial(_made, tile=tile, dtype=torch.float16, device=CPU)
        up, down = made(256, 128), made(96, 128)
        gated, back = QuantizedLinear(up.weight, OPS), QuantizedLinear(down.weight)
        x = torch.randn(9, 128).bfloat16().half()
        form = gated.form(9)
        assert form == InputForm(pieces=2, group=128)
        coded = code_tokens(x, form)
        mlp = CodedMlp(gated, back)
        assert mlp.form(9) == form
        error = (mlp.of_coded(coded).double() - _exact_mlp(x, up, down)).norm()
        # The gate's pieces of e5m2 are off by 0.25 %, and down's bias is not.
        assert error < 3e-3 * _exact_mlp(x, up, down).norm()
        exact = exact_gated(x, up.exact, up.weight.bias)
        assert_near(gated.of_coded(coded), exact, torch.float16)
        assert mlp.form(65) is None, "nothing is rounded that may not be"
        fixed = QuantizedLinear(up.weight, OPS, is_deterministic=True)
        assert form_of(fixed, 9) is None
    patch.undo()


def check_rounding_layers_interpreted() -> None:
    """From 17 tokens on inputs are rounded: by the norm, by a gate, and before a product."""
    from engine.layers import quantized_cuda
    from engine.layers.quantized_cuda import CodedMlp, Fp8Blocks, Fp8Rows, QuantizedLinear
    from kernels.quant.token_groups import code_tokens

    patch = pytest.MonkeyPatch()
    patch.setattr(quantized_cuda, "supports_few", lambda *_: True)
    for tile, group in (((1, None), 256), ((128, 128), 128)):
        made = partial(_made, tile=tile, dtype=torch.float16, device=CPU)
        up, down = made(512, 256), made(96, 256)
        gated, back = QuantizedLinear(up.weight, OPS), QuantizedLinear(down.weight)
        for linear, case in ((gated, up), (back, down)):
            kind = Fp8Rows if tile[0] == 1 else Fp8Blocks
            linear.product = kind(_operand(case), torch.float16)
        mlp = CodedMlp(gated, back)
        x = torch.randn(17, 256).bfloat16().half()
        form = InputForm(pieces=1, group=group)
        assert mlp.form(16) == InputForm(pieces=2, group=256)
        assert mlp.form(17) == mlp.form(64) == gated.form(65) == form
        coded = code_tokens(x, form)
        rounded = decoded(coded).half()
        assert_near(
            back.of_coded(coded),
            exact_product(rounded, down.exact, down.weight.bias),
            torch.float16,
        )
        assert torch.equal(back(x), back.of_coded(coded))
        assert torch.equal(gated(x), gated.of_coded(coded))
        exact = _exact_mlp(rounded, up, down)
        ours = mlp.of_coded(coded)
        assert float((ours.double() - exact).norm() / exact.norm()) < 0.05
        assert torch.equal(mlp(x), ours)
        assert gated.coded_gate(coded, 0).is_rounded
    patch.undo()


def _made(
    num_rows: int,
    num_columns: int,
    *,
    tile: tuple[int, int | None],
    dtype: torch.dtype,
    device: torch.device,
    quantizes_inputs: bool = False,
) -> Case:
    tile_columns = tile[1] or num_columns
    return fp8_case(
        (1, num_rows, num_columns), (tile[0], tile_columns), dtype, device, with_bias=True,
        quantizes_inputs=quantizes_inputs,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["products", "norms", "layers", "rounding_layers", "not_finite"])
def test_interpreted_kernels_are_their_formula(name: str) -> None:
    run_interpreted(f"{MODULE}:check_{name}_interpreted")


@pytest.mark.slow
def test_no_code_is_read_back_where_it_was_made() -> None:
    """ptxas takes another register where it merges codes in pairs; see token_groups.py."""
    from kernels.linear.small import tile_counters
    from kernels.quant import coded_norm, fp8_few, token_groups
    from kernels.quant.fp8_linear import Fp8Operand
    from tests.kernels.cross_compile import compiled_for

    kept: list[Any] = []
    x = torch.empty(3, 4096, dtype=torch.bfloat16)
    with compiled_for(gpu("H200"), coded_norm, token_groups, fp8_few, kept=kept):
        for group in (128, 4096):
            form = InputForm(pieces=2, group=group)
            token_groups.code_tokens(x, form)
            coded_norm.rms_norm_coded(x, x.clone(), x[0], 1e-6, form)
        weight = Fp8Operand(
            codes=torch.empty(1024, 4096, dtype=torch.float8_e4m3fn),
            scales=torch.empty(1024, 1), tile_rows=1, tile_columns=4096,
        )  # fmt: skip
        coded = CodedTokens(
            codes=torch.empty(2, 32, 4096, dtype=torch.float8_e4m3fn),
            scales=torch.empty(1, 32), group=4096,
        )  # fmt: skip
        fp8_few.fp8_few_gate(coded, weight, tile_counters(CPU))
    assert len(kept) == 5
    for made in kept:
        assert "e4m3x2.f32" in made.asm["ptx"]
        assert "f16x2.e4m3x2" not in made.asm["ptx"]


@pytest.mark.slow
def test_a_nan_is_not_cut_off_to_a_number() -> None:
    """A minimum of two numbers is the other one where one is NaN, unless it is told to be NaN."""
    from kernels.quant import coded_norm, token_groups
    from tests.kernels.cross_compile import compiled_for

    kept: list[Any] = []
    x = torch.empty(3, 4096, dtype=torch.bfloat16)
    with compiled_for(gpu("H200"), coded_norm, token_groups, kept=kept):
        form = InputForm(pieces=1, group=128)
        token_groups.code_tokens(x, form)
        coded_norm.rms_norm_coded(x, x.clone(), x[0], 1e-6, form)
    assert len(kept) == 2
    for made in kept:
        assert "min.NaN.f32" in made.asm["ptx"]
        assert "max.NaN.f32" in made.asm["ptx"]
        assert "min.f32" not in made.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "num_pieces"), [(1, 2), (16, 2), (64, 2), (32, 1), (64, 1)])
def test_weights_meet_the_units_of_fp8(num_tokens: int, num_pieces: int) -> None:
    """Both operands of a product come from shared memory, and the sums fit the registers."""
    from kernels.linear.small import tile_counters
    from kernels.quant import fp8_few
    from kernels.quant.fp8_linear import Fp8Operand
    from tests.kernels.cross_compile import compiled_for

    kept: list[Any] = []
    device = gpu("H200")
    with compiled_for(device, fp8_few, kept=kept) as found:
        for num_rows, num_columns, group in ((24576, 4096, 4096), (4096, 12288, 128)):
            weight = Fp8Operand(
                codes=torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn),
                scales=torch.empty(num_rows, 1), tile_rows=1, tile_columns=num_columns,
            )  # fmt: skip
            shape = (num_pieces, num_tokens, num_columns)
            x = CodedTokens(
                codes=torch.empty(shape, dtype=torch.float8_e4m3fn),
                scales=torch.empty(num_columns // group, num_tokens), group=group,
            )  # fmt: skip
            if group == 128:
                fp8_few.fp8_few_linear(x, weight, torch.bfloat16, tile_counters(CPU))
            else:
                fp8_few.fp8_few_gate(x, weight, tile_counters(CPU))
    assert max(found.values()) <= device.shared_memory_per_block_bytes
    for made in kept:
        products = [line for line in made.asm["ptx"].splitlines() if "wgmma.mma_async" in line]
        assert products, "other matrix units than Hopper's"
        assert all(f"n{max(16, num_pieces * num_tokens)}k32" in line for line in products)
        assert all("e4m3.e4m3" in line for line in products), "a weight is converted"
    assert_parts_in_whole_lines(kept[1])


@pytest.mark.slow
def test_a_gate_s_pieces_of_e5m2_meet_the_units_of_fp8() -> None:
    from kernels.linear.small import tile_counters
    from kernels.quant import fp8_few
    from kernels.quant.fp8_linear import Fp8Operand
    from tests.kernels.cross_compile import compiled_for

    def weight(num_rows: int, num_columns: int) -> Fp8Operand:
        codes = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn)
        scales = torch.empty(num_rows, 1)
        return Fp8Operand(codes=codes, scales=scales, tile_rows=1, tile_columns=num_columns)

    kept: list[Any] = []
    x = CodedTokens(
        codes=torch.empty(2, 16, 4096, dtype=torch.float8_e4m3fn),
        scales=torch.empty(1, 16), group=4096,
    )  # fmt: skip
    with compiled_for(gpu("H200"), fp8_few, kept=kept):
        inner = fp8_few.fp8_few_gate(x, weight(28672, 4096), tile_counters(CPU))
        fp8_few.fp8_few_linear(inner, weight(4096, 14336), torch.bfloat16, tile_counters(CPU))
    assert inner.codes.dtype == torch.float8_e5m2
    gate, down = (made.asm["ptx"] for made in kept)
    assert "f32.e4m3.e4m3" in gate
    assert "cvt.rn.satfinite.e5m2x2" not in gate, "what is not finite would be cut off"
    assert "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e5m2" in down


def test_sums_of_a_step_leave_registers_for_all_of_them() -> None:
    """On a GPU of few multiprocessors tiles of wide weights have 256 rows, and sums as many more.

    Inputs that a gate coded have groups half as wide as a step: side by side they were spilled.
    """
    from kernels.quant import fp8_few

    for num_tokens, num_pieces in ((64, 1), (32, 2), (32, 1)):
        cut = fp8_few.choose_config(num_tokens, num_pieces, 12288, 28672, 78)
        assert cut.block_n == 256
        cut = fp8_few.fitted_config(cut, num_pieces, 64, 0, 227 * 1024)
        columns = num_pieces * fp8_few.groups_of(cut.block_k, 64) * cut.block_m
        assert cut.block_n * columns <= 128 * 128
    whole = fp8_few.choose_config(64, 1, 4096, 12288, 132)  # an H200's keep their steps
    assert fp8_few.fitted_config(whole, 1, 64, 0, 227 * 1024).block_k == whole.block_k == 128


@pytest.mark.parametrize("num_tokens", [1, 16])
@pytest.mark.parametrize("num_rows", [24576, 28672])
def test_all_programs_of_a_gate_are_on_the_gpu_at_once(num_rows: int, num_tokens: int) -> None:
    """Of Qwen3-8B's and Llama-3.1-8B's gate and up: else a few would come after all others."""
    from kernels.quant import fp8_few

    device = gpu("H200")
    cut = fp8_few.choose_config(num_tokens, 2, num_rows, 4096, device.num_sms)
    programs_per_sm = -(-num_rows // cut.block_n // device.num_sms)
    memory_bytes = device.shared_memory_per_block_bytes
    cut = fp8_few.fitted_config(cut, 2, 0, 0, memory_bytes, programs_per_sm)
    stage_bytes = cut.block_k * (cut.block_n + 2 * cut.block_m)
    reserved = 1024  # of a program, by CUDA
    assert programs_per_sm * (cut.num_stages * stage_bytes + reserved) <= memory_bytes + reserved
    assert cut.num_stages >= 4, "too little is on its way"


def assert_parts_in_whole_lines(made: Any) -> None:
    """Of a product in parts: a warp reads 512 adjacent bytes of them at once."""
    text = made.asm["ttgir"]
    layouts = re.findall(r"tt\.load .*cacheModifier = cg.*x!tt\.ptr<f32>, (#\w+)>", text)
    assert layouts, "no parts"
    for layout in layouts:
        lines = rf"^{layout} = .*sizePerThread = \[4\], threadsPerWarp = \[32\]"
        assert re.search(lines, text, re.MULTILINE)


# ---- on a GPU ------------------------------------------------------------------------------------

SHAPES = [(1, 24576, 4096), (16, 4096, 12288), (17, 1040, 4096), (33, 272, 784), (50, 4096, 12288)]
SHAPES += [(64, 24576, 4096)]
TILES = [(128, 128), (1, None)]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("num_pieces", [1, 2])
def test_products_are_those_of_what_the_inputs_stand_for(
    tile: tuple[int, int | None], num_pieces: int
) -> None:
    from kernels.linear.small import tile_counters
    from kernels.quant.fp8_few import codes_gate, fp8_few_gate, fp8_few_linear
    from kernels.quant.token_groups import code_tokens

    counters = tile_counters(GPU)
    for shape in SHAPES:
        with_bias, dtype = random.random() < 0.5, random.choice((torch.float32, torch.bfloat16))
        gated = shape[1] > 4096 or random.random() < 0.5
        tiles = (tile[0], tile[1] or shape[2])
        case = fp8_case(shape, tiles, torch.bfloat16, GPU, with_bias=with_bias)
        operand = _operand(case)
        for group in [shape[2]] + [random.choice((32, 64, 128))] * (shape[2] % 128 == 0):
            coded = code_tokens(case.x, InputForm(pieces=num_pieces, group=group))
            meant = case.x if num_pieces == 2 else decoded(coded)
            exact = (exact_gated if gated else exact_product)(meant, case.exact, case.weight.bias)
            poison(2 * shape[0] * shape[1])
            ours = fp8_few_linear(coded, operand, dtype, counters, gated=gated)
            error = float((ours.double() - exact).norm() / exact.norm())
            print(f"{shape} groups of {group}, gated {gated}, {dtype}: off by {error:.1e}")
            assert error < (MAX_SUM_ERROR if dtype is torch.float32 else 3e-3)
            if gated and codes_gate(shape[0], num_pieces, operand):
                gate = decoded(fp8_few_gate(coded, operand, counters))
                error = float((gate - exact).norm() / exact.norm())
                # Pieces of e5m2, of up to 16 tokens, are off by 0.25 %, by luck by a little more.
                assert error < (4e-3 if num_pieces == 2 else 0.04), f"{shape}, {group}: {error}"
    assert not counters.any(), "a call left its counts behind"


@pytest.mark.gpu
def test_a_norm_codes_its_result_bit_by_bit() -> None:
    from kernels.fused import TritonOps
    from kernels.quant.token_groups import code_tokens

    ops = TritonOps()
    for num_tokens, n in ((1, 4096), (77, 5120), (500, 4096)):
        x, residual = torch.randn(2, num_tokens, n, device=GPU).bfloat16().unbind()
        weight = torch.randn(n, device=GPU).bfloat16()
        normed, stream = ops.rms_norm_add(x.clone(), residual.clone(), weight, 1e-6)
        for pieces, group in ((1, n), (1, 128), (2, n), (2, 128)):
            form = InputForm(pieces=pieces, group=group)
            ours, our_stream = ops.rms_norm_coded(x, residual.clone(), weight, 1e-6, form)
            apart = code_tokens(normed, form)
            assert torch.equal(our_stream, stream)
            assert torch.equal(ours.codes.view(torch.uint8), apart.codes.view(torch.uint8))
            assert torch.equal(ours.scales, apart.scales)
            if pieces == 2:
                exact = reference(normed, form)
                assert torch.equal(apart.codes.float(), exact.codes.float())
                assert torch.equal(apart.scales, exact.scales)


@pytest.mark.gpu
def test_what_is_not_finite_stays_so() -> None:
    from kernels.linear.small import tile_counters
    from kernels.quant.fp8_few import fp8_few_linear
    from kernels.quant.token_groups import code_tokens

    case = fp8_case((3, 1024, 1024), (1, 1024), torch.bfloat16, GPU)
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = case.x.clone()
        x[1, 77] = bad
        rounded = decoded(code_tokens(x, InputForm(pieces=1, group=1024)))
        assert not rounded[1, 77].isfinite()
        assert rounded[::2].isfinite().all()
        coded = code_tokens(x, InputForm(pieces=2, group=1024))
        y = fp8_few_linear(coded, _operand(case), torch.bfloat16, tile_counters(GPU))
        assert not y[1].isfinite().any()
        assert y[0].isfinite().all()
        assert y[2].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_a_feed_forward_part_is_the_same_coded_and_not(tile: tuple[int, int | None]) -> None:
    """By the norm and in a graph; with many tokens in every bit."""
    from engine.layers.quantized_cuda import CodedMlp, QuantizedLinear
    from kernels.fused import TritonOps

    made = partial(_made, tile=tile, dtype=torch.bfloat16, device=GPU, quantizes_inputs=True)
    up, down = made(2 * 3072, 1024), made(1024, 3072)
    ops = TritonOps()
    gated, back = build_gated(up.weight, ops), build_linear(down.weight)
    assert isinstance(gated, QuantizedLinear)
    assert isinstance(back, QuantizedLinear)
    coded_mlp, apart = CodedMlp(gated, back), GatedMlp(gated=gated, down=back)
    weight = torch.randn(1024, device=GPU).bfloat16()
    for num_tokens in (1, 16, 20, 64, 65, 300):
        form = coded_mlp.form(num_tokens)
        assert form is not None
        x, residual = torch.randn(2, num_tokens, 1024, device=GPU).bfloat16().unbind()
        normed, _ = rms_norm_add(x, residual, weight, 1e-6)

        def run(form: InputForm = form, x: Tensor = x, residual: Tensor = residual) -> Tensor:
            y, stream = x.clone(), residual.clone()
            for _ in range(3):
                coded, stream = ops.rms_norm_coded(y, stream, weight, 1e-6, form)
                y = coded_mlp.of_coded(coded)
            return y

        coded, _ = ops.rms_norm_coded(x.clone(), residual.clone(), weight, 1e-6, form)
        ours = coded_mlp.of_coded(coded)
        if num_tokens > 64:
            added, _ = ops.rms_norm_add(x.clone(), residual.clone(), weight, 1e-6)
            assert torch.equal(ours, apart(added))
        else:
            exact = _exact_mlp(normed, up, down)
            error = float((ours.double() - exact).norm() / exact.norm())
            assert error < (6e-3 if num_tokens <= 16 else 0.08), f"{num_tokens}: off by {error}"
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for _ in range(3):
            x.normal_()
            captured.fill_(torch.nan)
            graph.replay()
            assert torch.equal(captured, run())

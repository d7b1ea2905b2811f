"""Products of FP8 experts with rounded inputs, against float64 of the same rounded numbers."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.moe.align import Blocks, align
from kernels.moe.coded import CodedExperts
from kernels.moe.grouped import by_block
from kernels.moe.rounded import (
    TILE_COLUMNS,
    choose_tile,
    input_form,
    reference,
    rounded_down,
    rounded_gate_up,
)
from kernels.moe.tiles import Tile
from kernels.quant.coded_tokens import CodedTokens, InputForm, empty_coded
from kernels.quant.token_groups import code_tokens
from tests.harness.gpus import gpu
from tests.kernels.interpreter import drawn, run_interpreted
from tests.kernels.moe.moe_cases import (
    assert_near,
    exact_inner,
    exact_outputs,
    has_expert,
    random_routes,
    random_tensor,
)
from tests.kernels.quant.quant_cases import fp8_case

MODULE = "tests.kernels.moe.test_rounded_experts"
CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = Tile(16, 32, TILE_COLUMNS, 2, 4, 2, by_tma=True)
TILES = {"tiles": (128, TILE_COLUMNS), "low tiles": (8, TILE_COLUMNS), "rows": (1, 0)}


def _experts(form: str, sizes: tuple[int, int, int], device: torch.device) -> CodedExperts:
    """sizes: experts, N, K."""
    from engine.layers.moe_cuda import coded_operand

    num_experts, num_rows, num_columns = sizes
    rows, columns = TILES[form]
    tile = (math.gcd(rows, num_rows), columns or num_columns)  # experts begin with a tile
    case = fp8_case(
        (1, num_experts * num_rows, num_columns), tile, torch.float16, device, quantizes_inputs=True
    )
    operand = coded_operand(case.weight.by_expert(num_experts), is_gated=False)
    assert isinstance(operand, CodedExperts)
    assert operand.rounds_inputs
    return operand


def _exact(x: CodedTokens) -> torch.Tensor:
    """What was rounded, in float64; columns may fill no group."""
    spread = x.scales.double().T.repeat_interleave(x.group, dim=1)
    return x.codes[0].float().double() * spread[:, : x.codes.shape[2]]


def _check_products(
    form: str, num_tokens: int, sizes: tuple[int, int, int, int], tile: Tile | None,
    device: torch.device, dtype: torch.dtype,
) -> None:  # fmt: skip
    """sizes: experts, active ones, hidden, inner."""
    num_experts, num_active, hidden, inner = sizes
    gate_up = _experts(form, (num_experts, 2 * inner, hidden), device)
    down = _experts(form, (num_experts, hidden, inner), device)
    x = random_tensor(num_tokens, hidden, dtype=dtype, device=device.type)
    routes = random_routes(num_tokens, num_experts, num_active, device.type)
    blocks = align(routes.ids, num_experts, (tile or choose_tile(gate_up)).block_m)
    coded = code_tokens(x, input_form(gate_up))
    ours = rounded_gate_up(coded, gate_up, routes, blocks, dtype, tile=tile)
    exact = exact_inner(_exact(coded), reference(gate_up), routes)
    lines = by_block(exact, blocks)
    is_line = ~lines[:, 0].isnan()
    # The matrix units' own sums of rows have fewer bits.
    on_units = device.type == "cuda" and form == "rows"
    allowed = torch.bfloat16 if on_units else dtype
    assert_near(ours[is_line], lines[is_line], allowed)
    coded = code_tokens(by_block(exact.to(dtype), blocks), input_form(down), blocks=blocks)
    outputs = rounded_down(coded, down, routes, blocks, dtype, tile=tile)
    places = torch.full((routes.ids.numel(),), 0, device=device)
    places[blocks.routes.flatten()[is_line].long()] = is_line.nonzero().flatten()
    exact_out = exact_outputs(_exact(coded)[places], reference(down), routes)
    used = has_expert(routes)
    assert_near(outputs.flatten(0, 1)[used], exact_out.flatten(0, 1)[used], allowed)


def check_products() -> None:
    """One of whole tiles, and one of rows and columns that fill none; each of any form."""
    (whole,), (cut,) = drawn(list(TILES), 1), drawn(list(TILES), 1)
    _check_products(whole, 9, (3, 2, 256, 128), SMALL, CPU, torch.float32)
    wide = replace(SMALL, block_n=64, group_m=1)
    _check_products(cut, 7, (5, 3, 176, 48), wide, CPU, torch.float16)


def check_lines_without_a_route() -> None:
    """They are neither read nor written, of silu(gate) * up too, in groups and in whole rows."""
    from kernels.quant import token_groups

    blocks = Blocks(
        routes=torch.tensor([[3, -1], [0, 1], [2, -1]], dtype=torch.int32),
        experts=torch.tensor([0, -1, 2], dtype=torch.int32),  # the second block is not used
    )
    used, untouched = torch.tensor([0, 4]), torch.tensor([1, 2, 3, 5])

    def full_of_sevens(*args: Any) -> CodedTokens:
        coded = empty_coded(*args)
        return replace(coded, codes=coded.codes.fill_(7.0), scales=coded.scales.fill_(7.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_groups, "empty_coded", full_of_sevens)
        for group, gated in ((64, False), (192, True)):
            x = random_tensor(6, 192 * (1 + gated), dtype=torch.float16, device="cpu", scale=3.0)
            form = InputForm(pieces=1, group=group)
            every = code_tokens(x, form, gated=gated)
            ours = code_tokens(x, form, gated=gated, blocks=blocks)
            assert torch.equal(ours.codes[:, used].float(), every.codes[:, used].float())
            assert torch.equal(ours.scales[:, used], every.scales[:, used])
            assert (ours.codes[:, untouched].float() == 7.0).all()
            assert (ours.scales[:, untouched] == 7.0).all()


@pytest.mark.slow
@pytest.mark.parametrize("check", ["check_products", "check_lines_without_a_route"])
def test_interpreted_kernels_are_their_formula(check: str) -> None:
    run_interpreted(f"{MODULE}:{check}")


# ---- compiled for GPUs that are not here ---------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["tiles", "rows"])
def test_products_multiply_e4m3_on_hopper_within_the_shared_memory(form: str) -> None:
    from kernels.moe import rounded
    from kernels.moe.routes import Routes
    from kernels.quant import token_groups
    from tests.kernels.cross_compile import compiled_for

    device = gpu("H200")
    weight = _experts(form, (8, 256, 256), CPU)
    block_m = choose_tile(weight).block_m
    routes = Routes(ids=torch.zeros(8, 2, dtype=torch.int32), weights=torch.ones(8, 2))
    blocks = Blocks(
        routes=torch.zeros(16, block_m, dtype=torch.int32),
        experts=torch.zeros(16, dtype=torch.int32),
    )
    coded = [
        CodedTokens(
            codes=torch.empty(1, num_lines, 256, dtype=torch.float8_e4m3fn),
            scales=torch.empty(256 // input_form(weight).group, num_lines),
            group=input_form(weight).group,
        )
        for num_lines in (8, 16 * block_m)
    ]
    inner = torch.empty(16 * block_m, 256, dtype=torch.bfloat16)
    with compiled_for(device, token_groups):
        code_tokens(inner, input_form(weight), blocks=blocks)
    kept: list[Any] = []
    with compiled_for(device, rounded, kept=kept) as found:
        rounded_gate_up(coded[0], weight, routes, blocks, torch.bfloat16)
        rounded_down(coded[1], weight, routes, blocks, torch.bfloat16)
    assert found["_moe_rounded_kernel"] <= device.shared_memory_per_block_bytes
    for made in kept:
        assert "e4m3.e4m3" in made.asm["ptx"], "e4m3 is not multiplied by matrix units"


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("form", TILES)
def test_products_on_a_gpu(form: str) -> None:
    for num_tokens, sizes in (
        (37, (60, 4, 512, 192)),
        (130, (16, 8, 256, 320)),
        (1100, (4, 1, 256, 128)),
        (300, (128, 8, 2048, 768)),
    ):
        _check_products(form, num_tokens, sizes, None, GPU, torch.bfloat16)

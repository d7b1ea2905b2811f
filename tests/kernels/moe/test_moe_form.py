"""Experts with biases and the clamped gate against float64, interpreted here, compiled on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.moe import few, reference
from kernels.moe.align import align
from kernels.moe.clamped_gate import ClampedGate
from kernels.moe.combine import combine
from kernels.moe.few import few_down, few_gate_up
from kernels.moe.form import ExpertForm
from kernels.moe.grouped import (
    by_block,
    down_reference,
    gate_up_reference,
    grouped_down,
    grouped_gate_up,
)
from kernels.moe.router import route
from kernels.moe.routes import Routes
from kernels.moe.tiles import FewTile, Tile
from tests.harness.gpus import gpu
from tests.kernels.cross_compile import compiled_for
from tests.kernels.interpreter import run_interpreted
from tests.kernels.moe.moe_cases import assert_near, has_expert, random_routes, random_tensor

MODULE = "tests.kernels.moe.test_moe_form"
TILE = Tile(16, 32, 32, 2, 4, 2)
FEW = FewTile(16, 32, 4)
GATE = ClampedGate(alpha=1.5, limit=2.5)


def _exact(
    x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes, form: ExpertForm
) -> tuple[Tensor, Tensor]:
    """float64 [T k, n] and [T k, hidden], route by route; zeros without expert."""
    ids, num_active = routes.ids.flatten().tolist(), routes.ids.shape[1]
    inner = torch.zeros(len(ids), down.shape[2], dtype=torch.float64, device=x.device)
    outputs = torch.zeros(len(ids), down.shape[1], dtype=torch.float64, device=x.device)
    assert form.gate is not None
    assert form.gate_up_bias is not None
    assert form.down_bias is not None
    for index, expert in enumerate(ids):
        if expert < 0:
            continue
        both = gate_up[expert].double() @ x[index // num_active].double()
        g, u = (both + form.gate_up_bias[expert].double()).chunk(2)
        g, u = g.clamp(max=form.gate.limit), u.clamp(-form.gate.limit, form.gate.limit)
        inner[index] = (u + 1) * g / (1 + (-form.gate.alpha * g).exp())
        out = down[expert].double() @ inner[index] + form.down_bias[expert].double()
        outputs[index] = routes.weights.flatten()[index].double() * out
    return inner, outputs


def _check_form(
    num_tokens: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    tile: Tile = TILE,
) -> None:
    """sizes: experts, active ones, hidden, inner."""
    num_experts, num_active, hidden, inner = sizes
    make = {"dtype": dtype, "device": device}
    x = random_tensor(num_tokens, hidden, **make)
    gate_up = random_tensor(num_experts, 2 * inner, hidden, scale=2 * hidden**-0.5, **make)
    down = random_tensor(num_experts, hidden, inner, scale=inner**-0.5, **make)
    form = ExpertForm(
        gate=GATE,
        gate_up_bias=random_tensor(num_experts, 2 * inner, **make),
        down_bias=random_tensor(num_experts, hidden, **make),
    )
    routes = random_routes(num_tokens, num_experts, num_active, device)
    used = has_expert(routes)
    exact, exact_out = _exact(x, gate_up, down, routes, form)
    twin = gate_up_reference(x, gate_up, routes, form)
    assert_near(twin, exact, dtype)
    assert_near(few_gate_up(x, gate_up, routes, FEW, form)[used], exact[used], dtype)
    blocks = align(routes.ids, num_experts, tile.block_m)
    lines = by_block(exact, blocks)
    is_line = ~lines[:, 0].isnan()
    tiles = [tile]
    if hidden % 8 == 0 and inner % 8 == 0 and (device == "cpu" or min(hidden, inner) >= 128):
        tiles.append(replace(tile, by_tma=True))
    exact_sum = exact_out.view(num_tokens, num_active, hidden).sum(dim=1)
    for each in tiles:
        ours = grouped_gate_up(x, gate_up, routes, blocks, each, form)
        assert_near(ours[is_line], lines[is_line], dtype)
        outputs = grouped_down(by_block(twin, blocks), down, routes, blocks, each, form)
        assert_near(outputs.flatten(0, 1)[used], exact_out[used], dtype)
        assert_near(combine(outputs, routes), exact_sum, dtype)
    assert_near(down_reference(twin, down, routes, form).flatten(0, 1), exact_out, dtype)
    assert_near(few_down(twin, down, routes, FEW, form=form), exact_sum, dtype)
    whole = reference.experts(x, routes, gate_up, down, form)
    assert_near(whole.flatten(0, 1), exact_out, dtype)


def _check_router(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    """The weights of a token's experts are the softmax over their logits alone."""
    x = random_tensor(num_tokens, 72, dtype=dtype, device=device)
    weight = random_tensor(11, 72, dtype=dtype, device=device, scale=72**-0.5)
    bias = random_tensor(11, dtype=dtype, device=device)
    logits = x.double() @ weight.double().T + bias.double()
    order = logits.topk(5, dim=1)
    best, ids = order.values[:, :4], order.indices[:, :4]
    is_clear = (order.values[:, :-1] - order.values[:, 1:]).amin(dim=1) > 1e-4
    for routes in (
        route(x, weight, 4, normalises=True, bias=bias),
        route(x, weight, 4, normalises=True, bias=bias, is_deterministic=True),
        reference.route(x, weight, 4, normalises=True, bias=bias),
    ):
        assert torch.equal(routes.ids[is_clear].long(), ids[is_clear])
        assert_near(routes.weights[is_clear], best.softmax(dim=1)[is_clear], torch.float32)


def check_form() -> None:
    _check_form(4, (3, 2, 40, 24), torch.float32, "cpu")


def check_more_forms() -> None:
    _check_form(5, (6, 3, 48, 40), torch.float32, "cpu")
    _check_form(19, (4, 2, 84, 20), torch.float32, "cpu", replace(TILE, group_m=1, block_n=64))
    _check_router(9, torch.float32, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", ["check_form", pytest.param("check_more_forms", marks=pytest.mark.nightly)]
)
def test_interpreted_kernels_know_the_form_of_experts(check: str) -> None:
    run_interpreted(f"{MODULE}:{check}")


@pytest.mark.slow
def test_a_nan_is_not_cut_off_to_the_limit() -> None:
    """As a number is: a minimum of two is the other one where one is NaN, unless told otherwise."""
    kept: list[Any] = []
    x = torch.empty(2, 128, dtype=torch.bfloat16)
    with compiled_for(gpu("H200"), few, kept=kept):
        routes = Routes(ids=torch.zeros(2, 1, dtype=torch.int32), weights=torch.ones(2, 1))
        few_gate_up(x, x.expand(3, 64, 2, 128).flatten(1, 2), routes, FEW, ExpertForm(gate=GATE))
    (made,) = kept
    for name in ("min", "max"):
        assert f"{name}.NaN.f32" in made.asm["ptx"]
        assert f"{name}.f32" not in made.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 130, 1000])
def test_the_form_of_experts_on_a_gpu(num_tokens: int, dtype: torch.dtype) -> None:
    wide = Tile(64, 128, 64, 8, 4, 3)
    _check_form(num_tokens, (32, 4, 2880, 2880), dtype, "cuda", wide)
    _check_form(num_tokens, (5, 2, 72, 136), dtype, "cuda")
    _check_router(num_tokens, dtype, "cuda")

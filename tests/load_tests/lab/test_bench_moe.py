"""The bench of a mixture's kernels: what it times, its floors, and which tiles it takes."""

import ast
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from engine.layers.moe_cuda import expert_plan
from kernels.moe import rounded_int4, tiles
from kernels.moe.align import Blocks, align_reference
from kernels.moe.tiles import ALWAYS, ExpertShape, FewTile, Pair, Tile, TilePlan
from load_tests.lab import moe_step
from load_tests.lab.bench_moe import SHAPES, Timing, measure, plans_to_time, render, run
from load_tests.lab.floors import Machine
from load_tests.lab.moe_step import (
    Call,
    MoeStep,
    num_repeats_in_graph,
    quantised_layers,
    random_layers,
)
from load_tests.lab.moe_tuning import (
    FEW_TILES,
    PREFETCHES,
    TILES,
    TUNED_TOKENS,
    Tuning,
    heights,
    render_plan,
)
from tests.harness.gpus import gpu
from tests.kernels.interpreter import run_interpreted

pytestmark = pytest.mark.lab

SMALL = ExpertShape(num_experts=6, num_active=2, hidden=32, inner=16)
TILE = Tile(16, 32, 32, 1, 4, 2)
PLAN = TilePlan(
    few_up_to=2, few_gate_up=FewTile(8, 32, 4), few_down=FewTile(8, 16, 4),
    pairs=(Pair(max_tokens=ALWAYS, gate_up=TILE, down=TILE),),
)  # fmt: skip
CPU = torch.device("cpu")


def _runs_each(calls: Sequence[Call]) -> float:
    for call in calls:
        call()
    return 10.0


def check_measures() -> None:
    layers = random_layers(SMALL, CPU, 2, torch.float32)
    for num_tokens, names in ((2, "router gate_up down"), (9, "router align gate_up down sum")):
        found = list(measure(MoeStep(SMALL, layers, num_tokens), PLAN, _runs_each))
        assert [timing.kernel for timing in found] == [*names.split(), "whole"]
        assert all(timing.us == 10.0 for timing in found), found
        assert "WRONG" not in found[-1].note


def check_measures_quantised() -> None:
    shape = replace(SMALL, hidden=128, inner=128)
    for weight_format in ("fp8-block", "nvfp4", "int4-zeros"):
        layers = quantised_layers(shape, weight_format, CPU, 2, torch.float32)
        assert 0.49 < layers[0].bytes_a_number < 1.01
        step = MoeStep(shape, layers, 9)
        plan = expert_plan(shape, layers[0].gate_up, layers[0].down)
        found = list(measure(step, plan, _runs_each))
        assert all(timing.us == 10.0 for timing in found), found
        assert found[-1].note.startswith("off by "), found[-1].note
        assert "WRONG" not in found[-1].note, found[-1].note


def check_measures_rounded() -> None:
    shape = replace(SMALL, hidden=128, inner=128)
    with (
        patch.object(rounded_int4, "device_properties", lambda _: gpu("H200")),
        patch.object(moe_step, "ROUNDED_TILES", (TILE,)),
    ):
        layers = quantised_layers(shape, "int4-zeros", CPU, 1, torch.float32)
        plan = expert_plan(shape, layers[0].gate_up, layers[0].down)
        found = {one.kernel: one for one in measure(MoeStep(shape, layers, 9), plan, _runs_each)}
    for name in ("rounded", "rounded 16 32 4 2"):
        assert found[name].us == 10.0, found[name]
        assert found[name].note.startswith("off by "), found[name]
        assert "WRONG" not in found[name].note


def test_quantised_experts_are_timed_and_checked() -> None:
    run_interpreted("tests.load_tests.lab.test_bench_moe:check_measures_quantised")
    run_interpreted("tests.load_tests.lab.test_bench_moe:check_measures_rounded")


def test_every_kernel_of_a_step_is_timed_and_checked() -> None:
    run_interpreted("tests.load_tests.lab.test_bench_moe:check_measures")


def test_tiles_of_other_shapes_are_timed_where_the_gpu_has_them() -> None:
    others = ["qwen3-30b-a3b", "mixtral-8x7b"]
    plans = plans_to_time(PLAN, others, "NVIDIA H200")
    assert plans == {
        "the engine's tiles": PLAN,
        "tiles of qwen3-30b-a3b": tiles.TUNED["NVIDIA H200"][SHAPES["qwen3-30b-a3b"]],
    }
    assert list(plans_to_time(PLAN, others, "NVIDIA L4")) == ["the engine's tiles"]


def test_a_case_that_fails_is_a_line() -> None:
    def fails(calls: Sequence[Call]) -> float:
        raise MemoryError(f"{len(calls)} calls")

    found = run(SMALL, random_layers(SMALL, CPU, 2), PLAN, (9, 300), fails)
    assert [timing.kernel for timing in found[-2:]] == ["torch gate_up", "torch down"]
    assert len(found) == 14
    assert all(timing.us is None for timing in found)
    assert "MemoryError: 2 calls" in render(found)


def test_a_floor_is_what_must_be_read_or_multiplied() -> None:
    step = MoeStep(SMALL, random_layers(SMALL, CPU, 2), 64)
    assert step.num_distinct == 6
    bytes_only = Machine(bytes_per_s=1e6, flops_per_s=float("inf"))
    flops_only = Machine(bytes_per_s=float("inf"), flops_per_s=1e6)
    assert step.floor_us("gate_up", bytes_only) == 2 * (6 * 32 * 32 + 64 * 32)
    assert step.floor_us("gate_up", flops_only) == 2 * 128 * 32 * 32
    assert step.floor_us("down", flops_only) == 2 * 128 * 32 * 16
    assert step.floor_us("sum", bytes_only) == 2 * (128 + 64) * 32
    one = Timing(num_tokens=64, distinct_experts=6, kernel="sum", us=20.0, floor_us=5.0)
    assert "25%" in render([one])


def test_the_fastest_tiles_of_one_height_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer that likes wide tiles, and few tokens' kernels for up to 4 tokens."""
    chosen: list[object] = []

    def timer(calls: Sequence[Call]) -> float:
        arguments = [*getattr(calls[0], "args", ()), None]
        tile = arguments[-2]
        chosen.append(tile)
        if isinstance(tile, TilePlan):  # the whole step of a plan
            prefetched = tile.few_down.prefetch_k + tile.pairs[0].down.prefetch_k
            return (10.0 if 0 < tile.few_up_to <= 4 else 20.0) - prefetched / 1e3
        if isinstance(tile, Tile):
            if tile.num_stages == 5:
                raise RuntimeError("out of resource")
            return 1000.0 / tile.block_n + tile.block_k / 1e3
        return float(tile.block_n) if isinstance(tile, FewTile) else 0.5

    def blocks(step: MoeStep, block_m: int) -> list[Blocks]:
        return [align_reference(routes.ids, 16, block_m) for routes in step.routes]

    monkeypatch.setattr(MoeStep, "blocks", blocks)
    shape = ExpertShape(num_experts=16, num_active=2, hidden=32, inner=16)
    tuning = Tuning(shape, random_layers(shape, CPU, 1), timer, seconds=60)
    plan = tuning.plan((4, 8, 512))  # the first two are merged
    assert [pair.max_tokens for pair in plan.pairs] == [8, ALWAYS]
    assert plan.pairs[0].gate_up.block_m == 16
    assert plan.pairs[0].gate_up.block_n == 256
    assert plan.few_gate_up.block_n == min(tile.block_n for tile in FEW_TILES)
    assert plan.few_up_to == 4
    assert plan.few_down.prefetch_k == plan.pairs[0].down.prefetch_k == max(PREFETCHES)
    assert plan.pairs[0].gate_up.prefetch_k == plan.pairs[1].down.prefetch_k == 0
    assert {tile for tile in TILES if tile.block_m == 16} <= set(chosen)


def test_an_entry_of_the_table_is_python() -> None:
    down = replace(TILES[1], by_tma=True, prefetch_k=256)
    pair = Pair(max_tokens=64, gate_up=TILES[0], down=down)
    last = Pair(max_tokens=ALWAYS, gate_up=TILES[2], down=TILES[2])
    plan = TilePlan(few_up_to=4, few_gate_up=FEW_TILES[0], few_down=FEW_TILES[1],
                    pairs=(pair, last))  # fmt: skip
    entry = "{" + render_plan("NVIDIA H200", SMALL, plan) + "}"
    ast.parse(entry)
    assert eval(entry, vars(tiles)) == {"NVIDIA H200": {SMALL: plan}}


def test_every_number_of_tokens_has_tiles_to_try() -> None:
    for num_experts, num_active in ((128, 8), (8, 2), (60, 4)):
        shape = ExpertShape(num_experts=num_experts, num_active=num_active, hidden=64, inner=64)
        for num_tokens in TUNED_TOKENS:
            for height in heights(shape, num_tokens):
                assert any(tile.block_m == height for tile in TILES)


@pytest.mark.parametrize(
    ("num_calls", "us", "repeats"), [(4, 20.0, 8), (1, 20.0, 32), (4, 9_000.0, 3), (4, 56_000.0, 1)]
)
def test_long_calls_are_repeated_less(num_calls: int, us: float, repeats: int) -> None:
    assert num_repeats_in_graph(num_calls, us) == repeats

"""Which tiles a mixture gets: measured ones on their GPU, others by what fits."""

import math

import pytest

from kernels.moe.align import max_blocks
from kernels.moe.tiles import ALWAYS, TUNED, ExpertShape, TilePlan, build_plan, fitted, is_tuned
from tests.harness.gpus import GPUS, gpu

QWEN3_30B = ExpertShape(num_experts=128, num_active=8, hidden=2048, inner=768)
MIXTRAL = ExpertShape(num_experts=8, num_active=2, hidden=4096, inner=14336)
SHAPES = (QWEN3_30B, MIXTRAL, ExpertShape(num_experts=60, num_active=4, hidden=2048, inner=1408))


def check(plan: TilePlan, limit: int, element_bytes: int) -> None:
    ends = [pair.max_tokens for pair in plan.pairs]
    assert ends == sorted(set(ends))
    assert ends[-1] == ALWAYS
    for pair in plan.pairs:
        assert pair.gate_up.block_m == pair.down.block_m
        for tile in (pair.gate_up, pair.down):
            assert tile.num_stages * tile.stage_bytes(element_bytes) < limit
            for size in (tile.block_m, tile.block_n, tile.block_k):
                assert size >= 16
                assert math.log2(size).is_integer()
    for end in plan.ends:
        assert 0 < end < ALWAYS


@pytest.mark.parametrize("name", sorted(GPUS))
def test_every_tile_of_a_mixture_fits_the_shared_memory(name: str) -> None:
    device = gpu(name)
    limit = device.shared_memory_per_block_bytes
    for shape in SHAPES:
        for element_bytes in (2, 4):
            for is_deterministic in (True, False):
                plan = build_plan(
                    shape, device, element_bytes=element_bytes, is_deterministic=is_deterministic
                )
                check(plan, limit, element_bytes)


def test_tables_fit_the_gpu_that_they_are_of() -> None:
    for name, table in TUNED.items():
        device = gpu(name.removeprefix("NVIDIA "))
        for shape, plan in table.items():
            assert is_tuned(shape, device)
            assert build_plan(shape, device) is plan
            for pair in plan.pairs:
                assert fitted(pair.gate_up, device) == pair.gate_up
                assert fitted(pair.down, device) == pair.down
    assert is_tuned(QWEN3_30B, gpu("H200"))
    assert not is_tuned(QWEN3_30B, gpu("H100"))


def test_a_deterministic_mixture_has_one_tiling_for_all_steps() -> None:
    plan = build_plan(QWEN3_30B, gpu("H200"), is_deterministic=True)
    assert plan.few_up_to == 0
    assert len(plan.pairs) == 1
    assert plan.ends == ()


def test_more_routes_an_expert_get_higher_tiles() -> None:
    plan = build_plan(MIXTRAL, gpu("L4"))
    heights = [plan.pair(num_tokens).gate_up.block_m for num_tokens in (8, 100, 200, 8192)]
    assert heights == sorted(heights)
    assert heights[0] == 16
    assert heights[-1] == 128
    assert plan.pair(8) is plan.pairs[0]
    assert plan.pair(ALWAYS - 1) is plan.pairs[-1]


def test_unused_blocks_are_few() -> None:
    """A step of 8,192 tokens: at most one block an expert more than are full."""
    assert max_blocks(8192 * 8, 128, 128) == 512 + 127
    assert max_blocks(8, 128, 16) == 8

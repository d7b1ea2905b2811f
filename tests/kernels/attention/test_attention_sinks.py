"""Sinks and caps in the Triton kernels against float64, and that no other model's kernels change.

On a CPU the interpreter runs small cases in one process; all others need a GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels.attention.protocol import AttentionShape
from tests.harness.gpus import gpu
from tests.kernels.attention.attention_cases import (
    ROW_SETS,
    TOLERANCES,
    Problem,
    assert_close,
    build_problem,
    check,
    run_layer,
)
from tests.kernels.cross_compile import compiled_for
from tests.kernels.interpreter import drawn, run_interpreted

if TYPE_CHECKING:
    from kernels.attention.triton import TritonAttention

MODULE = "tests.kernels.attention.test_attention_sinks"
LONG_ROWS = [(63, 1), (64, 1), (1000, 1), (4159, 1), (0, 129), (700, 65), (127, 2)]
# Heads, KV heads and their size; sinks; factor on the scores; cap on the scores.
SHAPES = [
    ((8, 2), 64, True, None, None),
    ((6, 2), 64, True, 0.3, None),
    ((3, 3), 128, True, None, None),
    ((8, 1), 64, True, None, None),
    ((4, 2), 256, False, 0.05, None),
    ((4, 1), 256, True, None, None),
    ((4, 2), 256, False, 0.05, 1.5),
    ((6, 2), 64, True, 0.3, 5.0),
]


def _shape(
    heads: tuple[int, int],
    head_dim: int,
    has_sinks: bool,
    query_scale: float | None,
    softcap: float | None = None,
) -> AttentionShape:
    return AttentionShape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        layer_windows=(None, 3, 70),
        query_scale=query_scale,
        has_sinks=has_sinks,
        softcap=softcap,
    )


def _backend(problem: Problem, **options: Any) -> "TritonAttention":
    # Imported late: the interpreter is chosen when Triton is.
    from kernels.attention.triton import TritonAttention

    return TritonAttention(
        problem.shape,
        block_size=problem.block_size,
        dtype=problem.store.dtype,
        device=problem.store.device,
        **options,
    )


def _small_tiles() -> dict[str, Any]:
    from kernels.attention.decode_items import DecodeConfig
    from kernels.attention.triton_prefill import PrefillConfig

    return {
        "decode_config": DecodeConfig(tile_keys=16, min_part_tiles=1, num_programs=40),
        "prefill_config": PrefillConfig(tile_queries=16, tile_keys=16),
    }


def _check_shape(
    index: int, rows: Sequence[tuple[int, int]], dtype: torch.dtype, device: str, **options: Any
) -> None:
    problem = build_problem(rows, _shape(*SHAPES[index]), block_size=16, dtype=dtype, device=device)
    for layer in range(len(problem.shape.layer_windows)):
        check(_backend(problem, **options), problem, layer)


def interpreted_cases() -> None:
    """Called in a process of its own, where Triton interprets; one case, drawn anew."""
    for index in drawn(range(len(SHAPES)), 1):
        _interpreted(index)


def all_interpreted_cases() -> None:
    for index in range(len(SHAPES)):
        _interpreted(index)


def _interpreted(index: int) -> None:
    """Rows in several parts, each of which must not count the sink, and one kernel for all."""
    rows = [(2, 1), (150, 1), (0, 11), (33, 18)]
    _check_shape(index, rows, torch.float32, "cpu", **_small_tiles())
    tiles = _small_tiles()["prefill_config"]
    _check_shape(index, rows[1:3], torch.float16, "cpu", fixed_tile=True, prefill_config=tiles)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", ["interpreted_cases", pytest.param("all_interpreted_cases", marks=pytest.mark.nightly)]
)
def test_sinks_equal_float64_in_the_interpreter(cases: str) -> None:
    run_interpreted(f"{MODULE}:{cases}")


def test_sinks_that_the_shape_does_not_have_are_refused() -> None:
    from kernels.attention.reference import ReferenceAttention

    shape = _shape(*SHAPES[0])
    problem = build_problem([(0, 3)], shape, block_size=4, dtype=torch.float32)
    for has_sinks, sinks in ((True, None), (False, problem.sinks)):
        backend = ReferenceAttention(
            replace(shape, has_sinks=has_sinks),
            block_size=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        with pytest.raises(AssertionError, match="sinks"):
            run_layer(backend, replace(problem, sinks=sinks), 0, backend.plan(problem.step))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("head_dim", "has_sinks", "softcap"),
    [(64, True, None), (256, False, None), (256, True, None), (256, False, 50.0)],
)
def test_the_kernels_compile_for_a_hopper_gpu(
    head_dim: int, has_sinks: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.attention import decode_items, triton_decode, triton_prefill
    from kernels.attention import triton as attention

    device = gpu("H200")
    shape = _shape((8, 2), head_dim, has_sinks, None, softcap)
    problem = build_problem([(70, 1), (3, 40)], shape, block_size=16, dtype=torch.bfloat16)
    monkeypatch.setattr(attention, "check_supported", lambda *_: None)
    modules = attention, triton_prefill, triton_decode, decode_items
    with compiled_for(device, *modules) as shared_bytes:
        for fixed_tile in (False, True):
            backend = _backend(problem, fixed_tile=fixed_tile)
            for layer in range(len(shape.layer_windows)):
                run_layer(backend, problem, layer, backend.plan(problem.step))
    assert {"_decode_kernel", "_prefill_kernel"} <= shared_bytes.keys()
    assert max(shared_bytes.values()) <= device.shared_memory_per_block_bytes


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(SHAPES)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [ROW_SETS["everything"], LONG_ROWS], ids=["small", "long"])
def test_sinks_equal_float64_on_a_gpu(
    index: int, dtype: torch.dtype, rows: list[tuple[int, int]]
) -> None:
    _check_shape(index, rows, dtype, "cuda")
    _check_shape(index, rows, dtype, "cuda", fixed_tile=True)


# What a library warns of while it is imported must not fail, and so break, the import.
@pytest.mark.filterwarnings("default")
@pytest.mark.gpu
@pytest.mark.parametrize(
    "index", [i for i, shape in enumerate(SHAPES) if shape[2] and not shape[4]]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [ROW_SETS["everything"], LONG_ROWS], ids=["small", "long"])
def test_sinks_in_bfloat16_equal_float64_by_flash_attention_3(
    index: int, dtype: torch.dtype, rows: list[tuple[int, int]]
) -> None:
    from kernels.attention.flash_attn import FlashAttention

    shape = _shape(*SHAPES[index])
    problem = build_problem(rows, shape, block_size=16, dtype=dtype, device="cuda")
    assert problem.sinks is not None
    problem.sinks = problem.sinks.bfloat16().float()
    device = torch.device("cuda")
    backend = FlashAttention(shape, block_size=16, dtype=dtype, device=device)
    for layer in range(len(shape.layer_windows)):
        check(backend, problem, layer)


@pytest.mark.gpu
def test_sinks_of_gpt_oss_shapes_in_long_rows() -> None:
    """64 heads of 64 over 8 KV heads; a window of 128 every other layer; rows in many parts."""
    shape = AttentionShape(
        num_heads=64, num_kv_heads=8, head_dim=64, layer_windows=(128, None), has_sinks=True
    )
    rows = [(5, 1), (127, 1), (128, 1), (129, 1), (9000, 1), (30_000, 1), (0, 700), (2000, 300)]
    problem = build_problem(rows, shape, block_size=16, dtype=torch.bfloat16, device="cuda")
    backend = _backend(problem)
    metadata = backend.plan(problem.step)
    for layer in range(2):
        first = run_layer(backend, problem, layer, metadata)
        assert_close(first, problem.exact(layer), TOLERANCES[torch.bfloat16])
        for _ in range(20):
            assert torch.equal(run_layer(backend, problem, layer, metadata), first)

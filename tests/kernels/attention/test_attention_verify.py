"""Attention of rows with a few new tokens against float64: interpreted, compiled, and on a GPU."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kernels.attention.protocol import AttentionShape
from kernels.kv.scales import KvScales
from tests.harness.gpus import GPUS, gpu
from tests.harness.seeds import fresh_random
from tests.kernels.attention.attention_cases import (
    TOLERANCES,
    FixedRows,
    Problem,
    assert_close,
    build_problem,
    check,
    run_layer,
)
from tests.kernels.cross_compile import compiled_for
from tests.kernels.interpreter import drawn, run_interpreted

if TYPE_CHECKING:
    from kernels.attention.triton_verify import TritonVerify

WINDOWS = (None, 3, 70)
ONE_EACH = {capability: name for name, (capability, _, _) in GPUS.items()}
# (computed, new) per row: without history, across tiles and blocks, with and without drafts.
MIXED = [(0, 1), (31, 1), (0, 2), (13, 3), (15, 5), (16, 5), (62, 4), (130, 2), (300, 5)]
LONG = [(63, 1), (1000, 1), (4159, 5), (4092, 4), (700, 3), (8190, 2)]


def _shape(heads: tuple[int, int], head_dim: int, *, has_sinks: bool = False) -> AttentionShape:
    return AttentionShape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        layer_windows=WINDOWS,
        has_sinks=has_sinks,
    )


def _backend(problem: Problem, max_queries: int, **tiles: Any) -> "TritonVerify":
    # Imported late: the interpreter is chosen when Triton is.
    from kernels.attention.decode_items import DecodeConfig
    from kernels.attention.triton_verify import TritonVerify

    return TritonVerify(
        problem.shape,
        max_queries=max_queries,
        block_size=problem.block_size,
        dtype=problem.store.dtype,
        device=problem.store.device,
        config=DecodeConfig(**tiles) if tiles else None,
    )


SMALL_TILES = {"tile_keys": 16, "min_part_tiles": 1, "num_programs": 40}


def _check_layers(problem: Problem, max_queries: int, **tiles: Any) -> None:
    backend = _backend(problem, max_queries, **tiles)
    for layer in range(len(WINDOWS)):
        check(backend, problem, layer)


def _draw_rows(draw: random.Random, max_queries: int) -> list[tuple[int, int]]:
    counts = [draw.randint(1, max_queries) for _ in range(draw.randint(1, 4))]
    rows = [(draw.choice([0, 15, 16, draw.randrange(80)]), count) for count in counts]
    return sorted(rows, key=lambda row: (row[1] > 1, row[0]))


def _check_replays(
    problems: Sequence[Problem], replay_with: Callable[[Callable[[], list[Tensor]]], Any], **t: Any
) -> None:
    """One metadata over rows and tokens that change; the first problem comes twice."""
    first = problems[0]
    backend = _backend(first, 5, **t)
    num_rows, num_tokens = 8, 24
    num_blocks = max(len(problem.step.block_ids) for problem in problems)
    fixed = FixedRows(num_rows, num_blocks, first.store.device)
    max_keys = max(problem.step.max_keys for problem in problems)
    metadata = backend.open_graph(fixed.rows, max_keys=max_keys, max_tokens=num_tokens)
    num_heads, num_kv_heads = first.shape.num_heads, first.shape.num_kv_heads
    qkv = torch.zeros_like(first.qkv(0)[:1]).repeat(num_tokens, 1, 1)
    q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], 1)

    def step() -> list[Tensor]:
        backend.begin(metadata)
        return [backend.run(q, k, v, layer, first.store, metadata) for layer in range(3)]

    replay = replay_with(step)
    store = first.store.clone()
    for problem in (*problems, first):
        first.store.copy_(store if problem is first else problem.store)
        fixed.load(problem.step, num_tokens)
        backend.refresh(metadata, problem.step)
        qkv.fill_(torch.nan)
        qkv[: problem.step.num_tokens] = problem.qkv(0)
        for layer, out in enumerate(replay()):
            exact = problem.exact(layer)
            assert_close(out[: len(exact)], exact, TOLERANCES[out.dtype])


def _replay_problems(dtype: torch.dtype, device: str) -> list[Problem]:
    shape = _shape((8, 2), 64)
    size = (70, len(WINDOWS), 2, 16, shape.num_kv_heads, shape.head_dim)
    kinds = [[(3, 1), (40, 5), (130, 3)], [(200, 4)], [(0, 1), (5, 1), (16, 5), (17, 5), (70, 2)]]
    return [
        build_problem(
            rows,
            shape,
            block_size=16,
            dtype=dtype,
            device=device,
            store=torch.empty(size, dtype=dtype, device=device),
        )
        for rows in kinds
    ]


# ---- on a CPU -----------------------------------------------------------------------------------


def interpreted_checks() -> list[Callable[[], None]]:
    draw = fresh_random()

    def layers(
        heads: tuple[int, int],
        dtype: torch.dtype,
        block_size: int,
        max_queries: int,
        rows: Sequence[tuple[int, int]] | None = None,
        *,
        has_sinks: bool = False,
        **tiles: Any,
    ) -> Callable[[], None]:
        def run_check() -> None:
            found = rows or _draw_rows(draw, max_queries)
            shape = _shape(heads, 64, has_sinks=has_sinks)
            shape = replace(shape, softcap=2.0 if has_sinks else None)
            problem = build_problem(found, shape, block_size=block_size, dtype=dtype)
            _check_layers(problem, max_queries, **tiles)

        return run_check

    return [
        layers((8, 2), torch.float32, 16, 5, MIXED[2:7], **SMALL_TILES),
        layers((3, 1), torch.float32, 48, 5, **SMALL_TILES),
        layers((2, 2), torch.float16, 16, 9, **SMALL_TILES),
        layers((6, 2), torch.float16, 32, 3, has_sinks=True, **SMALL_TILES),
        layers((8, 1), torch.float32, 16, 2, [(40, 1), (191, 2)], **SMALL_TILES),
        layers((8, 2), torch.float32, 16, 4),
        lambda: _check_replays(_replay_problems(torch.float32, "cpu"), lambda step: step),
    ]


def interpreted_cases() -> None:
    """Called in a process of its own, where Triton interprets; some checks, drawn anew."""
    for run_check in drawn(interpreted_checks(), 1):
        run_check()


def all_interpreted_cases() -> None:
    for run_check in interpreted_checks():
        run_check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", ["interpreted_cases", pytest.param("all_interpreted_cases", marks=pytest.mark.nightly)]
)
def test_queries_of_a_row_equal_float64_in_the_interpreter(cases: str) -> None:
    run_interpreted(f"tests.kernels.attention.test_attention_verify:{cases}")


def refused_cases() -> None:
    """Called in a process of its own, where Triton interprets."""
    shape = _shape((4, 2), 64)
    problem = build_problem([(3, 4)], shape, block_size=16, dtype=torch.float32)
    with pytest.raises(AssertionError, match="a row of 4 tokens"):
        _backend(problem, 3).plan(problem.step)
    with pytest.raises(ValueError, match="head_dim 96"):
        _backend(replace(problem, shape=_shape((4, 2), 96)), 3)


@pytest.mark.slow
def test_longer_rows_and_other_heads_are_refused() -> None:
    run_interpreted("tests.kernels.attention.test_attention_verify:refused_cases")


def _compile(
    name: str, cases: Sequence[tuple[tuple[int, int], int, int]], nums_rows: Sequence[int]
) -> None:
    from kernels.attention import decode_items, triton, triton_verify

    device = gpu(name)
    with compiled_for(device, triton, decode_items, triton_verify) as found:
        for heads, head_dim, max_queries in cases:
            for has_sinks in (False, True)[: len(nums_rows)]:  # and numbers of 8 bits likewise
                shape = _shape(heads, head_dim, has_sinks=has_sinks)
                problem = build_problem(
                    [(5, 1), (90, 2)], shape, block_size=16, dtype=torch.bfloat16
                )
                wide = triton_verify._widened(shape, max_queries)
                store, scales = problem.store, None
                if has_sinks:
                    store = store.to(torch.float8_e4m3fn).view(torch.uint8)
                    scales = KvScales.of(torch.ones(len(WINDOWS), 2, heads[1]))
                for num_rows in nums_rows:
                    config = triton.fitted_decode(triton.decode_config_for(num_rows), wide, device)
                    rows = problem.step.device_rows
                    work = triton_verify.open_verify(rows, 100, shape, config, max_queries)
                    decode_items.plan_decode(work.split)
                    q = torch.empty(problem.step.num_tokens, *heads[:1], head_dim).bfloat16()
                    triton_verify.verify_attention(
                        q, torch.empty_like(q).flatten(1), 1, store, work, problem.sinks, scales
                    )
    assert {"_plan_kernel", "_verify_kernel"} == set(found)
    assert max(found.values()) <= device.shared_memory_per_block_bytes, found


def test_it_compiles_for_an_h200() -> None:
    _compile("H200", [((32, 8), 128, 4)], [64])


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(ONE_EACH.values()))
def test_it_compiles_for_every_gpu(name: str) -> None:
    _compile(name, [((32, 8), 128, 5), ((64, 8), 128, 9), ((8, 2), 256, 2)], [1, 256])


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "max_queries", "dtype"),
    [
        ((32, 8), 128, 16, 5, torch.bfloat16),
        ((32, 8), 128, 16, 9, torch.float16),
        ((16, 1), 128, 64, 5, torch.bfloat16),
        ((6, 2), 64, 48, 5, torch.float16),
        ((8, 2), 256, 32, 5, torch.bfloat16),
    ],
)
def test_queries_of_a_row_equal_float64(
    heads: tuple[int, int], head_dim: int, block_size: int, max_queries: int, dtype: torch.dtype
) -> None:
    for rows in (MIXED, LONG):
        for has_sinks in (False, True):
            shape = _shape(heads, head_dim, has_sinks=has_sinks)
            problem = build_problem(rows, shape, block_size=block_size, dtype=dtype, device="cuda")
            _check_layers(problem, max_queries)
            _check_layers(problem, max_queries, **SMALL_TILES)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 17, 200])
def test_many_rows_with_drafts_equal_float64_every_time(num_rows: int) -> None:
    draw = fresh_random()
    rows = sorted((draw.randrange(900), 4) for _ in range(num_rows))
    shape = replace(_shape((32, 8), 128), layer_windows=(None,))
    problem = build_problem(rows, shape, block_size=16, dtype=torch.bfloat16, device="cuda")
    backend = _backend(problem, 4)
    metadata = backend.plan(problem.step)
    first = run_layer(backend, problem, 0, metadata)
    assert_close(first, problem.exact(0), TOLERANCES[torch.bfloat16])
    for _ in range(20):  # the arrivals count from 0 each time
        assert torch.equal(run_layer(backend, problem, 0, metadata), first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_graph_follows_rows_and_tokens_that_change(dtype: torch.dtype) -> None:
    def capture(step: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = step()

        def replay() -> list[Tensor]:
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            return outs

        return replay

    _check_replays(_replay_problems(dtype, "cuda"), capture)

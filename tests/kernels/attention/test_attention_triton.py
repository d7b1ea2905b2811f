"""The Triton attention kernels against float64, at odd sizes, in replays and bit for bit.

On a CPU the interpreter runs small cases in one process; all others need a GPU.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kernels.attention.protocol import AttentionShape, build_step
from tests.harness.seeds import fresh_random
from tests.kernels.attention.attention_cases import (
    ROW_SETS,
    TOLERANCES,
    FixedRows,
    Problem,
    assert_close,
    build_problem,
    check,
    run_layer,
)
from tests.kernels.interpreter import drawn, run_interpreted

if TYPE_CHECKING:
    from kernels.attention.triton import TritonAttention

WINDOWS = (None, 3, 70)
LONG_ROWS = [(63, 1), (64, 1), (127, 1), (1000, 1), (4159, 1), (0, 129), (700, 65), (127, 2)]


def _shape(heads: tuple[int, int], head_dim: int, *, has_sinks: bool = False) -> AttentionShape:
    return AttentionShape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        layer_windows=WINDOWS,
        has_sinks=has_sinks,
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
    """Tiles so small that short rows are split, masked and combined in every way."""
    from kernels.attention.decode_items import DecodeConfig
    from kernels.attention.triton_prefill import PrefillConfig

    return {
        "decode_config": DecodeConfig(tile_keys=16, min_part_tiles=1, num_programs=40),
        "prefill_config": PrefillConfig(tile_queries=16, tile_keys=16),
    }


def _check_all_layers(problem: Problem, backend: "TritonAttention") -> None:
    for layer in range(len(problem.shape.layer_windows)):
        check(backend, problem, layer)


def _alone(problem: Problem, row: int, start: int, end: int) -> Problem:
    """Tokens [start, end) of one row's new tokens as a step of their own, on the same blocks."""
    step = problem.step
    computed = int(step.num_computed_tokens[row])
    blocks = step.row_blocks(row)[: -(-(computed + end) // problem.block_size)]
    return replace(
        problem,
        step=build_step([end - start], [computed + start], [blocks.tolist()], problem.store.device),
        keys=[problem.keys[row][:, : computed + end]],
        values=[problem.values[row][:, : computed + end]],
        queries=[problem.queries[row][start:end]],
    )


def _run(backend: "TritonAttention", problem: Problem, layer: int) -> Tensor:
    return run_layer(backend, problem, layer, backend.plan(problem.step))


def _check_bits(problem: Problem, backend: "TritonAttention", cuts: random.Random) -> None:
    """Each row alone, in two chunks and, its last tokens, one by one: the bits of the batch."""
    for layer in range(len(problem.shape.layer_windows)):
        together = _run(backend, problem, layer)
        assert_close(together, problem.exact(layer), TOLERANCES[together.dtype])
        first_token = 0
        for row, num_new in enumerate(problem.step.num_new_tokens.tolist()):
            expected = together[first_token : first_token + num_new]
            first_token += num_new
            cut = cuts.randrange(num_new)
            tail = range(max(num_new - 3, 0), num_new)
            spans = [(0, num_new), (0, cut), (cut, num_new), *((i, i + 1) for i in tail)]
            for start, end in spans:
                if start < end:
                    part = _run(backend, _alone(problem, row, start, end), layer)
                    assert torch.equal(part, expected[start:end]), (layer, row, start, end)


def _check_replays(
    problems: Sequence[Problem], num_rows: int, replay_with: Callable[..., Any], **options: Any
) -> None:
    """One metadata over rows whose content changes; `replay_with(step)` makes a replayed step."""
    first = problems[0]
    backend = _backend(first, **options)
    num_blocks = max(len(problem.step.block_ids) for problem in problems)
    fixed = FixedRows(num_rows, num_blocks, first.store.device)
    metadata = backend.open_graph(fixed.rows, max_keys=max(p.step.max_keys for p in problems))
    num_layers = len(first.shape.layer_windows)
    qkv = torch.zeros_like(first.qkv(0)[:1]).repeat(num_rows, 1, 1)
    q, k, v = torch.split(
        qkv, [first.shape.num_heads, first.shape.num_kv_heads, first.shape.num_kv_heads], 1
    )

    def step() -> list[Tensor]:
        backend.begin(metadata)
        return [backend.run(q, k, v, layer, first.store, metadata) for layer in range(num_layers)]

    replay = replay_with(step)
    store = first.store.clone()
    for problem in (*problems, first):
        # All use one store's memory; the first one's content was overwritten by the later ones.
        first.store.copy_(store if problem is first else problem.store)
        fixed.load(problem.step)
        backend.refresh(metadata, problem.step)
        qkv.fill_(torch.nan)
        qkv[: problem.step.num_rows] = problem.qkv(0)
        for layer, out in enumerate(replay()):
            exact = problem.exact(layer)
            assert_close(out[: len(exact)], exact, TOLERANCES[out.dtype])


def _replay_problems(
    dtype: torch.dtype, device: str, rows: Sequence[Sequence[int]]
) -> list[Problem]:
    """Problems of one store size, histories of single-token rows each."""
    largest = max(sum(-(-(n + 1) // 16) for n in histories) for histories in rows)
    shape = _shape((8, 2), 64)
    size = (largest + 3, len(WINDOWS), 2, 16, shape.num_kv_heads, shape.head_dim)
    return [
        build_problem(
            [(history, 1) for history in sorted(histories)],
            shape,
            block_size=16,
            dtype=dtype,
            device=device,
            store=torch.empty(size, dtype=dtype, device=device),
        )
        for histories in rows
    ]


# ---- on a CPU -----------------------------------------------------------------------------------


def interpreted_cases() -> None:
    """Called in a process of its own, where Triton interprets; some checks, drawn anew."""
    for run_check in drawn(interpreted_checks(), 1):
        run_check()


def all_interpreted_cases() -> None:
    for run_check in interpreted_checks():
        run_check()


def interpreted_checks() -> list[Callable[[], None]]:
    everything = ROW_SETS["everything"]
    tiles = _small_tiles()
    prefill_config = tiles["prefill_config"]

    def layers(
        rows: Sequence[tuple[int, int]],
        heads: tuple[int, int],
        dtype: torch.dtype,
        block_size: int,
        windows: tuple[int | None, ...] = WINDOWS,
        **tiles: Any,
    ) -> Callable[[], None]:
        def run_check() -> None:
            shape = replace(_shape(heads, 64), layer_windows=windows)
            problem = build_problem(rows, shape, block_size=block_size, dtype=dtype)
            _check_all_layers(problem, _backend(problem, **tiles))

        return run_check

    def same_bits() -> None:
        problem = build_problem(everything, _shape((8, 2), 64), block_size=16, dtype=torch.float32)
        fixed = _backend(problem, fixed_tile=True, prefill_config=prefill_config)
        _check_bits(problem, fixed, fresh_random())

    def replays(**backend: Any) -> Callable[[], None]:
        def run_check() -> None:
            rows = [[3, 40, 130], [200], [0, 1, 16, 17, 70]]
            problems = _replay_problems(torch.float32, "cpu", rows)
            _check_replays(problems, 6, lambda step: step, **backend)

        return run_check

    return [
        layers(ROW_SETS["decodes"], (8, 2), torch.float32, 16, **tiles),
        layers(everything, (3, 1), torch.float32, 48, **tiles),
        layers(everything, (2, 2), torch.float16, 16, **tiles),
        # More parts than are combined at once, more rows than are searched at once.
        layers(ROW_SETS["far_apart_decodes"], (16, 1), torch.float16, 32, **tiles),
        layers([(0, 2)] * 127 + [(5, 3)] * 3, (2, 1), torch.float32, 16, (3,), **tiles),
        layers(everything, (8, 2), torch.float32, 16),
        same_bits,
        replays(**tiles),
        replays(fixed_tile=True, prefill_config=prefill_config),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", ["interpreted_cases", pytest.param("all_interpreted_cases", marks=pytest.mark.nightly)]
)
def test_small_cases_equal_float64_in_the_interpreter(cases: str) -> None:
    run_interpreted(f"tests.kernels.attention.test_attention_triton:{cases}")


def plan_cases() -> None:
    """Called in a process of its own, where Triton interprets."""
    from kernels.attention.decode_items import DecodeConfig, open_decode, plan_decode

    draw = fresh_random()
    config = DecodeConfig(tile_keys=16, min_part_tiles=2, num_programs=10)
    for num_rows in (1, 7, 1025):
        lengths = [draw.choice([1, 15, 16, 17, draw.randrange(1, 400)]) for _ in range(num_rows)]
        lengths[-1] = draw.choice([0, 400])
        rows = FixedRows(num_rows, 1, "cpu").rows
        rows.num_keys.copy_(torch.tensor(lengths))
        rows.cu_blocks.copy_(torch.arange(num_rows + 1) * 25)
        work = open_decode(rows, 400, _shape((4, 2), 64), config)
        plan_decode(work)
        for window, items in work.items.items():
            _assert_parts_cover_rows(items[items[:, 2] > 0].tolist(), lengths, window)
        assert len(items) <= num_rows + 5
    _assert_parts_are_balanced(6, 32, 128)


def _assert_parts_are_balanced(*row_tiles: int) -> None:
    """Parts of sqrt(tiles / 8), rounded, where programs are left for all."""
    from kernels.attention.decode_items import DecodeConfig, open_decode, plan_decode

    rows = FixedRows(len(row_tiles), 1, "cpu").rows
    rows.num_keys.copy_(torch.tensor([16 * tiles for tiles in row_tiles]))
    rows.cu_blocks.copy_(torch.arange(len(row_tiles) + 1) * 128)
    config = DecodeConfig(tile_keys=16, min_part_tiles=1, parts_a_tile=8, num_programs=1000)
    work = open_decode(rows, 16 * 128, _shape((4, 2), 64), config)
    plan_decode(work)
    items = work.items[None].tolist()
    num_parts = {item[0]: item[2] for item in items if item[2]}
    assert num_parts == {0: 6, 1: 16, 2: 32}


def _assert_parts_cover_rows(
    items: list[list[int]], lengths: list[int], window: int | None
) -> None:
    expected_rows = [row for row in range(len(lengths) - 1, -1, -1) if lengths[row]]
    assert list(dict.fromkeys(item[0] for item in items)) == expected_rows
    at = 0
    for row in expected_rows:
        first_seen = 0 if window is None else max(lengths[row] - window, 0)
        key = first_seen // 16 * 16
        num_parts = items[at][2]
        for part in range(num_parts):
            fields = items[at + part][:7]
            assert fields == [row, part, num_parts, key, fields[4], row * 25, first_seen], fields
            assert fields[4] > key
            key = fields[4]
        assert key == lengths[row], f"row {row} ends at {lengths[row]}, its parts at {key}"
        at += num_parts


@pytest.mark.slow
def test_the_items_of_a_row_cover_what_its_query_sees() -> None:
    run_interpreted("tests.kernels.attention.test_attention_triton:plan_cases")


def refused_cases() -> None:
    """Called in a process of its own, where Triton interprets."""
    shape = _shape((4, 2), 64)
    good = build_problem([(0, 1)], shape, block_size=16, dtype=torch.float32)
    narrow = replace(good, shape=_shape((4, 2), 96))
    with pytest.raises(ValueError, match="head_dim 96"):
        _backend(narrow)
    with pytest.raises(ValueError, match="block_size 24"):
        _backend(replace(good, block_size=24))
    with pytest.raises(ValueError, match=r"dtype torch\.bfloat16"):
        _backend(replace(good, store=good.store.bfloat16()))


@pytest.mark.slow
def test_what_the_kernels_do_not_cover_is_refused() -> None:
    run_interpreted("tests.kernels.attention.test_attention_triton:refused_cases")


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype"),
    [
        ((4, 4), 64, 16, torch.bfloat16),
        ((8, 2), 128, 16, torch.bfloat16),
        ((8, 2), 128, 32, torch.float16),
        ((16, 2), 64, 48, torch.float16),
        ((16, 1), 128, 64, torch.bfloat16),
        ((6, 2), 128, 48, torch.bfloat16),
    ],
)
def test_attention_equals_float64(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    for rows in (ROW_SETS["everything"], LONG_ROWS):
        problem = build_problem(
            rows, _shape(heads, head_dim), block_size=block_size, dtype=dtype, device="cuda"
        )
        _check_all_layers(problem, _backend(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROW_SETS.values(), ids=ROW_SETS)
def test_small_tiles_equal_float64(rows: list[tuple[int, int]]) -> None:
    problem = build_problem(
        rows, _shape((8, 2), 128), block_size=16, dtype=torch.float16, device="cuda"
    )
    _check_all_layers(problem, _backend(problem, **_small_tiles()))


@pytest.mark.gpu
def test_one_long_row_among_many_short_ones_is_split() -> None:
    draw = fresh_random()
    rows = [(history, 1) for history in sorted(draw.randrange(300) for _ in range(200))]
    problem = build_problem(
        [*rows, (30_000, 1)],
        replace(_shape((32, 8), 128), layer_windows=(None,)),
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    backend = _backend(problem)
    metadata = backend.plan(problem.step)
    assert metadata.decode is not None
    (items,) = metadata.decode.items.values()
    assert int(items[0, 2]) > 8, f"{int(items[0, 2])} parts"
    # Again and again with one metadata: the arrivals count from 0 each time.
    first = run_layer(backend, problem, 0, metadata)
    assert_close(first, problem.exact(0), TOLERANCES[torch.bfloat16])
    for _ in range(50):
        assert torch.equal(run_layer(backend, problem, 0, metadata), first)


@pytest.mark.gpu
def test_a_store_beyond_2_31_elements_is_addressed() -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=1, head_dim=128, layer_windows=(None,) * 2)
    store = torch.empty((2**20 // 2, 2, 2, 16, 1, 128), dtype=torch.bfloat16, device="cuda")
    assert store.numel() > 2**31
    problem = build_problem(
        [(500, 1), (900, 30)],
        shape,
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
        store=store,
    )
    assert problem.step.block_ids.max() > 2**18
    check(_backend(problem), problem, 1)


def _capture(step: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()

    def replay() -> list[Tensor]:
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        return outs

    return replay


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "fixed_tile"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)],
)
def test_a_graph_follows_rows_that_change(dtype: torch.dtype, fixed_tile: bool) -> None:
    histories = [[3, 40, 130], [5000], [0, 1, 16, 17, 700, 900, 4000], [*range(0, 1100, 100)]]
    problems = _replay_problems(dtype, "cuda", histories)
    _check_replays(problems, 12, _capture, fixed_tile=fixed_tile)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [
        ((32, 8), 128, torch.bfloat16),
        ((6, 2), 64, torch.float16),
        ((4, 4), 128, torch.float16),
        ((16, 1), 64, torch.bfloat16),
    ],
)
def test_fixed_tiles_give_the_same_bits_in_any_company(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    cuts = fresh_random()
    for rows in (ROW_SETS["everything"], LONG_ROWS):
        problem = build_problem(
            rows, _shape(heads, head_dim), block_size=16, dtype=dtype, device="cuda"
        )
        _check_bits(problem, _backend(problem, fixed_tile=True), cuts)


@pytest.mark.gpu
def test_nothing_compiles_for_sizes_that_vary() -> None:
    from kernels.compilation import CompilationCounter

    shape = _shape((8, 2), 64)

    def run(rows: list[tuple[int, int]]) -> None:
        problem = build_problem(
            rows, shape, block_size=16, dtype=torch.float16, device="cuda", seed=1
        )
        for fixed_tile in (False, True):
            _check_all_layers(problem, _backend(problem, fixed_tile=fixed_tile))

    for num_rows in (1, 16, 129):  # few, some and many rows are cut in different ways
        run([(5, 1)] * num_rows + [(3, 2)])
    counter = CompilationCounter()
    counter.install()
    run([(0, 1)])
    run([(16, 1)] * 17)
    run([(16, 1)] * 200)
    run([(9, 1), (700, 1), (800, 1), (0, 16), (64, 33)])
    assert counter.names == []

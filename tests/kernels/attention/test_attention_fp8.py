"""Attention over a store of e4m3 numbers against float64 of what the numbers stand for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.protocol import AttentionBackend, AttentionShape
from kernels.attention.reference import ReferenceAttention
from kernels.kv.scales import KvScales
from tests.harness.seeds import fresh_random, fresh_seed
from tests.kernels.attention.attention_cases import (
    ROW_SETS,
    TOLERANCES,
    FixedRows,
    Problem,
    assert_close,
    build_problem,
)
from tests.kernels.interpreter import drawn, run_interpreted

WINDOWS = (None, 3, 70)
VERIFIED = [(0, 1), (31, 1), (0, 2), (13, 3), (62, 4), (130, 2)]
VERIFY_TILES = {"tile_keys": 16, "min_part_tiles": 1, "num_programs": 40}
LONG_ROWS = [(63, 1), (127, 1), (1000, 1), (4159, 1), (0, 129), (700, 65), (127, 2)]
NUM_LONG = 128 * 1024  # keys


@dataclass(kw_only=True)
class Stored:
    """A problem whose keys and values are what a store of e4m3 numbers has."""

    problem: Problem
    store: Tensor  # uint8
    scales: KvScales
    dtype: torch.dtype  # of queries

    def run(self, backend: AttentionBackend, layer: int, metadata: Any) -> Tensor:
        """The step's own K and V are NaN where they are given: the stored ones count."""
        problem = self.problem
        q = torch.cat(problem.queries)
        fresh = torch.full(
            (len(q), problem.shape.num_kv_heads, problem.shape.head_dim), torch.nan
        ).to(q)
        return backend.run(
            q, fresh, fresh, layer, self.store, metadata, None, problem.sinks, self.scales
        )

    def check(self, backend: AttentionBackend, tolerance: float | None = None) -> None:
        metadata = backend.plan(self.problem.step)
        for layer in range(len(self.problem.shape.layer_windows)):
            out = self.run(backend, layer, metadata)
            assert out.dtype == self.dtype
            assert_close(out, self.problem.exact(layer), tolerance or TOLERANCES[self.dtype])


def stored_problem(
    rows: Sequence[tuple[int, int]],
    shape: AttentionShape,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Stored:
    """Random scales, the largest a hundred times the least, so that the wrong one shows."""
    problem = build_problem(rows, shape, block_size=block_size, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(fresh_seed())
    size = (len(shape.layer_windows), 2, shape.num_kv_heads)
    scales = (0.003 * 100.0 ** torch.rand(size, generator=generator)).to(device)
    return stored(problem, scales)


def stored(problem: Problem, scales: Tensor) -> Stored:
    by_slot = scales[None, :, :, None, :, None]
    numbers = (problem.store.float() / by_slot).clamp(-448, 448).to(torch.float8_e4m3fn)
    for plane, rows in ((0, problem.keys), (1, problem.values)):
        of_plane = scales[:, plane][:, None, :, None]
        for row, x in enumerate(rows):
            kept = (x.float() / of_plane).clamp(-448, 448).to(torch.float8_e4m3fn)
            rows[row] = kept.double() * of_plane.double()
    return Stored(
        problem=problem,
        store=numbers.view(torch.uint8),
        scales=KvScales.of(scales),
        dtype=problem.store.dtype,
    )


def _shape(heads: tuple[int, int], head_dim: int, **more: Any) -> AttentionShape:
    return AttentionShape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        **{"layer_windows": WINDOWS, **more},
    )


def _reference(case: Stored) -> ReferenceAttention:
    return ReferenceAttention(
        case.problem.shape,
        block_size=case.problem.block_size,
        dtype=case.dtype,
        device=case.store.device,
        is_fp8=True,
    )


def _triton(case: Stored, **options: Any) -> Any:
    from kernels.attention.triton import TritonAttention  # the interpreter is chosen when Triton is

    return TritonAttention(
        case.problem.shape,
        block_size=case.problem.block_size,
        dtype=case.dtype,
        device=case.store.device,
        **options,
    )


def _verify(case: Stored, max_queries: int, **tiles: Any) -> Any:
    from kernels.attention.decode_items import DecodeConfig
    from kernels.attention.triton_verify import TritonVerify

    return TritonVerify(
        case.problem.shape,
        max_queries=max_queries,
        block_size=case.problem.block_size,
        dtype=case.dtype,
        device=case.store.device,
        config=DecodeConfig(**tiles) if tiles else None,
    )


def _small_tiles() -> dict[str, Any]:
    from kernels.attention.decode_items import DecodeConfig
    from kernels.attention.triton_prefill import PrefillConfig

    return {
        "decode_config": DecodeConfig(tile_keys=16, min_part_tiles=1, num_programs=40),
        "prefill_config": PrefillConfig(tile_queries=16, tile_keys=16),
    }


# ---- the reference -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROW_SETS.values(), ids=ROW_SETS)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_reference_attends_to_what_is_stored(
    rows: list[tuple[int, int]], has_sinks: bool
) -> None:
    for block_size, heads in ((1, (6, 2)), (7, (3, 3))):
        shape = _shape(heads, 10, has_sinks=has_sinks)
        case = stored_problem(rows, shape, block_size=block_size, dtype=torch.float32)
        case.check(_reference(case))


def test_scales_are_asked_for_where_the_store_has_numbers() -> None:
    case = stored_problem([(3, 1)], _shape((4, 2), 8), block_size=4, dtype=torch.float32)
    backend = _reference(case)
    metadata = backend.plan(case.problem.step)
    with pytest.raises(AssertionError, match="scales None"):
        backend.run(*[torch.cat(case.problem.queries)] * 3, 0, case.store, metadata)


# ---- a needle in 128k keys -----------------------------------------------------------------------


def _needle(dtype: torch.dtype, device: str, num_keys: int = NUM_LONG) -> tuple[Stored, Tensor]:
    """One decoding row over random keys, and one key that the query of each head looks for.

    Returns what float64 says of keys and values before they were rounded, too.
    """
    shape = _shape((2, 1), 64, layer_windows=(None,))
    problem = build_problem([(num_keys - 1, 1)], shape, block_size=16, dtype=dtype, device=device)
    place = fresh_random().randrange(num_keys // 10, num_keys)
    key = problem.keys[0][0, place]  # [kv_heads, head_dim]
    # The needle's score; the others' are random, with a standard deviation of 22 / 8.
    queries = 22.0 * 64**0.5 * key.float() / key.float().square().sum(dim=-1, keepdim=True)
    problem.queries[0] = queries.repeat_interleave(2, 0)[None].to(dtype)
    blocks = problem.step.row_blocks(0)
    assert problem.store[blocks[place // 16], 0, 0, place % 16].equal(key)
    exact = problem.exact(0)
    largest = torch.stack(
        [t[0][0].float().abs().amax((0, 2)) for t in (problem.keys, problem.values)]
    )
    return stored(problem, largest[None] / 448), exact


def _check_needle(case: Stored, unrounded: Tensor, backend: AttentionBackend) -> None:
    out = case.run(backend, 0, backend.plan(case.problem.step))
    assert_close(out, case.problem.exact(0), TOLERANCES[case.dtype])
    # The needle's value is rounded, by 1/16 at most, and so is its key, which moves its weight.
    assert_close(out, unrounded, 0.15)


def test_a_needle_in_128k_keys_is_found_as_float64_finds_it() -> None:
    case, unrounded = _needle(torch.float32, "cpu")
    _check_needle(case, unrounded, _reference(case))


def needle_case() -> None:
    """Called in a process of its own, where Triton interprets."""
    case, unrounded = _needle(torch.float16, "cpu", 8 * 1024)
    _check_needle(case, unrounded, _triton(case))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_needle_is_found_in_the_interpreter() -> None:
    run_interpreted("tests.kernels.attention.test_attention_fp8:needle_case")


# ---- the Triton kernels --------------------------------------------------------------------------


def interpreted_cases() -> None:
    """Called in a process of its own, where Triton interprets; a check, drawn anew."""
    for run_check in drawn(interpreted_checks(), 1):
        run_check()


def all_interpreted_cases() -> None:
    for run_check in interpreted_checks():
        run_check()


def interpreted_checks() -> list[Callable[[], None]]:
    everything, tiles = ROW_SETS["everything"], _small_tiles()

    def layers(
        rows: Sequence[tuple[int, int]], heads: tuple[int, int], dtype: torch.dtype, **options: Any
    ) -> Callable[[], None]:
        def run_check() -> None:
            shape = _shape(heads, 64, has_sinks=options.pop("has_sinks", False))
            case = stored_problem(
                rows, shape, block_size=options.pop("block_size", 16), dtype=dtype
            )
            case.check(_triton(case, **options))

        return run_check

    return [
        layers(ROW_SETS["decodes"], (8, 2), torch.float32, **tiles),
        layers(everything, (3, 1), torch.float16, block_size=48, **tiles),
        layers(ROW_SETS["far_apart_decodes"], (16, 1), torch.float16, has_sinks=True, **tiles),
        layers(everything, (8, 2), torch.float32, has_sinks=True),
        layers(everything, (2, 2), torch.float32, fixed_tile=True),
        lambda: check_bits("cpu", torch.float32, **tiles),
        check_replays,
        check_verification,
    ]


def check_verification() -> None:
    for dtype, has_sinks in ((torch.float32, False), (torch.float16, True)):
        shape = _shape((8, 2), 64, has_sinks=has_sinks)
        case = stored_problem(VERIFIED, shape, block_size=16, dtype=dtype)
        case.check(_verify(case, 4, **VERIFY_TILES))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", ["interpreted_cases", pytest.param("all_interpreted_cases", marks=pytest.mark.nightly)]
)
def test_small_cases_equal_float64_in_the_interpreter(cases: str) -> None:
    run_interpreted(f"tests.kernels.attention.test_attention_fp8:{cases}")


def check_bits(device: str, dtype: torch.dtype, **options: Any) -> None:
    """With fixed tiles every token has the same bits alone, as a prompt's and as an answer's."""
    options.pop("decode_config", None)
    case = stored_problem(
        [(2, 1), (40, 7)], _shape((8, 2), 64), block_size=16, dtype=dtype, device=device
    )
    backend = _triton(case, fixed_tile=True, **options)
    problem, step = case.problem, case.problem.step
    for layer in range(len(WINDOWS)):
        together = case.run(backend, layer, backend.plan(step))
        for token in range(7):
            from kernels.attention.protocol import build_step

            blocks = step.row_blocks(1)[: -(-(41 + token) // 16)].tolist()
            alone = replace(
                problem,
                step=build_step([1], [40 + token], [blocks], device),
                queries=[problem.queries[1][token : token + 1]],
            )
            part = replace(case, problem=alone).run(backend, layer, backend.plan(alone.step))
            assert torch.equal(part[0], together[1 + token]), (layer, token)


def check_replays(
    device: str = "cpu", replay_with: Callable[[Callable[[], Tensor]], Any] = lambda step: step
) -> None:
    """One metadata over decoding rows whose content changes, as in a CUDA graph."""
    shape = _shape((8, 2), 64, layer_windows=(None,))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    cases = [
        stored_problem([(n, 1) for n in lengths], shape, block_size=16, dtype=dtype, device=device)
        for lengths in ([3, 40, 130], [200], [0, 1, 16, 17])
    ]
    first = cases[0]
    store = torch.zeros((40, *first.store.shape[1:]), dtype=torch.uint8, device=device)
    scale = first.scales.scale.clone()
    scales = KvScales.of(scale)
    backend = _triton(first, **_small_tiles())
    fixed = FixedRows(5, 40, device)
    metadata = backend.open_graph(fixed.rows, max_keys=201)
    q = torch.zeros((5, 8, 64), dtype=dtype, device=device)

    def step() -> Tensor:
        backend.begin(metadata)
        out: Tensor = backend.run(q, q, q, 0, store, metadata, None, None, scales)
        return out

    replay = replay_with(step)
    for case in cases:
        num_rows = case.problem.step.num_rows
        store[: len(case.store)] = case.store
        scales.scale.copy_(case.scales.scale)
        fixed.load(case.problem.step)
        q[:num_rows] = torch.cat(case.problem.queries)
        assert_close(replay()[:num_rows], case.problem.exact(0), TOLERANCES[dtype])


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((4, 4), 64, 16), ((8, 2), 128, 16), ((16, 1), 128, 64), ((6, 2), 128, 48), ((8, 4), 256, 16)],
)
def test_attention_on_a_gpu_equals_float64(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    for rows in (ROW_SETS["everything"], LONG_ROWS, [(n // 2, 1) for n in range(300)]):
        for has_sinks in (False, True):
            shape = _shape(heads, head_dim, has_sinks=has_sinks)
            case = stored_problem(rows, shape, block_size=block_size, dtype=dtype, device="cuda")
            case.check(_triton(case))
            case.check(_triton(case, fixed_tile=True))
        case.check(_triton(case, **_small_tiles()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((6, 2), 64), ((16, 1), 128)])
def test_queries_that_verify_drafts_equal_float64(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    for rows in (VERIFIED, [(1000, 1), (4159, 5), (4092, 4), (8190, 2)]):
        for has_sinks in (False, True):
            shape = _shape(heads, head_dim, has_sinks=has_sinks)
            case = stored_problem(rows, shape, block_size=16, dtype=dtype, device="cuda")
            case.check(_verify(case, 5))
            case.check(_verify(case, 5, **VERIFY_TILES))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference_on_a_gpu_equals_float64(dtype: torch.dtype) -> None:
    shape = _shape((8, 2), 80)
    case = stored_problem(ROW_SETS["everything"], shape, block_size=16, dtype=dtype, device="cuda")
    case.check(_reference(case))


@pytest.mark.gpu
def test_fixed_tiles_give_the_same_bits_on_a_gpu() -> None:
    for _ in range(5):
        check_bits("cuda", torch.bfloat16)


@pytest.mark.gpu
def test_a_needle_is_found_on_a_gpu() -> None:
    case, unrounded = _needle(torch.bfloat16, "cuda")
    for options in ({}, {"fixed_tile": True}):
        _check_needle(case, unrounded, _triton(case, **options))


@pytest.mark.gpu
def test_a_captured_graph_follows_lengths_and_scales() -> None:
    def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    check_replays("cuda", captured)

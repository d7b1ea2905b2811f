"""Latent attention of rows that verify drafts against float64: interpreted, compiled, on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import select_verify
from kernels.attention.latent import LatentShape, PhasedLatent
from kernels.attention.latent_reference import ReferenceLatent
from kernels.attention.names import AttentionNames, BackendUnavailable
from kernels.attention.select import build_attention
from tests.harness.gpus import GPUS, gpu
from tests.harness.seeds import fresh_random
from tests.kernels.attention.attention_cases import (
    TOLERANCES,
    FixedRows,
    assert_close,
)
from tests.kernels.attention.test_latent_attention import (
    GLM,
    SMALL,
    V2_LITE,
    V3,
    LatentProblem,
    Rows,
    _triton,
    build_problem,
    check,
    run,
)
from tests.kernels.attention.test_latent_attention import _shape as latent_shape
from tests.kernels.cross_compile import compiled_for
from tests.kernels.interpreter import drawn, run_interpreted

ONE_EACH = {capability: name for name, (capability, _, _) in GPUS.items()}
# (computed, new) per row: without history, across tiles and blocks, with and without drafts.
MIXED = [(0, 1), (31, 1), (0, 2), (13, 3), (15, 5), (16, 5), (62, 4), (130, 2)]
LONG = [(63, 1), (1000, 1), (4159, 5), (4092, 4), (700, 3), (8190, 2)]


def _verify(problem: LatentProblem, max_queries: int, num_tiles: int | None = None) -> Any:
    """num_tiles: of a row's lines, with tiles of keys so small that short rows are split."""
    # Imported late: the interpreter is chosen when Triton is.
    from kernels.attention.decode_items import DecodeConfig
    from kernels.attention.latent_verify import LatentVerify
    from kernels.attention.latent_work import LatentConfig

    config = None
    if num_tiles is not None:
        small = DecodeConfig(tile_keys=16, min_part_tiles=1, num_programs=24)
        least_chunk = 16 if problem.scales is None else 32
        config = LatentConfig(
            decode=small, num_tiles=num_tiles, num_chunks=problem.shape.rank // least_chunk
        )
    device = problem.store.device
    return LatentVerify(problem.shape, max_queries=max_queries, device=device, config=config)


# ---- on a CPU ------------------------------------------------------------------------------------


def _check_replays(
    replay_with: Callable[[Callable[[], Tensor]], Callable[[], Tensor]],
    shape: LatentShape,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    num_tiles: int | None = 1,
) -> None:
    """Fixed buffers over rows and tokens that change, as replays of a graph see them."""
    kinds: list[Rows] = [
        [(3, 1), (40, 5), (130, 3)],
        [(100, 4)],
        [(0, 1), (5, 1), (16, 5), (17, 5), (70, 2)],
    ]
    problems = [build_problem(rows, shape, device=device, dtype=dtype) for rows in kinds]
    num_rows, num_tokens = 8, 24
    fixed = FixedRows(num_rows, 70, device)
    first = problems[0]
    backend = _verify(first, 5, num_tiles)
    metadata = backend.open_graph(fixed.rows, max_keys=160, max_tokens=num_tokens)
    store = torch.empty(70, *first.store.shape[1:], dtype=dtype, device=device)
    q = torch.zeros_like(first.q[:1]).repeat(num_tokens, 1, 1)
    up = first.up.clone()

    def step() -> Tensor:
        backend.begin(metadata)
        out: Tensor = backend.run(q, None, up, 1, store, metadata)
        return out

    replay = replay_with(step)
    for problem in (*problems, first):
        store[: len(problem.store)] = problem.store
        up.copy_(problem.up)
        fixed.load(problem.step, num_tokens)
        backend.refresh(metadata, problem.step)
        q.fill_(torch.nan)
        q[: problem.step.num_tokens] = problem.q
        exact = problem.exact(1)
        assert_close(replay()[: len(exact)], exact, TOLERANCES[dtype])


def interpreted_checks() -> list[Callable[[], None]]:
    draw = fresh_random()

    def rows(max_queries: int) -> Rows:
        counts = [draw.randint(1, max_queries) for _ in range(draw.randint(1, 4))]
        found = [(draw.choice([0, 15, 16, draw.randrange(80)]), count) for count in counts]
        return sorted(found, key=lambda row: (row[1] > 1, row[0]))

    def layers(
        shape: LatentShape, max_queries: int, num_tiles: int | None, *, is_e4m3: bool = False
    ) -> Callable[[], None]:
        def run_check() -> None:
            problem = build_problem(rows(max_queries), shape)
            problem = problem.in_e4m3() if is_e4m3 else problem
            check(_verify(problem, max_queries, num_tiles), problem)

        return run_check

    def mixed() -> None:
        problem = build_problem(MIXED, SMALL)
        check(_verify(problem, 5, 1), problem)

    odd, wide = latent_shape(3, 64, 32, 24, 20), latent_shape(24, 16, 16, 20, 36)
    return [
        mixed,
        layers(odd, 4, 1, is_e4m3=True),
        layers(wide, 3, 3),  # tiles of 32 lines, which cut a token's heads
        layers(wide, 5, 2),
        layers(SMALL, 4, None),
        lambda: _check_replays(lambda step: step, SMALL),
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
    run_interpreted(f"tests.kernels.attention.test_latent_verify:{cases}")


def test_a_longer_row_is_refused() -> None:
    problem = build_problem([(3, 4)], SMALL)
    with pytest.raises(AssertionError, match="a row of 4 tokens"):
        _verify(problem, 3).plan(problem.step)


def test_decode_attention_verifies_over_latents() -> None:
    """As configured on a CPU, and what cannot be is refused."""
    problem = build_problem([(4, 1), (2, 3), (0, 9)], SMALL, block_size=4)
    given: dict[str, Any] = {
        "block_size": 4, "dtype": torch.float32, "device": torch.device("cpu"),
    }  # fmt: skip
    names = AttentionNames(prefill="auto", decode="auto")
    phases = build_attention(names, SMALL, fixed_tile=False, **given)
    select_verify.add_verification(phases, names, SMALL, max_queries=3, fixed_tile=False, **given)
    assert phases.max_few_tokens == 3
    check(phases, problem)
    with pytest.raises(BackendUnavailable, match=r"deterministic.*leave speculation"):
        select_verify.add_verification(
            phases, names, SMALL, max_queries=3, fixed_tile=True, **given
        )
    names = AttentionNames(prefill="auto", decode="triton")
    with pytest.raises(BackendUnavailable, match="the Triton kernels need a GPU"):
        select_verify.add_verification(
            phases, names, SMALL, max_queries=3, fixed_tile=False, **given
        )


def test_prompts_need_their_lengths_on_the_host_and_rows_with_drafts_do_not() -> None:
    prompts = ReferenceLatent(SMALL, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    problem = build_problem([(3, 4)], SMALL)
    decode, verify = _triton(problem), _verify(problem, 4)
    phases = PhasedLatent(prefill=prompts, decode=decode, graph=decode)
    assert not phases.reads_lengths_on_device
    phases.verify_with(verify, 4, graph=verify)
    assert phases.reads_lengths_on_device
    assert not PhasedLatent(prefill=decode, decode=decode, graph=decode).reads_lengths_on_device


def _compile(name: str, cases: Sequence[tuple[LatentShape, int]]) -> None:
    from kernels.attention import (
        decode_items,
        latent_decode,
        latent_parts,
        latent_triton,
        latent_verify,
    )
    from kernels.linear import by_head

    device = gpu(name)
    modules = latent_verify, latent_triton, latent_decode, latent_parts, decode_items, by_head
    with compiled_for(device, *modules) as found:
        for shape, max_queries in cases:
            problem = build_problem([(5, 1), (700, 2)], shape, dtype=torch.bfloat16)
            backend = _verify(problem, max_queries)
            metadata = backend.plan(problem.step)
            for case in (problem, problem.in_e4m3()):
                run(backend, case, 1, metadata)
    assert {"_latent_decode_kernel", "_latent_combine_kernel"} < set(found)
    assert max(found.values()) <= device.shared_memory_per_block_bytes, found


def test_it_compiles_for_an_h200() -> None:
    _compile("H200", [(V2_LITE, 4)])


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(ONE_EACH.values()))
def test_it_compiles_for_every_gpu(name: str) -> None:
    _compile(name, [(V2_LITE, 2), (V2_LITE, 5), (V3, 4), (GLM, 4)])


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "max_queries"),
    [(V2_LITE, 4), (V2_LITE, 9), (V3, 4), (latent_shape(24, 128, 32, 48, 80), 5)],
    ids=str,
)
def test_queries_of_a_row_equal_float64(
    shape: LatentShape, max_queries: int, dtype: torch.dtype
) -> None:
    for rows in (MIXED, LONG):
        fitting = [(computed, min(new, max_queries)) for computed, new in rows]
        problem = build_problem(fitting, shape, dtype=dtype, device="cuda")
        for case in (problem, problem.in_e4m3()):
            check(_verify(case, max_queries), case)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 17, 200])
def test_many_rows_with_drafts_equal_float64_every_time(num_rows: int) -> None:
    draw = fresh_random()
    rows = sorted((draw.randrange(900), 4) for _ in range(num_rows))
    problem = build_problem(rows, V2_LITE, dtype=torch.bfloat16, device="cuda")
    backend = _verify(problem, 4)
    metadata = backend.plan(problem.step)
    first = run(backend, problem, 0, metadata)
    assert_close(first, problem.exact(0), TOLERANCES[torch.bfloat16])
    for _ in range(20):
        assert torch.equal(run(backend, problem, 0, metadata), first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [V2_LITE, V3, GLM], ids=str)
def test_a_graph_follows_rows_and_tokens_that_change(
    shape: LatentShape, dtype: torch.dtype
) -> None:
    def capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()

        def replay() -> Tensor:
            out.fill_(torch.nan)
            graph.replay()
            return out

        return replay

    _check_replays(capture, shape, "cuda", dtype, None)


@pytest.mark.gpu
def test_both_phases_and_verification_in_one_step() -> None:
    """Rows with drafts by their own kernel, a prompt behind them by the backend of prompts."""
    rows = [(5, 1), (300, 1), (40, 4), (900, 3), (0, 129), (70, 65)]
    problem = build_problem(rows, V2_LITE, dtype=torch.bfloat16, device="cuda")
    given: dict[str, Any] = {
        "block_size": 16, "dtype": torch.bfloat16, "device": torch.device("cuda"),
    }  # fmt: skip
    names = AttentionNames(prefill="triton", decode="triton")
    phases = build_attention(names, V2_LITE, fixed_tile=False, **given)
    assert isinstance(phases, PhasedLatent)
    select_verify.add_verification(phases, names, V2_LITE, max_queries=4, fixed_tile=False, **given)
    assert phases.can_capture_verification
    check(phases, problem)
    reference = ReferenceLatent(V2_LITE, **given)
    assert_close(
        run(phases, problem, 0, phases.plan(problem.step)).double(),
        run(reference, problem, 0, reference.plan(problem.step)).double(),
        2e-2,
    )

"""The torch backend over the paged store against attention written out in float64."""

import numpy as np
import pytest
import torch

from kernels.attention.protocol import AttentionShape
from kernels.attention.reference import ReferenceAttention, _split_by_padding
from kernels.kv.append import kv_append
from tests.harness.seeds import fresh_seed
from tests.kernels.attention.attention_cases import (
    ROW_SETS,
    TOLERANCES,
    Problem,
    assert_close,
    build_problem,
    check,
    run_layer,
)

NUM_LAYERS = 3
CPU = torch.device("cpu")


def _backend(problem: Problem, device: torch.device = CPU) -> ReferenceAttention:
    return ReferenceAttention(
        problem.shape, block_size=problem.block_size, dtype=problem.store.dtype, device=device
    )


@pytest.mark.parametrize("rows", ROW_SETS.values(), ids=ROW_SETS)
@pytest.mark.parametrize("block_size", [1, 4, 7])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 10), (3, 3, 16)])
def test_attention_equals_its_definition(
    rows: list[tuple[int, int]],
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layer_windows=(None, 3, 8),
    )
    problem = build_problem(rows, shape, block_size=block_size, dtype=torch.float32)
    backend = _backend(problem)
    metadata = backend.plan(problem.step)
    for layer in range(NUM_LAYERS):
        out = run_layer(backend, problem, layer, metadata)
        assert_close(out, problem.exact(layer), TOLERANCES[torch.float32])


@pytest.mark.parametrize("rows", ROW_SETS.values(), ids=ROW_SETS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("max_scores", [1, 40, 2**26])
def test_sinks_take_their_share_of_every_softmax(
    rows: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    max_scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernels.attention.reference._MAX_SCORES", max_scores)
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=12,
        layer_windows=(None, 3, 8),
        query_scale=0.4,
        has_sinks=True,
    )
    problem = build_problem(rows, shape, block_size=4, dtype=torch.float32)
    for layer in range(NUM_LAYERS):
        check(_backend(problem), problem, layer)


def test_the_oracle_is_one_softmax_per_query_and_head() -> None:
    shape = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=5, layer_windows=(None, 3))
    problem = build_problem([(4, 1), (3, 6)], shape, block_size=2, dtype=torch.float32)
    for layer, window in enumerate(shape.layer_windows):
        expected = []
        for queries, keys, values in zip(
            problem.queries, problem.keys, problem.values, strict=True
        ):
            computed = keys.shape[1] - len(queries)
            for index, query in enumerate(queries.double()):
                last = computed + index
                first = 0 if window is None else max(0, last - window + 1)
                for head in range(6):
                    seen = keys[layer, first : last + 1, head // 3].double()
                    weights = (seen @ query[head] * 5**-0.5).softmax(0)
                    expected.append(weights @ values[layer, first : last + 1, head // 3].double())
        assert_close(problem.exact(layer), torch.stack(expected).view(-1, 30), 1e-13)


def test_bfloat16_scores_are_accumulated_in_fp32() -> None:
    # Over 2,000 nearly equal keys a bf16 sum would stop growing at 256; bf16 rounds the output
    # once, by at most 2^-8 of it.
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=16, layer_windows=(None,) * 3)
    problem = build_problem(
        [(2000, 1), (1990, 10)], shape, block_size=16, dtype=torch.bfloat16, value_mean=1.0
    )
    backend = _backend(problem)
    ours = run_layer(backend, problem, 1, backend.plan(problem.step)).double()
    exact = problem.exact(1)
    assert ((ours - exact).abs() <= 2**-7 * exact.abs()).all()


def test_metadata_of_two_steps_may_be_alive_at_once() -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, layer_windows=(None,) * 3)
    problems = [
        build_problem(rows, shape, block_size=4, dtype=torch.float32)
        for rows in ([(5, 1)], [(0, 6), (3, 4)])
    ]
    backend = _backend(problems[0])
    plans = [backend.plan(problem.step) for problem in problems]
    for problem, plan in zip(problems, plans, strict=True):
        for layer in range(NUM_LAYERS):
            out = run_layer(backend, problem, layer, plan)
            assert_close(out, problem.exact(layer), TOLERANCES[torch.float32])


def test_rows_are_split_where_padding_would_cost_more_than_a_call() -> None:
    def split(*num_keys: int) -> list[tuple[int, int]]:
        return list(_split_by_padding(np.array(num_keys, dtype=np.int64)))

    assert split(5) == [(0, 1)]
    assert split(1, 100, 200) == [(0, 2), (2, 3)]
    assert split(*[500] * 9) == [(0, 9)]
    assert split(1000, 1100, 1200, 1300) == [(0, 4)]
    assert split(10, 10, 5000, 5100) == [(0, 2), (2, 4)]


def test_kv_append_touches_its_lines_only() -> None:
    generator = torch.Generator().manual_seed(fresh_seed())
    store = torch.randn((5, NUM_LAYERS, 2, 4, 2, 6), generator=generator)
    expected = store.clone()
    slots = [(3, 0), (0, 3), (4, 1)]
    wide = torch.randn((3, 7, 6), generator=generator)
    k, v = wide[:, 1:3], wide[:, 4:6]
    k_lines = torch.tensor([block * NUM_LAYERS * 2 * 4 + slot for block, slot in slots])
    kv_append(k, v, store, 1, torch.stack((k_lines, k_lines + 4)))
    for index, (block, slot) in enumerate(slots):
        expected[block, 1, 0, slot] = k[index]
        expected[block, 1, 1, slot] = v[index]
    assert torch.equal(store, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", ROW_SETS.values(), ids=ROW_SETS)
def test_attention_on_a_gpu_equals_its_definition(
    rows: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    shape = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=80, layer_windows=(None, 3, 8))
    problem = build_problem(rows, shape, block_size=7, dtype=dtype, device="cuda")
    for layer in range(NUM_LAYERS):
        check(_backend(problem, torch.device("cuda")), problem, layer)

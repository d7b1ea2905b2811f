"""The torch backend over the paged store against attention written out in float64."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention.protocol import AttentionShape, AttentionStep
from kernels.attention.reference import ReferenceAttention, _split_by_padding
from kernels.kv_append import kv_append

NUM_LAYERS = 3


@dataclass
class Problem:
    """Rows of known K and V on scattered blocks of a store that is NaN everywhere else."""

    step: AttentionStep
    store: Tensor
    # per row: [length, kv_heads, head_dim] of every layer
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]  # [num_new, heads, head_dim]


def _make(
    rows: list[tuple[int, int]],
    shape: AttentionShape,
    block_size: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Problem:
    """rows: (computed, new) in batch order."""
    num_blocks_of = [-(-sum(row) // block_size) for row in rows]
    block_ids = list(range(sum(num_blocks_of) + 3))
    random.Random(generator.initial_seed()).shuffle(block_ids)
    store = torch.full(
        (len(block_ids), NUM_LAYERS, 2, block_size, shape.num_kv_heads, shape.head_dim),
        torch.nan,
        dtype=dtype,
    )
    tables = np.full((len(rows), max(num_blocks_of)), 10**6, dtype=np.int32)
    problem = Problem(
        step=AttentionStep(
            num_single_rows=sum(new == 1 for _, new in rows),
            num_new_tokens=np.array([new for _, new in rows], dtype=np.int64),
            num_computed_tokens=np.array([computed for computed, _ in rows], dtype=np.int64),
            block_tables=tables,
        ),
        store=store,
        keys=[],
        values=[],
        queries=[],
    )
    for row, (computed, new) in enumerate(rows):
        length = computed + new
        own = [block_ids.pop() for _ in range(num_blocks_of[row])]
        tables[row, : len(own)] = own
        kv_shape = (NUM_LAYERS, length, shape.num_kv_heads, shape.head_dim)
        keys, values = (torch.randn(kv_shape, generator=generator).to(dtype) for _ in range(2))
        for position in range(length):
            block, slot = own[position // block_size], position % block_size
            store[block, :, 0, slot] = keys[:, position]
            store[block, :, 1, slot] = values[:, position]
        # What the row's last block holds behind its last token was left by somebody else: any
        # finite number, for the executor zeroes what was not.
        tail = slice((length - 1) % block_size + 1, None)
        store[own[-1], :, :, tail] = 50.0
        problem.keys.append(keys)
        problem.values.append(values)
        queries = torch.randn((new, shape.num_heads, shape.head_dim), generator=generator)
        problem.queries.append(queries.to(dtype))
    return problem


def _exact(problem: Problem, row: int, layer: int, shape: AttentionShape) -> Tensor:
    """[num_new, heads * head_dim], one query, one head, one softmax at a time."""
    keys, values = problem.keys[row][layer].double(), problem.values[row][layer].double()
    queries = problem.queries[row].double()
    computed = int(problem.step.num_computed_tokens[row])
    window = shape.layer_windows[layer]
    out = torch.empty_like(queries)
    for index in range(len(queries)):
        last = computed + index
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(shape.num_heads):
            kv_head = head * shape.num_kv_heads // shape.num_heads
            scores = keys[first : last + 1, kv_head] @ queries[index, head] * shape.head_dim**-0.5
            out[index, head] = scores.softmax(0) @ values[first : last + 1, kv_head]
    return out.flatten(1)


def _strided(parts: list[Tensor]) -> Tensor:
    """[T, heads, head_dim] as the middle heads of a wider tensor, as a fused projection gives."""
    whole = torch.cat(parts)
    wide = torch.full((len(whole), whole.shape[1] + 3, whole.shape[2]), 9.0, dtype=whole.dtype)
    wide[:, 1:-2] = whole
    return wide[:, 1:-2]


ROW_SETS = {
    "one_token": [(0, 1)],
    "one_decode": [(12, 1)],
    "equal_decodes": [(8, 1)] * 3,
    "decodes": [(0, 1), (3, 1), (4, 1), (5, 1), (17, 1), (30, 1)],
    "far_apart_decodes": [(1, 1), (2, 1), (700, 1), (701, 1)],
    "fresh_chunk": [(0, 7)],
    "chunk_after_history": [(9, 5)],
    "everything": [(2, 1), (19, 1), (0, 11), (5, 2), (16, 16), (0, 2)],
}


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
    generator = torch.Generator()
    print(f"seed {generator.seed()}")
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layer_windows=(None, 3, 8),
    )
    problem = _make(rows, shape, block_size, generator, torch.float32)
    backend = ReferenceAttention(
        shape, block_size=block_size, dtype=torch.float32, device=torch.device("cpu")
    )
    metadata = backend.plan(problem.step)
    for layer in range(NUM_LAYERS):
        ours = _run(backend, problem, layer, metadata)
        theirs = torch.cat([_exact(problem, row, layer, shape) for row in range(len(rows))])
        error = (ours.double() - theirs).abs().max()
        assert error <= 3e-6, f"layer {layer}: off by {error}"


def _run(backend: ReferenceAttention, problem: Problem, layer: int, metadata: object) -> Tensor:
    new_tokens = problem.step.num_new_tokens.tolist()
    fresh = [
        [kv[layer][-new:] for kv, new in zip(source, new_tokens, strict=True)]
        for source in (problem.keys, problem.values)
    ]
    return backend.run(
        _strided(problem.queries),
        _strided(fresh[0]),
        _strided(fresh[1]),
        layer,
        problem.store,
        metadata,  # type: ignore[arg-type]
    )


def test_bfloat16_scores_are_accumulated_in_fp32() -> None:
    # Over 2,000 nearly equal keys a bf16 sum would stop growing at 256; bf16 rounds the output
    # once, by at most 2^-8 of it.
    generator = torch.Generator()
    print(f"seed {generator.seed()}")
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=16, layer_windows=(None,) * 3)
    problem = _make([(2000, 1), (1990, 10)], shape, 16, generator, torch.bfloat16)
    for values in problem.values:
        values.copy_(1 + values * 0.125)
    for row, values in enumerate(problem.values):
        for position in range(values.shape[1]):
            block = problem.step.block_tables[row, position // 16]
            problem.store[block, :, 1, position % 16] = values[:, position]
    backend = ReferenceAttention(
        shape, block_size=16, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    ours = _run(backend, problem, 1, backend.plan(problem.step)).double()
    theirs = torch.cat([_exact(problem, row, 1, shape) for row in range(2)])
    assert ((ours - theirs).abs() <= 2**-7 * theirs.abs()).all()


def test_metadata_of_two_steps_may_be_alive_at_once() -> None:
    generator = torch.Generator()
    print(f"seed {generator.seed()}")
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, layer_windows=(None,) * 3)
    backend = ReferenceAttention(
        shape, block_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    problems = [
        _make(rows, shape, 4, generator, torch.float32) for rows in ([(5, 1)], [(0, 6), (3, 4)])
    ]
    plans = [backend.plan(problem.step) for problem in problems]
    for problem, plan in zip(problems, plans, strict=True):
        for layer in range(NUM_LAYERS):
            ours = _run(backend, problem, layer, plan)
            rows = range(len(problem.keys))
            theirs = torch.cat([_exact(problem, row, layer, shape) for row in rows])
            assert (ours.double() - theirs).abs().max() <= 3e-6


def test_rows_are_split_where_padding_would_cost_more_than_a_call() -> None:
    def split(*num_keys: int) -> list[tuple[int, int]]:
        return list(_split_by_padding(np.array(num_keys, dtype=np.int64)))

    assert split(5) == [(0, 1)]
    assert split(1, 100, 200) == [(0, 2), (2, 3)]
    assert split(*[500] * 9) == [(0, 9)]
    assert split(1000, 1100, 1200, 1300) == [(0, 4)]
    assert split(10, 10, 5000, 5100) == [(0, 2), (2, 4)]


def test_kv_append_touches_its_lines_only() -> None:
    generator = torch.Generator()
    print(f"seed {generator.seed()}")
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

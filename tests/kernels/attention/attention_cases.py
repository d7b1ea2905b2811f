"""Random attention problems over a scattered store, and the float64 oracle they are checked with.

A problem's rows lie on shuffled blocks of a store that is NaN everywhere else. What a row's last
block holds behind its last token was left by somebody else: any finite number, for the executor
zeroes what was not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention.protocol import (
    AttentionBackend,
    AttentionShape,
    AttentionStep,
    RowTensors,
    build_step,
)
from tests.harness.seeds import fresh_seed

# Bound on norm(out - exact) / norm(exact).
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

# (computed, new) per row; rows with one new token first, by growing history.
ROW_SETS: dict[str, list[tuple[int, int]]] = {
    "one_token": [(0, 1)],
    "one_decode": [(12, 1)],
    "equal_decodes": [(8, 1)] * 3,
    "decodes": [(0, 1), (3, 1), (4, 1), (5, 1), (17, 1), (30, 1)],
    "far_apart_decodes": [(1, 1), (2, 1), (700, 1), (701, 1)],
    "fresh_chunk": [(0, 7)],
    "chunk_after_history": [(9, 5)],
    "everything": [(2, 1), (19, 1), (0, 11), (5, 2), (16, 16), (0, 2)],
}


@dataclass(kw_only=True)
class Problem:
    """One step whose keys, values and queries are known."""

    shape: AttentionShape
    block_size: int
    step: AttentionStep
    # [blocks, layers, 2, block_size, kv_heads, head_dim]
    store: Tensor
    # per row: [layers, length, kv_heads, head_dim]
    keys: list[Tensor]
    values: list[Tensor]
    # per row: [new, heads, head_dim]
    queries: list[Tensor]
    # fp32 [heads], of every layer; None = the shape has no sinks
    sinks: Tensor | None

    def qkv(self, layer: int) -> Tensor:
        """[T, heads + 2 kv_heads, head_dim]: the step's tokens as a fused projection gives them."""
        rows = zip(self.queries, self.keys, self.values, strict=True)
        return torch.cat(
            [torch.cat((q, k[layer, -len(q) :], v[layer, -len(q) :]), 1) for q, k, v in rows]
        )

    def exact(self, layer: int) -> Tensor:
        """Attention written out in float64, [T, heads * head_dim]."""
        return torch.cat([self._exact_row(row, layer) for row in range(len(self.queries))])

    def _exact_row(self, row: int, layer: int) -> Tensor:
        queries = self.queries[row].double()
        num_groups = self.shape.num_groups
        keys = self.keys[row][layer].double().repeat_interleave(num_groups, 1)
        values = self.values[row][layer].double().repeat_interleave(num_groups, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.shape.scale
        if self.shape.softcap is not None:
            scores = self.shape.softcap * torch.tanh(scores / self.shape.softcap)
        key_positions = torch.arange(len(keys), device=keys.device)
        query_positions = key_positions[len(keys) - len(queries) :, None]
        distances = query_positions - key_positions
        window = self.shape.layer_windows[layer]
        is_seen = (distances >= 0) & (distances < (len(keys) if window is None else window))
        if self.shape.layer_chunks and (chunk := self.shape.layer_chunks[layer]):
            is_seen &= query_positions // chunk == key_positions // chunk
        if self.shape.mask_function is not None:
            is_seen &= self.shape.mask_function.test(query_positions, key_positions)
        scores = scores.masked_fill(~is_seen, -torch.inf)
        if self.sinks is not None:
            column = self.sinks.double()[:, None, None].expand(-1, len(queries), 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def build_problem(
    rows: Sequence[tuple[int, int]],
    shape: AttentionShape,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int | None = None,
    store: Tensor | None = None,
    value_mean: float = 0.0,
) -> Problem:
    """Random tokens for `rows`, (computed, new) each, in batch order.

    store: overwritten and used where given (for a step that reuses another's memory); it needs
    a block for every `block_size` tokens of each row. Values have a standard deviation of 1, or
    of 1/8 around `value_mean` where that is not 0.
    """
    generator = torch.Generator(device).manual_seed(fresh_seed() if seed is None else seed)
    num_row_blocks = [-(-sum(row) // block_size) for row in rows]
    if store is None:
        block_shape = (len(shape.layer_windows), 2, block_size, shape.num_kv_heads, shape.head_dim)
        store = torch.empty((sum(num_row_blocks) + 3, *block_shape), dtype=dtype, device=device)
    store.fill_(torch.nan)
    free = torch.randperm(len(store), generator=generator, device=device).tolist()
    row_blocks = [[free.pop() for _ in range(num_blocks)] for num_blocks in num_row_blocks]

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    spread = 1.0 if value_mean == 0.0 else 0.125
    problem = Problem(
        shape=shape,
        block_size=block_size,
        step=build_step([n for _, n in rows], [c for c, _ in rows], row_blocks, device),
        store=store,
        keys=[],
        values=[],
        queries=[],
        sinks=3 * draw(shape.num_heads) if shape.has_sinks else None,
    )
    for (computed, new), blocks in zip(rows, row_blocks, strict=True):
        kv_shape = (len(shape.layer_windows), computed + new, shape.num_kv_heads, shape.head_dim)
        keys = draw(*kv_shape).to(dtype)
        values = (value_mean + spread * draw(*kv_shape)).to(dtype)
        _fill(store, blocks, keys, values)
        problem.keys.append(keys)
        problem.values.append(values)
        problem.queries.append(draw(new, shape.num_heads, shape.head_dim).to(dtype))
    return problem


def _fill(store: Tensor, blocks: list[int], keys: Tensor, values: Tensor) -> None:
    """keys, values: [layers, length, kv_heads, head_dim] of one row that owns `blocks`."""
    block_size = store.shape[3]
    positions = torch.arange(keys.shape[1], device=store.device)
    block_of = torch.tensor(blocks, device=store.device)[positions // block_size]
    store[blocks[-1]] = 50.0
    for half, tokens in enumerate((keys, values)):
        store[block_of, :, half, positions % block_size] = tokens.transpose(0, 1)


def run_layer(
    backend: AttentionBackend,
    problem: Problem,
    layer: int,
    metadata: Any,
    out: Tensor | None = None,
) -> Tensor:
    """`backend.run` over strided views, in memory that held NaN before."""
    num_heads, num_kv_heads = problem.shape.num_heads, problem.shape.num_kv_heads
    q, k, v = torch.split(problem.qkv(layer), [num_heads, num_kv_heads, num_kv_heads], 1)
    poison = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    del poison  # an allocator that caches hands this memory to the output
    return backend.run(q, k, v, layer, problem.store, metadata, out, problem.sinks)


def assert_close(out: Tensor, exact: Tensor, tolerance: float) -> None:
    """Relative error of `out` in the Frobenius norm; a NaN fails."""
    assert out.shape == exact.shape, f"{tuple(out.shape)} instead of {tuple(exact.shape)}"
    error = float((out.double() - exact).norm() / exact.norm())
    assert error < tolerance, f"relative error {error:.2e}, at most {tolerance:.0e} is allowed"


def check(
    backend: AttentionBackend, problem: Problem, layer: int, tolerance: float | None = None
) -> None:
    """Plan and run one layer of `problem`; tolerance: `TOLERANCES` of its dtype by default."""
    metadata = backend.plan(problem.step)
    out = run_layer(backend, problem, layer, metadata)
    assert out.dtype == problem.store.dtype
    tolerance = tolerance or TOLERANCES[out.dtype]
    assert_close(out, problem.exact(layer), tolerance)
    # Into memory that is given, and not beyond it.
    guarded = torch.full((len(out) + 2, out.shape[1]), torch.nan, dtype=out.dtype).to(out.device)
    given = guarded[1:-1]
    written = run_layer(backend, problem, layer, metadata, given)
    assert written.data_ptr() == given.data_ptr()
    assert guarded[[0, -1]].isnan().all()
    assert_close(given, problem.exact(layer), tolerance)


class FixedRows:
    """Row tensors that never move, as a CUDA graph reads them; `load` changes their content."""

    def __init__(self, num_rows: int, num_blocks: int, device: torch.device | str) -> None:
        """num_blocks: of all rows together."""
        # One buffer for all, and odd offsets: views need not be aligned to 16 bytes.
        sizes = [1, num_rows + 1, num_rows, num_rows + 1, num_blocks]
        _, *fields = torch.split(torch.zeros(sum(sizes), dtype=torch.int32, device=device), sizes)
        self.rows = RowTensors(
            cu_tokens=fields[0], num_keys=fields[1], cu_blocks=fields[2], block_ids=fields[3]
        )

    def load(self, step: AttentionStep, max_tokens: int | None = None) -> None:
        """`step`'s rows first; the others become padding: no keys, no blocks, one token each.

        With `max_tokens` they have none beyond so many in all.
        """
        source, rows = step.device_rows, self.rows
        num_rows, num_padding = step.num_rows, len(rows.num_keys) - step.num_rows
        for fixed in (rows.num_keys, rows.cu_blocks, rows.cu_tokens):
            fixed.zero_()
        rows.num_keys[:num_rows] = source.num_keys
        rows.cu_blocks[: num_rows + 1] = source.cu_blocks
        rows.cu_blocks[num_rows + 1 :] = source.cu_blocks[-1]
        rows.cu_tokens[: num_rows + 1] = source.cu_tokens
        rows.cu_tokens[num_rows + 1 :] = source.cu_tokens[-1] + torch.arange(
            1, num_padding + 1, dtype=torch.int32, device=rows.cu_tokens.device
        )
        if max_tokens is not None:
            rows.cu_tokens.clamp_(max=max_tokens)
        rows.block_ids[: len(source.block_ids)] = source.block_ids

"""Rows at the end of spans: more new tokens than the row has, and maybe more than it has keys.

A padding token's result is nobody's, whatever its query holds; the row's own tokens must get what
they get without padding. On a CPU the interpreter runs small cases; all others need a GPU.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kernels.attention.names import AttentionName, AttentionNames
from kernels.attention.phased import PhasedAttention
from kernels.attention.protocol import AttentionShape, GraphAttention
from kernels.attention.select import build_attention
from tests.kernels.attention.attention_cases import (
    TOLERANCES,
    FixedRows,
    Problem,
    assert_close,
    build_problem,
)
from tests.kernels.interpreter import drawn, run_interpreted

if TYPE_CHECKING:
    from kernels.attention.triton import TritonAttention

WINDOWS = (None, 3, 70)
# (computed, new): fresh rows shorter than any span, rows whose span reaches into their history,
# and single tokens without one.
SMALL_ROWS = [(0, 1), (40, 1), (0, 16), (0, 5), (75, 7), (1, 33)]


class _Spans:
    """One set of rows that never move, `num_rows` spans of `span_tokens` tokens."""

    def __init__(
        self,
        backend: GraphAttention | PhasedAttention,
        problem: Problem,
        *,
        num_rows: int,
        span_tokens: int,
        max_keys: int,
    ) -> None:
        self.backend = backend
        self._num_heads = problem.shape.num_heads
        self._span_tokens = span_tokens
        max_blocks = num_rows * -(-max_keys // problem.block_size)
        device = problem.store.device
        self._fixed = FixedRows(num_rows, max_blocks, device)
        self._fixed.rows.cu_tokens.copy_(torch.arange(num_rows + 1) * span_tokens)
        num_tokens = num_rows * span_tokens
        self._qkv = problem.qkv(0)[:1].repeat(num_tokens, 1, 1)
        self.metadata = backend.open_graph(
            self._fixed.rows,
            max_keys=max_keys,
            max_tokens=num_tokens,
            max_row_tokens=span_tokens,
        )

    def load(self, problem: Problem, layer: int) -> Tensor:
        """The problem's rows first, then rows of one key; returns their tokens' places, [T]."""
        step, rows = problem.step, self._fixed.rows
        num_rows, num_padding = step.num_rows, len(rows.num_keys) - step.num_rows
        rows.num_keys[:num_rows] = step.device_rows.num_keys
        rows.num_keys[num_rows:] = 1
        num_blocks = len(step.block_ids)
        rows.cu_blocks[: num_rows + 1] = step.device_rows.cu_blocks
        rows.cu_blocks[num_rows + 1 :] = num_blocks + torch.arange(1, num_padding + 1)
        rows.block_ids[:num_blocks] = step.device_rows.block_ids
        rows.block_ids[num_blocks : num_blocks + num_padding] = int(step.block_ids[0])
        ends = (torch.arange(num_rows) + 1) * self._span_tokens
        num_new = step.num_new_tokens.tolist()
        places = torch.cat(
            [torch.arange(int(end) - new, int(end)) for end, new in zip(ends, num_new, strict=True)]
        ).to(self._qkv.device)
        self._qkv.fill_(torch.nan)  # what a padding token's query may hold
        self._qkv[places] = problem.qkv(layer)
        return places

    def run(self, layer: int, store: Tensor) -> Tensor:
        num_kv_heads = (self._qkv.shape[1] - self._num_heads) // 2
        q, k, v = torch.split(self._qkv, [self._num_heads, num_kv_heads, num_kv_heads], 1)
        self.backend.begin(self.metadata)
        return self.backend.run(q, k, v, layer, store, self.metadata)


def _small_problem(dtype: torch.dtype, heads: tuple[int, int], device: str) -> Problem:
    shape = AttentionShape(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, layer_windows=WINDOWS
    )
    return build_problem(SMALL_ROWS, shape, block_size=16, dtype=dtype, device=device)


# ---- on a CPU -----------------------------------------------------------------------------------


def _triton(problem: Problem, **options: Any) -> "TritonAttention":
    from kernels.attention.triton import TritonAttention  # the interpreter is chosen with Triton

    return TritonAttention(
        problem.shape,
        block_size=problem.block_size,
        dtype=problem.store.dtype,
        device=problem.store.device,
        **options,
    )


def interpreted_case() -> None:
    """Called in a process of its own, where Triton interprets; one case, drawn anew."""
    _interpreted_cases(1)


def all_interpreted_cases() -> None:
    _interpreted_cases(4)


def _interpreted_cases(number: int) -> None:
    from kernels.attention.triton_prefill import PrefillConfig

    tiles = PrefillConfig(tile_queries=16, tile_keys=16)
    cases: list[tuple[torch.dtype, tuple[int, int], int, dict[str, Any]]] = [
        (torch.float32, (2, 1), 33, {"prefill_config": tiles}),
        (torch.float16, (3, 1), 70, {"prefill_config": tiles}),
        (torch.float32, (2, 1), 40, {"prefill_config": tiles, "fixed_tile": True}),
        # A tile of more queries than keys holds own tokens and such as are a whole tile too early.
        (torch.float32, (1, 1), 128, {}),
    ]
    for dtype, heads, span_tokens, options in drawn(cases, number):
        problem = _small_problem(dtype, heads, "cpu")
        spans = _Spans(
            _triton(problem, **options),
            problem,
            num_rows=len(SMALL_ROWS) + 1,
            span_tokens=span_tokens,
            max_keys=128,
        )
        for layer in range(len(WINDOWS)):
            places = spans.load(problem, layer)
            out = spans.run(layer, problem.store)
            assert_close(out[places], problem.exact(layer), TOLERANCES[dtype])
            # The first row has one token and one key: all before it see nothing.
            assert not out[: span_tokens - 1].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", ["interpreted_case", pytest.param("all_interpreted_cases", marks=pytest.mark.nightly)]
)
def test_spans_equal_float64_in_the_interpreter(cases: str) -> None:
    run_interpreted(f"tests.kernels.attention.test_attention_spans:{cases}")


# ---- on a GPU -----------------------------------------------------------------------------------

MAX_KEYS = 40_000  # what a graph is captured for; steps have far fewer, and nearly as many
STEPS = [
    [(0, 64)],
    [(0, 1), (5, 1), (0, 100), (1000, 77), (0, 3), (2500, 256)],
    [(2000, 32)] * 4,
    [(39_000, 17), (0, 17)],
    [(0, 1)] * 8,
]


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [(None, None), (None, 500)])
@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_a_captured_grid_follows_its_rows(
    name: AttentionName, windows: tuple[int | None, ...]
) -> None:
    shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, layer_windows=windows)

    def make(rows: list[tuple[int, int]], store: Tensor | None) -> Problem:
        dtype = torch.bfloat16
        return build_problem(rows, shape, block_size=16, dtype=dtype, device="cuda", store=store)

    first = make([(2999, 1)] * 7 + [(39_990, 10)], None)
    first.store.zero_()  # what a warm-up reads is finite
    backend = build_attention(
        AttentionNames(prefill=name, decode="triton"),
        shape,
        block_size=16,
        dtype=torch.bfloat16,
        device=first.store.device,
        fixed_tile=False,
    )
    spans = _Spans(backend, first, num_rows=8, span_tokens=256, max_keys=MAX_KEYS)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        spans.run(1, first.store)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = spans.run(1, first.store)
    for rows in STEPS:
        problem = make(rows, first.store)
        places = spans.load(problem, 1)
        step = replace(problem.step, device_rows=spans._fixed.rows)
        backend.refresh(spans.metadata, step)
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out[places], problem.exact(1), TOLERANCES[torch.bfloat16])

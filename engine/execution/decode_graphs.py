"""CUDA graphs of decode steps: one per batch size, replayed instead of launching each kernel.

A step of R single-token rows replays the smallest graph of at least R rows; the rows between are
padding. All graphs share one memory pool, read their inputs from one `StepBuffers`, and compute
one after the other in one stream. Knows no plan and no scheduler.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.execution.input_batch import InputBatch, row_tensors
from engine.execution.step_buffers import StepBuffers
from engine.sampling.sampler import GreedyChoice
from kernels.attention.protocol import GraphAttention

_WARM_UP_RUNS = 2  # before capture: kernels are built and workspaces made


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """What a decode step leaves on the device, one line a row."""

    # [R, vocab]
    logits: Tensor
    greedy: GreedyChoice

    def first(self, num_rows: int) -> "DecodeOutput":
        return DecodeOutput(
            logits=self.logits[:num_rows],
            greedy=GreedyChoice(
                token_ids=self.greedy.token_ids[:num_rows],
                is_finite=self.greedy.is_finite[:num_rows],
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    attention_metadata: Any
    output: DecodeOutput


class DecodeGraphs:
    """Captured decode steps for the sizes of `graph_sizes(max_rows)`."""

    def __init__(
        self,
        *,
        buffers: StepBuffers,
        attention: GraphAttention,
        max_keys: int,
        compute: Callable[[int, Any], DecodeOutput],
    ) -> None:
        """`compute(num_rows, attention_metadata)` runs a step over the first rows of `buffers`."""
        self.buffers = buffers
        self._attention = attention
        self._max_keys = max_keys
        self._compute = compute
        self._sizes = graph_sizes(buffers.max_rows)
        self._captured: dict[int, _Captured] = {}

    def capture(self, report: Callable[[str], None]) -> None:
        """Capture every size, largest first so that smaller ones reuse its memory."""
        start_s = time.perf_counter()
        free_before, _ = torch.cuda.mem_get_info()
        pool = torch.cuda.graph_pool_handle()
        for number, size in enumerate(reversed(self._sizes), start=1):
            self._captured[size] = self._capture_one(size, pool)
            if number % 8 == 0:
                report(f"decode graphs: {number} of {len(self._sizes)} captured")
        free_after, _ = torch.cuda.mem_get_info()
        report(
            f"decode graphs: {len(self._sizes)} captured for up to {self._sizes[-1]} rows in"
            f" {time.perf_counter() - start_s:.1f} s,"
            f" {max(0, free_before - free_after) / 2**20:.0f} MiB"
        )

    def size_for(self, num_rows: int) -> int:
        """Rows of the graph that a step of `num_rows` replays."""
        return next(size for size in self._sizes if size >= num_rows)

    def replay(self, batch: InputBatch) -> DecodeOutput:
        """Run the graph for `batch`, which was written to `buffers`, padded to `size_for`."""
        captured = self._captured[self.size_for(batch.num_rows)]
        self._attention.refresh(captured.attention_metadata, batch.attention)
        captured.graph.replay()
        return captured.output.first(batch.num_rows)

    def _capture_one(self, size: int, pool: Any) -> _Captured:  # noqa: ANN401
        metadata = self._attention.open_graph(row_tensors(self.buffers, size), self._max_keys)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                self._compute(size, metadata)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self._compute(size, metadata)
        return _Captured(graph=graph, attention_metadata=metadata, output=output)


def graph_sizes(max_rows: int) -> list[int]:
    """Ascending row counts, the last one `max_rows`; padding stays below 8 rows or an eighth."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return [*(size for size in steps if size < max_rows), max_rows]

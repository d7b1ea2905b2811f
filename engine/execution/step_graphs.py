"""CUDA graphs of steps: one per size, attention inside, replayed instead of launching each kernel.

    decode graphs   R rows of one new token each
    prompt graphs   T tokens of up to R rows, prompts, chunks and single tokens in any mix

A step replays the smallest graph it fits; what it does not fill is padding. All graphs of a kind
share one memory pool, read their inputs from one `StepBuffers`, and compute one after the other in
one stream. Knows no plan and no scheduler.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.execution.step_buffers import GraphSize, StepBuffers
from engine.sampling.sampler import GreedyChoice

_WARM_UP_RUNS = 2  # before capture: kernels are built and workspaces made
_REPORT_EVERY = 8
# Rows of a prompt graph. Each costs a line of logits, whether or not a step uses it.
_MAX_PROMPT_ROWS = 128
_MAX_PROMPT_TOKENS = 1024  # beyond it the device takes longer than the host needs to launch


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOutput:
    """What a step leaves on the device."""

    # [S, vocab]  one line for each row that samples
    logits: Tensor
    greedy: GreedyChoice
    # [T] bool; None = the logits tell
    is_finite_token: Tensor | None

    def first(self, num_sampled: int, num_tokens: int) -> "GraphOutput":
        """Without what belongs to padding."""
        flags = self.is_finite_token
        return GraphOutput(
            logits=self.logits[:num_sampled],
            greedy=GreedyChoice(
                token_ids=self.greedy.token_ids[:num_sampled],
                is_finite=self.greedy.is_finite[:num_sampled],
            ),
            is_finite_token=None if flags is None else flags[:num_tokens],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    attention_metadata: Any
    output: GraphOutput


class StepGraphs:
    """Captured steps of one kind."""

    def __init__(
        self,
        kind: str,
        sizes: Sequence[GraphSize],
        buffers: StepBuffers,
        *,
        open_attention: Callable[[GraphSize], Any],
        compute: Callable[[GraphSize, Any], GraphOutput],
    ) -> None:
        """`sizes` ascend.

        `open_attention(size)` makes attention's metadata over the first rows of `buffers`, and
        `compute(size, metadata)` runs a step over them.
        """
        self.buffers = buffers
        self._kind = kind
        self._sizes = sizes
        self._open_attention = open_attention
        self._compute = compute
        self._captured: dict[GraphSize, _Captured] = {}

    def capture(self, report: Callable[[str], None]) -> None:
        """Capture every size, largest first so that smaller ones reuse its memory."""
        start_s = time.perf_counter()
        free_before, _ = torch.cuda.mem_get_info()
        pool = torch.cuda.graph_pool_handle()
        for number, size in enumerate(reversed(self._sizes), start=1):
            self._captured[size] = self._capture_one(size, pool)
            if number % _REPORT_EVERY == 0:
                report(f"{self._kind} graphs: {number} of {len(self._sizes)} captured")
        free_after, _ = torch.cuda.mem_get_info()
        largest = self._sizes[-1]
        report(
            f"{self._kind} graphs: {len(self._sizes)} captured for up to {largest.num_rows} rows"
            f" and {largest.num_tokens} tokens in {time.perf_counter() - start_s:.1f} s,"
            f" {max(0, free_before - free_after) / 2**20:.0f} MiB"
        )

    def size_for(self, num_rows: int, num_tokens: int) -> GraphSize | None:
        """The smallest size that holds such a step; None where none does."""
        fits = (s for s in self._sizes if s.num_rows >= num_rows and s.num_tokens >= num_tokens)
        return next(fits, None)

    def attention_metadata(self, size: GraphSize) -> Any:  # noqa: ANN401
        """What `open_attention` made; to be refreshed before a replay."""
        return self._captured[size].attention_metadata

    def replay(self, size: GraphSize) -> GraphOutput:
        """Run the graph over what was written to `buffers`, padded to `size`."""
        captured = self._captured[size]
        captured.graph.replay()
        return captured.output

    def _capture_one(self, size: GraphSize, pool: Any) -> _Captured:  # noqa: ANN401
        metadata = self._open_attention(size)
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


def decode_sizes(max_rows: int) -> list[GraphSize]:
    """Up to `max_rows` rows, exactly those at last; padding stays below 8 rows or an eighth."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    counts = [*(count for count in steps if count < max_rows), max_rows]
    return [GraphSize(num_rows=count, num_tokens=count) for count in counts]


def prompt_sizes(max_rows: int, max_tokens: int) -> list[GraphSize]:
    """Up to `max_tokens` tokens, at most 1024; padding stays below 64 tokens or an eighth."""
    limit = min(max_tokens, _MAX_PROMPT_TOKENS)
    steps = [16, 32, *range(64, 512, 64), *range(512, _MAX_PROMPT_TOKENS, 128)]
    counts = [*(count for count in steps if count < limit), limit]
    return [
        GraphSize(num_rows=min(count, max_rows, _MAX_PROMPT_ROWS), num_tokens=count)
        for count in counts
    ]

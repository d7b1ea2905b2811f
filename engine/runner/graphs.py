"""Captures steps in CUDA graphs, one per size and including attention, and replays them.

A step replays the smallest graph that holds it; the rest of the graph is padding. All graphs share
one memory pool. Those of a kind read their inputs from one `StepBuffers`, and all run one after the
other in one stream. Statistics say what capturing cost and how many prompt steps replay a graph.
Knows no plan and no scheduler.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.runner.graph_sizes import GraphSize, PromptForm, PromptSizes
from engine.runner.step_buffers import StepBuffers
from kernels.attention.protocol import AttentionStep
from kernels.sampling.choices import GreedyChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStatistics:
    """Cost of capturing the graphs of one kind at start."""

    num_graphs: int
    capture_s: float
    capture_bytes: int  # device memory that the capture added


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStepStatistics:
    """Steps that are not pure decode steps, since the graphs were captured.

    num_replayed <= num_eligible <= num_steps. An eligible step is short enough for the form; it is
    not replayed if it has more rows than any graph.
    """

    form: PromptForm
    num_steps: int
    num_eligible: int
    num_replayed: int
    num_replayed_tokens: int
    num_padding_tokens: int  # computed in addition by the replayed steps


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapStatistics:
    """Uncaptured steps, and those that were computed as two batches."""

    num_steps: int
    num_split_prompts: int
    num_split_decodes: int
    num_two_chunk: int  # of the split ones: a row was cut
    num_replayed: int = 0  # captured decode steps that were computed as two batches


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStatistics:
    """How an executor's steps run; None = steps of that kind replay no graphs."""

    decode_graphs: CaptureStatistics | None
    prompt_graphs: CaptureStatistics | None
    prompt_steps: PromptStepStatistics | None
    two_batches: OverlapStatistics | None = None  # None = no step is computed as two batches
    verify_graphs: CaptureStatistics | None = None  # of steps with drafts


class PromptStepCounter:
    """Counts prompt steps, how many were short enough, and how many replayed a graph."""

    def __init__(self, sizes: PromptSizes) -> None:
        self._sizes = sizes
        self._num_steps = 0
        self._num_eligible = 0
        self._num_replayed = 0
        self._num_replayed_tokens = 0
        self._num_padding_tokens = 0

    def count(self, num_tokens: int, longest_row: int, size: GraphSize | None) -> None:
        """Count a step; `size`: of the graph that is replayed, None = none."""
        self._num_steps += 1
        self._num_eligible += self._sizes.is_eligible(num_tokens, longest_row)
        if size is not None:
            self._num_replayed += 1
            self._num_replayed_tokens += num_tokens
            self._num_padding_tokens += size.num_tokens - num_tokens

    def statistics(self) -> PromptStepStatistics:
        return PromptStepStatistics(
            form=self._sizes.form,
            num_steps=self._num_steps,
            num_eligible=self._num_eligible,
            num_replayed=self._num_replayed,
            num_replayed_tokens=self._num_replayed_tokens,
            num_padding_tokens=self._num_padding_tokens,
        )


_WARM_UP_RUNS = 2  # before capture: compile kernels and allocate workspaces
_REPORT_EVERY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOutput:
    """The outputs that a step leaves on the device."""

    # [S, ids]  of `CausalLM.own_logits`; one line for each row that samples
    own_logits: Tensor
    greedy: GreedyChoice
    # [S] int32  `greedy` for the host; these tokens are stored as the rows' newest already
    drawn: Tensor
    # [T] bool; None = only the logits are checked
    is_finite_token: Tensor | None
    exported: Tensor | None = None  # as of `ForwardResult`

    def first(self, num_sampled: int, num_tokens: int) -> "GraphOutput":
        """Without the padding after the step's last row and token, but for `exported`."""
        flags = self.is_finite_token
        if num_sampled == len(self.drawn) and (flags is None or num_tokens == len(flags)):
            return self  # nothing is padding, and making a view costs as much as a launch
        return GraphOutput(
            own_logits=self.own_logits[:num_sampled],
            greedy=GreedyChoice(
                token_ids=self.greedy.token_ids[:num_sampled],
                is_finite=self.greedy.is_finite[:num_sampled],
            ),
            drawn=self.drawn[:num_sampled],
            is_finite_token=None if flags is None else flags[:num_tokens],
            exported=self.exported,
        )


class Recorder(Protocol):
    """Records work once and reruns it on the current content of its inputs' memory."""

    def record(self, run: Callable[[], GraphOutput]) -> Callable[[], GraphOutput]:
        """Returns a function that reruns `run`; its output is in the same memory every time."""
        ...

    def free_bytes(self) -> int:
        """Free memory of the device that runs the recorded work."""
        ...


class CudaRecorder:
    """Records CUDA graphs that share one memory pool."""

    def __init__(self, *, has_watchdog: bool = False) -> None:
        """has_watchdog: another thread looks after queued operations meanwhile, as NCCL's does."""
        # What another thread does to the device then does not spoil a capture.
        self._errors = "thread_local" if has_watchdog else "global"
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], GraphOutput]) -> Callable[[], GraphOutput]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=self._errors):
            output = run()

        def replay() -> GraphOutput:
            graph.replay()
            return output

        return replay

    def free_bytes(self) -> int:
        free_bytes, _ = torch.cuda.mem_get_info()
        return free_bytes


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collects garbage once, and then not until the end of the context.

    A capture fails if the collector frees a CUDA graph or pinned memory during it, and torch does
    not collect before each capture.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    replay: Callable[[], GraphOutput]
    attention_metadata: Any


class StepGraphs:
    """Captured steps of one kind."""

    def __init__(
        self,
        kind: str,
        sizes: Sequence[GraphSize],
        buffers: StepBuffers,
        *,
        open_attention: Callable[[GraphSize], Any],
        refresh_attention: Callable[[GraphSize, Any, AttentionStep], None],
        compute: Callable[[GraphSize, Any], GraphOutput],
    ) -> None:
        """`sizes` must ascend.

        `open_attention(size)` makes attention's metadata over the first rows of `buffers`,
        `refresh_attention(size, metadata, step)` plans a replay on the host, and
        `compute(size, metadata)` runs a step over them.
        """
        self.buffers = buffers
        self._kind = kind
        self._sizes = sizes
        self._open_attention = open_attention
        self._refresh_attention = refresh_attention
        self._compute = compute
        self._captured: dict[GraphSize, _Captured] = {}
        self._statistics: CaptureStatistics | None = None

    def capture(self, recorder: Recorder, report: Callable[[str], None]) -> None:
        """Capture every size, largest first so that smaller ones reuse its memory."""
        start_s = time.perf_counter()
        free_before = recorder.free_bytes()
        with _no_garbage_collection():
            for number, size in enumerate(reversed(self._sizes), start=1):
                self._captured[size] = self._capture_one(size, recorder)
                if number % _REPORT_EVERY == 0:
                    report(f"{self._kind} graphs: {number} of {len(self._sizes)} captured")
        self._statistics = taken = CaptureStatistics(
            num_graphs=len(self._sizes),
            capture_s=time.perf_counter() - start_s,
            capture_bytes=max(0, free_before - recorder.free_bytes()),
        )
        report(
            f"{self._kind} graphs: {taken.num_graphs} captured for up to"
            f" {max(size.num_rows for size in self._sizes)} rows and {self._sizes[-1].num_tokens}"
            f" tokens in {taken.capture_s:.1f} s, {taken.capture_bytes / 2**20:.0f} MiB"
        )

    def statistics(self) -> CaptureStatistics:
        assert self._statistics is not None, f"{self._kind} graphs were not captured"
        return self._statistics

    def size_for(self, num_rows: int, num_tokens: int, longest_row: int) -> GraphSize | None:
        """The smallest size that holds such a step; None if none does."""
        fits = (size for size in self._sizes if size.holds(num_rows, num_tokens, longest_row))
        return next(fits, None)

    def replay(self, size: GraphSize, step: AttentionStep) -> GraphOutput:
        """Run the graph on the inputs written to `buffers`, padded to `size`; step: those rows."""
        captured = self._captured[size]
        self._refresh_attention(size, captured.attention_metadata, step)
        return captured.replay()

    def has(self, size: GraphSize) -> bool:
        return size in self._captured

    def _capture_one(self, size: GraphSize, recorder: Recorder) -> _Captured:
        metadata = self._open_attention(size)

        def run() -> GraphOutput:
            return self._compute(size, metadata)

        return _Captured(replay=recorder.record(run), attention_metadata=metadata)

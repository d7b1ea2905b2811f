"""Holds the captured graphs of one executor and says which one computes a step.

    decode   one token of each row                      or of two batches, where the rule says
    verify   a few of each row, as some have drafts     that this takes less time
    prompt   any number of each row

Knows how a step is shaped, and nothing of what it computes (captured_steps.py).
"""

from collections.abc import Callable, Sequence

import torch

from engine.plan import StepPlan
from engine.runner.captured_steps import CapturedSteps
from engine.runner.dp_steps import DpStep
from engine.runner.graph_sizes import GraphSize, PromptSizes, decode_sizes, split_verify_sizes
from engine.runner.graphs import ExecutorStatistics, PromptStepCounter, Recorder, StepGraphs
from engine.runner.overlap.two_batches import TwoBatches
from engine.runner.step_buffers import StepBuffers

# Tokens of a split graph with drafts, over those of the whole one; more cost what splitting gains.
_MAX_SPAN_PADDING = 1.25


class StepGraphSet:
    """The graphs of each kind; None = such steps replay none."""

    def __init__(self, max_rows: int, open_buffers: Callable[[int], StepBuffers]) -> None:
        """open_buffers: makes the buffers of steps of so many tokens."""
        self._max_rows = max_rows
        self._open_buffers = open_buffers
        self._row_tokens = 1  # of a row with drafts
        self.decode: StepGraphs | None = None
        self.verify: StepGraphs | None = None
        self.prompt: StepGraphs | None = None
        self._split_decode: StepGraphs | None = None  # over the buffers of `decode`
        self._split_verify: StepGraphs | None = None  # over the buffers of `verify`
        self._two_batches: TwoBatches | None = None  # None = nothing is split
        self._prompt_steps: PromptStepCounter | None = None

    # ---- capturing ------------------------------------------------------------------------------

    def capture(
        self,
        steps: CapturedSteps,
        recorder: Recorder,
        report: Callable[[str], None],
        *,
        prompts: PromptSizes | None,
        verify: Sequence[GraphSize],
        row_tokens: int,
    ) -> None:
        """As `Executor.capture_graphs`. row_tokens: of a row with drafts, at most."""
        with torch.inference_mode():
            if prompts is not None:
                buffers = self._open_buffers(prompts.sizes[-1].num_tokens)
                self.prompt = steps.prompt_graphs(prompts.sizes, buffers)
                self.prompt.capture(recorder, report)
                self._prompt_steps = PromptStepCounter(prompts)
            if verify:
                self._row_tokens = row_tokens
                buffers = self._open_buffers(verify[-1].num_tokens)
                self.verify = steps.verify_graphs(verify, buffers)
                self.verify.capture(recorder, report)
            buffers = self._open_buffers(self._max_rows)
            self.decode = steps.decode_graphs(decode_sizes(self._max_rows), buffers)
            self.decode.capture(recorder, report)

    def capture_split_decodes(
        self,
        steps: CapturedSteps,
        two_batches: TwoBatches,
        recorder: Recorder,
        report: Callable[[str], None],
        *,
        min_rows: int,
    ) -> None:
        """As `Executor.capture_split_decodes`."""
        assert self.decode is not None, "captured after the whole ones"
        sizes = [s for s in decode_sizes(self._max_rows) if s.num_rows >= max(min_rows, 2)]
        if not sizes:
            return
        graphs = steps.split_decode_graphs(sizes, self.decode.buffers, two_batches)
        with torch.inference_mode():
            graphs.capture(recorder, report)
        self._two_batches, self._split_decode = two_batches, graphs

    def capture_split_verification(
        self,
        steps: CapturedSteps,
        two_batches: TwoBatches,
        recorder: Recorder,
        report: Callable[[str], None],
        *,
        min_tokens: int,
    ) -> None:
        """As `Executor.capture_split_verification`."""
        if self.verify is None:
            return
        buffers = self.verify.buffers
        sizes = split_verify_sizes(self._max_rows, self._row_tokens, buffers.max_tokens)
        sizes = [size for size in sizes if size.num_tokens >= min_tokens]
        if not sizes:
            return
        graphs = steps.split_verify_graphs(sizes, buffers, two_batches)
        with torch.inference_mode():
            graphs.capture(recorder, report)
        self._two_batches, self._split_verify = two_batches, graphs

    # ---- choosing -------------------------------------------------------------------------------

    def choose(self, plan: StepPlan) -> tuple[StepGraphs | None, GraphSize | None]:
        """The kind of graphs of such a step and the size that holds it; None = there is none."""
        num_rows, step = len(plan.rows), (plan.num_tokens, max(plan.num_new_tokens))
        if self.verify is not None and _is_short(plan, self._row_tokens):
            return self._choose_verify(num_rows, *step)
        is_decode = plan.is_decode
        graphs = self.decode if is_decode else self.prompt
        if plan.drafts:  # these graphs have a line of logits for each of their rows
            num_rows = max(num_rows, sum(plan.num_samples))
        size = graphs.size_for(num_rows, *step) if graphs else None
        if not is_decode:
            self.count(plan, size)
        elif size is not None:
            graphs = self.of_decodes(size)
        return graphs, size

    def choose_common(self, step: DpStep) -> tuple[StepGraphs | None, GraphSize | None]:
        """As `choose`, of a step of ranks with DP attention: the same on all of them."""
        max_tokens, longest_row = step.max_tokens, step.longest_row
        is_short = step.has_drafts and not step.is_decode and longest_row <= self._row_tokens
        if self.verify is not None and is_short:
            return self._choose_verify(step.max_rows, max_tokens, longest_row)
        graphs = self.decode if step.is_decode else self.prompt
        size = graphs.size_for(step.max_lines, max_tokens, longest_row) if graphs else None
        if step.is_decode and size is not None:
            graphs = self.of_decodes(size)
        return graphs, size

    def count_unreplayed(self, plan: StepPlan) -> None:
        """Count a step that replays no graph whatever its size."""
        self.count(plan, None)

    def of_decodes(self, size: GraphSize) -> StepGraphs:
        """The graphs that compute a decode step of a captured size: whole, or as two batches."""
        whole, split, two_batches = self.decode, self._split_decode, self._two_batches
        assert whole is not None, "no decode step was captured"
        if split is None or two_batches is None or not split.has(size):
            return whole
        return split if two_batches.splits_decode(size.num_rows) else whole

    def _choose_verify(
        self, num_rows: int, num_tokens: int, longest_row: int
    ) -> tuple[StepGraphs | None, GraphSize | None]:
        assert self.verify is not None, "no step with drafts was captured"
        size = self.verify.size_for(num_rows, num_tokens, longest_row)
        split = self._split_verify_size(num_rows, num_tokens, longest_row, size) if size else None
        return (self.verify, size) if split is None else (self._split_verify, split)

    def _split_verify_size(
        self, num_rows: int, num_tokens: int, longest_row: int, whole: GraphSize
    ) -> GraphSize | None:
        """The split graph that computes a step with drafts instead of the whole one; None = none.

        Its spans must hold little padding where rows have few drafts.
        """
        graphs, two_batches = self._split_verify, self._two_batches
        if graphs is None or two_batches is None:
            return None
        size = graphs.size_for(num_rows, num_tokens, longest_row)
        if size is None or size.num_tokens > _MAX_SPAN_PADDING * whole.num_tokens:
            return None
        has_halves = num_rows > size.num_rows // 2
        pays = has_halves and two_batches.splits_decode(size.num_rows, self._row_tokens)
        return size if pays else None

    def is_decode(self, graphs: StepGraphs) -> bool:
        """Whether they compute one token of each row, as one batch or two."""
        return graphs is self.decode or graphs is self._split_decode

    def is_verify(self, graphs: StepGraphs) -> bool:
        return graphs is self.verify or graphs is self._split_verify

    def is_split(self, graphs: StepGraphs | None) -> bool:
        return graphs is not None and graphs in (self._split_decode, self._split_verify)

    def count(self, plan: StepPlan, size: GraphSize | None) -> None:
        """Count a step with prompts; size: of the graph that it replays, if any."""
        if self._prompt_steps is not None:
            self._prompt_steps.count(plan.num_tokens, max(plan.num_new_tokens), size)

    def statistics(self, two_batches: TwoBatches | None) -> ExecutorStatistics:
        """two_batches: of the executor, which also splits steps that replay no graph."""
        decode, verify, prompt, steps = self.decode, self.verify, self.prompt, self._prompt_steps
        return ExecutorStatistics(
            decode_graphs=decode.statistics() if decode else None,
            verify_graphs=verify.statistics() if verify else None,
            prompt_graphs=prompt.statistics() if prompt else None,
            prompt_steps=steps.statistics() if steps else None,
            two_batches=two_batches.statistics() if two_batches else None,
        )


def _is_short(plan: StepPlan, max_tokens: int) -> bool:
    """Whether some rows have drafts, and all of them few tokens."""
    return bool(plan.drafts) and not plan.is_decode and max(plan.num_new_tokens) <= max_tokens

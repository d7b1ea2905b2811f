"""What CUDA graphs cost to capture, and how many prompt steps replay them. Knows no graph."""

from dataclasses import dataclass

from engine.execution.graph_sizes import GraphSize, PromptForm, PromptSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStatistics:
    """What the graphs of one kind took at start."""

    num_graphs: int
    capture_s: float
    capture_bytes: int  # of the device's memory, beyond what was taken before


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStepStatistics:
    """Steps with more than decoding in them, since the graphs were captured.

    num_replayed <= num_eligible <= num_steps: an eligible step is short enough for the form; it is
    not replayed where it has more rows than any graph.
    """

    form: PromptForm
    num_steps: int
    num_eligible: int
    num_replayed: int
    num_replayed_tokens: int
    num_padding_tokens: int  # computed beside those for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStatistics:
    """How an executor's steps run; None = steps of that kind replay no graphs."""

    decode_graphs: CaptureStatistics | None
    prompt_graphs: CaptureStatistics | None
    prompt_steps: PromptStepStatistics | None


class PromptStepCounter:
    """Counts prompt steps by whether they were short enough, and whether one was replayed."""

    def __init__(self, sizes: PromptSizes) -> None:
        self._sizes = sizes
        self._num_steps = 0
        self._num_eligible = 0
        self._num_replayed = 0
        self._num_replayed_tokens = 0
        self._num_padding_tokens = 0

    def count(self, num_tokens: int, longest_row: int, size: GraphSize | None) -> None:
        """`size`: of the graph that is replayed; None = none is."""
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

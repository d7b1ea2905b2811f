"""Counts what one scheduler did since its start."""

from bisect import bisect_left
from dataclasses import dataclass, field

from engine.messages import STEP_TOKEN_BUCKETS
from engine.request import Request
from engine.scheduling.contracts import SchedulerStatistics


@dataclass(slots=True, kw_only=True)
class SchedulerCounters:
    """Fields are as of `SchedulerStatistics`."""

    num_steps: int = 0
    num_prompt_tokens_computed: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_preemptions_for_others: int = 0
    num_step_tokens: int = 0
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKEN_BUCKETS) + 1))

    def computes(self, request: Request, num_tokens: int) -> None:
        """Count the part of a chunk that is of its request's prompt, before it is advanced."""
        num_prompt_left = max(0, request.num_prompt_tokens - request.num_computed_tokens)
        self.num_prompt_tokens_computed += min(num_tokens, num_prompt_left)

    def committed(self, num_tokens: int) -> None:
        """Count a step of so many tokens."""
        self.step_counts[bisect_left(STEP_TOKEN_BUCKETS, num_tokens)] += 1
        self.num_step_tokens += num_tokens

    def statistics(
        self, *, num_waiting: int, num_running: int, num_queued_tokens: int, num_output_tokens: int
    ) -> SchedulerStatistics:
        """With sizes now, and output tokens, which others count."""
        return SchedulerStatistics(
            num_waiting=num_waiting,
            num_running=num_running,
            num_queued_tokens=num_queued_tokens,
            step_counts=tuple(self.step_counts),
            num_step_tokens=self.num_step_tokens,
            num_preemptions=self.num_preemptions,
            num_preemptions_for_others=self.num_preemptions_for_others,
            num_steps=self.num_steps,
            num_prompt_tokens_computed=self.num_prompt_tokens_computed,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=num_output_tokens,
        )

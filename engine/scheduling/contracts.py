"""What the scheduler needs from others, and what a step gives back."""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.messages import FailureRecord, TokenRecord
from engine.request import Request, RequestKey


class BlockHasher(Protocol):
    """Names the content of full blocks (see engine/kv/hashes.py)."""

    def extend(self, request: Request) -> None:
        """Append to `request.block_hashes` the hash of every full block of its known tokens."""
        ...


class HandoffQueue(Protocol):
    """Takes finished prompts whose KV moves to another worker. Called on the engine thread."""

    @property
    def num_unreserved_blocks(self) -> int:
        """Blocks of finished prompts for which no decode worker has reserved blocks yet."""
        ...

    def start(self, request: Request) -> None:
        """The first chunk starts (or starts again): a decode worker is asked for blocks."""
        ...

    def advance(self, request: Request) -> None:
        """A step was committed: `request.num_indexed_blocks` leading blocks will never change.

        Nothing happens for a request that did not start or has no new full block.
        """
        ...

    def retract(self, key: RequestKey) -> None:
        """The request was preempted: its blocks are about to be released, it computes again."""
        ...

    def add(self, request: Request) -> None:
        """The prompt is computed: take over the request and its block references."""
        ...

    def drop(self, key: RequestKey) -> None:
        """The request ended here before `add`, perhaps before `start` too."""
        ...


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The effects of one turn of the loop on requests; `Request.ingress_id` is their ingress."""

    num_scheduled_tokens: int = 0  # computed by the step that was committed
    has_progressed: bool = False  # a step was launched or committed; False = nothing could run
    tokens: list[tuple[str, TokenRecord]] = []  # (ingress_id, record)
    failures: list[tuple[str, FailureRecord]] = []
    left: list[RequestKey] = []  # no longer in this scheduler

    def fail(self, request: Request, reason: str, code: str) -> None:
        """Ends a request with an error that another worker would not avoid."""
        record = FailureRecord(key=request.key, reason=reason, retryable=False, code=code)
        self.failures.append((request.ingress_id, record))
        self.left.append(request.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatistics:
    """Counters since start, and sizes now."""

    num_waiting: int
    num_running: int
    num_queued_tokens: int
    num_preemptions: int
    num_preemptions_for_others: int  # of these, for a waiting request; the others let rows grow
    num_steps: int
    num_prompt_tokens_computed: int
    num_cached_tokens: int
    num_output_tokens: int

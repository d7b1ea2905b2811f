"""Interfaces that the scheduler needs from other parts, and the output of a step."""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.messages import FailureRecord, TokenRecord
from engine.request import Request, RequestKey


class BlockHasher(Protocol):
    """Computes hashes that name the content of full blocks (see engine/kv/hashes.py)."""

    def extend(self, request: Request) -> None:
        """Append to `request.block_hashes` the hashes of its full blocks that are known by now."""
        ...


class HandoffQueue(Protocol):
    """Takes finished prompts whose KV moves to another worker. Called on the engine thread."""

    @property
    def num_unreserved_blocks(self) -> int:
        """Blocks held by finished prompts for which no decode worker has reserved blocks yet."""
        ...

    def start(self, request: Request) -> None:
        """The first chunk starts (again, after a preemption): the decode worker can be asked now
        to reserve blocks.
        """
        ...

    def advance(self, request: Request) -> None:
        """A step was committed: `request.num_indexed_blocks` leading blocks will never change.

        Nothing happens for a request that did not start or has no new full block.
        """
        ...

    def retract(self, key: RequestKey) -> None:
        """The request was preempted: its blocks will be released and its KV recomputed."""
        ...

    def add(self, request: Request) -> None:
        """The prompt is computed: take over the request and its block references."""
        ...

    def drop(self, key: RequestKey) -> None:
        """The request ended in this worker before `add`, perhaps before `start` too."""
        ...


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one turn of the loop produced; `Request.ingress_id` names each record's receiver."""

    num_scheduled_tokens: int = 0  # computed by the step that was committed
    has_progressed: bool = False  # a step was launched or committed; False = nothing could run
    tokens: list[tuple[str, TokenRecord]] = []  # (ingress_id, record)
    failures: list[tuple[str, FailureRecord]] = []
    left: list[RequestKey] = []  # no longer in this scheduler

    def fail(self, request: Request, reason: str, code: str) -> None:
        """Report that the request failed for good: not retryable on another worker."""
        record = FailureRecord(key=request.key, reason=reason, retryable=False, code=code)
        self.failures.append((request.ingress_id, record))
        self.left.append(request.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatistics:
    """Counters since start, and sizes now."""

    num_waiting: int
    num_running: int
    num_queued_tokens: int
    # Committed steps by their tokens: [i] had at most STEP_TOKEN_BUCKETS[i], the last had more.
    step_counts: tuple[int, ...]
    num_step_tokens: int  # of all of them
    num_preemptions: int
    num_preemptions_for_others: int  # of these: to admit waiting requests, not for decode growth
    num_steps: int
    num_prompt_tokens_computed: int
    num_cached_tokens: int
    num_output_tokens: int

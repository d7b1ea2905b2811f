"""Tracks launched, uncommitted steps: the rows that they compute and the blocks that they touch.

    launch(n) ------------------------------------ commit(n)
                   launch(n + 1) ----------------------------------- commit(n + 1)
                                                   |-- blocks of a request that ended in n are held

The device runs steps in the order of their launch, so a later step may reuse a row at once. Blocks
need more care: a handoff writes them from its own thread, and a row whose logits turn out to be
non-finite leaves blocks that must be zeroed. So a block that a launched step reads, writes or
zeroes is not available before that step is committed, even if its request has left. Knows no rows
and no cache: the scheduler releases what is held here.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from engine.cost_model import NO_WORK, StepWork
from engine.plan import StepResult, TokenLogprobs
from engine.request import Request
from engine.scheduling.drafting import NO_DRAFTS, PlannedDrafts


class StepInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """One launched step."""

    requests: list[Request]  # parallel to the plan's rows: decodes, then chunks of prompts
    num_decodes: int
    zero_block_ids: list[int]
    # Requests with a block that this step completes, and the number of their tokens that have KV
    # after it. `Request.num_computed_tokens` may be larger by then: it also counts the next step.
    filled: list[tuple[Request, int]]
    work: StepWork = NO_WORK
    held: Sequence[Request] = ()  # not planned again until the token sampled here is known
    planned_drafts: PlannedDrafts = NO_DRAFTS
    # index in `requests` -> block ids of a request that left after the launch
    left_block_ids: dict[int, list[int]] = {}

    def rows(
        self, result: StepResult
    ) -> Iterator[tuple[Request, list[int], list[TokenLogprobs] | None]]:
        """Each request with its sampled ids and log-probabilities (if asked for), in plan order."""
        return zip(self.requests, result.tokens, result.logprobs, strict=True)

    def without_token(self, result: StepResult) -> list[int]:
        """Indices of requests in a row for which nothing could be sampled."""
        if all(result.is_finite) and not result.allows_nothing:
            return []
        ended = [i for i, is_finite in enumerate(result.is_finite) if not is_finite]
        return [i for i in ended + result.allows_nothing if self.requests[i].row is not None]


class StepsInFlight:
    """Steps in flight in launch order, which is also the order in which they end."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: StepInFlight) -> None:
        self._steps.append(step)

    @property
    def newest(self) -> StepInFlight:
        return self._steps[-1]

    @property
    def num_held_rows(self) -> int:
        """Rows that wait for a step in flight because they may get drafts then."""
        held = [request for step in self._steps for request in step.held]
        return sum([r.row is not None and not r.params.is_constrained for r in held])

    def pop(self) -> StepInFlight:
        """Remove and return the oldest step, whose result has arrived."""
        return self._steps.popleft()

    def is_computing(self, request: Request) -> bool:
        return any(request in step.requests for step in self._steps)

    def hold(self, request: Request, block_ids: list[int]) -> None:
        """Hold a leaving request's blocks until the last step that computes for it is committed."""
        step = next(step for step in reversed(self._steps) if request in step.requests)
        step.left_block_ids[step.requests.index(request)] = block_ids

    def owners(self) -> Iterator[tuple[str, list[int]]]:
        """Every holder of block references here, for the check that no block is lost."""
        for step in self._steps:
            if step.zero_block_ids:
                yield "being zeroed", step.zero_block_ids
            for index, block_ids in step.left_block_ids.items():
                yield f"left, in flight {step.requests[index].key}", block_ids

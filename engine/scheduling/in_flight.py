"""Steps that were launched and are not committed: whose rows they compute, which blocks they touch.

    launch(n) ------------------------------------ commit(n)
                   launch(n + 1) ----------------------------------- commit(n + 1)
                                                   |-- blocks of a request that ended in n are held

The device runs steps in the order of their launch, so a later step may take over a row at once.
Blocks are not so simple: a handoff writes them from its own thread, and a row that turns out not to
be finite leaves blocks that must be zeroed. So a block that a launched step reads, writes or zeroes
stays unavailable until that step is committed, even if its request has left.
Knows no rows and no cache: the scheduler releases what is held here.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from engine.cost_model import NO_WORK, StepWork
from engine.plan import StepResult, TokenLogprobs
from engine.request import Request


class StepInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was launched and is not committed."""

    requests: list[Request]  # parallel to the plan's rows: decodes, then chunks of prompts
    num_decodes: int
    zero_block_ids: list[int]
    # Whose last block, or one before it, the step fills, and how far its tokens have KV then. Not
    # as far as `Request.num_computed_tokens` says later: the next step may be counted there.
    filled: list[tuple[Request, int]]
    work: StepWork = NO_WORK
    held: Sequence[Request] = ()  # constrained: planned again only once their token is known
    # index in `requests` -> the blocks of a request that left since
    left_block_ids: dict[int, list[int]] = {}

    def rows(
        self, result: StepResult
    ) -> Iterator[tuple[Request, list[int], list[TokenLogprobs] | None]]:
        """Yields each request with its sampled tokens and, if asked for, their log-probabilities.

        In the plan's order.
        """
        return zip(self.requests, result.tokens, result.logprobs, strict=True)

    def not_finite(self, result: StepResult) -> list[Request]:
        """Returns the requests whose logits were not finite; they sampled nothing."""
        if all(result.is_finite):
            return []
        whether = zip(self.requests, result.is_finite, strict=True)
        return [request for request, is_finite in whether if not is_finite]


class StepsInFlight:
    """The steps in flight, in the order of their launch, which is the order they end in."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: StepInFlight) -> None:
        self._steps.append(step)

    @property
    def newest(self) -> StepInFlight:
        return self._steps[-1]

    def pop(self) -> StepInFlight:
        """Removes the oldest step, whose result has come."""
        return self._steps.popleft()

    def is_computing(self, request: Request) -> bool:
        return any(request in step.requests for step in self._steps)

    def hold(self, request: Request, block_ids: list[int]) -> None:
        """Hold the blocks of a request that leaves until the last step computing for it ends."""
        step = next(step for step in reversed(self._steps) if request in step.requests)
        step.left_block_ids[step.requests.index(request)] = block_ids

    def owners(self) -> Iterator[tuple[str, list[int]]]:
        """Yields the holders of block references here, for the conservation law."""
        for step in self._steps:
            if step.zero_block_ids:
                yield "being zeroed", step.zero_block_ids
            for index, block_ids in step.left_block_ids.items():
                yield f"left, in flight {step.requests[index].key}", block_ids

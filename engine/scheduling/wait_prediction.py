"""Predicts how long waiting requests wait for rows and blocks, from what running ones hold.

A request that may stop at any token is assumed to make as many more tokens as it has made already,
within its limit. Requests are assumed to end in the order of their steps left, and to free what
they hold now; growth until then is ignored. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A number of rows and blocks, either free or needed."""

    num_rows: int
    num_blocks: int

    def holds(self, needed: "Room") -> bool:
        return self.num_rows >= needed.num_rows and self.num_blocks >= needed.num_blocks


def num_steps_left(request: Request) -> int:
    """Predicted decode steps until the request ends; at least one."""
    num_to_limit = request.max_known_tokens - request.num_known_tokens
    return max(1, min(num_to_limit, request.num_output_tokens))


def steps_until(needed: Room, free: Room, held: Iterable[tuple[int, int]]) -> float:
    """Predicted decode steps until `needed` is free; 0 = it is free now.

    held: steps left and number of blocks of each running request. If all of them together do not
    free enough, the time until the last ends is scaled by the ratio of needed to total: the waiting
    requests will hold rows and blocks, too.
    """
    if free.holds(needed):
        return 0.0
    num_steps = 0
    for num_steps, num_blocks in sorted(held):
        free = Room(num_rows=free.num_rows + 1, num_blocks=free.num_blocks + num_blocks)
        if free.holds(needed):
            return num_steps
    rounds = [
        needed.num_rows / max(free.num_rows, 1),
        needed.num_blocks / max(free.num_blocks, 1),
    ]
    return max(num_steps, 1) * max(rounds)

"""Predicts how long a waiting request waits for rows and blocks, from what running ones hold.

A request that may stop at any token is assumed to run for as long as it has already, and not beyond
its limit. Requests end in that order, and what each holds now is free then; growth until then is
left out. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A number of rows and of blocks, free or needed."""

    num_rows: int
    num_blocks: int

    def holds(self, needed: "Room") -> bool:
        return self.num_rows >= needed.num_rows and self.num_blocks >= needed.num_blocks


def num_steps_left(request: Request) -> int:
    """Predicts the steps that a request has left, at least one."""
    num_to_limit = request.max_known_tokens - request.num_known_tokens
    return max(1, min(num_to_limit, request.num_output_tokens))


def steps_until(needed: Room, free: Room, held: Iterable[tuple[int, int]]) -> float:
    """Decode steps until `needed` is free; 0 = it is.

    held: steps left and blocks of each running request. If all of them free too little, the
    rest takes as long again in proportion, because waiting requests will hold blocks, too.
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

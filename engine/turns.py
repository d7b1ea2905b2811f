"""Work in turns: it yields where it would wait for the device, so that others queue theirs."""

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Turns = Generator[None, None, T]


def run_alone(work: Turns[T]) -> T:
    """The result of work that nobody shares the device with."""
    [found] = run_together([work])
    return found


def run_together(works: Sequence[Turns[T]]) -> list[T]:
    """The results of all; each has a turn before any has the next one."""
    found: dict[int, T] = {}
    while len(found) < len(works):
        for number, work in enumerate(works):
            if number in found:
                continue
            try:
                next(work)
            except StopIteration as end:
                found[number] = end.value
    return [found[number] for number in range(len(works))]

"""Arrays of distinct items, listed: a grammar cannot compare an item with those before it."""

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, islice, permutations

from engine.constraints.numbers import identity_of

MAX_ARRAYS = 512  # as constants of one schema
_MAX_STEPS = 20_000  # of a search for arrays of one length


class _TooManyError(Exception):
    """Raised when a search becomes too long."""


def distinct_arrays(
    prefix: Sequence[Sequence[object]], rest: Sequence[object], least: int, most: int | None
) -> list[list[object]] | None:
    """All arrays of `least` to `most` distinct items; None if there are too many.

    prefix: the values of the first items, by place. rest: those of all others. Without a prefix, an
    array may have its items in any order if these are few enough, and else in the order of `rest`.
    """
    pools = [_distinct(pool) for pool in prefix]
    others = _distinct(rest)
    longest = len(pools) + len(others)
    lengths = range(least, min(longest if most is None else most, longest) + 1)
    ways: list[Iterator[Sequence[object]]] = [
        chain.from_iterable(_of_length(pools, others, length) for length in lengths)
    ]
    if not pools:
        ways.append(chain.from_iterable(combinations(others, length) for length in lengths))
    for arrays in ways:
        try:
            found = list(islice(arrays, MAX_ARRAYS + 1))
        except _TooManyError:
            return None
        if len(found) <= MAX_ARRAYS:
            return [list(array) for array in found]
    return None


def _of_length(
    pools: Sequence[Sequence[object]], others: Sequence[object], length: int
) -> Iterator[Sequence[object]]:
    if not pools:
        yield from permutations(others, length)
        return
    places = [*pools[:length], *[others] * (length - len(pools))]
    steps = iter(range(_MAX_STEPS))

    def extended(items: list[object]) -> Iterator[Sequence[object]]:
        if len(items) == length:
            yield items
            return
        for value in places[len(items)]:
            if next(steps, None) is None:
                raise _TooManyError
            if len(_distinct([*items, value])) > len(items):
                yield from extended([*items, value])

    yield from extended([])


def _distinct(values: Sequence[object]) -> list[object]:
    return list({identity_of(value): value for value in values}.values())

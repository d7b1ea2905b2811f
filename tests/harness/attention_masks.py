"""Mask functions that a configuration may name, and some that it may not."""

from pathlib import Path

from torch import Tensor


def near_and_even(query: Tensor, key: Tensor) -> Tensor:
    """A query sees the six keys before it, and of the others those at even positions."""
    return (query - key < 7) | (key % 2 == 0)


def sections_of_forty(query: Tensor, key: Tensor) -> Tensor:
    """A query sees its own forty tokens and the first sixteen of all."""
    return (query // 40 == key // 40) | (key < 16)


def blind(query: Tensor, key: Tensor) -> Tensor:
    return (key < query) | (query < 100)


def number(query: Tensor, key: Tensor) -> Tensor:
    return query - key


def by_shape(query: Tensor, key: Tensor) -> Tensor:
    """Not elementwise: what it tells depends on how many positions it is asked of."""
    return (query - key < query.numel()) | (query == key)


def by_a_file(query: Tensor, key: Tensor) -> Tensor:
    """A mask, but not of torch's operations alone: it cannot be compiled."""
    with Path(__file__).open() as source:
        return (key <= query) & (len(source.readline()) > 0)


def branching(query: Tensor, key: Tensor) -> Tensor:
    if query > 7:
        return key == query
    return key <= query

"""Values that ranks agree on while they build: what one of them measured would differ elsewhere.

Every rank calls the same functions in the same order. Building takes one rank longer than another
(files, compilers), so these waits are long; a rank that dies is noticed at once all the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from engine.layers.context import Comm

T = TypeVar("T")

BUILD_PATIENCE_S = 1800.0


@contextmanager
def hanging_up_on_error(comm: Comm) -> Iterator[None]:
    """Hang up if the body fails: the other ranks, which wait for this one, then fail at once."""
    try:
        yield
    except BaseException:
        comm.close()
        raise


def meet(comm: Comm) -> None:
    """Wait until every rank is here."""
    if comm.rank.size > 1:
        comm.gather_bytes(b"", BUILD_PATIENCE_S)


def value_of_first(comm: Comm, value: T) -> T:
    """Rank 0's `value`: a number or a record that msgspec encodes."""
    if comm.rank.size == 1:
        return value
    encoded = comm.gather_bytes(msgspec.msgpack.encode(value), BUILD_PATIENCE_S)
    return msgspec.msgpack.decode(encoded[0], type=type(value))


def least(comm: Comm, number: int) -> int:
    """The least of the ranks' numbers."""
    if comm.rank.size == 1:
        return number
    encoded = comm.gather_bytes(msgspec.msgpack.encode(number), BUILD_PATIENCE_S)
    return min(msgspec.msgpack.decode(data, type=int) for data in encoded)

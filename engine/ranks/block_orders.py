"""What rank 0 asks other ranks to do with blocks of the host tier, and how they answer."""

from typing import Literal

import msgspec
import numpy as np


class SaveParts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Rank 0 -> others: these blocks of the device into those of the arena."""

    block_ids: list[int]
    slots: list[int]


class LoadParts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Rank 0 -> others: these blocks of the arena into those of the device."""

    slots: list[int]
    block_ids: list[int]


Order = SaveParts | LoadParts


def kind_of(order: Order) -> Literal["host save", "host load"]:
    """The kind of the task that asks for it."""
    return "host save" if isinstance(order, SaveParts) else "host load"


_orders = msgspec.msgpack.Decoder(Order)


def decode_order(work: bytes) -> Order:
    order: Order = _orders.decode(work)
    return order


def encode_digests(digests: list[int]) -> bytes:
    """One for each block: the answer."""
    return np.array(digests, np.int64).tobytes()

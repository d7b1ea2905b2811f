"""A worker of the host arena in a process of its own, which may be killed at any point.

Whatever it stores can be checked by anybody: bytes and digest of a block follow from its hash.
"""

import sys
from hashlib import blake2b

from engine.kv.host.arena import HostArena
from engine.kv.host.shared_file import SHARED

BLOCK_BYTES = 256
NUM_BYTES = 2**21 + 2**16
FINGERPRINT = b"f" * 16


def open_arena(name: str, num_bytes: int = NUM_BYTES) -> HostArena:
    return HostArena(name, num_bytes=num_bytes, block_bytes=BLOCK_BYTES, fingerprint=FINGERPRINT)


def name_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def content_of(block_hash: bytes) -> bytes:
    return block_hash * (BLOCK_BYTES // len(block_hash))


def digest_of(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True)


def store(arena: HostArena, numbers: range) -> list[bytes]:
    """Stores blocks as far as there are some to be had; returns their names."""
    slots = arena.take(len(numbers))
    names = [name_of(number) for number in numbers[: len(slots)]]
    for slot, name in zip(slots, names, strict=True):
        arena.blocks[slot] = list(content_of(name))
    arena.publish(slots, names, [digest_of(content_of(name)) for name in names])
    return names


def main() -> None:
    """Arguments: the arena's name, and what to do until the end."""
    name, task = sys.argv[1:]
    arena = open_arena(name)
    if task == "stuck":  # half-written blocks and a lock in its hands
        arena.blocks[arena.take(5)] = 7
        with arena._file.locked(SHARED, 1.0):
            print("ready", flush=True)
            sys.stdin.read()
    number = 0
    while task == "busy":
        number += 1
        store(arena, range(8 * number, 8 * number + 8))
        if number == 20:
            print("ready", flush=True)


if __name__ == "__main__":
    main()

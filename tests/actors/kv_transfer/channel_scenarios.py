"""What the sender's process does in the tests of channels between two processes."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import torch

from actors.kv_transfer.contracts import StoredBlocks
from engine.errors import HandoffError, WorkerError
from engine.messages import ChannelKind, PieceReply
from load_tests.testbed.channel_ends import SendingProcess
from tests.actors.kv_transfer.two_processes import NUM_BLOCKS


async def equal_bytes(
    process: SendingProcess, folder: Path, answers: Any, kind: ChannelKind, rounds: int
) -> int:
    """Random blocks to random places, `rounds` times; how many rounds arrived as sent."""
    await process.open(kind)
    num_equal = 0
    for _ in range(rounds):
        number = random.randint(1, NUM_BLOCKS)
        from_ids, to_ids = (random.sample(range(NUM_BLOCKS), number) for _ in range(2))
        await process.hand_over(from_ids, to_ids)
        expected = process.end.store.digest(from_ids)
        num_equal += await process.call("digests", to_ids) == expected
    await process.close_channel()
    return num_equal


async def flipped_byte(
    process: SendingProcess, folder: Path, answers: Any, kind: ChannelKind
) -> str:
    """Change a byte between digest and copy; why the receiver did not take the piece."""
    await process.open(kind)
    store = process.end.store
    from_ids, to_ids = (random.sample(range(NUM_BLOCKS), 10) for _ in range(2))
    digests = store.digest(from_ids)
    block = store.tensor[random.choice(from_ids)].view(-1).view(torch.uint8)
    block[random.randrange(block.numel())] ^= 1 << random.randrange(8)
    try:
        await process.send_piece(from_ids, to_ids, digests)
    except HandoffError as error:
        return error.message
    finally:
        await process.close_channel()
    return "it was taken"


async def endless(process: SendingProcess, folder: Path, answers: Any, kind: ChannelKind) -> str:
    """Hand over until something fails; tells when the first handoff is done, then what failed.

    Afterwards this process's device still computes, and a new receiver is served.
    """
    await process.open(kind)
    blocks = list(range(NUM_BLOCKS))
    before = process.end.store.digest(blocks)
    await process.hand_over(blocks, blocks)
    answers.put("moving")
    try:
        while True:
            await process.hand_over(blocks, blocks[::-1])
    except WorkerError as error:
        answers.put(f"failed: {error.message}")
    await process.close_channel()
    assert process.end.store.digest(blocks) == before, "the survivor's device does not compute"
    again = await asyncio.to_thread(SendingProcess, process.end, folder)
    await again.open(kind)
    await again.hand_over(blocks, blocks)
    assert await again.call("digests", blocks) == before
    await again.close_channel()
    return "survived"


async def deadline(
    process: SendingProcess, folder: Path, answers: Any, kind: ChannelKind
) -> tuple[float, bool]:
    """A piece whose header never arrives: seconds until it failed, and if a new epoch works."""
    await process.open(kind)
    channel = process.channel
    pieces, blocks = process.end.pieces, list(range(200))

    async def nobody(seq: int, payload: list[Any]) -> PieceReply:
        await asyncio.sleep(1000)
        return PieceReply(outcome="failed")

    data = StoredBlocks(block_ids=tuple(blocks), nbytes=len(blocks) * pieces.block_bytes)
    started_s = time.monotonic()
    try:
        await channel.send(data, nobody)
    except HandoffError:
        failed_s = time.monotonic() - started_s
    await process.open(kind)
    await process.hand_over(blocks, blocks)
    is_equal = await process.call("digests", blocks) == process.end.store.digest(blocks)
    await process.close_channel()
    return failed_s, is_equal

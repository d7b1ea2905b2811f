"""A prompt computed by some number of ranks and decoded by another; what every rank does for it.

Other processes import this file.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from actors.kv_transfer.channels.rank_ipc import RankOffer, RanksOffer
from actors.kv_transfer.contracts import StagedPiece, StoredBlocks
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.rank_pieces import RankPieces, RankSources
from actors.kv_transfer.rank_pulls import MapSource, PullBlocks, RankPuller
from engine.host_id import host_id
from engine.kv.device_offer import offer_tensor
from engine.kv.layout import KvLayout, KvPart
from engine.kv.store import KvStore
from engine.layers.context import SINGLE_RANK, Comm
from engine.models.spec import load_spec
from engine.plan import StepResult
from engine.ranks.agreement import meet
from engine.ranks.rank import Rank
from engine.ranks.shared_stores import part_of, share_stores
from engine.ranks.step_counts import StepCounts
from engine.request import SamplingParams
from engine.runner.executor_options import ExecutorOptions
from tests.actors.kv_transfer.rank_workers import layout_of_part
from tests.engine.ranks.exact_models import build_exact
from tests.engine.runner.step_driver import StepDriver
from tests.harness.rank_processes import TIMEOUT_S

Told = tuple[list[list[int]], Tensor]  # tokens of each step, and logits after the last
NUM_DECODED = 6
NUM_MOVED = 9  # blocks


@dataclass
class Side:
    """This rank's part of a worker, and the pieces of all of it where it is rank 0."""

    driver: StepDriver
    pieces: KvPieces | RankPieces | None
    steps: StepCounts = field(default_factory=StepCounts)

    def sample(self, num_new: dict[int, int]) -> StepResult:
        self.steps.num_launched += 1
        result = self.driver.sample(num_new)
        self.steps.num_ended += 1
        shared = self.driver.executor.kv_store.shared
        if shared is not None:
            shared.count_step()
        return result


Way = Literal["host", "pulled", "staged"]


def move_once(comm: Comm, device: str, *, way: Way) -> Tensor:
    """This rank's store, on the CPU, after blocks of all ranks moved to others of all ranks.

    They arrive in reverse order: through host memory, straight from store to store, or through
    memory of rank 0's device.
    """
    whole = KvLayout.with_heads(
        num_layers=3, block_size=16, num_kv_heads=4, head_dim=64, dtype="bfloat16"
    )
    part = part_of(comm.rank, whole)
    layout = KvLayout.with_heads(
        num_layers=3, block_size=16, num_kv_heads=part.num_heads, head_dim=64, dtype="bfloat16"
    )
    on = torch.device(device)
    sender, receiver = (KvStore(layout, num_blocks=NUM_MOVED, device=on) for _ in range(2))
    pieces = [share_stores(comm, store, whole) for store in (sender, receiver)]
    ids = list(range(NUM_MOVED))
    sender.scatter(ids, drawn_blocks(whole)[..., part.heads, :].contiguous())
    sender.digests.keep(ids, sender.digest(ids))
    meet(comm)
    if comm.rank.index == 0:
        source, target = (RankPieces(stores, StepCounts(), TIMEOUT_S) for stores in pieces)

        async def move() -> bool:
            piece = await source.read(ids)
            target.fence()
            if way == "pulled":
                stores = RankSources([(one.part, one.store.tensor) for one in source.stores])
                return await target.pull(stores, ids, ids[::-1], piece.digests)
            if way == "staged":
                slot = torch.empty(NUM_MOVED * whole.block_bytes, dtype=torch.uint8, device=on)
                loaded = source.queue_load(ids, slot)
                if loaded is not None:
                    loaded.synchronize()
                taken = target.queue_take(slot, ids[::-1])
                taken.wait()
                return bool(taken.digests.tolist() == piece.digests)
            data = piece.data
            if isinstance(data, StoredBlocks):
                data = await source.to_host(data)
            return await target.write(ids[::-1], StagedPiece(data=data, digests=piece.digests))

        assert asyncio.run(move()), "digests differ"
    meet(comm)
    return receiver.tensor.cpu()


def pull_own_heads(comm: Comm, device: str, *, from_one: bool) -> Tensor:
    """This rank's store, on the CPU, after it has pulled its heads from the other one's GPU.

    That has this rank's heads, or those of both ranks. Two ranks.
    """
    whole = KvLayout.with_heads(
        num_layers=3, block_size=16, num_kv_heads=4, head_dim=128, dtype="bfloat16"
    )
    mine, other = (
        part_of(Rank(index, 2), whole) for index in (comm.rank.index, 1 - comm.rank.index)
    )
    given = part_of(Rank(0, 1), whole) if from_one else other  # what the other rank needs of this
    sender, receiver = (_store(whole, part, torch.device(device)) for part in (given, mine))
    ids = list(range(NUM_MOVED))
    sender.scatter(ids, drawn_blocks(whole)[..., given.heads, :].contiguous())
    torch.zeros(1, device=device).cpu()  # the blocks are there
    offer = RankOffer(part=given, store=offer_tensor(sender.tensor))
    offered = comm.gather_bytes(msgspec.msgpack.encode(offer))[1 - comm.rank.index]
    ranks = RanksOffer(host=host_id(), ranks=[msgspec.msgpack.decode(offered, type=RankOffer)])
    puller = RankPuller(mine, KvPieces(receiver, num_threads=1))
    puller.do(msgspec.msgpack.encode(MapSource(0, ranks, 0.0)))
    expected = _store(whole, mine, torch.device("cpu")).digest_staged(
        drawn_blocks(whole)[..., mine.heads, :].contiguous()
    )
    for to_ids in (ids[::-1], ids):  # by a kernel, and as one run by a copy engine
        found = puller.do(msgspec.msgpack.encode(PullBlocks(0, ids, to_ids)))
        assert np.frombuffer(found, np.int64).tolist() == expected
    meet(comm)  # the other rank has read this one's, too
    return receiver.tensor.cpu()


def _store(whole: KvLayout, part: KvPart, on: torch.device) -> KvStore:
    store = KvStore(layout_of_part(whole, part.num_heads), num_blocks=NUM_MOVED, device=on)
    store.hold_part(part)
    return store


def drawn_blocks(whole: KvLayout) -> Tensor:
    """[NUM_MOVED, *block_shape], the same in every process."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(NUM_MOVED, *whole.block_shape, generator=generator).bfloat16()


def open_side(comm: Comm, folder: Path, size: int) -> Side | None:
    """None where this rank is none of the worker's, which has one rank, or all of them."""
    if size == 1 and comm.rank.index > 0:
        return None
    comm = SINGLE_RANK if size == 1 else comm
    model, attention = build_exact(folder, comm.rank)
    options = ExecutorOptions(sends_blocks=True)
    driver = StepDriver(model, seed=3, phased=attention, options=options, comm=comm)
    store = driver.executor.kv_store
    if size == 1:
        return Side(driver, KvPieces(store, num_threads=1))
    whole = load_spec(folder).kv_layout(block_size=4, dtype="float32")
    stores, side = share_stores(comm, store, whole), Side(driver, None)
    if stores:
        side.pieces = RankPieces(stores, side.steps, TIMEOUT_S, num_threads=1)
    return side


def hand_over(
    comm: Comm,
    folder: Path,
    sizes: tuple[int, int] | None,
    prompt: list[int],
    params: SamplingParams,
) -> Told | None:
    """The answer to `prompt` where this rank decodes it.

    sizes: ranks that compute the prompt, and ranks that decode; None = the first of the ranks does
    both, and nothing moves.
    """
    sender = open_side(comm, folder, 1 if sizes is None else sizes[0])
    receiver = sender if sizes is None else open_side(comm, folder, sizes[1])
    tokens: list[int] = []
    if sender is not None:
        sender.driver.admit(1, [7] * 5)  # a neighbour, so that blocks are not the first ones
        sender.driver.admit(0, prompt, params=params)
        for chunk in ({1: 5, 0: 7}, {0: 9, 1: 1}, {1: 1, 0: len(prompt) - 16}):
            tokens = list(sender.sample(chunk).tokens[list(chunk).index(0)])
    if sizes is not None:
        tokens = _from_first(comm, tokens)
        if receiver is not None:
            ids = [receiver.driver.free_blocks.pop() for _ in range(-(-len(prompt) // 4))]
            if comm.rank.index == 0:
                assert sender is not None
                asyncio.run(_move(sender, receiver, ids))
            receiver.driver.admit(
                0,
                [*prompt, *tokens],
                params=params,
                num_prompt_tokens=len(prompt),
                shared_blocks=ids,
                num_computed=len(prompt),
            )
        meet(comm)
    return None if receiver is None else _decode(receiver, tokens)


def _from_first(comm: Comm, tokens: list[int]) -> list[int]:
    encoded = comm.gather_bytes(msgspec.msgpack.encode(tokens))
    found: list[int] = msgspec.msgpack.decode(encoded[0])
    return found


async def _move(sender: Side, receiver: Side, ids: list[int]) -> None:
    assert sender.pieces is not None
    assert receiver.pieces is not None
    receiver.steps.num_launched = receiver.steps.num_ended
    receiver.pieces.fence()
    piece = await sender.pieces.read(sender.driver.blocks[0])
    assert isinstance(piece.data, np.ndarray)
    moved: StagedPiece[np.ndarray] = StagedPiece(data=piece.data, digests=piece.digests)
    assert await receiver.pieces.write(ids, moved), "digests differ"


def _decode(side: Side, tokens: list[int]) -> Told:
    steps = [tokens]
    steps += [list(side.sample({0: 1}).tokens[0]) for _ in range(NUM_DECODED)]
    with torch.inference_mode():
        return steps, side.driver.logits({0: 1})[0].clone()

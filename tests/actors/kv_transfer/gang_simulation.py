"""Handoffs between workers of several ranks, in which one thing goes wrong at a chosen moment.

The stores of ranks and what moves heads in and out of them are the real ones, on virtual time. A
moment is whatever a rank or a call does next: a call is made or answered, a rank's heads are read,
written or digested. A run without a fault says how many there are. A gang ends whole, so the death
of any of its ranks is the end of its worker, for which a new one starts; the ingress is played by
`serve`, which asks again for what is lost.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, partialmethod
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.own_blocks import OwnBlockPieces
from actors.kv_transfer.rank_pieces import RankPieces
from engine.clock import ManualClock
from engine.errors import WorkerError
from engine.kv.store import KvStore
from engine.messages import ChannelKind, Role, WorkerIdentity
from engine.ranks.shared_stores import RankStore
from engine.ranks.step_counts import StepCounts
from engine.request import Request
from tests.actors.kv_transfer.handoff_simulation import World
from tests.actors.kv_transfer.pulled_channels import AskedChannels, PulledChannels
from tests.actors.kv_transfer.rank_workers import Worker, new_worker
from tests.engine.kv.handoff_world import LAYOUT, RECEIVER, Decode, identity
from tests.harness.handoff_network import CONFIG, FakeChannels, FakePeer
from tests.harness.virtual_time import run_virtual

T = TypeVar("T")

COPY_S = 0.001
LATE_S = 0.004  # a rank that ends its step later than the first one
STALL_S = 1.5  # so long a rank may stand still before its gang is ended
RESTART_S = 0.3
MAX_TRIES = 4

What = Literal["death", "wrong", "late", "silent"]
# Rank 0 copies the heads of all ranks, through host memory; or each rank of D pulls its own, or
# asks the ranks that have them. Or rank 0 copies whole blocks of ranks that have requests of their
# own, here all of the last one.
Way = Literal["copied", "pulled", "asked", "own"]
NUM_BLOCKS: dict[Role, int] = {"prefill": 64, "decode": 24}  # of each rank
PIECES_OF_TWO = msgspec.structs.replace(CONFIG, pulled_piece_bytes=CONFIG.piece_bytes)


@dataclass(frozen=True)
class Fault:
    what: What
    role: Role
    moment: int  # of that side, from 0


@dataclass
class Moments:
    """What happened so far, of each side; the fault strikes when its moment comes."""

    fault: Fault | None = None
    strike: Callable[[Fault], None] = lambda _: None
    is_over: bool = False  # both workers shut down: nothing fails any more
    seen: dict[Role, list[str]] = field(default_factory=lambda: {"prefill": [], "decode": []})

    def reach(self, role: Role, name: str) -> bool:
        """Whether it is the fault's moment."""
        if self.is_over:
            return False
        self.seen[role].append(name)
        fault = self.fault
        if fault is None or (role, len(self.seen[role]) - 1) != (fault.role, fault.moment):
            return False
        self.strike(fault)
        return True


class _Inline:
    """Copies on the loop, in virtual time."""

    async def _run(self, copy: Callable[[], T]) -> T:
        await asyncio.sleep(COPY_S)
        return copy()


class InlineKvPieces(_Inline, KvPieces):
    pass


class InlineRankPieces(_Inline, RankPieces):
    pass


class InlineOwnBlockPieces(OwnBlockPieces):
    def __init__(
        self, stores: Sequence[RankStore], steps: StepCounts, deadline_s: float, *, num_threads: int
    ) -> None:
        super().__init__(stores, steps, deadline_s, num_threads=num_threads)
        given = steps, deadline_s
        self._of_rank: list[RankPieces] = [
            InlineRankPieces([one], *given, num_threads=num_threads, first_rank=rank)
            for rank, one in enumerate(stores)
        ]


_OF_RANKS: dict[Way, type[RankPieces | OwnBlockPieces]] = {
    "copied": InlineRankPieces,
    "own": InlineOwnBlockPieces,
}


class NamedKvPieces(InlineKvPieces):
    """Treated as a GPU's: a piece that is read names its blocks."""

    is_on_gpu = True


class NamedRankPieces(InlineRankPieces):
    """Likewise."""

    is_on_gpu = True


class Gang:
    """The pieces of one worker of the simulation, whose ranks step."""

    def __init__(
        self, role: Role, size: int, num_blocks: int, seed: int, moments: Moments, way: Way
    ) -> None:
        self._role = role
        self._moments = moments
        self._is_behind = False
        self.worker = new_worker(
            size,
            LAYOUT,
            0.0,
            num_blocks=num_blocks,
            of_one=InlineKvPieces if way in _OF_RANKS else NamedKvPieces,
            of_ranks=_OF_RANKS.get(way, NamedRankPieces),
        )
        self.blocks = WholeBlocks(self.worker)
        self.blocks[range(num_blocks)] = np.random.default_rng(seed).integers(
            0, 256, (num_blocks, LAYOUT.block_bytes)
        )
        pieces = self.worker.pieces
        mapped = [one.store for one in pieces.stores] if size > 1 else self.worker.stores
        for rank, store in enumerate(mapped):
            self._watch(rank, store)
        self.read, self.write, self.fence = pieces.read, pieces.write, pieces.fence

    def step(self) -> None:
        """Every rank ends a step, but the last one if it is behind."""
        self.worker.steps.num_launched += 1
        self.worker.steps.num_ended += 1
        self._count_steps()

    def fall_behind(self) -> None:
        """From now on the last rank ends no step, and writes nothing."""
        self._is_behind = self.blocks.is_behind = True

    def catch_up(self) -> None:
        self._is_behind = False
        self.blocks.catch_up()
        self._count_steps()

    def _count_steps(self) -> None:
        stores = self.worker.stores[: -1 if self._is_behind else None]
        for store in stores:
            while store.shared and store.shared.num_finished_steps < self.worker.steps.num_ended:
                store.shared.count_step()

    def _watch(self, rank: int, store: KvStore) -> None:
        """Its reads, writes and digests are moments; what is wrong has one other bit."""
        gather, scatter, digests = store.gather, store.scatter, store.queue_digests

        def reach(name: str) -> bool:
            is_it = self._moments.reach(self._role, f"rank {rank} {name}")
            return is_it and self._moments.fault.what == "wrong"

        def watched_gather(block_ids: Sequence[int]) -> torch.Tensor:
            data = gather(block_ids)
            return _with_other_bit(data) if reach("is read") else data

        def watched_scatter(block_ids: Sequence[int], data: torch.Tensor) -> None:
            scatter(block_ids, _with_other_bit(data) if reach("is written") else data)
            reach("has been written")

        def watched_digests(block_ids: torch.Tensor) -> torch.Tensor:
            if reach("is digested"):
                store.tensor[block_ids] = _with_other_bit(store.tensor[block_ids])
            return digests(block_ids)

        store.gather, store.scatter = watched_gather, watched_scatter
        store.queue_digests = watched_digests


def _with_other_bit(data: torch.Tensor) -> torch.Tensor:
    data = data.clone(memory_format=torch.contiguous_format)
    data.view(-1).view(torch.uint8)[-1] ^= 4
    return data


class WholeBlocks:
    """Blocks of a worker as rows of bytes: with the heads of all ranks, or the last one's own."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stores = worker.stores[-1:] if worker.has_own_blocks else worker.stores
        self.is_behind = False  # the last rank
        self._owed: dict[int, torch.Tensor] = {}  # what it has not written yet, by block

    def __getitem__(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """As soon as every rank has ended its steps."""
        ids, worker = list(block_ids), self._worker
        blocks = torch.empty(len(ids), *worker.whole.block_shape)
        for rank, store in enumerate(self._stores):
            blocks[..., worker.heads(rank), :] = store.tensor[ids]
        for place, block_id in enumerate(ids):
            if block_id in self._owed:
                blocks[place, ..., worker.heads(rank), :] = self._owed[block_id]
        return blocks.view(len(ids), -1).view(torch.uint8).numpy()

    def __setitem__(self, block_ids: int | Sequence[int], rows: int | NDArray[Any]) -> None:
        """What steps do, which know the digests of what they write."""
        ids = [block_ids] if isinstance(block_ids, int) else list(block_ids)
        data = np.zeros((len(ids), LAYOUT.block_bytes), np.uint8)
        data[:] = rows
        blocks = torch.from_numpy(data).view(torch.float32)
        blocks = blocks.view(len(ids), *self._worker.whole.block_shape)
        for rank, store in enumerate(self._stores):
            heads = blocks[..., self._worker.heads(rank), :]
            if self.is_behind and store is self._worker.stores[-1]:
                self._owed |= dict(zip(ids, heads, strict=True))
            else:
                _write(store, ids, heads)

    def catch_up(self) -> None:
        self.is_behind = False
        for block_id, heads in self._owed.items():
            _write(self._worker.stores[-1], [block_id], heads)
        self._owed.clear()


def _write(store: KvStore, block_ids: list[int], heads: torch.Tensor) -> None:
    store.tensor[block_ids] = heads
    words = store._words[block_ids]
    store.digests.keep(block_ids, (words * store._weights).sum(1).tolist())


class Line:
    """The calls of one prefill worker to one decode worker, until one of the two is dead."""

    def __init__(self, peer: FakePeer, moments: Moments) -> None:
        self._peer = peer
        self._moments = moments
        self.is_cut = False

    async def _call(self, name: str, *args: object) -> Any:
        self._pass("prefill", f"asks {name}")
        self._pass("decode", f"is asked {name}")
        answer = await getattr(self._peer, name)(*args)
        self._pass("decode", f"has answered {name}")
        self._pass("prefill", f"is answered {name}")
        return answer

    def _pass(self, role: Role, name: str) -> None:
        if not self.is_cut:
            self._moments.reach(role, name)
        if self.is_cut or self._peer.is_dead:
            raise WorkerError("one of the two is dead")

    reserve = partialmethod(_call, "reserve")
    open_pair = partialmethod(_call, "open_pair")
    receive_pieces = partialmethod(_call, "receive_pieces")
    cancel_transfer = partialmethod(_call, "cancel_transfer")
    renew = partialmethod(_call, "renew")


class GangWorld(World):
    """P and D of some numbers of ranks; either may end and be replaced."""

    def __init__(
        self, sizes: tuple[int, int], way: Way, fault: Fault | None, seed: int, clock: ManualClock
    ) -> None:
        self._way = way
        self.is_on_gpu = way == "pulled"
        self._sizes: dict[Role, int] = dict(zip(("prefill", "decode"), sizes, strict=True))
        self.moments = Moments(fault, self._strike)
        self.lines: list[Line] = []
        self._restarts: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._incarnations = itertools.count(2)
        self.first_block = self._first_block("prefill")
        side = self._decode_side(clock, RECEIVER)
        super().__init__(side, config=PIECES_OF_TWO, seed=seed)

    def _first_block(self, role: Role) -> int:
        """Of the rank that has all requests."""
        return (self._sizes[role] - 1) * NUM_BLOCKS[role] if self._way == "own" else 0

    def _decode_side(self, clock: ManualClock, identity: WorkerIdentity) -> Decode:
        return Decode(
            num_blocks=NUM_BLOCKS["decode"],
            max_rows=8,
            clock=clock,
            identity=identity,
            first_block=self._first_block("decode"),
        )

    def new_pieces(self, role: Role, num_blocks: int, seed: int) -> Gang:
        gang = Gang(role, self._sizes[role], num_blocks, seed, self.moments, self._way)
        if role == "prefill" and isinstance(self.channels, PulledChannels):
            self.channels.senders.append(gang.worker)
        return gang

    def new_channels(self) -> FakeChannels:
        if self._way in _OF_RANKS:
            return super().new_channels()
        reach = partial(self.moments.reach, "decode")
        if self._way == "asked":
            return AskedChannels(
                self.faults, lambda: self.decode_pieces.worker, reach, self._is_wrong
            )
        return PulledChannels(self.faults, lambda: self.decode_pieces.worker, reach)

    def offer(self, kind: ChannelKind) -> bytes:
        if isinstance(self.channels, PulledChannels):
            return self.channels.offer(kind)
        return super().offer(kind)

    def _is_wrong(self, name: str) -> bool:
        """Whether what a rank of P does next is wrong."""
        fault = self.moments.fault
        return self.moments.reach("prefill", name) and fault is not None and fault.what == "wrong"

    def on_grant(self) -> None:
        self.decode_pieces.step()
        self.decode_pieces.fence()

    def compute(self, request: Request, num_tokens: int) -> None:
        super().compute(request, num_tokens)
        self.prefill_pieces.step()

    async def _find(self, name: str) -> Line:
        line = Line(await super()._find(name), self.moments)
        self.lines.append(line)
        return line

    # ---- what goes wrong

    def _strike(self, fault: Fault) -> None:
        pieces = self.prefill_pieces if fault.role == "prefill" else self.decode_pieces
        if fault.what == "death":
            self._restart(fault.role)
        elif fault.what == "late":
            pieces.fall_behind()
            asyncio.get_running_loop().call_later(LATE_S, pieces.catch_up)
        elif fault.what == "silent":
            pieces.fall_behind()
            asyncio.get_running_loop().call_later(STALL_S, self._restart, fault.role)

    def _restart(self, role: Role) -> None:
        """The worker is dead from now on."""
        if role == "prefill":
            for line in self.lines:
                line.is_cut = True
            if isinstance(self.channels, AskedChannels):
                self.channels.num_dead = len(self.channels.senders)
            for wire in self.channels.wires.values():
                wire.close()
        else:
            self.peer.is_dead = True
        task = asyncio.ensure_future(self._replace(role))
        self._restarts.add(task)

    async def _replace(self, role: Role) -> None:
        await asyncio.sleep(RESTART_S)
        name = identity(f"{role}-0", role, f"{role}-0-{next(self._incarnations)}")
        if role == "prefill":
            dead_sender = self.sender
            self.start_sender(name)
            await dead_sender.close()
        else:
            dead_receiver = self.receiver
            self.start_receiver(self._decode_side(self.clock, name), name)
            await dead_receiver.close()

    # ---- what a client and its ingress do

    async def serve(self, token_ids: Sequence[int]) -> Request:
        """Until the request runs at a decode worker that lives."""
        for _ in range(MAX_TRIES):
            request = await self._try(token_ids)
            if self._runs(request):
                return request
            await asyncio.sleep(STALL_S)
        raise AssertionError(f"no answer after {MAX_TRIES} tries: {self.failures}")

    def _runs(self, request: Request) -> bool:
        is_alive = not self.peer.is_dead
        return is_alive and request.key in self.decode.scheduler.running

    async def _try(self, token_ids: Sequence[int]) -> Request:
        sender = self.sender
        request = self.start(next(self._numbers), token_ids)
        for num_tokens in (6, 12, len(token_ids)):
            await asyncio.sleep(3 * COPY_S)
            if self.sender is not sender or (self.lines[-1:] and self.lines[-1].is_cut):
                return request
            self.compute(request, num_tokens)
        self.finish(request)
        await asyncio.sleep(0)

        def is_over() -> bool:
            is_dead = self.sender is not sender
            return is_dead or request.key not in sender._handoffs

        await self.until(is_over, limit_s=100.0)
        return request

    async def close(self) -> None:
        self.moments.is_over = True
        await asyncio.gather(*self._restarts)
        await super().close()


PROMPTS = [list(range(20)), list(range(100, 117))]


def play(sizes: tuple[int, int], way: Way, fault: Fault | None = None, seed: int = 0) -> Moments:
    """Two prompts at once, whatever goes wrong: both arrive right, and nothing is left."""

    clock = ManualClock(100.0)

    async def main() -> Moments:
        world = GangWorld(sizes, way, fault, seed, clock)
        served = await asyncio.gather(*map(world.serve, PROMPTS))
        await asyncio.gather(*world._restarts)
        for number, request in enumerate(served):
            if not world._runs(request):  # it ran where a rank has died since
                served[number] = await world.serve(PROMPTS[number])
            world.check_arrived(served[number])
        world.check_books()
        await world.close()
        return world.moments

    return run_virtual(clock, main())

"""Each rank pulls its own heads, straight from the stores of the ranks that have them.

As between GPUs of one host: a map of the offers stands in for CUDA's, threads with a real ring for
the other ranks' processes.
"""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch

from actors.kv_transfer.channels.cuda_ipc import CudaIpcReceiver, StoreOffer
from actors.kv_transfer.channels.rank_ipc import RankOffer, RanksOffer
from actors.kv_transfer.contracts import StagedPiece, UnfitError
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.rank_pieces import RankPieces
from actors.kv_transfer.rank_pulls import PullsByRanks, RankPuller
from engine.errors import HandoffError, WorkerError
from engine.host_id import host_id
from engine.kv.device_offer import DeviceOffer
from engine.kv.store import KvStore
from engine.ranks.rank import Rank
from engine.ranks.shared_stores import part_of
from tests.actors.kv_transfer.rank_workers import CPU, NUM_BLOCKS, Worker, new_worker
from tests.actors.kv_transfer.test_rank_pieces import OFFER, layout_of
from tests.harness.asked_ranks import AskedRanks, in_threads

NO_HOOK: Callable[[], None] = lambda: None  # noqa: E731


@dataclass
class Pulls:
    """A sender's blocks, and what the ranks of a receiver do to have them."""

    sender: Worker
    receiver: Worker
    hooks: dict[int, Callable[[], None]] = field(default_factory=dict)  # rank -> before its pull
    mapped: Counter[tuple[int, int]] = field(default_factory=Counter)  # (rank, sender's rank)
    pullers: list[RankPuller] = field(default_factory=list)
    by_ranks: PullsByRanks | None = None
    ranks: AskedRanks | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        size = len(self.receiver.stores)
        self.pullers = [self._puller(rank) for rank in range(size)]
        works = [self._work(rank) for rank in range(size)]
        with AskedRanks(in_threads(*works[1:])) as self.ranks:
            assert isinstance(self.receiver.pieces, RankPieces)
            own: Any = type("Own", (), {"do": staticmethod(works[0])})
            self.by_ranks = PullsByRanks(self.receiver.pieces, self.ranks.rank_tasks, own)
            yield
            assert all(not puller._sources for puller in self.pullers), "a store stays mapped"

    async def open(self, floor_gb_s: float = 0.0) -> CudaIpcReceiver[Any]:
        assert self.by_ranks is not None
        return await self.by_ranks.open(1, self._offered(), floor_gb_s)

    async def pull(self, from_ids: list[int], to_ids: list[int], digests: list[int]) -> bool:
        """By a channel of its own."""
        channel = await self.open()
        try:
            return await self.pull_by(channel, from_ids, to_ids, digests)
        finally:
            await channel.close()

    async def pull_by(
        self,
        channel: CudaIpcReceiver[Any],
        from_ids: list[int],
        to_ids: list[int],
        digests: list[int],
    ) -> bool:
        """The first piece of a channel."""
        assert channel.claim(0)
        num_bytes = len(from_ids) * self.sender.whole.block_bytes
        data = await channel.receive(0, num_bytes, [from_ids], to_ids)
        piece = StagedPiece(data=data, digests=digests)
        return await self.receiver.pieces.write(to_ids, piece)

    def _work(self, rank: int) -> Callable[[bytes], bytes]:
        def work(data: bytes) -> bytes:
            if b"PullBlocks" in data:
                self.hooks.get(rank, NO_HOOK)()
            return self.pullers[rank].do(data)

        return work

    def _puller(self, rank: int) -> RankPuller:
        def map_offer(offer: DeviceOffer, like: torch.Tensor) -> torch.Tensor:
            tensor = self.sender.stores[offer.handle[0]].tensor
            assert like.shape[1:] == tensor.shape[1:]
            self.mapped[rank, offer.handle[0]] += 1
            return tensor

        part = part_of(Rank(rank, len(self.receiver.stores)), self.receiver.whole)
        pieces = KvPieces(self.receiver.stores[rank], num_threads=1)
        return RankPuller(part, pieces, map_offer, index=rank)

    def _offered(self) -> bytes:
        offers = [
            msgspec.structs.replace(OFFER, num_blocks=NUM_BLOCKS, handle=bytes([rank]))
            for rank in range(len(self.sender.stores))
        ]
        if len(offers) == 1:
            one = StoreOffer(host=host_id(), **msgspec.structs.asdict(offers[0]))
            return msgspec.msgpack.encode(one)
        ranks = [
            RankOffer(part=part_of(Rank(rank, len(offers)), self.sender.whole), store=offer)
            for rank, offer in enumerate(offers)
        ]
        return msgspec.msgpack.encode(RanksOffer(host=host_id(), ranks=ranks))


@dataclass
class Moved:
    """Blocks that the sender has computed, and where they are to go."""

    pulls: Pulls
    blocks: torch.Tensor
    from_ids: list[int]
    to_ids: list[int]
    digests: list[int]

    @classmethod
    def drawn(cls, num_heads: int, from_size: int, to_size: int) -> "Moved":
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        rng, whole = random.Random(seed), layout_of(num_heads)
        sender, receiver = new_worker(from_size, whole), new_worker(to_size, whole)
        number = rng.randint(1, NUM_BLOCKS)
        from_ids, to_ids = (rng.sample(range(NUM_BLOCKS), number) for _ in range(2))
        blocks = torch.randn(number, *whole.block_shape)
        sender.compute(from_ids, blocks)
        digests = KvStore(whole, num_blocks=1, device=CPU).digest_staged(blocks)
        return cls(Pulls(sender, receiver), blocks, from_ids, to_ids, digests)

    def pull(self, digests: list[int] | None = None) -> bool:
        given = self.from_ids, self.to_ids, digests or self.digests
        return asyncio.run(self.pulls.pull(*given))

    def check(self) -> None:
        receiver = self.pulls.receiver
        for rank, store in enumerate(receiver.stores):
            assert torch.equal(store.tensor[self.to_ids], self.blocks[..., receiver.heads(rank), :])


@pytest.mark.parametrize(
    ("num_heads", "from_size", "to_size", "mapped"),
    [
        (4, 1, 2, [(0, 0), (1, 0)]),
        (4, 2, 2, [(0, 0), (1, 1)]),
        (4, 2, 4, [(0, 0), (1, 0), (2, 1), (3, 1)]),
        (4, 4, 2, [(0, 0), (0, 1), (1, 2), (1, 3)]),
        (1, 1, 2, [(0, 0), (1, 0)]),
        (1, 2, 2, [(0, 0), (1, 1)]),
        (2, 4, 2, [(0, 0), (1, 3)]),
    ],
)
def test_each_rank_pulls_from_the_ranks_that_have_its_heads(
    num_heads: int, from_size: int, to_size: int, mapped: list[tuple[int, int]]
) -> None:
    moved = Moved.drawn(num_heads, from_size, to_size)
    with moved.pulls.opened():
        assert moved.pull()
        assert sorted(moved.pulls.mapped) == mapped
        moved.check()
        assert not moved.pull([moved.digests[0] ^ 2, *moved.digests[1:]])


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_with_other_bytes_is_noticed(rank: int, num_heads: int) -> None:
    """Of two heads by the sum; of one, which both ranks hold, by comparing the two."""
    moved = Moved.drawn(num_heads, 2, 2)
    pieces = moved.pulls.receiver.stores[rank]
    digests = pieces.queue_digests

    def of_other_bytes(index: torch.Tensor) -> torch.Tensor:
        pieces.tensor[moved.to_ids[0]].view(torch.int32).view(-1)[-1] ^= 8
        return digests(index)

    pieces.queue_digests = of_other_bytes  # type: ignore[method-assign]
    with moved.pulls.opened():
        assert not moved.pull()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_piece_that_a_rank_fails_is_over_when_the_others_are(rank: int) -> None:
    """So nothing can land later; and the next one is as good as ever."""
    moved = Moved.drawn(2, 2, 2)
    has_failed, is_over = threading.Event(), threading.Event()

    def fail() -> None:
        has_failed.set()
        raise HandoffError("no such luck")

    def be_late() -> None:
        assert has_failed.wait(60)
        is_over.set()

    moved.pulls.hooks = {rank: fail, 1 - rank: be_late}
    with moved.pulls.opened():
        with pytest.raises(HandoffError, match="no such luck"):
            moved.pull()
        assert is_over.is_set()
        moved.pulls.hooks = {}
        assert moved.pull()
        moved.check()


@pytest.mark.parametrize("behind", [0, 1])
def test_no_rank_pulls_before_all_have_ended_steps_that_may_still_write_there(behind: int) -> None:
    moved = Moved.drawn(2, 2, 2)
    receiver = moved.pulls.receiver
    receiver.pieces = RankPieces(
        receiver.pieces.stores,  # type: ignore[attr-defined]
        receiver.steps,
        deadline_s=0.05,
        num_threads=1,
    )
    other = receiver.stores[1].shared
    assert other is not None

    def end_step(rank: int) -> None:
        if rank:
            other.count_step()
        else:
            receiver.steps.num_ended = 1

    receiver.steps.num_launched = 1
    receiver.pieces.fence()
    receiver.steps.num_launched = 2
    end_step(1 - behind)

    def refuse() -> None:
        raise AssertionError("it was asked too early")

    with moved.pulls.opened():
        moved.pulls.hooks = {0: refuse, 1: refuse}
        with pytest.raises(HandoffError, match=f"rank {behind} has ended 0 steps, not 1"):
            moved.pull()
        moved.pulls.hooks = {}
        end_step(behind)
        assert moved.pull()
    moved.check()


def test_a_rank_that_dies_in_a_pull_ends_the_worker() -> None:
    moved, is_dead = Moved.drawn(2, 2, 2), threading.Event()
    with moved.pulls.opened():
        assert moved.pulls.ranks is not None
        ranks = moved.pulls.ranks

        def end() -> None:
            ranks.end(1)
            is_dead.set()

        def die() -> None:
            assert is_dead.wait(60)

        moved.pulls.hooks = {0: end, 1: die}
        with pytest.raises(WorkerError, match="rank 1"):
            moved.pull()
        assert [end.rank for end in ranks.ends] == [1]
        moved.pulls.pullers[1]._sources.clear()  # it is dead


def test_a_store_that_one_rank_cannot_map_is_unfit_and_stays_mapped_nowhere() -> None:
    moved = Moved.drawn(2, 1, 2)

    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("no peer access")

    with moved.pulls.opened():
        moved.pulls.pullers[1]._map_offer = refuse
        with pytest.raises(UnfitError, match=r"rank 1: .*no peer access"):
            moved.pull()
    assert moved.pulls.mapped == {(0, 0): 1}


def test_a_channel_that_closes_keeps_its_source_for_the_pieces_that_came() -> None:
    moved = Moved.drawn(2, 2, 2)

    async def write_late() -> None:
        channel = await moved.pulls.open(floor_gb_s=1e-9)
        assert channel.claim(0)
        assert channel.claim(1)
        num_bytes = len(moved.from_ids) * moved.pulls.sender.whole.block_bytes
        given = num_bytes, [moved.from_ids], moved.to_ids
        data = await channel.receive(0, *given)
        closing = asyncio.ensure_future(channel.close())
        await asyncio.sleep(0)
        with pytest.raises(HandoffError, match="closed"):
            await channel.receive(1, *given)
        assert not closing.done()
        assert await data.write(moved.to_ids, moved.digests)
        await closing

    with moved.pulls.opened():
        asyncio.run(write_late())
    moved.check()

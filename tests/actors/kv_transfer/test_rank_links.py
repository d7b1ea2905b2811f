"""Each rank gets its own heads from the ranks that have them, where it cannot map their stores.

Threads stand in for the ranks' processes and for Ray's calls, queues for NCCL; gloo is gloo.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from actors.kv_transfer.channels import handshake, kept_memory, nccl_wire
from actors.kv_transfer.channels.cuda_ipc import CudaIpcReceiver
from actors.kv_transfer.channels.handshake import RECEIVER_RANK, SENDER_RANK, Handshake
from actors.kv_transfer.channels.nccl_wire import NcclWire
from actors.kv_transfer.contracts import UnfitError
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.rank_links import (
    GiveHeads,
    Giver,
    GiversOffer,
    HeadGiver,
    Heads,
    OpenWire,
    Wire,
    Wires,
)
from actors.kv_transfer.rank_pieces import OneRank, RankPieces
from actors.kv_transfer.rank_pulls import Linking, PullsByRanks, RankPuller
from actors.kv_transfer.rendezvous import RankCalls, answer_of
from configs.schema import FloorsConfig, HandoffConfig
from engine.errors import HandoffError, WorkerError
from engine.messages import ChannelKind
from engine.ranks.rank import Rank
from engine.ranks.rank_tasks import OneRankTasks
from engine.ranks.shared_stores import part_of
from tests.actors.kv_transfer import fake_pair_group
from tests.actors.kv_transfer.rank_workers import CPU, NUM_BLOCKS
from tests.actors.kv_transfer.test_channels_local import LocalBoard, pair_request
from tests.actors.kv_transfer.test_rank_pulls import Moved, Pulls

KINDS: tuple[ChannelKind, ...] = ("object_store", "gloo_pair", "nccl_pair")
CONFIG = HandoffConfig(transfer_deadline_s=60.0, floors_gb_s=FloorsConfig(nccl_pair=0.0))
HASTY_S = 0.3
HASTY = msgspec.structs.replace(CONFIG, transfer_deadline_s=HASTY_S)


def nothing(rank: int, order: bytes) -> None:
    """All is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWires(Wires):
    groups: Callable[[str], fake_pair_group.Wires]  # of two ranks, by the key of their wire
    nccl_deadline_s: Callable[[], float]  # of a wire that opens now

    def opened(self, kind: ChannelKind, epoch: int, key: str, end: int) -> Wire:
        if kind != "nccl_pair":
            return Wires.opened(self, kind, epoch, key, end)
        mine = Handshake(epoch=epoch, rank=end, device=CPU, floor_gb_s=0.0)
        make_group = self.groups(key).make_group
        wire = NcclWire(mine, self.nccl_deadline_s(), make_group=make_group)
        wire.open(self.rendezvous, key)
        return wire


@dataclass
class LinkedPulls(Pulls):
    """The sender's ranks answer what the receiver's ask."""

    kind: ChannelKind = "object_store"
    config: HandoffConfig = CONFIG
    nccl_deadline_s: float = CONFIG.transfer_deadline_s
    epoch: int = 2  # of the last channel
    givers: list[HeadGiver] = field(default_factory=list)
    on_ask: Callable[[int, bytes], None] = nothing  # a rank of the sender, what it is asked
    groups: dict[str, fake_pair_group.Wires] = field(
        default_factory=lambda: defaultdict(fake_pair_group.Wires)
    )

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.wires = LocalWires(
            rendezvous=LocalBoard(),
            address="127.0.0.1",
            config=self.config,
            device=CPU,
            groups=self.groups.__getitem__,
            nccl_deadline_s=lambda: self.nccl_deadline_s,
        )
        size = len(self.sender.stores)
        parts = [part_of(Rank(rank, size), self.sender.whole) for rank in range(size)]
        self.givers = [
            HeadGiver(part, KvPieces(store, num_threads=1), self.wires)
            for part, store in zip(parts, self.sender.stores, strict=True)
        ]
        ranks = [Giver(part, str(rank)) for rank, part in enumerate(parts)]
        self.offer = msgspec.msgpack.encode(GiversOffer(NUM_BLOCKS, ranks))
        with ThreadPoolExecutor(8) as self.calls:
            if isinstance(self.receiver.pieces, RankPieces):
                with super().opened():
                    yield
            else:
                assert isinstance(self.receiver.pieces, KvPieces)
                self.pullers = [self._puller(0)]
                pieces = OneRank(self.receiver.pieces)
                self.by_ranks = PullsByRanks(pieces, OneRankTasks(), self.pullers[0])
                yield
        assert not any(giver._open for giver in self.givers), "a wire stays open"

    async def open(self, floor_gb_s: float = 0.0) -> CudaIpcReceiver[Any]:
        assert self.by_ranks is not None
        self.epoch += 1
        request = pair_request(self.epoch, channel=self.kind)
        return await self.by_ranks.open_links(msgspec.structs.replace(request, offer=self.offer))

    def _puller(self, rank: int) -> RankPuller:
        part = part_of(Rank(rank, len(self.receiver.stores)), self.receiver.whole)
        pieces = KvPieces(self.receiver.stores[rank], num_threads=1)
        linking = Linking(
            wires=self.wires,
            find=lambda actor: partial(self._ask, actor),
            reader=f"reader {rank}",
        )
        return RankPuller(part, pieces, index=rank, linking=linking)

    def _ask(self, actor: str, order: bytes) -> Callable[[], Any]:
        def answer() -> Any:
            if b"CloseWire" not in order:
                self.on_ask(int(actor), order)
            return self.givers[int(actor)].do(order)

        return self.calls.submit(answer).result


def linked(num_heads: int, sizes: tuple[int, int], kind: ChannelKind) -> tuple[Moved, LinkedPulls]:
    moved = Moved.drawn(num_heads, *sizes)
    pulls = LinkedPulls(moved.pulls.sender, moved.pulls.receiver, kind=kind)
    moved.pulls = pulls
    return moved, pulls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_heads", "sizes"),
    [(4, (2, 2)), (4, (1, 2)), (4, (2, 1)), (4, (4, 2)), (4, (2, 4)), (1, (2, 2))],
)
def test_each_rank_gets_its_heads_and_notices_other_bytes(
    num_heads: int, sizes: tuple[int, int], kind: ChannelKind
) -> None:
    moved, pulls = linked(num_heads, sizes, kind)
    with pulls.opened():
        assert moved.pull()
        moved.check()
        assert not moved.pull([moved.digests[0] ^ 2, *moved.digests[1:]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)])
def test_a_rank_of_the_sender_that_dies_fails_the_piece_when_all_have_ended_theirs(
    sizes: tuple[int, int], kind: ChannelKind
) -> None:
    """At once, but for NCCL, which notices at its deadline; and the next channel is as good."""
    moved, pulls = linked(4, sizes, kind)
    pulls.nccl_deadline_s = HASTY_S
    last = sizes[0] - 1

    def die(rank: int, order: bytes) -> None:
        if rank == last and b"OpenWire" not in order:
            if kind == "gloo_pair":  # its process is gone, and its connections
                for _, wire in pulls.givers[rank]._open.values():
                    wire.close()
            raise WorkerError("it is dead")

    with pulls.opened():
        pulls.on_ask = die
        with pytest.raises(HandoffError, match=r"dead|did not|broke|closed"):
            moved.pull()
        pulls.on_ask = nothing
        pulls.nccl_deadline_s = CONFIG.transfer_deadline_s
        assert moved.pull()
        moved.check()


def test_a_wire_that_does_not_open_is_a_failed_channel() -> None:
    moved, pulls = linked(4, (2, 2), "gloo_pair")

    def fail(rank: int, _: bytes) -> None:
        raise WorkerError(f"{rank} is dead")

    pulls.config = HASTY
    with pulls.opened():
        pulls.on_ask = fail
        with pytest.raises(HandoffError):
            moved.pull()


def test_where_one_end_of_a_wire_fails_the_other_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, pulls = linked(4, (2, 2), "gloo_pair")

    def open_and_fail(self: LocalWires, kind: ChannelKind, epoch: int, key: str, end: int) -> Wire:
        wire = Wires.opened(self, kind, epoch, key, end)
        if end == RECEIVER_RANK:
            wire.close()
            raise HandoffError("no room")
        return wire

    monkeypatch.setattr(LocalWires, "opened", open_and_fail)
    with pulls.opened(), pytest.raises(HandoffError, match="no room"):
        moved.pull()


@pytest.mark.parametrize("end", [SENDER_RANK, RECEIVER_RANK])
def test_what_one_end_says_is_not_lost_in_the_others_wait(
    end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, pulls = linked(4, (2, 1), "gloo_pair")

    def refuse(self: LocalWires, kind: ChannelKind, epoch: int, key: str, at: int) -> Wire:
        if at == end:
            raise HandoffError("8 pairs are open already")
        return Wires.opened(self, kind, epoch, key, at)

    monkeypatch.setattr(LocalWires, "opened", refuse)
    pulls.config = HASTY
    with pulls.opened(), pytest.raises(HandoffError, match="8 pairs are open already"):
        moved.pull()


def test_an_order_to_open_that_comes_late_leaves_the_newer_wire_open() -> None:
    moved, pulls = linked(4, (2, 1), "gloo_pair")
    late = OpenWire("gloo_pair", 2, "late/", "reader 0")

    async def pull() -> bool:
        channel = await pulls.open()
        try:
            for giver in pulls.givers:
                with pytest.raises(HandoffError, match="epoch 2 is not newer than 3"):
                    giver.do(msgspec.msgpack.encode(late))
            return await pulls.pull_by(channel, moved.from_ids, moved.to_ids, moved.digests)
        finally:
            await channel.close()

    with pulls.opened():
        assert asyncio.run(pull())
    moved.check()


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1)])
def test_ranks_that_are_too_far_apart_are_unfit(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only a channel that failed: it would be tried again."""
    monkeypatch.setattr(handshake, "PROBE_BYTES", (3, 1001))
    moved, pulls = linked(4, sizes, "gloo_pair")
    pulls.config = msgspec.structs.replace(CONFIG, floors_gb_s=FloorsConfig(gloo_pair=1e9))
    with pulls.opened(), pytest.raises(UnfitError, match=r"floors_gb_s asks for 1e\+09"):
        moved.pull()


class Answered:
    """Of a call of Ray's: what it will be."""

    def __init__(self, answer: bytes | Exception) -> None:
        self._answer = answer

    def future(self) -> Future[bytes]:
        future: Future[bytes] = Future()
        if isinstance(self._answer, Exception):
            future.set_exception(self._answer)
        else:
            future.set_result(self._answer)
        return future


def test_a_call_between_ranks_keeps_what_kind_of_error_it_is() -> None:
    def failed(cause: Exception) -> Answered:
        return Answered(RayTaskError("give", "its trace", cause))

    with pytest.raises(UnfitError, match="too slow"):
        answer_of("rank", failed(UnfitError("too slow")), 1.0)
    with pytest.raises(HandoffError, match="it broke") as raised:
        answer_of("rank", failed(HandoffError("it broke")), 1.0)
    assert not isinstance(raised.value, UnfitError)
    with pytest.raises(WorkerError, match="still loading") as raised:
        answer_of("rank", failed(WorkerError("rank is still loading its model")), 1.0)
    assert type(raised.value) is WorkerError
    with pytest.raises(WorkerError, match="rank failed: ValueError"):
        answer_of("rank", failed(ValueError("x")), 1.0)


class Rank1:
    """The actor of a rank."""

    def __init__(self) -> None:
        self.is_dead = False
        self.give = self

    def remote(self, order: bytes) -> Answered:
        return Answered(RayActorError() if self.is_dead else order)


def test_a_link_is_to_the_rank_that_lives_though_one_of_its_name_died_while_nothing_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors = {"worker.1": Rank1()}
    monkeypatch.setattr(ray, "get_actor", lambda name, _: actors[name])
    calls = RankCalls("namespace", 1.0)
    older = calls.find("worker.1")
    assert older(b"order")() == b"order"
    actors["worker.1"].is_dead = True
    actors["worker.1"] = Rank1()
    assert calls.find("worker.1")(b"order")() == b"order"
    with pytest.raises(WorkerError, match="dead"):
        older(b"order")()


def test_an_nccl_wire_is_cut_at_its_deadline_and_stays_cut() -> None:
    group = fake_pair_group.Wires()
    ends = [
        NcclWire(
            Handshake(epoch=1, rank=rank, device=CPU, floor_gb_s=0.0),
            60.0,
            make_group=group.make_group,
        )
        for rank in range(2)
    ]
    opening = threading.Thread(target=ends[0].open, args=(LocalBoard(), "k/"))
    opening.start()
    ends[1].open(LocalBoard(), "k/")
    opening.join()
    group.is_silent = True
    ends[1]._deadline_s = 0.05  # to open, a busy machine may take longer
    data = torch.zeros(4)
    with pytest.raises(HandoffError, match="within"):
        ends[1].receive(data)
    assert not any(one is data for one in kept_memory._kept), "it was aborted"
    with pytest.raises(HandoffError, match="closed"):
        ends[1].receive(torch.zeros(4))
    assert group.num_aborts == 1


@pytest.mark.parametrize("is_broken", [False, True], ids=["silent", "broken"])
@pytest.mark.parametrize("abort", ["fails", "does not end"])
def test_an_nccl_wire_waits_no_longer_for_an_abort_than_it_may(
    abort: str, is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_wire, "ABORT_S", 0.01)
    has_ended, failures, data = threading.Event(), list[HandoffError](), torch.zeros(4)

    def fail(_: fake_pair_group.FakeGroup) -> None:
        if abort == "does not end":
            has_ended.wait(60.0)
        raise RuntimeError("NCCL says no")

    group = fake_pair_group.Wires(is_silent=True)
    handshake = Handshake(epoch=1, rank=1, device=CPU, floor_gb_s=0.0)
    wire = NcclWire(handshake, 0.05, make_group=group.make_group)
    wire._group = group.make_group(None, 1)  # type: ignore[arg-type]

    def receive() -> None:
        with pytest.raises(HandoffError, match=r"not over within|NCCL broke") as raised:
            wire.receive(data)
        failures.append(raised.value)

    def break_(*_: object) -> Callable[[], bool]:
        raise RuntimeError("NCCL broke")

    if is_broken:
        monkeypatch.setattr(fake_pair_group.FakeGroup, "receive", break_)
    monkeypatch.setattr(fake_pair_group.FakeGroup, "abort", fail)
    waiting = threading.Thread(target=receive, daemon=True)
    waiting.start()
    waiting.join(20.0)
    has_ended.set()
    assert len(failures) == 1
    assert any(one is data for one in kept_memory._kept), "NCCL may still write there"


def test_a_rank_opens_no_more_nccl_wires_than_it_may() -> None:
    config = msgspec.structs.replace(CONFIG, max_nccl_pairs=2)
    wires = Wires(rendezvous=LocalBoard(), address="127.0.0.1", config=config, device=CPU)
    first, _ = (wires._new("nccl_pair", 1, 0) for _ in range(2))
    with pytest.raises(HandoffError, match="max_nccl_pairs"):
        wires._new("nccl_pair", 1, 0)
    first.close()
    wires._new("nccl_pair", 2, 0)


@pytest.mark.parametrize(
    ("heads", "named"),
    [
        (Heads([0], 2, 1), "of another rank"),
        (Heads([0], 1, 2), "of another rank"),
        (Heads([NUM_BLOCKS], 0, 1), "a store that has"),
        (Heads([-1], 0, 1), "a store that has"),
    ],
)
def test_what_a_rank_has_not_is_not_given(heads: Heads, named: str) -> None:
    _, pulls = linked(4, (2, 2), "object_store")
    with pulls.opened(), pytest.raises(HandoffError, match=named):
        pulls.givers[0].do(msgspec.msgpack.encode(GiveHeads(heads)))

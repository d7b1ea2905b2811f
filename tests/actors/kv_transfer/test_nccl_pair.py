"""The `nccl_pair` over two ranks in one process: order, staging, deadlines, proofs."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from actors.kv_transfer.channels import handshake, kept_memory, pair_ends, posting_thread
from actors.kv_transfer.channels.nccl_pair import NcclConnection, NcclPairs, NcclSettings
from actors.kv_transfer.channels.pair_ends import PairReceiver, PairSender
from actors.kv_transfer.channels.staging_ring import NUM_SLOTS, RingPiece, StagingRing
from actors.kv_transfer.contracts import ArrivedBlocks, UnfitError
from actors.kv_transfer.kv_pieces import KvPieces
from engine.errors import HandoffError, WorkerError
from engine.messages import PairRequest, PieceReply
from tests.actors.kv_transfer.fake_pair_group import FakeGroup, Wires
from tests.actors.kv_transfer.gpu_stand_in import LAYOUT, random_blocks, random_store, stored
from tests.actors.kv_transfer.test_channels_local import LocalBoard
from tests.engine.kv.handoff_world import SENDER
from tests.harness.seeds import fresh_random

ACCEPTED = PieceReply(outcome="accepted")
MAX_BLOCKS = 4  # in a piece


def settings(**changes: Any) -> NcclSettings:
    values: dict[str, Any] = {
        "deadline_s": 60.0,  # nothing here is meant to reach it
        "piece_bytes": MAX_BLOCKS * LAYOUT.block_bytes,
        "max_ctas": 1,
        "max_pairs": 3,
        "floor_gb_s": 0.0,
    }
    return NcclSettings(**(values | changes))


def request_of(epoch: int) -> PairRequest:
    return PairRequest(
        sender=SENDER, channel="nccl_pair", epoch=epoch, rendezvous_key=f"k/{epoch}/"
    )


class Ends:
    """Two workers' pairs, and one channel between them."""

    def __init__(self, rng: random.Random, wires: Wires, **changes: Any) -> None:
        self.wires = wires
        self.source, self.target = random_store(11, rng), random_store(19, rng)
        self.sources, self.targets = KvPieces(self.source), KvPieces(self.target)
        given = settings(**changes)
        self.sending = NcclPairs(self.sources, given, wires.make_group)
        self.receiving = NcclPairs(self.targets, given, wires.make_group)
        self.board = LocalBoard()

    async def open(
        self, epoch: int = 1, other_epoch: int | None = None
    ) -> tuple[PairSender[RingPiece], PairReceiver[RingPiece]]:
        sender, receiver = await asyncio.gather(
            self.sending.open_send(request_of(epoch), self.board),
            self.receiving.open_receive(request_of(other_epoch or epoch), self.board),
            return_exceptions=True,
        )
        for end in (sender, receiver):
            if isinstance(end, BaseException):
                raise end
        assert isinstance(sender, PairSender)
        assert isinstance(receiver, PairReceiver)
        return sender, receiver

    def check_idle(self) -> None:
        assert self.sending.num_free_slots == self.receiving.num_free_slots == NUM_SLOTS
        assert self.sending.num_open == self.receiving.num_open == 0
        assert not [t for t in threading.enumerate() if t.name.startswith("kv-pair")]


def with_ends(scenario: Callable[[Ends, random.Random], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        rng = fresh_random()
        ends = Ends(rng, Wires(), **changes)
        await scenario(ends, rng)
        ends.sources.close()
        ends.targets.close()
        ends.check_idle()

    asyncio.run(main())


async def close(*channels: PairSender[RingPiece] | PairReceiver[RingPiece]) -> None:
    for channel in channels:
        await channel.close()


async def move(
    ends: Ends,
    sender: PairSender[RingPiece],
    receiver: PairReceiver[RingPiece],
    from_ids: list[int],
    to_ids: list[int],
) -> bool:
    written: list[bool] = []
    digests = ends.source.digest(from_ids)

    async def deliver(seq: int, payload: list[Any]) -> PieceReply:
        if seq % 2 == 0:  # the next header may overtake this one
            await asyncio.sleep(0)
        assert receiver.claim(seq)
        assert not receiver.claim(seq)
        data = await receiver.receive(seq, len(to_ids) * LAYOUT.block_bytes, payload, to_ids)
        assert isinstance(data, ArrivedBlocks)
        written.append(await data.write(to_ids, digests))
        return ACCEPTED

    await sender.send(stored(from_ids, ends.sources), deliver)
    return written[0]


def test_pieces_of_many_senders_at_once_arrive_bit_for_bit_over_a_few_slots() -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        pair = await ends.open()
        to_ids = random_blocks(16, ends.target, rng)
        parts = [to_ids[i : i + rng.randint(1, MAX_BLOCKS)] for i in range(0, 16, MAX_BLOCKS)]
        sent = [random_blocks(len(part), ends.source, rng) for part in parts]
        moves = (move(ends, *pair, s, part) for s, part in zip(sent, parts, strict=True))
        assert all(await asyncio.gather(*moves))
        for part, from_ids in zip(parts, sent, strict=True):
            assert torch.equal(ends.target.tensor[part], ends.source.tensor[from_ids])
        assert ends.board.num_keys() == 0
        await close(*pair)

    with_ends(scenario)


def test_a_flipped_bit_is_found_and_touches_no_other_block() -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        sender, receiver = await ends.open()
        others = [block for block in range(ends.target.num_blocks) if block not in (3, 5)]
        before = ends.target.tensor[others]
        assert receiver.claim(0)
        from_ids = random_blocks(2, ends.source, rng)
        digests = ends.source.digest(from_ids)

        ends.wires.flips = (rng.randrange(2 * LAYOUT.block_bytes), 1 << rng.randrange(8))

        async def deliver(seq: int, payload: list[Any]) -> PieceReply:
            data = await receiver.receive(seq, 2 * LAYOUT.block_bytes, payload, [3, 5])
            assert isinstance(data, RingPiece)
            assert not await data.write([3, 5], digests)
            return ACCEPTED

        await sender.send(stored(from_ids, ends.sources), deliver)
        assert torch.equal(ends.target.tensor[others], before)
        await close(sender, receiver)

    with_ends(scenario)


def test_a_peer_that_falls_silent_is_aborted_at_the_deadline_and_a_new_epoch_works() -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        pair = await ends.open(1)
        ends.wires.is_silent = True
        hasten(pair[1], 0.05)
        assert pair[1].claim(0)
        with pytest.raises(HandoffError, match="receive"):
            await pair[1].receive(0, LAYOUT.block_bytes, [])
        assert ends.wires.num_aborts == 1
        assert pair[1].claim(1)
        with pytest.raises(HandoffError, match="closed"):
            await pair[1].receive(1, LAYOUT.block_bytes, [])
        await close(*pair)
        ends.wires.is_silent = False
        pair = await ends.open(2)
        assert await move(ends, *pair, [1, 2], [4, 0])
        await close(*pair)

    with_ends(scenario)


@pytest.mark.parametrize("abort", ["fails", "does not end"])
def test_a_slot_whose_receive_was_not_aborted_is_never_used_again(
    abort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting_thread, "ABORT_S", 0.01)
    may_end, written_late = threading.Event(), list[torch.Tensor]()

    def fail(_: FakeGroup) -> None:
        if abort == "does not end":
            assert may_end.wait(60.0)
        raise RuntimeError("NCCL says no")

    def receive(_: FakeGroup, data: torch.Tensor) -> Callable[[], bool]:
        written_late.append(data)
        return lambda: False

    async def scenario(ends: Ends, rng: random.Random) -> None:
        pair = await ends.open(1)
        with monkeypatch.context() as broken:
            broken.setattr(FakeGroup, "receive", receive)
            broken.setattr(FakeGroup, "abort", fail)
            hasten(pair[1], 0.05)
            assert pair[1].claim(0)
            with pytest.raises(HandoffError, match="receive"):
                await pair[1].receive(0, LAYOUT.block_bytes, [])
            may_end.set()
            await close(*pair)
        [late] = written_late
        ring = ends.receiving._ring
        pieces = [await ring.acquire(LAYOUT.block_bytes, 1.0) for _ in range(NUM_SLOTS)]
        for piece in pieces:
            piece.staging.fill_(7)
        late.fill_(9)
        assert all((piece.staging == 7).all() for piece in pieces)
        for piece in pieces:
            piece.discard()
        pair = await ends.open(2)
        assert await move(ends, *pair, [1, 2], [4, 0])
        await close(*pair)

    with_ends(scenario)


def test_a_probe_whose_abort_fails_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        pair = await ends.open()
        ends.wires.is_silent = True

        def fail(_: FakeGroup) -> None:
            raise RuntimeError("NCCL says no")

        monkeypatch.setattr(FakeGroup, "abort", fail)
        hasten(pair[1], 0.05)
        connection, data = pair[1]._connection, torch.zeros(4)
        assert isinstance(connection, NcclConnection)
        with pytest.raises(HandoffError):
            await asyncio.to_thread(connection.receive, data)
        assert any(one is data for one in kept_memory._kept), "NCCL may still write there"
        await close(*pair)

    with_ends(scenario)


def hasten(receiver: PairReceiver[RingPiece], deadline_s: float) -> None:
    """From now on; to open, a busy machine may take longer."""
    connection = receiver._connection
    assert isinstance(connection, NcclConnection)
    connection._thread._deadline_s = deadline_s
    connection._thread._watch()


def test_a_piece_that_is_cut_off_is_not_written() -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        sender, receiver = await ends.open()
        before = ends.target.tensor.clone()
        ends.wires.is_silent = True
        assert receiver.claim(0)
        receiving = receiver.receive(0, 2 * LAYOUT.block_bytes, [], [3, 5])
        cutting = close_when(ends.wires.has_posted, receiver)
        cut, _ = await asyncio.gather(receiving, cutting, return_exceptions=True)
        assert isinstance(cut, HandoffError)
        assert torch.equal(ends.target.tensor, before)
        await sender.close()

    with_ends(scenario)


class SlowWrite:
    """A `QueuedTake` that is over when somebody waits for it."""

    def __init__(self, queued: threading.Event) -> None:
        self.is_waited_for = False
        self._queued = queued

    def is_over(self) -> bool:
        self._queued.set()
        return self.is_waited_for

    def wait(self) -> None:
        self.is_waited_for = True


def test_a_write_that_is_under_way_is_waited_for_before_its_receive_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        sender, receiver = await ends.open()
        is_queued = threading.Event()
        write = SlowWrite(is_queued)
        monkeypatch.setattr(ends.targets, "queue_take", lambda *_: write)
        answers: list[bool] = []

        async def deliver(seq: int, payload: list[Any]) -> PieceReply:
            assert receiver.claim(seq)
            closing = asyncio.ensure_future(close_when(is_queued, receiver))
            with pytest.raises(HandoffError):
                await receiver.receive(seq, LAYOUT.block_bytes, payload, [3])
            answers.append(write.is_waited_for)
            await closing
            return ACCEPTED

        await sender.send(stored([1], ends.sources), deliver)
        assert answers == [True], "it may land after the blocks are free"
        await sender.close()

    with_ends(scenario)


async def close_when(event: threading.Event, channel: PairReceiver[RingPiece]) -> None:
    assert await asyncio.to_thread(event.wait, 30)
    await channel.close()


def test_a_piece_that_nobody_wants_keeps_its_place_and_touches_nothing() -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        sender, receiver = await ends.open()
        others = [block for block in range(ends.target.num_blocks) if block not in (4, 0, 6)]
        before = ends.target.tensor[others]

        async def drop(seq: int, payload: list[Any]) -> PieceReply:
            assert receiver.claim(seq)
            data = await receiver.receive(seq, 2 * LAYOUT.block_bytes, payload)
            assert isinstance(data, RingPiece)
            data.discard()
            return ACCEPTED

        dropped = sender.send(stored([1, 2], ends.sources), drop)
        _, is_written = await asyncio.gather(
            dropped, move(ends, sender, receiver, [7, 8, 9], [4, 0, 6])
        )
        assert is_written
        assert torch.equal(ends.target.tensor[[4, 0, 6]], ends.source.tensor[[7, 8, 9]])
        assert torch.equal(ends.target.tensor[others], before)
        await close(sender, receiver)

    with_ends(scenario)


@pytest.mark.parametrize("error", [None, WorkerError("decode-0 died")])
def test_a_piece_that_is_answered_for_untaken_does_not_wait_for_the_deadline(
    error: WorkerError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_ends, "ANSWERED_S", 0.01)

    async def scenario(ends: Ends, rng: random.Random) -> None:
        sender, receiver = await ends.open()

        async def refuse(seq: int, payload: list[Any]) -> PieceReply:
            if error is not None:
                raise error
            return PieceReply(outcome="failed", reason="a piece came before")

        with pytest.raises(WorkerError, match="died" if error else "channel"):
            await sender.send(stored([1], ends.sources), refuse)
        await close(sender, receiver)

    with_ends(scenario)


def test_closing_cuts_what_is_under_way_and_gives_its_slot_back() -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        sender, receiver = await ends.open()
        assert receiver.claim(0)
        waiting = asyncio.ensure_future(receiver.receive(0, LAYOUT.block_bytes, []))
        while ends.receiving.num_free_slots == NUM_SLOTS:  # noqa: ASYNC110 - no event for tests
            await asyncio.sleep(0)
        await receiver.close()
        with pytest.raises(HandoffError):
            await waiting
        await sender.close()

    with_ends(scenario)


def test_a_group_that_is_made_while_its_end_closes_is_aborted() -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        is_making, may_go_on = threading.Event(), threading.Event()

        def make_slowly(store: dist.Store, rank: int) -> FakeGroup:
            is_making.set()
            assert may_go_on.wait(30)
            return ends.wires.make_group(store, rank)

        pairs = NcclPairs(ends.targets, settings(), make_slowly)
        opening = asyncio.ensure_future(pairs.open_receive(request_of(1), ends.board))
        assert await asyncio.to_thread(is_making.wait, 30)
        opening.cancel()  # closes the connection, whose thread still makes the group
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, may_go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert ends.wires.num_aborts == 1
        assert pairs.num_open == 0

    with_ends(scenario)


def test_ends_of_two_epochs_do_not_open() -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        with pytest.raises(HandoffError, match="epoch"):
            await ends.open(4, 5)

    with_ends(scenario)


def test_no_more_pairs_open_than_the_config_allows_until_one_closes() -> None:
    async def scenario(ends: Ends, rng: random.Random) -> None:
        pairs = [await ends.open(epoch) for epoch in (1, 2, 3)]
        with pytest.raises(HandoffError, match="max_nccl_pairs"):
            await ends.open(4)
        await close(*pairs.pop())
        pairs.append(await ends.open(5))
        for pair in pairs:
            await close(*pair)

    with_ends(scenario)


class TestProof:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(handshake, "PROBE_BYTES", (3, 1001))

    def test_a_pair_above_its_floor_opens_and_carries(self) -> None:
        async def scenario(ends: Ends, rng: random.Random) -> None:
            pair = await ends.open()
            assert await move(ends, *pair, [7], [1])
            await close(*pair)

        with_ends(scenario, floor_gb_s=1e-12)

    def test_a_pair_below_its_floor_is_unfit(self) -> None:
        async def scenario(ends: Ends, rng: random.Random) -> None:
            receiving = asyncio.ensure_future(
                ends.receiving.open_receive(request_of(1), ends.board)
            )
            with pytest.raises(UnfitError, match="floors_gb_s"):
                await ends.sending.open_send(request_of(1), ends.board)
            await (await receiving).close()

        with_ends(scenario, floor_gb_s=1e9)


class TestRing:
    def test_a_piece_too_large_and_a_ring_without_a_free_slot_are_errors(self) -> None:
        async def main() -> None:
            ring = StagingRing(torch.device("cpu"), slot_bytes=10)
            with pytest.raises(HandoffError, match="takes 10"):
                await ring.acquire(11, 1.0)
            held = [await ring.acquire(n, 1.0) for n in (10, 0, 4)[:NUM_SLOTS]]
            assert len(held) == NUM_SLOTS
            with pytest.raises(HandoffError, match="staging"):
                await ring.acquire(1, 0.01)
            waiting = asyncio.ensure_future(ring.acquire(1, 1.0))
            await asyncio.sleep(0)
            held[0].discard()
            held[0].discard()
            piece = await waiting
            assert ring.num_free == 0
            for one in (piece, *held[1:]):
                one.discard()
            assert ring.num_free == NUM_SLOTS

        asyncio.run(main())

    def test_lost_slots_that_cannot_be_replaced_leave_the_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_memory(_: StagingRing) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory")

        async def main() -> None:
            ring = StagingRing(torch.device("cpu"), slot_bytes=10)
            held = [await ring.acquire(1, 1.0) for _ in range(NUM_SLOTS)]
            with monkeypatch.context() as full:
                full.setattr(StagingRing, "_new_slot", no_memory)
                held[0].lose()
                held[0].discard()
                held[1].discard()
                held[1] = await ring.acquire(1, 1.0)
                for one in held[1:]:
                    one.lose()
                    one.discard()
                with pytest.raises(HandoffError, match="no GPU memory for 3 x 10 bytes"):
                    await ring.acquire(1, 1.0)
            await ring.acquire(1, 1.0)

        asyncio.run(main())

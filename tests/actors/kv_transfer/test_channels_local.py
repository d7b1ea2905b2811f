"""Channels without Ray: gloo between two ends in one process, the byte budget, the rendezvous."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from actors.kv_transfer.channels.gloo_pair import GlooReceiver, GlooSender
from actors.kv_transfer.channels.object_store import ByteBudget
from actors.kv_transfer.channels.worker_channels import WorkerChannels
from actors.kv_transfer.contracts import ReceiveChannel, SendChannel, StagedPiece
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.rendezvous import KEY_LIFE_S, MAX_KEYS, RendezvousKeys
from engine.clock import ManualClock
from engine.errors import HandoffError
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.messages import ChannelKind, PairRequest, PieceReply
from tests.actors.kv_transfer.gpu_stand_in import know_digests
from tests.engine.kv.handoff_world import SENDER
from tests.harness.virtual_time import run_virtual

DEADLINE_S = 60.0  # of what is not meant to reach it


class LocalBoard:
    """A rendezvous client over a dictionary."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total).encode())
        return total

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        with self._changed:
            if not self._changed.wait_for(lambda: self.has(keys), timeout_s):
                raise HandoffError("nobody came")
            return [self._values[key] for key in keys]

    def has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def num_keys(self) -> int:
        return len(self._values)

    def delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def delete_prefix(self, prefix: str) -> int:
        keys = [key for key in self._values if key.startswith(prefix)]
        return sum(self.delete(key) for key in keys)


class MortalBoard(LocalBoard):
    """The first end that looks for the other's address is dead from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_dead, self.is_over = threading.Event(), threading.Event()

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        if not self.is_dead.is_set():
            self.is_dead.set()
            self.is_over.wait()
            raise HandoffError("dead")
        return super().get(keys, timeout_s)


def pair_request(epoch: int, key: str = "k/", channel: ChannelKind = "gloo_pair") -> PairRequest:
    return PairRequest(sender=SENDER, channel=channel, epoch=epoch, rendezvous_key=key)


async def open_both(
    sends: PairRequest, receives: PairRequest
) -> tuple[SendChannel, ReceiveChannel]:
    ends = WorkerChannels(
        LocalBoard(), address="127.0.0.1", deadline_s=DEADLINE_S, max_in_flight_bytes=1000
    )
    sender, receiver = await asyncio.gather(
        ends.open_send(sends), ends.open_receive(receives), return_exceptions=True
    )
    for end in (sender, receiver):
        if isinstance(end, BaseException):
            raise end
    assert isinstance(sender, GlooSender)
    assert isinstance(receiver, GlooReceiver)
    return sender, receiver


def with_pair(scenario: Callable[[SendChannel, ReceiveChannel], Awaitable[None]]) -> None:
    async def main() -> None:
        sender, receiver = await open_both(pair_request(4), pair_request(4))
        try:
            await scenario(sender, receiver)
        finally:
            await sender.close()
            await receiver.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("kv-pair")]

    asyncio.run(main())


def random_piece(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, int(rng.integers(1, 300_000)), dtype=np.uint8)


ACCEPTED = PieceReply(outcome="accepted")


class TestGloo:
    def test_headers_may_overtake_each_other_but_bytes_keep_their_piece(self) -> None:
        async def scenario(sender: SendChannel, receiver: ReceiveChannel) -> None:
            pieces = [random_piece(seed) for seed in range(8)]
            received: dict[int, Any] = {}

            def deliver(piece: Any) -> Callable[[int, list[Any]], Awaitable[PieceReply]]:
                async def call(seq: int, payload: list[Any]) -> PieceReply:
                    if seq % 2 == 0:  # comes after the next one, if that is sent early enough
                        await asyncio.sleep(0.02)
                    assert receiver.claim(seq)
                    assert not receiver.claim(seq)
                    received[seq] = await receiver.receive(seq, piece.nbytes, payload)
                    return ACCEPTED

                return call

            replies = await asyncio.gather(*(sender.send(p, deliver(p)) for p in pieces))
            assert replies == [ACCEPTED] * 8
            assert all(np.array_equal(received[i], piece) for i, piece in enumerate(pieces))

        with_pair(scenario)

    def test_a_number_left_out_ends_the_channel_at_the_deadline(self) -> None:
        async def scenario(_: SendChannel, receiver: ReceiveChannel) -> None:
            assert isinstance(receiver, GlooReceiver)
            receiver._connection.deadline_s = 0.05  # to open, a busy machine may take longer
            assert receiver.claim(1)
            with pytest.raises(HandoffError, match="piece 0 never came"):
                await receiver.receive(1, 10, [])

        with_pair(scenario)

    def test_an_object_reference_on_a_gloo_channel_is_refused(self) -> None:
        async def scenario(_: SendChannel, receiver: ReceiveChannel) -> None:
            assert receiver.claim(0)
            with pytest.raises(HandoffError, match="object reference"):
                await receiver.receive(0, 10, [object()])

        with_pair(scenario)

    def test_closing_one_end_is_noticed_at_once_by_the_other(self) -> None:
        async def scenario(sender: SendChannel, receiver: ReceiveChannel) -> None:
            assert receiver.claim(0)
            waiting = asyncio.ensure_future(receiver.receive(0, 10, []))
            await asyncio.sleep(0)
            started_s = time.monotonic()
            await sender.close()
            with pytest.raises(HandoffError, match="broke"):
                await waiting
            assert time.monotonic() - started_s < DEADLINE_S / 2
            with pytest.raises(HandoffError, match="closed"):
                await sender.send(random_piece(1), _unused)

        with_pair(scenario)

    def test_ends_of_two_epochs_do_not_open(self) -> None:
        with pytest.raises(HandoffError, match="epoch"):
            asyncio.run(open_both(pair_request(4), pair_request(5)))

    def test_an_end_that_dies_while_they_connect_is_given_up_at_the_deadline(self) -> None:
        """Gloo decides by chance which end listens, so there are several pairs."""

        async def open_with_the_dead(key: str) -> None:
            board = MortalBoard()
            ends = WorkerChannels(board, address="127.0.0.1", deadline_s=2.0, max_in_flight_bytes=1)
            dying = asyncio.ensure_future(ends.open_send(pair_request(1, key)))
            try:
                await asyncio.to_thread(board.is_dead.wait)
                with pytest.raises(HandoffError):
                    await ends.open_receive(pair_request(1, key))
            finally:
                board.is_over.set()
                with pytest.raises(HandoffError):
                    await dying

        async def main() -> None:
            started_s = time.monotonic()
            await asyncio.gather(*(open_with_the_dead(f"{n}/") for n in range(4)))
            assert time.monotonic() - started_s < 8.0, "gloo itself would take 10"

        asyncio.run(main())

    def test_no_key_stays_on_the_board(self) -> None:
        async def main() -> None:
            board = LocalBoard()
            ends = WorkerChannels(
                board, address="127.0.0.1", deadline_s=DEADLINE_S, max_in_flight_bytes=1
            )
            request = pair_request(1)
            pair = await asyncio.gather(ends.open_send(request), ends.open_receive(request))
            assert board.num_keys() == 0
            for end in pair:
                await end.close()

        asyncio.run(main())


async def _unused(seq: int, payload: list[Any]) -> PieceReply:
    raise AssertionError("nothing must be sent")


class TestPieces:
    def test_blocks_go_out_and_in_bit_for_bit_and_a_flipped_bit_stays_out(self) -> None:
        layout = KvLayout.with_heads(
            num_layers=2, block_size=3, num_kv_heads=1, head_dim=5, dtype="bfloat16"
        )
        one, two = (KvStore(layout, num_blocks=9, device=torch.device("cpu")) for _ in range(2))
        one.tensor.copy_(torch.randn(one.tensor.shape, generator=torch.manual_seed(3)))
        know_digests(one)
        source, target = KvPieces(one), KvPieces(two)

        async def main() -> None:
            piece = await source.read([7, 0, 4])
            assert piece.data.nbytes == 3 * layout.block_bytes
            broken = piece.data.copy()
            broken[layout.block_bytes + 1] ^= 2
            for wrong in (
                StagedPiece(data=broken, digests=piece.digests),
                StagedPiece(data=piece.data, digests=piece.digests[:2]),
                StagedPiece(data=piece.data, digests=piece.digests[::-1]),
            ):
                assert not await target.write([1, 2, 3], wrong)
                assert torch.count_nonzero(two.tensor) == 0
            assert await target.write([1, 2, 3], piece)

        asyncio.run(main())
        assert torch.equal(two.tensor[[1, 2, 3]], one.tensor[[7, 0, 4]])
        source.close()
        target.close()


class TestByteBudget:
    def test_bytes_in_flight_are_bounded_and_nobody_overtakes(self) -> None:
        async def main() -> None:
            budget = ByteBudget(100)
            order: list[int] = []

            async def use(number: int, num_bytes: int) -> None:
                async with budget.hold(num_bytes):
                    assert budget.used_bytes <= 100
                    order.append(number)
                    await asyncio.sleep(1)

            await asyncio.gather(*(use(i, n) for i, n in enumerate([60, 30, 50, 100, 10, 90])))
            assert order == [0, 1, 2, 3, 4, 5]
            assert budget.used_bytes == 0

        run_virtual(ManualClock(), main())

    def test_one_that_gives_up_waiting_blocks_nobody(self) -> None:
        async def main() -> None:
            budget = ByteBudget(10)
            async with budget.hold(8):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1), budget.hold(5):
                        pass
                async with budget.hold(2):
                    assert budget.used_bytes == 10
            assert budget.used_bytes == 0

        run_virtual(ManualClock(), main())

    def test_a_piece_beyond_the_bound_goes_alone(self) -> None:
        """It failed for ever: blocks larger than `max_in_flight_bytes` could not be handed over."""

        async def main() -> None:
            budget = ByteBudget(10)
            used: list[int] = []

            async def use(num_bytes: int) -> None:
                async with budget.hold(num_bytes):
                    used.append(budget.used_bytes)
                    await asyncio.sleep(1)

            await asyncio.gather(use(4), use(11), use(5))
            assert used == [4, 11, 5]

        run_virtual(ManualClock(), main())


class TestRendezvous:
    def test_a_reader_waits_for_its_keys(self) -> None:
        clock = ManualClock()

        async def main() -> None:
            keys = RendezvousKeys(clock)
            reading = asyncio.ensure_future(keys.get(["a", "b"], 10.0))
            await keys.set("a", b"1")
            await asyncio.sleep(1)
            assert not reading.done()
            assert await keys.add("b", 5) == 5
            assert await reading == [b"1", b"5"]
            assert await keys.add("b", -2) == 3

        run_virtual(clock, main())

    def test_a_wait_is_bounded(self) -> None:
        clock = ManualClock()

        async def main() -> None:
            keys = RendezvousKeys(clock)
            with pytest.raises(HandoffError, match="nobody wrote"):
                await keys.get(["a"], 3.0)
            assert clock.now_s() == pytest.approx(3.0)
            with pytest.raises(HandoffError):
                await keys.get(["a"], 10**9)
            assert clock.now_s() < 100

        run_virtual(clock, main())

    def test_keys_go_by_prefix_by_age_and_never_pile_up(self) -> None:
        clock = ManualClock()

        async def main() -> None:
            keys = RendezvousKeys(clock)
            for name in ("x/1", "x/2", "y/1"):
                await keys.set(name, b"")
            assert keys.delete_prefix("x/") == 2
            assert keys.delete("y/1")
            assert not keys.delete("y/1")
            for i in range(MAX_KEYS):
                await keys.set(str(i), b"")
            with pytest.raises(HandoffError, match="already"):
                await keys.set("one more", b"")
            clock.advance(KEY_LIFE_S)
            assert keys.num_keys() == 0

        run_virtual(clock, main())

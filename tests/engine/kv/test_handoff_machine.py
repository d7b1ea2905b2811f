"""The transfer protocol under any order of events, against a model that tracks block contents.

The machine plays the channels: a piece that is written leaves its content in `self.content`, so a
request that joins the scheduler can be checked block by block. Planted bugs show that it can fail.
"""

import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.errors import HandoffError
from engine.kv.transfer import BlockWrite, IncomingHandoffs
from engine.messages import PieceHeader, Reservation
from engine.request import Request, RequestKey
from tests.engine.kv.handoff_world import BLOCK_SIZE, LEASE_S, Decode, asking, key_of, piece

GARBAGE = ("garbage",)


@dataclass
class Open:
    """A write under way."""

    number: int
    header: PieceHeader
    write: BlockWrite


@dataclass
class Transfer:
    reservation: Reservation
    token_ids: list[int]
    block_ids: list[int]
    expires_s: float
    epoch: int = 0
    arrived: set[int] = field(default_factory=set)
    is_live: bool = True

    def content(self, block: int) -> tuple[int, ...]:
        return tuple(self.token_ids[: (block + 1) * BLOCK_SIZE])


class TransferMachine(RuleBasedStateMachine):
    incoming_class: type[IncomingHandoffs] = IncomingHandoffs

    def __init__(self) -> None:
        super().__init__()
        self.decode = Decode(num_blocks=14, max_rows=3, incoming_class=self.incoming_class)
        self.incoming = self.decode.incoming
        self.content: dict[int, tuple[object, ...]] = {}  # block id -> what its KV is of
        self.transfers: dict[int, Transfer] = {}
        self.open: list[Open] = []
        self.joining: int | None = None
        self.num_asked = 0
        join = self.decode.scheduler.join

        def checked_join(request: Request) -> None:
            self.check_joining(request)
            join(request)

        self.decode.scheduler.join = checked_join  # type: ignore[method-assign]

    # ---- reservations

    @rule(prefix=st.integers(0, 2), num_tokens=st.integers(1, 14))
    def reserve(self, prefix: int, num_tokens: int) -> None:
        self.num_asked += 1
        number = self.num_asked
        token_ids = [100 * prefix + i for i in range(num_tokens)]
        answer = self.incoming.reserve(asking(number, token_ids))
        if not isinstance(answer, Reservation):
            assert self.decode.cache.num_available < 14 or len(self.decode.scheduler.running) >= 3
            return
        owned = dict(self.incoming.owners())[f"incoming {answer.transfer_id}"]
        transfer = Transfer(answer, token_ids, list(owned), self.decode.clock.now_s() + LEASE_S)
        for i in range(answer.num_hit_blocks):
            assert self.content[owned[i]] == transfer.content(i), "a hit has another content"
        for block_id in owned[answer.num_hit_blocks :]:
            self.content[block_id] = GARBAGE
        self.transfers[number] = transfer

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = self.pick(data)
        is_committed = key_of(number) in self.decode.scheduler.running
        outcome = self.incoming.cancel(key_of(number))
        assert outcome == "committed" or not is_committed
        self.transfers[number].is_live = False

    @rule(seconds=st.sampled_from([1.0, 1.0, LEASE_S / 2, LEASE_S / 2, LEASE_S]))
    def tick(self, seconds: float) -> None:
        self.decode.clock.advance(seconds)
        expired = set(self.incoming.expire())
        now_s = self.decode.clock.now_s()
        for number, transfer in self.transfers.items():
            is_due = transfer.is_live and now_s >= transfer.expires_s
            assert is_due == (key_of(number) in expired), f"{number} expires at its lease's end"
            transfer.is_live = transfer.is_live and not is_due

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        number = self.pick(data)
        transfer = self.transfers[number]
        try:
            self.incoming.renew(key_of(number), transfer.reservation.transfer_id)
        except HandoffError:
            assert not transfer.is_live
        else:
            assert transfer.is_live
            self.touch(transfer)

    # ---- pieces

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), epoch_step=st.sampled_from([0, 0, 0, 1, -1]))
    def begin(self, data: st.DataObject, epoch_step: int) -> None:
        number = self.pick(data)
        transfer = self.transfers[number]
        reservation = transfer.reservation
        if data.draw(st.booleans(), label="all that is missing"):
            first, end = reservation.num_hit_blocks, reservation.num_blocks
        else:
            first = data.draw(st.integers(0, reservation.num_blocks))
            end = data.draw(st.integers(first, reservation.num_blocks + 1))
        epoch = max(transfer.epoch, 1) + epoch_step
        header = piece(number, reservation, first, end, epoch=epoch)
        mine = [o for o in self.open if o.number == number]
        taken = transfer.arrived.union(*(set(o.write.blocks) for o in mine))
        is_allowed = (
            transfer.is_live
            and reservation.num_hit_blocks <= first
            and end <= reservation.num_blocks
            and epoch >= max(transfer.epoch, 1)
            and (not mine if epoch > transfer.epoch else not taken & set(range(first, end)))
        )
        try:
            write = self.incoming.begin_write(header)
        except HandoffError:
            assert not is_allowed, f"{header} must be taken"
            return
        assert is_allowed, f"{header} must not be taken"
        assert write.block_ids == transfer.block_ids[first:end]
        if epoch > transfer.epoch:
            transfer.epoch = epoch
            transfer.arrived.clear()
        self.touch(transfer)
        self.open.append(Open(number, header, write))

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), epoch_step=st.sampled_from([0, 0, 1]))
    def arrive(self, data: st.DataObject, epoch_step: int) -> None:
        """A piece comes and is written before anything else happens."""
        num_open = len(self.open)
        self.begin(data, epoch_step)
        if len(self.open) > num_open:
            self.settle(self.open.pop(), is_verified=True)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), is_verified=st.sampled_from([True, True, True, False]))
    def end(self, data: st.DataObject, is_verified: bool) -> None:
        ending = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.settle(ending, is_verified=is_verified)

    def settle(self, ending: Open, *, is_verified: bool) -> None:
        transfer = self.transfers[ending.number]
        for block, block_id in zip(ending.write.blocks, ending.write.block_ids, strict=True):
            self.content[block_id] = transfer.content(block) if is_verified else GARBAGE
        is_live = self.incoming.end_write(ending.header.key, ending.write, is_verified=is_verified)
        assert is_live == transfer.is_live, f"{ending.number} lives: {is_live}"
        if is_live:
            self.touch(transfer)
            if is_verified:
                transfer.arrived.update(ending.write.blocks)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), epoch_step=st.sampled_from([0, 0, 0, -1, 1]))
    def commit(self, data: st.DataObject, epoch_step: int) -> None:
        number = self.pick(data)
        transfer = self.transfers[number]
        reservation, end = transfer.reservation, transfer.reservation.num_blocks
        epoch = transfer.epoch + epoch_step
        missing = set(range(reservation.num_hit_blocks, end)) - transfer.arrived
        is_writing = any(o.number == number for o in self.open)
        is_due = transfer.is_live and epoch_step == 0 and not missing and not is_writing
        self.joining = number
        try:
            self.incoming.commit(
                piece(number, reservation, end, end, epoch=epoch, first_token_id=5)
            )
        except HandoffError:
            assert not is_due, f"{number} must commit"
        else:
            assert is_due, f"{number} must not commit"
            transfer.is_live = False

    @precondition(lambda self: self.decode.scheduler.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        keys: list[RequestKey] = sorted(self.decode.scheduler.running)
        self.decode.scheduler.finish(data.draw(st.sampled_from(keys)))

    # ---- what always holds

    def pick(self, data: st.DataObject) -> int:
        """A transfer, mostly one that lives."""
        live = [number for number, transfer in self.transfers.items() if transfer.is_live]
        among = live if live and data.draw(st.integers(0, 4)) else sorted(self.transfers)
        return data.draw(st.sampled_from(among))

    def touch(self, transfer: Transfer) -> None:
        transfer.expires_s = self.decode.clock.now_s() + LEASE_S

    def check_joining(self, request: Request) -> None:
        """Everything a decode will read is the right content."""
        assert self.joining is not None
        transfer = self.transfers[self.joining]
        assert request.key == key_of(self.joining)
        assert request.tokens == [*transfer.token_ids, 5]
        for i, block_id in enumerate(request.block_ids):
            assert self.content[block_id] == transfer.content(i), f"block {i} has not arrived"

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.decode.check()

    @invariant()
    def no_block_is_free_or_someone_elses_while_it_is_written(self) -> None:
        owned = dict(self.incoming.owners())
        for under_way in self.open:
            mine = owned.get(f"incoming {under_way.write.transfer_id}", [])
            assert set(under_way.write.block_ids) <= set(mine), "freed under a write"

    @invariant()
    def only_live_transfers_and_orphans_hold_blocks(self) -> None:
        expected = {
            f"incoming {t.reservation.transfer_id}"
            for number, t in self.transfers.items()
            if t.is_live or any(o.number == number for o in self.open)
        }
        holders = {name for name, _ in self.incoming.owners()}
        assert holders == expected, f"{holders} hold blocks, and should: {expected}"

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None:
            return  # a second failure would hide the first
        for number in self.transfers:
            self.incoming.cancel(key_of(number))
        for under_way in self.open:
            self.incoming.end_write(under_way.header.key, under_way.write, is_verified=True)
        for key in list(self.decode.scheduler.running):
            self.decode.scheduler.finish(key)
        assert self.decode.cache.num_held == 0, "something still holds blocks"
        self.decode.check()


COMMON = settings(
    deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


@pytest.mark.slow
@pytest.mark.parametrize("num_examples", [60, pytest.param(2000, marks=pytest.mark.nightly)])
def test_the_transfer_protocol_holds_in_any_order_of_events(num_examples: int) -> None:
    options = settings(COMMON, max_examples=num_examples, stateful_step_count=40)
    run_state_machine_as_test(TransferMachine, settings=options)


class FreesUnderAWrite(IncomingHandoffs):
    def _end(self, key: RequestKey, ending: str) -> None:
        transfer = self._live.get(key)
        if transfer is not None:
            transfer.writes.clear()
        super()._end(key, ending)  # type: ignore[arg-type]

    def end_write(self, key: RequestKey, write: BlockWrite, *, is_verified: bool) -> bool:
        if key not in self._live:
            return False
        return super().end_write(key, write, is_verified=is_verified)


class CommitsEarly(IncomingHandoffs):
    def commit(self, header: PieceHeader) -> None:
        transfer = self._live.get(header.key)
        if transfer is not None:
            transfer.arrived.update(range(transfer.num_blocks))
        super().commit(header)


class KeepsOldEpochsPieces(IncomingHandoffs):
    def begin_write(self, header: PieceHeader) -> BlockWrite:
        transfer = self._live.get(header.key)
        if transfer is not None and transfer.epoch and not transfer.writes:
            transfer.epoch = max(transfer.epoch, header.epoch)
        return super().begin_write(header)


class TakesOldEpochs(IncomingHandoffs):
    def _check_epoch(self, transfer: object, epoch: int) -> None:
        return


class TrustsUnverifiedPieces(IncomingHandoffs):
    def end_write(self, key: RequestKey, write: BlockWrite, *, is_verified: bool) -> bool:
        return super().end_write(key, write, is_verified=True)


class ForgetsLeases(IncomingHandoffs):
    def expire(self) -> list[RequestKey]:
        return []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (FreesUnderAWrite, "freed under a write|hold blocks, and should"),
        (CommitsEarly, "has not arrived|not commit"),
        (KeepsOldEpochsPieces, "must be taken"),
        (TakesOldEpochs, "must not be taken"),
        pytest.param(
            TrustsUnverifiedPieces,
            "has not arrived|be taken|not commit",
            marks=pytest.mark.nightly,  # the slowest
        ),
        (ForgetsLeases, "expires at its lease's end"),
    ],
)
def test_the_machine_finds_a_planted_bug(planted: type[IncomingHandoffs], named: str) -> None:
    class Planted(TransferMachine):
        incoming_class = planted

    with pytest.raises(AssertionError, match=named):
        run_state_machine_as_test(
            Planted,
            settings=settings(
                COMMON,
                max_examples=2000,  # it stops at the first failure
                stateful_step_count=40,
                derandomize=True,
                phases=[Phase.generate],
            ),
        )

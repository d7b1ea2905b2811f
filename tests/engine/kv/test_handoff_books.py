"""The books of a handoff, one behaviour at a time."""

import msgspec
import pytest

from engine.errors import HandoffError
from engine.kv.cache import BlockCache, check_blocks
from engine.kv.transfer import (
    HandoffDropped,
    HandoffReady,
    HandoffStarted,
    OutgoingEvent,
    OutgoingHandoffs,
)
from engine.messages import NotNow, Refused, Reservation
from engine.request import Request, RequestSpec, SamplingParams
from tests.engine.kv.handoff_world import (
    BLOCK_SIZE,
    LEASE_S,
    Decode,
    asking,
    key_of,
    piece,
)


def arrive(decode: Decode, number: int, reservation: Reservation, *, epoch: int = 1) -> None:
    """All missing blocks in one verified piece."""
    header = piece(
        number, reservation, reservation.num_hit_blocks, reservation.num_blocks, epoch=epoch
    )
    write = decode.incoming.begin_write(header)
    assert decode.incoming.end_write(header.key, write, is_verified=True)


def commit(decode: Decode, number: int, reservation: Reservation, *, epoch: int = 1) -> None:
    end = reservation.num_blocks
    decode.incoming.commit(piece(number, reservation, end, end, epoch=epoch, first_token_id=7))


class TestReserving:
    def test_a_reservation_holds_blocks_for_every_token(self) -> None:
        decode = Decode()
        reservation = decode.granted(asking(1, range(10)))
        assert (reservation.num_blocks, reservation.num_hit_blocks) == (4, 0)
        assert decode.cache.num_held == 4
        decode.check()

    def test_blocks_already_here_are_hits_and_shared(self) -> None:
        decode = Decode()
        first = decode.granted(asking(1, range(10)))
        arrive(decode, 1, first)
        commit(decode, 1, first)
        second = decode.granted(asking(2, [*range(8), 90, 91]))
        assert (second.num_blocks, second.num_hit_blocks) == (4, 2)
        assert decode.cache.num_held == 4 + 2
        decode.check()

    def test_a_prompt_that_is_all_here_commits_without_a_block(self) -> None:
        decode = Decode()
        first = decode.granted(asking(1, range(9)))
        arrive(decode, 1, first)
        commit(decode, 1, first)
        second = decode.granted(asking(2, range(9)))
        assert second.num_hit_blocks == second.num_blocks == 3
        arrive(decode, 2, second)
        commit(decode, 2, second)
        assert key_of(2) in decode.scheduler.running
        decode.check()

    def test_rows_promised_to_reservations_count(self) -> None:
        decode = Decode(max_rows=2)
        decode.granted(asking(1, range(3)))
        decode.granted(asking(2, range(3)))
        assert isinstance(decode.incoming.reserve(asking(3, range(3))), NotNow)
        decode.incoming.cancel(key_of(1))
        decode.granted(asking(3, range(3)))

    def test_every_promised_row_keeps_a_block_to_grow_by(self) -> None:
        decode = Decode(num_blocks=8)
        decode.granted(asking(1, range(4 * BLOCK_SIZE)))
        assert isinstance(
            decode.incoming.reserve(asking(2, range(50, 50 + 4 * BLOCK_SIZE))), NotNow
        )
        decode.granted(asking(2, range(50, 50 + 3 * BLOCK_SIZE)))
        decode.check()

    def test_requests_preempted_here_go_first(self) -> None:
        decode = Decode()
        decode.scheduler.num_waiting = 1
        assert isinstance(decode.incoming.reserve(asking(1, range(3))), NotNow)

    @pytest.mark.parametrize(
        "change",
        [
            {"sender": {"model": "other"}},
            {"sender": {"layout": {"block_size": 4}}},
            {"token_ids": list(range(100))},
            {"token_ids": list(range(60))},  # 20 blocks of 16
            {"num_prompt_tokens": 0},
            {"num_prompt_tokens": 11},
            {
                "spec": RequestSpec(params=SamplingParams(max_tokens=1), deadline_s=1.0),
                "age_s": 1.0,
            },
        ],
        ids=str,
    )
    def test_what_can_never_be_served_is_refused(self, change: dict[str, object]) -> None:
        decode = Decode()
        request = asking(1, range(10))
        sender = request.sender
        match change.get("sender"):
            case {"model": str(model)}:
                sender = msgspec.structs.replace(sender, model=model)
            case {"layout": {"block_size": int(size)}}:
                layout = msgspec.structs.replace(sender.layout, block_size=size)
                sender = msgspec.structs.replace(sender, layout=layout)
        request = msgspec.structs.replace(request, **{**change, "sender": sender})
        assert isinstance(decode.incoming.reserve(request), Refused)
        assert decode.cache.num_held == 0

    def test_a_key_is_reserved_once(self) -> None:
        decode = Decode()
        decode.granted(asking(1, range(4)))
        assert isinstance(decode.incoming.reserve(asking(1, range(4))), Refused)
        decode.incoming.cancel(key_of(1))
        assert isinstance(decode.incoming.reserve(asking(1, range(4))), Refused)

    def test_a_cancellation_that_overtakes_the_reservation_holds(self) -> None:
        decode = Decode()
        assert decode.incoming.cancel(key_of(1)) == "cancelled"
        assert isinstance(decode.incoming.reserve(asking(1, range(4))), Refused)


class TestPieces:
    def test_the_committed_request_continues_after_its_first_token(self) -> None:
        decode = Decode()
        reservation = decode.granted(asking(1, range(10), num_prompt_tokens=8))
        arrive(decode, 1, reservation)
        commit(decode, 1, reservation)
        request = decode.scheduler.running[key_of(1)]
        assert request.tokens == [*range(10), 7]
        assert request.num_prompt_tokens == 8
        assert request.num_emitted_tokens == 3
        assert request.num_computed_tokens == 10
        assert decode.incoming.statistics().num_committed == 1
        assert decode.incoming.cancel(key_of(1)) == "committed"
        decode.check()

    def test_nothing_commits_while_a_block_is_missing(self) -> None:
        decode = Decode()
        reservation = decode.granted(asking(1, range(10)))
        header = piece(1, reservation, 1, 4)
        decode.incoming.end_write(header.key, decode.incoming.begin_write(header), is_verified=True)
        with pytest.raises(HandoffError, match=r"blocks \[0\] have not arrived"):
            commit(decode, 1, reservation)

    def test_an_unverified_piece_has_not_arrived(self) -> None:
        decode = Decode()
        reservation = decode.granted(asking(1, range(3)))
        header = piece(1, reservation, 0, 1)
        decode.incoming.end_write(
            header.key, decode.incoming.begin_write(header), is_verified=False
        )
        with pytest.raises(HandoffError):
            commit(decode, 1, reservation)
        arrive(decode, 1, reservation)
        commit(decode, 1, reservation)

    @pytest.mark.parametrize(("first", "end"), [(-1, 1), (0, 5), (4, 5), (3, 2)])
    def test_blocks_outside_the_missing_ones_are_refused(self, first: int, end: int) -> None:
        decode = Decode()
        reservation = decode.granted(asking(1, range(10)))
        with pytest.raises(HandoffError, match="outside"):
            decode.incoming.begin_write(piece(1, reservation, first, end))

    def test_hit_blocks_are_never_written(self) -> None:
        decode = Decode()
        first = decode.granted(asking(1, range(9)))
        arrive(decode, 1, first)
        commit(decode, 1, first)
        second = decode.granted(asking(2, range(12)))
        with pytest.raises(HandoffError, match="outside"):
            decode.incoming.begin_write(piece(2, second, 2, 4))

    def test_a_block_comes_once_per_epoch(self) -> None:
        decode = Decode()
        reservation = decode.granted(asking(1, range(10)))
        write = decode.incoming.begin_write(piece(1, reservation, 0, 2))
        with pytest.raises(HandoffError, match="twice"):
            decode.incoming.begin_write(piece(1, reservation, 1, 3))
        decode.incoming.end_write(key_of(1), write, is_verified=True)
        with pytest.raises(HandoffError, match="twice"):
            decode.incoming.begin_write(piece(1, reservation, 1, 3))

    def test_a_new_epoch_starts_over_and_ends_the_old_one(self) -> None:
        decode = Decode()
        reservation = decode.granted(asking(1, range(6)))
        arrive(decode, 1, reservation, epoch=1)
        write = decode.incoming.begin_write(piece(1, reservation, 0, 1, epoch=3))
        with pytest.raises(HandoffError):
            commit(decode, 1, reservation, epoch=1)
        decode.incoming.end_write(key_of(1), write, is_verified=True)
        with pytest.raises(HandoffError, match=r"blocks \[1\]"):
            commit(decode, 1, reservation, epoch=3)
        with pytest.raises(HandoffError, match="is over"):
            decode.incoming.begin_write(piece(1, reservation, 1, 2, epoch=2))

    def test_a_new_epoch_waits_for_writes_of_the_old_one(self) -> None:
        decode = Decode()
        reservation = decode.granted(asking(1, range(6)))
        decode.incoming.begin_write(piece(1, reservation, 0, 1, epoch=1))
        with pytest.raises(HandoffError, match="still writes"):
            decode.incoming.begin_write(piece(1, reservation, 0, 1, epoch=2))

    def test_only_the_sender_that_reserved_may_write(self) -> None:
        decode = Decode()
        reservation = decode.granted(asking(1, range(6)))
        header = piece(1, reservation, 0, 1)
        for change in ({"sender": "prefill-1"}, {"sender_incarnation": "restarted"}):
            with pytest.raises(HandoffError, match="was reserved by"):
                decode.incoming.begin_write(msgspec.structs.replace(header, **change))
        with pytest.raises(HandoffError, match="the reservation is"):
            decode.incoming.begin_write(msgspec.structs.replace(header, transfer_id="other"))


class TestEnding:
    def test_blocks_being_written_are_freed_when_the_last_write_ends(self) -> None:
        decode = Decode()
        reservation = decode.granted(asking(1, range(9)))
        writes = [decode.incoming.begin_write(piece(1, reservation, i, i + 1)) for i in (0, 1)]
        assert decode.incoming.cancel(key_of(1)) == "cancelled"
        assert decode.cache.num_held == 3
        assert decode.incoming.statistics().num_orphans == 1
        assert not decode.incoming.end_write(key_of(1), writes[0], is_verified=True)
        assert decode.cache.num_held == 3
        assert not decode.incoming.end_write(key_of(1), writes[1], is_verified=True)
        assert decode.cache.num_held == 0
        decode.check()

    def test_a_lease_ends_unless_it_is_renewed(self) -> None:
        decode = Decode()
        kept = decode.granted(asking(1, range(4)))
        decode.granted(asking(2, range(4)))
        decode.clock.advance(LEASE_S - 0.5)
        assert decode.incoming.expire() == []
        decode.incoming.renew(key_of(1), kept.transfer_id)
        decode.clock.advance(0.5)
        assert decode.incoming.expire() == [key_of(2)]
        decode.check()
        decode.clock.advance(LEASE_S)
        assert decode.incoming.expire() == [key_of(1)]
        assert decode.cache.num_held == 0
        with pytest.raises(HandoffError, match="expired"):
            decode.incoming.renew(key_of(1), kept.transfer_id)

    def test_pieces_renew_the_lease(self) -> None:
        decode = Decode()
        reservation = decode.granted(asking(1, range(9)))
        for i in range(3):
            decode.clock.advance(LEASE_S - 1)
            write = decode.incoming.begin_write(piece(1, reservation, i, i + 1))
            assert decode.incoming.end_write(key_of(1), write, is_verified=True)
            assert decode.incoming.expire() == []
        commit(decode, 1, reservation)

    def test_keys_are_found_by_their_ingress(self) -> None:
        decode = Decode()
        decode.granted(asking(1, range(4)))
        assert decode.incoming.keys_of("ingress-0") == [key_of(1)]
        assert decode.incoming.keys_of("ingress-1") == []


class Prefill:
    """Outgoing books, and requests as a scheduler hands them over."""

    def __init__(self) -> None:
        self.cache = BlockCache(12, enable_prefix_caching=True, protected_share=0.8)
        self.events: list[OutgoingEvent] = []
        self.outgoing = OutgoingHandoffs(self.cache, self.events.append)

    def start(self, number: int, num_tokens: int = 5) -> Request:
        request = Request(
            spec=RequestSpec(params=SamplingParams(max_tokens=4)),
            key=key_of(number),
            ingress_id="ingress-0",
            tokens=list(range(num_tokens)),
            num_prompt_tokens=num_tokens,
            arrival_s=0.0,
            decode_worker="decode-0",
        )
        self.outgoing.start(request)
        return request

    def finish(self, request: Request) -> None:
        block_ids = self.cache.allocate(-(-request.num_known_tokens // BLOCK_SIZE))
        assert block_ids is not None
        request.block_ids = block_ids
        request.num_computed_tokens = request.num_known_tokens
        request.tokens.append(42)
        self.outgoing.add(request)

    def check(self) -> None:
        check_blocks(self.cache, self.outgoing.owners())


class TestOutgoing:
    def test_the_sender_hears_of_every_phase_once(self) -> None:
        prefill = Prefill()
        request = prefill.start(1)
        prefill.outgoing.start(request)  # again, after a preemption
        prefill.finish(request)
        started, ready = prefill.events
        assert isinstance(started, HandoffStarted)
        assert started.token_ids == [0, 1, 2, 3, 4]
        assert started.decode_worker == "decode-0"
        assert isinstance(ready, HandoffReady)
        assert (ready.block_ids, ready.first_token_id) == (request.block_ids, 42)

    def test_blocks_without_room_elsewhere_are_counted(self) -> None:
        prefill = Prefill()
        request = prefill.start(1)
        assert prefill.outgoing.num_unreserved_blocks == 0
        prefill.finish(request)
        assert prefill.outgoing.num_unreserved_blocks == 2
        prefill.outgoing.mark_reserved(request.key)
        assert prefill.outgoing.num_unreserved_blocks == 0
        prefill.check()

    def test_release_is_idempotent_and_frees_everything(self) -> None:
        prefill = Prefill()
        request = prefill.start(1)
        prefill.finish(request)
        prefill.check()
        for _ in range(2):
            prefill.outgoing.release(request.key)
            assert prefill.cache.num_held == 0
        prefill.outgoing.mark_reserved(request.key)
        assert len(prefill.outgoing) == 0

    def test_what_is_released_while_it_computes_frees_when_it_is_added(self) -> None:
        prefill = Prefill()
        request = prefill.start(1)
        prefill.outgoing.release(request.key)
        prefill.outgoing.start(request)
        prefill.finish(request)
        assert prefill.cache.num_held == 0
        assert len(prefill.outgoing) == 0
        assert len(prefill.events) == 1

    def test_a_dropped_request_is_told_once(self) -> None:
        prefill = Prefill()
        prefill.start(1)
        prefill.outgoing.drop(key_of(1))
        prefill.outgoing.drop(key_of(1))
        prefill.outgoing.drop(key_of(2))  # never started
        assert prefill.events[1:] == [HandoffDropped(key=key_of(1))]
        assert len(prefill.outgoing) == 0

    def test_keys_are_found_by_their_ingress(self) -> None:
        prefill = Prefill()
        prefill.start(1)
        assert prefill.outgoing.keys_of("ingress-0") == [key_of(1)]
        assert prefill.outgoing.keys_of("other") == []

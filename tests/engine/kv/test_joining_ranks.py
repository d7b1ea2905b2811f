"""Reservations on a decode worker whose ranks have blocks of their own."""

import pytest

from engine.clock import ManualClock
from engine.errors import HandoffError
from engine.kv.cache import BlockCache, check_blocks
from engine.kv.transfer import IncomingHandoffs, JoiningRank
from engine.messages import NotNow, Reservation
from tests.engine.kv.handoff_world import (
    LEASE_S,
    RECEIVER,
    RecordingScheduler,
    asking,
    hasher,
    key_of,
    piece,
)

NUM_BLOCKS = 16
MAX_ROWS = 4


class Ranks:
    """Two of one decode worker."""

    def __init__(self) -> None:
        self.caches = [
            BlockCache(NUM_BLOCKS, enable_prefix_caching=True, protected_share=0.8)
            for _ in range(2)
        ]
        self.schedulers = [RecordingScheduler(cache) for cache in self.caches]
        self.incoming = IncomingHandoffs(
            [
                JoiningRank(cache=cache, scheduler=scheduler, first_block=rank * NUM_BLOCKS)
                for rank, (cache, scheduler) in enumerate(
                    zip(self.caches, self.schedulers, strict=True)
                )
            ],
            hasher=hasher(),
            identity=RECEIVER,
            clock=ManualClock(100.0),
            lease_s=LEASE_S,
            max_rows=MAX_ROWS,
        )

    def reserve(self, number: int, token_ids: range) -> Reservation:
        answer = self.incoming.reserve(asking(number, token_ids))
        assert isinstance(answer, Reservation), answer
        return answer

    def arrive(self, number: int, reservation: Reservation) -> int:
        """All its blocks, and it runs; returns its rank."""
        first, end = reservation.num_hit_blocks, reservation.num_blocks
        write = self.incoming.begin_write(piece(number, reservation, first, end))
        ranks = {block_id // NUM_BLOCKS for block_id in write.block_ids}
        assert self.incoming.end_write(key_of(number), write, is_verified=True)
        self.incoming.commit(piece(number, reservation, end, end, first_token_id=7))
        [rank] = [r for r, s in enumerate(self.schedulers) if key_of(number) in s.running]
        assert ranks in ({rank}, set())
        self.check()
        return rank

    def check(self) -> None:
        owners = dict(self.incoming.owners())
        for rank, (cache, scheduler) in enumerate(zip(self.caches, self.schedulers, strict=True)):
            numbers = range(rank * NUM_BLOCKS, (rank + 1) * NUM_BLOCKS)
            own = [
                (n, [b - numbers.start for b in ids])
                for n, ids in owners.items()
                if ids[0] in numbers
            ]
            own += [(f"row {key}", r.block_ids) for key, r in scheduler.running.items()]
            check_blocks(cache, own)


def test_requests_go_to_the_rank_with_fewer_of_them() -> None:
    ranks = Ranks()
    found = [ranks.arrive(n, ranks.reserve(n, range(100 * n, 100 * n + 7))) for n in range(6)]
    assert found.count(0) == found.count(1) == 3


def test_a_request_goes_where_its_prefix_is_unless_too_many_are_there() -> None:
    ranks = Ranks()
    first = ranks.arrive(0, ranks.reserve(0, range(9)))
    again = [ranks.reserve(n, range(10)) for n in (1, 2)]
    assert [one.num_hit_blocks for one in again] == [3, 0], "2 there, none elsewhere"
    assert ranks.arrive(1, again[0]) == first
    assert ranks.arrive(2, again[1]) == 1 - first


def test_a_rank_without_room_is_passed_over_and_all_of_them_make_the_others_wait() -> None:
    ranks = Ranks()
    full = ranks.arrive(0, ranks.reserve(0, range(45)))  # nearly all of its blocks
    for number in (1, 2):
        other = range(50 * number, 50 * number + 18)
        assert ranks.arrive(number, ranks.reserve(number, other)) == 1 - full
    assert isinstance(ranks.incoming.reserve(asking(3, range(200, 215))), NotNow)
    ranks.schedulers[full].finish(key_of(0))
    assert ranks.arrive(3, ranks.reserve(3, range(200, 215))) == full


def test_what_is_cancelled_while_it_is_written_is_freed_on_its_rank() -> None:
    ranks = Ranks()
    reservations = [ranks.reserve(n, range(50 * n, 50 * n + 7)) for n in range(2)]
    writes = [ranks.incoming.begin_write(piece(n, one, 0, 2)) for n, one in enumerate(reservations)]
    for number in range(2):
        ranks.incoming.abort(key_of(number))
        ranks.check()
    for number, write in enumerate(writes):
        assert not ranks.incoming.end_write(key_of(number), write, is_verified=True)
    assert [cache.num_held for cache in ranks.caches] == [0, 0]
    with pytest.raises(HandoffError, match="no reservation"):
        ranks.incoming.begin_write(piece(0, reservations[0], 0, 1))

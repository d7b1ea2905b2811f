"""Sender and receiver together: what arrives, what goes wrong, and that nothing is ever left."""

import asyncio
import random

import msgspec
import pytest

from engine.messages import FailureRecord, NotNow, Refused, Reservation
from engine.request import RequestKey
from tests.actors.kv_transfer.handoff_simulation import World, simulate
from tests.engine.kv.handoff_world import LAYOUT, LEASE_S, Decode, asking, key_of
from tests.harness.handoff_network import CONFIG, FakePeer, Faults

BOUND_S = CONFIG.reserve_timeout_s + 10 * CONFIG.transfer_deadline_s


def test_a_prompt_arrives_bit_for_bit_and_everything_is_released() -> None:
    async def scenario(world: World) -> None:
        request = world.start(1, range(20))
        world.finish(request)
        await world.settled()
        world.check_arrived(request)
        world.check_books()
        assert world.prefill_cache.num_held == 0
        sent = world.sender.statistics()
        assert (sent.num_sent, sent.num_pieces, sent.num_retries) == (1, 4, 0)
        assert sent.num_bytes == 7 * LAYOUT.block_bytes == world.receiver.statistics().num_bytes

    simulate(scenario)


async def hand_over_in_one_call(world: World) -> None:
    """Five short prompts, which all arrive."""
    requests = [world.start(number, range(9 * number, 9 * number + 3)) for number in range(5)]
    await world.until(lambda: len(world.decode.incoming) == 5)
    for request in requests:
        world.finish(request)
    await world.settled()
    for request in requests:
        world.check_arrived(request)


def test_short_prompts_of_one_step_travel_in_one_call() -> None:
    async def scenario(world: World) -> None:
        await hand_over_in_one_call(world)
        sent = world.sender.statistics()
        assert (sent.num_sent, sent.num_pieces) == (5, 5)
        assert sent.num_calls == 1

    simulate(scenario)


def test_only_blocks_the_decode_worker_lacks_are_sent() -> None:
    async def scenario(world: World) -> None:
        for number, length in ((1, 12), (2, 14), (3, 12)):
            request = world.start(number, range(length))
            world.finish(request)
            await world.settled()
            world.check_arrived(request)
        # 4 blocks, then 1 more, then none: only the commit
        assert world.sender.statistics().num_bytes == 5 * LAYOUT.block_bytes

    simulate(scenario)


def test_the_reservation_is_asked_for_while_the_prompt_computes() -> None:
    async def scenario(world: World) -> None:
        request = world.start(1, range(9))
        await world.until(lambda: len(world.decode.incoming) == 1)
        await asyncio.sleep(6 * LEASE_S)  # renewed all the time
        world.finish(request)
        await world.settled()
        world.check_arrived(request)

    simulate(scenario)


def test_many_prompts_share_a_channel_and_a_small_decode_worker() -> None:
    async def scenario(world: World) -> None:
        rng = random.Random(5)
        requests = [world.start(n, range(100 * n, 100 * n + rng.randint(1, 20))) for n in range(25)]
        finished: set[RequestKey] = set()

        async def work() -> None:
            """D's rows end one by one, which makes room for others."""
            while len(finished) < len(requests):
                await asyncio.sleep(0.05)
                for key in list(world.decode.scheduler.running)[:1]:
                    world.decode.scheduler.finish(key)
                    finished.add(key)
                world.receiver.on_step()
                world.check_books()

        worker = asyncio.ensure_future(work())
        for request in requests:
            await asyncio.sleep(0.01)
            if world.prefill_cache.num_available < 8:
                await world.until(lambda: world.prefill_cache.num_available >= 8)
            world.finish(request)
        await world.settled()
        await worker
        assert not world.failures
        assert world.sender.statistics().num_sent == 25
        assert world.receiver.statistics().num_epochs == 1

    simulate(scenario, decode_side=Decode(num_blocks=12, max_rows=3))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("fault", ["drop", "corrupt", "lose_reply", "break_channel", "fail_write"])
def test_one_failed_piece_is_survived_by_a_new_epoch(fault: str, number: int) -> None:
    async def scenario(world: World) -> None:
        request = world.start(1, range(20))
        world.finish(request)
        await world.settled()
        world.check_arrived(request)
        assert world.sender.statistics().num_retries == 1
        # A lost answer to the last piece is noticed when the transfer starts over.
        assert world.receiver.statistics().num_epochs == 2

    simulate(scenario, Faults(**{fault: {number}}))


@pytest.mark.parametrize("fault", ["drop", "corrupt", "break_channel", "fail_write"])
def test_two_failed_tries_fail_the_request_closed(fault: str) -> None:
    async def scenario(world: World) -> None:
        request = world.start(1, range(20))
        world.finish(request)
        await world.settled()
        assert world.failures[request.key].retryable
        assert not world.decode.scheduler.running
        assert len(world.decode.incoming) == 0
        assert world.decode.cache.num_cached_idle == 0, "unfinished KV was indexed"
        world.check_books()

    simulate(scenario, Faults(**{fault: {2, 3, 4, 5, 6}}))


def test_a_failed_piece_fails_the_other_prompts_on_the_channel_over_too() -> None:
    async def scenario(world: World) -> None:
        requests = [world.start(n, range(100 * n, 100 * n + 18)) for n in range(3)]
        for request in requests:
            world.finish(request)
        await world.settled()
        for request in requests:
            world.check_arrived(request)

    simulate(scenario, Faults(corrupt={4}), decode_side=Decode(num_blocks=40))


def test_a_rank_that_fails_a_piece_costs_the_others_of_the_call_nothing() -> None:
    async def scenario(world: World) -> None:
        await hand_over_in_one_call(world)
        sent, received = world.sender.statistics(), world.receiver.statistics()
        assert (sent.num_pieces, sent.num_retries) == (6, 1)
        assert (received.num_pieces, received.num_epochs) == (5, 2)
        assert received.failures == {"channel": 1}

    simulate(scenario, Faults(fail_write={1}))


def test_a_piece_that_comes_twice_or_under_an_old_epoch_has_no_effect() -> None:
    async def scenario(world: World) -> None:
        request = world.start(1, range(20))
        world.finish(request)
        await world.settled()
        world.check_arrived(request)
        assert world.peer.num_duplicates_refused == 4
        assert world.sender.statistics().num_retries == 0
        assert world.receiver.statistics().failures == {"duplicate": 4, "epoch": 4}

    simulate(scenario, Faults(duplicate={0, 1, 2, 3}))


@pytest.mark.parametrize("phase", ["find", "reserve", "compute", "transfer"])
def test_a_dead_decode_worker_fails_the_request_at_once(phase: str) -> None:
    faults = Faults(die_at={1}) if phase == "transfer" else Faults()

    async def scenario(world: World) -> None:
        started_s = world.clock.now_s()
        world.peer.is_dead = phase == "find"
        world.decode.scheduler.num_waiting = int(phase == "reserve")
        request = world.start(1, range(20))
        if phase == "reserve":
            await world.until(lambda: world.receiver.statistics().num_waiting == 1)
            world.peer.is_dead = True
        elif phase == "compute":
            await world.until(lambda: len(world.decode.incoming) == 1)
            world.peer.is_dead = True
        world.finish(request)
        await world.settled()
        assert world.failures[request.key].retryable
        assert world.prefill_cache.num_held == 0
        assert world.clock.now_s() - started_s < CONFIG.transfer_deadline_s * 4

    side = Decode(num_blocks=40, max_rows=8)
    simulate(scenario, faults, decode_side=side)


def test_a_hung_decode_worker_is_given_up_in_bounded_time() -> None:
    async def scenario(world: World) -> None:
        started_s = world.clock.now_s()
        world.peer.is_hung = True
        request = world.start(1, range(20))
        world.finish(request)
        await world.settled()
        assert world.failures[request.key].retryable
        assert world.clock.now_s() - started_s < BOUND_S
        world.peer.is_hung = False

    simulate(scenario)


def test_a_silent_prefill_worker_costs_one_lease() -> None:
    async def scenario(world: World) -> None:
        answer = await world.receiver.reserve(asking(1, range(9)))
        assert isinstance(answer, Reservation)
        await world.until(lambda: len(world.decode.incoming) == 0, limit_s=1.3 * LEASE_S)
        assert world.decode.incoming.statistics().num_expired == 1
        world.check_books()

    simulate(scenario)


def test_a_refused_request_is_reported_when_its_prompt_is_computed() -> None:
    async def scenario(world: World) -> None:
        request = world.start(1, range(60))  # 20 blocks of 12
        await asyncio.sleep(1)
        assert not world.failures
        world.finish(request)
        await world.settled()
        assert "refused" in world.failures[request.key].reason

    simulate(scenario, decode_side=Decode(num_blocks=12))


def test_a_full_decode_worker_is_asked_until_the_time_is_up() -> None:
    async def scenario(world: World) -> None:
        world.decode.scheduler.num_waiting = 1
        started_s = world.clock.now_s()
        request = world.start(1, range(9))
        world.finish(request)
        assert world.outgoing.num_unreserved_blocks == 3
        await world.settled()
        waited_s = world.clock.now_s() - started_s
        assert CONFIG.reserve_timeout_s - 1 < waited_s < CONFIG.reserve_timeout_s + 1
        assert world.failures[request.key].retryable
        assert world.sender.statistics().failures == {"reserve": 1}

    simulate(scenario)


def test_a_deadline_that_passes_is_not_retryable() -> None:
    async def scenario(world: World) -> None:
        world.decode.scheduler.num_waiting = 1
        request = world.start(1, range(9), deadline_s=world.clock.now_s() + 3)
        world.finish(request)
        await world.settled()
        expected = FailureRecord(
            key=request.key, reason="the deadline passed", retryable=False, code="timeout"
        )
        assert world.failures[request.key] == expected

    simulate(scenario)


@pytest.mark.parametrize("answer", ["ended", "not renewed", "full"])
def test_a_decode_worker_that_declines_keeps_its_connection(answer: str) -> None:
    """It was looked up anew, and called over a connection more."""

    async def scenario(world: World) -> None:
        links = world.sender._links
        peer = await links.peer("decode-0")
        request = world.start(1, range(9))
        if answer == "full":
            world.decode.scheduler.num_waiting = 1
        else:
            await world.until(lambda: len(world.decode.incoming) == 1)
            world.receiver.cancel(request.key)
        world.peer = FakePeer(world.receiver, world.faults)  # who would be found now
        if answer == "not renewed":
            await asyncio.sleep(LEASE_S)
        world.finish(request)
        await world.settled()
        said = {"ended": "gave up", "not renewed": "no reservation", "full": "no room"}[answer]
        assert said in world.failures[request.key].reason
        assert await links.peer("decode-0") is peer

    simulate(scenario)


class TestWaitingForRoom:
    def test_reservations_are_granted_in_order_as_room_appears(self) -> None:
        async def scenario(world: World) -> None:
            big = await world.receiver.reserve(asking(1, range(30)))
            assert isinstance(big, Reservation)
            granted: list[int] = []

            async def ask(number: int, num_tokens: int) -> None:
                request = asking(number, range(100 * number, 100 * number + num_tokens))
                answer = await world.receiver.reserve(msgspec.structs.replace(request, wait_s=5.0))
                assert isinstance(answer, Reservation)
                granted.append(number)

            tasks = [asyncio.ensure_future(ask(2, 24)), asyncio.ensure_future(ask(3, 3))]
            await asyncio.sleep(1)
            assert granted == [], "a short one overtook a long one"
            world.receiver.cancel(key_of(1))
            await asyncio.gather(*tasks)
            assert granted == [2, 3]

        simulate(scenario, decode_side=Decode(num_blocks=12))

    def test_patience_ends_with_not_now_and_leaves_nothing(self) -> None:
        async def scenario(world: World) -> None:
            world.decode.scheduler.num_waiting = 1
            started_s = world.clock.now_s()
            assert isinstance(await world.receiver.reserve(asking(1, range(3))), NotNow)
            assert 0.9 < world.clock.now_s() - started_s < 1.2
            assert world.receiver.statistics().num_waiting == 0
            world.decode.scheduler.num_waiting = 0
            request = msgspec.structs.replace(asking(1, range(3)), wait_s=0.0)
            assert isinstance(await world.receiver.reserve(request), Reservation)

        simulate(scenario)

    def test_one_that_is_cancelled_in_line_is_refused(self) -> None:
        async def scenario(world: World) -> None:
            world.decode.scheduler.num_waiting = 1
            waiting = asyncio.ensure_future(world.receiver.reserve(asking(1, range(3))))
            await asyncio.sleep(0.1)
            world.receiver.cancel_ingress("ingress-0")
            assert isinstance(await waiting, Refused)
            assert world.receiver.statistics().num_waiting == 0

        simulate(scenario)

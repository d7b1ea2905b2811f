"""Blocks that move while their prompt computes: overlap, faults, preemption, cancellation."""

import asyncio
import random

import pytest

from actors.kv_transfer import sender as sender_module
from actors.kv_transfer.pieces_out import ComputedBlocks
from actors.kv_transfer.sender import HandoffSender
from engine.kv.transfer import HandoffRetracted, OutgoingEvent, OutgoingHandoffs
from engine.request import Request, RequestKey
from tests.actors.kv_transfer.handoff_simulation import World, simulate
from tests.engine.kv.handoff_world import LAYOUT, LEASE_S, Decode
from tests.harness.handoff_network import Faults


async def _reserved(world: World, num_tokens: int = 20, number: int = 1) -> Request:
    request = world.start(number, range(100 * number, 100 * number + num_tokens))
    num_before = len(world.decode.incoming)
    await world.until(lambda: len(world.decode.incoming) > num_before)
    return request


def _num_early(world: World) -> int:
    return world.sender.statistics().num_early_blocks


class TestOverlap:
    def test_full_blocks_move_while_later_chunks_compute(self) -> None:
        async def scenario(world: World) -> None:
            request = await _reserved(world)
            for num_tokens, num_full in ((4, 1), (5, 1), (9, 3), (19, 6)):
                world.compute(request, num_tokens)
                await world.until(lambda num_full=num_full: _num_early(world) == num_full)
                await asyncio.sleep(LEASE_S)  # the partial block stays, however long it takes
                assert _num_early(world) == num_full
                world.check_books()
            world.finish(request)
            await world.settled()
            world.check_arrived(request)
            sent = world.sender.statistics()
            assert sent.num_bytes == 7 * LAYOUT.block_bytes, "a block was sent twice"
            assert (sent.num_retries, world.receiver.statistics().num_epochs) == (0, 1)

        simulate(scenario)

    def test_what_was_computed_before_the_room_was_there_goes_at_once(self) -> None:
        async def scenario(world: World) -> None:
            world.decode.scheduler.num_waiting = 1
            request = world.start(1, range(20))
            world.compute(request, 8)
            await asyncio.sleep(1)
            world.compute(request, 16)
            world.decode.scheduler.num_waiting = 0
            world.receiver.on_step()
            await world.until(lambda: _num_early(world) == 5)
            world.finish(request)
            await world.settled()
            world.check_arrived(request)

        simulate(scenario)

    def test_hits_of_the_prefill_worker_go_before_its_first_step(self) -> None:
        async def scenario(world: World) -> None:
            request = world.build(1, range(20))
            world.hit(request, 9)
            world.outgoing.start(request)
            await world.until(lambda: _num_early(world) == 3)
            world.finish(request)
            await world.settled()
            world.check_arrived(request)

        simulate(scenario)

    def test_blocks_that_the_decode_worker_has_are_skipped_in_every_chunk(self) -> None:
        async def scenario(world: World) -> None:
            first = world.start(1, range(12))
            world.finish(first)
            await world.settled()
            num_before = world.sender.statistics().num_bytes
            second = world.start(2, range(20))
            await world.until(lambda: len(world.decode.incoming) == 1)
            for num_tokens, num_new in ((9, 0), (12, 0), (16, 1)):
                world.compute(second, num_tokens)
                await asyncio.sleep(1)
                assert _num_early(world) == num_new
            world.finish(second)
            await world.settled()
            world.check_arrived(second)
            num_sent = world.sender.statistics().num_bytes - num_before
            assert num_sent == 3 * LAYOUT.block_bytes
            assert world.sender.statistics().num_found_blocks == 4

        simulate(scenario)


class TestFaults:
    @pytest.mark.parametrize("number", range(5))
    @pytest.mark.parametrize("fault", ["drop", "corrupt", "lose_reply", "break_channel"])
    def test_a_failed_piece_starts_the_transfer_over_under_a_new_epoch(
        self, fault: str, number: int
    ) -> None:
        async def scenario(world: World) -> None:
            request = await _reserved(world)
            for num_tokens in (4, 10, 18):
                world.compute(request, num_tokens)
                await asyncio.sleep(5)
            world.finish(request)
            await world.settled()
            world.check_arrived(request)
            assert world.sender.statistics().num_retries == 1
            # After a lost answer to the last piece, the next renewal may say that D has it all.
            is_known = fault == "lose_reply" and number == 4
            assert world.receiver.statistics().num_epochs in ({1, 2} if is_known else {2})

        simulate(scenario, Faults(**{fault: {number}}))

    def test_another_prompts_failure_between_two_chunks_starts_it_over(self) -> None:
        async def scenario(world: World) -> None:
            slow = await _reserved(world, number=1)
            world.compute(slow, 10)
            await world.until(lambda: _num_early(world) == 3)
            world.faults.corrupt.add(world.faults.num_pieces)
            other = world.start(2, range(500, 508))
            world.finish(other)
            await asyncio.sleep(0)  # events of the scheduler reach the sender first
            await world.until(lambda: len(world.sender) == 1)
            world.check_arrived(other)
            world.finish(slow)
            await world.settled()
            world.check_arrived(slow)
            assert world.sender.statistics().num_retries == 1  # the other one's

        simulate(scenario)

    def test_a_second_failure_cancels_at_once_and_is_reported_with_the_prompts_end(self) -> None:
        async def scenario(world: World) -> None:
            request = await _reserved(world)
            world.compute(request, 12)
            await world.until(lambda: len(world.decode.incoming) == 0, limit_s=LEASE_S / 2)
            assert not world.failures, "the first token is due first"
            world.compute(request, 18)
            world.finish(request)
            await world.settled()
            assert world.failures[request.key].retryable
            assert world.decode.cache.num_cached_idle == 0, "unfinished KV was indexed"
            world.check_books()

        simulate(scenario, Faults(corrupt=set(range(10))))

    def test_a_decode_worker_that_dies_between_chunks_is_reported_with_the_prompts_end(
        self,
    ) -> None:
        async def scenario(world: World) -> None:
            request = await _reserved(world)
            world.compute(request, 12)
            await world.until(lambda: _num_early(world) == 4)
            world.peer.is_dead = True
            world.compute(request, 18)
            await asyncio.sleep(LEASE_S)
            assert not world.failures
            world.finish(request)
            await world.settled()
            assert world.failures[request.key].retryable
            assert world.prefill_cache.num_held == 0

        simulate(scenario)


class TestEndings:
    def test_an_end_that_the_decode_side_hears_first_is_no_failure(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scenario(world: World) -> None:
            request = await _reserved(world)
            world.receiver.cancel(request.key)
            world.compute(request, 12)
            await asyncio.sleep(LEASE_S)
            world.sender.cancel(request.key)
            await asyncio.sleep(0)
            world.finish(request)
            await world.settled()
            assert world.sender.statistics().num_ended == 1
            assert not world.failures

        simulate(scenario)
        assert not caplog.records, "users read warnings"

    @pytest.mark.parametrize("who", ["prefill", "decode", "dropped"])
    def test_nothing_is_left_whenever_a_partly_sent_prompt_ends(self, who: str) -> None:
        for moment in range(0, 100, 3):

            async def scenario(world: World, moment: int = moment) -> None:
                request = world.start(1, range(20))
                chunks = iter([4, 9, 15, 17, 19])
                for turn in range(moment):
                    if turn % 20 == 10:
                        world.compute(request, next(chunks))
                    await asyncio.sleep(0.0005)
                match who:
                    case "prefill":
                        world.sender.cancel(request.key)
                        await asyncio.sleep(0.01)
                        world.finish(request)  # the scheduler's abort comes later, or not at all
                    case "decode":
                        world.receiver.cancel(request.key)
                        await asyncio.sleep(0.01)
                        world.finish(request)
                    case _:
                        world.drop(request)
                await world.settled()
                assert world.prefill_cache.num_held == 0
                await world.until(lambda: len(world.decode.incoming) == 0, limit_s=2 * LEASE_S)
                assert request.key not in world.decode.scheduler.running
                world.check_books()
                second = world.start(2, range(200, 220))
                world.finish(second)
                await world.settled()
                world.check_arrived(second)

            simulate(scenario)


def _preempted_at_any_moment(**classes: type) -> None:
    for moment in range(80):

        async def scenario(world: World, moment: int = moment) -> None:
            request = world.start(1, range(20))
            await asyncio.sleep(0.005)
            world.compute(request, 13)
            for _ in range(moment):
                await asyncio.sleep(0.0005)
            world.preempt(request)
            world.check_books()
            is_free = lambda: world.prefill_cache.num_held == 0  # noqa: E731
            await world.until(is_free, limit_s=1.0)
            other = world.prefill_cache.allocate(50)
            assert other is not None
            world.compute(request, 7)  # less than was sent
            world.preempt(request)
            for num_tokens in (5, 16):
                world.compute(request, num_tokens)
                await asyncio.sleep(0.004)
            world.finish(request)
            await world.settled()
            world.check_arrived(request)
            assert world.sender.statistics().num_retries == 0
            world.prefill_cache.release(other)

        simulate(scenario, **classes)  # type: ignore[arg-type]


class TestPreemption:
    def test_what_was_sent_stays_sent_and_the_rest_follows(self) -> None:
        _preempted_at_any_moment()

    def test_blocks_under_a_piece_are_held_until_it_ends(self) -> None:
        async def scenario(world: World) -> None:
            request = await _reserved(world)
            world.faults.drop.add(0)  # the piece is under way until its deadline
            world.compute(request, 6)
            await world.until(lambda: world.faults.num_pieces == 1)
            world.preempt(request)
            await asyncio.sleep(0.1)
            assert world.prefill_cache.num_held == 2
            await world.until(lambda: world.prefill_cache.num_held == 0)
            world.finish(request)
            await world.settled()
            world.check_arrived(request)

        simulate(scenario)


# ---- random histories, and bugs that they must find ----------------------------------------------


def _random_history(seed: int, **classes: type) -> None:
    rng = random.Random(seed)
    kinds = ["drop", "corrupt", "lose_reply", "duplicate", "break_channel", "fail_write"]
    faults = Faults(**{kind: {n for n in range(40) if rng.random() < 0.03} for kind in kinds})

    async def one(world: World, number: int, ended: set[RequestKey]) -> None:
        start = rng.choice([0, 0, 100 * number])
        request = world.start(number, range(start, start + rng.randint(1, 24)))
        num_tokens = 0
        while (num_tokens := num_tokens + rng.randint(1, 7)) < request.num_known_tokens:
            world.compute(request, num_tokens)
            await asyncio.sleep(rng.random() * 0.03)
            match rng.randrange(16):
                case 0:
                    world.preempt(request)
                    num_tokens = 0
                case 1:
                    ended.add(request.key)
                    world.sender.cancel(request.key)
                case 2:
                    ended.add(request.key)
                    world.drop(request)
                    return
        world.finish(request)
        await asyncio.sleep(0)  # events of the scheduler reach the sender first
        await world.until(lambda: request.key not in world.sender._handoffs)
        if request.key in world.decode.scheduler.running:
            world.check_arrived(request)
            world.decode.scheduler.finish(request.key)
            world.receiver.on_step()
        elif request.key not in ended:
            assert world.failures[request.key].retryable
            pieces = faults.drop | faults.corrupt | faults.lose_reply | faults.break_channel
            assert len(pieces) + len(faults.fail_write) > 1

    async def scenario(world: World) -> None:
        ended: set[RequestKey] = set()
        for first in range(0, 9, 3):
            tasks = [asyncio.ensure_future(one(world, first + i, ended)) for i in range(3)]
            await asyncio.gather(*tasks)
            world.check_books()
        await world.settled()
        world.check_books()
        assert world.prefill_cache.num_held == 0

    side = Decode(num_blocks=30, max_rows=4)
    simulate(scenario, faults, decode_side=side, seed=seed, **classes)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [random.randrange(10**6) for _ in range(3)], ids="abc")
def test_a_random_history_ends_well(seed: int) -> None:
    _random_history(seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first_seed",
    [*range(0, 80, 20), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(80, 400, 20))],
)
def test_random_histories_end_well(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        _random_history(seed)


class SendsAPartialBlock(OutgoingHandoffs):
    def advance(self, request: Request) -> None:
        is_more = request.num_indexed_blocks < len(request.block_ids)
        request.num_indexed_blocks += is_more
        super().advance(request)
        request.num_indexed_blocks -= is_more


class FreesWhatIsBeingRead(OutgoingHandoffs):
    def retract(self, key: RequestKey) -> None:
        super().retract(key)
        super().let_go(key)

    def let_go(self, key: RequestKey) -> None:
        pass


class KeepsWhatWasRetracted(OutgoingHandoffs):
    def let_go(self, key: RequestKey) -> None:
        pass


class ReadsRetractedBlocks(HandoffSender):
    def on_event(self, event: OutgoingEvent) -> None:
        if isinstance(event, HandoffRetracted):
            self._let_go(self._handoffs[event.key])
        else:
            super().on_event(event)


class GoesOnUnderAnotherEpoch(ComputedBlocks):
    def go_on_under(self, epoch: int) -> None:
        self._epoch = epoch


class EarlyCommit(ComputedBlocks):
    _num_under_way = property(lambda _: 0, lambda *_: None)


class ForgetsWhatWasSent(ComputedBlocks):
    def retract(self) -> None:
        super().retract()
        self._next = self.num_hit_blocks


def _histories(**classes: type) -> None:
    _preempted_at_any_moment(**classes)
    for seed in range(40):
        _random_history(seed, **classes)


@pytest.mark.parametrize("planted", [SendsAPartialBlock, FreesWhatIsBeingRead])
def test_planted_bugs_of_the_books_are_found(planted: type[OutgoingHandoffs]) -> None:
    with pytest.raises(AssertionError, match="D reads what P did not compute"):
        _histories(outgoing_class=planted)


def test_a_leak_of_retracted_blocks_is_found() -> None:
    with pytest.raises(AssertionError, match="it did not happen"):
        _histories(outgoing_class=KeepsWhatWasRetracted)


def test_a_sender_that_reads_retracted_blocks_is_found() -> None:
    with pytest.raises(AssertionError, match="D reads what P did not compute"):
        _histories(sender_class=ReadsRetractedBlocks)


@pytest.mark.parametrize("planted", [GoesOnUnderAnotherEpoch, ForgetsWhatWasSent, EarlyCommit])
def test_planted_bugs_of_the_progress_are_found(
    planted: type[ComputedBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "ComputedBlocks", planted)
    with pytest.raises(AssertionError, match="num_retries"):
        _single_faults()


def _single_faults() -> None:
    faults = TestFaults()
    _preempted_at_any_moment()
    faults.test_another_prompts_failure_between_two_chunks_starts_it_over()
    for number in range(1, 5):
        faults.test_a_failed_piece_starts_the_transfer_over_under_a_new_epoch("corrupt", number)

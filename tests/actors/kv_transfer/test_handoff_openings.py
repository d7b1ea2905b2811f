"""Channels that open, that do not, and that open for nobody any more.

Sender and receiver together, as in test_handoff_faults.py.
"""

import asyncio

import msgspec
import pytest

from engine.messages import PairRequest
from tests.actors.kv_transfer.handoff_simulation import World, simulate
from tests.engine.kv.handoff_world import SENDER, Decode
from tests.harness.handoff_network import CONFIG, Faults


async def hand_over(world: World) -> float:
    """Hand a prompt over, whole; the seconds that it took."""
    started_s = world.clock.now_s()
    request = world.start(1, range(20))
    world.finish(request)
    await world.settled()
    world.check_arrived(request)
    return world.clock.now_s() - started_s


def test_a_channel_that_does_not_open_is_replaced_by_the_object_store() -> None:
    async def scenario(world: World) -> None:
        await hand_over(world)
        assert world.sender.statistics().num_fallbacks == 1

    simulate(scenario, Faults(refuse_kinds={"gloo_pair"}))


def test_a_sender_that_died_while_its_channel_opened_does_not_hold_up_its_successor() -> None:
    async def scenario(world: World) -> None:
        dead = msgspec.structs.replace(SENDER, incarnation="the one before")
        world.faults.dead_senders.add(dead.incarnation)
        asked = PairRequest(sender=dead, channel="gloo_pair", epoch=7, rendezvous_key="dead/")
        opening = asyncio.ensure_future(world.receiver.open_pair(asked))
        await asyncio.sleep(0.01)
        assert not opening.done()
        assert await hand_over(world) < CONFIG.transfer_deadline_s / 2
        assert (await opening).receiver is None
        sent = world.sender.statistics()
        assert (sent.num_retries, sent.num_fallbacks) == (0, 0)
        for late in (asked, msgspec.structs.replace(asked, sender=SENDER, epoch=1)):
            assert (await world.receiver.open_pair(late)).receiver is None
        assert world.receiver.statistics().num_channels == 1, "what is late ends nothing"

    simulate(scenario)


def test_one_that_waited_for_its_turn_gives_way_to_a_newer_one() -> None:
    """Three calls at once, as after two deaths: only the last one is of use."""

    async def scenario(world: World) -> None:
        senders = [msgspec.structs.replace(SENDER, incarnation=name) for name in "abc"]
        world.faults.dead_senders.update("ab")
        started_s = world.clock.now_s()
        replies = await asyncio.gather(
            *(
                world.receiver.open_pair(
                    PairRequest(sender=s, channel="gloo_pair", epoch=1, rendezvous_key="k/")
                )
                for s in senders
            )
        )
        assert [reply.receiver is not None for reply in replies] == [False, False, True]
        assert world.clock.now_s() - started_s < CONFIG.transfer_deadline_s / 2

    simulate(scenario)


def test_an_own_end_that_does_not_open_is_not_waited_for_by_way_of_the_other() -> None:
    async def scenario(world: World) -> None:
        world.faults.refuse_own_end.add("gloo_pair")
        assert await hand_over(world) < CONFIG.transfer_deadline_s / 2
        assert world.sender.statistics().num_fallbacks == 1

    simulate(scenario)


@pytest.mark.parametrize("phase", ["opening", "transfer"])
def test_a_silent_decode_worker_holds_no_block_of_a_request_that_ended(phase: str) -> None:
    async def scenario(world: World) -> None:
        request = world.start(1, range(20))
        await world.until(lambda: len(world.decode.incoming) == 1)
        if phase == "transfer":
            world.finish(request)
            await world.settled()
            request = world.start(2, range(100, 120))
            await world.until(lambda: len(world.decode.incoming) == 1)
        world.peer.is_hung = True
        world.finish(request)
        await asyncio.sleep(0.1)
        started_s = world.clock.now_s()
        world.sender.cancel(request.key)
        await world.until(lambda: world.prefill_cache.num_held == 0)
        # A piece under way is waited for, an opening is not.
        most_s = CONFIG.transfer_deadline_s * (1.1 if phase == "transfer" else 0.1)
        assert world.clock.now_s() - started_s < most_s
        await world.settled()

    simulate(scenario)


def test_after_repeated_failures_the_configured_channel_rests_for_a_while() -> None:
    async def scenario(world: World) -> None:
        for number in range(3):
            request = world.start(number, range(100 * number, 100 * number + 3))
            world.finish(request)
            await world.settled()
            world.check_arrived(request)
            world.decode.scheduler.finish(request.key)
        assert world.sender.statistics().num_fallbacks == 1
        assert world.receiver.statistics().num_epochs == 4
        await asyncio.sleep(120)
        request = world.start(9, range(3))
        world.finish(request)
        await world.settled()
        assert world.receiver.statistics().num_epochs == 5

    simulate(scenario, Faults(break_channel={0, 2, 4}))


def test_a_decode_worker_that_restarted_is_met_again() -> None:
    async def scenario(world: World) -> None:
        request = world.start(1, range(9))
        world.finish(request)
        await world.settled()
        fresh = World(Decode(num_blocks=40), world.faults)
        fresh.decode.clock = world.clock
        old, world.peer.receiver = world.receiver, fresh.receiver
        await old.close()  # its end hangs up, as that of a dead process does
        fresh.receiver._channels = world.channels
        second = world.start(2, range(200, 212))
        world.finish(second)
        await world.settled()
        assert second.key in fresh.decode.scheduler.running
        await fresh.receiver.close()
        fresh.decode.scheduler.finish(second.key)
        fresh.decode.check()
        await fresh.sender.close()

    simulate(scenario)


def test_a_computed_prompt_goes_while_its_worker_computes_the_next_step() -> None:
    async def scenario(world: World) -> None:
        request = world.start(1, range(20))
        world.finish(request)
        world.prefill_engine.between_steps.clear()
        await world.until(lambda: len(world.decode.scheduler.running) == 1)
        assert len(world.sender) == 1, "its blocks are held to the end of that step"
        assert world.outgoing.num_unreserved_blocks == len(request.block_ids)
        world.prefill_engine.between_steps.set()
        await world.settled()
        world.check_arrived(request)
        assert world.outgoing.num_unreserved_blocks == 0

    simulate(scenario)

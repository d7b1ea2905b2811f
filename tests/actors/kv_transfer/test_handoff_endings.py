"""Handoffs that are cancelled, shut down or hit by random faults: nothing is ever left."""

import asyncio
import random

import pytest

from tests.actors.kv_transfer.handoff_simulation import World, simulate
from tests.engine.kv.handoff_world import LEASE_S, Decode
from tests.harness.handoff_network import Faults


class TestCancelling:
    """A cancellation may come at any moment: between any two turns of the event loop."""

    @pytest.mark.parametrize("who", ["prefill", "decode", "both", "dropped"])
    def test_nothing_is_left_whenever_it_comes(self, who: str) -> None:
        outcomes = set()
        for moment in range(90):

            async def scenario(world: World, moment: int = moment) -> None:
                request = world.start(1, range(20))
                if who != "dropped":
                    world.finish(request)
                for _ in range(moment):
                    await asyncio.sleep(0.0005)
                if who == "dropped":
                    world.outgoing.drop(request.key)
                if who in ("prefill", "both"):
                    world.sender.cancel(request.key)
                if who in ("decode", "both"):
                    world.receiver.cancel(request.key)
                await world.settled()
                await asyncio.sleep(0.01)
                assert world.prefill_cache.num_held == 0
                await world.until(lambda: len(world.decode.incoming) == 0, limit_s=2 * LEASE_S)
                world.check_books()
                if request.key in world.decode.scheduler.running:
                    world.check_arrived(request)
                    outcomes.add("arrived")
                else:
                    outcomes.add("failed" if world.failures else "ended")
                # The channel is as good as before.
                assert world.receiver.statistics().num_epochs <= 1
                second = world.start(2, range(200, 220))
                world.finish(second)
                await world.settled()
                world.check_arrived(second)
                assert world.sender.statistics().num_retries == 0

            simulate(scenario)
        expected = {
            "prefill": {"arrived", "ended"},
            "decode": {"failed", "ended"},
            "both": {"ended"},
            "dropped": {"ended"},
        }
        assert outcomes == expected[who]

    @pytest.mark.parametrize("moment", range(0, 60, 3))
    def test_either_side_may_shut_down_at_any_time(self, moment: int) -> None:
        async def scenario(world: World) -> None:
            requests = [world.start(n, range(100 * n, 100 * n + 20)) for n in range(3)]
            for request in requests:
                world.finish(request)
            for _ in range(moment):
                await asyncio.sleep(0.0005)
            if moment % 2:
                await world.receiver.close()
                await world.settled()
                for request in requests:
                    arrived = request.key in world.decode.scheduler.running
                    assert arrived != (request.key in world.failures)

        simulate(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_exactly_once_under_random_faults(seed: int) -> None:
    rng = random.Random(seed)
    kinds = ["drop", "corrupt", "lose_reply", "duplicate", "break_channel", "fail_write"]
    faults = Faults(
        **{kind: {n for n in range(60) if rng.random() < 0.06} for kind in kinds},
        die_at={rng.randrange(60)} if rng.random() < 0.2 else set(),
    )

    async def scenario(world: World) -> None:
        requests, cancelled = [], set()
        for number in range(10):
            start = rng.choice([0, 0, 100 * number])
            request = world.start(number, range(start, start + rng.randint(1, 24)))
            requests.append(request)
            await asyncio.sleep(rng.random() * 0.1)
            world.finish(request)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.1)
                cancelled.add(request.key)
                world.sender.cancel(request.key)
            for key in list(world.decode.scheduler.running):
                if rng.random() < 0.3:
                    world.decode.scheduler.finish(key)
            world.receiver.on_step()
            world.check_books()
        arrived = set()

        def step() -> bool:
            for key in list(world.decode.scheduler.running):
                arrived.add(key)
                world.decode.scheduler.finish(key)
                world.receiver.on_step()
            return len(world.sender) == 0

        await world.until(step)
        world.check_books()
        for request in requests:
            if request.key not in cancelled and not world.peer.is_dead:
                known = world.decode.incoming.is_committed(request.key)
                assert known != (request.key in world.failures), f"seed {seed}: {request.key}"

    simulate(scenario, faults, decode_side=Decode(num_blocks=20, max_rows=4), seed=seed)

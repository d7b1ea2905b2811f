"""Placement knows what a machine's arena holds, whoever of its workers stored it, and at what cost.

The allocator's router on virtual time, and workers' ends of real arenas: two machines of two.
"""

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest

from actors.routing.router import Router
from actors.routing.worker_links import WorkerLink, WorkerLinks
from actors.rpc.handles import WorkerHandle
from actors.worker.cache_reports import CacheReports, TierReports
from configs.load import load_config
from engine.clock import ManualClock
from engine.cost_model import PRIOR
from engine.kv.cache import BlockCache
from engine.kv.host.arena import HostArena
from engine.kv.host.published import PublishedBlocks
from engine.kv.host.tier import StoredLevel
from engine.messages import Assign, CacheReport, LoadReport, RouteRequest
from engine.routing.tier_hits import NOTHING_STORED, StoredHit

BLOCK_SIZE = 16
NUM_TOKENS = 1600
CHAIN = [bytes([i, 0] * 8) for i in range(100)]
FAST_S = 1e-6
IDLE = LoadReport(queued_tokens=0, num_waiting=0, num_running=0, num_free_blocks=99, num_blocks=99)


class _Worker:
    """A worker's device cache and its end of the machine's arena, as they report themselves."""

    def __init__(self, name: str, arena: HostArena, incarnation: str) -> None:
        self.link = WorkerLink(name=name, role="unified", load=IDLE)
        self.link.handle = cast("WorkerHandle", object())  # connected
        self.cache = BlockCache(200, enable_prefix_caching=True, protected_share=0.5)
        self.arena = arena
        self.block_s = FAST_S
        self._published = PublishedBlocks(arena)
        self._reports = CacheReports(incarnation)
        self._tiers = TierReports(incarnation)
        self.num_told = 0  # changes, of the arena
        self.is_off = False  # an error has switched its tier off

    def report(self, router: Router) -> None:
        after = router.last_sequence(self.link.name)
        if self.is_off:
            router.learn(self.link.name, CacheReport(blocks=None, tiers=[]))
            return
        level = StoredLevel(self.arena.place, self._published, self.block_s, 1e-4)
        tier = self._tiers.of(level, router.tiers_after(self.link.name))
        if tier.blocks is not None:
            self.num_told += len(tier.blocks.added) + len(tier.blocks.removed)
        blocks = self._reports.since(self.cache, after)
        router.learn(self.link.name, CacheReport(blocks=blocks, tiers=[tier]))

    def compute(self, hashes: list[bytes]) -> None:
        held = self.cache.allocate(len(hashes))
        assert held is not None
        for i, block_id in enumerate(held):
            self.cache.index(block_id, hashes[i], hashes[i - 1] if i else None)
        self.cache.release(held)

    def store(self, hashes: list[bytes]) -> None:
        slots = self.arena.take(len(hashes))
        assert self.arena.publish(slots, hashes, [0] * len(slots)) == len(hashes)


class _Links:
    def __init__(self) -> None:
        self.workers: dict[str, _Worker] = {}

    def links(self) -> list[WorkerLink]:
        return [worker.link for worker in self.workers.values()]


class World:
    """Workers a0 and a1 on one machine, b0 and b1 on another, and the router that places."""

    def __init__(self, stack: ExitStack) -> None:
        self._links = _Links()
        self._stack = stack
        self._number = 0
        self._tag = f"test-place-{os.getpid()}-{random.randrange(2**32)}"
        self.clock = ManualClock(100.0)
        overrides: dict[str, object] = {"workers.unified": 4, "workers.prefill": 0}
        config = load_config(None, {**overrides, "workers.decode": 0})
        self.router = Router(config, cast("WorkerLinks", self._links), self.clock)
        for name in ("a0", "a1", "b0", "b1"):
            self.start(name)
        self.router.update(dict.fromkeys(self.workers, "unified"))
        self.router.learn("a0", CacheReport(costs=_fitted()))

    @property
    def workers(self) -> dict[str, _Worker]:
        return self._links.workers

    def start(self, name: str) -> None:
        self._number += 1
        arena = HostArena(
            f"{self._tag}-{name[0]}", num_bytes=2**22, block_bytes=4096, fingerprint=bytes(16)
        )
        self._stack.callback(arena.close)
        self.workers[name] = _Worker(name, arena, str(self._number))

    def lose(self, name: str) -> None:
        self.workers.pop(name).arena.close()
        self.router.forget(name)

    def report(self) -> None:
        for _ in range(2):  # a tier that nobody tells of is learnt of first
            for worker in self.workers.values():
                worker.report(self.router)

    def place(self, hashes: list[bytes] = CHAIN) -> Assign:
        self.clock.advance(60.0)  # nothing of what was placed before is left
        for worker in self.workers.values():
            worker.link.load_at_s = self.clock.now_s()
        asked = RouteRequest(num_prompt_tokens=NUM_TOKENS, block_hashes=hashes)
        placement = self.router.route(asked)
        assert isinstance(placement, Assign)
        return placement

    def stored(self) -> dict[str, StoredHit]:
        """As the router has it."""
        return self.router._tiers.hits(CHAIN, {})


def _fitted() -> Any:
    from msgspec.structs import replace

    return replace(PRIOR, num_samples=100)


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


def test_a_prompt_goes_to_the_machine_whose_arena_has_it(world: World) -> None:
    assert world.place().prefill_worker == "a0", "ties go to the first name"
    world.workers["b1"].store(CHAIN[:80])
    world.report()
    placement = world.place()
    assert placement.prefill_worker == "b0", "any worker of the machine can load it"
    rest_s = PRIOR.seconds(NUM_TOKENS - 1280, 1280)
    assert placement.work_s == pytest.approx(rest_s + 1e-4 + 80 * FAST_S)
    assert NUM_TOKENS - 1280 <= placement.num_new_tokens < NUM_TOKENS - 1280 + 40


def test_a_host_hit_is_worth_less_than_a_device_hit_by_its_load(world: World) -> None:
    world.workers["b0"].store(CHAIN[:80])
    world.workers["b0"].block_s = world.workers["b1"].block_s = 1e-4
    world.workers["a1"].compute(CHAIN[:80])
    world.report()
    assert world.place().prefill_worker == "a1"
    world.workers["a1"].link.load = LoadReport(
        queued_tokens=100, num_waiting=1, num_running=1, num_free_blocks=9, num_blocks=9,
        queued_s=0.0101,
    )  # fmt: skip
    assert world.place().prefill_worker == "b0", "waiting takes longer than loading"


def test_what_loads_slower_than_it_computes_draws_nobody(world: World) -> None:
    world.workers["b0"].store(CHAIN)
    world.workers["b0"].block_s = world.workers["b1"].block_s = 1.0
    world.report()
    placement = world.place()
    assert (placement.prefill_worker, placement.num_new_tokens) == ("a0", NUM_TOKENS)
    assert placement.work_s == PRIOR.seconds(NUM_TOKENS, 0)


def test_the_device_s_hit_goes_on_in_the_arena(world: World) -> None:
    world.workers["a1"].compute(CHAIN[:30])
    world.workers["a0"].store(CHAIN[30:60])
    world.report()
    placement = world.place()
    assert placement.prefill_worker == "a1"
    expected_s = PRIOR.seconds(NUM_TOKENS - 960, 960) + 1e-4 + 30 * FAST_S
    assert placement.work_s == pytest.approx(expected_s)
    assert world.router._tiers.hits(CHAIN, {}) == {}, "the arena lacks the beginning"


def test_one_worker_tells_of_an_arena_and_another_when_it_is_lost(world: World) -> None:
    world.workers["a0"].store(CHAIN[:50])
    world.report()
    assert [world.workers[name].num_told for name in ("a0", "a1")] == [50, 0]
    world.lose("a0")
    assert world.stored()["a1"].num_tokens == 800, "the machine still has it"
    world.workers["a1"].store(CHAIN[50:70])
    world.report()
    assert world.stored()["a1"].num_tokens == 1120
    world.start("a0")
    world.report()
    assert world.stored()["a0"].num_tokens == 1120
    assert world.workers["a0"].num_told == 0
    for name in ("a0", "a1"):
        world.lose(name)
    world.report()
    assert set(world.stored()) == set()
    assert {worker.num_stored_blocks for worker in world.router.status().workers} == {0}


def test_who_has_switched_its_tier_off_gets_nobody_for_it_and_another_tells(world: World) -> None:
    world.workers["a0"].store(CHAIN[:50])
    world.report()
    assert world.workers["a0"].num_told == 50
    world.workers["a0"].is_off = True
    world.workers["a1"].store(CHAIN[50:70])
    world.report()
    assert set(world.stored()) == {"a1"}
    assert world.stored()["a1"].num_tokens == 1120


@pytest.mark.parametrize("seed", range(4))
def test_the_router_knows_the_arenas_whatever_comes_and_goes(world: World, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        name = rng.choice(sorted(world.workers))
        worker = world.workers[name]
        match rng.randrange(6):
            case 0 | 1:
                fresh = [h for h in rng.sample(CHAIN, 8) if not worker.arena.num_found([h])]
                worker.store(fresh)
            case 2 if found := worker.arena.find(CHAIN[rng.randrange(90) :]):
                worker.arena.drop(rng.choice(found))
            case 3 if rng.random() < 0.2 and len(world.workers) > 2:
                world.lose(name)
                world.start(name)
            case _:
                worker.report(world.router)
    world.report()
    for name, worker in world.workers.items():
        stored = world.stored().get(name, NOTHING_STORED)
        assert stored.num_tokens == BLOCK_SIZE * worker.arena.num_found(CHAIN)
        status = {load.worker: load for load in world.router.status().workers}
        assert status[name].num_stored_blocks == worker.arena.num_ready

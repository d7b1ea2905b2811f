"""What the allocator knows: reports, what it placed since, cached prefixes, pools, its death."""

import random
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.routing.router import Router
from actors.routing.worker_links import WorkerLink, WorkerLinks
from actors.rpc.handles import WorkerHandle
from configs.load import load_config
from engine.clock import ManualClock
from engine.cost_model import PRIOR
from engine.kv.layout import KvLayout
from engine.messages import (
    Assign,
    BlockChanges,
    CacheReport,
    Hold,
    HostTierLoad,
    LapsStatus,
    LoadReport,
    Role,
    RouteRequest,
    ShortLoad,
    WorkerIdentity,
    WorkerLimits,
    WorkerStatus,
    decode,
    encode,
)
from engine.routing.placement import COUNTED_AFTER_S, DONE_AFTER_S, SPARE_REQUESTS

ROLES: dict[str, Role] = {
    **{f"prefill-{i}": "prefill" for i in range(4)},
    "decode-0": "decode",
}
POOLS: Mapping[str, object] = {
    "workers.unified": 0,
    "workers.prefill": 4,
    "workers.decode": 1,
    "laps.enable_laps_alloc": True,
}
IDLE = LoadReport(queued_tokens=0, num_waiting=0, num_running=0, num_free_blocks=99, num_blocks=99)
CHAIN = [bytes([i]) * 16 for i in range(100)]


class _Links:
    """Stands in for the streams of the workers: a test says what they report."""

    def __init__(self, clock: ManualClock, roles: Mapping[str, Role]) -> None:
        self._clock = clock
        self._links = {name: WorkerLink(name=name, role=role) for name, role in roles.items()}
        for name in roles:
            self.report(name)

    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    def report(self, worker: str, **given: Any) -> None:
        link = self._links[worker]
        link.handle = cast("WorkerHandle", object())  # connected
        link.load = msgspec.structs.replace(IDLE, **given)
        link.load_at_s = self._clock.now_s()

    def lose(self, worker: str) -> None:
        self._links[worker].handle = self._links[worker].load = None


class _World:
    """One allocator and its workers."""

    def __init__(
        self, overrides: Mapping[str, object] = POOLS, roles: Mapping[str, Role] = ROLES
    ) -> None:
        self.clock = ManualClock(100.0)
        self.roles = roles
        self.links = _Links(self.clock, roles)
        self.config = load_config(None, overrides)
        self.restart_allocator()

    def restart_allocator(self) -> None:
        self.router = Router(self.config, cast("WorkerLinks", self.links), self.clock)
        self.router.update(self.roles)

    def route(self, num_tokens: int, hashes: list[bytes] | None = None) -> Assign:
        request = RouteRequest(num_prompt_tokens=num_tokens, block_hashes=hashes or [])
        placement = self.router.route(request)
        assert isinstance(placement, Assign), placement
        return placement

    def pool(self, name: str) -> list[str]:
        return self.router.status().pools["short" if name == "short" else "long"]


def _blocks(sequence: int, hashes: list[bytes], *, is_resync: bool = True) -> CacheReport:
    changes = BlockChanges(
        incarnation="one", sequence=sequence, is_resync=is_resync, added=hashes, removed=[]
    )
    return CacheReport(blocks=changes)


def test_prompts_that_arrive_together_are_spread_over_their_pool() -> None:
    world = _World()
    short, long = world.pool("short"), world.pool("long")
    assert (len(short), len(long)) == (2, 2)
    assert sorted(world.route(50).prefill_worker for _ in range(4)) == sorted(2 * short)
    assert sorted(world.route(900).prefill_worker for _ in range(4)) == sorted(2 * long)


def test_prompts_that_wait_together_share_what_a_step_costs_anyway() -> None:
    alone: dict[str, object] = {"workers.unified": 0, "workers.prefill": 1, "workers.decode": 1}
    world = _World(alone, {"prefill-0": "prefill", "decode-0": "decode"})
    first, second = world.route(100), world.route(100)
    assert 0 < first.shared_s < first.work_s == first.ttft_s
    assert second.ttft_s == pytest.approx(2 * first.work_s - first.shared_s)


def test_a_worker_that_drains_gets_what_no_other_can_take() -> None:
    roles: dict[str, Role] = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    world = _World({"workers.unified": 0, "workers.prefill": 1, "workers.decode": 2}, roles)
    world.links.report("decode-0", is_draining=True)
    assert {world.route(100).decode_worker for _ in range(4)} == {"decode-1"}
    world.links.lose("decode-1")
    assert world.route(100).decode_worker == "decode-0"


def test_what_was_placed_counts_until_a_report_must_have_seen_it() -> None:
    world = _World()
    worker = world.route(20_000).prefill_worker  # busy for 0.3 s

    def queued_tokens() -> int:
        loads = {load.worker: load for load in world.router.status().workers}
        return loads[worker].queued_tokens

    assert queued_tokens() == 20_000
    world.clock.advance(DONE_AFTER_S / 2)
    world.links.report(worker, queued_tokens=30)
    assert queued_tokens() == 20_030, "this report may be older than the prompt"
    world.clock.advance(COUNTED_AFTER_S)
    world.links.report(worker, queued_tokens=800, num_waiting=1)
    assert queued_tokens() == 800


def test_a_worker_that_must_be_done_is_not_busy_until_its_next_report() -> None:
    """Two turns in quick succession would go to two workers, and the second find nothing cached."""
    world = _World()
    first = world.route(50)
    assert world.route(50).prefill_worker != first.prefill_worker
    world.clock.advance(2 * first.ttft_s + DONE_AFTER_S)
    assert world.route(50).prefill_worker == first.prefill_worker


def test_only_what_must_be_computed_counts_as_queued() -> None:
    world = _World()
    (worker,) = world.pool("short")[:1]
    world.router.learn(worker, _blocks(0, CHAIN))
    assign = world.route(1601, CHAIN)
    assert (assign.prefill_worker, assign.num_new_tokens) == (worker, 1)
    loads = {load.worker: load for load in world.router.status().workers}
    assert loads[worker].queued_tokens == 1


def test_a_lost_worker_has_lost_its_cache() -> None:
    world = _World()
    worker = world.pool("short")[1]
    world.router.learn(worker, _blocks(0, CHAIN))
    assert world.router.last_sequence(worker) == 0
    world.router.forget(worker)
    assert world.router.last_sequence(worker) is None
    assert world.route(1601, CHAIN).prefill_worker in world.pool("long")


def test_a_gap_in_the_reports_asks_for_all() -> None:
    world = _World()
    world.router.learn("prefill-0", _blocks(0, CHAIN))
    world.router.learn("prefill-0", _blocks(2, [], is_resync=False))
    assert world.router.last_sequence("prefill-0") is None


def test_fitted_costs_replace_the_first_guess_and_better_known_ones_those() -> None:
    world = _World()
    guess = world.route(900).work_s
    assert world.router.status().step_costs is None
    fitted = msgspec.structs.replace(PRIOR, num_samples=64)
    better = msgspec.structs.replace(PRIOR, floor_s=1.0, num_samples=65)
    for costs, expected in [
        (fitted, fitted.seconds(900, 0)),
        (better, better.seconds(900, 0)),
        (fitted, better.seconds(900, 0)),
        (None, better.seconds(900, 0)),
    ]:
        world.router.learn("prefill-1", CacheReport(costs=costs))
        assert world.route(900).work_s == expected != guess
    assert world.router.status().step_costs == better


def test_seconds_that_a_worker_predicts_are_taken_over_its_tokens() -> None:
    world = _World({**POOLS, "laps.enable_laps_alloc": False})
    for name in ROLES:
        world.links.report(name, queued_tokens=10, queued_s=3.0)
    world.links.report("prefill-2", queued_tokens=9999, queued_s=0.5)
    assert world.route(50).prefill_worker == "prefill-2"
    world.links.report("prefill-3", queued_tokens=9999, queued_s=5.0,
                       short=ShortLoad(num_waiting=0, queued_tokens=0))  # fmt: skip
    assert world.route(50).prefill_worker == "prefill-3", "short ones pass its long queue"
    assert world.route(900).prefill_worker == "prefill-2"


def test_a_class_without_live_workers_uses_the_other_pool() -> None:
    world = _World()
    for name in world.pool("short"):
        world.links.lose(name)
    assert world.route(50).prefill_worker in world.pool("long")
    for name in world.pool("long"):
        world.links.lose(name)
    assert isinstance(world.router.route(RouteRequest(num_prompt_tokens=50)), Hold)


def test_the_status_shows_what_a_worker_reports_of_its_host_tier() -> None:
    world = _World()
    first, second, *_ = world.roles
    numbers = dict.fromkeys(HostTierLoad.__struct_fields__, 3) | {"disk": None}
    tier = msgspec.convert(numbers, HostTierLoad)
    world.links.report(first, host_tier=tier)
    status = decode(encode(world.router.status()), LapsStatus)
    shown = {load.worker: load.host_tier for load in status.workers}
    assert (shown[first], shown[second]) == (tier, None)


def test_a_lasting_imbalance_moves_a_worker_and_the_status_says_why() -> None:
    world = _World()
    short = world.pool("short")
    for _ in range(2):
        for name in short:
            world.links.report(name, queued_tokens=9000, queued_s=2.0, num_waiting=20)
        world.router.update(world.roles)
        world.clock.advance(5.0)
    world.router.update(world.roles)
    status = decode(encode(world.router.status()), LapsStatus)
    assert status.enabled
    assert (status.threshold, status.policy) == (256, "pressure")
    assert {pool: len(names) for pool, names in status.pools.items()} == {"short": 3, "long": 1}
    assert status.pending == {"short": 40, "long": 0}
    (move,) = status.moves
    assert move.pool == "short"
    assert move.worker in status.pools["short"]
    assert "short 2" in move.reason
    assert {load.pool for load in status.workers if load.worker in short} == {"short"}


def test_placing_looks_at_the_pools_as_well() -> None:
    world = _World()
    for _ in range(3):
        for name in world.pool("short"):
            world.links.report(name, queued_tokens=9000, queued_s=2.0)
        world.route(900)
        world.clock.advance(5.0)
    assert len(world.router.status().moves) == 1


@pytest.mark.parametrize("switch", [{}, {"workers.prefill": 2, "workers.decode": 1}], ids=str)
def test_without_pools_nothing_waits_in_the_wrong_place(switch: dict[str, object]) -> None:
    world = _World({**POOLS, "laps.enable_laps_alloc": False} | switch)
    status = world.router.status()
    assert not status.enabled
    assert status.pools == {"short": [], "long": []}
    assert {world.route(900).prefill_worker for _ in range(4)} == set(ROLES) - {"decode-0"}


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_a_new_allocator_decides_as_the_old_one_from_the_same_reports(seed: int) -> None:
    """After its death: with reports of loads, of all cached blocks, and of fitted costs."""
    rng = random.Random(seed)
    world = _World()
    costs = CacheReport(costs=msgspec.structs.replace(PRIOR, num_samples=64))
    for _ in range(rng.randint(0, 20)):
        world.route(rng.choice([50, 900, 3000]))
    world.clock.advance(1.0)  # what was placed is in the reports, or done
    cached = {name: CHAIN[: rng.randint(0, 100)] for name in ROLES if name != "decode-0"}
    loads = {name: rng.choice([0, 700, 9000]) for name in ROLES}
    for name in ROLES:
        world.links.report(name, queued_tokens=loads[name])
    prompts = [(rng.randint(1, 1700), CHAIN[: rng.randint(0, 100)]) for _ in range(10)]
    prompts = [(num_tokens, hashes[: num_tokens // 16]) for num_tokens, hashes in prompts]

    def decide() -> list[Assign]:
        world.router.learn("prefill-0", costs)
        for name, hashes in cached.items():
            world.router.learn(name, _blocks(7, hashes))
        return [world.route(num_tokens, hashes) for num_tokens, hashes in prompts]

    before = decide()
    world.restart_allocator()
    assert decide() == before


@pytest.mark.parametrize(("reported_ms", "chosen"), [(20.0, "unified-0"), (250.0, "unified-1")])
def test_a_short_prompt_waits_for_a_step_as_long_as_workers_report(
    reported_ms: float, chosen: str
) -> None:
    """unified-0 computes long prompts, unified-1 has 100 ms of short ones."""
    roles: dict[str, Role] = {"unified-0": "unified", "unified-1": "unified"}
    world = _World({"workers.unified": 2, "laps.queue": "laps", "laps.max_step_ms": "auto"}, roles)
    short = ShortLoad(num_waiting=0, queued_tokens=0, queued_s=0.0)
    world.links.report("unified-0", queued_tokens=90_000, queued_s=9.0, short=short)
    short = ShortLoad(num_waiting=1, queued_tokens=900, queued_s=0.1)
    world.links.report("unified-1", queued_tokens=900, queued_s=0.1, short=short)
    world.router.note_workers({"unified-1": WorkerStatus(identity=None, state="starting")})
    world.router.note_workers(
        {"unified-0": _ready("unified-0", reported_ms), "decode-0": _ready("decode-0", 900.0)}
    )
    assert world.route(50).prefill_worker == chosen


def test_a_step_time_of_the_configuration_is_not_replaced_by_a_reported_one() -> None:
    world = _World({"workers.unified": 2, "laps.queue": "laps", "laps.max_step_ms": 20.0}, {})
    before = world.router._rules
    world.router.note_workers({"unified-0": _ready("unified-0", 250.0)})
    assert world.router._rules == before
    assert before.laps.max_step_ms == 20.0


def test_kv_stays_on_its_machine_while_the_decode_worker_there_has_room() -> None:
    roles: dict[str, Role] = {
        "prefill-0": "prefill",
        "prefill-1": "prefill",
        "decode-0": "decode",
        "decode-1": "decode",
    }
    world = _World({"workers.unified": 0, "workers.prefill": 2, "workers.decode": 2}, roles)
    hosts = {"prefill-0": "a", "decode-1": "a", "prefill-1": "b", "decode-0": "b"}
    world.router.note_workers({n: _ready(n, 50.0, host) for n, host in hosts.items()})
    for name in ("decode-0", "decode-1"):
        world.links.report(name, num_free_blocks=500)  # each prompt takes 57
    placed = [world.route(900) for _ in range(4)]
    assert [(p.prefill_worker, p.decode_worker) for p in placed] == 2 * [
        ("prefill-0", "decode-1"),
        ("prefill-1", "decode-0"),
    ]
    world.links.report("decode-1", num_free_blocks=2)
    world.links.report("prefill-1", queued_tokens=9000)
    crowded = world.route(900)
    assert (crowded.prefill_worker, crowded.decode_worker) == ("prefill-0", "decode-0")


def test_a_conversation_goes_back_to_the_decode_worker_that_has_its_kv() -> None:
    roles: dict[str, Role] = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    world = _World({"workers.unified": 0, "workers.prefill": 1, "workers.decode": 2}, roles)
    for name in ("decode-0", "decode-1"):
        world.links.report(name, num_free_blocks=500)  # each prompt takes 44
    assert world.route(700, CHAIN[:43]).decode_worker == "decode-0"
    world.router.learn("decode-1", _blocks(0, CHAIN[:40]))
    assert world.route(700, CHAIN[:43]).decode_worker == "decode-1"
    assert world.route(700, CHAIN[50:93]).decode_worker == "decode-0", "it knows nothing of this"
    world.links.report("decode-1", num_running=9, num_free_blocks=500)
    assert world.route(700, CHAIN[:43]).decode_worker == "decode-0"
    world.router.forget("decode-1")
    world.links.report("decode-1", num_free_blocks=500)
    assert world.route(700, CHAIN[:43]).decode_worker == "decode-1", "two run on the other"


def _near_and_far(num_blocks: int) -> _World:
    """A prefill worker, and two decode workers with these blocks, one of them on its machine."""
    roles: dict[str, Role] = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    world = _World({"workers.unified": 0, "workers.prefill": 1, "workers.decode": 2}, roles)
    hosts = {"prefill-0": "a", "decode-0": "a", "decode-1": "b"}
    world.router.note_workers({n: _ready(n, 50.0, host) for n, host in hosts.items()})
    for name in ("decode-0", "decode-1"):
        world.links.report(name, num_free_blocks=num_blocks, num_blocks=num_blocks)
    return world


def test_prompts_that_arrive_together_do_not_wait_for_blocks_that_another_has() -> None:
    world = _near_and_far(num_blocks=200)  # a prompt of 2,000 tokens takes 126
    assert [world.route(2000).decode_worker for _ in range(2)] == ["decode-0", "decode-1"]


def test_a_decode_worker_is_not_idle_while_prompts_for_it_wait_elsewhere() -> None:
    """It hears of a prompt when its first chunk is computed, and counts it after the last."""
    world = _near_and_far(num_blocks=9000)
    world.links.report("prefill-0", queued_tokens=20_000, queued_s=30.0)
    chosen = []
    for _ in range(10):
        chosen.append(world.route(2000).decode_worker)
        world.clock.advance(2 * COUNTED_AFTER_S)
        for name in ("decode-0", "decode-1"):
            world.links.report(name, num_free_blocks=9000, num_blocks=9000)
        world.links.report("prefill-0", queued_tokens=20_000, queued_s=30.0)
    assert chosen.count("decode-0") - chosen.count("decode-1") <= SPARE_REQUESTS + 1


def test_a_prompt_that_has_arrived_counts_as_its_worker_reports() -> None:
    world = _near_and_far(num_blocks=200)
    first = world.route(2000)
    world.clock.advance(first.ttft_s + 2 * COUNTED_AFTER_S)
    for name in ("decode-0", "decode-1"):  # it has ended there
        world.links.report(name, num_free_blocks=200, num_blocks=200)
    assert first.decode_worker == world.route(2000).decode_worker == "decode-0"


def _ready(name: str, max_step_ms: float, host: str = "") -> WorkerStatus:
    identity = WorkerIdentity(
        name=name,
        incarnation="one",
        role=cast("Role", name.partition("-")[0]),
        model="m",
        layout=KvLayout.with_heads(
            num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"
        ),
        max_model_len=99,
        pid=1,
        host=host,
        limits=WorkerLimits(max_step_ms=max_step_ms, max_queued_tokens=1000),
    )
    return WorkerStatus(identity=identity, state="ready")

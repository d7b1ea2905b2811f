"""What is loaded from the host tier, who waits for it, and that nobody waits long or in vain."""

import random

import pytest

from configs.schema import LapsConfig
from engine.cost_model import PRIOR
from engine.kv.cache import BlockCache, BlockTerms, check_blocks
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.host_loads import HostLoads
from engine.scheduling.scheduler import DEFAULT_LAPS, Scheduler
from tests.engine.scheduling.fake_host_tier import FakeHostTier
from tests.engine.scheduling.world import MAX_MODEL_LEN, World
from tests.harness.fakes import EMPTY, VOCAB_SIZE, FakeExecutor
from tests.harness.seeds import fresh_random

BLOCK_SIZE = 16
NUM_BLOCKS = 300
AMPLE = BlockTerms(num_spare_blocks=0)


class Loads:
    """The loads of requests of 2,000 tokens, of which the tier has the first `num_stored` blocks"""

    def __init__(
        self, num_stored: int = 100, block_s: float = 1e-6, max_step_tokens: int = 8192
    ) -> None:
        self.cache = BlockCache(NUM_BLOCKS, enable_prefix_caching=True, protected_share=0.5)
        self.tier = FakeHostTier(block_s=block_s)
        self.tier.executor = FakeExecutor(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_rows=4,
            max_num_batched_tokens=64,
            max_model_len=4096,
        )
        self.hashes = [bytes([i % 256, i // 256] * 8) for i in range(200)]
        for block_hash in self.hashes[:num_stored]:
            self.tier.blocks[block_hash] = [EMPTY] * BLOCK_SIZE
        self.loads = HostLoads(self.tier, self.cache, BLOCK_SIZE, max_step_tokens)

    def request(self, name: str, num_tokens: int = 2000) -> Request:
        request = Request(
            key=RequestKey(name),
            ingress_id="ingress",
            spec=RequestSpec(params=SamplingParams(max_tokens=1)),
            tokens=[1] * num_tokens,
            num_prompt_tokens=num_tokens,
            arrival_s=0.0,
            block_hashes=self.hashes[: num_tokens // BLOCK_SIZE],
        )
        self.loads.arrived(request, PRIOR)
        return request

    def is_awaited(self, request: Request, now_s: float, terms: BlockTerms | None = AMPLE) -> bool:
        self.loads.begin(request, lambda: terms, now_s, PRIOR)
        return self.loads.is_awaited(request.key, now_s)

    def land(self, num_blocks: int) -> list[int]:
        self.tier.num_to_land = num_blocks
        unknown = self.loads.settle()
        self.tier.num_to_land = 0
        return unknown

    def check(self) -> None:
        check_blocks(self.cache, self.loads.owners())


def test_a_request_waits_until_its_blocks_have_landed_and_are_found_on_the_device() -> None:
    world = Loads()
    request = world.request("a")
    assert world.is_awaited(request, 0.0)
    world.check()
    assert world.land(60) == []
    assert world.is_awaited(request, 0.001)
    assert len(world.cache.match(world.hashes)) == 60
    assert world.land(40) == []
    assert not world.is_awaited(request, 0.002)
    assert len(world.cache.match(world.hashes)) == 100
    assert world.cache.num_available == NUM_BLOCKS, "what has landed can be evicted again"
    world.loads.forget(request.key, 0.002)
    counts = world.loads.statistics()
    assert (counts.num_asked_blocks, counts.num_hit_blocks) == (124, 100)
    assert (counts.num_waits, counts.num_given_up, counts.num_wasted_blocks) == (1, 0, 0)
    assert counts.wait_s == pytest.approx(0.002)
    assert not world.loads.is_active
    world.check()


@pytest.mark.parametrize("num_landed", [0, 1, 30, 99])
def test_a_load_that_stalls_costs_a_tenth_of_computing_everything(num_landed: int) -> None:
    """First token = waiting + computing the rest, at most 1.1 times computing all of it."""
    world = Loads()
    request = world.request("a")
    assert world.is_awaited(request, 5.0)
    world.land(num_landed)
    all_s = PRIOR.seconds(2000, 0)
    rest_s = PRIOR.seconds(2000 - 16 * num_landed, 16 * num_landed)
    limit_s = 1.1 * all_s - rest_s
    assert world.loads.due_s == pytest.approx(5.0 + limit_s)
    assert world.is_awaited(request, 5.0 + 0.999 * limit_s)
    due_s = world.loads.due_s
    assert due_s is not None
    assert not world.is_awaited(request, due_s), "or whoever steps at that time steps in vain"
    assert not world.is_awaited(request, 5.0), "it has given up for good"
    assert world.loads.due_s is None
    assert world.loads.statistics().num_given_up == 1
    assert len(world.land(0)) == 100 - num_landed, "what did not land is zeroed"
    assert len(world.cache.match(world.hashes)) == num_landed
    assert not world.loads.is_active


def test_a_prompt_of_several_steps_waits_no_longer_for_a_load_that_stalls() -> None:
    """Each step has a floor: what has landed saves less than one large step would have taken."""
    world = Loads(max_step_tokens=900)
    request = world.request("a")
    assert world.is_awaited(request, 5.0)
    world.land(10)
    rest_s = [PRIOR.seconds(n, cached) for n, cached in ((900, 160), (900, 1060), (40, 1960))]
    all_s = [PRIOR.seconds(n, cached) for n, cached in ((900, 0), (900, 900), (200, 1800))]
    assert world.loads.due_s == pytest.approx(5.0 + 1.1 * sum(all_s) - sum(rest_s), rel=1e-9)
    world.loads.forget(request.key)
    world.cache.release(world.land(0))


def test_what_it_takes_to_make_room_is_no_waiting() -> None:
    """Who computes everything waits for the same evictions."""
    world = Loads()
    world.tier.start_s = 0.25
    request = world.request("a")
    assert world.is_awaited(request, 5.0)
    assert world.loads.due_s == pytest.approx(5.25 + 0.1 * PRIOR.seconds(2000, 0))


def test_what_the_device_has_counts_where_a_load_stalls() -> None:
    """Attention to it is part of what computing the rest takes."""
    world = Loads()
    held = world.cache.allocate(40)
    assert held is not None
    for i, block_id in enumerate(held):
        world.cache.index(block_id, world.hashes[i], world.hashes[i - 1] if i else None)
    request = world.request("a")
    assert world.is_awaited(request, 5.0)
    world.land(20)
    all_s = PRIOR.seconds(2000 - 640, 640)
    limit_s = 1.1 * all_s - PRIOR.seconds(2000 - 960, 960)
    assert world.loads.due_s == pytest.approx(5.0 + limit_s, rel=1e-9)
    world.loads.forget(request.key)
    world.cache.release(world.land(0))
    world.cache.release(held)


def test_what_is_sooner_computed_is_not_loaded() -> None:
    slow = Loads(block_s=0.01)
    assert not slow.is_awaited(slow.request("a"), 0.0)
    assert slow.loads.statistics().num_unworthy_blocks == 100
    assert not slow.tier.loads
    assert slow.loads.num_uncached(slow.request("b"), 2000) == 2000, "it counts as computed"
    few = Loads(num_stored=0)
    assert not few.is_awaited(few.request("a"), 0.0)
    assert few.loads.statistics().num_asked_blocks == 124


@pytest.mark.parametrize(
    "terms",
    [None, BlockTerms(num_spare_blocks=176), BlockTerms(num_spare_blocks=0, max_new_blocks=124)],
)
def test_nothing_is_loaded_for_a_request_that_could_not_enter(terms: BlockTerms | None) -> None:
    world = Loads()
    request = world.request("a")
    assert not world.is_awaited(request, 0.0, terms)
    assert not world.tier.loads
    assert world.tier.num_finds == 0, "it asks at every step, and finding all takes long"
    enough = BlockTerms(num_spare_blocks=175, max_new_blocks=125)
    assert world.is_awaited(request, 0.0, enough), "it is asked again"
    assert world.loads.statistics().num_asked_blocks == 124


def test_requests_of_one_prefix_share_a_load() -> None:
    world = Loads()
    one, two, other = world.request("a"), world.request("b"), world.request("c", 20)
    assert all(world.is_awaited(request, 0.0) for request in (one, two, other))
    assert len(world.tier.loads) == 1
    world.loads.forget(one.key)
    world.land(100)
    assert not world.is_awaited(two, 0.001)
    assert world.loads.statistics().num_wasted_blocks == 0
    world.check()


def test_a_load_for_nobody_is_cancelled_and_its_blocks_are_zeroed() -> None:
    world = Loads()
    request = world.request("a")
    assert world.is_awaited(request, 0.0)
    world.loads.forget(request.key)
    unknown = world.land(10)
    assert len(unknown) == 90
    assert not world.loads.is_active
    assert world.loads.statistics().num_wasted_blocks == 10
    world.cache.release(unknown)
    world.check()


def test_who_asks_again_for_what_was_cancelled_gets_all_of_it() -> None:
    """As a client does that hangs up and sends its request again."""
    world = Loads()
    first, second = world.request("a"), world.request("b")
    assert world.is_awaited(first, 0.0)
    world.loads.forget(first.key)
    assert world.is_awaited(second, 0.001)
    assert world.land(10) == []
    assert world.is_awaited(second, 0.002)
    assert world.land(90) == []
    assert len(world.cache.match(world.hashes)) == 100
    assert world.loads.statistics().num_wasted_blocks == 0
    world.check()


def test_stored_tokens_count_as_what_loading_them_is_worth() -> None:
    world = Loads(block_s=1e-4)
    request = world.request("a")
    num_uncached = world.loads.num_uncached(request, 2000)
    share = 0.01 / (PRIOR.seconds(2000, 0) - PRIOR.seconds(400, 1600))
    assert num_uncached == 400 + round(1600 * share)
    assert 400 < num_uncached < 1000
    assert world.loads.num_uncached(request, 300) == 300, "the device has more by now"
    world.loads.forget(request.key)
    assert world.loads.num_uncached(request, 2000) == 2000


# ---- through the scheduler ----------------------------------------------------------------------


def _play(world: World, rng: random.Random) -> None:
    """Growing prompts of a few families, so that prefixes are evicted and come back."""
    families = [[rng.randrange(1, VOCAB_SIZE) for _ in range(24)] for _ in range(4)]
    for _ in range(120):
        match rng.randrange(8):
            case 0 | 1 | 2:
                length = rng.randrange(1, 25)
                prompt = [*rng.choice(families)[:length], rng.randrange(1, VOCAB_SIZE)]
                params = SamplingParams(max_tokens=rng.randrange(1, 12))
                patience_s = rng.choice([None, None, None, 0.5])
                moves = rng.random() < 0.2
                world.add(prompt, params, rng.choice([1, 1, 2]), 0, patience_s, moves)
            case 3 if world.live("scheduler"):
                rng.choice([world.abort, world.migrate])(rng.randrange(8))
            case 4 if world.live("outbox"):
                rng.choice([world.reserve, world.give_up, world.receive])(rng.randrange(8))
            case 5:
                world.squeeze(rng.choice([0, 0, 3]))
            case 6 if world.live("scheduler") and rng.random() < 0.2:
                world.poison(rng.randrange(8), rng.randrange(6))
            case _:
                world.wait(rng.choice([0.0, 0.001, 0.1]))
        for _ in range(rng.randrange(4)):
            world.step()
            world.check()
    world.drain()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_gets_its_tokens_from_blocks_that_come_and_go(
    overlap: bool, seed: int
) -> None:
    rng = random.Random(seed)
    tier = FakeHostTier(rng=rng, max_blocks=rng.choice([6, 40]))
    laps = DEFAULT_LAPS if seed % 2 else LapsConfig(queue="laps", laps_length_threshold=8)
    world = World(Scheduler, overlap=overlap, laps=laps, host_tier=tier)
    _play(world, rng)
    assert tier.num_loaded > 0
    assert MAX_MODEL_LEN == 40


@pytest.mark.parametrize("overlap", [False, True])
def test_what_an_answer_has_filled_is_stored_when_it_ends_and_is_what_it_should_be(
    overlap: bool,
) -> None:
    """`FakeHostTier.save` compares it with what else was stored under its name."""
    tier = FakeHostTier(rng=fresh_random(), stores="answers")
    world = World(Scheduler, overlap=overlap, host_tier=tier)
    _play(world, fresh_random())
    assert tier.blocks


@pytest.mark.parametrize("is_aborted", [False, True])
def test_only_whole_blocks_of_the_answer_are_stored(is_aborted: bool) -> None:
    """Of 6 prompt tokens and 12 more, the last of which is not computed: blocks 1 to 3 of 4."""
    tier = FakeHostTier(stores="answers")
    world = World(Scheduler, overlap=False, host_tier=tier)
    params = SamplingParams(max_tokens=20 if is_aborted else 12, ignore_eos=True)
    world.add([1, 2, 3, 4, 5, 6], params, 1, 0, None, moves=False)
    if is_aborted:
        for _ in range(12):
            assert not tier.blocks
            world.step()
        world.abort(0)
        world.check()
        assert world.cache.num_held == 3, "until they are copied"
        world.drain()
    else:
        world.drain()
    assert len(tier.blocks) == 3

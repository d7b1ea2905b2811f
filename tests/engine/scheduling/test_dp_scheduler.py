"""Schedulers of several ranks as one: the same tokens, the books of every rank, one loop."""

import random
from collections.abc import Sequence

import pytest

from configs.schema import LapsConfig
from engine.clock import ManualClock
from engine.core import EngineCore
from engine.errors import CapacityError
from engine.kv.cache import check_blocks
from engine.kv.hashes import RequestHasher
from engine.kv.rank_caches import RankCaches
from engine.messages import FailureRecord, TokenRecord
from engine.plan import StepPlan, StepResult
from engine.rank_choice import RankLoad, choose_rank
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.contracts import StepOutput
from engine.scheduling.dp_scheduler import DpScheduler
from engine.scheduling.drafting import Drafting
from engine.scheduling.scheduler import DEFAULT_LAPS
from engine.speculation.drafter import FixedDrafts
from tests.engine.scheduling.in_flight import check_blocks_in_flight
from tests.engine.scheduling.replica import (
    BLOCK_SIZE,
    FIVE_TOKENS,
    HASH_KEY,
    Replica,
    params_of,
    prompt_of,
)
from tests.engine.scheduling.running_rows import check_running
from tests.harness.drafters import Guesser
from tests.harness.fakes import VOCAB_SIZE, FakePendingStep, expected_output


class _Steps:
    """A step of all devices."""

    def __init__(self, plan: StepPlan, steps: list[FakePendingStep | None]) -> None:
        self._plan, self._steps = plan, steps

    @property
    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        nothing = StepResult(step=-1, tokens=[], logprobs=[], is_finite=[])
        results = [nothing if step is None else step.wait() for step in self._steps]
        return StepResult(
            step=self._plan.step, tokens=[], logprobs=[], is_finite=[], of_ranks=results
        )


class Gang:
    """Devices of integers, each with a scheduler; `step` checks the books of all."""

    def __init__(
        self,
        num_ranks: int,
        *,
        overlap: bool = False,
        laps: LapsConfig = DEFAULT_LAPS,
        draftings: Sequence[Drafting] | None = None,
    ) -> None:
        """draftings: one a rank; None = no rank drafts."""
        self.clock = ManualClock()
        self.replicas = [
            Replica(num_blocks=20, overlap=overlap, laps=laps, drafting=drafting)
            for drafting in draftings or [None] * num_ranks
        ]
        self.caches = RankCaches([replica.cache for replica in self.replicas])
        hasher = RequestHasher(HASH_KEY, model="m", dtype="float32", block_size=BLOCK_SIZE)
        schedulers = [replica.scheduler for replica in self.replicas]
        self.scheduler = DpScheduler(schedulers, self.caches, hasher, BLOCK_SIZE)
        self.core = EngineCore(self.scheduler, self, self.clock, overlap=overlap)
        self.records: dict[RequestKey, list[TokenRecord]] = {}
        self.failures: list[FailureRecord] = []
        self.plans: list[StepPlan] = []

    def add(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams = FIVE_TOKENS,
        *,
        rank: int | None = None,
    ) -> Request:
        """rank: None = the one that is chosen."""
        request = Request(
            spec=RequestSpec(params=params),
            key=RequestKey(name),
            ingress_id="ingress-a",
            tokens=list(prompt),
            num_prompt_tokens=len(prompt),
            arrival_s=self.clock.now_s(),
        )
        scheduler = self.scheduler if rank is None else self.scheduler.of_rank[rank]
        scheduler.add(request)
        self.records[request.key] = []
        self.clock.advance(0.001)
        return request

    def rank_of(self, request: Request) -> int:
        [rank] = [
            rank
            for rank, scheduler in enumerate(self.scheduler.of_rank)
            if request in scheduler._all_requests()
        ]
        return rank

    def step(self) -> StepOutput:
        output = self.core.step()
        for _, record in output.tokens:
            self.records[record.key].append(record)
        self.failures += [failure for _, failure in output.failures]
        check_blocks(self.caches, self.scheduler.owners())
        for replica in self.replicas:
            check_blocks_in_flight(replica.cache, replica.executor)
            check_running(replica.scheduler)
        return output

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def output(self, request: Request) -> list[int]:
        return [record.token_id for record in self.records[request.key]]

    def launch(self, plan: StepPlan) -> _Steps:
        self.plans.append(plan)
        steps = [
            replica.executor.launch(own) if own.step >= 0 else None
            for replica, own in zip(self.replicas, plan.of_ranks, strict=True)
        ]
        return _Steps(plan, steps)


def _expected(request: Request, params: SamplingParams) -> list[int]:
    prompt = request.tokens[: request.num_prompt_tokens]
    return expected_output(prompt, params, max_model_len=64)[0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_requests_get_their_tokens_from_some_rank(num_ranks: int, overlap: bool) -> None:
    """Shared prefixes, more requests than rows and blocks, some that are aborted."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    gang = Gang(num_ranks, overlap=overlap)
    live: dict[RequestKey, tuple[Request, SamplingParams]] = {}
    for number in range(60):
        prompt = prompt_of(rng.choice((1, 12, 12, 30)), rng.randrange(3))
        params = params_of(rng.randrange(1, 33))
        request = gang.add(f"{number}", prompt, params)
        live[request.key] = request, params
        for _ in range(rng.randrange(2)):
            gang.step()
        if rng.random() < 0.1:
            gone = rng.choice(list(live))
            gang.scheduler.abort(gone)
            del live[gone]
    gang.run()
    for request, params in live.values():
        assert gang.output(request) == _expected(request, params)
    counts = gang.scheduler.statistics()
    assert counts.num_preemptions > 0
    assert counts.num_cached_tokens > 0
    assert all(s.statistics().num_steps > 10 for s in gang.scheduler.of_rank)
    assert gang.caches.num_held == 0
    assert gang.scheduler.num_free_rows == 4 * num_ranks


def test_a_rank_that_has_nothing_to_do_has_an_empty_plan() -> None:
    gang = Gang(2)
    request = gang.add("a", prompt_of(5))
    plan = gang.scheduler.plan(0.0)
    assert plan is not None
    assert [len(own.rows) for own in plan.of_ranks] == [1, 0]
    assert not plan.rows
    assert gang.rank_of(request) == 0


def test_requests_are_spread_over_the_ranks() -> None:
    gang = Gang(2)
    ranks = [gang.rank_of(gang.add(str(i), prompt_of(8, i))) for i in range(6)]
    assert ranks == [0, 1, 0, 1, 0, 1]


def test_a_full_queue_is_told_of() -> None:
    gang = Gang(2)
    for number in range(2 * 64):
        gang.add(str(number), prompt_of(4, number))
    with pytest.raises(CapacityError):
        gang.add("one more", prompt_of(4))


def test_a_request_goes_to_a_rank_whose_queue_has_room() -> None:
    """Though it would go to the other, where fewer tokens come before it."""
    gang = Gang(2)
    for number in range(64):
        gang.add(f"short {number}", prompt_of(1, number), rank=0)
    for number in range(63):
        gang.add(f"long {number}", prompt_of(40, number), rank=1)
    assert gang.rank_of(gang.add("one more", prompt_of(4))) == 1


def test_a_failure_is_of_its_rank_alone() -> None:
    gang = Gang(2)
    bad, good = gang.add("a", prompt_of(5), params_of(9, seed=1)), gang.add("b", prompt_of(6))
    gang.replicas[0].executor.poison(seed=1, position=6)
    gang.run()
    assert [failure.key for failure in gang.failures] == [bad.key]
    assert gang.output(good) == _expected(good, FIVE_TOKENS)


def _drafting() -> Drafting:
    guesser = Guesser(lambda request: _expected(request, request.params), vocab_size=VOCAB_SIZE)
    return Drafting(guesser, FixedDrafts(2), holds=True)


@pytest.mark.parametrize("is_long", [False, True], ids=["short gap", "long gap"])
def test_rows_that_wait_for_their_drafts_meet_those_of_other_ranks(is_long: bool) -> None:
    """Though they begin a step apart; where the host's gap costs more, they go on alternately."""
    draftings = [_drafting(), _drafting(), _drafting()]
    for drafting in draftings if is_long else ():
        for _ in range(60):
            drafting.count_idle(100.0)
    gang = Gang(3, overlap=True, draftings=draftings)
    params = params_of(24, ignore_eos=True)
    requests = [gang.add("a", prompt_of(5), params, rank=0)]
    gang.step()
    requests += [gang.add(f"{rank}", prompt_of(5, rank), params, rank=rank) for rank in (1, 2)]
    gang.run()
    for request in requests:
        assert gang.output(request) == _expected(request, params)
    after_prompts = [plan for plan in gang.plans if sum(p.num_tokens for p in plan.of_ranks)][2:]
    met = [sum(own.num_tokens > 0 for own in plan.of_ranks) for plan in after_prompts]
    assert (met.count(3) == 0) if is_long else (met.count(3) > len(met) // 2), met


def test_what_an_idle_rank_once_waited_for_drafts_is_of_no_later_step() -> None:
    draftings = [_drafting(), _drafting()]
    gang = Gang(2, overlap=True, draftings=draftings)
    draftings[1].waited_s = 9e-3
    gang.add("a", prompt_of(5), rank=0)
    gang.step()
    assert gang.core.scheduler.waited_s == 0.0


def test_short_prompts_of_an_idle_gang_wait_for_others() -> None:
    laps = LapsConfig(queue="laps", window="fixed", fixed_window_s=1.0, fixed_window_requests=4)
    gang = Gang(2, laps=laps)
    gang.add("a", prompt_of(5))
    gang.step()
    assert gang.core.waits_for_others
    assert 0.9 < gang.core.defer_s() < 1.0
    gang.clock.advance(1.0)
    gang.step()
    assert not gang.core.waits_for_others


def _load(num_requests: int, num_tokens_before: int, *, has_room: bool = True) -> RankLoad:
    return RankLoad(
        num_requests=num_requests,
        is_full=False,
        num_tokens_before=num_tokens_before,
        has_room=has_room,
        num_available_blocks=9,
    )


def test_a_request_goes_where_fewest_tokens_come_before_it() -> None:
    assert choose_rank([_load(3, 900), _load(3, 100)]) == 1
    assert choose_rank([_load(3, 100), _load(2, 100)]) == 1
    assert choose_rank([_load(3, 100, has_room=False), _load(3, 900)]) == 1


def test_a_prefix_does_not_draw_all_requests_to_its_rank() -> None:
    assert choose_rank([_load(1, 10), _load(0, 5000)]) == 0
    assert choose_rank([_load(2, 10), _load(0, 5000)]) == 1
    assert choose_rank([_load(51, 10), _load(40, 5000)]) == 0
    assert choose_rank([_load(52, 10), _load(40, 5000)]) == 1

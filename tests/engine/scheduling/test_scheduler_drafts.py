"""Requests with drafts: the same answers in fewer steps, and no slot, block or row out of place."""

import random
from collections.abc import Hashable, Sequence
from itertools import pairwise

import pytest

from configs.resolved import ResolvedLaps
from configs.schema import LapsConfig
from engine.cost_model import StepCosts
from engine.plan import StepResult
from engine.request import Constraint, ConstraintKind, Request
from engine.scheduling.drafting import NO_DRAFTS, Drafting, PlannedDrafts
from engine.speculation.controller import SpeculationController, StepDrafts, StepOffer
from engine.speculation.drafter import FixedDrafts, RequestNgrams
from tests.engine.scheduling.replica import BLOCK_SIZE, Replica, params_of, prompt_of
from tests.harness.drafters import DeviceGuesser, EveryOtherStep, Guesser
from tests.harness.fakes import VOCAB_SIZE, expected_output


def _answer_of(request: Request) -> list[int]:
    prompt = request.tokens[: request.num_prompt_tokens]
    return expected_output(prompt, request.params, max_model_len=64)[0]


def _guesser(**given: float) -> Guesser:
    return Guesser(_answer_of, vocab_size=VOCAB_SIZE, **given)


def _drafting(guesser: Guesser, num_drafts: int, *, holds: bool = False) -> Drafting:
    return Drafting(guesser, FixedDrafts(num_drafts), holds=holds)


def _num_tokens(replica: Replica) -> int:
    return sum(plan.num_tokens for plan in replica.executor.plans)


class _Asked(FixedDrafts):
    """Notes who it is asked about."""

    def __init__(self) -> None:
        super().__init__(2, max_temperature=0.7)
        self.keys = set[Hashable]()

    def max_drafts(self, keys: Sequence[Hashable]) -> list[int]:
        self.keys.update(keys)
        return super().max_drafts(keys)


def test_nobody_asks_about_a_request_that_may_have_no_drafts() -> None:
    policy = _Asked()
    replica = Replica(drafting=Drafting(_guesser(), policy, holds=False))
    hot = replica.add("hot", prompt_of(5), params=params_of(6, temperature=1.0))
    cold = replica.add("cold", prompt_of(5, 1), params=params_of(6, temperature=0.0))
    replica.run(50)
    assert policy.keys == {cold.key}
    assert replica.output(hot) == replica.expected(hot)


def test_a_prompt_is_indexed_when_its_first_token_comes_and_not_while_a_step_is_planned() -> None:
    drafter = RequestNgrams()
    replica = Replica(drafting=Drafting(drafter, FixedDrafts(2), holds=True), overlap=True)
    request = replica.add("a", prompt_of(5), params=params_of(20, temperature=0.0))
    while request.num_output_tokens == 0:
        replica.step()
    assert drafter.ngrams.statistics()["num_request_tokens"] == request.num_known_tokens
    replica.run(50)
    assert drafter.ngrams.statistics()["num_requests"] == 0


def test_no_text_is_indexed_of_a_request_that_may_have_no_drafts() -> None:
    """A constraint holds it all the same."""
    drafter = RequestNgrams()
    replica = Replica(drafting=Drafting(drafter, FixedDrafts(2), holds=True), overlap=True)
    params = params_of(20, constraint=Constraint(ConstraintKind.REGEX, "a*"))
    request = replica.add("a", prompt_of(5), max_drafts=0, params=params)
    while request.num_output_tokens < 3:
        replica.step()
    assert drafter.ngrams.statistics()["num_requests"] == 0


WAYS = ["in turn", "overlapped", "planned ahead"]


def _check_mix(mix: int, way: str) -> Replica:
    """Random requests, errors, memory and aborts; every answer is the oracle's."""
    draw = random.Random(mix)
    overlap = way != "in turn"
    guesser_class = DeviceGuesser if way == "planned ahead" else Guesser
    guesser = guesser_class(
        _answer_of,
        vocab_size=VOCAB_SIZE,
        error_rate=draw.choice([0.0, 0.2, 0.5, 1.0]),
        silence_rate=draw.choice([0.0, 0.4]),
        pass_s=draw.choice([0.0, 1e-3]),
        seed=mix,
    )
    replica = Replica(
        num_blocks=draw.choice([16, 18, 24, 64]),
        max_rows=3,
        max_num_batched_tokens=draw.choice([5, 9, 16]),
        enable_prefix_caching=draw.random() < 0.7,
        overlap=overlap,
        drafting=_drafting(guesser, draw.randint(1, 7), holds=overlap),
        num_hashed_ahead=mix % 2,
    )
    requests = []
    for i in range(14):
        params = params_of(draw.randint(1, 20), seed=mix * 100 + i, ignore_eos=draw.random() < 0.3)
        prompt = prompt_of(draw.randint(1, 40), draw.randint(0, 2))
        requests.append(replica.add(str(i), prompt, params=params))
        for _ in range(draw.randint(0, 3)):
            replica.step()
    aborted = draw.sample(requests, 2)
    for request in aborted:
        replica.scheduler.abort(request.key)
        replica.step()
    replica.run(900)
    replica.check_idle()
    assert replica.scheduler.drafting.kept_keys() == set()
    for request in requests:
        expected = replica.expected(request)
        found = replica.output(request)
        assert found == (expected[: len(found)] if request in aborted else expected)
    return replica


@pytest.mark.parametrize("way", WAYS)
def test_no_draft_changes_an_answer(way: str) -> None:
    replicas = [_check_mix(mix, way) for mix in range(8)]
    plans = [plan for replica in replicas for plan in replica.executor.plans]
    assert any(plan.ahead for plan in plans) == (way == "planned ahead")
    counts = [replica.scheduler.statistics() for replica in replicas]
    drafts = [replica.scheduler.drafting.counts for replica in replicas]
    assert sum(count.num_preemptions for count in counts) > 5
    assert sum(count.num_cached_tokens for count in counts) > 20
    assert sum(count.num_drafted for count in drafts) > 250
    assert sum(count.num_accepted for count in drafts) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block", range(2))
def test_no_draft_changes_an_answer_in_many_mixes(block: int, way: str) -> None:
    for mix in range(1000 * (block + 1), 1000 * (block + 1) + 100):
        _check_mix(mix, way)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_drafts_that_are_right_save_steps(num_drafts: int, overlap: bool) -> None:
    drafting = _drafting(_guesser(), num_drafts, holds=overlap)
    replica = Replica(overlap=overlap, drafting=drafting)
    request = replica.add("a", prompt_of(5), params=params_of(25))
    replica.run()
    assert replica.output(request) == replica.expected(request)
    assert len(replica.executor.plans) == 1 + -(-24 // (num_drafts + 1))
    counts = replica.scheduler.drafting.counts
    assert counts.num_accepted == counts.num_drafted == sum(counts.accepted_at)
    assert _num_tokens(replica) == 5 + 24  # every token once, the last one never
    replica.check_idle()


def test_drafts_that_are_wrong_cost_no_step() -> None:
    replica = Replica(drafting=_drafting(_guesser(error_rate=1.0), 4))
    request = replica.add("a", prompt_of(5), params=params_of(20))
    num_steps = replica.run()
    assert replica.output(request) == replica.expected(request)
    assert num_steps <= 20
    replica.check_idle()


def test_a_block_is_found_again_only_with_the_tokens_that_were_kept() -> None:
    """The prefix of an answer is a hit for a prompt that goes on from it, guesses are not."""
    replica = Replica(drafting=_drafting(_guesser(error_rate=0.5, seed=3), 6))
    first = replica.add("a", prompt_of(6), params=params_of(21))
    replica.run()
    prompt = first.tokens[:-1]
    second = replica.add("b", prompt, params=params_of(4, seed=5))
    replica.run()
    assert second.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert replica.output(second) == replica.expected(second)
    assert replica.scheduler.drafting.counts.num_accepted > 0
    replica.check_idle()


def test_drafts_take_no_block_that_a_row_may_need_and_preempt_nobody() -> None:
    plain = Replica(num_blocks=16, max_rows=4, max_model_len=32)
    drafted = Replica(
        num_blocks=16, max_rows=4, max_model_len=32, drafting=_drafting(_guesser(error_rate=1.0), 7)
    )
    for replica in (plain, drafted):
        for i in range(4):
            replica.add(str(i), prompt_of(7, i), params=params_of(9, seed=i))
        replica.run()
        replica.check_idle()
    assert drafted.scheduler.drafting.counts.num_drafted > 0
    count, expected = (r.scheduler.statistics().num_preemptions for r in (drafted, plain))
    assert count <= expected


def test_prompts_go_first_and_drafts_take_what_is_left_of_the_step() -> None:
    replica = Replica(max_num_batched_tokens=8, drafting=_drafting(_guesser(), 7))
    replica.add("a", prompt_of(3), params=params_of(30))
    replica.step()
    replica.add("b", prompt_of(13, 1), params=params_of(2))
    replica.step()
    assert replica.last_plan.num_new_tokens == [1, 7]
    replica.step()
    assert (replica.last_plan.num_new_tokens, replica.last_plan.drafts[0][0]) == ([2, 6], 0)
    replica.step()
    assert replica.last_plan.num_tokens <= 8
    replica.run()
    replica.check_idle()


class _Offered(FixedDrafts):
    """Notes what it is offered, and is asked only where there is time, as the controller is."""

    keeps_limits = True

    def __init__(self, num_drafts: int) -> None:
        super().__init__(num_drafts)
        self.offers = list[StepOffer]()

    def plan(self, offer: StepOffer, costs: StepCosts) -> StepDrafts:
        self.offers.append(offer)
        return super().plan(offer, costs)


def test_drafts_beside_a_prompt_are_offered_its_graph_and_the_time_that_is_left() -> None:
    policy = _Offered(7)
    drafting = Drafting(_guesser(), policy, holds=False, graph_tokens=(2, 4, 8))
    given = {"graph_token_sizes": (8, 16), "laps": ResolvedLaps(queue="laps")}
    replica = Replica(max_num_batched_tokens=32, drafting=drafting, **given)
    replica.add("a", prompt_of(3), params=params_of(30))
    for _ in range(2):
        replica.step()
    replica.add("b", prompt_of(9, 1), params=params_of(2))
    replica.step()
    alone, beside = policy.offers
    assert (alone.graph_tokens, alone.max_draft_tokens) == ((2, 4, 8), 8 - 1)  # fits a graph
    assert (beside.graph_tokens, beside.max_draft_tokens) == ((8, 16), 4 - 2)  # of four lines
    assert (alone.max_step_s, beside.max_step_s) == (None, 0.05)
    replica.add("c", prompt_of(18, 2), params=params_of(2))
    replica.step()
    assert policy.offers[-1].max_draft_tokens == 32 - 2 - 18  # no graph holds such a step
    replica.run()
    replica.check_idle()


@pytest.mark.parametrize("on_device", [False, True])
def test_rows_decode_in_every_step_of_prompts_that_leave_no_time_for_drafts(
    on_device: bool,
) -> None:
    """Nobody is held for drafts that it will not get."""
    costs = StepCosts(
        floor_s=1e-3,
        slopes_s=(1e-4,) * 8,
        attended_s=0.0,
        history_s=0.0,
        decode_row_s=0.0,
        decode_key_s=0.0,
        num_samples=1,
    )
    drafting = Drafting(RequestNgrams(on_device=on_device), SpeculationController(), holds=True)
    replica = Replica(
        num_blocks=4000,
        max_rows=8,
        max_num_batched_tokens=512,
        max_model_len=12000,
        overlap=True,
        drafting=drafting,
        laps=LapsConfig(queue="laps", laps_length_threshold=10, max_step_ms=11.05),
    )
    replica.scheduler._prompts.model.costs = costs
    params = params_of(400, temperature=0.0)
    rows = [replica.add(f"d{i}", prompt_of(8, i), params=params) for i in range(4)]
    for _ in range(6):
        replica.step()
    before = sum(len(row.tokens) for row in rows)
    replica.add("long", prompt_of(9000, 9), params=params_of(1))  # in chunks of 100 tokens
    for _ in range(80):
        replica.step()
        assert replica.executor.plans[-1].num_tokens > 90
    given = sum(len(row.tokens) for row in rows) - before
    assert given > 0.9 * 4 * 80


def test_nobody_is_asked_for_drafts_beside_a_chunk_that_takes_all_the_time() -> None:
    policy, guesser = _Offered(7), _guesser()
    drafting = Drafting(guesser, policy, holds=False)
    laps = ResolvedLaps(queue="laps")  # 50 ms a step
    sizes = {"max_num_batched_tokens": 4096, "num_blocks": 2048, "max_model_len": 8192}
    replica = Replica(**sizes, drafting=drafting, laps=laps)
    replica.add("a", prompt_of(3), params=params_of(40))
    for _ in range(2):
        replica.step()
    replica.add("b", prompt_of(5000, 1), params=params_of(2))  # in chunks
    num_proposals = guesser.num_proposals
    for _ in range(2):
        replica.step()
        assert policy.offers[-1].work.num_prompt_tokens > 1000
        assert guesser.num_proposals == num_proposals
        assert policy.offers[-1].max_drafts == [0]


@pytest.mark.parametrize("short_share", [0.0, 0.3])
def test_a_short_prompt_that_waits_is_offered_as_waiting_whatever_is_reserved(
    short_share: float,
) -> None:
    policy = _Offered(3)
    drafting = Drafting(_guesser(), policy, holds=False)
    replica = Replica(max_rows=1, short_share=short_share, drafting=drafting)
    replica.add("a", prompt_of(3), params=params_of(30))
    for _ in range(2):
        replica.step()
    replica.add("b", prompt_of(5, 1), params=params_of(2))
    replica.step()
    assert [offer.is_short_waiting for offer in policy.offers] == [False, True]
    replica.run()
    replica.check_idle()


def test_drafts_are_not_bounded_by_a_graph_that_has_too_few_rows_for_the_step() -> None:
    policy = _Offered(7)
    laps = ResolvedLaps(queue="laps", batch_prefill_max_rows=2)
    replica = Replica(
        max_num_batched_tokens=32,
        graph_token_sizes=(8, 16),
        laps=laps,
        drafting=Drafting(_guesser(), policy, holds=False),
    )
    for seed, name in enumerate("ab"):
        replica.add(name, prompt_of(3, seed), params=params_of(30))
    replica.step()
    replica.add("c", prompt_of(9, 2), params=params_of(2))
    replica.step()
    beside = policy.offers[-1]
    assert (beside.graph_tokens, beside.max_draft_tokens) == ((), 32 - 2 - 9)
    replica.run()
    replica.check_idle()


def test_a_request_may_ask_for_fewer_drafts_or_none() -> None:
    replica = Replica(drafting=_drafting(_guesser(), 6))
    few = replica.add("few", prompt_of(4), params=params_of(16), max_drafts=2)
    none = replica.add("none", prompt_of(4, 1), params=params_of(16), max_drafts=0)
    replica.run()
    for request in (few, none):
        assert replica.output(request) == replica.expected(request)
    assert {len(d) for plan in replica.executor.plans for _, d in plan.drafts} == {2}


def test_nothing_is_guessed_after_a_token_that_ends_the_request() -> None:
    params = params_of(20, ignore_eos=False)
    prompt = prompt_of(6)
    params = params_of(
        20, stop_token_ids=(expected_output(prompt, params, max_model_len=64)[0][4],)
    )
    replica = Replica(drafting=_drafting(_guesser(), 7))
    request = replica.add("a", prompt, params=params)
    replica.run()
    assert replica.output(request) == replica.expected(request)
    assert replica.records[request.key][-1].finish == "stop"
    assert _num_tokens(replica) == 6 + len(replica.output(request)) - 1
    replica.check_idle()


def test_rows_wait_for_held_ones_where_two_steps_cost_more_than_the_gap() -> None:
    replica = Replica(overlap=True, drafting=_drafting(_guesser(), 2, holds=True))
    guessed = replica.add("a", prompt_of(4), params=params_of(24))
    plain = replica.add("b", prompt_of(4, 1), params=params_of(12), max_drafts=0)
    replica.run()
    for request in (guessed, plain):
        assert replica.output(request) == replica.expected(request)
    assert sum(plan.rows == [0] or plan.rows == [1] for plan in replica.executor.plans[1:9]) <= 1
    replica.check_idle()


def test_rows_without_drafts_overlap_beside_one_with_drafts_where_the_gap_is_long() -> None:
    drafting = _drafting(_guesser(), 2, holds=True)
    for _ in range(60):
        drafting.count_idle(100.0)
    replica = Replica(overlap=True, drafting=drafting)
    guessed = replica.add("a", prompt_of(4), params=params_of(24))
    plain = replica.add("b", prompt_of(4, 1), params=params_of(12), max_drafts=0)
    replica.run()
    for request in (guessed, plain):
        assert replica.output(request) == replica.expected(request)
    plans = replica.executor.plans[1:]
    steps_of_plain = [i for i, plan in enumerate(plans) if 1 in plan.rows]
    assert steps_of_plain == list(range(11))  # in every step
    steps_of_guessed = [i for i, plan in enumerate(plans) if 0 in plan.rows]
    gaps = [b - a for a, b in pairwise(steps_of_guessed) if b < 11]
    assert min(gaps) == 2  # in every other step while the other row keeps the device busy


class _Timed(FixedDrafts):
    """Notes what it is told that steps took, with what the device waited before."""

    def __init__(self) -> None:
        super().__init__(2)
        self.all_s: list[float] = []

    def observe_step(
        self, drafts: StepDrafts, num_tokens: int, seconds: float | None, waited_s: float = 0.0
    ) -> None:
        assert seconds is not None
        self.all_s.append(seconds + waited_s)


def test_passes_of_a_drafter_between_two_steps_are_no_wait_besides() -> None:
    """The device computes them meanwhile: 7 ms from tokens to tokens are 2 of passes and a step."""
    policy = _Timed()
    drafting = Drafting(_guesser(), policy)
    decision = StepDrafts(num_drafts=[2], expected_tokens=2.0, plain_s=5e-3, step_s=7e-3)
    result = StepResult(step=0, tokens=[[1]], logprobs=[], is_finite=[True], duration_s=5e-3)
    for late_s in (2e-3, 3e-3):
        drafting.count_late(late_s)
        drafting.commit([], PlannedDrafts(decision=decision, spent_s=2e-3), [], result)
        drafting.settle()
    assert policy.all_s == pytest.approx([7e-3, 8e-3])


def test_the_wait_before_a_step_is_that_of_each_rank_with_the_same_drafting() -> None:
    policy = _Timed()
    drafting = Drafting(_guesser(), policy)
    decision = StepDrafts(num_drafts=[2], expected_tokens=2.0, plain_s=5e-3, step_s=7e-3)
    result = StepResult(step=0, tokens=[[1]], logprobs=[], is_finite=[True], duration_s=5e-3)
    for late_s in (4e-3, 0.0):
        drafting.count_late(late_s)
        drafting.commit([], NO_DRAFTS, [], result)  # of a rank without rows
        for _ in range(2):
            drafting.commit([], PlannedDrafts(decision=decision), [], result)
    drafting.settle()
    assert policy.all_s == pytest.approx([9e-3, 9e-3, 5e-3, 5e-3])


def test_a_request_that_is_never_guessed_rests_from_waiting() -> None:
    """Overlapped steps: without drafts it soon takes part in nearly every step."""
    drafting = _drafting(_guesser(silence_rate=1.0), 4, holds=True)
    replica = Replica(overlap=True, drafting=drafting)
    silent = replica.add("a", prompt_of(4), params=params_of(50))
    replica.add("b", prompt_of(4, 1), params=params_of(50), max_drafts=0)
    replica.run()
    assert replica.output(silent) == replica.expected(silent)
    assert len(replica.executor.plans) < 62


def test_a_row_ahead_goes_on_through_a_step_without_drafts() -> None:
    """If it sat out the step in flight to have drafts again, it would lose a step each time."""
    guesser = DeviceGuesser(_answer_of, vocab_size=VOCAB_SIZE, error_rate=0.3, seed=2)
    replica = Replica(overlap=True, drafting=Drafting(guesser, EveryOtherStep(2), holds=True))
    request = replica.add("a", prompt_of(4), params=params_of(40))
    replica.run()
    assert replica.output(request) == replica.expected(request)
    plans = [plan for plan in replica.executor.plans if plan.rows]
    assert len(plans) > 14
    assert all(plan.ahead for plan in plans[2:-1])
    replica.check_idle()


def test_a_row_that_is_not_finite_ends_with_its_drafts() -> None:
    replica = Replica(drafting=_drafting(_guesser(), 3))
    bad = replica.add("bad", prompt_of(4), params=params_of(20, seed=7))
    good = replica.add("good", prompt_of(4, 1), params=params_of(20, seed=8))
    replica.executor.poison(7, 9)
    replica.run()
    assert replica.failures[bad.key].code == "non_finite_logits"
    assert replica.output(good) == replica.expected(good)
    replica.check_idle()


@pytest.mark.parametrize("way", WAYS)
def test_a_draft_that_is_not_finite_costs_no_answer(way: str) -> None:
    """Its row shares a prompt, and blocks of its own are zeroed before others get them."""
    overlap, guesser_class = way != "in turn", DeviceGuesser if way == "planned ahead" else Guesser
    guesser = guesser_class(_answer_of, vocab_size=VOCAB_SIZE, error_rate=0.4, seed=1)
    replica = Replica(num_blocks=24, overlap=overlap, drafting=_drafting(guesser, 3, holds=overlap))
    requests = [
        replica.add(str(i), prompt_of(9), params=params_of(20, seed=i, ignore_eos=True))
        for i in range(6)
    ]
    said = {token for r in requests for token in (*r.tokens, *replica.expected(r))}
    unsaid = sorted(set(range(VOCAB_SIZE)) - said)
    guesser.wrong_id = unsaid[0]
    replica.executor.poison_token(unsaid[0])
    replica.run(400)
    assert not replica.failures
    for request in requests:
        assert replica.output(request) == replica.expected(request)
    assert replica.scheduler.statistics().num_preemptions >= len(requests)
    replica.check_idle()
    assert replica.scheduler.drafting.kept_keys() == set()

"""A step that is launched before the last one is waited for: same answers, and what it may cost."""

import random

import pytest

from engine.request import Request
from tests.engine.scheduling.replica import BLOCK_SIZE, Replica, params_of, prompt_of
from tests.harness.fakes import expected_output

Answer = tuple[list[int], str | None, int | None]


def _seed_that_stops(prompt: list[int], at_index: int) -> int:
    for seed in range(5000):
        params = params_of(12, seed=seed, ignore_eos=False)
        output, finish = expected_output(prompt, params, max_model_len=64)
        if finish == "stop" and len(output) == at_index + 1:
            return seed
    raise AssertionError("no such seed")


def _stopping(replica: Replica, at_index: int) -> Request:
    """A request that eos ends with its output token `at_index`."""
    prompt = prompt_of(6)
    params = params_of(12, seed=_seed_that_stops(prompt, at_index), ignore_eos=False)
    return replica.add("stops", prompt, params=params)


def _run_mix(mix: int, *, num_blocks: int, overlap: bool) -> tuple[Replica, list[Answer]]:
    """A mix of requests that has run to its end, and what each got."""
    replica = Replica(
        num_blocks=num_blocks,
        max_rows=3,
        max_num_batched_tokens=9,
        enable_prefix_caching=num_blocks < 48,
        overlap=overlap,
    )
    draw = random.Random(mix)
    requests = []
    for i in range(12):
        params = params_of(draw.randint(1, 14), seed=mix * 100 + i, ignore_eos=draw.random() < 0.3)
        prompt = prompt_of(draw.randint(1, 40), draw.randint(0, 2))
        requests.append(replica.add(str(i), prompt, params=params))
    replica.run(600)
    replica.check_idle()
    assert [replica.output(r) for r in requests] == [replica.expected(r) for r in requests]
    ends = [replica.records[request.key][-1] for request in requests]
    return replica, [
        (replica.output(request), end.finish, end.stop_token_id)
        for request, end in zip(requests, ends, strict=True)
    ]


@pytest.mark.parametrize("mix", range(8))
def test_overlap_changes_no_token_and_no_finish_reason(mix: int) -> None:
    _, answers = _run_mix(mix, num_blocks=18, overlap=False)
    _, overlapped = _run_mix(mix, num_blocks=18, overlap=True)
    assert overlapped == answers


def test_the_mixes_preempt_hit_and_stop() -> None:
    replicas = [_run_mix(mix, num_blocks=18, overlap=True) for mix in range(8)]
    counts = [replica.scheduler.statistics() for replica, _ in replicas]
    assert sum(count.num_preemptions for count in counts) > 3
    assert sum(count.num_cached_tokens for count in counts) > 20
    assert sum(end == "stop" for _, answers in replicas for _, end, _ in answers) > 3


@pytest.mark.parametrize("mix", range(8))
def test_overlap_computes_at_most_one_token_more_per_request_that_stops(mix: int) -> None:
    # With blocks for all and without a prefix cache every other token is computed just once.
    alone, _ = _run_mix(mix, num_blocks=64, overlap=False)
    overlapped, answers = _run_mix(mix, num_blocks=64, overlap=True)
    num_tokens, num_overlapped = (
        sum(plan.num_tokens for plan in replica.executor.plans) for replica in (alone, overlapped)
    )
    num_stopped = sum(finish == "stop" for _, finish, _ in answers)
    assert num_tokens <= num_overlapped <= num_tokens + num_stopped


def test_a_step_is_launched_before_the_one_in_front_of_it_is_waited_for() -> None:
    replica = Replica(overlap=True)
    request = replica.add("a", prompt_of(5), params=params_of(4))
    in_flight = []
    while replica.core.has_work:
        replica.step()
        in_flight.append(len(replica.executor.plans) - replica.executor.num_waited)
    assert in_flight == [1, 1, 1, 1, 0]
    assert list(replica.chunks()) == [[5], [1], [1], [1]]  # none for a token after the last
    assert replica.output(request) == replica.expected(request)
    replica.check_idle()


def test_an_output_is_that_of_the_step_before() -> None:
    replica = Replica(overlap=True)
    replica.add("a", prompt_of(5), params=params_of(3))
    outputs = [replica.step() for _ in range(5)]
    assert [o.num_scheduled_tokens for o in outputs] == [0, 5, 1, 1, 0]
    assert [o.has_progressed for o in outputs] == [True, True, True, True, False]
    assert [len(o.tokens) for o in outputs] == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("at_index", [0, 1, 2, 3])
def test_the_step_after_eos_is_dropped_and_its_blocks_are_held_meanwhile(at_index: int) -> None:
    replica = Replica(overlap=True)
    request = _stopping(replica, at_index)
    while replica.left != [request.key]:
        replica.step()
    assert (request.row, request.block_ids) == (None, [])
    held = dict(replica.scheduler.owners())
    assert list(held) == [f"left, in flight {request.key}"]
    assert (replica.scheduler.has_work, replica.scheduler.num_running) == (True, 0)
    output = replica.step()
    assert (output.tokens, output.failures, output.left) == ([], [], [])
    assert replica.output(request) == replica.expected(request)
    replica.check_idle()


def test_a_step_after_eos_that_is_not_finite_has_its_blocks_zeroed_and_nobody_fails() -> None:
    # Its NaN would have gone to the next owner of the block.
    replica = Replica(overlap=True)
    request = _stopping(replica, 3)
    replica.executor.poison(request.params.seed, 6 + 3)  # where eos itself is computed
    replica.run()
    assert replica.output(request) == replica.expected(request)
    assert replica.failures == {}
    zeroed = [plan.zero_block_ids for plan in replica.executor.plans if plan.zero_block_ids]
    assert [len(block_ids) for block_ids in zeroed] == [3]
    replica.check_idle()


def test_the_freed_row_of_a_stopped_request_is_given_to_the_next() -> None:
    replica = Replica(max_rows=1, overlap=True)
    first = _stopping(replica, 2)
    second = replica.add("second", prompt_of(9), params=params_of(3))
    replica.run()
    for request in (first, second):
        assert replica.output(request) == replica.expected(request)
    replica.check_idle()


def test_a_prompt_that_moves_is_not_planned_past_its_first_token() -> None:
    replica = Replica(max_num_batched_tokens=8, overlap=True)
    request = replica.add("a", prompt_of(19), decode_worker="decode-0")
    replica.run()
    assert list(replica.chunks()) == [[8], [8], [3]]
    assert replica.handoff_queue.events == [("start", request.key), ("add", request.key)]
    assert request.num_computed_tokens == 19
    assert replica.output(request) == replica.expected(request)[:1]


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_an_abort_with_a_step_in_flight_drops_what_it_samples(num_steps: int) -> None:
    replica = Replica(max_num_batched_tokens=8, overlap=True)
    request = replica.add("a", prompt_of(19), params=params_of(20))
    for _ in range(num_steps):
        replica.step()
    before = list(replica.output(request))
    assert replica.scheduler.abort(request.key)
    replica.check()
    neighbour = replica.add("b", prompt_of(5))
    again = replica.add("a", prompt_of(19), params=params_of(20))  # the key is free again
    replica.run()
    assert [r.token_id for r in replica.records[again.key]][len(before) :] == replica.expected(
        again
    )
    assert replica.output(neighbour) == replica.expected(neighbour)
    replica.check_idle()


@pytest.mark.parametrize("position", [0, 9, 12, 13, 15, 17])
def test_a_row_that_is_not_finite_ends_alone_with_the_next_step_in_flight(position: int) -> None:
    replica = Replica(max_num_batched_tokens=8, overlap=True)
    good = [replica.add(name, prompt_of(13, 1), params=params_of(9, seed=1)) for name in "ab"]
    bad = replica.add("bad", prompt_of(13, 2), params=params_of(9, seed=666))
    replica.executor.poison(666, position)
    replica.run()
    assert replica.failures[bad.key].code == "non_finite_logits"
    assert replica.left.count(bad.key) == 1
    assert replica.output(bad) == replica.expected(bad)[: max(0, position - 12)]
    assert [replica.output(r) for r in good] == [replica.expected(r) for r in good]
    replica.check_idle()


def test_where_a_preemption_is_due_the_step_in_flight_is_committed_first() -> None:
    replica = Replica(
        num_blocks=5, max_rows=2, max_num_batched_tokens=32, max_model_len=20, overlap=True
    )
    old = replica.add("old", prompt_of(7, 1), params=params_of(6))
    new = replica.add("new", prompt_of(7, 2), params=params_of(6))
    while new.num_preemptions == 0:
        replica.step()
    assert new.num_computed_tokens == 0
    assert len(replica.output(new)) == new.num_output_tokens > 0
    replica.run()
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    for request in (old, new):
        assert replica.output(request) == replica.expected(request)
    replica.check_idle()


def test_a_lone_request_gets_on_where_blocks_come_and_go() -> None:
    # A preemption that dropped the token in flight came again at the same token, for ever.
    replica = Replica(
        num_blocks=4, max_rows=1, max_num_batched_tokens=16, max_model_len=16, overlap=True
    )
    request = replica.add("a", prompt_of(7), params=params_of(6))
    replica.lent = replica.cache.allocate(2) or []
    for _ in range(12):
        replica.step()
    assert replica.output(request) == replica.expected(request)[:2]
    assert (request.num_preemptions, request.row) == (1, None)
    replica.cache.release(replica.lent)
    replica.lent = []
    replica.run()
    assert replica.output(request) == replica.expected(request)


def test_a_block_is_indexed_when_the_step_that_fills_it_is_committed() -> None:
    replica = Replica(max_num_batched_tokens=BLOCK_SIZE, overlap=True)
    request = replica.add("a", prompt_of(4 * BLOCK_SIZE))
    for num_launched in range(1, 5):
        replica.step()
        assert request.num_computed_tokens == num_launched * BLOCK_SIZE
        assert request.num_indexed_blocks == num_launched - 1


def test_choices_wait_until_the_prompt_they_share_is_indexed() -> None:
    replica = Replica(max_num_batched_tokens=32, overlap=True)
    for child in range(3):
        replica.add("n", prompt_of(13), child=child, params=params_of(3, seed=child))
    replica.step()
    replica.step()
    assert replica.scheduler.num_running == 1
    replica.step()
    assert replica.scheduler.num_running == 3
    replica.run()
    end = replica.scheduler.statistics()
    assert (end.num_cached_tokens, end.num_prompt_tokens_computed) == (24, 15)


def test_tokens_in_flight_are_queued_only_where_they_go_on() -> None:
    replica = Replica(overlap=True)
    replica.add("goes on", prompt_of(3), params=params_of(5))
    replica.add("ends", prompt_of(3, 1), params=params_of(1))
    replica.step()
    now = replica.scheduler.statistics()
    assert (now.num_running, now.num_queued_tokens, now.num_output_tokens) == (2, 1, 0)


def test_no_third_plan_is_made_while_two_are_in_flight() -> None:
    replica = Replica(overlap=True)
    scheduler = replica.scheduler
    replica.add("a", prompt_of(5))
    assert scheduler.plan(0.0) is not None
    assert scheduler.plan(0.0) is not None
    with pytest.raises(AssertionError, match="2 steps are in flight"):
        scheduler.plan(0.0)

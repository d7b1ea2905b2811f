"""What goes into a step: budget, chunks, order, rows, and how requests end."""

import pytest

from engine.errors import CapacityError
from engine.request import Request, RequestKey
from tests.engine.scheduling.replica import BLOCK_SIZE, Replica, params_of, prompt_of
from tests.harness.fakes import EOS_TOKEN_ID, expected_output

# ---- budget and chunks ---------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    replica = Replica(max_num_batched_tokens=16)
    request = replica.add("a", prompt_of(37))
    replica.run()
    assert list(replica.chunks()) == [[16], [16], [5], [1], [1], [1], [1]]
    samples = [plan.num_samples for plan in replica.executor.plans]
    assert samples == [[0], [0], [1], [1], [1], [1], [1]]
    assert replica.output(request) == replica.expected(request)
    replica.check_idle()


def test_decodes_ride_along_and_shrink_the_chunk_of_a_prompt() -> None:
    replica = Replica(max_num_batched_tokens=16)
    replica.add("a", prompt_of(7), params=params_of(20))
    replica.add("b", prompt_of(5), params=params_of(20))
    replica.step()
    long = replica.add("long", prompt_of(33))
    chunks = [replica.step() and replica.last_plan.num_new_tokens for _ in range(3)]
    assert chunks == [[1, 1, 14], [1, 1, 14], [1, 1, 5]]
    replica.run()
    assert replica.output(long) == replica.expected(long)


def test_every_running_request_decodes_in_every_step() -> None:
    replica = Replica(max_rows=4, max_num_batched_tokens=4)
    requests = [replica.add(str(i), prompt_of(3, i), params=params_of(9)) for i in range(4)]
    while replica.scheduler.num_running < 4 or any(r.num_uncomputed_tokens > 1 for r in requests):
        replica.step()
    before = [len(replica.output(r)) for r in requests]
    replica.step()
    assert [len(replica.output(r)) - n for r, n in zip(requests, before, strict=True)] == [1] * 4


def test_a_step_admits_as_many_prompts_as_the_budget_holds_in_order() -> None:
    replica = Replica(max_num_batched_tokens=16)
    for i, num_tokens in enumerate([6, 7, 9, 2]):
        replica.add(str(i), prompt_of(num_tokens, i))
    replica.step()
    assert replica.last_plan.num_new_tokens == [6, 7, 3]
    replica.step()
    assert replica.last_plan.num_new_tokens == [1, 1, 6, 2]


def test_no_more_requests_run_than_there_are_rows() -> None:
    replica = Replica(max_rows=2)
    requests = [replica.add(str(i), prompt_of(3, i)) for i in range(5)]
    while replica.scheduler.has_work:
        replica.step()
        assert replica.scheduler.num_running <= 2
        assert len(replica.executor.occupied_rows) <= 2
    assert [replica.output(r) for r in requests] == [replica.expected(r) for r in requests]
    replica.check_idle()


def test_fewer_step_tokens_than_rows_are_refused_at_the_start() -> None:
    with pytest.raises(AssertionError, match="5 rows cannot each decode in 4 tokens"):
        Replica(max_rows=5, max_num_batched_tokens=4)


def test_a_context_that_the_cache_cannot_hold_is_refused_at_the_start() -> None:
    with pytest.raises(AssertionError, match="cannot fit 4 blocks"):
        Replica(num_blocks=4, max_model_len=4 * BLOCK_SIZE + 1)


# ---- order ---------------------------------------------------------------------------------------


def test_requests_are_served_by_priority_then_arrival() -> None:
    replica = Replica(max_rows=1)
    for name, priority in [("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)]:
        replica.add(name, prompt_of(3), priority=priority)
    replica.run()
    assert [key.request_id for key in replica.left] == ["c", "e", "a", "d", "b"]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_blocks() -> None:
    replica = Replica(num_blocks=12, max_rows=4, max_model_len=48)
    replica.add("old", prompt_of(20), params=params_of(4))
    replica.step()
    replica.step()
    large = replica.add("large", prompt_of(40))
    small = replica.add("small", prompt_of(2))
    num_blocked = 0
    while large.row is None:
        assert small.row is None
        replica.step()
        num_blocked += 1
    assert num_blocked >= 2
    replica.run()
    assert replica.output(large) == replica.expected(large)
    assert replica.output(small) == replica.expected(small)


def test_a_request_that_cannot_be_admitted_leaves_the_cache_as_it_was() -> None:
    replica = Replica(num_blocks=12, max_rows=4, max_model_len=48)
    shared = prompt_of(20)
    replica.add("old", shared, params=params_of(20))
    replica.step()
    replica.step()
    waiting = replica.add("large", shared + prompt_of(24))
    before = replica.cache.statistics()
    replica.step()
    assert waiting.row is None
    after = replica.cache.statistics()
    assert (after.num_lookups, after.num_hit_blocks) == (before.num_lookups, before.num_hit_blocks)


# ---- the end -------------------------------------------------------------------------------------


def _finish_of(replica: Replica, request: Request) -> tuple[str | None, int | None]:
    *others, last = replica.records[request.key]
    assert all(record.finish is None for record in others)
    return last.finish, last.stop_token_id


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_ends_a_request(max_tokens: int) -> None:
    replica = Replica()
    request = replica.add("a", prompt_of(5), params=params_of(max_tokens))
    replica.run()
    assert len(replica.output(request)) == max_tokens
    assert _finish_of(replica, request) == ("length", None)
    assert replica.left == [request.key]
    replica.check_idle()


def test_a_full_context_ends_a_request() -> None:
    replica = Replica(max_model_len=16)
    request = replica.add("a", prompt_of(13), params=params_of(50))
    replica.run()
    assert len(replica.output(request)) == 3
    assert _finish_of(replica, request) == ("length", None)


def test_a_prompt_that_leaves_no_room_for_a_token_is_our_mistake() -> None:
    replica = Replica(max_model_len=16)
    with pytest.raises(AssertionError, match="leave no room below 16"):
        replica.add("a", prompt_of(16))
    with pytest.raises(AssertionError, match="leave no room below 8"):
        replica.add("b", prompt_of(5), emitted=[1, 2, 3], params=params_of(3))


def _seed_that_draws_eos(prompt: list[int], at_index: int) -> int:
    for seed in range(5000):
        output, finish = expected_output(
            prompt, params_of(8, seed=seed, ignore_eos=False), max_model_len=64
        )
        if finish == "stop" and len(output) == at_index + 1:
            return seed
    raise AssertionError("no such seed")


def test_eos_ends_a_request_and_is_emitted() -> None:
    prompt = prompt_of(6)
    replica = Replica()
    params = params_of(8, seed=_seed_that_draws_eos(prompt, 3), ignore_eos=False)
    request = replica.add("a", prompt, params=params)
    replica.run()
    assert replica.output(request) == replica.expected(request)
    assert (len(replica.output(request)), replica.output(request)[-1]) == (4, EOS_TOKEN_ID)
    assert _finish_of(replica, request) == ("stop", EOS_TOKEN_ID)
    replica.check_idle()


def test_ignore_eos_goes_on_after_eos() -> None:
    prompt = prompt_of(6)
    replica = Replica()
    params = params_of(8, seed=_seed_that_draws_eos(prompt, 3), ignore_eos=True)
    request = replica.add("a", prompt, params=params)
    replica.run()
    assert replica.output(request)[3] == EOS_TOKEN_ID
    assert len(replica.output(request)) == 8


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_stop_id_ends_a_request_also_when_eos_is_ignored(ignore_eos: bool) -> None:
    replica = Replica()
    free = replica.add("free", prompt_of(6), params=params_of(8))
    replica.run()
    stop_id = replica.output(free)[2]
    params = params_of(8, ignore_eos=ignore_eos, stop_token_ids=(stop_id,))
    request = replica.add("a", prompt_of(6), params=params)
    replica.run()
    first_hit = replica.output(free).index(stop_id)
    assert replica.output(request) == replica.output(free)[: first_hit + 1]
    assert _finish_of(replica, request) == ("stop", stop_id)


def test_a_stop_on_the_last_allowed_token_says_stop() -> None:
    replica = Replica()
    free = replica.add("free", prompt_of(6), params=params_of(3))
    replica.run()
    last = replica.output(free)[2]
    assert last not in replica.output(free)[:2]
    request = replica.add("a", prompt_of(6), params=params_of(3, stop_token_ids=(last,)))
    replica.run()
    assert _finish_of(replica, request) == ("stop", last)


# ---- migration -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_emitted", [1, 4, 8])
def test_a_migrated_request_goes_on_at_its_index_and_emits_nothing_twice(num_emitted: int) -> None:
    first, second = Replica(), Replica()
    whole = first.add("a", prompt_of(6), params=params_of(9))
    first.run()
    emitted = first.output(whole)[:num_emitted]
    rest = second.add("a", prompt_of(6), params=params_of(9), emitted=emitted)
    second.run()
    assert emitted + second.output(rest) == first.output(whole)
    assert second.records[rest.key][0].index == num_emitted
    assert _finish_of(second, rest) == ("length", None)


# ---- queue ---------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_keeps_what_it_has() -> None:
    replica = Replica(max_rows=1, max_waiting=2)
    requests = [replica.add(name, prompt_of(3)) for name in "ab"]
    with pytest.raises(CapacityError, match="2 requests"):
        replica.add("c", prompt_of(3))
    replica.step()
    requests.append(replica.add("d", prompt_of(3)))
    replica.run()
    assert replica.left == [r.key for r in requests]


def test_a_request_whose_deadline_passes_in_the_queue_fails_without_running() -> None:
    replica = Replica(max_rows=1)
    replica.add("a", prompt_of(3))
    late = replica.add("late", prompt_of(3), deadline_s=5.0)
    in_time = replica.add("in time", prompt_of(3), deadline_s=50.0)
    replica.step()
    replica.clock.advance(10.0)
    replica.run()
    failure = replica.failures[late.key]
    assert (failure.code, failure.retryable) == ("timeout", False)
    assert late.key not in replica.records
    assert replica.left.count(late.key) == 1
    assert replica.output(in_time) == replica.expected(in_time)
    replica.check_idle()


def test_a_deadline_is_reported_even_when_nothing_can_run() -> None:
    replica = Replica()
    late = replica.add("late", prompt_of(3), deadline_s=5.0)
    replica.clock.advance(10.0)
    output = replica.step()
    assert output.num_scheduled_tokens == 0
    assert replica.failures.keys() == {late.key}
    assert replica.executor.plans == []


def test_the_deadline_does_not_end_a_request_that_runs() -> None:
    replica = Replica()
    request = replica.add("a", prompt_of(3), deadline_s=5.0)
    replica.step()
    replica.clock.advance(10.0)
    replica.run()
    assert replica.output(request) == replica.expected(request)


# ---- observation ---------------------------------------------------------------------------------


def test_the_same_key_cannot_be_added_while_it_waits_or_runs() -> None:
    replica = Replica()
    replica.add("a", prompt_of(3))
    with pytest.raises(AssertionError, match="already waiting"):
        replica.add("a", prompt_of(3))
    replica.step()
    with pytest.raises(AssertionError, match="runs already"):
        replica.add("a", prompt_of(3))


def test_requests_of_an_ingress_are_found_waiting_or_running() -> None:
    replica = Replica(max_rows=1)
    keys = [replica.add(name, prompt_of(3)).key for name in "ab"]
    replica.add("c", prompt_of(3), ingress_id="ingress-b")
    replica.step()
    assert sorted(replica.scheduler.requests_of("ingress-a")) == keys
    assert replica.scheduler.requests_of("ingress-b") == [RequestKey("c")]
    assert replica.scheduler.requests_of("nobody") == []


def test_statistics_count_what_happened() -> None:
    replica = Replica(max_rows=2, max_num_batched_tokens=8)
    shared = prompt_of(9)
    requests = [replica.add(str(i), shared, params=params_of(3)) for i in range(4)]
    replica.step()
    now = replica.scheduler.statistics()
    assert (now.num_waiting, now.num_running, now.num_steps) == (3, 1, 1)
    assert now.num_queued_tokens == 1 + 3 * 9
    replica.run()
    end = replica.scheduler.statistics()
    assert (end.num_waiting, end.num_running, end.num_queued_tokens) == (0, 0, 0)
    assert end.num_steps == len(replica.executor.plans)
    assert end.num_output_tokens == sum(len(replica.output(r)) for r in requests) == 12
    assert end.num_preemptions == 0


def test_every_prompt_token_is_counted_as_cached_or_as_computed() -> None:
    # Chunks of one token, which look like decodes, were not counted.
    for num_tokens in range(1, 20):
        replica = Replica(max_num_batched_tokens=8)
        for _ in range(2):
            replica.add("a", prompt_of(num_tokens))
            replica.run()
        end = replica.scheduler.statistics()
        assert end.num_cached_tokens == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert end.num_prompt_tokens_computed == 2 * num_tokens - end.num_cached_tokens


def test_equal_requests_at_equal_times_are_planned_equally() -> None:
    def plans() -> list[object]:
        replica = Replica(num_blocks=14, max_rows=3, max_model_len=40)
        for i in range(8):
            replica.add(str(i), prompt_of(5 + 3 * i, i % 3), params=params_of(8, seed=i))
        replica.run()
        return list(replica.executor.plans)

    assert plans() == plans()

"""What becomes of KV blocks: prefix hits, preemption, siblings, and numbers that are not finite."""

import pytest

from tests.engine.scheduling.replica import BLOCK_SIZE, Replica, params_of, prompt_of

# ---- prefix hits ---------------------------------------------------------------------------------


def test_a_prompt_seen_before_leaves_one_token_to_compute() -> None:
    replica = Replica()
    prompt = prompt_of(13)
    replica.add("a", prompt)
    replica.run()
    num_plans = len(replica.executor.plans)
    request = replica.add("b", prompt)
    replica.run()
    assert replica.executor.plans[num_plans].num_new_tokens == [1]
    assert replica.executor.plans[num_plans].num_computed_tokens == [12]
    assert replica.records[request.key][0].num_cached_tokens == 12
    assert all(r.num_cached_tokens is None for r in replica.records[request.key][1:])
    assert replica.output(request) == replica.expected(request)


def test_a_prompt_of_whole_blocks_recomputes_its_last_block() -> None:
    replica = Replica()
    prompt = prompt_of(3 * BLOCK_SIZE)
    replica.add("a", prompt)
    replica.run()
    request = replica.add("b", prompt)
    replica.step()
    assert replica.last_plan.num_new_tokens == [BLOCK_SIZE]
    assert replica.records[request.key][0].num_cached_tokens == 2 * BLOCK_SIZE


def test_output_tokens_of_one_request_are_a_prefix_of_the_next() -> None:
    replica = Replica()
    first = replica.add("a", prompt_of(6), params=params_of(9))
    replica.run()
    # The newest token was never computed: 6 + 8 tokens have KV, of which 3 blocks are complete.
    follow_up = replica.add("b", prompt_of(6) + replica.output(first) + [5, 6])
    replica.run()
    assert replica.records[follow_up.key][0].num_cached_tokens == 12
    assert replica.output(follow_up) == replica.expected(follow_up)


@pytest.mark.parametrize(("next_token", "num_cached"), [(7, 12), (8, 8)])
def test_a_block_whose_hash_covers_the_next_token_is_found_before_that_one_only(
    next_token: int, num_cached: int
) -> None:
    replica = Replica(num_hashed_ahead=1)
    shared = prompt_of(3 * BLOCK_SIZE)
    replica.add("a", [*shared, 7, 5])
    replica.run()
    request = replica.add("b", [*shared, next_token, 6])
    replica.run()
    assert replica.records[request.key][0].num_cached_tokens == num_cached
    assert replica.output(request) == replica.expected(request)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("num_prompt", [5, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE])
def test_a_block_is_found_that_the_last_step_of_a_request_filled(
    num_prompt: int, num_ahead: int, overlap: bool
) -> None:
    """Its hash may cover the token that ended the request."""
    replica = Replica(overlap=overlap, num_hashed_ahead=num_ahead)
    num_output = 3 * BLOCK_SIZE + 1 - num_prompt
    first = replica.add("a", prompt_of(num_prompt), params=params_of(num_output))
    replica.run()
    follow_up = replica.add("b", [*prompt_of(num_prompt), *replica.output(first), 5])
    replica.run()
    assert replica.records[follow_up.key][0].num_cached_tokens == 3 * BLOCK_SIZE


def test_a_prefix_is_found_only_after_the_step_that_computes_it() -> None:
    replica = Replica(max_num_batched_tokens=32)
    prompt = prompt_of(13)
    both = [replica.add(name, prompt) for name in "ab"]
    replica.step()
    assert replica.last_plan.num_new_tokens == [13, 13]
    replica.run()
    assert [replica.output(r) for r in both] == [replica.expected(r) for r in both]


@pytest.mark.parametrize("salts", [("", "tenant"), ("x", "y")])
def test_unequal_salts_share_nothing(salts: tuple[str, str]) -> None:
    replica = Replica()
    for name, salt in zip("ab", salts, strict=True):
        request = replica.add(name, prompt_of(13), salt=salt)
        replica.run()
        assert replica.records[request.key][0].num_cached_tokens == 0


def test_without_a_prefix_cache_nothing_is_found() -> None:
    replica = Replica(enable_prefix_caching=False)
    for name in "ab":
        request = replica.add(name, prompt_of(13))
        replica.run()
        assert replica.records[request.key][0].num_cached_tokens == 0
        assert request.block_hashes == []  # nobody could ask for its blocks
    assert replica.cache.num_free == replica.cache.num_blocks


# ---- preemption ----------------------------------------------------------------------------------


def test_preemption_takes_exactly_as_many_of_the_newest_as_blocks_require() -> None:
    # 12 blocks: three requests of 11 tokens hold 3 each and may each grow by one before it is full.
    replica = Replica(num_blocks=12, max_rows=4, max_num_batched_tokens=64, max_model_len=48)
    params = params_of(20)
    requests = [replica.add(str(i), prompt_of(11, i), params=params) for i in range(3)]
    num_running = []
    while all(r.num_preemptions == 0 for r in requests):
        num_running.append(replica.scheduler.num_running)
        replica.step()
    # Blocks are counted for the known tokens: the fifth block of each is due with token 17.
    assert [r.num_known_tokens for r in requests] == [18, 18, 17]
    assert [r.num_preemptions for r in requests] == [0, 0, 1]
    assert replica.scheduler.num_running == 2
    replica.run()
    assert [replica.output(r) for r in requests] == [replica.expected(r) for r in requests]
    assert replica.scheduler.statistics().num_preemptions == sum(
        r.num_preemptions for r in requests
    )
    replica.check_idle()


def test_a_row_takes_a_block_when_its_last_one_is_full_and_no_sooner() -> None:
    replica = Replica(num_blocks=12, max_rows=4, max_num_batched_tokens=64, max_model_len=48)
    request = replica.add("r", prompt_of(6), params=params_of(5))
    held = {}
    while request.num_output_tokens < 5:
        held[request.num_known_tokens] = len(request.block_ids)
        replica.step()
    # A token is computed in the step after the one that sampled it.
    assert held == {6: 0, 7: 2, 8: 2, 9: 2, 10: 3}


def test_blocks_that_a_preemption_frees_may_be_just_enough() -> None:
    # Two rows need a block each, one is free: preempting the newest must not take the oldest too.
    replica = Replica(num_blocks=5, max_rows=2, max_num_batched_tokens=32, max_model_len=20)
    old = replica.add("old", prompt_of(7, 1), params=params_of(6))
    new = replica.add("new", prompt_of(7, 2), params=params_of(6))
    replica.run()
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    assert replica.output(old) == replica.expected(old)
    assert replica.output(new) == replica.expected(new)


def test_an_admission_leaves_a_block_for_every_running_row_to_grow() -> None:
    replica = Replica(num_blocks=6, max_rows=3, max_num_batched_tokens=32, max_model_len=24)
    replica.add("a", prompt_of(7, 1), params=params_of(9))
    replica.add("b", prompt_of(7, 2), params=params_of(9))
    third = replica.add("c", prompt_of(7, 3), params=params_of(2))
    replica.step()
    assert replica.last_plan.num_new_tokens == [7, 7]
    assert third.row is None
    replica.run()
    assert replica.output(third) == replica.expected(third)


def test_a_preempted_request_comes_back_before_younger_ones_and_reports_no_cached_tokens() -> None:
    replica = Replica(num_blocks=8, max_rows=2, max_num_batched_tokens=32, max_model_len=32)
    requests = [replica.add(str(i), prompt_of(11, i), params=params_of(12)) for i in range(3)]
    replica.run()
    assert requests[1].num_preemptions > 0
    assert replica.left == [r.key for r in requests]
    for request in requests:
        assert replica.output(request) == replica.expected(request)
        first, *rest = replica.records[request.key]
        assert (first.num_cached_tokens, {r.num_cached_tokens for r in rest}) == (0, {None})


def test_a_prompt_preempted_between_chunks_starts_over() -> None:
    replica = Replica(num_blocks=10, max_rows=2, max_num_batched_tokens=3, max_model_len=40)
    old = replica.add("old", prompt_of(7, 1), params=params_of(25))
    while old.num_uncomputed_tokens > 1:
        replica.step()
    long = replica.add("long", prompt_of(21, 2), params=params_of(3))
    while long.num_preemptions == 0:
        replica.step()
    assert long.num_output_tokens == 0
    replica.run()
    assert replica.output(old) == replica.expected(old)
    assert replica.output(long) == replica.expected(long)
    replica.check_idle()


# ---- siblings ------------------------------------------------------------------------------------


def test_choices_of_one_request_wait_for_the_prompt_they_share_and_then_hit_it() -> None:
    replica = Replica(max_num_batched_tokens=8)
    prompt = prompt_of(19)
    choices = [replica.add("n", prompt, child=i, params=params_of(6, seed=i + 1)) for i in range(3)]
    stranger = replica.add("stranger", prompt_of(3))
    replica.step()
    assert [c.row is not None for c in choices] == [True, False, False]
    replica.step()
    assert [c.row is not None for c in choices] == [True, False, False]
    # Four blocks are complete; the fifth will not be, so all compute their last 3 tokens at once.
    replica.step()
    assert replica.last_plan.num_computed_tokens == [16, 16, 16]
    assert replica.last_plan.num_new_tokens == [3, 3, 2]
    replica.run()
    assert [replica.output(c) for c in choices] == [replica.expected(c) for c in choices]
    assert len({tuple(replica.output(c)) for c in choices}) == 3
    assert replica.records[choices[2].key][0].num_cached_tokens == 16
    assert replica.output(stranger) == replica.expected(stranger)
    replica.check_idle()


def test_choices_of_a_prompt_without_a_full_block_do_not_wait() -> None:
    replica = Replica(max_num_batched_tokens=16)
    for i in range(4):
        replica.add("n", prompt_of(3), child=i)
    replica.step()
    assert replica.last_plan.num_new_tokens == [3, 3, 3, 3]


def test_choices_go_on_when_the_one_they_wait_for_is_aborted() -> None:
    replica = Replica(max_num_batched_tokens=8)
    choices = [replica.add("n", prompt_of(19), child=i) for i in range(3)]
    replica.step()
    assert replica.scheduler.abort(choices[0].key)
    replica.run()
    assert replica.left == [choices[1].key, choices[2].key]
    assert replica.output(choices[2]) == replica.expected(choices[2])


# ---- numbers that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 9, 12, 15, 17])
def test_a_row_that_is_not_finite_ends_alone(position: int) -> None:
    replica = Replica(max_num_batched_tokens=8)
    good = [replica.add(name, prompt_of(13, 1), params=params_of(9, seed=1)) for name in "ab"]
    bad = replica.add("bad", prompt_of(13, 2), params=params_of(9, seed=666))
    replica.executor.poison(666, position)
    replica.run()
    failure = replica.failures[bad.key]
    assert (failure.code, failure.retryable) == ("non_finite_logits", False)
    assert replica.left.count(bad.key) == 1
    assert replica.output(bad) == replica.expected(bad)[: max(0, position - 12)]
    assert [replica.output(r) for r in good] == [replica.expected(r) for r in good]
    replica.check_idle()


def test_blocks_of_a_row_that_is_not_finite_are_not_found_again() -> None:
    replica = Replica()
    bad = replica.add("bad", prompt_of(13), params=params_of(9, seed=666))
    replica.executor.poison(666, 17)
    replica.run()
    assert bad.key in replica.failures
    again = replica.add("again", prompt_of(13))
    replica.run()
    assert replica.records[again.key][0].num_cached_tokens == 0
    assert replica.output(again) == replica.expected(again)


def test_poisoned_blocks_are_held_until_the_plan_that_zeroes_them() -> None:
    # A handoff may ask for blocks between two steps, and a late zeroing would wipe what it wrote.
    replica = Replica(num_blocks=8, max_model_len=32)
    replica.add("bad", prompt_of(7), params=params_of(9, seed=666))
    replica.executor.poison(666, 6)
    replica.step()
    assert replica.cache.num_held == 2
    replica.lent = replica.cache.allocate(6) or []
    assert replica.cache.allocate(1) is None
    assert replica.scheduler.has_work
    replica.step()
    assert sorted(replica.last_plan.zero_block_ids + replica.lent) == list(range(8))
    assert replica.cache.num_held == 6
    assert not replica.scheduler.has_work


def test_a_block_can_be_had_once_the_step_that_zeroes_it_is_committed() -> None:
    # A handoff that got it while the step still ran would see what it wrote wiped.
    replica = Replica(num_blocks=4, max_model_len=16, max_rows=1)
    replica.add("bad", prompt_of(7), params=params_of(9, seed=666))
    replica.executor.poison(666, 6)
    replica.step()
    request = replica.add("next", prompt_of(13), params=params_of(2))
    replica.step()
    zeroed = set(replica.last_plan.zero_block_ids)
    assert (len(zeroed), replica.last_plan.rows) == (2, [])
    replica.step()
    assert zeroed <= set(replica.last_plan.admissions[0].block_ids)
    replica.run()
    assert replica.output(request) == replica.expected(request)


def test_a_shared_prefix_survives_for_those_who_read_it() -> None:
    replica = Replica(max_num_batched_tokens=32)
    prompt = prompt_of(8, 1)
    reader = replica.add("reader", [*prompt, 1], params=params_of(12))
    replica.step()
    bad = replica.add("bad", [*prompt, 2, 3, 4], params=params_of(9, seed=666))
    replica.executor.poison(666, 12)
    replica.step()
    assert bad.num_cached_tokens == 8
    replica.run()
    assert bad.key in replica.failures
    zeroed = {b for plan in replica.executor.plans for b in plan.zero_block_ids}
    assert len(zeroed) == 2  # all but the two blocks of the prefix
    assert replica.output(reader) == replica.expected(reader)
    replica.check_idle()

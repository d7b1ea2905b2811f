"""A scheduler's two ends of a handoff, the outbox and `join`, and aborts in every phase."""

import pytest

from engine.request import Request, RequestKey, RequestSpec
from tests.engine.scheduling.replica import BLOCK_SIZE, Replica, params_of, prompt_of

# ---- outbox --------------------------------------------------------------------------------------


def test_a_prompt_starts_with_its_first_chunk_and_leaves_with_its_first_token() -> None:
    replica = Replica(max_num_batched_tokens=8)
    request = replica.add("a", prompt_of(19), decode_worker="decode-0")
    assert replica.handoff_queue.events == []
    replica.step()
    assert replica.handoff_queue.events == [("start", request.key)]
    replica.step()
    assert replica.handoff_queue.held == {}
    output = replica.step()
    assert replica.handoff_queue.events == [("start", request.key), ("add", request.key)]
    assert output.left == [request.key]
    assert replica.output(request) == replica.expected(request)[:1]
    assert replica.records[request.key][0].finish is None
    assert request.num_computed_tokens == 19
    assert len(request.block_ids) == 5
    assert replica.scheduler.num_free_rows == 4
    assert not replica.scheduler.has_work


@pytest.mark.parametrize("overlap", [False, True])
def test_a_chunks_full_blocks_may_move_when_its_step_is_committed(overlap: bool) -> None:
    replica = Replica(max_num_batched_tokens=6, overlap=overlap)
    request = replica.add("a", prompt_of(19), decode_worker="decode-0")
    replica.run()
    key = request.key
    assert replica.handoff_queue.advances == [
        (key, 1),
        (key, 3),
        (key, 4),
    ]  # 6, 12, 18 tokens, 4 a block


def test_a_handed_over_prompt_can_be_found_by_the_next() -> None:
    replica = Replica()
    replica.add("a", prompt_of(13), decode_worker="decode-0")
    replica.run()
    request = replica.add("b", prompt_of(13), decode_worker="decode-0")
    replica.run()
    assert replica.records[request.key][0].num_cached_tokens == 12


def test_a_request_that_ends_with_its_first_token_by_length_never_starts() -> None:
    replica = Replica(max_model_len=32)
    by_length = replica.add("a", prompt_of(5), decode_worker="d", params=params_of(1))
    by_context = replica.add("b", prompt_of(31), decode_worker="d", params=params_of(9))
    replica.run()
    assert ("start", by_length.key) not in replica.handoff_queue.events
    assert ("start", by_context.key) not in replica.handoff_queue.events
    assert replica.handoff_queue.held == {}
    for request in (by_length, by_context):
        assert [r.finish for r in replica.records[request.key]] == ["length"]
    replica.check_idle()


def test_a_stop_on_the_first_token_drops_what_was_started() -> None:
    replica = Replica()
    free = replica.add("free", prompt_of(6))
    replica.run()
    params = params_of(9, stop_token_ids=(replica.output(free)[0],))
    request = replica.add("a", prompt_of(6), decode_worker="d", params=params)
    replica.run()
    assert replica.handoff_queue.events == [("start", request.key), ("drop", request.key)]
    assert [r.finish for r in replica.records[request.key]] == ["stop"]
    replica.check_idle()


def test_prompts_without_a_reservation_stop_admissions_beyond_their_share() -> None:
    replica = Replica(num_blocks=32, unreserved_share=0.25)
    request = replica.add("a", prompt_of(5))
    replica.handoff_queue.num_unreserved_blocks = 10
    replica.step()
    assert request.row is None
    replica.handoff_queue.num_unreserved_blocks = 8
    replica.step()
    assert replica.output(request) == replica.expected(request)[:1]
    replica.handoff_queue.num_unreserved_blocks = 9  # what runs goes on
    replica.step()
    assert replica.output(request) == replica.expected(request)[:2]


def test_a_preempted_prompt_starts_again_and_is_dropped_when_its_deadline_passes() -> None:
    # The drop was forgotten: the reservation at the decode worker outlived the request.
    replica = Replica(num_blocks=10, max_rows=2, max_num_batched_tokens=3, max_model_len=40)
    old = replica.add("old", prompt_of(7, 1), params=params_of(25))
    while old.num_uncomputed_tokens > 1:
        replica.step()
    prompt = prompt_of(21, 2)
    moving = replica.add("moving", prompt, decode_worker="d", deadline_s=9.0)
    while moving.num_preemptions == 0:
        replica.step()
    assert replica.handoff_queue.events == [("start", moving.key)]
    assert replica.handoff_queue.retracted == [old.key] * old.num_preemptions + [moving.key]
    replica.clock.advance(10.0)
    while moving.key not in replica.failures:
        replica.step()
    assert replica.handoff_queue.events == [("start", moving.key), ("drop", moving.key)]
    replica.run()
    replica.check_idle()


def test_a_row_that_is_not_finite_is_dropped_from_the_outbox() -> None:
    replica = Replica(max_num_batched_tokens=8)
    request = replica.add("a", prompt_of(13), decode_worker="d", params=params_of(9, seed=666))
    replica.executor.poison(666, 10)
    replica.run()
    assert replica.handoff_queue.events == [("start", request.key), ("drop", request.key)]
    assert request.key in replica.failures
    replica.check_idle()


# ---- join ----------------------------------------------------------------------------------------


def _arrive(target: Replica, name: str, prompt: list[int], max_tokens: int) -> Request:
    """A prompt computed by `target` itself comes back as one whose KV was received."""
    sent = target.add(name, prompt, decode_worker="d", params=params_of(max_tokens))
    while sent.key not in target.handoff_queue.held:
        target.step()
    held = target.handoff_queue.held.pop(sent.key)
    return Request(
        spec=RequestSpec(params=held.params),
        key=RequestKey(name),
        ingress_id="ingress-a",
        tokens=list(held.tokens),
        num_prompt_tokens=len(prompt),
        num_emitted_tokens=1,
        num_computed_tokens=len(held.tokens) - 1,
        arrival_s=target.clock.now_s(),
        block_ids=held.block_ids,
    )


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 12, 13])
def test_a_joined_request_decodes_from_the_blocks_it_brought(num_tokens: int) -> None:
    replica = Replica()
    request = _arrive(replica, "a", prompt_of(num_tokens), 9)
    num_plans = len(replica.executor.plans)
    replica.scheduler.join(request)
    replica.run()
    assert [p.num_new_tokens for p in replica.executor.plans[num_plans:]] == [[1]] * 8
    records = replica.records[request.key]
    assert [r.index for r in records] == list(range(9))
    assert [r.token_id for r in records] == replica.expected(request)
    assert records[-1].finish == "length"
    # Only the first token of an attempt says how much of its prompt was cached.
    assert [r.num_cached_tokens for r in records] == [0] + [None] * 8
    replica.check_idle()


def _join_unindexed(replica: Replica) -> Request:
    """A request with three full blocks that nobody finds, as when they came from elsewhere."""
    request = _arrive(replica, "a", prompt_of(13), 9)
    replica.cache.forget(request.block_ids)
    replica.scheduler.join(request)
    return request


def test_complete_blocks_of_a_joined_request_can_be_found_at_once() -> None:
    replica = Replica()
    _join_unindexed(replica)
    other = replica.add("b", prompt_of(13))
    replica.run()
    assert replica.records[other.key][0].num_cached_tokens == 12


def test_the_blocks_of_who_joins_are_offered_while_its_first_step_computes() -> None:
    replica = Replica()
    request = _join_unindexed(replica)
    assert replica.cache.match(request.block_hashes) == [], "the step would have to wait for it"
    replica.step()
    assert replica.cache.match(request.block_hashes[:3]) == request.block_ids[:3]
    replica.run()
    replica.check_idle()


def test_the_blocks_of_who_joins_and_leaves_before_a_step_are_not_offered() -> None:
    replica = Replica()
    request = _join_unindexed(replica)
    hashes = list(request.block_hashes)
    assert replica.scheduler.abort(request.key)
    replica.step()
    assert replica.cache.match(hashes) == []
    replica.run()
    replica.check_idle()


def test_a_request_that_joins_without_a_free_row_waits_and_recomputes() -> None:
    replica = Replica(max_rows=1)
    request = _arrive(replica, "a", prompt_of(13), 9)
    replica.lent = request.block_ids
    replica.add("busy", prompt_of(3), params=params_of(4))
    replica.step()
    replica.lent = []
    replica.scheduler.join(request)
    assert (request.row, request.block_ids, request.num_preemptions) == (None, [], 1)
    replica.check()
    replica.run()
    records = replica.records[request.key]
    assert [r.index for r in records] == list(range(9))
    assert [r.token_id for r in records] == replica.expected(request)
    assert [r.num_cached_tokens for r in records] == [0] + [None] * 8
    readmitted = next(
        plan
        for plan in replica.executor.plans[2:]
        if plan.admissions and len(plan.admissions[0].token_ids) == 14
    )
    assert readmitted.num_computed_tokens == [12]  # its blocks were still in the prefix index
    replica.check_idle()


def test_join_asks_for_exactly_one_token_to_compute() -> None:
    replica = Replica()
    request = _arrive(replica, "a", prompt_of(13), 9)
    request.num_computed_tokens -= 1
    with pytest.raises(AssertionError):
        replica.scheduler.join(request)


# ---- abort ---------------------------------------------------------------------------------------


def test_an_unknown_request_cannot_be_aborted() -> None:
    replica = Replica()
    assert not replica.scheduler.abort(RequestKey("nobody"))
    request = replica.add("a", prompt_of(3))
    assert not replica.scheduler.abort(RequestKey("a", child=1))
    assert not replica.scheduler.abort(RequestKey("a", attempt=1))
    replica.run()
    assert not replica.scheduler.abort(request.key)


@pytest.mark.parametrize("num_steps", range(7))
@pytest.mark.parametrize("decode_worker", [None, "d"])
def test_an_aborted_request_is_gone_in_every_phase(
    num_steps: int, decode_worker: str | None
) -> None:
    # 0 waiting, 1 and 2 between chunks, 3 its first token, then decoding (or handed over).
    replica = Replica(max_num_batched_tokens=8)
    request = replica.add("a", prompt_of(19), decode_worker=decode_worker)
    for _ in range(num_steps):
        replica.step()
    before = list(replica.output(request))
    is_here = decode_worker is None or num_steps < 3
    assert replica.scheduler.abort(request.key) is is_here
    assert not replica.scheduler.abort(request.key)
    replica.check()
    neighbour = replica.add("b", prompt_of(5))
    replica.run()
    assert replica.output(request) == before
    assert replica.left.count(request.key) == int(not is_here)
    assert replica.output(neighbour) == replica.expected(neighbour)
    drops = [event for event in replica.handoff_queue.events if event[0] == "drop"]
    assert drops == ([("drop", request.key)] if decode_worker and is_here else [])
    if is_here:
        replica.check_idle()


def test_a_preempted_request_can_be_aborted_while_it_waits() -> None:
    replica = Replica(num_blocks=5, max_rows=2, max_num_batched_tokens=32, max_model_len=20)
    old = replica.add("old", prompt_of(7, 1), params=params_of(12))
    new = replica.add("new", prompt_of(7, 2), params=params_of(12))
    while new.num_preemptions == 0:
        replica.step()
    assert replica.scheduler.abort(new.key)
    replica.run()
    assert replica.left == [old.key]
    replica.check_idle()


def test_a_request_that_joined_since_the_last_step_can_be_aborted() -> None:
    replica = Replica()
    request = _arrive(replica, "a", prompt_of(2 * BLOCK_SIZE), 9)
    replica.scheduler.join(request)
    assert replica.scheduler.abort(request.key)
    other = replica.add("b", prompt_of(5))
    replica.run()
    assert replica.output(other) == replica.expected(other)
    replica.check_idle()

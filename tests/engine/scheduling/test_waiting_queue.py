"""The queue in front of a worker, against a sorted list."""

import random

import pytest

from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.waiting import WaitingQueue, by_arrival


def _request(name: str, *, arrival_s: float, priority: int = 0, num_tokens: int = 3) -> Request:
    return Request(
        spec=RequestSpec(params=SamplingParams(max_tokens=1), priority=priority),
        key=RequestKey(name),
        ingress_id="ingress",
        tokens=[1] * num_tokens,
        num_prompt_tokens=num_tokens,
        arrival_s=arrival_s,
    )


def test_order_is_priority_then_arrival_then_order_of_adding() -> None:
    queue = WaitingQueue()
    queue.add(_request("late", arrival_s=2.0))
    queue.add(_request("urgent", arrival_s=9.0, priority=-3))
    queue.add(_request("early", arrival_s=1.0))
    queue.add(_request("twin of early", arrival_s=1.0))
    queue.add(_request("patient", arrival_s=0.0, priority=1))
    names = [request.key.request_id for request in queue]
    assert names == ["urgent", "early", "twin of early", "late", "patient"]


def test_first_come_first_served_knows_no_priority() -> None:
    queue = WaitingQueue(by_arrival)
    queue.add(_request("late", arrival_s=2.0, priority=-3))
    queue.add(_request("early", arrival_s=1.0, priority=3))
    assert [request.key.request_id for request in queue] == ["early", "late"]


def test_a_request_that_comes_back_goes_ahead_of_what_arrived_after_it() -> None:
    queue = WaitingQueue()
    first = _request("first", arrival_s=1.0)
    queue.add(first)
    queue.add(_request("second", arrival_s=2.0))
    assert queue.remove(first.key) is first
    queue.add(first)
    assert next(iter(queue)) is first


def test_walking_the_queue_may_change_it() -> None:
    queue = WaitingQueue()
    for i in range(5):
        queue.add(_request(str(i), arrival_s=float(i)))
    for request in queue:
        queue.remove(request.key)
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_who_leaves_while_the_queue_is_walked_is_passed_over() -> None:
    queue = WaitingQueue()
    for i in range(4):
        queue.add(_request(str(i), arrival_s=float(i)))
    walked = []
    for request in queue:
        walked.append(request.key.request_id)
        queue.remove(RequestKey("2"))
    assert walked == ["0", "1", "3"]


def test_a_key_waits_only_once_and_a_stranger_is_not_found() -> None:
    queue = WaitingQueue()
    queue.add(_request("a", arrival_s=1.0))
    with pytest.raises(AssertionError, match="already waiting"):
        queue.add(_request("a", arrival_s=2.0))
    assert queue.remove(RequestKey("b")) is None
    assert RequestKey("a") in queue
    assert RequestKey("a", attempt=1) not in queue


@pytest.mark.parametrize("seed", range(3))
def test_random_adds_and_removals_keep_order_and_token_count(seed: int) -> None:
    rng = random.Random(seed)
    queue = WaitingQueue()
    model: list[tuple[int, float, int, Request]] = []
    for i in range(300):
        if model and rng.random() < 0.45:
            *_, gone = model.pop(rng.randrange(len(model)))
            assert queue.remove(gone.key) is gone
        else:
            request = _request(
                str(i),
                arrival_s=float(rng.randrange(20)),
                priority=rng.randrange(-1, 2),
                num_tokens=rng.randrange(1, 9),
            )
            queue.add(request)
            model.append((request.spec.priority, request.arrival_s, i, request))
        ordered = [request for *_, request in sorted(model, key=lambda entry: entry[:3])]
        assert list(queue) == ordered
        assert len(queue) == len(model)
        assert queue.num_tokens == sum(len(request.tokens) for request in ordered)

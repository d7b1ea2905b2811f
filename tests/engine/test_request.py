"""A request's arithmetic."""

from typing import Any

import msgspec
import pytest

from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.finish import FinishRules


def _request(num_prompt_tokens: int, num_emitted_tokens: int = 0, max_tokens: int = 7) -> Request:
    return Request(
        spec=RequestSpec(params=SamplingParams(max_tokens=max_tokens)),
        key=RequestKey("a"),
        ingress_id="ingress",
        tokens=list(range(num_prompt_tokens + num_emitted_tokens)),
        num_prompt_tokens=num_prompt_tokens,
        num_emitted_tokens=num_emitted_tokens,
        arrival_s=0.0,
    )


def test_progress_is_the_distance_between_computed_and_known_tokens() -> None:
    request = _request(5)
    assert request.num_uncomputed_tokens == 5
    request.num_computed_tokens = 4
    assert request.num_uncomputed_tokens == 1
    request.num_computed_tokens = 5
    request.tokens.append(9)
    assert (request.num_known_tokens, request.num_output_tokens) == (6, 1)
    assert request.num_uncomputed_tokens == 1


def test_a_token_in_flight_is_the_next_to_compute() -> None:
    request = _request(5)
    progress = []
    for num_computed_tokens in (3, 4, 5, 6):  # the last with two in flight
        request.num_computed_tokens = num_computed_tokens
        progress.append(request.num_uncomputed_tokens)
    assert progress == [2, 1, 1, 1]
    request.tokens.append(9)  # the older of the two has come back
    assert (request.num_known_tokens, request.num_uncomputed_tokens) == (6, 1)


def test_tokens_of_an_earlier_attempt_count_for_max_tokens() -> None:
    request = _request(5, num_emitted_tokens=3)
    assert (request.num_output_tokens, request.max_known_tokens) == (3, 12)


@pytest.mark.parametrize(
    ("given", "max_model_len", "stop_ids", "max_known_tokens"),
    [
        ({}, 100, {1, 2}, 12),
        ({"ignore_eos": True}, 100, set(), 12),
        ({"stop_token_ids": (7,)}, 9, {1, 2, 7}, 9),
        ({"stop_token_ids": (7,), "ignore_eos": True}, 12, {7}, 12),
    ],
)
def test_a_scheduler_writes_to_a_request_what_ends_it(
    given: dict[str, Any], max_model_len: int, stop_ids: set[int], max_known_tokens: int
) -> None:
    request = Request(
        spec=RequestSpec(params=SamplingParams(max_tokens=7, **given)),
        key=RequestKey("a"),
        ingress_id="ingress",
        tokens=[3] * 5,
        num_prompt_tokens=5,
        arrival_s=0.0,
    )
    rules = FinishRules((1, 2), max_model_len)
    for _ in range(2):  # once more when it comes back by `join`
        rules.apply(request)
        assert (request.stop_ids, request.max_known_tokens) == (stop_ids, max_known_tokens)
    endings = {token_id: rules.reason(request, token_id) for token_id in range(8)}
    assert {token_id for token_id, (why, _) in endings.items() if why == "stop"} == stop_ids
    request.tokens += [3] * (max_known_tokens - 6)
    assert rules.reason(request, 3) == (None, None)
    request.tokens.append(3)
    assert rules.reason(request, 3) == ("length", None)


@pytest.mark.parametrize(("num_prompt", "num_tokens", "num_emitted"), [(0, 0, 0), (4, 3, 0)])
def test_a_prompt_has_tokens_and_is_known(
    num_prompt: int, num_tokens: int, num_emitted: int
) -> None:
    with pytest.raises(AssertionError, match="prompt of"):
        Request(
            spec=RequestSpec(params=SamplingParams(max_tokens=1)),
            key=RequestKey("a"),
            ingress_id="ingress",
            tokens=[1] * num_tokens,
            num_prompt_tokens=num_prompt,
            num_emitted_tokens=num_emitted,
            arrival_s=0.0,
        )


@pytest.mark.parametrize("num_emitted", [0, 1, 3])
def test_what_follows_the_prompt_must_be_what_was_emitted(num_emitted: int) -> None:
    with pytest.raises(AssertionError, match="said to be emitted"):
        Request(
            spec=RequestSpec(params=SamplingParams(max_tokens=1)),
            key=RequestKey("a"),
            ingress_id="ingress",
            tokens=[1] * 7,
            num_prompt_tokens=5,
            num_emitted_tokens=num_emitted,
            arrival_s=0.0,
        )


def test_keys_of_other_choices_and_attempts_differ() -> None:
    keys = {RequestKey("a"), RequestKey("a", 1), RequestKey("a", 0, 1), RequestKey("b")}
    assert len(keys) == 4
    assert RequestKey("a") in keys
    assert sorted(keys)[0] == RequestKey("a")


def test_keys_and_parameters_survive_the_wire() -> None:
    params = SamplingParams(
        max_tokens=3, temperature=0.5, logit_bias={7: -1.5}, seed=2**64 - 1, stop_token_ids=(1, 2)
    )
    for value in (RequestKey("a", 2, 3), params):
        wire = msgspec.msgpack.encode(value)
        assert msgspec.msgpack.decode(wire, type=type(value)) == value


@pytest.mark.parametrize(
    ("given", "needs_history"),
    [
        ({}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_only_penalties_need_the_history(given: dict[str, float], needs_history: bool) -> None:
    assert SamplingParams(max_tokens=1, **given).needs_history is needs_history  # type: ignore[arg-type]


def test_greedy_means_temperature_zero() -> None:
    assert SamplingParams(max_tokens=1, temperature=0.0).is_greedy
    assert not SamplingParams(max_tokens=1, temperature=0.01).is_greedy

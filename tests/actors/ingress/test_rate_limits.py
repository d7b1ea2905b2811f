"""Requests and tokens a minute: what is taken, given back, owed, refused, and said in headers."""

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.ingress.rate_limits import RateLimitError, RateLimits, TokenBucket, duration
from configs.schema import RateLimitConfig
from engine.clock import ManualClock
from tests.actors.ingress.edge_app import EdgeApp, edge_app


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(random.uniform(0, 1e6))


def limits(clock: ManualClock, **by_key: RateLimitConfig) -> RateLimits:
    return RateLimits({name.replace("each", "*"): limit for name, limit in by_key.items()}, clock)


def test_a_minute_holds_as_many_requests_as_it_says(clock: ManualClock) -> None:
    found = limits(clock, each=RateLimitConfig(requests_per_minute=3))
    for _ in range(3):
        found.grant("a", 10**9)
    with pytest.raises(RateLimitError) as caught:
        found.grant("a", 1)
    assert caught.value.status == 429
    assert caught.value.retry_after_s == pytest.approx(20)
    found.grant("b", 1)  # another key has its own minute
    clock.advance(20.001)
    found.grant("a", 1)
    with pytest.raises(RateLimitError):
        found.grant("a", 1)


def test_what_was_not_used_comes_back_once(clock: ManualClock) -> None:
    found = limits(clock, a=RateLimitConfig(tokens_per_minute=100))
    grant = found.grant("a", 30)
    grant.settle(80)
    assert grant.headers()["x-ratelimit-remaining-tokens"] == "20"
    with pytest.raises(RateLimitError):
        found.grant("a", 21)
    grant.end(50)
    grant.end(0)
    assert grant.headers()["x-ratelimit-remaining-tokens"] == "50"


def test_what_was_used_beyond_is_owed(clock: ManualClock) -> None:
    found = limits(clock, a=RateLimitConfig(tokens_per_minute=60))
    found.grant("a", 10).end(90)
    with pytest.raises(RateLimitError) as caught:
        found.grant("a", 1)
    assert caught.value.retry_after_s == pytest.approx(31)
    assert caught.value.headers["x-ratelimit-remaining-tokens"] == "0"
    clock.advance(31.001)
    found.grant("a", 1)


def test_a_refusal_after_tokenising_takes_no_tokens(clock: ManualClock) -> None:
    found = limits(clock, a=RateLimitConfig(tokens_per_minute=60))
    grant = found.grant("a", 10)
    with pytest.raises(RateLimitError, match="too large for any minute"):
        grant.settle(61)
    grant.end(0)
    assert grant.headers()["x-ratelimit-remaining-tokens"] == "60"


def test_a_key_without_limits_has_no_headers(clock: ManualClock) -> None:
    grant = limits(clock, a=RateLimitConfig(requests_per_minute=1)).grant("b", 10**9)
    grant.settle(10**12)
    grant.end(5)
    assert grant.headers() == {}


@settings(deadline=None)
@given(st.data())
def test_no_minute_ever_holds_more_than_two_minutes_worth(data: st.DataObject) -> None:
    """A full bucket and a minute's refill, at most, whatever is taken and given back."""
    clock, per_minute = ManualClock(), data.draw(st.integers(1, 50))
    bucket = TokenBucket(per_minute, clock)
    taken: list[tuple[float, float]] = []
    for _ in range(data.draw(st.integers(1, 60))):
        clock.advance(data.draw(st.floats(0, 40)))
        num = data.draw(st.integers(0, 60))
        wait_s = bucket.wait_s(num)
        if wait_s == 0:
            bucket.add(-num)
            taken.append((clock.now_s(), num))
        else:
            assert bucket.level < num
        assert 0 <= bucket.level <= per_minute
        recent = sum(n for at_s, n in taken if at_s > clock.now_s() - 60)
        assert recent <= 2 * per_minute + 1e-6


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.1199, "120ms"), (0.9999, "1s"), (7.5, "7.5s"), (60, "1m0s"), (3661, "61m1s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---- over the whole ingress ----------------------------------------------------------------------


def limited(clock: ManualClock, **values: int) -> EdgeApp:
    return edge_app({"api.limits": {"*": values}}, clock=clock)


def test_an_answer_says_what_is_left_and_a_refusal_when_to_come_back(clock: ManualClock) -> None:
    app = limited(clock, requests_per_minute=2, tokens_per_minute=1000)
    ids = random.choices(range(100), k=7)
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 40}
    app.workers.num_tokens = 5  # of the 40
    first = app.post(body)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-tokens"] == str(1000 - 7 - 5)
    second = app.post(body | {"stream": True})
    assert second.headers["x-ratelimit-remaining-requests"] == "0"
    assert int(second.headers["x-ratelimit-remaining-tokens"]) == 1000 - 12 - 47
    third = app.post(body)
    assert third.status_code == 429
    assert third.headers["retry-after"] == "30"
    assert third.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert third.headers["x-ratelimit-remaining-tokens"] == str(1000 - 24)
    error = third.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert re.search(r"2 requests a minute", error["message"])


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_fails_before_its_first_token_costs_no_tokens(
    clock: ManualClock, is_streamed: bool
) -> None:
    app = limited(clock, tokens_per_minute=500)
    app.workers.error = RuntimeError("a defect")
    body = {"prompt": [1, 2, 3], "max_tokens": 20, "stream": is_streamed}
    assert app.post(body).status_code == 500
    app.workers.error = None
    answer = app.post(body | {"stream": False})
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(500 - 3 - 20)


def test_too_many_tokens_are_refused_before_they_are_tokenised(clock: ManualClock) -> None:
    app = limited(clock, tokens_per_minute=100)
    answer = app.post({"prompt": "word " * 99})
    assert answer.status_code == 429
    assert app.encoder.num_calls == 0
    assert app.post({"prompt": [1], "max_tokens": 100}).status_code == 429
    assert app.post({"prompt": [1], "n": 3, "max_tokens": 34}).status_code == 429
    assert app.post({"prompt": [1], "n": 3, "max_tokens": 33}).status_code == 200

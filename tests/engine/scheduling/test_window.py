"""The window: each rule by itself, and what it does to a queue over a minute."""

import math
import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.window import (
    AdaptiveWindow,
    ArrivalRate,
    Dispatch,
    FixedWindow,
    Gathered,
    NoWindow,
    Wait,
    Window,
)

FLOOR_S, REQUEST_S = 8e-3, 2.56e-3  # a step of n short prompts takes FLOOR_S + n * REQUEST_S


def _gathered(num_waiting: int, oldest_arrival_s: float = 0.0) -> Gathered:
    return Gathered(
        num_waiting=num_waiting,
        oldest_arrival_s=oldest_arrival_s,
        step_s=FLOOR_S + num_waiting * REQUEST_S,
        floor_s=FLOOR_S,
    )


def _adaptive(max_window_s: float = 0.02) -> AdaptiveWindow:
    return AdaptiveWindow(min_window_s=0.0, max_window_s=max_window_s)


def _busy(window: Window, rate: float) -> float:
    """Let a second of evenly spaced arrivals pass; the time after it."""
    for i in range(int(rate)):
        window.arrived(i / rate)
    return 1.0


# ---- each rule -----------------------------------------------------------------------------------


def test_without_a_window_a_prompt_starts_at_once() -> None:
    assert isinstance(NoWindow().decide(_gathered(1), 0.0), Dispatch)


def test_a_fixed_window_ends_by_time_or_by_count() -> None:
    window = FixedWindow(0.005, 8)
    assert window.decide(_gathered(1, oldest_arrival_s=2.0), 2.001) == Wait(2.005, "window")
    assert isinstance(window.decide(_gathered(1, oldest_arrival_s=2.0), 2.005), Dispatch)
    assert isinstance(window.decide(_gathered(8, oldest_arrival_s=2.0), 2.001), Dispatch)


def test_at_a_low_rate_nobody_is_made_to_wait() -> None:
    window = _adaptive()
    now_s = _busy(window, 20)  # 20/s * 8 ms = 0.16 prompts saved for each that waits
    assert isinstance(window.decide(_gathered(1, now_s), now_s), Dispatch)


def test_at_a_high_rate_it_waits_while_that_saves_more_than_it_costs() -> None:
    window = _adaptive()
    now_s = _busy(window, 400)  # 400/s * 8 ms = 3.2
    waiting = window.decide(_gathered(1, now_s), now_s)
    assert isinstance(waiting, Wait)
    assert now_s < waiting.until_s <= now_s + 0.02
    assert isinstance(window.decide(_gathered(3, now_s), now_s), Wait)
    assert isinstance(window.decide(_gathered(4, now_s), now_s), Dispatch)


def test_beside_other_work_an_adaptive_window_does_not_wait() -> None:
    window = _adaptive()
    now_s = _busy(window, 400)
    beside = replace(_gathered(1, now_s), has_other_work=True)
    assert isinstance(window.decide(beside, now_s), Dispatch)


def test_a_due_time_keeps_its_slack() -> None:
    window = AdaptiveWindow(min_window_s=0.0, max_window_s=0.02, slack_s=0.004)
    now_s = _busy(window, 400)
    gathered = _gathered(1, now_s)
    due_s = now_s + gathered.step_s + 0.004 + 0.003
    decision = window.decide(replace(gathered, first_due_s=due_s), now_s)
    assert isinstance(decision, Wait)
    assert decision.until_s == pytest.approx(now_s + 0.003)
    late = window.decide(replace(gathered, first_due_s=due_s), now_s + 0.0031)
    assert isinstance(late, Dispatch)
    missed = window.decide(replace(gathered, first_due_s=now_s - 1.0), now_s)
    assert isinstance(missed, Dispatch)


def test_a_window_ends_where_it_said_though_nobody_came() -> None:
    window = _adaptive(max_window_s=0.004)
    now_s = _busy(window, 600)
    waiting = window.decide(_gathered(1, now_s), now_s)
    assert isinstance(waiting, Wait)
    assert isinstance(window.decide(_gathered(1, now_s), waiting.until_s), Dispatch)


def test_each_start_ends_an_epoch_and_the_next_wait_opens_a_new_one() -> None:
    window = _adaptive(max_window_s=0.004)
    now_s = _busy(window, 600)
    first = window.decide(_gathered(1, now_s), now_s)
    assert isinstance(first, Wait)
    assert isinstance(window.decide(_gathered(1, now_s), first.until_s), Dispatch)
    second = window.decide(_gathered(1, first.until_s), first.until_s)
    assert isinstance(second, Wait)
    assert second.until_s > first.until_s


def test_a_wait_ends_when_as_many_as_were_expected_are_here() -> None:
    window = AdaptiveWindow(min_window_s=0.0, max_window_s=0.02, max_depth=3)
    now_s = _busy(window, 900)  # 7.2 are saved for: only the depth ends this wait early
    assert isinstance(window.decide(_gathered(1, now_s), now_s), Wait)
    assert isinstance(window.decide(_gathered(2, now_s), now_s), Wait)
    assert isinstance(window.decide(_gathered(3, now_s), now_s), Dispatch)


def test_the_rate_converges_and_fades() -> None:
    rate = ArrivalRate(0.25)
    assert rate.per_second(3.0) == 0.0
    for i in range(2000):
        rate.arrived(i / 200)
    assert rate.per_second(10.0) == pytest.approx(200, rel=0.05)
    assert rate.per_second(10.0 + 0.25 * math.log(10)) == pytest.approx(20, rel=0.05)


@given(
    arrivals=st.lists(st.floats(0.0, 0.05), max_size=30),
    num_waiting=st.integers(1, 40),
    due_s=st.none() | st.floats(-1.0, 1.0),
)
def test_a_wait_ends_in_the_future_and_within_the_largest_window(
    arrivals: list[float], num_waiting: int, due_s: float | None
) -> None:
    windows = [_adaptive(max_window_s=0.01), _adaptive(max_window_s=0.01)]
    now_s = 0.0
    for gap_s in arrivals:
        now_s += gap_s
        gathered = replace(_gathered(num_waiting, now_s), first_due_s=due_s)
        first, second = windows
        first.arrived(now_s)
        second.arrived(now_s)
        decision = first.decide(gathered, now_s)
        assert decision == second.decide(gathered, now_s)  # same inputs, same decision
        if isinstance(decision, Wait):
            assert now_s < decision.until_s <= now_s + 0.01


# ---- a minute of arrivals ------------------------------------------------------------------------


def _latencies_ms(
    window: Window, arrivals: list[float], max_batch: float = math.inf
) -> list[float]:
    """Every short prompt's time to its first token on one device that asks `window`."""
    due, waiting, latencies = deque(arrivals), deque[float](), []
    now_s = 0.0
    while due or waiting:
        if not waiting:
            now_s = due[0]
        elif isinstance(found := window.decide(_gathered(len(waiting), waiting[0]), now_s), Wait):
            now_s = min(found.until_s, due[0]) if due else found.until_s
        else:
            batch = [waiting.popleft() for _ in range(int(min(len(waiting), max_batch)))]
            now_s += FLOOR_S + len(batch) * REQUEST_S
            latencies += [1000 * (now_s - arrival_s) for arrival_s in batch]
        while due and due[0] <= now_s:
            window.arrived(due[0])
            waiting.append(due.popleft())
    return latencies


def _poisson(rate: float, seconds: float, seed: int) -> list[float]:
    rng, now_s, arrivals = random.Random(seed), 0.0, []
    while (now_s := now_s + rng.expovariate(rate)) < seconds:
        arrivals.append(now_s)
    return arrivals


@pytest.mark.parametrize("seed", range(3))
def test_at_200_short_prompts_a_second_the_window_does_not_diverge(seed: int) -> None:
    arrivals = _poisson(200.0, 60.0, seed)
    latencies = _latencies_ms(_adaptive(), arrivals)
    p50, p99 = np.percentile(latencies, [50, 99])
    assert len(latencies) == len(arrivals)
    assert p50 < 42
    assert p99 < 78


def test_where_the_depth_of_the_last_batch_limits_the_next_the_same_load_diverges() -> None:
    # What the rules avoid: with one prompt a step, a second of work arrives in half of one.
    latencies = _latencies_ms(NoWindow(), _poisson(200.0, 20.0, seed=0), max_batch=1)
    assert np.percentile(latencies, 50) > 5000


@pytest.mark.parametrize("rate", [20.0, 100.0, 300.0])
def test_at_any_rate_the_adaptive_window_costs_little_against_none(rate: float) -> None:
    arrivals = _poisson(rate, 30.0, seed=1)
    adaptive = np.mean(_latencies_ms(_adaptive(max_window_s=0.008), arrivals))
    none = np.mean(_latencies_ms(NoWindow(), arrivals))
    assert adaptive < 1.1 * none

"""Decides whether to start a step of short prompts now or to wait for more that share it.

Asked while the device is idle and a short prompt waits. Sharing saves a step's floor c0 (weights,
launches) for each prompt that joins. Waiting for dt delays each of n prompts by dt and saves
r dt c0 of device time, where r is the arrival rate of short prompts. So `AdaptiveWindow` waits only
while all of these hold:

    r c0 > n                            what waiting saves exceeds what it costs
    n < D                               D = prompts expected by the end: n at opening + r W
    now < opening + W                   W = time in which the largest useful batch arrives, bounded
    due - now - step > slack            the first due time can still be kept

D and W are computed from the rate whenever a window opens, never from the depth of the last batch:
a depth learnt from batches that it limits itself could only fall. D ends the wait; it never limits
the batch. `FixedWindow` waits for a fixed time or number of prompts. `NoWindow` never waits. If a
long prompt's chunk runs anyway, short prompts share its floor already, so no adaptive wait pays.

Pure except for the rate and the open window: time is an argument, and a `Wait` is not a timer. The
caller asks again when the wait is over or when something has happened (an arrival, an abort).
"""

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The short prompts that could start now, and what a step with them costs."""

    num_waiting: int  # at least one
    oldest_arrival_s: float
    first_due_s: float | None = None  # the earliest time a first token is due; None = never
    step_s: float = 0.0  # predicted duration of a step with all of them
    floor_s: float = 0.0  # c0: the part of it that any step costs
    has_other_work: bool = False  # a step runs in any case: a long prompt waits, too


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Start a step with all gathered prompts."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again at `until_s`, or as soon as anything happens."""

    until_s: float
    reason: str


class Window(Protocol):
    """Decides when gathered short prompts start."""

    def arrived(self, now_s: float) -> None:
        """A short prompt has joined the queue."""
        ...

    def decide(self, gathered: Gathered, now_s: float) -> Dispatch | Wait: ...


class ArrivalRate:
    """Arrivals per second, weighted exponentially by age: starts at 0, decays between arrivals."""

    def __init__(self, time_constant_s: float) -> None:
        assert time_constant_s > 0, f"a time constant of {time_constant_s} s"
        self._time_constant_s = time_constant_s
        self._rate = 0.0
        self._at_s = -math.inf

    def arrived(self, now_s: float) -> None:
        self._rate = self.per_second(now_s) + 1.0 / self._time_constant_s
        self._at_s = max(self._at_s, now_s)

    def per_second(self, now_s: float) -> float:
        age_s = max(0.0, now_s - self._at_s)
        return self._rate * math.exp(-age_s / self._time_constant_s)


class NoWindow:
    """Starts at once."""

    def arrived(self, now_s: float) -> None:
        """Does nothing: arrivals do not matter here."""

    def decide(self, gathered: Gathered, now_s: float) -> Dispatch | Wait:
        return Dispatch("no window")


class FixedWindow:
    """Waits until the oldest prompt has waited `window_s` or `max_requests` have gathered."""

    def __init__(self, window_s: float, max_requests: int) -> None:
        self._window_s = window_s
        self._max_requests = max_requests

    def arrived(self, now_s: float) -> None:
        """Does nothing: arrivals do not matter here."""

    def decide(self, gathered: Gathered, now_s: float) -> Dispatch | Wait:
        until_s = gathered.oldest_arrival_s + self._window_s
        if gathered.num_waiting >= self._max_requests:
            return Dispatch("as many as were to be gathered")
        return Dispatch("the window is over") if now_s >= until_s else Wait(until_s, "window")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """One epoch: from the first wait to the next start."""

    until_s: float
    depth: float


class AdaptiveWindow:
    """Waits while waiting pays, by the module's rules.

    `max_depth` is the largest useful batch in prompts: beyond the knee of the step time, sharing
    saves next to nothing.
    """

    def __init__(
        self,
        *,
        min_window_s: float,
        max_window_s: float,
        max_depth: int = 8,
        slack_s: float = 0.005,
        rate_time_constant_s: float = 0.25,
    ) -> None:
        assert 0 <= min_window_s <= max_window_s, f"a window in [{min_window_s}, {max_window_s}] s"
        assert max_depth > 0, f"a depth of {max_depth}"
        self._min_window_s = min_window_s
        self._max_window_s = max_window_s
        self._max_depth = max_depth
        self._slack_s = slack_s
        self._rate = ArrivalRate(rate_time_constant_s)
        self._opening: _Opening | None = None

    def arrived(self, now_s: float) -> None:
        self._rate.arrived(now_s)

    def decide(self, gathered: Gathered, now_s: float) -> Dispatch | Wait:
        decision = self._decide(gathered, now_s)
        if isinstance(decision, Dispatch):
            self._opening = None  # the next wait is a new epoch
        return decision

    def _decide(self, gathered: Gathered, now_s: float) -> Dispatch | Wait:
        if gathered.has_other_work:
            return Dispatch("a step runs anyway")
        rate, num_waiting = self._rate.per_second(now_s), gathered.num_waiting
        if rate * gathered.floor_s <= num_waiting:
            return Dispatch("waiting costs more than it saves")
        opening = self._opening = self._opening or self._open(num_waiting, rate, now_s)
        if num_waiting >= opening.depth:
            return Dispatch("as many as were expected")
        until_s = opening.until_s
        if gathered.first_due_s is not None:
            until_s = min(until_s, gathered.first_due_s - gathered.step_s - self._slack_s)
        if now_s >= until_s:
            return Dispatch("the window is over, or the first due time is near")
        return Wait(until_s, "more are expected")

    def _open(self, num_waiting: int, rate: float, now_s: float) -> _Opening:
        """Open a window; `rate` > 0, because it exceeds num_waiting / floor_s."""
        filling_s = (self._max_depth - num_waiting) / rate
        window_s = min(max(filling_s, self._min_window_s), self._max_window_s)
        depth = max(1.0, min(self._max_depth, num_waiting + rate * window_s))
        return _Opening(until_s=now_s + window_s, depth=depth)

"""The open-loop mixed load: when which prompt arrives, and what became of each request.

    gap to the next arrival     exponential, `rate` requests/s on average
    four of five are short      8-256 tokens, lognormal (median 74)
    one of five is long         2,048-8,191 tokens, uniform

One seed gives the same arrivals to every engine, whoever drives it: they are drawn from Python's
own generator in the order gap, class, length, and nothing else is. Knows no engine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from load_tests.prompts import FIRST_TOKEN_ID, LAST_TOKEN_ID

LengthClass = Literal["short", "long"]

SHARE_LONG = 0.2
SHORT_TOKENS = (8, 256)  # at least, at most
SHORT_LOG_MEAN, SHORT_LOG_DEVIATION = 4.3, 0.8
LONG_TOKENS = (2048, 8192)  # from, below
NUM_OUTPUT_TOKENS = 64
# What every engine serves before it is timed: equal prompts at once (how many, their tokens), then
# a stretch of the load by a seed of its own.
WARM_UP_PROMPTS = (64, 512)
WARM_UP_SEED = 1_000_003
# What requests say to a server that takes their priority: vLLM computes the lower number first.
SHORT_FIRST_PRIORITIES: dict[LengthClass, int] = {"short": 0, "long": 1}


class OverloadError(ConnectionError):
    """A server refused requests of a load for want of capacity: more arrive than it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a load; `at_s` counts from the load's start."""

    at_s: float
    num_tokens: int
    length_class: LengthClass


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLoad:
    """A stretch of arrivals. `shrink` divides every length, for models that are small or slow."""

    rate: float  # requests/s
    duration_s: float
    seed: int
    num_output_tokens: int = NUM_OUTPUT_TOKENS
    shrink: int = 1
    share_long: float = SHARE_LONG

    def arrivals(self) -> list[Arrival]:
        """In order of time, the last one no later than `duration_s`."""
        rng, now_s, arrivals = random.Random(self.seed), 0.0, []
        while (now_s := now_s + rng.expovariate(self.rate)) <= self.duration_s:
            length_class: LengthClass = "long" if rng.random() < self.share_long else "short"
            num_tokens = _long_tokens(rng) if length_class == "long" else _short_tokens(rng)
            arrivals.append(
                Arrival(
                    at_s=now_s,
                    num_tokens=max(1, num_tokens // self.shrink),
                    length_class=length_class,
                )
            )
        return arrivals

    def prompts(self, arrivals: Sequence[Arrival], vocab_size: int) -> list[list[int]]:
        """Random ids, the same for one load, drawn ahead so that arrivals cost little.

        What they are is of no matter to time, so these are not the ids that others draw.
        """
        rng = np.random.default_rng([self.seed, int(1e3 * self.rate)])
        end = min(LAST_TOKEN_ID, vocab_size)
        return [rng.integers(FIRST_TOKEN_ID, end, size=a.num_tokens).tolist() for a in arrivals]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of a request: seconds on the load's own clock."""

    arrival: Arrival
    first_s: float  # its first token was read
    last_s: float
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        """From when it was due to arrive, so a late add is the engine's delay."""
        return self.first_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """On average a token after the first; 0 where there is none."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


class Stamps:
    """When each request's first and last token were read."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals
        self._first_s: list[float | None] = [None] * len(arrivals)
        self._last_s = [0.0] * len(arrivals)
        self._num_tokens = [0] * len(arrivals)

    def add(self, index: int, at_s: float, num_tokens: int = 1) -> None:
        """`num_tokens` of the request that arrived as number `index` were read at `at_s`."""
        if self._first_s[index] is None:
            self._first_s[index] = at_s
        self._last_s[index] = at_s
        self._num_tokens[index] += num_tokens

    def served(self, num_output_tokens: int) -> list[Served]:
        """One entry a request. Raises AssertionError unless each got all its tokens."""
        served = []
        for i, arrival in enumerate(self._arrivals):
            first_s, num_tokens = self._first_s[i], self._num_tokens[i]
            assert first_s is not None, f"request {i} got no token"
            assert num_tokens == num_output_tokens, f"request {i} got {num_tokens} tokens"
            served.append(
                Served(
                    arrival=arrival,
                    first_s=first_s,
                    last_s=self._last_s[i],
                    num_tokens=num_tokens,
                )
            )
        return served


def _long_tokens(rng: random.Random) -> int:
    return rng.randrange(*LONG_TOKENS)


def _short_tokens(rng: random.Random) -> int:
    least, most = SHORT_TOKENS
    return max(least, min(most, int(rng.lognormvariate(SHORT_LOG_MEAN, SHORT_LOG_DEVIATION))))

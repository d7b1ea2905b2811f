"""Limits of requests and tokens a minute for each API key.

Each limit is a bucket that refills. A request takes what it may need when it arrives; when it ends
it gives back what it did not use, or owes what it used in excess. Several replicas of the ingress
share their keys' buckets by way of `SharedBuckets` (replica_board.py). Knows no HTTP but the names
of OpenAI's headers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

from configs.schema import EVERY_KEY, RateLimitConfig
from engine.clock import Clock
from engine.errors import CapacityError
from engine.messages import KeyLevel, KeyUse, LimitKind

MINUTE_S = 60.0


class RateLimitError(CapacityError):
    """The key's limit is exhausted (429); `headers` say what is left and when it refills."""

    def __init__(self, message: str, *, retry_after_s: float, headers: dict[str, str]) -> None:
        super().__init__(message, retry_after_s=retry_after_s, status=429)
        self.headers = headers


class TokenBucket:
    """A minute's worth of something, full at the start and refilled evenly."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at_s = clock.now_s()

    @property
    def level(self) -> float:
        """The tokens in the bucket now; below 0 = owed."""
        now_s = self._clock.now_s()
        refilled = self._level + (now_s - self._at_s) * self.per_minute / MINUTE_S
        self._level, self._at_s = min(refilled, float(self.per_minute)), now_s
        return self._level

    def wait_s(self, num: float) -> float:
        """Returns the seconds until `num` are in the bucket; 0 if they are."""
        return max(num - self.level, 0.0) * MINUTE_S / self.per_minute

    def add(self, num: float) -> None:
        """Puts `num` into the bucket, or takes out if below 0; never more than full."""
        self.set_level(self.level + num)

    def set_level(self, level: float) -> None:
        """Fills or empties the bucket to `level`, at most full."""
        self._level, self._at_s = min(level, float(self.per_minute)), self._clock.now_s()


def make_buckets(limits: RateLimitConfig, clock: Clock) -> dict[LimitKind, TokenBucket]:
    """Returns a full bucket for each kind that is limited."""
    per_minute: dict[LimitKind, int | None] = {
        "requests": limits.requests_per_minute,
        "tokens": limits.tokens_per_minute,
    }
    return {kind: TokenBucket(num, clock) for kind, num in per_minute.items() if num is not None}


def limits_of(limits: Mapping[str, RateLimitConfig], key_name: str) -> RateLimitConfig | None:
    """Returns a key's own limits, or those of every other key; None = it has none."""
    return limits.get(key_name) or limits.get(EVERY_KEY)


class KeyBuckets:
    """The buckets of one key at one replica, and what was used of them here."""

    def __init__(self, name: str, limits: RateLimitConfig, clock: Clock) -> None:
        self._name = name
        self._buckets = make_buckets(limits, clock)
        self._used: dict[LimitKind, int] = dict.fromkeys(self._buckets, 0)
        self._reported: dict[LimitKind, int] = dict.fromkeys(self._buckets, 0)

    def take(self, kind: LimitKind, num: int) -> None:
        """Takes `num` requests or tokens. Raises RateLimitError, and takes nothing, if too few."""
        bucket = self._buckets.get(kind)
        if bucket is None:
            return
        wait_s = bucket.wait_s(num)
        if wait_s > 0:
            raise self._refusal(kind, bucket, num, wait_s)
        bucket.add(-num)
        self._used[kind] += num

    def give_back(self, kind: LimitKind, num: int) -> None:
        """Returns what was taken and not used; below 0 = used in excess."""
        bucket = self._buckets.get(kind)
        if bucket is not None:
            bucket.add(num)
            self._used[kind] -= num

    def uses(self, *, everything: bool) -> Iterator[KeyUse]:
        """Yields what was used and is not known to be reported; or all, reported or not."""
        for kind, bucket in self._buckets.items():
            used = self._used[kind]
            if everything or used != self._reported[kind]:
                yield KeyUse(key=self._name, kind=kind, used=used, level=bucket.level)

    def note_reported(self, use: KeyUse) -> None:
        """Notes that the replicas' common buckets have what was used so far."""
        self._reported[use.kind] = use.used

    def set_level(self, level: KeyLevel) -> None:
        """Takes over the level of a common bucket, less what was used here since the report."""
        since = self._used[level.kind] - self._reported[level.kind]
        self._buckets[level.kind].set_level(level.level - since)

    def headers(self) -> dict[str, str]:
        """Returns OpenAI's `x-ratelimit-*` headers of what is limited."""
        headers = {}
        for kind, bucket in self._buckets.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(math.floor(bucket.level), 0))
            reset_s = bucket.wait_s(bucket.per_minute)
            headers[f"x-ratelimit-reset-{kind}"] = duration(reset_s)
        return headers

    def _refusal(
        self, kind: LimitKind, bucket: TokenBucket, num: int, wait_s: float
    ) -> RateLimitError:
        whose = f" of the API key {self._name}" if self._name else ""
        message = (
            f"Rate limit{whose} reached: {bucket.per_minute} {kind} a minute; {num} asked for,"
            f" {max(math.floor(bucket.level), 0)} left."
        )
        if num > bucket.per_minute:
            message += f" The request is too large for any minute: ask for fewer {kind}."
        else:
            message += f" Try again in {duration(wait_s)}."
        return RateLimitError(message, retry_after_s=wait_s, headers=self.headers())


class Grant:
    """What one request has taken from the limits; ended exactly once."""

    def __init__(self, buckets: KeyBuckets | None, num_tokens: int) -> None:
        """buckets: None = nothing is limited. Raises RateLimitError for more than is left."""
        self._buckets = buckets
        self._num_taken = 0
        self._has_ended = False
        if buckets is not None:
            buckets.take("requests", 1)
            self.settle(num_tokens)

    def settle(self, num_tokens: int) -> None:
        """Take `num_tokens` instead of what was taken so far. Raises RateLimitError."""
        if self._buckets is None:
            return
        self._buckets.give_back("tokens", self._num_taken)
        self._num_taken = 0
        self._buckets.take("tokens", num_tokens)
        self._num_taken = num_tokens

    def end(self, num_used_tokens: int) -> None:
        """Ends the grant: charges what was used. Idempotent."""
        if self._buckets is None or self._has_ended:
            return
        self._has_ended = True
        self._buckets.give_back("tokens", self._num_taken - num_used_tokens)

    def headers(self) -> dict[str, str]:
        """Headers of the response; empty if nothing is limited."""
        return {} if self._buckets is None else self._buckets.headers()


class RateLimits:
    """The buckets of every key that has limits."""

    def __init__(self, limits: Mapping[str, RateLimitConfig], clock: Clock) -> None:
        """limits: by key name, "*" = of each key without its own."""
        self._limits = limits
        self._clock = clock
        self._buckets: dict[str, KeyBuckets] = {}  # at most one per key: names are checked before

    def grant(self, key_name: str, num_tokens: int) -> Grant:
        """Admit a request of about `num_tokens`. Raises RateLimitError.

        A refused request counts as a request if it had too many tokens.
        """
        return Grant(self._of(key_name), num_tokens)

    def uses(self, *, everything: bool) -> list[KeyUse]:
        """Returns what was used here and is not known to be reported; or all, reported or not."""
        keys = self._buckets.values()
        return [use for buckets in keys for use in buckets.uses(everything=everything)]

    def learn(self, reported: Iterable[KeyUse], levels: Iterable[KeyLevel]) -> None:
        """Takes over the levels of the replicas' common buckets, which have what was `reported`.

        A bucket that is not among them is full, but for what was used here since.
        """
        for use in reported:
            self._buckets[use.key].note_reported(use)
        for level in levels:
            buckets = self._of(level.key)
            if buckets is not None:
                buckets.set_level(level)

    def _of(self, key_name: str) -> KeyBuckets | None:
        buckets = self._buckets.get(key_name)
        if buckets is None:
            limits = limits_of(self._limits, key_name)
            if limits is not None:
                buckets = self._buckets[key_name] = KeyBuckets(key_name, limits, self._clock)
        return buckets


def duration(seconds: float) -> str:
    """Formats a duration as OpenAI's headers do: 120ms, 7.5s, 6m0s; rounded up."""
    milliseconds = math.ceil(1000 * seconds)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    text = f"{rest_ms / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text

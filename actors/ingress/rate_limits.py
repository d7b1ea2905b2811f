"""Decides whether a request is admitted: its key's rate limits, and how much is queued.

`RateLimits` gives each API key requests and tokens a minute, each in a bucket that refills. A
request takes what it may need when it arrives; when it ends it gives back what it did not use, or
owes what it used in excess.

`Admission` decides before a prompt is tokenised: by four characters a token, from what the workers
have queued and what is being tokenised here, and by how long they predict that their KV caches stay
full. The allocator decides again by the real length, knowing what other ingresses placed.

Knows no HTTP but the names of OpenAI's headers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from actors.ingress.prompt_tokens import num_prompt_chars
from actors.ingress.queue_limit import QueueLimit
from actors.openai.protocol import Prompt
from actors.routing.worker_links import WorkerLink
from configs.schema import EVERY_KEY, RateLimitConfig
from engine.clock import Clock
from engine.errors import CapacityError

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
        self._level = min(self.level + num, float(self.per_minute))


class KeyBuckets:
    """The buckets of one key."""

    def __init__(self, name: str, limits: RateLimitConfig, clock: Clock) -> None:
        def bucket(per_minute: int | None) -> TokenBucket | None:
            return None if per_minute is None else TokenBucket(per_minute, clock)

        self._name = name
        self._buckets = {
            "requests": bucket(limits.requests_per_minute),
            "tokens": bucket(limits.tokens_per_minute),
        }

    def take(self, kind: str, num: int) -> None:
        """Takes `num` requests or tokens. Raises RateLimitError, and takes nothing, if too few."""
        bucket = self._buckets[kind]
        if bucket is None:
            return
        wait_s = bucket.wait_s(num)
        if wait_s > 0:
            raise self._refusal(kind, bucket, num, wait_s)
        bucket.add(-num)

    def give_back(self, kind: str, num: int) -> None:
        """Returns what was taken and not used; below 0 = used in excess."""
        bucket = self._buckets[kind]
        if bucket is not None:
            bucket.add(num)

    def headers(self) -> dict[str, str]:
        """Returns OpenAI's `x-ratelimit-*` headers of what is limited."""
        headers = {}
        for kind, bucket in self._buckets.items():
            if bucket is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(math.floor(bucket.level), 0))
                reset_s = bucket.wait_s(bucket.per_minute)
                headers[f"x-ratelimit-reset-{kind}"] = duration(reset_s)
        return headers

    def _refusal(self, kind: str, bucket: TokenBucket, num: int, wait_s: float) -> RateLimitError:
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
        limits = self._limits.get(key_name) or self._limits.get(EVERY_KEY)
        if limits is None:
            return Grant(None, num_tokens)
        buckets = self._buckets.get(key_name)
        if buckets is None:
            buckets = self._buckets[key_name] = KeyBuckets(key_name, limits, self._clock)
        return Grant(buckets, num_tokens)


def duration(seconds: float) -> str:
    """Formats a duration as OpenAI's headers do: 120ms, 7.5s, 6m0s; rounded up."""
    milliseconds = math.ceil(1000 * seconds)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    text = f"{rest_ms / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text


CHARS_PER_TOKEN = 4
MIN_RETRY_S = 1.0
MAX_RETRY_S = 30.0


def estimate_tokens(prompts: Sequence[Prompt]) -> int:
    """Estimates the prompts' tokens; exact for prompts that came as ids."""
    return sum(_estimate(prompt) for prompt in prompts)


class Admission:
    """Counts what is being tokenised, and refuses requests beyond the limits."""

    def __init__(
        self,
        links: Callable[[], Iterable[WorkerLink]],
        queue_limit: QueueLimit,
        *,
        max_wait_s: float | None = None,
        max_short_tokens: int = 0,
    ) -> None:
        """max_wait_s: predicted, for a row and KV blocks; None = any.

        max_short_tokens: requests that stay below, answers included, have a reserve at the workers.
        """
        self._links = links
        self._queue_limit = queue_limit
        self._max_wait_s = math.inf if max_wait_s is None else max_wait_s
        self._max_short_tokens = max_short_tokens
        self._num_tokens = 0  # tokens of prompts between arrival and placement
        self._num_waiting = 0  # prompts between arrival and first token

    @property
    def num_tokens(self) -> int:
        """Estimated tokens of the prompts that are being tokenised now."""
        return self._num_tokens

    @contextmanager
    def admitted(
        self, num_tokens: int, max_answer_tokens: int | None = None
    ) -> Iterator[Callable[[], None]]:
        """Count a request of about `num_tokens` while it is prepared, and then while it waits.

        max_answer_tokens: what it may generate; None = as much as the model can.
        To be called when it has its first token, or none will come: until then it counts although
        its worker has not reported it yet. Raises CapacityError (503) if it would exceed the limit.
        A request with nothing before it is never refused, or it would be refused for ever.
        """
        self._refuse_long_wait(num_tokens, max_answer_tokens)
        loads = [link.load for link in self._links() if link.is_up and link.role != "decode"]
        reported = sum(load.queued_tokens for load in loads if load is not None)
        queued = max(reported + self._num_tokens, self._num_waiting)
        limit = self._queue_limit.num_tokens
        if queued and limit is not None and queued + num_tokens > limit:
            waits_s = [load.queued_s or 0.0 for load in loads if load is not None]
            raise CapacityError(
                f"{queued} tokens are queued; the limit is {limit}",
                retry_after_s=_bounded(max([*waits_s, MIN_RETRY_S])),
            )
        self._num_tokens += num_tokens
        self._num_waiting += num_tokens
        is_waiting = True

        def leave() -> None:
            nonlocal is_waiting
            self._num_waiting -= num_tokens if is_waiting else 0
            is_waiting = False

        try:
            yield leave
        except BaseException:
            leave()
            raise
        finally:
            self._num_tokens -= num_tokens

    def _refuse_long_wait(self, num_tokens: int, max_answer_tokens: int | None) -> None:
        """Raises CapacityError if every decoding worker is predicted to stay full for too long."""
        max_answer = math.inf if max_answer_tokens is None else max_answer_tokens
        if num_tokens + max_answer <= self._max_short_tokens:
            return
        links = [link for link in self._links() if link.is_up and link.role != "prefill"]
        wait_s = min([link.load.room_s for link in links if link.load is not None], default=0.0)
        if wait_s > self._max_wait_s:
            raise CapacityError(
                f"the workers' KV caches or rows are full for {wait_s:.0f} s, as predicted;"
                f" the limit is {self._max_wait_s:g} s",
                retry_after_s=_bounded(wait_s),
            )


def _bounded(retry_after_s: float) -> float:
    return min(max(retry_after_s, MIN_RETRY_S), MAX_RETRY_S)


def _estimate(prompt: Prompt) -> int:
    if isinstance(prompt, list):
        return len(prompt)
    num_tokens = -(-num_prompt_chars(prompt) // CHARS_PER_TOKEN)
    return num_tokens if prompt.max_tokens is None else min(num_tokens, prompt.max_tokens)

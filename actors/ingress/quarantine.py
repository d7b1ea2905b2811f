"""Requests that ended two workers in a row: not tried a third time, and refused for a while.

A request that makes a kernel fail takes every other request of its worker down with it, and goes on
to the next worker. It cannot be told from its neighbours by one death, but they get on and it does
not: whoever got more than an attempt's first token (a prefill worker's, before a decode worker dies
of the second) between two deaths is innocent. So is who was on its way to a worker when that died.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from engine.clock import Clock
from engine.errors import PoisonedError
from engine.request import SamplingParams

MAX_DEATHS = 2
REMEMBER_S = 600.0
MAX_REMEMBERED = 1024


def fingerprint(prompt_ids: Sequence[int], params: SamplingParams, salt: str) -> bytes:
    """Equal for the same prompt and parameters; the seed, which may be drawn, does not count."""
    asked = msgspec.structs.replace(params, seed=0)
    return hashlib.sha256(msgspec.msgpack.encode((list(prompt_ids), asked, salt))).digest()


class Quarantine:
    """The requests that one ingress refuses because workers died under them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: dict[bytes, float] = {}  # oldest first

    def __len__(self) -> int:
        """Returns the number of prompts that are refused now."""
        now_s = self._clock.now_s()
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            del self._until_s[next(iter(self._until_s))]
        return len(self._until_s)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, salt: str) -> None:
        """Raises PoisonedError for a request like one that was put here."""
        if len(self) and fingerprint(prompt_ids, params, salt) in self._until_s:
            raise PoisonedError("This request ended two workers in a row; it is not tried again.")

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, salt: str) -> None:
        """Refuse requests like this one for `REMEMBER_S`."""
        key = fingerprint(prompt_ids, params, salt)
        self._until_s.pop(key, None)  # the newest last
        self._until_s[key] = self._clock.now_s() + REMEMBER_S
        if len(self._until_s) > MAX_REMEMBERED:
            del self._until_s[next(iter(self._until_s))]


class Deaths:
    """Workers that died while they computed one request, and how it got on in between."""

    def __init__(self) -> None:
        self._num_deaths = 0
        self._num_tokens = 0

    def is_suspect(self, *, is_death: bool, num_tokens: int) -> bool:
        """An attempt failed when the client had `num_tokens`; whether the request is to blame."""
        if num_tokens > self._num_tokens + 1:
            self._num_deaths = 0
        self._num_deaths += is_death
        self._num_tokens = num_tokens
        return self._num_deaths >= MAX_DEATHS

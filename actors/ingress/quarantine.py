"""Refuses, for a while, requests under which two workers died in a row.

A request that makes a kernel fail takes down every other request of its worker, and then moves on
to the next worker. One death does not tell which request is to blame, but the others make progress
afterwards: a request that got more than the first token of an attempt between two deaths is
innocent (the first token comes from the prefill worker, before a decode worker dies of the second).
So is a request that was still on its way to a worker that died.
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
    """Returns equal bytes for equal prompts and parameters; ignores the seed."""
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
        """Raises PoisonedError for a request equal to one that is refused."""
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
    """The workers that died while they computed one request, and its progress in between."""

    def __init__(self) -> None:
        self._num_deaths = 0
        self._num_tokens = 0

    def is_suspect(self, *, is_death: bool, num_tokens: int) -> bool:
        """Counts a death after `num_tokens` of output; returns if the request is to blame."""
        if num_tokens > self._num_tokens + 1:
            self._num_deaths = 0
        self._num_deaths += is_death
        self._num_tokens = num_tokens
        return self._num_deaths >= MAX_DEATHS

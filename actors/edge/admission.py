"""Whether a request may cost anything at all: decided before its prompt is tokenised.

By four characters a token, from what the workers have queued and what is being tokenised here; and
by how long they predict that their KV caches stay full. The allocator decides again by the real
length, knowing what other ingresses placed. Knows no HTTP.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from actors.api.protocol import Prompt
from actors.edge.worker_links import WorkerLink
from engine.errors import CapacityError

CHARS_PER_TOKEN = 4
MIN_RETRY_S = 1.0
MAX_RETRY_S = 30.0


def estimate_tokens(prompts: Sequence[Prompt]) -> int:
    """About how many tokens the prompts have; exact for those that came as ids."""
    return sum(_estimate(prompt) for prompt in prompts)


class Admission:
    """Counts what is being tokenised, and refuses what would not fit behind it."""

    def __init__(
        self,
        links: Callable[[], Iterable[WorkerLink]],
        max_queued_tokens: int,
        *,
        max_wait_s: float | None = None,
        max_short_tokens: int = 0,
    ) -> None:
        """max_wait_s: predicted, for a row and KV blocks; None = any.

        max_short_tokens: requests that stay below, answers included, have a reserve at the workers.
        """
        self._links = links
        self._max_queued_tokens = max_queued_tokens
        self._max_wait_s = math.inf if max_wait_s is None else max_wait_s
        self._max_short_tokens = max_short_tokens
        self._num_tokens = 0  # of prompts between their arrival and their placement
        self._num_waiting = 0  # of prompts between their arrival and their first token

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
        One that nothing is before is never refused: it would be refused for ever.
        """
        self._refuse_long_wait(num_tokens, max_answer_tokens)
        loads = [link.load for link in self._links() if link.is_up and link.role != "decode"]
        reported = sum(load.queued_tokens for load in loads if load is not None)
        queued = max(reported + self._num_tokens, self._num_waiting)
        if queued and queued + num_tokens > self._max_queued_tokens:
            waits_s = [load.queued_s or 0.0 for load in loads if load is not None]
            raise CapacityError(
                f"{queued} tokens are queued; the limit is {self._max_queued_tokens}",
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
        """Raises CapacityError if every worker that decodes is full for too long."""
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
    num_chars = len(prompt.text or "") + _num_chars(prompt.messages)
    return -(-num_chars // CHARS_PER_TOKEN)


def _num_chars(value: object) -> int:
    """Characters of all strings in a JSON value."""
    match value:
        case str():
            return len(value)
        case list():
            return sum(map(_num_chars, value))
        case dict():
            return sum(map(_num_chars, value.values()))
    return 0

"""Decides by what is queued whether a request is admitted, before its prompt is tokenised.

By four characters a token, from what the workers have queued and what is being tokenised here, and
by how long they predict that their KV caches stay full. Placement decides again by the real length.
Where the ingress has several replicas, what waits at the others counts, too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from actors.ingress.prompt_tokens import num_prompt_chars
from actors.ingress.queue_limit import QueueLimit
from actors.ingress.replica_exchange import OtherReplicas
from actors.openai.prompts import Prompt
from actors.routing.worker_links import WorkerLink
from engine.errors import CapacityError

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
        others: OtherReplicas | None = None,
    ) -> None:
        """max_wait_s: predicted, for a row and KV blocks; None = any.

        max_short_tokens: requests that stay below, answers included, have a reserve at the workers.
        others: the other replicas of the ingress; None = there are none.
        """
        self._others = others or OtherReplicas()
        self._links = links
        self._queue_limit = queue_limit
        self._max_wait_s = math.inf if max_wait_s is None else max_wait_s
        self._max_short_tokens = max_short_tokens
        # Estimated tokens of prompts: between arrival and the end of their preparation; between
        # arrival and first token; admitted since the others were heard.
        self._num_tokens = 0
        self._num_waiting_tokens = 0
        self._num_new_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Estimated tokens of the prompts that are being prepared now."""
        return self._num_tokens

    @property
    def num_waiting_tokens(self) -> int:
        """Estimated tokens of the prompts between arrival and first token, at this replica."""
        return self._num_waiting_tokens

    def note_exchange(self) -> None:
        """Notes that the other replicas have just been heard."""
        self._num_new_tokens = 0

    @contextmanager
    def admitted(
        self, num_tokens: int, max_answer_tokens: int | None = None
    ) -> Iterator[Callable[[], None]]:
        """Counts a request of about `num_tokens` while it is prepared, and then while it waits.

        max_answer_tokens: what it may generate; None = as much as the model can.
        Yields what the caller calls once the request has its first token, or none will come: until
        then it counts, although its worker has not reported it yet. Raises CapacityError (503) if
        it would exceed the limit. A request with nothing before it is never refused, or it would be
        refused for ever.
        """
        self._refuse_long_wait(num_tokens, max_answer_tokens)
        loads = [link.load for link in self._links() if link.is_up and link.role != "decode"]
        reported = sum(load.queued_tokens for load in loads if load is not None)
        waiting = self._num_waiting_tokens + self._num_tokens_elsewhere()
        queued = max(reported + self._num_tokens, waiting)
        limit = self._queue_limit.num_tokens
        if queued and limit is not None and queued + num_tokens > limit:
            waits_s = [load.queued_s or 0.0 for load in loads if load is not None]
            raise CapacityError(
                f"{queued} tokens are queued; the limit is {limit}",
                retry_after_s=_bounded(max([*waits_s, MIN_RETRY_S])),
            )
        self._num_tokens += num_tokens
        self._num_waiting_tokens += num_tokens
        self._num_new_tokens += num_tokens
        is_waiting = True

        def leave() -> None:
            nonlocal is_waiting
            self._num_waiting_tokens -= num_tokens if is_waiting else 0
            is_waiting = False

        try:
            yield leave
        except BaseException:
            leave()
            raise
        finally:
            self._num_tokens -= num_tokens

    def _num_tokens_elsewhere(self) -> int:
        """Returns what waits at other replicas: what they said, and what they may have since.

        Requests are spread evenly, so each is taken to have admitted as much as this one since.
        """
        others = self._others
        return others.num_waiting_tokens + others.num_others * self._num_new_tokens

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

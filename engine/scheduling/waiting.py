"""Queues of waiting requests, and the order in which prompts may compute in the next step.

`PromptQueue` is the interface for the scheduler. `WaitingQueue` is the plain implementation:
running prompts first, then waiting requests in order. Ordered by arrival, it is first come, first
served with chunked prefill; ordered by priority, this holds among equal priorities. A preempted
request keeps its arrival, so it goes back ahead of everything younger. Knows neither blocks nor
rows: the scheduler refuses what it cannot admit.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from engine.request import Request, RequestKey
from engine.scheduling.budget import Candidate, StepBudget, rest_of_prompt

SortKey = tuple[float, ...]
Order = Callable[[Request], SortKey]


class PromptQueue(Protocol):
    """Waiting requests, and the order in which prompts are computed."""

    def __len__(self) -> int: ...

    def __contains__(self, key: RequestKey) -> bool: ...

    def __iter__(self) -> Iterator[Request]:
        """In order; the queue may change during iteration: removed requests are skipped."""
        ...

    @property
    def num_tokens(self) -> int:
        """Known tokens of all waiting requests: an upper bound on what they will compute."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request; it must not wait here already."""
        ...

    def remove(self, key: RequestKey) -> Request | None:
        """Take a request out; None if it does not wait here."""
        ...

    def candidates(self, running: Sequence[Request], budget: StepBudget) -> Iterator[Candidate]:
        """Requests that may compute prompt tokens in this step, best first.

        The caller must exhaust the iterator. `running` are the requests with a row that are still
        computing their prompt, oldest admission first. For each candidate, the scheduler does one
        of these before it takes the next:

            remove(key), admit it, budget.grant(candidate)    only the last if it runs already
            budget.refuse(request)                no row or no blocks: none behind it may overtake
            nothing                               skipped: it has expired, or is better run later
        """
        ...


def by_arrival(request: Request) -> SortKey:
    return (request.arrival_s,)


def by_priority(request: Request) -> SortKey:
    return (request.spec.priority, request.arrival_s)


class WaitingQueue:
    """A `PromptQueue` in one order; ties are broken by the order of adding."""

    def __init__(self, order: Order = by_priority) -> None:
        self._sort_key = order
        self._order: list[SortKey] = []
        self._requests: dict[SortKey, Request] = {}
        self._keys: dict[RequestKey, SortKey] = {}
        self._num_added = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[Request]:
        for sort_key in list(self._order):
            request = self._requests.get(sort_key)
            if request is not None:
                yield request

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def first(self) -> Request | None:
        """The first waiting request in order; None = the queue is empty."""
        return self._requests[self._order[0]] if self._order else None

    def add(self, request: Request) -> None:
        assert request.key not in self._keys, f"{request.key} is already waiting"
        sort_key = (*self._sort_key(request), self._num_added)
        self._num_added += 1
        bisect.insort(self._order, sort_key)
        self._requests[sort_key] = request
        self._keys[request.key] = sort_key
        self._num_tokens += request.num_known_tokens

    def remove(self, key: RequestKey) -> Request | None:
        sort_key = self._keys.pop(key, None)
        if sort_key is None:
            return None
        self._order.pop(bisect.bisect_left(self._order, sort_key))
        request = self._requests.pop(sort_key)
        self._num_tokens -= request.num_known_tokens
        return request

    def candidates(self, running: Sequence[Request], budget: StepBudget) -> Iterator[Candidate]:
        """Running prompts, then waiting requests, each in order."""
        return budget.offer(
            chain(running, self) if budget.can_admit else running,
            work_of=self._work_of,
            is_waiting=lambda request: request.key in self._keys,
        )

    def _work_of(self, request: Request) -> tuple[int, int]:
        """Exact for running requests; a waiting request is taken to have nothing cached."""
        if request.key in self._keys:
            return request.num_known_tokens, 0
        return rest_of_prompt(request)

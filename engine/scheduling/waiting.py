"""Who waits for its prompt to be computed, and who may compute in the next step, in which order.

`PromptQueue` is what a scheduler needs of a queue. `WaitingQueue` is the plain one: who runs goes
on, then waiting requests in order. By arrival that is first come, first served with chunked
prefill; by priority, equal priorities are. A preempted request keeps its arrival, so it goes back
ahead of everything younger. Knows neither blocks nor rows: the scheduler refuses what it cannot
admit.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from engine.request import Request, RequestKey
from engine.scheduling.step_room import StepRoom, Turn, rest_of_prompt

Place = tuple[float, ...]
Order = Callable[[Request], Place]


class PromptQueue(Protocol):
    """Waiting requests, and the order in which prompts are computed."""

    def __len__(self) -> int: ...

    def __contains__(self, key: RequestKey) -> bool: ...

    def __iter__(self) -> Iterator[Request]:
        """In order; the queue may change while it is walked: who has left is passed over."""
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

    def turns(self, running: Sequence[Request], room: StepRoom) -> Iterator[Turn]:
        """Who may compute prompt tokens in this step, best first; to be walked to its end.

        `running` are the requests with a row that are still computing their prompt, oldest
        admission first. Between two turns the scheduler does one of these:

            remove(key), admit it, room.grant(turn)    or, for one that runs, only the last
            room.refuse(request)                       no row, no blocks: nobody behind overtakes
            nothing                                    passed over: expired, or better later
        """
        ...


def by_arrival(request: Request) -> Place:
    return (request.arrival_s,)


def by_priority(request: Request) -> Place:
    return (request.priority, request.arrival_s)


class WaitingQueue:
    """A `PromptQueue` in one order; equals in the order in which they were added."""

    def __init__(self, order: Order = by_priority) -> None:
        self._place_of = order
        self._order: list[Place] = []
        self._requests: dict[Place, Request] = {}
        self._place: dict[RequestKey, Place] = {}
        self._num_added = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._place

    def __iter__(self) -> Iterator[Request]:
        for place in list(self._order):
            request = self._requests.get(place)
            if request is not None:
                yield request

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def first(self) -> Request | None:
        """In order; None = nobody waits."""
        return self._requests[self._order[0]] if self._order else None

    def add(self, request: Request) -> None:
        assert request.key not in self._place, f"{request.key} is already waiting"
        place = (*self._place_of(request), self._num_added)
        self._num_added += 1
        bisect.insort(self._order, place)
        self._requests[place] = request
        self._place[request.key] = place
        self._num_tokens += request.num_known_tokens

    def remove(self, key: RequestKey) -> Request | None:
        place = self._place.pop(key, None)
        if place is None:
            return None
        self._order.pop(bisect.bisect_left(self._order, place))
        request = self._requests.pop(place)
        self._num_tokens -= request.num_known_tokens
        return request

    def turns(self, running: Sequence[Request], room: StepRoom) -> Iterator[Turn]:
        """Running prompts, then waiting requests, each in order."""
        return room.offer(
            chain(running, self) if room.can_admit else running,
            work_of=self._work_of,
            is_waiting=lambda request: request.key in self._place,
        )

    def _work_of(self, request: Request) -> tuple[int, int]:
        """Exact for who runs; of who waits nothing is known to be cached."""
        if request.key in self._place:
            return request.num_known_tokens, 0
        return rest_of_prompt(request)

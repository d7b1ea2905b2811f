"""The queue in front of a worker: requests in (priority, arrival) order.

With equal priorities this is first come, first served. A preempted request keeps its arrival, so
it goes back ahead of everything younger.
"""

import bisect
from collections.abc import Iterator

from engine.request import Request, RequestKey


class WaitingQueue:
    """Ordered by (priority, arrival); any request may be removed by key."""

    def __init__(self) -> None:
        self._order: list[tuple[int, float, int]] = []
        self._requests: dict[tuple[int, float, int], Request] = {}
        self._place: dict[RequestKey, tuple[int, float, int]] = {}
        self._num_added = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._place

    def __iter__(self) -> Iterator[Request]:
        """In order; the queue may change while it is walked: who has left is passed over."""
        for place in list(self._order):
            request = self._requests.get(place)
            if request is not None:
                yield request

    @property
    def num_tokens(self) -> int:
        """Known tokens of all waiting requests: an upper bound on what they will compute."""
        return self._num_tokens

    def add(self, request: Request) -> None:
        assert request.key not in self._place, f"{request.key} is already waiting"
        place = (request.priority, request.arrival_s, self._num_added)
        self._num_added += 1
        bisect.insort(self._order, place)
        self._requests[place] = request
        self._place[request.key] = place
        self._num_tokens += request.num_known_tokens

    def remove(self, key: RequestKey) -> Request | None:
        """Take a request out; None if it does not wait here."""
        place = self._place.pop(key, None)
        if place is None:
            return None
        self._order.pop(bisect.bisect_left(self._order, place))
        request = self._requests.pop(place)
        self._num_tokens -= request.num_known_tokens
        return request

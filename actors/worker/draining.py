"""Drains a worker: it takes nothing new, running requests may finish for a while, the rest moves
on.

    begin ------------- grace is over --------------- all clients know
    refuses requests    hands over what still runs    may leave
    that can go
    elsewhere

Knows no engine and no streams.
"""

from collections.abc import Awaitable, Callable

from engine.clock import Clock
from engine.errors import CapacityError
from engine.request import RequestKey

HAND_OVER_S = 5.0  # how long an ingress may take to read what was handed over


class Draining:
    """The draining of one worker; belongs to its event loop."""

    def __init__(self, worker: str, clock: Clock, hand_over: Callable[[], Awaitable[None]]) -> None:
        """`hand_over()` ends every request here so that another worker can continue it."""
        self._worker = worker
        self._clock = clock
        self._hand_over = hand_over
        self._until_s: float | None = None
        self._has_handed_over = False

    @property
    def is_begun(self) -> bool:
        return self._until_s is not None

    def begin(self, grace_s: float) -> None:
        """Begins draining. Idempotent: the first grace counts."""
        if self._until_s is None:
            self._until_s = self._clock.now_s() + grace_s

    def refusal(self, key: RequestKey) -> str | None:
        """Returns why a request is refused; None if it is taken.

        A second attempt is taken: after a redeploy, an old ingress knows only draining workers, and
        its last requests must not fail.
        """
        if not self.is_begun or (key.attempt > 0 and not self._has_handed_over):
            return None
        return f"{self._worker} is draining; another worker may take the request"

    def check(self, key: RequestKey) -> None:
        """Raises CapacityError for a request that is refused."""
        reason = self.refusal(key)
        if reason is not None:
            raise CapacityError(reason)

    async def may_leave(self, *, is_idle: bool, has_unread: bool) -> bool:
        """Returns whether the worker may leave; hands over when its time has come. Called now and
        then.

        is_idle: nothing runs, no client is connected or awaited; has_unread: a client has messages
        to read.
        """
        if self._until_s is None or is_idle:
            return self._until_s is not None
        now_s = self._clock.now_s()
        if now_s <= self._until_s:
            return False
        if not self._has_handed_over:
            self._has_handed_over = True
            await self._hand_over()
            return False
        return not has_unread or now_s > self._until_s + HAND_OVER_S

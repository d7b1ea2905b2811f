"""How a worker leaves: it takes nothing new, what runs may finish for a while, the rest moves on.

    begin ------------- grace is over --------------- everybody was told
    refuses requests    hands over what still runs    may leave
    that can go
    elsewhere

Knows no engine and no streams.
"""

from collections.abc import Awaitable, Callable

from engine.clock import Clock
from engine.errors import CapacityError
from engine.request import RequestKey

HAND_OVER_S = 5.0  # an ingress may take so long to read what was handed over


class Draining:
    """The draining of one worker; belongs to its event loop."""

    def __init__(self, worker: str, clock: Clock, hand_over: Callable[[], Awaitable[None]]) -> None:
        """`hand_over()` ends every request here, in a way that lets another worker go on."""
        self._worker = worker
        self._clock = clock
        self._hand_over = hand_over
        self._until_s: float | None = None
        self._has_handed_over = False

    @property
    def is_begun(self) -> bool:
        return self._until_s is not None

    def begin(self, grace_s: float) -> None:
        """Idempotent: the first grace counts."""
        if self._until_s is None:
            self._until_s = self._clock.now_s() + grace_s

    def refusal(self, key: RequestKey) -> str | None:
        """Returns why a request is refused; None if it is taken.

        Who comes with a second attempt has asked elsewhere: after a redeploy, an old ingress knows
        nobody but draining workers, and its last requests must not fail.
        """
        if not self.is_begun or (key.attempt > 0 and not self._has_handed_over):
            return None
        return f"{self._worker} is draining; another worker may take the request"

    def check(self, key: RequestKey) -> None:
        """Raises CapacityError for a request that is not taken."""
        reason = self.refusal(key)
        if reason is not None:
            raise CapacityError(reason)

    async def may_leave(self, *, is_idle: bool, has_unread: bool) -> bool:
        """Asked now and then; hands over when the time has come.

        is_idle: nothing runs, nobody is connected or awaited; has_unread: a client has to be told
        more.
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

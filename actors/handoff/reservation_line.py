"""Reservations that wait for room on a decode worker, first come first served.

Nobody overtakes the first for whom there is no room, but for short requests within their reserve.
The line is looked at when something may have become free, never by polling. On the event loop; the
decision itself is the engine's.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from actors.handoff.contracts import EngineCalls
from actors.handoff.waits import settle
from engine.kv.handoff import IncomingHandoffs
from engine.messages import NotNow, Refused, Reservation, ReserveRequest
from engine.request import RequestKey

logger = logging.getLogger(__name__)

Answer = Reservation | NotNow | Refused

MAX_WAITING = 1024


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    """A reservation in line."""

    request: ReserveRequest
    answer: asyncio.Future[Answer]
    is_asked: bool = True  # the engine is about to decide: its answer must be waited for
    is_impatient: bool = False  # `wait_s` is over


class ReservationLine:
    """Asks the engine for room on behalf of prefill workers, and lets them wait for it."""

    def __init__(self, engine: EngineCalls, incoming: IncomingHandoffs) -> None:
        self._engine = engine
        self._incoming = incoming
        self._line: list[_Waiting] = []
        self._granting: asyncio.Task[None] | None = None
        self._may_have_room = False
        self._closed_because: str | None = None

    def __len__(self) -> int:
        return len(self._line)

    async def reserve(self, request: ReserveRequest) -> Answer:
        """Grant room, refuse, or wait up to `request.wait_s` in line; NotNow when that is over."""
        if self._closed_because is not None:
            return Refused(reason=self._closed_because)
        if len(self._line) >= MAX_WAITING:
            return NotNow()
        waiting = _Waiting(request=request, answer=asyncio.get_running_loop().create_future())
        self._line.append(waiting)
        self.look_again()
        try:
            async with asyncio.timeout(max(request.wait_s, 0.0)):
                return await asyncio.shield(waiting.answer)
        except TimeoutError:
            waiting.is_impatient = True
            if not waiting.is_asked:
                settle(waiting.answer, NotNow())
            return await waiting.answer
        finally:
            if waiting in self._line:
                self._line.remove(waiting)

    def look_again(self) -> None:
        """Blocks or rows may have become free."""
        self._may_have_room = True
        if self._line and (self._granting is None or self._granting.done()):
            self._granting = asyncio.create_task(self._grant())

    def withdraw(self, key: RequestKey) -> None:
        """Refuse a request that waits; one the engine is deciding on just now is left to it."""
        for waiting in self._line:
            if waiting.request.key == key and not waiting.is_asked:
                settle(waiting.answer, Refused(reason="cancelled"))

    def keys_of(self, ingress_id: str) -> list[RequestKey]:
        return [w.request.key for w in self._line if w.request.ingress_id == ingress_id]

    async def close(self, reason: str) -> None:
        """Refuse all that wait and all that come."""
        self._closed_because = reason
        if self._granting is not None:
            await self._granting  # what it grants, the caller cancels with the rest
        for waiting in self._line:
            settle(waiting.answer, Refused(reason=reason))

    async def _grant(self) -> None:
        """Offer room to the line, in order, as long as something may have become free."""
        try:
            while self._line and self._may_have_room:
                self._may_have_room = False
                await self._offer([w for w in self._line if not w.answer.done()])
        except Exception:  # the line must move, whatever happened
            logger.exception("reservations cannot be granted")
            for waiting in self._line:
                settle(waiting.answer, Refused(reason="the decode worker failed"))

    async def _offer(self, batch: list[_Waiting]) -> None:
        for waiting in batch:
            waiting.is_asked = True
        requests = [waiting.request for waiting in batch]
        answers = await self._engine.call(partial(self._ask_in_order, requests))
        for waiting, answer in zip(batch, answers, strict=True):
            self._apply(waiting, answer)

    def _ask_in_order(self, requests: list[ReserveRequest]) -> list[Answer]:
        """On the engine thread: behind the first without room only short ones, up to the first."""
        answers: list[Answer] = []
        is_open, is_open_to_short = True, True
        for request in requests:
            is_short = is_open_to_short and self._incoming.may_overtake(request)
            if not (is_open or is_short):
                answers.append(NotNow())
                continue
            answer = self._incoming.reserve(request, overtakes=not is_open)
            answers.append(answer)
            if isinstance(answer, NotNow):
                is_open, is_open_to_short = False, is_open_to_short and not is_short
        return answers

    def _apply(self, waiting: _Waiting, answer: Answer) -> None:
        waiting.is_asked = False
        if isinstance(answer, NotNow) and not waiting.is_impatient:
            return
        settle(waiting.answer, answer)
        if waiting in self._line:
            self._line.remove(waiting)

"""Reserving blocks on a decode worker: the prefill worker asks, the decode worker's queue answers.

A reservation that does not fit waits in the queue, first come first served: only short requests
overtake, within their reserve. The queue is served when something may have become free, never by
polling. What is still refused after `wait_s` is asked for again.

Both classes belong to their event loop; `IncomingHandoffs` is touched through `EngineCalls` only.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from actors.kv_transfer.contracts import DeclinedError, EngineCalls, Peer
from actors.kv_transfer.waits import bounded, settle, unless_ended
from configs.schema import HandoffConfig
from engine.clock import Clock
from engine.errors import HandoffError
from engine.kv.transfer import HandoffStarted, IncomingHandoffs
from engine.messages import (
    NotNow,
    Refused,
    RenewLease,
    Reservation,
    ReserveRequest,
    WorkerIdentity,
)
from engine.request import RequestKey

logger = logging.getLogger(__name__)

RESERVE_WAIT_S = 5.0  # for which a full decode worker keeps a request in its queue
RESERVE_BACKOFF_S = 0.05  # the pause before asking again; doubled each time
RESERVE_MAX_BACKOFF_S = 1.0
MAX_WAITING = 1024  # reservations in a queue

Answer = Reservation | NotNow | Refused


class ReservationClient:
    """Reserves blocks at decode workers, for one prefill worker."""

    def __init__(self, identity: WorkerIdentity, config: HandoffConfig, clock: Clock) -> None:
        self._identity = identity
        self._config = config
        self._clock = clock

    async def reserve(
        self, started: HandoffStarted, ended: asyncio.Future[None], peer: Peer
    ) -> Reservation:
        """Asks until the decode side has reserved blocks.

        Raises DeclinedError when it refuses or stays full for too long, EndedError with `ended`,
        WorkerError when it is dead or silent.
        """
        until_s = self._clock.now_s() + self._config.reserve_timeout_s
        if started.deadline_s is not None:
            until_s = min(until_s, started.deadline_s)
        pause_s = RESERVE_BACKOFF_S
        while (left_s := until_s - self._clock.now_s()) > 0:
            request = self._build_request(started, min(left_s, RESERVE_WAIT_S))
            bound_s = request.wait_s + self._config.transfer_deadline_s
            answer = await unless_ended(bounded(peer.reserve(request), bound_s), ended)
            if isinstance(answer, Reservation):
                return answer
            if isinstance(answer, Refused):
                raise DeclinedError(f"{started.decode_worker} refused: {answer.reason}")
            await unless_ended(asyncio.sleep(pause_s), ended)
            pause_s = min(2 * pause_s, RESERVE_MAX_BACKOFF_S)
        raise DeclinedError(f"{started.decode_worker} had no room in time")

    async def keep(self, key: RequestKey, reservation: Reservation, peer: Peer) -> None:
        """Renews the lease until cancelled; ends only by an error.

        Raises DeclinedError when the reservation is gone, WorkerError when the decode side is dead
        or silent.
        """
        request = RenewLease(transfer_id=reservation.transfer_id, key=key)
        while True:
            await asyncio.sleep(reservation.lease_s / 3)
            await bounded(_renew(request, peer), self._config.transfer_deadline_s)

    def _build_request(self, started: HandoffStarted, wait_s: float) -> ReserveRequest:
        return ReserveRequest(
            key=started.key,
            sender=self._identity,
            ingress_id=started.ingress_id,
            token_ids=started.token_ids,
            num_prompt_tokens=started.num_prompt_tokens,
            spec=started.spec,
            age_s=self._clock.now_s() - started.asked_s,
            wait_s=wait_s,
        )


async def _renew(request: RenewLease, peer: Peer) -> None:
    try:
        await peer.renew(request)
    except HandoffError as error:
        raise DeclinedError(error.message) from error


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    """A reservation that waits in the queue."""

    request: ReserveRequest
    answer: asyncio.Future[Answer]
    is_asked: bool = True  # the engine is deciding, and its answer must be awaited
    is_impatient: bool = False  # `wait_s` is over


class ReservationQueue:
    """Asks the engine for blocks on behalf of prefill workers, which wait in a queue."""

    def __init__(self, engine: EngineCalls, incoming: IncomingHandoffs) -> None:
        self._engine = engine
        self._incoming = incoming
        self._queue: list[_Waiting] = []
        self._granting: asyncio.Task[None] | None = None
        self._may_have_room = False
        self._closed_because: str | None = None

    def __len__(self) -> int:
        return len(self._queue)

    async def reserve(self, request: ReserveRequest) -> Answer:
        """Grants, refuses, or waits up to `request.wait_s` in the queue and then returns NotNow."""
        if self._closed_because is not None:
            return Refused(reason=self._closed_because)
        if len(self._queue) >= MAX_WAITING:
            return NotNow()
        waiting = _Waiting(request=request, answer=asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
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
            if waiting in self._queue:
                self._queue.remove(waiting)

    def look_again(self) -> None:
        """Serves the queue: blocks or rows may have become free."""
        self._may_have_room = True
        if self._queue and (self._granting is None or self._granting.done()):
            self._granting = asyncio.create_task(self._grant())

    def withdraw(self, key: RequestKey) -> None:
        """Refuses a waiting request; one that the engine is deciding on is left to it."""
        for waiting in self._queue:
            if waiting.request.key == key and not waiting.is_asked:
                settle(waiting.answer, Refused(reason="cancelled"))

    def keys_of(self, ingress_id: str) -> list[RequestKey]:
        return [w.request.key for w in self._queue if w.request.ingress_id == ingress_id]

    async def close(self, reason: str) -> None:
        """Refuses all waiting and later requests."""
        self._closed_because = reason
        if self._granting is not None:
            await self._granting  # the caller cancels what this grants
        for waiting in self._queue:
            settle(waiting.answer, Refused(reason=reason))

    async def _grant(self) -> None:
        """Tries the queue in order, as long as something may have become free."""
        try:
            while self._queue and self._may_have_room:
                self._may_have_room = False
                await self._offer([w for w in self._queue if not w.answer.done()])
        except Exception:  # the queue must move on after any error
            logger.exception("reservations cannot be granted")
            for waiting in self._queue:
                settle(waiting.answer, Refused(reason="the decode worker failed"))

    async def _offer(self, batch: list[_Waiting]) -> None:
        for waiting in batch:
            waiting.is_asked = True
        requests = [waiting.request for waiting in batch]
        answers = await self._engine.call(partial(self._ask_in_order, requests))
        for waiting, answer in zip(batch, answers, strict=True):
            self._apply(waiting, answer)

    def _ask_in_order(self, requests: list[ReserveRequest]) -> list[Answer]:
        """Tries to reserve for each request in order; runs on the engine thread.

        Once one does not fit, only short ones are tried, until one of them does not fit either.
        """
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
        if waiting in self._queue:
            self._queue.remove(waiting)

"""Asking a decode worker for room, and keeping it: reservations and leases from P's side."""

import asyncio

from actors.handoff.contracts import Peer
from actors.handoff.waits import bounded, unless_ended
from configs.schema import HandoffConfig
from engine.clock import Clock
from engine.errors import HandoffError
from engine.kv.handoff import HandoffStarted
from engine.messages import (
    Refused,
    RenewLease,
    Reservation,
    ReserveRequest,
    WorkerIdentity,
)
from engine.request import RequestKey

RESERVE_WAIT_S = 5.0  # D holds its answer this long while it is full, and our place in its queue
RESERVE_BACKOFF_S = 0.05  # then we ask again after a pause, doubled each time
RESERVE_MAX_BACKOFF_S = 1.0


class RoomAsker:
    """Asks on behalf of one prefill worker."""

    def __init__(self, identity: WorkerIdentity, config: HandoffConfig, clock: Clock) -> None:
        self._identity = identity
        self._config = config
        self._clock = clock

    async def reserve(
        self, started: HandoffStarted, ended: asyncio.Future[None], peer: Peer
    ) -> Reservation:
        """Ask until D has room.

        Raises HandoffError when it refuses or stays full for too long, EndedError with `ended`.
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
                raise HandoffError(f"{started.decode_worker} refused: {answer.reason}")
            await unless_ended(asyncio.sleep(pause_s), ended)
            pause_s = min(2 * pause_s, RESERVE_MAX_BACKOFF_S)
        raise HandoffError(f"{started.decode_worker} had no room in time")

    async def keep(self, key: RequestKey, reservation: Reservation, peer: Peer) -> None:
        """Renew the lease until cancelled; ends only by an error."""
        request = RenewLease(transfer_id=reservation.transfer_id, key=key)
        while True:
            await asyncio.sleep(reservation.lease_s / 3)
            await bounded(peer.renew(request), self._config.transfer_deadline_s)

    def _build_request(self, started: HandoffStarted, wait_s: float) -> ReserveRequest:
        remaining_s = None
        if started.deadline_s is not None:
            remaining_s = started.deadline_s - self._clock.now_s()
        return ReserveRequest(
            key=started.key,
            sender=self._identity,
            ingress_id=started.ingress_id,
            token_ids=started.token_ids,
            num_prompt_tokens=started.num_prompt_tokens,
            params=started.params,
            remaining_s=remaining_s,
            priority=started.priority,
            salt=started.salt,
            wait_s=wait_s,
        )

"""The decode worker actor: KV arrives from prefill workers, and tokens follow from it."""

import asyncio
from itertools import starmap
from typing import TYPE_CHECKING, Any

import msgspec

from actors.deployment import DeploymentSpec
from actors.worker.engine_host import EngineHost
from actors.worker.engine_worker import EngineWorker
from actors.worker.role_side import RoleSide
from engine.errors import RequestError, WorkerError
from engine.messages import (
    CancelTransfer,
    NotNow,
    PairRequest,
    PieceHeader,
    Refused,
    RenewLease,
    ReserveRequest,
    Role,
    decode,
    encode,
)

if TYPE_CHECKING:
    from actors.handoff.receiver import HandoffReceiver
    from actors.handoff.sides import ReceivingSide
    from engine.build import Engine


class DecodeWorker(EngineWorker):
    """Takes over requests whose prompt is computed, and finishes them."""

    def __init__(self, spec: DeploymentSpec, name: str, role: Role) -> None:
        self._side: ReceivingSide | None = None
        host = EngineHost(spec, name, role, self._make_side)
        super().__init__(host, {"receive_pieces": self._receive_pieces})

    def _make_side(self, host: EngineHost, engine: "Engine") -> RoleSide:
        from actors.handoff.sides import ReceivingSide  # imports torch, which takes seconds

        self._side = ReceivingSide(host, engine)
        return self._side

    @property
    def _receiver(self) -> "HandoffReceiver":
        if self._side is None:
            raise WorkerError(f"{self} is still loading its model")
        return self._side.receiver

    async def reserve(self, request: bytes) -> bytes:
        """ReserveRequest -> Reservation | NotNow | Refused, encoded."""
        receiver, asked = self._receiver, decode(request, ReserveRequest)
        try:
            self._host.engine.check_ids(asked.token_ids, asked.params)
        except RequestError as error:
            return encode(Refused(reason=error.message))
        if asked.params.constraint is not None:
            # Before there is room for it: the KV may be here first, and then the sampler would wait
            # for the compiler, and every other row with it.
            compiled = self._host.engine.grammars.prepare(asked.params.constraint)
            until_s = self._host.clock.now_s() + asked.wait_s
            try:
                async with asyncio.timeout(asked.wait_s):
                    await asyncio.shield(asyncio.wrap_future(compiled))
            except TimeoutError:
                return encode(NotNow())
            # The sender waits for `wait_s` in all.
            left_s = max(0.0, until_s - self._host.clock.now_s())
            asked = msgspec.structs.replace(asked, wait_s=left_s)
        return encode(await receiver.reserve(asked))

    async def open_pair(self, request: bytes) -> bytes:
        """PairRequest -> PairReply, encoded."""
        return encode(await self._receiver.open_pair(decode(request, PairRequest)))

    async def receive_pieces(self, headers: bytes, *payloads: list[Any]) -> bytes:
        """List of PieceHeader, and the objects of each in Ray's store -> list of PieceReply."""
        taking = map(self._receiver.receive_piece, decode(headers, list[PieceHeader]), payloads)
        return encode(await asyncio.gather(*taking))

    async def _receive_pieces(self, pieces: bytes) -> bytes:
        """By a connection. List of (PieceHeader, payload) -> list of PieceReply."""
        pairs = decode(pieces, list[tuple[PieceHeader, list[Any]]])
        return encode(await asyncio.gather(*starmap(self._receiver.receive_piece, pairs)))

    async def cancel_transfer(self, request: bytes) -> bytes:
        """CancelTransfer -> CancelReply, encoded."""
        return encode(await self._receiver.cancel_transfer(decode(request, CancelTransfer)))

    async def renew(self, request: bytes) -> None:
        """Extend a lease. Raises HandoffError when the reservation is gone."""
        await self._receiver.renew(decode(request, RenewLease))

"""The worker actors, one class per role; each is a thin shell over an `EngineHost`.

UnifiedWorker   a request enters, runs and finishes here
PrefillWorker   prompts are computed here, then their KV moves to a decode worker
DecodeWorker    KV arrives from prefill workers, and tokens follow from it
"""

import asyncio
from itertools import starmap
from typing import TYPE_CHECKING

import msgspec

from actors.lifecycle.deployment import DeploymentSpec
from actors.worker.engine_host import EngineHost
from actors.worker.kv_connector import KvConnector
from actors.worker.rank_worker import HeadsWork
from actors.worker.worker_actor import WorkerActor
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
from engine.ranks.rank import Rank

if TYPE_CHECKING:
    from actors.kv_transfer.connectors import ReceivingConnector, SendingConnector
    from actors.kv_transfer.receiver import HandoffReceiver
    from engine.engine import Engine


class UnifiedWorker(WorkerActor):
    """Prefills and decodes in one process; prompts ride along with decodes."""

    def __init__(self, spec: DeploymentSpec, name: str, role: Role) -> None:
        super().__init__(EngineHost(spec, name, role, lambda host, engine: KvConnector()))


def _give_heads(spec: DeploymentSpec, engine: "Engine", rank: Rank, name: str) -> HeadsWork:
    """What the other ranks of a prefill worker do with heads, beside steps."""
    from actors.kv_transfer.connectors import give_heads  # imports torch, which takes seconds

    return HeadsWork(give=give_heads(spec, engine, rank, name))


class PrefillWorker(WorkerActor):
    """Answers with the first token, and sends the KV on."""

    def __init__(self, spec: DeploymentSpec, name: str, role: Role) -> None:
        self._connector: SendingConnector | None = None
        make_heads_work = _give_heads if spec.config.handoff.pull_by_ranks else None
        super().__init__(EngineHost(spec, name, role, self._make_connector, make_heads_work))

    async def give(self, order: bytes) -> object:
        """Gives a rank of a decode worker heads. Raises HandoffError, WorkerError."""
        if self._connector is None or self._connector.give is None:
            raise WorkerError(f"{self} is still loading its model, or has nothing to give")
        return await asyncio.to_thread(self._connector.give, order)

    def _make_connector(self, host: EngineHost, engine: "Engine") -> KvConnector:
        from actors.kv_transfer.connectors import (
            SendingConnector,  # imports torch, which takes seconds
        )

        self._connector = SendingConnector(host, engine)
        return self._connector


def _pull_heads(spec: DeploymentSpec, engine: "Engine", rank: Rank, name: str) -> HeadsWork:
    """What the other ranks of a decode worker do with heads, beside steps."""
    from actors.kv_transfer.connectors import pull_heads  # imports torch, which takes seconds

    return HeadsWork(pull=pull_heads(spec, engine, rank, name))


class DecodeWorker(WorkerActor):
    """Takes over requests whose prompt is computed, and finishes them."""

    def __init__(self, spec: DeploymentSpec, name: str, role: Role) -> None:
        self._connector: ReceivingConnector | None = None
        make_heads_work = _pull_heads if spec.config.handoff.pull_by_ranks else None
        host = EngineHost(spec, name, role, self._make_connector, make_heads_work)
        super().__init__(
            host,
            {
                "reserve": self._reserve,
                "receive_pieces": self._receive_pieces,
                "cancel_transfer": self._cancel_transfer,
                "renew": self._renew,
            },
        )

    def _make_connector(self, host: EngineHost, engine: "Engine") -> KvConnector:
        from actors.kv_transfer.connectors import (
            ReceivingConnector,  # imports torch, which takes seconds
        )

        self._connector = ReceivingConnector(host, engine)
        return self._connector

    @property
    def _receiver(self) -> "HandoffReceiver":
        if self._connector is None:
            raise WorkerError(f"{self} is still loading its model")
        return self._connector.receiver

    async def _reserve(self, request: bytes) -> bytes:
        """ReserveRequest -> Reservation | NotNow | Refused, encoded."""
        receiver, asked = self._receiver, decode(request, ReserveRequest)
        try:
            self._host.engine.check_ids(asked.token_ids, asked.spec.params)
        except RequestError as error:
            return encode(Refused(reason=error.message))
        if asked.spec.params.constraint is not None:
            # Compiled before blocks are reserved: else the KV may arrive first, and the sampler and
            # every other row would wait for the compiler.
            compiled = self._host.engine.grammars.prepare(asked.spec.params.constraint)
            until_s = self._host.clock.now_s() + asked.wait_s
            try:
                async with asyncio.timeout(asked.wait_s):
                    await asyncio.shield(asyncio.wrap_future(compiled))
            except TimeoutError:
                return encode(NotNow())
            # `wait_s` bounds the whole wait.
            left_s = max(0.0, until_s - self._host.clock.now_s())
            asked = msgspec.structs.replace(asked, wait_s=left_s)
        return encode(await receiver.reserve(asked))

    async def open_pair(self, request: bytes) -> bytes:
        """PairRequest -> PairReply, encoded."""
        return encode(await self._receiver.open_pair(decode(request, PairRequest)))

    async def receive_pieces(self, headers: bytes, *payloads: list[object]) -> bytes:
        """Takes PieceHeaders and the objects of each in Ray's store; returns PieceReplies."""
        taking = map(self._receiver.receive_piece, decode(headers, list[PieceHeader]), payloads)
        return encode(await asyncio.gather(*taking))

    async def _receive_pieces(self, pieces: bytes) -> bytes:
        """Takes pieces from a connection: [(PieceHeader, payload)] -> [PieceReply], encoded."""
        pairs = decode(pieces, list[tuple[PieceHeader, list[object]]])
        return encode(await asyncio.gather(*starmap(self._receiver.receive_piece, pairs)))

    async def _cancel_transfer(self, request: bytes) -> bytes:
        """CancelTransfer -> CancelReply, encoded."""
        return encode(await self._receiver.cancel_transfer(decode(request, CancelTransfer)))

    async def _renew(self, request: bytes) -> bytes:
        """Extend a lease. Raises HandoffError when the reservation is gone."""
        await self._receiver.renew(decode(request, RenewLease))
        return b""

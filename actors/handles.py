"""Typed wrappers of remote calls: the only file with `.remote(` besides the rendezvous client.

Every failure of the other side arrives as WorkerError (the actor died, restarts or cannot be
found); an EngineError raised by the callee arrives as itself.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import ray
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from engine.errors import EngineError, WorkerError
from engine.messages import (
    CancelReply,
    CancelTransfer,
    ConstraintVerdict,
    LapsStatus,
    PairReply,
    PairRequest,
    PieceHeader,
    PieceReply,
    Placement,
    PlaceRequest,
    RenewLease,
    ReserveReply,
    ReserveRequest,
    StepMessage,
    Submit,
    TokenizeReply,
    TokenizeRequest,
    Topology,
    WorkerNews,
    WorkerStatus,
    decode,
    decode_placement,
    decode_reserve_reply,
    encode,
)
from engine.request import Constraint, RequestKey

logger = logging.getLogger(__name__)
T = TypeVar("T")


async def find_actor(name: str, namespace: str) -> ActorHandle[Any]:
    """Look an actor up by name. Raises WorkerError when there is none (yet), or no answer."""
    try:
        return await asyncio.to_thread(ray.get_actor, name, namespace)
    except ValueError as error:
        raise WorkerError(f"actor {name} is not running") from error
    except RayError as error:
        raise WorkerError(f"actor {name} cannot be looked up: {type(error).__name__}") from error


def create_actor(cls: ActorClass[Any], options: dict[str, Any], *args: object) -> None:
    """Create a named, detached actor; returns before its constructor has run."""
    cls.options(**options).remote(*args)


async def ping(name: str, actor: ActorHandle[Any]) -> None:
    """Beat the lifeline of an actor that is not a worker."""
    await _answer(actor.ping.remote(), name)


async def _answer(reference: Awaitable[T], name: str) -> T:
    """Await a call, translating what Ray raises."""
    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, EngineError):
            raise cause from error
        logger.error("%s raised what it should not have", name, exc_info=error)
        raise WorkerError(f"{name} failed: {type(cause).__name__}") from error
    except RayActorError as error:
        raise WorkerError(f"{name} died or is restarting") from error
    except RayError as error:
        raise WorkerError(f"{name} cannot be reached: {type(error).__name__}") from error


async def _decoded(reference: Awaitable[bytes], name: str, read: Callable[[bytes], T]) -> T:
    """Await a call and decode its answer; WorkerError from a peer that speaks another version."""
    data = await _answer(reference, name)
    try:
        return read(data)
    except msgspec.ValidationError as error:
        raise WorkerError(f"{name} runs another version: {error}") from error


def _as(kind: type[T]) -> Callable[[bytes], T]:
    return lambda data: decode(data, kind)


class WorkerHandle:
    """A prefill, decode or unified worker, seen from another process."""

    def __init__(self, name: str, actor: ActorHandle[Any]) -> None:
        self.name = name
        self._actor: Any = actor

    # ---- from the ingress -----------------------------------------------------------------------

    async def submit(self, request: Submit) -> None:
        """Queue a request. Raises CapacityError when the worker refuses it."""
        await _answer(self._actor.submit.remote(encode(request)), self.name)

    async def abort(self, key: RequestKey) -> None:
        """Forget a request in any phase; idempotent."""
        await _answer(self._actor.abort.remote(key), self.name)

    async def acknowledge(self, ingress_id: str, step_seq: int) -> None:
        await _answer(self._actor.acknowledge.remote(ingress_id, step_seq), self.name)

    async def read(self, ingress_id: str) -> AsyncGenerator[StepMessage, None]:
        """Messages of the worker for this ingress until it dies (WorkerError) or replaces us."""
        stream = self._actor.read.options(num_returns="streaming").remote(ingress_id)
        try:
            async for reference in stream:
                yield await _decoded(reference, self.name, _as(StepMessage))
        except RayError as error:
            raise WorkerError(f"{self.name} died or is restarting") from error
        finally:
            ray.cancel(stream)  # dropping the generator would leave its producer running

    # ---- from the allocator ---------------------------------------------------------------------

    async def news(self, after: int | None) -> WorkerNews:
        """What it cached since the block changes numbered `after`; None asks for everything."""
        return await _decoded(self._actor.news.remote(after), self.name, _as(WorkerNews))

    # ---- from the supervisor --------------------------------------------------------------------

    async def heartbeat(self) -> WorkerStatus:
        return await _decoded(self._actor.heartbeat.remote(), self.name, _as(WorkerStatus))

    async def drain(self, grace_s: float) -> None:
        """Finish what runs and exit for good once no ingress is connected, or after `grace_s`."""
        await _answer(self._actor.drain.remote(grace_s), self.name)

    # ---- from a prefill worker ------------------------------------------------------------------

    async def reserve(self, request: ReserveRequest) -> ReserveReply:
        reference = self._actor.reserve.remote(encode(request))
        return await _decoded(reference, self.name, decode_reserve_reply)

    async def open_pair(self, request: PairRequest) -> PairReply:
        reference = self._actor.open_pair.remote(encode(request))
        return await _decoded(reference, self.name, _as(PairReply))

    async def receive_pieces(
        self, pieces: Sequence[tuple[PieceHeader, list[Any]]]
    ) -> list[PieceReply]:
        headers = encode([header for header, _ in pieces])
        # Ray pickles lists, but not bytes: nothing is sent for empty ones.
        payloads = [payload for _, payload in pieces] if any(p for _, p in pieces) else []
        reference = self._actor.receive_pieces.remote(headers, *payloads)
        return await _decoded(reference, self.name, _as(list[PieceReply]))

    async def cancel_transfer(self, request: CancelTransfer) -> CancelReply:
        reference = self._actor.cancel_transfer.remote(encode(request))
        return await _decoded(reference, self.name, _as(CancelReply))

    async def renew(self, request: RenewLease) -> None:
        await _answer(self._actor.renew.remote(encode(request)), self.name)


class BatcherHandle:
    """A tokenizer batcher."""

    def __init__(self, name: str, actor: ActorHandle[Any]) -> None:
        self.name = name
        self._actor: Any = actor

    async def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        reference = self._actor.tokenize.remote(encode(request))
        return await _decoded(reference, self.name, _as(TokenizeReply))

    async def check(self, constraint: Constraint) -> ConstraintVerdict:
        reference = self._actor.check.remote(encode(constraint))
        return await _decoded(reference, self.name, _as(ConstraintVerdict))


class AllocatorHandle:
    """The LAPS allocator."""

    def __init__(self, name: str, actor: ActorHandle[Any]) -> None:
        self.name = name
        self._actor: Any = actor

    async def place(self, request: PlaceRequest) -> Placement:
        reference = self._actor.place.remote(encode(request))
        return await _decoded(reference, self.name, decode_placement)

    async def status(self) -> LapsStatus:
        return await _decoded(self._actor.status.remote(), self.name, _as(LapsStatus))

    async def update(self, topology: Topology) -> None:
        await _answer(self._actor.update.remote(encode(topology)), self.name)


class SupervisorHandle:
    """The Supervisor of this deployment."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor: Any = actor

    async def topology(self) -> Topology:
        return await _decoded(self._actor.topology.remote(), "supervisor", _as(Topology))

"""Typed wrappers of remote calls: the only file with `.remote(` besides the rendezvous client.

Calls that a client waits for go by a connection to the actor (connection.py); the others,
and those that carry Ray objects, by Ray. Either way, every failure of the other side arrives as
WorkerError (the actor died, restarts or cannot be found), and an EngineError raised by the callee
as itself.
"""

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar, cast

import msgspec
import ray
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.rpc.connection import CallConnection, CallStream, ConnectionEndedError, connect
from engine.errors import EngineError, HandoffError, WorkerError
from engine.messages import (
    CacheReport,
    CancelReply,
    CancelTransfer,
    ConstraintVerdict,
    LapsStatus,
    PairReply,
    PairRequest,
    PieceHeader,
    PieceReply,
    Placement,
    RenewLease,
    ReplicaMetrics,
    ReplicaNews,
    ReplicaReport,
    ReserveReply,
    ReserveRequest,
    RouteRequest,
    StepMessage,
    Submit,
    TiersAfter,
    TokenizeReply,
    TokenizeRequest,
    Topology,
    WorkerStatus,
    decode,
    decode_placement,
    decode_reserve_reply,
    encode,
)
from engine.request import Constraint, RequestKey

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_S = 5.0  # to an actor that has just told its address


async def find_actor(name: str, namespace: str) -> ActorHandle[Any]:
    """Look an actor up by name. Raises WorkerError when there is none (yet), or no answer."""
    return await asyncio.to_thread(find_now, name, namespace)


def find_now(name: str, namespace: str) -> ActorHandle[Any]:
    """The same, from a thread."""
    try:
        return ray.get_actor(name, namespace)
    except ValueError as error:
        raise WorkerError(f"actor {name} is not running") from error
    except RayError as error:
        raise WorkerError(f"actor {name} cannot be looked up: {type(error).__name__}") from error


def create_actor(cls: ActorClass[Any], options: dict[str, Any], *args: object) -> ActorHandle[Any]:
    """Create a named actor; returns before its constructor has run.

    Raises ValueError if the name is taken, unless `options` say get_if_exists.
    """
    return cast("ActorHandle[Any]", cls.options(**options).remote(*args))


class ActorStart:
    """Watches over an actor until its constructor has run."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._ready = cast("Any", actor).__ray_ready__.remote()

    def failure(self) -> str | None:
        """Why the actor will never be there; None = it may. Does not wait."""
        done, _ = ray.wait([self._ready], timeout=0)
        try:
            ray.get(done)
        except RayError as error:
            return str(error)
        return None


async def ping(name: str, actor: ActorHandle[Any]) -> None:
    """Sends a heartbeat to an actor that is not a worker."""
    await _answer(actor.ping.remote(), name)


async def wait_answer(name: str, actor: ActorHandle[Any]) -> None:
    """Waits until an actor of any kind answers; it does not count that as a heartbeat."""
    await _answer(cast("Any", actor).__ray_ready__.remote(), name)


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
    return _read(await _answer(reference, name), name, read)


def _read(data: bytes, name: str, read: Callable[[bytes], T]) -> T:
    try:
        return read(data)
    except msgspec.ValidationError as error:
        raise WorkerError(f"{name} runs another version: {error}") from error


def _as(kind: type[T]) -> Callable[[bytes], T]:
    return lambda data: decode(data, kind)


class ActorConnection:
    """The connection to one actor: opened when first needed, and anew when it has ended."""

    def __init__(self, name: str, actor: ActorHandle[Any]) -> None:
        self._name = name
        self._actor: Any = actor
        self._opening = asyncio.Lock()
        self._connection: CallConnection | None = None
        self._end: (
            weakref.finalize[[CallConnection, asyncio.AbstractEventLoop], ActorConnection] | None
        ) = None

    async def call(self, method: str, data: bytes) -> bytes:
        """Raises WorkerError, or the EngineError that the callee raised."""
        return await (await self._connected()).call(method, data)

    def begin(self, method: str, data: bytes) -> Awaitable[bytes]:
        """Makes a call, at once if the connection is open; what it returns must be awaited.

        Raises WorkerError, and so does what it returns, or the EngineError of the callee.
        """
        connection = self._connection
        if connection is None or not connection.is_open:
            return self.call(method, data)
        return connection.begin(method, data)

    async def stream(self, method: str, data: bytes) -> CallStream:
        """Raises as `call` does; closing it ends the call."""
        return (await self._connected()).stream(method, data)

    async def _connected(self) -> CallConnection:
        async with self._opening:
            if self._connection is None or not self._connection.is_open:
                address = await _answer(self._actor.address.remote(), self._name)
                self._keep(await connect(self._name, address, CONNECT_S))
            assert self._connection is not None
            return self._connection

    def _keep(self, connection: CallConnection) -> None:
        """Closes the connection when this object is collected, or the other end keeps it."""
        if self._end is not None:
            self._end.detach()  # of the one before, which has ended
        self._connection = connection
        loop = asyncio.get_running_loop()
        self._end = weakref.finalize(self, _abandon, connection, loop)
        self._end.atexit = False


def _abandon(connection: CallConnection, loop: asyncio.AbstractEventLoop) -> None:
    """Closes a connection on its event loop; from any thread."""
    with suppress(RuntimeError):  # the loop is closed, and so are its connections
        loop.call_soon_threadsafe(connection.abandon)


class WorkerHandle:
    """A prefill, decode or unified worker, seen from another process."""

    def __init__(self, name: str, actor: ActorHandle[Any]) -> None:
        self.name = name
        self._actor: Any = actor
        self._connection = ActorConnection(name, actor)

    # ---- from the ingress -----------------------------------------------------------------------

    def submit(self, request: Submit) -> Awaitable[object]:
        """Sends a request; what it returns raises CapacityError when the worker refuses it."""
        return self._connection.begin("submit", encode(request))

    async def abort(self, key: RequestKey) -> None:
        """Forget a request in any phase; idempotent."""
        await self._connection.call("abort", encode(key))

    async def acknowledge(self, ingress_id: str, step_seq: int) -> None:
        await self._connection.call("acknowledge", encode((ingress_id, step_seq)))

    async def read(self, ingress_id: str) -> AsyncGenerator[StepMessage, None]:
        """Yields the worker's messages until it dies (WorkerError) or another reader takes over."""
        async with aclosing(await self._connection.stream("read", ingress_id.encode())) as messages:
            async for message in messages:
                yield _read(message, self.name, _as(StepMessage))

    # ---- from the allocator ---------------------------------------------------------------------

    async def cache_report(self, after: int | None, tiers_after: TiersAfter) -> CacheReport:
        """Returns what the worker cached since block change `after`; None asks for everything."""
        asked = self._actor.cache_report.remote(after, tiers_after)
        return await _decoded(asked, self.name, _as(CacheReport))

    # ---- from the supervisor --------------------------------------------------------------------

    async def heartbeat(self) -> WorkerStatus:
        return await _decoded(self._actor.heartbeat.remote(), self.name, _as(WorkerStatus))

    async def drain(self, grace_s: float) -> None:
        """Finish what runs and exit for good once no ingress is connected, or after `grace_s`."""
        await _answer(self._actor.drain.remote(grace_s), self.name)

    # ---- from a prefill worker ------------------------------------------------------------------

    async def reserve(self, request: ReserveRequest) -> ReserveReply:
        answer = await self._connection.call("reserve", encode(request))
        return _read(answer, self.name, decode_reserve_reply)

    async def open_pair(self, request: PairRequest) -> PairReply:
        reference = self._actor.open_pair.remote(encode(request))
        return await _decoded(reference, self.name, _as(PairReply))

    async def receive_pieces(
        self, pieces: Sequence[tuple[PieceHeader, list[object]]]
    ) -> list[PieceReply]:
        """Returns a reply for each piece. Raises HandoffError if a connection broke."""
        if any(isinstance(item, ray.ObjectRef) for _, payload in pieces for item in payload):
            headers = encode([header for header, _ in pieces])
            payloads = [payload for _, payload in pieces]
            reference = self._actor.receive_pieces.remote(headers, *payloads)
            return await _decoded(reference, self.name, _as(list[PieceReply]))
        try:
            answer = await self._connection.call("receive_pieces", encode(pieces))
        except ConnectionEndedError as error:
            raise HandoffError(error.message) from error
        replies = _read(answer, self.name, _as(list[PieceReply]))
        if len(replies) != len(pieces):
            raise WorkerError(f"{self.name} answered {len(replies)} of {len(pieces)} pieces")
        return replies

    async def cancel_transfer(self, request: CancelTransfer) -> CancelReply:
        answer = await self._connection.call("cancel_transfer", encode(request))
        return _read(answer, self.name, _as(CancelReply))

    async def renew(self, request: RenewLease) -> None:
        await self._connection.call("renew", encode(request))


class BatcherHandle:
    """A tokenizer batcher."""

    def __init__(self, name: str, actor: ActorHandle[Any]) -> None:
        self.name = name
        self._actor: Any = actor
        self._connection = ActorConnection(name, actor)

    async def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        answer = await self._connection.call("tokenize", encode(request))
        return _read(answer, self.name, _as(TokenizeReply))

    async def check(self, constraint: Constraint) -> ConstraintVerdict:
        reference = self._actor.check.remote(encode(constraint))
        return await _decoded(reference, self.name, _as(ConstraintVerdict))


class AllocatorHandle:
    """The LAPS allocator."""

    def __init__(self, name: str, actor: ActorHandle[Any]) -> None:
        self.name = name
        self._actor: Any = actor
        self._connection = ActorConnection(name, actor)

    async def route(self, request: RouteRequest) -> Placement:
        answer = await self._connection.call("route", encode(request))
        return _read(answer, self.name, decode_placement)

    async def exchange(self, report: ReplicaReport) -> ReplicaNews:
        """Tells what a replica of the ingress does; returns what the others do."""
        answer = await self._connection.call("exchange", encode(report))
        return _read(answer, self.name, _as(ReplicaNews))

    async def exchange_metrics(self, metrics: ReplicaMetrics) -> list[ReplicaMetrics]:
        """Tells a replica's metrics; returns the others'."""
        answer = await self._connection.call("exchange_metrics", encode(metrics))
        return _read(answer, self.name, _as(list[ReplicaMetrics]))

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

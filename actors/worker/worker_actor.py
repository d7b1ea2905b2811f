"""The remote calls that every worker actor answers, whatever its role, over an `EngineHost`."""

from collections.abc import AsyncGenerator, Mapping

from actors.rpc.server import CallServer, Handler, listen_address
from actors.worker.engine_host import EngineHost
from engine.messages import Submit, TiersAfter, decode, encode
from engine.request import RequestKey


class WorkerActor:
    """Calls of the supervisor and of the ingresses. Async: the event loop only moves messages."""

    def __init__(self, host: EngineHost, calls: Mapping[str, Handler] | None = None) -> None:
        """calls: further calls that come by a connection, besides those of every worker."""
        self._host = host
        self._server = CallServer(
            listen_address(host.config),
            {
                "submit": self._submit,
                "abort": self._abort,
                "acknowledge": self._acknowledge,
                **(calls or {}),
            },
            {"read": self._read},
        )

    def __repr__(self) -> str:
        """What Ray prints before this actor's log lines."""
        return self._host.name

    async def heartbeat(self) -> bytes:
        """Heartbeat of the supervisor; returns the WorkerStatus, encoded."""
        return encode(self._host.heartbeat())

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, finish what runs for `grace_s`, hand the rest over, exit for good."""
        self._host.drain(grace_s)

    async def address(self) -> bytes:
        """Returns the address at which connections make the calls below; see `CallServer`."""
        return await self._server.address()

    async def cache_report(self, after: int | None, tiers_after: TiersAfter) -> bytes:
        """Returns the CacheReport since block change `after`, encoded; None = everything."""
        return encode(await self._host.cache_report(after, tiers_after))

    async def statistics(self) -> dict[str, object]:
        """Returns statistics for tests and people; see `EngineHost.statistics`."""
        return await self._host.statistics()

    # ---- by a connection ------------------------------------------------------------------------

    async def _submit(self, request: bytes) -> bytes:
        """Queue a `Submit`. Raises RequestError or CapacityError."""
        await self._host.running.requests.submit(decode(request, Submit))
        return b""

    async def _abort(self, key: bytes) -> bytes:
        """Forget the request of this RequestKey in any phase; idempotent."""
        self._host.abort(decode(key, RequestKey))
        return b""

    async def _acknowledge(self, progress: bytes) -> bytes:
        """The client has every message up to a number: (client's id, number)."""
        self._host.acknowledge(*decode(progress, tuple[str, int]))
        return b""

    def _read(self, ingress_id: bytes) -> AsyncGenerator[bytes, None]:
        """Yields encoded StepMessages for one client, for as long as it reads.

        Raises WorkerError as `EngineHost.running` does.
        """
        return self._host.read(ingress_id.decode())

"""What every worker actor answers, whatever its role: the remote surface over an `EngineHost`."""

from collections.abc import AsyncIterator

from actors.worker.engine_host import EngineHost
from engine.messages import Submit, decode, encode
from engine.request import RequestKey


class EngineWorker:
    """Calls of the supervisor and of the ingresses. Async: the event loop only moves messages."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    def __repr__(self) -> str:
        """What Ray prints before this actor's log lines."""
        return self._host.name

    async def heartbeat(self) -> bytes:
        """A supervisor was heard; the WorkerStatus, encoded."""
        return encode(self._host.heartbeat())

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, finish what runs for `grace_s`, hand the rest over, exit for good."""
        self._host.drain(grace_s)

    async def submit(self, request: bytes) -> None:
        """Queue a `Submit`. Raises RequestError or CapacityError."""
        await self._host.submit(decode(request, Submit))

    async def abort(self, key: RequestKey) -> None:
        """Forget a request in any phase; idempotent."""
        self._host.abort(key)

    async def acknowledge(self, ingress_id: str, step_seq: int) -> None:
        """The client has every message up to `step_seq`."""
        self._host.acknowledge(ingress_id, step_seq)

    async def read(self, ingress_id: str) -> AsyncIterator[bytes]:
        """Encoded StepMessages for one client, for as long as it reads.

        Raises WorkerError while the model is still loading.
        """
        async for message in self._host.read(ingress_id):
            yield message

    async def news(self, after: int | None) -> bytes:
        """WorkerNews since the block changes numbered `after`, encoded; None = all there is."""
        return encode(await self._host.news(after))

    async def statistics(self) -> dict[str, object]:
        """Everything a test or a person may want to see at rest; see `EngineHost.statistics`."""
        return await self._host.statistics()

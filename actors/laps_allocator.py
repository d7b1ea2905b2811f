"""The LAPS allocator actor: chooses workers for prompts, by what the workers report.

It also holds the board by which replicas of the ingress share limits and metrics. It keeps nothing
but what others report: after a restart it is complete again once the workers' streams
and the supervisor's next topology have arrived. The decisions are in actors/routing/router.py.
"""

from actors.ingress.replica_board import ReplicaBoard
from actors.lifecycle.deployment import DeploymentSpec
from actors.lifecycle.liveness import Lifeline
from actors.observability.logs import set_up_logging
from actors.routing.cache_report_reader import CacheReportReader
from actors.routing.router import Router
from actors.routing.worker_links import WorkerLinks
from actors.rpc.handles import WorkerHandle, find_actor
from actors.rpc.server import CallServer, listen_address
from engine.clock import MonotonicClock
from engine.errors import WorkerError
from engine.messages import (
    ReplicaMetrics,
    ReplicaReport,
    RouteRequest,
    StepMessage,
    Topology,
    decode,
    encode,
)


class LapsAllocator:
    """Chooses a prefill and a decode worker for each prompt."""

    def __init__(self, spec: DeploymentSpec, name: str) -> None:
        """Must be created on the actor's event loop."""
        config = spec.config
        set_up_logging(config.log_level)
        clock = MonotonicClock()
        self._name = name
        self._board = ReplicaBoard(config.api.limits, clock)
        self._server = CallServer(
            listen_address(config),
            {
                "route": self._route,
                "exchange": self._exchange,
                "exchange_metrics": self._exchange_metrics,
            },
        )
        self._lifeline = Lifeline.of(spec)

        async def find(worker: str) -> WorkerHandle:
            return WorkerHandle(worker, await find_actor(worker, spec.namespace))

        self._links = WorkerLinks(
            name,
            find=find,
            acknowledge_every_s=config.lifetimes.acknowledge_every_s,
            silence_s=config.lifetimes.ingress_silence_s,
            clock=clock,
            on_message=_ignore_message,
            on_lost=self._lose_worker,
        )
        self._router = router = Router(config, self._links, clock)
        self._cache_reports = CacheReportReader(
            self._links, router.last_sequence, router.tiers_after, router.learn
        )

    def __repr__(self) -> str:
        """What Ray prints before this actor's log lines."""
        return self._name

    async def ping(self) -> None:
        """Heartbeat of a supervisor or an ingress. Raises the error of a reader that has ended."""
        self._lifeline.beat()
        self._links.check()
        self._cache_reports.check()

    async def update(self, topology: bytes) -> None:
        """Takes the set of workers from the supervisor; counts as a heartbeat."""
        self._lifeline.beat()
        known = decode(topology, Topology)
        self._links.update(known.roles)
        self._router.note_workers(known.workers)
        self._router.update(known.roles)

    async def address(self) -> bytes:
        """Returns the address at which connections make the calls below; see `CallServer`."""
        return await self._server.address()

    async def _route(self, request: bytes) -> bytes:
        """RouteRequest -> Assign | Hold | Reject, encoded. Raises WorkerError before a topology."""
        if not self._links.links():  # just started: the ingress decides by itself
            raise WorkerError("the allocator has heard of no workers yet")
        return encode(self._router.route(decode(request, RouteRequest)))

    async def _exchange(self, report: bytes) -> bytes:
        """ReplicaReport -> ReplicaNews, encoded."""
        return encode(self._board.exchange(decode(report, ReplicaReport)))

    async def _exchange_metrics(self, metrics: bytes) -> bytes:
        """ReplicaMetrics -> [ReplicaMetrics] of the others, encoded."""
        return encode(self._board.exchange_metrics(decode(metrics, ReplicaMetrics)))

    async def status(self) -> bytes:
        """Returns the LapsStatus, encoded."""
        return encode(self._router.status())

    def _lose_worker(self, worker: str) -> None:
        """Forgets a worker's requests in flight and its cached blocks; never waits."""
        self._router.forget(worker)


async def _ignore_message(_: StepMessage) -> None:
    """Ignores tokens: only load reports matter here, and the link keeps them."""

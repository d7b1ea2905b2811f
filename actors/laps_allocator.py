"""The LAPS allocator actor: applies `place()` to what the workers report.

Stateless but for those reports: after a restart it knows everything again as soon as the workers'
streams and the supervisor's next topology arrive.
"""

from actors.deployment import DeploymentSpec
from actors.edge.placement_view import PlacementView
from actors.edge.worker_links import WorkerLinks
from actors.handles import WorkerHandle, find_actor
from actors.lifeline import Lifeline
from actors.logs import set_up_logging
from engine.clock import MonotonicClock
from engine.errors import WorkerError
from engine.messages import Assign, PlaceRequest, StepMessage, Topology, decode, encode
from engine.scheduling.placement import place


class LapsAllocator:
    """Chooses a prefill and a decode worker for each prompt."""

    def __init__(self, spec: DeploymentSpec, name: str) -> None:
        set_up_logging()
        config = spec.config
        self._name = name
        self._clock = MonotonicClock()
        self._lifeline = Lifeline(config.lifetimes.supervisor_silence_s, self._clock)

        async def find(worker: str) -> WorkerHandle:
            return WorkerHandle(worker, await find_actor(worker, spec.namespace))

        self._links = WorkerLinks(
            name,
            find=find,
            acknowledge_every_s=config.lifetimes.acknowledge_every_s,
            silence_s=config.lifetimes.ingress_silence_s,
            clock=self._clock,
            on_message=_ignore_message,
            on_lost=_ignore_loss,
        )
        self._view = PlacementView(self._links, self._clock)

    def __repr__(self) -> str:
        """What Ray prints before this actor's log lines."""
        return self._name

    async def ping(self) -> None:
        """A supervisor was heard. Raises what ended the following of a worker, if anything did."""
        self._lifeline.beat()
        self._links.check()

    async def update(self, topology: bytes) -> None:
        """Which workers there are, from the supervisor; also a heartbeat."""
        self._lifeline.beat()
        self._links.update(decode(topology, Topology).roles)

    async def place(self, request: bytes) -> bytes:
        """PlaceRequest -> Assign | Hold | Reject, encoded. WorkerError before any topology."""
        if not self._links.links():  # just started: the ingress knows better
            raise WorkerError("the allocator has heard of no workers yet")
        prompt = decode(request, PlaceRequest)
        placement = place(prompt, self._view.snapshots(), self._clock.now_s())
        if isinstance(placement, Assign):
            self._view.note(placement, prompt.num_prompt_tokens)
        return encode(placement)


def _ignore_message(_: StepMessage) -> None:
    """Only the load report matters here; the link keeps it."""


def _ignore_loss(_: str) -> None:
    """The link's state says it; nothing is under way here."""

"""Collects the state of the system for `/metrics`, `/laps_status` and Ray's own metrics."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from actors.ingress.generation import Generations
from actors.ingress.replica_exchange import ReplicaExchange
from actors.observability.merged_metrics import add_up, as_messages, prometheus_text
from actors.observability.metrics import IngressMetrics
from actors.observability.ray_metrics import RayMetrics
from engine.errors import CapacityError
from engine.messages import LapsStatus

logger = logging.getLogger(__name__)

PUBLISH_EVERY_S = 1.0


class Observation:
    """Refreshes the metrics when they are read."""

    def __init__(
        self,
        metrics: IngressMetrics,
        generations: Generations,
        ask_laps_status: Callable[[], Awaitable[LapsStatus]],
        publish_every_s: float = PUBLISH_EVERY_S,
        exchange: ReplicaExchange | None = None,
    ) -> None:
        """`ask_laps_status` raises CapacityError while the allocator is away.

        exchange: with the other replicas; None = there are none.
        """
        self._exchange = exchange
        self._metrics = metrics
        self._generations = generations
        self._ask_laps_status = ask_laps_status
        self._publish_every_s = publish_every_s

    async def laps_status(self) -> LapsStatus:
        """Returns pools, queues and moves. Raises CapacityError while the allocator is away."""
        return await self._ask_laps_status()

    async def refresh(self) -> None:
        """Sets every gauge to its present value."""
        try:
            laps = await self._ask_laps_status()
        except CapacityError:  # the rest is useful without it
            laps = None
        generations = self._generations
        self._metrics.refresh(
            generations.links.links(), generations.num_open, generations.counters.num_retries, laps
        )

    async def prometheus_text(self) -> bytes:
        """Returns the application's metrics, of all replicas, in Prometheus' text format."""
        await asyncio.gather(self.refresh(), self._tell_others())
        own = self._metrics.own_families()
        if self._exchange is not None:
            own = add_up(own, self._exchange.others.metrics.values())
        return prometheus_text([*own, *self._metrics.common_families()])

    async def publish_to(self, ray_metrics: RayMetrics) -> None:
        """Publishes this replica's metrics to Ray and to the other replicas, once a second.

        Never returns. A failure is logged once and tried again: metrics must not end a replica.
        """
        is_failing = False
        while True:
            await asyncio.sleep(self._publish_every_s)
            try:
                await self.refresh()
                ray_metrics.publish(self._metrics.families())
                await self._tell_others()
                is_failing = False
            except Exception as error:  # requests must not suffer from it
                if not is_failing:
                    logger.error("metrics cannot be shown to Ray", exc_info=error)
                is_failing = True

    async def _tell_others(self) -> None:
        """Exchanges metrics with the other replicas, if there are any."""
        if self._exchange is not None:
            await self._exchange.exchange_metrics(as_messages(self._metrics.own_families()))

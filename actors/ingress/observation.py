"""One picture of the system for whoever looks: `/metrics`, `/laps_status`, Ray's own metrics."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from actors.ingress.generation import Generations
from actors.observability.metrics import IngressMetrics
from actors.observability.ray_metrics import RayMetrics
from engine.errors import CapacityError
from engine.messages import LapsStatus

logger = logging.getLogger(__name__)

PUBLISH_EVERY_S = 1.0


class Observation:
    """Brings the metrics up to date when somebody wants to see them."""

    def __init__(
        self,
        metrics: IngressMetrics,
        generations: Generations,
        ask_laps_status: Callable[[], Awaitable[LapsStatus]],
        publish_every_s: float = PUBLISH_EVERY_S,
    ) -> None:
        """`ask_laps_status` raises CapacityError while the allocator is away."""
        self._metrics = metrics
        self._generations = generations
        self._ask_laps_status = ask_laps_status
        self._publish_every_s = publish_every_s

    async def laps_status(self) -> LapsStatus:
        """Pools, queues and moves. Raises CapacityError while the allocator is away."""
        return await self._ask_laps_status()

    async def refresh(self) -> None:
        """Set every gauge to what it is now."""
        try:
            laps = await self._ask_laps_status()
        except CapacityError:  # what is known here is worth a look without it
            laps = None
        generations = self._generations
        self._metrics.refresh(
            generations.links.links(), generations.num_open, generations.counters.num_retries, laps
        )

    async def prometheus_text(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        await self.refresh()
        return self._metrics.text()

    async def publish_to(self, ray_metrics: RayMetrics) -> None:
        """Show the same to Ray, once a second, for ever.

        A failure is logged when it begins and tried again: a picture is not worth a replica.
        """
        is_failing = False
        while True:
            await asyncio.sleep(self._publish_every_s)
            try:
                await self.refresh()
                ray_metrics.publish(self._metrics.families())
                is_failing = False
            except Exception as error:  # whatever it is, requests go on
                if not is_failing:
                    logger.error("metrics cannot be shown to Ray", exc_info=error)
                is_failing = True

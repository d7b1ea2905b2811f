"""One replica's side of what the replicas of the ingress tell each other (replica_board.py).

Only where there are several. While the allocator is away a replica goes on by what it knows.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from actors.ingress.rate_limits import RateLimits
from actors.ingress.replica_board import MAX_GONE
from actors.rpc.handles import AllocatorHandle
from engine.clock import Clock
from engine.errors import WorkerError
from engine.messages import MetricFamily, ReplicaMetrics, ReplicaReport

logger = logging.getLogger(__name__)
T = TypeVar("T")

EXCHANGE_EVERY_S = 0.25
TIMEOUT_S = 2.0
# So old may a list of replicas be. A new replica lets this pass between its first exchange and its
# first request, so that whoever has a younger list knows it.
FRESH_S = 1.0


@dataclass(slots=True)
class OtherReplicas:
    """What a replica knows of the others, as of the last exchange."""

    num_others: int = 0  # that live
    num_waiting_tokens: int = 0  # of prompts that wait there for their first token
    addresses: list[bytes] = field(default_factory=list)  # encoded, of those that may live
    complete_until_s: float = math.inf  # so long `addresses` has every replica that may live
    metrics: dict[str, ReplicaMetrics] = field(default_factory=dict)  # by replica, live or gone


class ReplicaExchange:
    """Tells the others what this replica does, and keeps what they tell."""

    def __init__(
        self,
        ingress_id: str,
        *,
        find_allocator: Callable[[], Awaitable[AllocatorHandle]],
        rate_limits: RateLimits,
        num_waiting_tokens: Callable[[], int],
        note_exchange: Callable[[], None],
        others: OtherReplicas,
        address: bytes,
        clock: Clock,
    ) -> None:
        """`find_allocator` raises WorkerError while it is away.

        address: at which the others' calls are answered here.
        num_waiting_tokens: of prompts between arrival and first token, here. `note_exchange` is
        called when what the others said has changed.
        """
        self.others = others
        others.complete_until_s = -math.inf
        self._clock = clock
        self._ingress_id = ingress_id
        self._find_allocator = find_allocator
        self._rate_limits = rate_limits
        self._num_waiting_tokens = num_waiting_tokens
        self._note_exchange = note_exchange
        self._address = address
        self._is_known = False  # the board has all that was used here
        self._allocator: AllocatorHandle | None = None

    async def run(self) -> None:
        """Exchanges reports for ever."""
        while True:
            await self.exchange()
            await asyncio.sleep(EXCHANGE_EVERY_S)

    async def introduce(self) -> None:
        """Returns when every list that others trust has this replica, if the allocator is there.

        Without the wait another replica could answer 404 for a response that is stored here: it
        may have asked for its list just before this replica was on the board.
        """
        await self.exchange()
        await asyncio.sleep(FRESH_S)

    async def exchange(self) -> None:
        """Reports what was used and what waits here, and takes over the others'."""
        if await self._exchange() == "unknown":  # by an allocator that has just started
            await self._exchange()

    async def _exchange(self) -> Literal["done", "unknown", "away"]:
        report = ReplicaReport(
            ingress_id=self._ingress_id,
            is_complete=not self._is_known,
            uses=self._rate_limits.uses(everything=not self._is_known),
            num_waiting_tokens=self._num_waiting_tokens(),
            address=self._address,
        )
        asked_s = self._clock.now_s()
        news = await self._ask(lambda allocator: allocator.exchange(report))
        if news is None:
            return "away"
        self._is_known = news.is_known
        if not news.is_known:
            return "unknown"
        self._rate_limits.learn(report.uses, news.levels)
        self.others.num_others = news.num_replicas - 1
        self.others.num_waiting_tokens = news.num_waiting_tokens
        self.others.addresses = news.addresses
        self.others.complete_until_s = asked_s + FRESH_S if news.has_all_addresses else -math.inf
        self._note_exchange()
        return "done"

    async def exchange_metrics(self, families: Sequence[MetricFamily]) -> None:
        """Tells the others this replica's metrics, and takes over theirs.

        Those that the allocator has forgotten are kept: a sum that fell would look like a restart.
        """
        mine = ReplicaMetrics(ingress_id=self._ingress_id, families=list(families))
        found = await self._ask(lambda allocator: allocator.exchange_metrics(mine))
        if found is None:
            return
        known = self.others.metrics
        known.update({name: msgspec.structs.replace(m, is_live=False) for name, m in known.items()})
        known.update({metrics.ingress_id: metrics for metrics in found})
        gone = [name for name, metrics in known.items() if not metrics.is_live]
        for name in gone[:-MAX_GONE]:
            del known[name]

    async def _ask(self, call: Callable[[AllocatorHandle], Awaitable[T]]) -> T | None:
        """Returns the allocator's answer; None if it is away."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if self._allocator is None:
                    self._allocator = await self._find_allocator()
                return await call(self._allocator)
        except (WorkerError, TimeoutError) as error:
            logger.debug("replicas cannot hear of each other: %r", error)
            self._allocator = None
            return None

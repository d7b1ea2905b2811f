"""Where a simulated request goes: the system's placement, and the simple policies it is held to.

    laps           `route` over short and long pools that `rebalance` keeps
    predicted      `route` without pools: the least predicted time to the first token
    least-tokens   the least queued tokens
    round-robin    one worker after the other

Who decodes is chosen as `route` chooses in all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec
import numpy as np

from configs.resolved import ResolvedLaps
from engine.cost_model import StepCosts
from engine.messages import Assign, Placement, RouteRequest
from engine.routing.placement import PlacementRules, route
from engine.routing.pools import PoolState, follow, is_due, rebalance
from load_tests.simulation.fleet import Decoders, FastPlacement, Prefillers


class Policy(Enum):
    """See above."""

    LAPS = "laps"
    PREDICTED = "predicted"
    LEAST_TOKENS = "least-tokens"
    ROUND_ROBIN = "round-robin"

    @property
    def predicts(self) -> bool:
        """Whether it looks at predicted seconds."""
        return self in (Policy.LAPS, Policy.PREDICTED)


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """How many workers each pool has since then."""

    at_s: float
    num_short: int
    num_long: int


class Router:
    """One policy over the columns of a fleet; pools change with the clock."""

    def __init__(
        self,
        policy: Policy,
        *,
        laps: ResolvedLaps,
        costs: StepCosts,
        prefillers: Prefillers,
        decoders: Decoders | None,
        is_exact: bool = False,
    ) -> None:
        """`is_exact`: by `route` itself instead of its form over arrays."""
        values = msgspec.to_builtins(laps) | {"enable_laps_alloc": policy is Policy.LAPS}
        self._laps = msgspec.convert(values, ResolvedLaps)
        self._policy = policy
        self._rules = PlacementRules(laps=self._laps, cost=costs)
        self._prefillers = prefillers
        self._decoders = decoders
        self._fast = FastPlacement(self._rules, prefillers, decoders)
        self._is_exact = is_exact
        self._num_routed = 0
        self.pools = follow(PoolState(), prefillers.names, self._laps)
        self.sizes: list[PoolSizes] = []
        self._show_pools(0.0)

    def route(self, prompt: RouteRequest, hits: Mapping[int, int], now_s: float) -> Assign:
        """`hits`: tokens of the prompt that workers, by column, hold. All workers are alive."""
        self._look_at_pools(now_s)
        placement = self._choose(prompt, hits, now_s)
        self._num_routed += 1
        assert isinstance(placement, Assign), f"{placement} with all workers alive"
        return placement

    def _choose(self, prompt: RouteRequest, hits: Mapping[int, int], now_s: float) -> Placement:
        fleet = self._prefillers
        match self._policy:
            case Policy.ROUND_ROBIN:
                i = self._num_routed % len(fleet.names)
            case Policy.LEAST_TOKENS:
                i = int(np.argmin(fleet.queued_tokens))
            case Policy.LAPS | Policy.PREDICTED:
                if self._is_exact:
                    return self._place_exactly(prompt, hits, now_s)
                return self._fast.route(prompt, hits)
        return self._fast.assign_to(prompt, i, hits.get(i, 0))

    def _place_exactly(
        self, prompt: RouteRequest, hits: Mapping[int, int], now_s: float
    ) -> Placement:
        fleet, others = self._prefillers, self._decoders
        snapshots = [fleet.snapshot(i, hits.get(i, 0)) for i in range(len(fleet.names))]
        if others is not None:
            snapshots += [others.snapshot(i) for i in range(len(others.names))]
        return route(prompt, snapshots, now_s, self._rules)

    def _look_at_pools(self, now_s: float) -> None:
        if not is_due(self.pools, now_s, self._laps):
            return
        fleet, before = self._prefillers, self.pools
        snapshots = [fleet.snapshot(i) for i in range(len(fleet.names))]
        self.pools = rebalance(before, snapshots, now_s, self._laps)
        if self.pools.labels is not before.labels:
            self._show_pools(now_s)

    def _show_pools(self, now_s: float) -> None:
        self._prefillers.set_labels(self.pools.labels)
        labels = list(self.pools.labels.values())
        self.sizes.append(PoolSizes(now_s, labels.count("short"), labels.count("long")))

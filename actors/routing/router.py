"""The allocator's decisions: pools, cached prefixes, costs, and the workers of a prompt.

It collects what `route` and `rebalance` need and applies what they return; knows no Ray. After a
restart it is rebuilt from the workers' reports, but for the pools' labels, which begin with the
first split again.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from actors.routing.load_view import PlacementView
from actors.routing.worker_links import WorkerLinks
from configs.resolved import ResolvedLaps, resolve_laps
from configs.schema import AppConfig, LapsConfig
from engine.clock import Clock
from engine.cost_model import StepCosts
from engine.messages import (
    Assign,
    CacheReport,
    LapsStatus,
    Placement,
    PoolMove,
    Role,
    RouteRequest,
    TiersAfter,
    WorkerIdentity,
    WorkerLoad,
    WorkerStatus,
)
from engine.routing.placement import PlacementRules, WorkerSnapshot, route
from engine.routing.pools import CLASSES, PoolState, follow, is_due, num_pending, rebalance
from engine.routing.prefix_hits import PrefixHits
from engine.routing.tier_hits import TierHits

logger = logging.getLogger(__name__)


class Router:
    """The decisions of one allocator."""

    def __init__(self, config: AppConfig, links: WorkerLinks, clock: Clock) -> None:
        self._laps = config.laps
        self._clock = clock
        self._view = PlacementView(links, clock)
        self._rules = PlacementRules(
            laps=placement_laps(config.laps, ()), block_size=config.cache.block_size
        )
        self._hits = PrefixHits(config.cache.block_size)
        self._tiers = TierHits(config.cache.block_size)
        self._pools = PoolState()
        self._costs: StepCosts | None = None  # those fitted to the most steps

    def update(self, roles: Mapping[str, Role]) -> None:
        """Takes over the topology, and rebalances the pools if a period is over."""
        prefillers = [name for name, role in roles.items() if role != "decode"]
        self._pools = follow(self._pools, prefillers, self._laps)
        self._look_at_pools()

    def note_workers(self, workers: Mapping[str, WorkerStatus]) -> None:
        """Takes over where workers are, and what they chose where the configuration says `auto`.

        Of several values the largest holds for all, as one model of costs does.
        """
        self._view.note_hosts(workers)
        if self._laps.max_step_ms != "auto":
            return
        identities = [w.identity for w in workers.values() if w.identity is not None]
        laps = placement_laps(self._laps, identities)
        if laps != self._rules.laps:
            self._rules = replace(self._rules, laps=laps)

    def route(self, request: RouteRequest) -> Placement:
        """Choose workers and count the choice until their reports do."""
        self._look_at_pools()
        hits = self._hits.hit_tokens(request.block_hashes)
        stored = self._tiers.hits(request.block_hashes, hits)
        snapshots = self._view.snapshots(self._pools.labels, hits, stored)
        placement = route(request, snapshots, self._clock.now_s(), self._rules)
        if isinstance(placement, Assign):
            self._view.note(placement, request.num_prompt_tokens)
        return placement

    # ---- what workers tell ----------------------------------------------------------------------

    def last_sequence(self, worker: str) -> int | None:
        """Returns the last report of cached blocks applied; None = ask for everything."""
        return self._hits.last_sequence(worker)

    def tiers_after(self, worker: str) -> TiersAfter:
        """Returns what this worker is to tell of the tiers that it shares."""
        return self._tiers.after(worker)

    def learn(self, worker: str, cache_report: CacheReport) -> None:
        """Applies a worker's report of its cache and of the cost of its steps.

        The costs fitted to the most steps are used for all: small differences between fits of
        equal devices must not draw prompts to one of them.
        """
        if cache_report.blocks is not None and not self._hits.apply(worker, cache_report.blocks):
            logger.info("missed a report of the cached blocks of %s; asking for all", worker)
        if not self._tiers.apply(worker, cache_report.tiers):
            logger.info("missed a report of the tiers of %s; asking for all", worker)
        costs = cache_report.costs
        num_samples = 0 if self._costs is None else self._costs.num_samples
        if costs is not None and costs.num_samples > num_samples:
            self._costs = costs
            self._rules = replace(self._rules, cost=costs)

    def forget(self, worker: str) -> None:
        """Forgets a lost worker and what it cached."""
        self._hits.forget(worker)
        self._tiers.forget(worker)

    # ---- for people -----------------------------------------------------------------------------

    def status(self) -> LapsStatus:
        """Returns pools, queues and the last moves."""
        now_s, labels = self._clock.now_s(), self._pools.labels
        workers = sorted(self._prefillers(), key=lambda s: s.name)
        num_blocks, num_stored = self._hits.num_blocks(), self._tiers.num_blocks()
        return LapsStatus(
            enabled=self._laps.enable_laps_alloc,
            threshold=self._laps.laps_alloc_threshold,
            policy=self._laps.rebalance_policy,
            pools={pool: [n for n, label in labels.items() if label == pool] for pool in CLASSES},
            pending={pool: num_pending(pool, workers, labels) for pool in CLASSES},
            workers=[
                WorkerLoad(
                    worker=s.name,
                    pool=s.label,
                    is_alive=s.is_alive,
                    num_waiting=s.num_waiting,
                    queued_tokens=s.queued_tokens,
                    queued_s=s.queued_s,
                    num_cached_blocks=num_blocks.get(s.name, 0),
                    num_stored_blocks=num_stored.get(s.name, 0),
                    host_tier=s.host_tier,
                )
                for s in workers
            ],
            moves=[
                PoolMove(worker=m.worker, pool=m.pool, ago_s=now_s - m.at_s, reason=m.reason)
                for m in reversed(self._pools.moves)
            ],
            step_costs=self._costs,
        )

    # ---- parts ----------------------------------------------------------------------------------

    def _prefillers(self) -> list[WorkerSnapshot]:
        return [s for s in self._view.snapshots(self._pools.labels) if s.can_prefill]

    def _look_at_pools(self) -> None:
        before, now_s = self._pools, self._clock.now_s()
        if not is_due(before, now_s, self._laps):
            return
        self._pools = rebalance(before, self._prefillers(), now_s, self._laps)
        if self._pools.labels is not before.labels:
            move = self._pools.moves[-1]
            logger.info("%s joins the %s pool: %s", move.worker, move.pool, move.reason)


def placement_laps(laps: LapsConfig, workers: Iterable[WorkerIdentity]) -> ResolvedLaps:
    """What placement goes by; before a worker that prefills has reported, the default step time.

    Its other keys that may be `auto` do not matter to placement, and have their defaults.
    """
    chosen = msgspec.structs.asdict(ResolvedLaps())
    steps_ms = [w.limits.max_step_ms for w in workers if w.limits and w.role != "decode"]
    if steps_ms:
        chosen["max_step_ms"] = max(steps_ms)
    return resolve_laps(laps, chosen)

"""What the replicas of the ingress tell each other, kept by the allocator.

Rate limits: the board has the common bucket of every key. A replica reports what it used and gets
the level back, so between two reports it may let through what others have used meanwhile; that is
owed, and nobody gets anything before it has refilled. Waiting prompts: the sum of what replicas
reported last. Addresses: where each answers the others, and those of replicas that have been silent
for less than a minute: they may live, cut off from here. Metrics: the last of every replica, so
that what it counted outlives it.

After a restart the board is empty. Replicas then report everything, and each common bucket begins
with the lowest level that a replica knows. A new replica reports before its first request.
"""

from collections.abc import Mapping

from actors.ingress.rate_limits import TokenBucket, limits_of, make_buckets
from configs.schema import RateLimitConfig
from engine.clock import Clock
from engine.messages import (
    KeyLevel,
    KeyUse,
    LimitKind,
    ReplicaMetrics,
    ReplicaNews,
    ReplicaReport,
)

SILENCE_S = 3.0  # a replica reports four times a second
GONE_S = 60.0  # a replica that has been silent for so long is gone, with what it stored
MAX_GONE = 32  # replicas whose counts are kept after their end


class SharedBuckets:
    """The buckets of all keys, over all replicas."""

    def __init__(self, limits: Mapping[str, RateLimitConfig], clock: Clock) -> None:
        """limits: by key name, "*" = of each key without its own."""
        self._limits = limits
        self._clock = clock
        self._buckets: dict[str, dict[LimitKind, TokenBucket]] = {}
        self._used: dict[str, dict[tuple[str, LimitKind], int]] = {}  # replica -> what it reported

    def knows(self, replica: str) -> bool:
        return replica in self._used

    def forget(self, replica: str) -> None:
        """Forgets what a replica reported; what it used stays used."""
        self._used.pop(replica, None)

    def introduce(self, replica: str, uses: list[KeyUse]) -> None:
        """Takes over all that a replica has used so far, which may be in the buckets already."""
        self._used[replica] = {(use.key, use.kind): use.used for use in uses}
        for use in uses:
            bucket = self._bucket(use)
            if bucket is not None:
                bucket.set_level(min(bucket.level, use.level))

    def take(self, replica: str, uses: list[KeyUse]) -> None:
        """Takes out of the buckets what a replica that is known has used since it said so last."""
        before = self._used[replica]
        for use in uses:
            bucket = self._bucket(use)
            if bucket is not None:
                bucket.add(before.get((use.key, use.kind), 0) - use.used)
            before[use.key, use.kind] = use.used

    def levels(self) -> list[KeyLevel]:
        """Returns the level of each bucket that is not full; forgets keys whose buckets are."""
        levels = []
        for key, buckets in list(self._buckets.items()):
            lower = {kind: b.level for kind, b in buckets.items() if b.level < b.per_minute}
            levels += [KeyLevel(key=key, kind=kind, level=lower[kind]) for kind in lower]
            if not lower:
                del self._buckets[key]
        return levels

    def _bucket(self, use: KeyUse) -> TokenBucket | None:
        """Returns the bucket of a key's limit; None if it has none here (another configuration)."""
        if use.key not in self._buckets:
            limits = limits_of(self._limits, use.key)
            self._buckets[use.key] = {} if limits is None else make_buckets(limits, self._clock)
        return self._buckets[use.key].get(use.kind)


class ReplicaBoard:
    """The reports of all replicas."""

    def __init__(self, limits: Mapping[str, RateLimitConfig], clock: Clock) -> None:
        """limits: as of `SharedBuckets`."""
        self._clock = clock
        self._began_s = clock.now_s()
        self._buckets = SharedBuckets(limits, clock)
        self._heard_s: dict[str, float] = {}  # replica -> when it reported last
        self._num_waiting_tokens: dict[str, int] = {}
        self._addresses: dict[str, tuple[bytes, float]] = {}  # replica -> where, heard when
        self._metrics: dict[str, ReplicaMetrics] = {}  # oldest first

    def exchange(self, report: ReplicaReport) -> ReplicaNews:
        """Takes over a replica's report and returns the others'."""
        self._forget_silent()
        replica = report.ingress_id
        if report.is_complete and not self._buckets.knows(replica):
            self._buckets.introduce(replica, report.uses)
        elif self._buckets.knows(replica):
            self._buckets.take(replica, report.uses)
        now_s = self._heard_s[replica] = self._clock.now_s()
        self._num_waiting_tokens[replica] = report.num_waiting_tokens
        self._addresses[replica] = report.address, now_s
        return ReplicaNews(
            is_known=self._buckets.knows(replica),
            num_replicas=len(self._heard_s),
            num_waiting_tokens=sum(
                num for name, num in self._num_waiting_tokens.items() if name != replica
            ),
            addresses=[at for name, (at, _) in self._addresses.items() if name != replica],
            has_all_addresses=now_s - self._began_s >= SILENCE_S,
            levels=self._buckets.levels(),
        )

    def exchange_metrics(self, metrics: ReplicaMetrics) -> list[ReplicaMetrics]:
        """Takes over a replica's metrics and returns the others', also of those that are gone."""
        self._forget_silent()
        self._metrics.pop(metrics.ingress_id, None)
        self._metrics[metrics.ingress_id] = metrics
        gone = [name for name in self._metrics if name not in self._heard_s]
        for name in gone[:-MAX_GONE]:
            del self._metrics[name]
        return [
            ReplicaMetrics(ingress_id=name, families=other.families, is_live=name in self._heard_s)
            for name, other in self._metrics.items()
            if name != metrics.ingress_id
        ]

    def _forget_silent(self) -> None:
        now_s = self._clock.now_s()
        for replica, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > SILENCE_S:
                del self._heard_s[replica], self._num_waiting_tokens[replica]
                self._buckets.forget(replica)
        for replica, (_, heard_s) in list(self._addresses.items()):
            if now_s - heard_s > GONE_S:
                del self._addresses[replica]

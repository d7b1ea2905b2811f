"""The metrics of one ingress replica.

Names with `vllm:` mean what they mean in vLLM; others are this project's. A replica reports its own
requests, and the reports of every worker that it is connected to: load as gauges, totals as
counters.
"""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
)

from actors.observability.latency_metrics import LATENCY_BUCKETS_S, LatencyMetrics
from actors.observability.recent_ttft import RecentTtft
from actors.observability.worker_metrics import WorkerMetrics
from actors.routing.worker_links import WorkerLink
from configs.schema import CacheConfig
from engine.length_class import LengthClass
from engine.messages import Assign, LapsStatus, PoolMove
from engine.routing.pools import CLASSES

UNSPLIT = "any"  # label of workers that take prompts of both classes


class ClassMetrics:
    """Counts and first-token times of short and of long prompts."""

    def __init__(self, registry: CollectorRegistry, model_name: str, recent: RecentTtft) -> None:
        """`recent` records every first token, too."""
        self._label = {"model_name": model_name}
        self._recent = recent
        names = [*self._label, "length_class"]

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, names, registry=registry, buckets=LATENCY_BUCKETS_S)

        self._placed = Counter(
            "laps_requests_total",
            "Choices sent to a worker, by class; a retry is not counted again.",
            names,
            registry=registry,
        )
        self._predicted_queue = histogram(
            "laps_predicted_queue_seconds",
            "Predicted when a request was placed: the work before its prompt.",
        )
        self._ttft = histogram(
            "laps_time_to_first_token_seconds", "Arrival to the first token, by class."
        )
        for length_class in CLASSES:  # a series of zeros is better than none
            for metric in (self._placed, self._predicted_queue, self._ttft):
                metric.labels(**self._label, length_class=length_class)

    def count_placed(self, assign: Assign) -> None:
        labels = self._label | {"length_class": assign.length_class}
        self._placed.labels(**labels).inc()
        self._predicted_queue.labels(**labels).observe(max(assign.ttft_s - assign.work_s, 0.0))

    def observe_ttft(self, length_class: LengthClass, seconds: float) -> None:
        self._ttft.labels(**self._label, length_class=length_class).observe(seconds)
        self._recent.add(length_class, seconds)


class PoolMetrics:
    """The pools as the allocator sees them; without series while it is away."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._label = {"model_name": model_name}
        self._known_moves: list[PoolMove] = []

        def gauge(name: str, text: str, label: str) -> Gauge:
            return Gauge(name, text, [*self._label, label], registry=registry)

        self._workers = gauge("laps_pool_workers", "Live workers of the pool.", "pool")
        self._pending = gauge(
            "laps_pool_pending_seconds", "Predicted seconds of work queued in the pool.", "pool"
        )
        self._waiting = gauge(
            "laps_waiting_requests",
            "Waiting prompts of the class, by pool where workers do not tell classes apart.",
            "length_class",
        )
        self._moves = Counter(
            "laps_pool_moves_total",
            "Workers that joined the pool, as far as the allocator remembered at a scrape.",
            [*self._label, "pool"],
            registry=registry,
        )
        for pool in CLASSES:
            self._moves.labels(**self._label, pool=pool)

    def show(self, status: LapsStatus | None) -> None:
        """Set the gauges and count new moves; None = the allocator does not answer."""
        for gauge in (self._workers, self._pending, self._waiting):
            gauge.clear()
        if status is None:
            return
        for pool in CLASSES if any(status.pools.values()) else (UNSPLIT,):
            members = [w for w in status.workers if (w.pool or UNSPLIT) == pool]
            labels = self._label | {"pool": pool}
            self._workers.labels(**labels).set(sum(w.is_alive for w in members))
            self._pending.labels(**labels).set(sum(w.queued_s for w in members))
        for length_class, num in status.pending.items():
            self._waiting.labels(**self._label, length_class=length_class).set(num)
        for move in status.moves[: num_new_moves(self._known_moves, status.moves)]:
            self._moves.labels(**self._label, pool=move.pool).inc()
        self._known_moves = status.moves


def num_new_moves(before: list[PoolMove], now: list[PoolMove]) -> int:
    """Counts the moves in `now` that came after `before`; both start with the newest.

    An allocator that restarted remembers none: then all of `now` are new.
    """
    old, new = ([(m.worker, m.pool, m.reason) for m in moves] for moves in (before, now))
    return next(num for num in range(len(new) + 1) if new[num:] == old[: len(new) - num])


class IngressMetrics:
    """Counters and histograms of one replica; gauges are set when `refresh` is called."""

    def __init__(
        self,
        model_name: str,
        recent: RecentTtft,
        cache: CacheConfig | None = None,
        drafter: str = "none",
    ) -> None:
        """cache, drafter: of the workers; None = the defaults."""
        # Else every counter gets a second series, of its creation time.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self.classes = ClassMetrics(registry, model_name, recent)
        self.latencies = LatencyMetrics(registry, model_name)
        # What every replica sees alike, and must not be added up over them.
        self._common = common = CollectorRegistry()
        self._pools = PoolMetrics(common, model_name)
        self.workers = WorkerMetrics(common, model_name, cache or CacheConfig())
        Gauge(
            "laps_speculation_info",
            "Always 1: who drafts the tokens that vllm:spec_decode_* count.",
            ["model_name", "drafter"],
            registry=common,
        ).labels(model_name=model_name, drafter=drafter).set(1)
        self._label = {"model_name": model_name}
        names = list(self._label)

        def labelled(name: str, text: str, label: str) -> Counter:
            return Counter(name, text, [*names, label], registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, names, registry=registry).labels(**self._label)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, names, registry=registry).labels(**self._label)

        self._finished = labelled(
            "vllm:request_success_total", "Choices that ended well.", "finished_reason"
        )
        self._failed = labelled(
            "laps_requests_failed_total", "Requests answered with an error, by status.", "status"
        )
        self._disconnected = counter("laps_clients_left_total", "Answers whose client went away.")
        self._prompt_tokens = counter("vllm:prompt_tokens_total", "Prompt tokens accepted.")
        self._cached_tokens = counter(
            "laps_cached_prompt_tokens_total", "Of these, found in cache."
        )
        self._prefix_queries = counter(
            "vllm:prefix_cache_queries_total", "Prompt tokens that workers looked up."
        )
        self._prefix_hits = counter("vllm:prefix_cache_hits_total", "Of these, found in cache.")
        self._output_tokens = counter("vllm:generation_tokens_total", "Tokens generated.")
        self._retries = gauge("laps_request_retries", "Attempts repeated since start.")
        self._open = gauge("laps_open_attempts", "Attempts waiting for tokens.")

    def count_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def count_tokens(self, num_tokens: int) -> None:
        self._output_tokens.inc(num_tokens)

    def count_cached(self, num_cached_tokens: int, num_prompt_tokens: int) -> None:
        """Counts the prefix cache lookup of a choice's prompt."""
        self._cached_tokens.inc(num_cached_tokens)
        self._prefix_hits.inc(num_cached_tokens)
        self._prefix_queries.inc(num_prompt_tokens)

    def count_finished(self, reason: str) -> None:
        self._finished.labels(**self._label, finished_reason=reason).inc()

    def count_failed(self, status: int) -> None:
        self._failed.labels(**self._label, status=str(status)).inc()

    def count_disconnected(self) -> None:
        self._disconnected.inc()

    def refresh(
        self,
        links: list[WorkerLink],
        num_open: int,
        num_retries: int,
        laps: LapsStatus | None,
    ) -> None:
        """Sets the gauges; `laps` is None while the allocator does not answer."""
        self._pools.show(laps)
        self.workers.show(links)
        self._open.set(num_open)
        self._retries.set(num_retries)

    def own_families(self) -> list[Metric]:
        """What this replica counts by itself, as of the last `refresh`."""
        return list(self._registry.collect())

    def common_families(self) -> list[Metric]:
        """What every replica sees alike, as of the last `refresh`: pools and workers."""
        return list(self._common.collect())

    def families(self) -> list[Metric]:
        """All metrics of this replica as of the last `refresh`."""
        return [*self.own_families(), *self.common_families()]

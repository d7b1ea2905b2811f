"""What `/metrics` of one ingress replica says, in Prometheus text.

Names with `vllm:` mean what vLLM's dashboards mean by them; the rest is ours. A replica reports
its own requests and the load of every worker it is connected to.
"""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from actors.edge.recent_ttft import RecentTtft
from actors.edge.worker_links import WorkerLink
from engine.messages import Assign, LapsStatus, LengthClass, PoolMove
from engine.scheduling.pools import CLASSES

LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
)  # fmt: skip

UNSPLIT = "any"  # the pool of workers that take prompts of both classes


class ClassMetrics:
    """What became of short and of long prompts."""

    def __init__(self, registry: CollectorRegistry, model_name: str, recent: RecentTtft) -> None:
        """Every first token is told to `recent`, too."""
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
        for length_class in CLASSES:  # a series of zeros says more than none
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
    """How many of `now` came after `before`; both have the newest first and forget the oldest.

    An allocator that restarted remembers none: then all of `now` are new.
    """
    old, new = ([(m.worker, m.pool, m.reason) for m in moves] for moves in (before, now))
    return next(num for num in range(len(new) + 1) if new[num:] == old[: len(new) - num])


class IngressMetrics:
    """Counters and histograms of one replica; gauges are set when `render` is called."""

    def __init__(self, model_name: str, recent: RecentTtft) -> None:
        # Else every counter gets a second series that nobody plots.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self.classes = ClassMetrics(registry, model_name, recent)
        self._pools = PoolMetrics(registry, model_name)
        self._label = {"model_name": model_name}
        names = list(self._label)

        def histogram(name: str, text: str) -> Histogram:
            made = Histogram(name, text, names, registry=registry, buckets=LATENCY_BUCKETS_S)
            return made.labels(**self._label)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, [*names, *labels], registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, [*names, "worker", "role"], registry=registry)

        self._finished = counter(
            "vllm:request_success_total", "Choices that ended well.", "finished_reason"
        )
        self._failed = counter(
            "laps_requests_failed_total",
            "Requests answered with an error, by HTTP status.",
            "status",
        )
        self._disconnected = counter("laps_clients_left_total", "Answers whose client went away.")
        self._prompt_tokens = counter("vllm:prompt_tokens_total", "Prompt tokens accepted.")
        self._cached_tokens = counter(
            "laps_cached_prompt_tokens_total", "Of these, found in cache."
        )
        self._output_tokens = counter("vllm:generation_tokens_total", "Tokens generated.")
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to the first token.")
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to the last token.")
        self._retries = Gauge(
            "laps_request_retries", "Attempts repeated since start.", names, registry=registry
        )
        self._open = Gauge(
            "laps_open_attempts", "Attempts waiting for tokens.", names, registry=registry
        )
        self._up = gauge("laps_worker_up", "1 while the worker's stream is read.")
        self._running = gauge("vllm:num_requests_running", "Requests in the worker's batch.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests queued at the worker.")
        self._queued = gauge("laps_queued_tokens", "Tokens the worker has yet to compute.")
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.")

    def count_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.labels(**self._label).inc(num_tokens)

    def count_tokens(self, num_tokens: int) -> None:
        self._output_tokens.labels(**self._label).inc(num_tokens)

    def count_cached(self, num_tokens: int) -> None:
        self._cached_tokens.labels(**self._label).inc(num_tokens)

    def count_finished(self, reason: str) -> None:
        self._finished.labels(**self._label, finished_reason=reason).inc()

    def count_failed(self, status: int) -> None:
        self._failed.labels(**self._label, status=str(status)).inc()

    def count_disconnected(self) -> None:
        self._disconnected.labels(**self._label).inc()

    def observe_ttft(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def observe_e2e(self, seconds: float) -> None:
        self._e2e.observe(seconds)

    def render(
        self,
        links: list[WorkerLink],
        num_open: int,
        num_retries: int,
        laps: LapsStatus | None,
    ) -> bytes:
        """The text Prometheus scrapes; `laps` is None while the allocator does not answer."""
        self._pools.show(laps)
        self._open.labels(**self._label).set(num_open)
        self._retries.labels(**self._label).set(num_retries)
        for gauge in (self._up, self._running, self._waiting, self._queued, self._kv_usage):
            gauge.clear()
        for link in links:
            labels = self._label | {"worker": link.name, "role": link.role}
            load = link.load
            self._up.labels(**labels).set(int(link.is_up))
            if load is not None:
                self._running.labels(**labels).set(load.num_running)
                self._waiting.labels(**labels).set(load.num_waiting)
                self._queued.labels(**labels).set(load.queued_tokens)
                held = load.num_blocks - load.num_free_blocks
                self._kv_usage.labels(**labels).set(held / max(load.num_blocks, 1))
        return generate_latest(self._registry)

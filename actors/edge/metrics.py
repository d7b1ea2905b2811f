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

from actors.edge.worker_links import WorkerLink

LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
)  # fmt: skip


class IngressMetrics:
    """Counters and histograms of one replica; gauges are set when `render` is called."""

    def __init__(self, model_name: str) -> None:
        # Else every counter gets a second series that nobody plots.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
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

    def render(self, links: list[WorkerLink], num_open: int, num_retries: int) -> bytes:
        """The text Prometheus scrapes."""
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

"""What workers say of themselves, as metrics: their load as gauges, their totals as counters."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from actors.edge.worker_links import WorkerLink
from engine.messages import HandoffTotals, LoadReport

# Counters that a worker keeps, by the name of their metric.
TOTALS: Mapping[str, str] = {
    "vllm:num_preemptions": "Requests that lost their blocks and were computed again.",
    "laps_preemptions_for_others": "Of these: for a request that waited for a row or for blocks.",
    "laps_handoffs": "Prompts whose KV a decode worker has taken over.",
    "laps_handoff_bytes": "Bytes of KV sent to decode workers.",
    "laps_handoff_failures": "Handoffs that were tried again, over another channel or as a whole.",
}


class WorkerTotals(Collector):
    """Counters that start with their worker: Prometheus knows what a smaller value means."""

    def __init__(self, label: Mapping[str, str]) -> None:
        self._label = dict(label)
        self._totals: dict[tuple[str, str], Mapping[str, float]] = {}

    def clear(self) -> None:
        self._totals.clear()

    def show(self, worker: str, role: str, totals: Mapping[str, float]) -> None:
        """totals: by name, those of `TOTALS` that the worker keeps."""
        assert totals.keys() <= TOTALS.keys(), f"{set(totals) - set(TOTALS)} of {worker}"
        self._totals[worker, role] = totals

    def collect(self) -> Iterator[Metric]:
        for name, text in TOTALS.items():
            family = CounterMetricFamily(name, text, labels=[*self._label, "worker", "role"])
            for (worker, role), totals in self._totals.items():
                if name in totals:
                    family.add_metric([*self._label.values(), worker, role], totals[name])
            yield family


class WorkerMetrics:
    """Every worker that this replica is connected to, as of its last report."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._label = {"model_name": model_name}
        self.totals = WorkerTotals(self._label)
        registry.register(self.totals)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, [*self._label, "worker", "role"], registry=registry)

        self._up = gauge("laps_worker_up", "1 while the worker's stream is read.")
        self._running = gauge("vllm:num_requests_running", "Requests in the worker's batch.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests queued at the worker.")
        self._queued = gauge("laps_queued_tokens", "Tokens the worker has yet to compute.")
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.")

    def show(self, links: Iterable[WorkerLink]) -> None:
        """Set the gauges; what a worker that is away said last is forgotten."""
        for gauge in (self._up, self._running, self._waiting, self._queued, self._kv_usage):
            gauge.clear()
        self.totals.clear()
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
                self.totals.show(link.name, link.role, _totals(load, link.handoffs))


def _totals(load: LoadReport, handoffs: HandoffTotals | None) -> Mapping[str, float]:
    totals: dict[str, float] = {
        "vllm:num_preemptions": load.num_preemptions,
        "laps_preemptions_for_others": load.num_preemptions_for_others,
    }
    if handoffs is not None:
        totals["laps_handoffs"] = handoffs.num_done
        totals["laps_handoff_bytes"] = handoffs.num_bytes
        totals["laps_handoff_failures"] = handoffs.num_failures
    return totals

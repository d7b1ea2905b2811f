"""Publishes the metrics to Ray's own pipeline, which the dashboard and its Prometheus read.

Ray allows no colon in a name and adds a prefix: `vllm:num_requests_running` becomes
`ray_vllm_num_requests_running`, the name that Ray's board for LLMs asks for. Counters and
histograms go as gauges of their running totals, bucket by bucket: `rate()` and
`histogram_quantile()` work on them, and no observation has to be made twice.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client import Metric
from ray.util.metrics import Gauge


class SettableGauge(Protocol):
    """The part of Ray's gauge that is used here."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...


MakeGauge = Callable[[str, str, tuple[str, ...]], SettableGauge]
Series = tuple[str, tuple[tuple[str, str], ...]]  # name and labels


def ray_gauge(name: str, description: str, labels: tuple[str, ...]) -> SettableGauge:
    """Makes a gauge of Ray's."""
    gauge: SettableGauge = Gauge(name, description=description, tag_keys=labels)
    return gauge


class RayMetrics:
    """One gauge per sample name, made when it is first seen."""

    def __init__(self, make_gauge: MakeGauge) -> None:
        self._make_gauge = make_gauge
        self._gauges: dict[str, SettableGauge] = {}
        self._shown: dict[Series, dict[str, str]] = {}

    def publish(self, families: Iterable[Metric]) -> None:
        """Sets every series; one that is gone becomes 0, because Ray keeps the last value."""
        gone = self._shown
        self._shown = {}
        for family in families:
            for sample in family.samples:
                name, labels = sample.name.replace(":", "_"), dict(sample.labels)
                series = name, tuple(sorted(labels.items()))
                if name not in self._gauges:
                    self._gauges[name] = self._make_gauge(
                        name, family.documentation, tuple(sorted(labels))
                    )
                self._gauges[name].set(sample.value, labels)
                self._shown[series] = labels
                gone.pop(series, None)
        for (name, _), labels in gone.items():
            self._gauges[name].set(0.0, labels)

"""Adds up the metrics that the replicas of the ingress count, each by itself."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from engine.messages import MetricFamily, MetricSample, ReplicaMetrics


def as_messages(families: Iterable[Metric]) -> list[MetricFamily]:
    """Returns metrics as they go to other processes."""
    return [
        MetricFamily(
            name=family.name,
            type=family.type,
            text=family.documentation,
            samples=[MetricSample(s.name, dict(s.labels), s.value) for s in family.samples],
        )
        for family in families
    ]


def add_up(mine: Iterable[Metric], others: Iterable[ReplicaMetrics]) -> list[Metric]:
    """Returns one replica's metrics with the others' added, series by series.

    Counts of a replica that is gone are added, too; its gauges are not: what it held is free.
    """
    sums = {family.name: _Sum(family) for family in mine}
    for other in others:
        for family in other.families:
            if not other.is_live and family.type == "gauge":
                continue
            if family.name not in sums:  # the other replica runs a later version
                sums[family.name] = _Sum(Metric(family.name, family.text, family.type))
            sums[family.name].add(family.samples)
    return [total.family() for total in sums.values()]


def prometheus_text(families: Iterable[Metric]) -> bytes:
    """Returns metrics in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    """Metrics that are known already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


class _Sum:
    """The series of one metric, in order of first appearance, each a sum over the replicas."""

    def __init__(self, family: Metric) -> None:
        self._family = family
        self._samples: dict[tuple[str, tuple[tuple[str, str], ...]], MetricSample] = {}
        self.add(MetricSample(s.name, dict(s.labels), s.value) for s in family.samples)

    def add(self, samples: Iterable[MetricSample]) -> None:
        for sample in samples:
            series = sample.name, tuple(sorted(sample.labels.items()))
            before = self._samples.get(series)
            value = sample.value + (0.0 if before is None else before.value)
            self._samples[series] = MetricSample(sample.name, sample.labels, value)

    def family(self) -> Metric:
        total = Metric(self._family.name, self._family.documentation, self._family.type)
        total.samples = [Sample(s.name, s.labels, s.value) for s in self._samples.values()]
        return total

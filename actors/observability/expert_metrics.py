"""How evenly the tokens of each worker fall on the experts of its model, layer by layer.

Without series unless `execution.expert_load_steps` is set: a layer has one for each expert.
"""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.messages import ExpertTotals


class ExpertMetrics(Collector):
    """Counters that restart with their worker, and gauges of late."""

    def __init__(self, label: Mapping[str, str]) -> None:
        self._label = dict(label)
        self._totals: dict[tuple[str, str], ExpertTotals] = {}

    def clear(self) -> None:
        self._totals.clear()

    def show(self, worker: str, role: str, totals: ExpertTotals) -> None:
        self._totals[worker, role] = totals

    def collect(self) -> Iterator[Metric]:
        names = [*self._label, "worker", "role", "layer"]
        tokens = CounterMetricFamily(
            "laps_expert_tokens", "Tokens that the expert got.", labels=[*names, "expert"]
        )
        of_experts = GaugeMetricFamily(
            "laps_expert_imbalance",
            "Tokens of the layer's fullest expert over the mean, of late; 0 without tokens.",
            labels=names,
        )
        of_ranks = GaugeMetricFamily(
            "laps_expert_rank_imbalance",
            "Tokens of the fullest rank's experts over the mean of the ranks, of late.",
            labels=names,
        )
        for (worker, role), totals in self._totals.items():
            labels = [*self._label.values(), worker, role]
            for layer, counts in zip(totals.layers, totals.counts, strict=True):
                for expert, count in enumerate(counts):
                    tokens.add_metric([*labels, str(layer), str(expert)], count)
            _add(of_experts, labels, totals.layers, totals.expert_imbalance)
            if totals.rank_imbalance:
                _add(of_ranks, labels, totals.layers, totals.rank_imbalance)
        yield from (tokens, of_experts, of_ranks)


def _add(
    family: GaugeMetricFamily, labels: list[str], layers: Sequence[int], values: Sequence[float]
) -> None:
    for layer, value in zip(layers, values, strict=True):
        family.add_metric([*labels, str(layer)], value)

"""Metrics of the drafts of each worker that has a drafter, as of its last report.

The counters' names mean what they mean in vLLM; position 0 is a request's first draft of a step.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.messages import SpeculationLoad


class DraftMetrics(Collector):
    """Counters that restart with their worker, and gauges of late."""

    def __init__(self, label: Mapping[str, str]) -> None:
        self._label = dict(label)
        self._loads: dict[tuple[str, str], SpeculationLoad] = {}

    def clear(self) -> None:
        self._loads.clear()

    def show(self, worker: str, role: str, load: SpeculationLoad) -> None:
        self._loads[worker, role] = load

    def collect(self) -> Iterator[Metric]:
        names = [*self._label, "worker", "role"]
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by their position in a guess.",
            labels=[*names, "position"],
        )
        is_on = GaugeMetricFamily(
            "laps_speculation_on", "0 while guesses are stopped for what they lost.", labels=names
        )
        gain = GaugeMetricFamily(
            "laps_speculation_gain",
            "Tokens a second over those of steps without guesses, in the last steps with any.",
            labels=[*names, "kind"],
        )
        for (worker, role), load in self._loads.items():
            labels = [*self._label.values(), worker, role]
            for position, num in enumerate(load.accepted_at):
                accepted.add_metric([*labels, str(position)], num)
            is_on.add_metric(labels, int(load.is_on))
            kinds = {"predicted": load.predicted_gain, "measured": load.measured_gain}
            for kind, value in kinds.items():
                if value is not None:
                    gain.add_metric([*labels, kind], value)
        yield from (accepted, is_on, gain)

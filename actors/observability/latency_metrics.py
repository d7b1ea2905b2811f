"""Histograms of how long requests, their stages and the gaps between tokens took."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from actors.observability.request_times import Stage

LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
)  # fmt: skip

TOKEN_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
NUM_CHOICES_BUCKETS = (1, 2, 5, 10, 20)
NUM_TOKENS_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
)  # fmt: skip

INTER_TOKEN = "vllm:inter_token_latency_seconds"
INTER_TOKEN_BEFORE = "vllm:time_per_output_token_seconds"  # its name in older dashboards

# Stage of a request (actors/observability/request_times.py) -> its histogram.
STAGE_METRICS = {
    "queue": ("vllm:request_queue_time_seconds", "At the worker, before its first step."),
    "prefill": ("vllm:request_prefill_time_seconds", "From there to the first token."),
    "handoff": ("laps_handoff_seconds", "From there until its KV is at the decode worker."),
}


class TokenGaps(Collector):
    """The histogram of times between tokens, under both of its names.

    It is observed for every token, so it is two additions, where the library's takes a lock.
    """

    def __init__(self, label: Mapping[str, str]) -> None:
        self._label = label
        self._counts = [0] * (len(TOKEN_BUCKETS_S) + 1)  # the last: above all bounds
        self._sum_s = 0.0

    def observe(self, seconds: float, num: int) -> None:
        """Counts `num` gaps of so many seconds each."""
        self._counts[bisect_left(TOKEN_BUCKETS_S, seconds)] += num
        self._sum_s += num * seconds

    def collect(self) -> Iterator[Metric]:
        bounds = [*TOKEN_BUCKETS_S, math.inf]
        buckets = [
            (floatToGoString(bound), float(count))  # type: ignore[no-untyped-call]
            for bound, count in zip(bounds, accumulate(self._counts), strict=True)
        ]
        for name in (INTER_TOKEN, INTER_TOKEN_BEFORE):
            text = "From one token of a choice to the next."
            family = HistogramMetricFamily(name, text, labels=list(self._label))
            family.add_metric(list(self._label.values()), buckets, self._sum_s)
            yield family


class LatencyMetrics:
    """Histograms of durations of every choice, and of stages of each request's first choice."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        label = {"model_name": model_name}

        def family(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, list(label), registry=registry, buckets=buckets)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return family(name, text, buckets).labels(**label)

        self._gaps = TokenGaps(label)
        registry.register(self._gaps)
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to the first token.", LATENCY_BUCKETS_S
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to the last token.", LATENCY_BUCKETS_S
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "The mean of these over a whole choice.",
            TOKEN_BUCKETS_S,
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds",
            "First to last token of a choice.",
            LATENCY_BUCKETS_S,
        )
        self._num_prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a choice.", NUM_TOKENS_BUCKETS
        )
        self._num_output_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens generated of a choice.", NUM_TOKENS_BUCKETS
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds",
            "From a request's first step to its last token.",
            LATENCY_BUCKETS_S,
        )
        self._num_choices = histogram(
            "vllm:request_params_n", "Choices that a request asked for.", NUM_CHOICES_BUCKETS
        )
        self._max_tokens = histogram(
            "vllm:request_params_max_tokens",
            "Tokens that a choice may have, at most.",
            NUM_TOKENS_BUCKETS,
        )
        self._stages = {
            stage: histogram(name, text, LATENCY_BUCKETS_S)
            for stage, (name, text) in STAGE_METRICS.items()
        }

    def observe_ttft(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def observe_e2e(self, seconds: float) -> None:
        self._e2e.observe(seconds)

    def observe_gaps(self, seconds: float, num_tokens: int) -> None:
        """Observes tokens of one choice that came together, `seconds` after the one before them.

        Each counts with an equal share of that time, so that the mean is that of single tokens.
        """
        self._gaps.observe(seconds / num_tokens, num_tokens)

    def observe_choice(
        self, num_prompt_tokens: int, num_output_tokens: int, decode_s: float
    ) -> None:
        """Observes a choice that ended without error, `decode_s` after its first token."""
        self._num_prompt_tokens.observe(num_prompt_tokens)
        self._num_output_tokens.observe(num_output_tokens)
        self._decode.observe(decode_s)
        if num_output_tokens > 1:
            self._per_token.observe(decode_s / (num_output_tokens - 1))

    def observe_params(self, n: int, max_tokens: int) -> None:
        """Observes what a request asked for, of each of its prompts."""
        self._num_choices.observe(n)
        self._max_tokens.observe(max_tokens)

    def observe_stages(self, stages: Sequence[Stage]) -> None:
        """Observes the stages of a request that ended without error."""
        if begun := [stage for stage in stages if stage.name == "prefill"]:
            self._inference.observe(stages[-1].end_s - begun[0].start_s)
        for stage in stages:
            found = self._stages.get(stage.name)
            if found is not None:
                found.observe(stage.end_s - stage.start_s)

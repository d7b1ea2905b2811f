"""The metrics of one ingress replica.

Names with `vllm:` mean what they mean in vLLM; others are this project's. A replica reports its own
requests, and the reports of every worker that it is connected to: load as gauges, totals as
counters.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from actors.observability.draft_metrics import DraftMetrics
from actors.observability.expert_metrics import ExpertMetrics
from actors.observability.recent_ttft import RecentTtft
from actors.observability.request_times import Stage
from actors.routing.worker_links import WorkerLink
from configs.schema import CacheConfig
from engine.length_class import LengthClass
from engine.messages import (
    STEP_TOKEN_BUCKETS,
    Assign,
    DiskTierLoad,
    HandoffTotals,
    HostTierLoad,
    LapsStatus,
    LoadReport,
    PoolMove,
)
from engine.routing.pools import CLASSES

# Counters that a worker keeps, by the name of their metric.
TOTALS: Mapping[str, str] = {
    "vllm:num_preemptions": "Requests that lost their blocks and were computed again.",
    "laps_preemptions_for_others": "Of these: for a request that waited for a row or for blocks.",
    "vllm:spec_decode_num_drafts": "Guesses of several tokens that steps verified, one a request.",
    "vllm:spec_decode_num_draft_tokens": "Guessed tokens that steps verified.",
    "vllm:spec_decode_num_accepted_tokens": "Of these: that were right.",
    "laps_handoffs": "Prompts whose KV a decode worker has taken over.",
    "laps_handoff_bytes": "Bytes of KV sent to decode workers.",
    "laps_handoff_failures": "Handoffs that were tried again, over another channel or as a whole.",
    "laps_host_tier_asked_blocks": "KV blocks of prompts that the device lacked.",
    "laps_host_tier_hit_blocks": "Of these, found in the host tier.",
    "laps_host_tier_loaded_blocks": "KV blocks loaded from the host tier.",
    "laps_host_tier_loaded_bytes": "Their bytes.",
    "laps_host_tier_wasted_blocks": "Of these, loaded when no request waited for them any more.",
    "laps_host_tier_corrupt_blocks": "KV blocks that were not what was stored, and were dropped.",
    "laps_host_tier_gone_blocks": "KV blocks that left the host tier while they were loaded.",
    "laps_host_tier_stored_blocks": "KV blocks that the device evicted and the host tier took.",
    "laps_host_tier_stored_bytes": "Their bytes.",
    "laps_host_tier_known_blocks": "KV blocks that the device evicted and the host tier had.",
    "laps_host_tier_dropped_blocks": "KV blocks that the device evicted and found no room.",
    "laps_host_tier_skipped_blocks": "KV blocks not stored, because nothing stored was ever found.",
    "laps_disk_tier_written_blocks": "KV blocks of the host tier written to files.",
    "laps_disk_tier_written_bytes": "Their bytes.",
    "laps_disk_tier_dropped_blocks": "KV blocks not written: they came too fast, or had gone.",
    "laps_disk_tier_loaded_blocks": "KV blocks loaded from files.",
    "laps_disk_tier_loaded_bytes": "Their bytes.",
    "laps_disk_tier_evicted_blocks": "KV blocks in files removed to make room.",
    "laps_disk_tier_void_files": "Files that were torn or of another form, and were removed.",
    "laps_host_tier_waits": "Requests that waited for the host tier.",
    "laps_host_tier_given_up": "Of these, those that computed what did not come in time.",
    "laps_host_tier_wait_seconds": "Seconds that they waited.",
}


class WorkerTotals(Collector):
    """Counters that restart with their worker; Prometheus handles the smaller values."""

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


class StepSizes(Collector):
    """How many tokens the steps of each worker had, by the buckets that workers count in."""

    NAME = "vllm:iteration_tokens_total"

    def __init__(self, label: Mapping[str, str]) -> None:
        self._label = label
        self._loads: dict[tuple[str, str], LoadReport] = {}

    def clear(self) -> None:
        self._loads.clear()

    def show(self, worker: str, role: str, load: LoadReport) -> None:
        self._loads[worker, role] = load

    def collect(self) -> Iterator[Metric]:
        labels = [*self._label, "worker", "role"]
        family = HistogramMetricFamily(self.NAME, "Tokens of a step.", labels=labels)
        for (worker, role), load in self._loads.items():
            if not load.step_counts:
                continue
            bounds = [*map(float, STEP_TOKEN_BUCKETS), math.inf]
            counts = accumulate(load.step_counts)
            buckets = [
                (floatToGoString(bound), float(count))  # type: ignore[no-untyped-call]
                for bound, count in zip(bounds, counts, strict=True)
            ]
            family.add_metric([*self._label.values(), worker, role], buckets, load.num_step_tokens)
        yield family


class WorkerMetrics:
    """Gauges of every connected worker, as of its last report."""

    def __init__(self, registry: CollectorRegistry, model_name: str, cache: CacheConfig) -> None:
        self._label = {"model_name": model_name}
        self.totals = WorkerTotals(self._label)
        self._step_sizes = StepSizes(self._label)
        registry.register(self.totals)
        registry.register(self._step_sizes)
        self._experts = ExpertMetrics(self._label)
        registry.register(self._experts)
        self._drafts = DraftMetrics(self._label)
        registry.register(self._drafts)
        self._cache_labels = {
            "block_size": str(cache.block_size),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
        }

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, [*self._label, "worker", "role"], registry=registry)

        self._up = gauge("laps_worker_up", "1 while the worker's stream is read.")
        self._running = gauge("vllm:num_requests_running", "Requests in the worker's batch.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests queued at the worker.")
        names = [*self._label, "worker", "role"]
        self._waiting_by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Requests queued at the worker; all wait for its capacity.",
            [*names, "reason"],
            registry=registry,
        )
        self._cache = Gauge(
            "vllm:cache_config_info",
            "Always 1: its labels are the configuration of the worker's KV cache.",
            [*names, *self._cache_labels, "num_gpu_blocks"],
            registry=registry,
        )
        self._queued = gauge("laps_queued_tokens", "Tokens the worker has yet to compute.")
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.")
        self._host_usage = gauge(
            "laps_host_tier_usage", "Share of the machine's host tier that holds blocks, 0 to 1."
        )

    def show(self, links: Iterable[WorkerLink]) -> None:
        """Sets the gauges; drops those of workers that are away."""
        gauges = (self._up, self._running, self._waiting, self._queued, self._kv_usage)
        for gauge in (*gauges, self._waiting_by_reason, self._cache, self._host_usage):
            gauge.clear()
        self.totals.clear()
        self._step_sizes.clear()
        self._experts.clear()
        self._drafts.clear()
        for link in links:
            labels = self._label | {"worker": link.name, "role": link.role}
            load = link.load
            self._up.labels(**labels).set(int(link.is_up))
            if link.experts is not None:
                self._experts.show(link.name, link.role, link.experts)
            if load is not None:
                self._running.labels(**labels).set(load.num_running)
                self._waiting.labels(**labels).set(load.num_waiting)
                self._waiting_by_reason.labels(**labels, reason="capacity").set(load.num_waiting)
                blocks = {"num_gpu_blocks": str(load.num_blocks)}
                self._cache.labels(**labels, **self._cache_labels, **blocks).set(1)
                self._step_sizes.show(link.name, link.role, load)
                self._queued.labels(**labels).set(load.queued_tokens)
                held = load.num_blocks - load.num_free_blocks
                self._kv_usage.labels(**labels).set(held / max(load.num_blocks, 1))
                self.totals.show(link.name, link.role, _totals(load, link.handoffs))
                if load.speculation is not None:
                    self._drafts.show(link.name, link.role, load.speculation)
                if (tier := load.host_tier) is not None:
                    self._host_usage.labels(**labels).set(tier.num_ready / tier.num_blocks)


def _totals(load: LoadReport, handoffs: HandoffTotals | None) -> Mapping[str, float]:
    totals: dict[str, float] = {
        "vllm:num_preemptions": load.num_preemptions,
        "laps_preemptions_for_others": load.num_preemptions_for_others,
    }
    if (drafts := load.speculation) is not None:
        totals["vllm:spec_decode_num_drafts"] = drafts.num_rows
        totals["vllm:spec_decode_num_draft_tokens"] = drafts.num_drafts
        totals["vllm:spec_decode_num_accepted_tokens"] = drafts.num_accepted
    if load.host_tier is not None:
        totals |= _host_tier_totals(load.host_tier)
        if (disk := load.host_tier.disk) is not None:
            totals |= _disk_tier_totals(disk, load.host_tier.block_bytes)
    if handoffs is not None:
        totals["laps_handoffs"] = handoffs.num_done
        totals["laps_handoff_bytes"] = handoffs.num_bytes
        totals["laps_handoff_failures"] = handoffs.num_failures
    return totals


def _disk_tier_totals(disk: DiskTierLoad, block_bytes: int) -> Mapping[str, float]:
    return {
        "laps_disk_tier_written_blocks": disk.num_written,
        "laps_disk_tier_written_bytes": disk.num_written * block_bytes,
        "laps_disk_tier_dropped_blocks": disk.num_dropped,
        "laps_disk_tier_loaded_blocks": disk.num_loaded,
        "laps_disk_tier_loaded_bytes": disk.num_loaded * block_bytes,
        "laps_disk_tier_evicted_blocks": disk.num_evicted,
        "laps_disk_tier_void_files": disk.num_void_files,
    }


def _host_tier_totals(tier: HostTierLoad) -> Mapping[str, float]:
    return {
        "laps_host_tier_asked_blocks": tier.num_asked,
        "laps_host_tier_hit_blocks": tier.num_hit,
        "laps_host_tier_loaded_blocks": tier.num_loaded,
        "laps_host_tier_loaded_bytes": tier.num_loaded * tier.block_bytes,
        "laps_host_tier_wasted_blocks": tier.num_wasted,
        "laps_host_tier_corrupt_blocks": tier.num_corrupt,
        "laps_host_tier_gone_blocks": tier.num_gone,
        "laps_host_tier_stored_blocks": tier.num_stored,
        "laps_host_tier_stored_bytes": tier.num_stored * tier.block_bytes,
        "laps_host_tier_known_blocks": tier.num_known,
        "laps_host_tier_dropped_blocks": tier.num_dropped,
        "laps_host_tier_skipped_blocks": tier.num_skipped,
        "laps_host_tier_waits": tier.num_waits,
        "laps_host_tier_given_up": tier.num_given_up,
        "laps_host_tier_wait_seconds": tier.wait_s,
    }


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

"""Metrics of the workers that an ingress replica is connected to, as of their last reports.

Load becomes gauges, totals become counters that restart with their worker.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from actors.observability.draft_metrics import DraftMetrics
from actors.observability.expert_metrics import ExpertMetrics
from actors.routing.worker_links import WorkerLink
from configs.schema import CacheConfig
from engine.messages import (
    STEP_TOKEN_BUCKETS,
    DiskTierLoad,
    HandoffTotals,
    HostTierLoad,
    LoadReport,
    OverlapLoad,
)

# Counters that a worker keeps, by the name of their metric.
TOTALS: Mapping[str, str] = {
    "vllm:num_preemptions": "Requests that lost their blocks and were computed again.",
    "laps_preemptions_for_others": "Of these: for a request that waited for a row or for blocks.",
    "vllm:spec_decode_num_drafts": "Guesses of several tokens that steps verified, one a request.",
    "vllm:spec_decode_num_draft_tokens": "Guessed tokens that steps verified.",
    "vllm:spec_decode_num_accepted_tokens": "Of these: that were right.",
    "laps_uncaptured_steps": "Steps that replayed no graph, of a worker that may split steps.",
    "laps_split_prompt_steps": "Of these: steps with prompts, computed as two batches.",
    "laps_split_decode_steps": "Of these: steps without prompts, computed as two batches.",
    "laps_cut_prompt_steps": "Steps computed as two batches that meet inside a prompt.",
    "laps_split_graph_steps": "Steps that replayed a graph of two batches.",
    "laps_handoffs": "Prompts whose KV a decode worker has taken over.",
    "laps_handoff_bytes": "Bytes of KV sent to decode workers.",
    "laps_handoff_found_blocks": "KV blocks that were not sent: the decode worker had them.",
    "laps_handoff_failures": "Handoffs that were tried again, over another channel or as a whole.",
    "laps_host_tier_asked_blocks": "KV blocks of prompts that the device lacked.",
    "laps_host_tier_hit_blocks": "Of these, found in the host tier or below it.",
    "laps_host_tier_unworthy_blocks": "KV blocks found at a look, and sooner computed than loaded.",
    "laps_host_tier_loaded_blocks": "KV blocks loaded from the host tier.",
    "laps_host_tier_loaded_bytes": "Their bytes.",
    "laps_host_tier_wasted_blocks": "Of these, loaded when no request waited for them any more.",
    "laps_host_tier_corrupt_blocks": "KV blocks that were not what was stored, and were dropped.",
    "laps_host_tier_gone_blocks": "KV blocks that left the host tier while they were loaded.",
    "laps_host_tier_stored_blocks": "KV blocks that left a device and the host tier took.",
    "laps_host_tier_stored_bytes": "Their bytes.",
    "laps_host_tier_known_blocks": "KV blocks that left a device and the host tier had.",
    "laps_host_tier_dropped_blocks": "KV blocks that left a device and found no room.",
    "laps_host_tier_skipped_blocks": "KV blocks not stored, because nothing stored was ever found.",
    "laps_disk_tier_asked_blocks": "KV blocks of prompts that device and host tier lacked.",
    "laps_disk_tier_hit_blocks": "Of these, found in files.",
    "laps_disk_tier_read_seconds": "Seconds that reading files took.",
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
    if load.two_batches is not None:
        totals |= _overlap_totals(load.two_batches)
    if handoffs is not None:
        totals["laps_handoffs"] = handoffs.num_done
        totals["laps_handoff_bytes"] = handoffs.num_bytes
        totals["laps_handoff_found_blocks"] = handoffs.num_found_blocks
        totals["laps_handoff_failures"] = handoffs.num_failures
    return totals


def _overlap_totals(overlap: OverlapLoad) -> Mapping[str, float]:
    return {
        "laps_uncaptured_steps": overlap.num_steps,
        "laps_split_prompt_steps": overlap.num_split_prompts,
        "laps_split_decode_steps": overlap.num_split_decodes,
        "laps_cut_prompt_steps": overlap.num_two_chunk,
        "laps_split_graph_steps": overlap.num_replayed,
    }


def _disk_tier_totals(disk: DiskTierLoad, block_bytes: int) -> Mapping[str, float]:
    return {
        "laps_disk_tier_asked_blocks": disk.num_asked,
        "laps_disk_tier_hit_blocks": disk.num_hit,
        "laps_disk_tier_read_seconds": disk.read_s,
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
        "laps_host_tier_unworthy_blocks": tier.num_unworthy,
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

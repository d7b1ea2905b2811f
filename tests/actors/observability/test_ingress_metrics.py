"""Metrics under the names that dashboards know, the same through Ray, and the board on top."""

import asyncio
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from actors.ingress.observation import Observation
from actors.observability.latency_metrics import INTER_TOKEN, INTER_TOKEN_BEFORE
from actors.observability.merged_metrics import prometheus_text
from actors.observability.metrics import IngressMetrics
from actors.observability.ray_metrics import RayMetrics
from actors.observability.recent_ttft import RecentTtft
from actors.observability.request_times import Stage
from actors.observability.worker_metrics import TOTALS
from actors.routing.worker_links import WorkerLink
from actors.rpc.handles import WorkerHandle
from configs.load import PROJECT_ROOT
from engine.clock import ManualClock
from tests.actors.ingress.edge_app import IDLE, EdgeApp, busy, edge_app, no_allocator

GRAFANA = PROJECT_ROOT / "configs" / "grafana"
# What boards made for vLLM ask for.
VLLM = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "time_per_output_token_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_prompt_tokens_sum",
    "request_generation_tokens_bucket",
    "request_success_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
)
SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "gauge": ("",),
}
FUNCTIONS = {"histogram_quantile", "rate"}
AGGREGATIONS = {"sum", "max"}


@pytest.fixture(scope="module")
def served() -> EdgeApp:
    """An ingress that has answered, failed and counted."""
    app = edge_app()
    assert app.post({"max_tokens": 5, "n": 3}).status_code == 200
    assert app.post({"max_tokens": 1, "stream": True}).status_code == 200
    assert app.post({"max_tokens": -1}).status_code == 400
    app.workers.load = busy(40)
    return app


def metrics(app: EdgeApp) -> list[Metric]:
    answer = app.ask(lambda client: client.get("/metrics"))
    assert answer.status_code == 200
    return list(text_string_to_metric_families(answer.text))


def value(families: list[Metric], name: str, **labels: str) -> float:
    """Of the one sample of this name that has these labels."""
    (found,) = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


def names(families: list[Metric]) -> set[str]:
    """Every sample name that the families may have."""
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def test_names_that_dashboards_know_are_exported(served: EdgeApp) -> None:
    families = metrics(served)
    assert {f"vllm:{name}" for name in VLLM} <= names(families)
    for family in families:
        assert all(s.labels["model_name"] == "tiny" for s in family.samples), family.name


def test_what_was_served_is_counted(served: EdgeApp) -> None:
    families = metrics(served)
    assert value(families, "vllm:generation_tokens_total") == 16
    assert value(families, "vllm:request_success_total", finished_reason="length") == 4
    assert value(families, "vllm:time_to_first_token_seconds_count") == 4
    assert value(families, "vllm:inter_token_latency_seconds_count") == 12
    assert value(families, "vllm:request_time_per_output_token_seconds_count") == 3
    assert value(families, "vllm:request_generation_tokens_sum") == 16
    assert value(families, "vllm:e2e_request_latency_seconds_count") == 2
    assert value(families, "vllm:request_prefill_time_seconds_count") == 2
    assert value(families, "laps_requests_failed_total", status="400") == 1
    assert value(families, "laps_queued_tokens", worker="unified-0") == 40
    prompts = value(families, "vllm:prompt_tokens_total")
    assert value(families, "vllm:prefix_cache_queries_total") == 2 * prompts  # 3 + 1 choices of 2


def test_drafts_are_told_apart_by_who_drafts() -> None:
    found = IngressMetrics("m", RecentTtft(ManualClock()), drafter="eagle3")
    families = list(text_string_to_metric_families(prometheus_text(found.families()).decode()))
    assert value(families, "laps_speculation_info", drafter="eagle3") == 1


def ingress_metrics() -> IngressMetrics:
    return IngressMetrics("m", RecentTtft(ManualClock()))


def test_the_older_name_of_a_histogram_has_the_same_series() -> None:
    found = ingress_metrics()
    for _ in range(50):
        found.latencies.observe_gaps(random.expovariate(20), 1)
    families = list(text_string_to_metric_families(prometheus_text(found.families()).decode()))
    first, second = (
        [
            (s.name.removeprefix(name), s.labels, s.value)
            for f in families
            if f.name == name
            for s in f.samples
        ]
        for name in (INTER_TOKEN, INTER_TOKEN_BEFORE)
    )
    assert len(first) > 10
    assert first == second


def test_tokens_that_came_together_share_the_time_before_them() -> None:
    found = ingress_metrics()
    found.latencies.observe_gaps(0.06, 3)
    found.latencies.observe_gaps(5.0, 1)
    families = list(text_string_to_metric_families(prometheus_text(found.families()).decode()))
    assert value(families, f"{INTER_TOKEN}_count") == 4
    assert value(families, f"{INTER_TOKEN}_sum") == pytest.approx(5.06)
    assert value(families, f"{INTER_TOKEN}_bucket", le="0.015") == 0
    assert value(families, f"{INTER_TOKEN}_bucket", le="0.02") == 3  # a bound is inclusive
    assert value(families, f"{INTER_TOKEN}_bucket", le="+Inf") == 4


def test_stages_go_to_their_histograms() -> None:
    found = ingress_metrics()
    found.latencies.observe_stages([Stage("tokenize", 0, 1), Stage("queue", 1, 3.5)])
    families = list(text_string_to_metric_families(prometheus_text(found.families()).decode()))
    assert value(families, "vllm:request_queue_time_seconds_sum") == 2.5
    assert value(families, "vllm:request_prefill_time_seconds_count") == 0


def test_totals_of_a_worker_are_its_own_and_leave_with_it() -> None:
    found = ingress_metrics()
    found.refresh([WorkerLink(name="w", role="prefill", load=IDLE)], 0, 0, None)
    totals = {name: float(random.randrange(10**9)) for name in TOTALS}
    found.workers.totals.show("w", "prefill", totals)
    families = list(text_string_to_metric_families(prometheus_text(found.families()).decode()))
    for name, total in totals.items():
        assert value(families, f"{name}_total", worker="w", role="prefill") == total
    found.refresh([], 0, 0, None)
    assert b'worker="w"' not in prometheus_text(found.families())
    with pytest.raises(AssertionError, match="laps_typo"):
        found.workers.totals.show("w", "prefill", {"laps_typo": 1.0})


# ---- through Ray ---------------------------------------------------------------------------------


class _RayGauges:
    """Remembers what Ray would show."""

    def __init__(self) -> None:
        self.shown: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def __call__(self, name: str, description: str, labels: tuple[str, ...]) -> Any:
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name), f"Ray would refuse {name}"
        assert description
        gauges = self

        class Gauge:
            def set(self, value: float, tags: dict[str, str]) -> None:
                assert sorted(tags) == sorted(labels), f"{name}: {tags}, declared {labels}"
                gauges.shown[name, tuple(sorted(tags.items()))] = value

        return Gauge()


def test_ray_shows_what_the_page_shows(served: EdgeApp) -> None:
    gauges = _RayGauges()
    families = metrics(served)
    RayMetrics(gauges).publish(families)
    expected = {
        (s.name.replace(":", "_"), tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }
    assert len(expected) > 100
    assert gauges.shown == expected


def test_what_is_gone_becomes_zero_for_ray_once() -> None:
    found, gauges = ingress_metrics(), _RayGauges()
    ray = RayMetrics(gauges)
    labels = (("model_name", "m"), ("role", "unified"), ("worker", "w"))
    found.refresh([WorkerLink(name="w", role="unified", load=busy(9))], 0, 0, None)
    ray.publish(found.families())
    assert gauges.shown["laps_queued_tokens", labels] == 9
    found.refresh([], 0, 0, None)
    ray.publish(found.families())
    assert gauges.shown["laps_queued_tokens", labels] == 0
    gauges.shown.clear()
    ray.publish(found.families())
    assert ("laps_queued_tokens", labels) not in gauges.shown


def test_ray_is_shown_the_metrics_again_and_again_whatever_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = edge_app()
    shown: list[int] = []

    async def main() -> None:
        done = asyncio.Event()

        class Ray(RayMetrics):
            def publish(self, families: Iterable[Metric]) -> None:
                shown.append(len(list(families)))
                if len(shown) in (2, 3):
                    raise OSError("Ray is away")
                if len(shown) == 5:
                    done.set()

        observation = Observation(app.edge.metrics, app.edge.generations, no_allocator, 1e-4)
        task = asyncio.create_task(observation.publish_to(Ray(_RayGauges())))
        await asyncio.wait_for(done.wait(), 30)
        task.cancel()

    asyncio.run(main())
    assert min(shown) > 20
    assert caplog.text.count("OSError: Ray is away") == 1


# ---- the board -----------------------------------------------------------------------------------


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def metric_names(expression: str) -> set[str]:
    """The metrics a PromQL expression reads; AssertionError for what this does not understand."""
    bare = re.sub(r'\{(\s*\w+\s*=~?\s*"[^"]*"\s*,?)*\}', "", expression)
    bare = re.sub(r"\[(\$__rate_interval|\d+[smh])\]", "", bare)
    bare = re.sub(r"\bby\s*\([\w\s,]*\)", "", bare)
    assert bare.count("(") == bare.count(")"), f"unbalanced: {expression}"
    words = re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*|[()+*/,-]|[0-9.]+|\S", bare)
    found = set()
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word[0].isalpha():
            if after == "(":
                assert word in FUNCTIONS | AGGREGATIONS, f"{word} in {expression}"
            else:
                found.add(word)
        else:
            assert re.fullmatch(r"[()+*/,-]|[0-9.]+", word), f"{word} in {expression}"
    assert found, f"{expression} reads nothing"
    return found


def test_every_expression_of_the_board_reads_exported_metrics(served: EdgeApp) -> None:
    board = json.loads((GRAFANA / "laps.json").read_text())
    exported = names(metrics(served))
    read = [metric_names(expression) for expression in expressions(board)]
    assert len(read) > 30
    assert set().union(*read) - exported == set()
    query = board["templating"]["list"][1]["query"]["query"]
    assert re.match(r"label_values\((\w+),", query)[1] in exported  # type: ignore[index]


def test_an_expression_that_reads_something_else_is_found() -> None:
    assert metric_names('rate(a:b_total{x="1"}[5m]) / sum by (le) (c_d)') == {"a:b_total", "c_d"}
    for bad in ("rate(a[5m]", "avg(a)", "a ? b", "1 + 1"):
        with pytest.raises(AssertionError):
            metric_names(bad)


def test_panels_have_titles_units_and_their_own_place() -> None:
    board = json.loads((GRAFANA / "laps.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not taken & cells, f"{panel['title']} lies over another panel"
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", ["datasource.yml", "dashboards.yml", "prometheus.yml"])
def test_provisioning_files_are_yaml_of_the_right_kind(name: str) -> None:
    data = yaml.safe_load(Path(GRAFANA / name).read_text())
    kind = {"datasource.yml": "datasources", "dashboards.yml": "providers"}
    assert data[kind.get(name, "scrape_configs")]


def test_boards_find_the_names_that_vllm_has() -> None:
    metrics = ingress_metrics()
    counts = (0, 3, *([0] * 11), 1)
    load = msgspec.structs.replace(IDLE, step_counts=counts, num_step_tokens=20_015, num_waiting=2)
    handle = cast("WorkerHandle", object())
    links = [WorkerLink(name="unified-0", role="unified", handle=handle, load=load)]
    metrics.latencies.observe_params(2, 64)
    stages = [Stage("queue", 1.0, 2.0), Stage("prefill", 2.0, 2.5), Stage("stream", 2.5, 4.0)]
    metrics.latencies.observe_stages(stages)
    metrics.refresh(links, 0, 0, None)
    lines = prometheus_text(metrics.families()).decode().splitlines()

    def value(name: str, *labels: str) -> float:
        (found,) = [x for x in lines if x.startswith(name + "{") and all(y in x for y in labels)]
        return float(found.rpartition(" ")[2])

    assert value("vllm:iteration_tokens_total_bucket", 'le="8.0"') == 3
    assert value("vllm:iteration_tokens_total_bucket", 'le="+Inf"') == 4
    assert value("vllm:iteration_tokens_total_count") == 4
    assert value("vllm:iteration_tokens_total_sum") == 20_015
    assert value("vllm:num_requests_waiting_by_reason", 'reason="capacity"') == 2
    assert value("vllm:cache_config_info", 'block_size="16"', "num_gpu_blocks=") == 1
    assert value("vllm:request_params_n_sum") == 2
    assert value("vllm:request_params_max_tokens_sum") == 64
    assert value("vllm:request_inference_time_seconds_sum") == 2.0

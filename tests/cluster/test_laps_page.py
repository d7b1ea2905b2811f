"""The page of a whole application in a real browser, its JSON, and the metrics per class."""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from load_tests.testbed.deployed import PATIENCE_S, Application, wait_until
from tests.actors.ingress.browser import run_browser

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def _classes(application: Application, name: str) -> dict[str, float]:
    """Value of a metric by class."""
    _, text = application.get("/metrics")
    found = re.findall(rf'^{name}{{.*?length_class="(\w+)".*?}} (\S+)$', text, re.MULTILINE)
    return {length_class: float(value) for length_class, value in found}


def test_the_page_is_served_and_asks_nobody_else(disaggregated: Application) -> None:
    response = httpx.get(f"{disaggregated.url}/laps", timeout=PATIENCE_S)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]


def test_requests_of_both_classes_are_counted_and_timed(disaggregated: Application) -> None:
    before = _classes(disaggregated, "laps_requests_total")
    timed_before = _classes(disaggregated, "laps_time_to_first_token_seconds_count")
    disaggregated.complete([5 + index % 90 for index in range(30)])
    disaggregated.complete([7 + index % 80 for index in range(400)])
    disaggregated.complete([9 + index % 70 for index in range(40)], n=2)
    after = _classes(disaggregated, "laps_requests_total")
    assert {name: after[name] - before[name] for name in after} == {"short": 3, "long": 1}
    timed = _classes(disaggregated, "laps_time_to_first_token_seconds_count")
    assert {name: timed[name] - timed_before[name] for name in timed} == {"short": 3, "long": 1}
    status = disaggregated.laps_status()
    assert {name: status["ttft"][name]["num"] for name in timed} == timed
    assert 0 < status["ttft"]["short"]["p50_s"] <= status["ttft"]["short"]["p90_s"] < 30
    assert len(status["reports"]) == 4


def test_the_pools_are_in_the_metrics(disaggregated: Application) -> None:
    # Without them while the allocator does not answer.
    wait_until(lambda: disaggregated.metric("laps_pool_workers") == 2, "the pools are known")
    assert disaggregated.metric("laps_pool_moves_total") == 0
    wait_until(lambda: disaggregated.metric("laps_pool_pending_seconds") == 0, "nothing is queued")


def test_a_browser_shows_the_application(disaggregated: Application, tmp_path: Path) -> None:
    disaggregated.complete([11 + index % 60 for index in range(30)])
    html = run_browser(f"{disaggregated.url}/laps", tmp_path / "profile", "--dump-dom", page_s=4.0)
    assert re.search(r'id="banner"[^>]*hidden=""', html)
    rows = re.findall(r'<tr data-worker="([^"]+)" class=""', html)
    assert sorted(rows) == sorted(disaggregated.workers())
    assert 'class="p50"' in html
    assert re.search(r'data-is="up">4 of 4<', html)


@pytest.mark.nightly
def test_the_metrics_go_on_without_the_allocator(disaggregated: Application) -> None:
    disaggregated.complete([13 + index % 50 for index in range(30)])
    [allocator] = [name for name in disaggregated.actors() if name.startswith("allocator")]
    pid = disaggregated.pid(allocator)
    os.kill(pid, signal.SIGSTOP)
    try:
        status, text = disaggregated.get("/laps_status")
        assert status == 503
        assert "allocator" in text
        assert disaggregated.metric("laps_requests_total") > 0
        assert "laps_pool_workers{" not in disaggregated.get("/metrics")[1]
    finally:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: disaggregated.get("/laps_status")[0] == 200, "the allocator lives again")
    wait_until(lambda: disaggregated.metric("laps_pool_workers") == 2, "and knows the workers")

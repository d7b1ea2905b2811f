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


def test_the_page_is_served_and_asks_nobody_else(pooled: Application) -> None:
    response = httpx.get(f"{pooled.url}/laps", timeout=PATIENCE_S)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]


def test_requests_of_both_classes_are_counted_and_timed(pooled: Application) -> None:
    before = _classes(pooled, "laps_requests_total")
    pooled.complete([5 + index % 90 for index in range(30)])
    pooled.complete([7 + index % 80 for index in range(400)])
    pooled.complete([9 + index % 70 for index in range(40)], n=2)
    after = _classes(pooled, "laps_requests_total")
    assert {name: after[name] - before[name] for name in after} == {"short": 3, "long": 1}
    timed = _classes(pooled, "laps_time_to_first_token_seconds_count")
    assert timed == after
    status = httpx.get(f"{pooled.url}/laps_status", timeout=PATIENCE_S).json()
    assert {name: status["ttft"][name]["num"] for name in timed} == timed
    assert 0 < status["ttft"]["short"]["p50_s"] <= status["ttft"]["short"]["p90_s"] < 30
    assert len(status["reports"]) == 3


def test_the_pools_are_in_the_metrics(pooled: Application) -> None:
    assert pooled.metric("laps_pool_workers") == 2
    assert pooled.metric("laps_pool_moves_total") == 0
    wait_until(lambda: pooled.metric("laps_pool_pending_seconds") == 0, "nothing is queued")


def test_a_browser_shows_the_application(pooled: Application, tmp_path: Path) -> None:
    pooled.complete([11 + index % 60 for index in range(30)])
    html = run_browser(f"{pooled.url}/laps", tmp_path / "profile", "--dump-dom", page_s=4.0)
    assert re.search(r'id="banner"[^>]*hidden=""', html)
    rows = re.findall(r'<tr data-worker="([^"]+)" class=""', html)
    assert sorted(rows) == sorted(pooled.workers())
    assert 'class="p50"' in html
    assert re.search(r'data-is="up">3 of 3<', html)


@pytest.mark.nightly
def test_the_metrics_go_on_without_the_allocator(pooled: Application) -> None:
    pooled.complete([13 + index % 50 for index in range(30)])
    [allocator] = [name for name in pooled.actors() if name.startswith("allocator")]
    pid = pooled.pid(allocator)
    os.kill(pid, signal.SIGSTOP)
    try:
        status, text = pooled.get("/laps_status")
        assert status == 503
        assert "allocator" in text
        assert pooled.metric("laps_requests_total") > 0
        assert "laps_pool_workers{" not in pooled.get("/metrics")[1]
    finally:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pooled.get("/laps_status")[0] == 200, "the allocator lives again")
    wait_until(lambda: pooled.metric("laps_pool_workers") == 2, "and knows the workers")

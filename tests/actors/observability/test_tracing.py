"""Traces and timings: stages from moments, spans at a real collector, `timings` in an answer."""

import json
import random
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from actors.observability.request_times import RequestTimes, Stage, WorkerPair
from actors.observability.tracing import NoTracing, Tracing, build_tracing
from configs.schema import TracingConfig
from engine.clock import ManualClock, MonotonicClock
from engine.errors import ConfigError
from tests.actors.ingress.edge_app import EdgeApp, edge_app

STAGES = ("tokenize", "place", "queue", "prefill", "handoff", "first_decode", "stream")


class Collector:
    """An OTLP/HTTP endpoint in this process."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def spans(self) -> list[Span]:
        scopes = (
            scope
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
        )
        return [span for scope in scopes for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def tracing_to(collector: Collector, **given: Any) -> Tracing:
    return build_tracing(
        TracingConfig(otlp_endpoint=collector.url, **given), "laps test", MonotonicClock()
    )


def attributes(span: Span) -> dict[str, Any]:
    return {
        item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes
    }


# ---- spans ---------------------------------------------------------------------------------------


def test_a_request_is_a_span_with_its_stages_below_it(collector: Collector) -> None:
    tracing = tracing_to(collector)
    app = edge_app(tracing=tracing)
    before_ns = time.time_ns()
    answer = app.post({"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0})
    after_ns = time.time_ns()
    tracing.close()
    spans = collector.spans()
    (root,) = [span for span in spans if not span.parent_span_id]
    assert root.name == "text_completion tiny"
    assert root.kind == Span.SPAN_KIND_SERVER
    found = attributes(root)
    assert found["gen_ai.request.model"] == "tiny"
    assert found["gen_ai.request.max_tokens"] == 4
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (3, 4)
    children = sorted(
        (span for span in spans if span.parent_span_id == root.span_id),
        key=lambda span: span.start_time_unix_nano,
    )
    assert len(children) == len(spans) - 1
    assert [c.name for c in children] == [s for s in STAGES if s not in ("queue", "handoff")]
    workers = {child.name: attributes(child).get("laps.worker") for child in children}
    assert workers == dict.fromkeys(("tokenize", "place")) | dict.fromkeys(
        ("prefill", "first_decode", "stream"), "unified-0"
    )
    assert found["laps.attempts"] == 1
    assert children[0].start_time_unix_nano == root.start_time_unix_nano
    assert children[-1].end_time_unix_nano == root.end_time_unix_nano
    for one, after in pairwise(children):
        assert one.end_time_unix_nano == after.start_time_unix_nano
    slack_ns = 10**7  # between the two clocks
    assert before_ns - slack_ns <= root.start_time_unix_nano
    assert root.end_time_unix_nano <= after_ns + slack_ns
    version, trace_id, span_id, _ = answer.headers["traceparent"].split("-")
    assert (version, trace_id, span_id) == ("00", root.trace_id.hex(), root.span_id.hex())
    resource = collector.requests[0].resource_spans[0].resource
    assert any(a.value.string_value == "laps test" for a in resource.attributes)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_trace_that_a_client_began_goes_on(collector: Collector, is_streamed: bool) -> None:
    tracing = tracing_to(collector, sampled_share=1e-9)
    app = edge_app(tracing=tracing)
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    body = {"max_tokens": 2, "stream": is_streamed}
    answer = app.post(body, traceparent=f"00-{trace_id}-{parent_id}-01")
    assert answer.headers["traceparent"].startswith(f"00-{trace_id}-")
    app.post(body)  # without a trace, and not sampled
    app.post(body, traceparent=f"00-{secrets.token_hex(16)}-{parent_id}-00")
    tracing.close()
    spans = collector.spans()
    assert {span.trace_id.hex() for span in spans} == {trace_id}
    assert parent_id in {span.parent_span_id.hex() for span in spans}


def test_a_request_that_fails_says_so_without_what_the_client_sent(collector: Collector) -> None:
    tracing = tracing_to(collector)
    app = edge_app(tracing=tracing)
    app.workers.error = RuntimeError("zebra")
    assert app.post({"prompt": "zebra", "max_tokens": 2}).status_code == 500
    assert app.post({"prompt": [1] * 600}).status_code == 400  # refused when it is parsed
    tracing.close()
    (root,) = [span for span in collector.spans() if not span.parent_span_id]
    assert attributes(root)["error.type"] == "RuntimeError"
    assert root.status.code == 2
    assert b"zebra" not in b"".join(r.SerializeToString() for r in collector.requests)


@pytest.mark.slow
def test_a_request_that_was_tried_again_says_how_often_and_counts_once(
    collector: Collector,
) -> None:
    tracing = tracing_to(collector)
    app = edge_app(tracing=tracing)
    app.workers.num_attempts = 3
    assert app.post({"prompt": [1], "max_tokens": 2}).status_code == 200
    tracing.close()
    (root,) = [span for span in collector.spans() if not span.parent_span_id]
    assert attributes(root)["laps.attempts"] == 3
    counted = app.ask(lambda client: client.get("/metrics")).text
    assert 'laps_requests_total{length_class="short",model_name="tiny"} 1.0' in counted


def test_a_collector_that_is_away_costs_no_request() -> None:
    gone = Collector()
    gone.close()
    tracing = tracing_to(gone)
    assert edge_app(tracing=tracing).post({"max_tokens": 2}).status_code == 200
    tracing.close()


def test_a_replica_that_ends_sends_what_is_left(collector: Collector) -> None:
    app = edge_app(tracing=tracing_to(collector))

    async def live(client: httpx.AsyncClient) -> None:
        async with app.app.router.lifespan_context(app.app):
            await client.post("/v1/completions", json={"model": "tiny", "prompt": [1]})

    app.ask(live)
    assert "stream" in {span.name for span in collector.spans()}


def test_without_a_collector_nothing_is_traced() -> None:
    assert isinstance(build_tracing(TracingConfig(), "x", MonotonicClock()), NoTracing)
    answer = edge_app().post({"max_tokens": 2}, traceparent=f"00-{'1' * 32}-{'2' * 16}-01")
    assert "traceparent" not in answer.headers


def test_a_package_that_is_missing_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "actors.observability.otlp_tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    monkeypatch.delitem(
        sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", raising=False
    )
    with pytest.raises(ConfigError, match=r"laps-engine\[tracing\]"):
        build_tracing(
            TracingConfig(otlp_endpoint="http://127.0.0.1:1/v1/traces"), "x", ManualClock()
        )


# ---- stages --------------------------------------------------------------------------------------


def test_stages_follow_each_other_and_add_up() -> None:
    moments = sorted(random.uniform(0, 100) for _ in range(8))
    arrived_s, tokenized_s, placed_s, started_s, first_s, moved_s, second_s, ended_s = moments
    times = RequestTimes(arrived_s=arrived_s, tokenized_s=tokenized_s, placed_s=placed_s)
    times.see_tokens(0, 1, first_s, started_s - placed_s)
    times.moved_s = moved_s
    times.see_tokens(1, 2, second_s)
    times.see_tokens(3, 1, second_s + 1)
    times.ended_s = ended_s
    stages = times.stages()
    assert [stage.name for stage in stages] == list(STAGES)
    ends = [pytest.approx(moment) for moment in moments]
    assert [stages[0].start_s, *(stage.end_s for stage in stages)] == ends


def test_a_stage_names_the_worker_that_it_was_on() -> None:
    """The first token came in the second attempt, the second one in the third."""
    times = RequestTimes(arrived_s=0.0, tokenized_s=1.0, placed_s=2.0)
    times.attempts += [WorkerPair("p0", "d0"), WorkerPair("p1", "d0")]
    times.see_tokens(0, 1, 4.0, waited_s=1.0)
    times.moved_s = 5.0
    times.attempts.append(WorkerPair("p2", "d1"))
    times.see_tokens(1, 1, 6.0)
    times.ended_s = 7.0
    assert [stage.worker for stage in times.stages()] == [None, None, *2 * ["p1"], *3 * ["d1"]]


def test_what_did_not_happen_is_left_out_and_nothing_takes_less_than_no_time() -> None:
    times = RequestTimes(arrived_s=5.0, tokenized_s=6.0)
    assert times.stages() == [Stage("tokenize", 5.0, 6.0)]
    assert times.stages(now_s=9.0)[-1] == Stage("stream", 6.0, 9.0)
    times.placed_s = 7.0
    times.see_tokens(0, 1, 8.0, waited_s=99.0)  # measured on another clock
    times.moved_s = 7.5
    assert times.stages() == [
        Stage("tokenize", 5.0, 6.0),
        Stage("place", 6.0, 7.0),
        Stage("queue", 7.0, 8.0),
        Stage("prefill", 8.0, 8.0),
        Stage("handoff", 8.0, 8.0),
    ]


# ---- timings in the answer -----------------------------------------------------------------------


def paced_app() -> EdgeApp:
    """Its first token takes 300 ms, every other one 20 ms, on a clock that only tokens move."""
    clock = ManualClock(random.uniform(0, 1e5))
    app = edge_app(clock=clock)

    async def pause(index: int) -> None:
        clock.advance(0.02 if index else 0.3)

    app.workers.pause = pause
    return app


EXPECTED = {
    "tokenize_ms": 0.0,
    "place_ms": 0.0,
    "queue_ms": None,
    "prefill_ms": 300.0,
    "handoff_ms": None,
    "first_decode_ms": 20.0,
    "stream_ms": 60.0,
    "total_ms": 380.0,
}


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_an_answer_has_its_timings_when_asked() -> None:
    body = {"prompt": [1, 2], "max_tokens": 5}
    answer = paced_app().post(body, x_laps_timings="1").json()
    assert answer.pop("timings") == pytest.approx(EXPECTED)
    plain = paced_app().post(body, x_laps_timings="0").json()
    assert answer.keys() == plain.keys()


@pytest.mark.parametrize("has_usage", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_the_last_chunk_of_a_stream_has_them(has_usage: bool, n: int) -> None:
    body: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 5, "stream": True, "n": n}
    if has_usage:
        body["stream_options"] = {"include_usage": True}
    *earlier, last = events(paced_app().post(body, x_laps_timings="1").text)
    assert not any("timings" in chunk for chunk in earlier)
    found = last["timings"]
    if n == 1:
        assert found == pytest.approx(EXPECTED)
    assert found["total_ms"] >= 380
    assert ("usage" in last and last["usage"] is not None) == has_usage
    assert not any("timings" in chunk for chunk in events(paced_app().post(body).text))


def test_another_value_of_the_header_is_refused() -> None:
    answer = paced_app().post({}, x_laps_timings="yes")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-laps-timings"

"""Traces by OpenTelemetry, sent to a collector over OTLP/HTTP by a thread of its own.

Attributes are those of OpenTelemetry's conventions for generative AI; no prompt, no answer and no
key is among them. A collector that is away costs traces, never requests.
"""

import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.observability.request_times import RequestTimes
from actors.openai.protocol import Endpoint, ParsedRequest
from engine.clock import Clock

EXPORT_TIMEOUT_S = 5.0
OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.COMPLETION: "text_completion",
    Endpoint.SCORE: "score",
    Endpoint.RERANK: "rerank",
    Endpoint.EMBEDDING: "embeddings",
}
PROVIDER = "laps"

Attributes = dict[str, str | int | float | bool]


class OtlpTrace:
    """A span of the whole request; its stages become children when it ends."""

    def __init__(self, tracer: Tracer, span: Span, offset_s: float) -> None:
        """offset_s: of the wall clock (Unix time) against the ingress's clock."""
        self._tracer = tracer
        self._span = span
        self._offset_s = offset_s
        self._context = set_span_in_context(span)
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, self._context)
        self.headers: Mapping[str, str] = headers

    def end(
        self,
        times: RequestTimes,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        error: BaseException | None,
    ) -> None:
        """Writes the stages and closes the request's span; the thread sends them later."""
        for stage in times.stages():
            child = self._tracer.start_span(
                stage.name,
                self._context,
                attributes={} if stage.worker is None else {"laps.worker": stage.worker},
                start_time=_ns(stage.start_s + self._offset_s),
            )
            child.end(_ns(stage.end_s + self._offset_s))
        self._span.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", num_output_tokens)
        self._span.set_attribute("laps.attempts", len(times.attempts))
        if error is not None:  # its name only: the text may quote what the client sent
            kind = type(error).__name__
            self._span.set_attribute("error.type", kind)
            self._span.set_status(Status(StatusCode.ERROR, kind))
        assert times.ended_s is not None, "a trace ends with its request"
        self._span.end(_ns(times.ended_s + self._offset_s))


class OtlpTracing:
    """A tracer provider of its own, apart from other tracing in this process."""

    def __init__(self, endpoint: str, sampled_share: float, service: str, clock: Clock) -> None:
        """Starts the sending thread; it connects when there is something to send."""
        self._clock = clock
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            sampler=ParentBased(TraceIdRatioBased(sampled_share)),
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("laps")

    def start(
        self, parsed: ParsedRequest, headers: Mapping[str, str], arrived_s: float
    ) -> OtlpTrace:
        offset_s = time.time() - self._clock.now_s()
        operation = OPERATIONS[parsed.endpoint]
        span = self._tracer.start_span(
            f"{operation} {parsed.model}",
            TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(parsed, operation),
            start_time=_ns(arrived_s + offset_s),
        )
        return OtlpTrace(self._tracer, span, offset_s)

    def close(self) -> None:
        self._provider.shutdown()


def _attributes(parsed: ParsedRequest, operation: str) -> Attributes:
    sampling = parsed.sampling
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": parsed.model,
        "gen_ai.request.choice.count": parsed.num_choices,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.stream": parsed.stream,
    }
    if parsed.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = parsed.max_tokens
    return attributes


def _ns(unix_s: float) -> int:
    return round(unix_s * 1e9)

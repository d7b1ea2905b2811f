"""The interface of request traces, and tracing that does nothing.

A trace is opened when a request is admitted, so that the response can name it, and written when the
request is over: its stages are spans made from the moments that were noted on the way. Knows no
OpenTelemetry; `actors.observability.otlp_tracing` does, and is imported only where traces go
somewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from actors.observability.request_times import RequestTimes
from actors.openai.protocol import ParsedRequest
from configs.schema import TracingConfig
from engine.clock import Clock
from engine.errors import ConfigError


class Trace(Protocol):
    """The trace of one request."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Response headers that name the trace."""
        ...

    def end(
        self,
        times: RequestTimes,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        error: BaseException | None,
    ) -> None:
        """Ends the trace, once; does not wait."""
        ...


class Tracing(Protocol):
    """All traces of one ingress."""

    def start(self, parsed: ParsedRequest, headers: Mapping[str, str], arrived_s: float) -> Trace:
        """Opens a trace, or continues the one that the request's `headers` name."""
        ...

    def close(self) -> None:
        """Sends what is left; waits for the collector, within bounds."""
        ...


@dataclass(frozen=True, slots=True)
class NoTrace:
    """The trace of a request that is not traced: it records nothing."""

    headers: Mapping[str, str] = field(default_factory=dict)

    def end(
        self,
        times: RequestTimes,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        error: BaseException | None,
    ) -> None:
        """Writes nothing."""


class NoTracing:
    """Tracing without a configured collector: every trace is a `NoTrace`."""

    def start(self, parsed: ParsedRequest, headers: Mapping[str, str], arrived_s: float) -> Trace:
        return NoTrace()

    def close(self) -> None:
        """Does nothing."""


def build_tracing(config: TracingConfig, service: str, clock: Clock) -> Tracing:
    """service: whose traces they are. Raises ConfigError when the packages are not installed."""
    if config.otlp_endpoint is None:
        return NoTracing()
    try:
        from actors.observability.otlp_tracing import OtlpTracing
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracing.otlp_endpoint needs the package {error.name}: pip install"
            " 'laps-engine[tracing]', or leave the key out"
        ) from error
    return OtlpTracing(config.otlp_endpoint, config.sampled_share, service, clock)

"""The accounts of one request: its key's limits, when what happened, its trace. Closed once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.ingress.pipeline import ChoiceDelta, PreparedRequest
from actors.ingress.rate_limits import Grant
from actors.observability.latency_metrics import LatencyMetrics
from actors.observability.request_times import RequestTimes
from actors.observability.tracing import Trace
from engine.clock import Clock


class RequestAccounting:
    """Accounts for one request, from its admission to its last byte."""

    def __init__(
        self,
        *,
        grant: Grant,
        trace: Trace,
        times: RequestTimes,
        latencies: LatencyMetrics,
        clock: Clock,
        leave_queue: Callable[[], None],
    ) -> None:
        """leave_queue: called, at least once, when the request no longer waits for a token."""
        self._latencies = latencies
        self._grant = grant
        self._trace = trace
        self._times = times
        self._clock = clock
        self._leave_queue = leave_queue
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._has_ended = False

    def headers(self) -> dict[str, str]:
        """Headers of the response, whatever its status."""
        return {**self._grant.headers(), **self._trace.headers}

    def settle(self, prepared: PreparedRequest) -> None:
        """Charges the prompts' real tokens. Raises RateLimitError if they exceed the limit."""
        self._num_prompt_tokens = sum(map(len, prepared.prompt_ids))
        self._grant.settle(self._num_prompt_tokens + prepared.parsed.num_asked_tokens)

    def count(self, item: ChoiceDelta) -> None:
        """Counts a delta of the answer."""
        if not self._num_output_tokens:
            self._leave_queue()
        self._num_output_tokens += len(item.delta.tokens)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Closes the accounts at the end of the block, with the error that leaves it, if any."""
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Charges what was used, gives back the rest and closes the trace. Idempotent."""
        self._leave_queue()
        if self._has_ended:
            return
        self._has_ended = True
        self._times.ended_s = self._clock.now_s()
        has_prompt = self._times.placed_s is not None  # otherwise nothing was computed
        num_used = self._num_prompt_tokens + self._num_output_tokens if has_prompt else 0
        self._grant.end(num_used)
        if error is None:
            self._latencies.observe_stages(self._times.stages())
        self._trace.end(
            self._times,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            error=error,
        )

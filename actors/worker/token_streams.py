"""Tokens from one worker to its ingresses: one message per engine step and ingress.

Lives on the worker's event loop. Each ingress reads one stream; it acknowledges message numbers.
An ingress that stays silent loses its requests, and a request whose tokens pile up without being
acknowledged is cancelled alone, so that nothing here grows without bound.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from configs.schema import LifetimesConfig
from engine.clock import Clock
from engine.messages import (
    ExpertTotals,
    FailureRecord,
    HandoffTotals,
    LoadReport,
    StepMessage,
    TokenRecord,
    encode,
)
from engine.request import RequestKey

TOTALS_EVERY_S = 1.0


@dataclass(slots=True, eq=False)
class _Stream:
    """The messages that one ingress has not read or not acknowledged."""

    last_heard_s: float
    next_seq: int = 0
    tokens: list[TokenRecord] = field(default_factory=list)  # not sent yet
    failures: list[FailureRecord] = field(default_factory=list)
    joined: list[RequestKey] = field(default_factory=list)
    totals_due_s: float = 0.0
    unacknowledged: deque[tuple[int, Counter[RequestKey]]] = field(default_factory=deque)
    num_unacknowledged: dict[RequestKey, int] = field(default_factory=dict)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    reader: object | None = None  # identity of the generator that serves it now


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatistics:
    num_streams: int
    num_unacknowledged_tokens: int


class TokenStreams:
    """Distributes step outputs to ingresses, with acknowledgements and bounds."""

    def __init__(
        self,
        *,
        worker: str,
        incarnation: str,
        config: LifetimesConfig,
        clock: Clock,
        load: Callable[[], LoadReport],
        on_silent: Callable[[str], None],
        on_overflow: Callable[[str, RequestKey], None],
    ) -> None:
        """`on_silent(ingress_id)` and `on_overflow(ingress_id, key)` abort; called on the loop."""
        self._worker = worker
        self._incarnation = incarnation
        self._config = config
        self._clock = clock
        self._load = load
        self._on_silent = on_silent
        self._on_overflow = on_overflow
        self._streams: dict[str, _Stream] = {}
        self._awaited_until_s = math.inf  # while the model loads, nobody can come
        self._handoffs: Callable[[], HandoffTotals] | None = None
        self._experts: Callable[[], ExpertTotals | None] | None = None

    def open(self) -> None:
        """Lets clients connect; gives those that never do as long as those that fall silent."""
        self._awaited_until_s = self._clock.now_s() + self._config.ingress_silence_s

    def report_handoffs(self, totals: Callable[[], HandoffTotals]) -> None:
        """Sends the result of `totals` to every client once a second."""
        self._handoffs = totals

    def report_experts(self, totals: Callable[[], ExpertTotals | None]) -> None:
        """Sends the result of `totals` to every client once a second."""
        self._experts = totals

    def announce_joined(self, ingress_id: str, key: RequestKey) -> None:
        """Tells a request's ingress that its KV is here, before its next token."""
        stream = self._stream(ingress_id)
        stream.joined.append(key)
        stream.has_news.set()

    def publish(
        self,
        tokens: Sequence[tuple[str, TokenRecord]],
        failures: Sequence[tuple[str, FailureRecord]],
    ) -> None:
        """Queue one step's records for their ingresses and wake each reader once."""
        limit = self._config.max_unacknowledged_tokens
        touched: dict[str, _Stream] = {}
        for ingress_id, record in tokens:
            stream = touched.get(ingress_id)
            if stream is None:
                stream = touched[ingress_id] = self._stream(ingress_id)
            stream.tokens.append(record)
            counts, key = stream.num_unacknowledged, record.key
            counts[key] = num_tokens = counts.get(key, 0) + 1
            if num_tokens == limit:
                self._on_overflow(ingress_id, key)
        for ingress_id, failure in failures:
            stream = touched[ingress_id] = self._stream(ingress_id)
            stream.failures.append(failure)
        for stream in touched.values():
            stream.has_news.set()

    def acknowledge(self, ingress_id: str, step_seq: int) -> None:
        """Drops messages up to `step_seq`, which arrived; -1 says only that the ingress lives."""
        stream = self._streams.get(ingress_id)
        if stream is None:
            return
        stream.last_heard_s = self._clock.now_s()
        while stream.unacknowledged and stream.unacknowledged[0][0] <= step_seq:
            _, counts = stream.unacknowledged.popleft()
            for key, num_tokens in counts.items():
                num_left = stream.num_unacknowledged.pop(key) - num_tokens
                if num_left > 0:
                    stream.num_unacknowledged[key] = num_left

    async def read(self, ingress_id: str) -> AsyncGenerator[bytes, None]:
        """Yields encoded StepMessages for one ingress, a load report at least every 100 ms.

        A second reader for the same ingress replaces the first, which then ends.
        """
        stream = self._stream(ingress_id)
        stream.last_heard_s = self._clock.now_s()
        reader = stream.reader = object()
        stream.has_news.set()  # wakes an earlier reader, which then ends
        stream.has_news = asyncio.Event()
        stream.has_news.set()  # the first message goes at once and identifies this worker
        while stream.reader is reader and self._streams.get(ingress_id) is stream:
            await self._wait_for_news(stream)
            if stream.reader is reader:
                yield self._next_message(stream)

    def expire_silent(self) -> None:
        """Gives up ingresses that have been silent for too long."""
        limit_s = self._clock.now_s() - self._config.ingress_silence_s
        for ingress_id, stream in list(self._streams.items()):
            if stream.last_heard_s < limit_s:
                del self._streams[ingress_id]
                stream.has_news.set()  # ends its reader
                self._on_silent(ingress_id)

    def has_reader(self, prefix: str) -> bool:
        """Whether an ingress whose id starts with `prefix` is connected."""
        return any(ingress_id.startswith(prefix) for ingress_id in self._streams)

    @property
    def is_awaited(self) -> bool:
        """Whether clients of this worker's earlier process may still have to find it."""
        return self._clock.now_s() < self._awaited_until_s

    def clients(self) -> list[str]:
        """The clients that read a stream, or are about to."""
        return list(self._streams)

    @property
    def has_unread(self) -> bool:
        """Whether any message waits to be read."""
        return any(s.tokens or s.failures for s in self._streams.values())

    def statistics(self) -> StreamStatistics:
        counts = (sum(s.num_unacknowledged.values()) for s in self._streams.values())
        return StreamStatistics(
            num_streams=len(self._streams), num_unacknowledged_tokens=sum(counts)
        )

    def _stream(self, ingress_id: str) -> _Stream:
        stream = self._streams.get(ingress_id)
        if stream is None:
            stream = self._streams[ingress_id] = _Stream(last_heard_s=self._clock.now_s())
        return stream

    async def _wait_for_news(self, stream: _Stream) -> None:
        has_news = stream.has_news
        try:
            async with asyncio.timeout(self._config.load_report_every_s):
                await has_news.wait()
        except TimeoutError:
            pass  # a load report is due
        has_news.clear()

    def _next_message(self, stream: _Stream) -> bytes:
        is_due = self._are_totals_due(stream)
        message = StepMessage(
            worker=self._worker,
            incarnation=self._incarnation,
            step_seq=stream.next_seq,
            load=self._load(),
            tokens=stream.tokens,
            failures=stream.failures,
            joined=stream.joined,
            handoffs=None if not is_due or self._handoffs is None else self._handoffs(),
            experts=None if not is_due or self._experts is None else self._experts(),
        )
        if stream.tokens:
            counts = Counter([record.key for record in stream.tokens])
            stream.unacknowledged.append((stream.next_seq, counts))
        stream.next_seq += 1
        stream.tokens, stream.failures, stream.joined = [], [], []
        return encode(message)

    def _are_totals_due(self, stream: _Stream) -> bool:
        now_s = self._clock.now_s()
        if now_s < stream.totals_due_s:
            return False
        stream.totals_due_s = now_s + TOTALS_EVERY_S
        return True

"""Answers one request for tokens: reads its body, runs it, writes the answer, whole or streamed.

Everything that can fail is done before the first byte of an answer: tokens, a worker, and in stream
mode the first delta too, so that an error has the right status. A later error is the last event of
its stream. Knows no routes.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace

import msgspec
from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from actors.anthropic.writer import MessagesWriter
from actors.ingress.accounting import RequestAccounting
from actors.ingress.admission import estimate_tokens
from actors.ingress.auth import KEY_NAME
from actors.ingress.composition import Edge
from actors.ingress.pipeline import ChoiceDelta, PreparedRequest
from actors.ingress.timed_writer import TIMINGS_HEADER, TimedWriter, wants_timings
from actors.observability.request_times import RequestTimes
from actors.openai.answer_shapes import MessagesShape
from actors.openai.protocol import ParsedRequest
from actors.openai.request_rules import (
    TTFT_DEADLINE_HEADER,
    check_content_encoding,
    check_content_type,
    read_ttft_deadline_s,
)
from actors.openai.response_objects import error_reply
from actors.openai.response_parts import ResponseIdentity
from actors.openai.response_writers import ResponseWriter, build_writer
from engine.errors import EngineError, RequestError
from engine.text.tokenizing import Tokenizing

logger = logging.getLogger(__name__)

JSON_TYPE = "application/json"
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

# What reads a body; one that has to ask others for a part of it is awaited.
Parse = Callable[[bytes], ParsedRequest | Awaitable[ParsedRequest]]


class EventStream(StreamingResponse):
    """Server-sent events that end quietly when the client leaves; Serve raises that as an error."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        deltas: AsyncGenerator[ChoiceDelta, None],
        headers: Mapping[str, str],
        *,
        on_close: Callable[[BaseException | None], None],
    ) -> None:
        """deltas: what `events` reads; both are closed with the response, begun or not.

        on_close: called at the end with the error of a client that left before the events began;
        any earlier end has been reported already.
        """
        super().__init__(
            events, media_type="text/event-stream", headers=SSE_HEADERS | dict(headers)
        )
        self._events = events
        self._deltas = deltas
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events and closes them in any case, or they would run until collected."""
        try:
            # Errors of the deltas become events, so this is a client that left during a send.
            with suppress(OSError, ClientDisconnect):
                await self._send_opening(send)
                await super().__call__(scope, receive, send)
        finally:
            try:
                await self._events.aclose()
            finally:
                try:
                    await self._deltas.aclose()  # events that never began did not close them
                finally:
                    self._on_close(ClientDisconnect())

    async def _send_opening(self, send: Send) -> None:
        """Sends the status and the first event at once.

        Starlette sends from a task of its own, whose turn comes after all that the process has to
        do for its other streams.
        """
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        opening = await anext(self._events)
        await send({"type": "http.response.body", "body": opening, "more_body": True})

    async def stream_response(self, send: Send) -> None:
        """Sends the events after the first."""
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def listen_for_disconnect(self, receive: Receive) -> None:
        with suppress(TaskCancelledError):
            await super().listen_for_disconnect(receive)


def _build_writer(
    parsed: ParsedRequest, identity: ResponseIdentity, tokenizing: Tokenizing
) -> ResponseWriter:
    if isinstance(parsed.shape, MessagesShape):
        return MessagesWriter(parsed, identity, tokenizing)
    return build_writer(parsed, identity, tokenizing)


class Answering:
    """The requests for tokens of one replica, which owns every one that it accepted."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._config = edge.spec.config
        self._metrics = edge.metrics

    async def answer(self, request: Request, parse: Parse) -> Response:
        """Answers a request; raises the errors that are found before the first byte."""
        edge = self._edge
        times = RequestTimes(arrived_s=edge.clock.now_s())
        is_timed = wants_timings(request.headers.get(TIMINGS_HEADER))
        deadline_s = read_ttft_deadline_s(request.headers.get(TTFT_DEADLINE_HEADER))
        read = parse(await self.read_body(request))
        parsed = read if isinstance(read, ParsedRequest) else await read
        spec = msgspec.structs.replace(parsed.spec, ttft_deadline_s=deadline_s)
        parsed = replace(parsed, spec=spec)
        if self._config.edge.log_prompts:
            logger.info("asked: %s", parsed.prompts)
        num_tokens = estimate_tokens(parsed.prompts)
        max_answer_tokens = 0 if parsed.prompt_only is not None else parsed.max_tokens
        with edge.admission.admitted(num_tokens, max_answer_tokens) as leave_queue:
            accounting = self._open_accounting(request, parsed, times, num_tokens, leave_queue)
            try:
                prepared = await edge.pipeline.prepare(parsed, times)
                accounting.settle(prepared)
            except BaseException as error:
                accounting.end(error)
                raise
        identity = ResponseIdentity(
            request_id=parsed.request_id or prepared.request_ids[0],
            created_s=int(time.time()),
            model=parsed.model,
        )
        writer = _build_writer(parsed, identity, edge.tokenizing)
        if is_timed and parsed.shape is None:
            writer = TimedWriter(writer, parsed, times, edge.clock)
        # Serve sets X-Request-Id on every response: the client's, or one of its own.
        try:
            if parsed.stream:
                return await self._stream(prepared, writer, accounting)
            return await self._gather(prepared, writer, accounting)
        except asyncio.CancelledError:
            self._metrics.count_disconnected()
            raise

    def _open_accounting(
        self,
        request: Request,
        parsed: ParsedRequest,
        times: RequestTimes,
        num_tokens: int,
        leave_queue: Callable[[], None],
    ) -> RequestAccounting:
        """Opens the accounts. Raises RateLimitError if the key's limit is exhausted."""
        edge = self._edge
        num_asked = num_tokens + parsed.num_asked_tokens
        return RequestAccounting(
            grant=edge.rate_limits.grant(request.scope[KEY_NAME], num_asked),
            trace=edge.tracing.start(parsed, request.headers, times.arrived_s),
            times=times,
            latencies=self._metrics.latencies,
            clock=edge.clock,
            leave_queue=leave_queue,
        )

    async def _gather(
        self, prepared: PreparedRequest, writer: ResponseWriter, accounting: RequestAccounting
    ) -> Response:
        """Returns the whole answer as one JSON object."""
        writer.start(prepared.prompt_ids)
        with accounting.ending():
            async with aclosing(self._edge.pipeline.run(prepared)) as deltas:
                async for item in deltas:
                    accounting.count(item)
                    writer.delta(item.choice, item.delta)
        return Response(
            b"".join(writer.finish()), media_type=JSON_TYPE, headers=accounting.headers()
        )

    async def _stream(
        self, prepared: PreparedRequest, writer: ResponseWriter, accounting: RequestAccounting
    ) -> Response:
        """Returns the answer as server-sent events, once the first delta has come."""
        deltas = self._edge.pipeline.run(prepared)
        try:
            first = await anext(deltas)
        except BaseException as error:
            await deltas.aclose()
            accounting.end(error)
            raise
        accounting.count(first)
        events = self._events(prepared, writer, first, deltas, accounting)
        return EventStream(events, deltas, accounting.headers(), on_close=accounting.end)

    async def _events(
        self,
        prepared: PreparedRequest,
        writer: ResponseWriter,
        first: ChoiceDelta,
        deltas: AsyncGenerator[ChoiceDelta, None],
        accounting: RequestAccounting,
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(deltas):
            opening = [*writer.start(prepared.prompt_ids), *writer.delta(first.choice, first.delta)]
            try:
                yield b"".join(opening)
                async for item in deltas:
                    accounting.count(item)
                    events = writer.delta(item.choice, item.delta)
                    if events:
                        yield b"".join(events)
            except Exception as error:  # too late for a status: it becomes an event
                accounting.end(error)
                if not isinstance(error, EngineError | TimeoutError):
                    logger.error("a stream failed", exc_info=error)
                self._metrics.count_failed(error_reply(error).status)
                yield writer.fail(error)
                return
            except (asyncio.CancelledError, GeneratorExit) as error:
                accounting.end(error)
                self._metrics.count_disconnected()
                raise
            accounting.end(None)
            yield b"".join(writer.finish())

    async def read_body(self, request: Request) -> bytes:
        """Reads the body and counts its bytes: the length that a client claims proves nothing."""
        check_content_type(request.headers.get("content-type"))
        check_content_encoding(request.headers.get("content-encoding"))
        limit = self._config.edge.max_body_bytes
        too_large = RequestError(f"The request body exceeds {limit} bytes.", status=413)
        claimed = request.headers.get("content-length", "")
        if claimed.isascii() and claimed.isdigit() and int(claimed[:20]) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.edge.upload_timeout_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as error:
            raise RequestError("The request body did not come in time.", status=408) from error
        return bytes(body)

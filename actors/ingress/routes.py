"""The ingress: a Serve deployment that speaks OpenAI's protocol. Routes, statuses and SSE only.

Everything that can fail is done before the first byte of an answer: key, tokens, a worker, and in
stream mode the first delta too, so that an error has the right status. A later error is an SSE
event without a [DONE] after it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from ray import serve
from ray.exceptions import TaskCancelledError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from actors.ingress.accounting import RequestAccounting
from actors.ingress.auth import KEY_NAME, READING, KeyGate
from actors.ingress.composition import Edge, build_edge
from actors.ingress.limits import RateLimitError, estimate_tokens
from actors.ingress.pages import PAGE_HEADERS, build_view, chat_page, page
from actors.ingress.pages import to_json as laps_json
from actors.ingress.pipeline import ChoiceDelta, PreparedRequest
from actors.ingress.stopping import StoppingGate
from actors.ingress.system_view import SUPERVISOR as SUPERVISOR
from actors.ingress.timed_writer import TIMINGS_HEADER, TimedWriter, wants_timings
from actors.lifecycle.deployment import VERSION, DeploymentSpec
from actors.observability.logs import set_up_logging
from actors.observability.request_times import RequestTimes
from actors.openai.openapi import build_openapi
from actors.openai.protocol import ParsedRequest, parse_chat, parse_completion
from actors.openai.request_rules import (
    TTFT_DEADLINE_HEADER,
    check_content_encoding,
    check_content_type,
    read_ttft_deadline_s,
)
from actors.openai.response_objects import (
    NotReady,
    error_reply,
    model_card,
    model_list,
    sse_error,
    to_json,
)
from actors.openai.response_parts import ResponseIdentity
from actors.openai.response_writers import ResponseWriter, build_writer
from actors.openai.scores import parse_rerank, parse_score
from actors.openai.served_model import check_model
from actors.openai.token_requests import (
    detokenize_answer,
    parse_detokenize,
    parse_tokenize,
    tokenize_answer,
)
from engine.errors import EngineError, RequestError

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's status; the client has gone
JSON_TYPE = "application/json"
# Refused before the whole body has come: the connection cannot be used again.
BODY_LEFT_UNREAD = (408, 413)
CLOSE = {"Connection": "close"}
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Parse = Callable[[bytes], ParsedRequest]


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
                await super().__call__(scope, receive, send)
        finally:
            try:
                await self._events.aclose()
            finally:
                try:
                    await self._deltas.aclose()  # events that never began did not close them
                finally:
                    self._on_close(ClientDisconnect())

    async def listen_for_disconnect(self, receive: Receive) -> None:
        with suppress(TaskCancelledError):
            await super().listen_for_disconnect(receive)


class Ingress:
    """One replica of the HTTP edge, as Serve runs it."""

    async def __init__(self, spec: DeploymentSpec) -> None:  # type: ignore[misc] # Serve awaits it
        """Returns when the system can serve. Raises ConfigError when it never will."""
        set_up_logging()
        self._edge = await build_edge(spec.in_application(serve.get_replica_context().app_name))

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica if this raises."""
        self._edge.check()

    async def stop(self) -> int:
        """Refuses new requests and waits for those in progress; called before a shutdown.

        Returns how many had to be ended after `edge.drain_s`.
        """
        return await self._edge.stopping.stop(self._edge.spec.config.edge.drain_s)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Returns the ASGI application; called by Serve after the constructor."""
        return Api(self._edge).app()


class Api:
    """The routes of one replica, which owns every request it accepted."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._config = edge.spec.config
        self._model = edge.model
        self._metrics = edge.metrics

    def app(self) -> FastAPI:
        """The ASGI application: all routes, unknown ones too, behind the API key check."""
        # The document of /openapi.json is built from the structs.
        app = FastAPI(openapi_url=None, lifespan=self._lifespan)
        app.add_api_route("/", self._show_chat, methods=READING)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        app.add_api_route("/v1/completions", self._complete, methods=["POST"])
        app.add_api_route("/v1/score", self._score, methods=["POST"])
        app.add_api_route("/v1/rerank", self._rerank, methods=["POST"])
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self._detokenize, methods=["POST"])
        app.add_api_route("/openapi.json", self._show_openapi, methods=READING)
        app.add_api_route("/v1/models", self._list_models, methods=READING)
        app.add_api_route("/v1/models/{name:path}", self._show_model, methods=READING)
        app.add_api_route("/health", self._health, methods=READING)
        app.add_api_route("/ping", self._ping, methods=[*READING, "POST"])
        app.add_api_route("/ready", self._ready, methods=READING)
        app.add_api_route("/metrics", self._show_metrics, methods=READING)
        app.add_api_route("/laps", self._show_laps, methods=READING)
        app.add_api_route("/laps_status", self._show_laps_status, methods=READING)
        app.add_api_route("/version", self._version, methods=READING)
        app.add_exception_handler(Exception, self._on_error)
        app.add_exception_handler(EngineError, self._on_error)
        app.add_exception_handler(TimeoutError, self._on_error)
        app.add_exception_handler(StarletteHTTPException, self._on_http_error)
        app.add_middleware(StoppingGate, stopping=self._edge.stopping)
        app.add_middleware(
            KeyGate,
            keys=self._edge.keys,
            limits=self._config.edge,
            on_refused=self._metrics.count_failed,
            open_paths=self._config.api.open_paths,
        )
        return app

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self._edge.tracing.close)

    # ---- generation -----------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        edge, model = self._config.edge, self._model
        return await self._answer(request, lambda body: parse_chat(body, edge, model))

    async def _complete(self, request: Request) -> Response:
        edge, model = self._config.edge, self._model
        return await self._answer(request, lambda body: parse_completion(body, edge, model))

    async def _score(self, request: Request) -> Response:
        edge, model = self._config.edge, self._model
        return await self._answer(request, lambda body: parse_score(body, edge, model))

    async def _rerank(self, request: Request) -> Response:
        edge, model, tokenizing = self._config.edge, self._model, self._edge.tokenizing
        return await self._answer(request, lambda body: parse_rerank(body, edge, model, tokenizing))

    async def _answer(self, request: Request, parse: Parse) -> Response:
        edge = self._edge
        times = RequestTimes(arrived_s=edge.clock.now_s())
        is_timed = wants_timings(request.headers.get(TIMINGS_HEADER))
        deadline_s = read_ttft_deadline_s(request.headers.get(TTFT_DEADLINE_HEADER))
        parsed = parse(await self._read_body(request))
        spec = msgspec.structs.replace(parsed.spec, ttft_deadline_s=deadline_s)
        parsed = replace(parsed, spec=spec)
        if self._config.edge.log_prompts:
            logger.info("asked: %s", parsed.prompts)
        num_tokens = estimate_tokens(parsed.prompts)
        max_answer_tokens = 0 if parsed.scoring is not None else parsed.max_tokens
        with edge.admission.admitted(num_tokens, max_answer_tokens) as leave_queue:
            accounting = self._open_accounting(request, parsed, times, num_tokens, leave_queue)
            try:
                prepared = await edge.pipeline.prepare(parsed, times)
                accounting.settle(prepared)
            except BaseException as error:
                accounting.end(error)
                raise
        identity = ResponseIdentity(
            request_id=prepared.request_ids[0], created_s=int(time.time()), model=parsed.model
        )
        writer = build_writer(parsed, identity, edge.tokenizing)
        if is_timed:
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
        asked = 0 if parsed.max_tokens is None else parsed.max_tokens * parsed.num_choices
        return RequestAccounting(
            grant=edge.rate_limits.grant(request.scope[KEY_NAME], num_tokens + asked),
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
                yield sse_error(error)
                return
            except (asyncio.CancelledError, GeneratorExit) as error:
                accounting.end(error)
                self._metrics.count_disconnected()
                raise
            accounting.end(None)
            yield b"".join(writer.finish())

    async def _read_body(self, request: Request) -> bytes:
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

    # ---- everything else ------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        call = parse_tokenize(await self._read_body(request), self._model)
        async with asyncio.timeout(self._config.edge.request_timeout_s):
            token_ids = await self._edge.batchers.tokenize(call.prompt)
        answer = tokenize_answer(call, token_ids, self._model, self._edge.tokenizing)
        return Response(to_json(answer), media_type=JSON_TYPE)

    async def _detokenize(self, request: Request) -> Response:
        token_ids = parse_detokenize(await self._read_body(request), self._model)
        answer = detokenize_answer(token_ids, self._edge.tokenizing)
        return Response(to_json(answer), media_type=JSON_TYPE)

    async def _show_openapi(self) -> Response:
        return Response(build_openapi("LAPS engine", VERSION), media_type=JSON_TYPE)

    async def _list_models(self) -> Response:
        return Response(to_json(model_list(self._model)), media_type=JSON_TYPE)

    async def _show_model(self, name: str) -> Response:
        check_model(name, self._model)
        return Response(to_json(model_card(self._model, name)), media_type=JSON_TYPE)

    async def _health(self) -> Response:
        """Answers 200: this replica's event loop runs."""
        return JSONResponse({"status": "ok"})

    async def _ping(self) -> Response:
        """Answers as `/health` does, without a body: what SageMaker asks for."""
        return Response()

    async def _ready(self) -> Response:
        """Answers 200 while every role has a loaded, connected worker, else 503."""
        missing = self._edge.system.missing_roles()
        if missing:
            return Response(to_json(NotReady(missing_roles=missing)), 503, media_type=JSON_TYPE)
        return JSONResponse({"status": "ready"})

    async def _show_metrics(self) -> Response:
        text = await self._edge.observation.prometheus_text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _show_chat(self) -> Response:
        shown = chat_page()
        return HTMLResponse(shown.html, headers=dict(shown.headers))

    async def _show_laps(self) -> Response:
        """Serves the live page, which fetches `/laps_status`."""
        return HTMLResponse(page(), headers=PAGE_HEADERS)

    async def _show_laps_status(self) -> Response:
        """Answers with the allocator's pools, queues and last moves; 503 while it is away."""
        edge = self._edge
        status = await edge.observation.laps_status()
        view = build_view(
            model=self._model.name,
            ingress=edge.ingress_id,
            laps=self._config.laps,
            ttft=edge.recent_ttft.summary(),
            links=edge.generations.links.links(),
        )
        headers = {"Cache-Control": "no-store"}
        return Response(laps_json(status, view), media_type=JSON_TYPE, headers=headers)

    async def _version(self) -> Response:
        return JSONResponse({"version": VERSION, "deployment": self._edge.spec.hash})

    # ---- errors ---------------------------------------------------------------------------------

    async def _on_error(self, request: Request, error: Exception) -> Response:
        """Answers with OpenAI's error object, for any error before the first byte."""
        if isinstance(error, TaskCancelledError):  # Serve raises it when the client has left
            self._metrics.count_disconnected()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        reply = error_reply(error)
        if reply.status >= 500 and not isinstance(error, EngineError | TimeoutError):
            logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        self._metrics.count_failed(reply.status)
        headers = reply.headers | (error.headers if isinstance(error, RateLimitError) else {})
        if reply.status in BODY_LEFT_UNREAD:
            headers |= CLOSE
        return Response(reply.body, reply.status, headers=headers, media_type=JSON_TYPE)

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        """Answers an unknown route or wrong method in the shape of every other error."""
        assert isinstance(error, StarletteHTTPException), f"registered for {type(error)} too"
        message = f"{error.detail}: {request.method} {request.url.path[:200]}"
        reply = error_reply(RequestError(message, code="unknown_url", status=error.status_code))
        return Response(reply.body, reply.status, headers=error.headers, media_type=JSON_TYPE)

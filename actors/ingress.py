"""The ingress: a Serve deployment that speaks OpenAI's protocol. Routes, statuses and SSE only.

Everything a request needs is decided before its first byte: tokens, a worker, and in stream mode
the first delta too, so that an error is always the right status. Afterwards an error is an SSE
event without a [DONE] after it.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from ray import serve
from ray.exceptions import TaskCancelledError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive

from actors.api.chat_dialect import build_dialect
from actors.api.openai_objects import error_reply, model_card, model_list, sse_error, to_json
from actors.api.openapi import build_openapi
from actors.api.protocol import ParsedRequest, parse_chat, parse_completion
from actors.api.request_rules import (
    TTFT_DEADLINE_HEADER,
    check_content_type,
    read_ttft_deadline_s,
)
from actors.api.response_parts import ResponseIdentity
from actors.api.response_writers import ResponseWriter, build_writer
from actors.api.served_model import ServedModel, check_model, served_names
from actors.api.token_requests import (
    detokenize_answer,
    parse_detokenize,
    parse_tokenize,
    tokenize_answer,
)
from actors.deployment import VERSION, DeploymentSpec
from actors.edge.answering import Answering, Batchers, ChoiceDelta, PreparedRequest
from actors.edge.generation import Generations
from actors.edge.laps_page import PAGE_HEADERS, build_view, page
from actors.edge.laps_page import to_json as laps_json
from actors.edge.metrics import IngressMetrics
from actors.edge.recent_ttft import RecentTtft
from actors.edge.system_view import SystemView
from actors.handles import (
    AllocatorHandle,
    BatcherHandle,
    SupervisorHandle,
    WorkerHandle,
    find_actor,
)
from actors.logs import set_up_logging
from engine.chat_template import read_template_text
from engine.clock import MonotonicClock
from engine.errors import CapacityError, EngineError, RequestError, WorkerError
from engine.messages import LapsStatus, Topology
from engine.tokenizing import load_tokenizer

logger = logging.getLogger(__name__)

SUPERVISOR = "supervisor"
SUPERVISOR_TIMEOUT_S = 5.0
ALLOCATOR_TIMEOUT_S = 2.0
CLIENT_CLOSED_REQUEST = 499  # nginx's status; nobody is left to read it
JSON_TYPE = "application/json"
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Parse = Callable[[bytes], ParsedRequest]


class EventStream(StreamingResponse):
    """Server-sent events that end quietly when the client leaves; Serve raises that as an error."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=SSE_HEADERS)

    async def listen_for_disconnect(self, receive: Receive) -> None:
        with suppress(TaskCancelledError):
            await super().listen_for_disconnect(receive)


class Ingress:
    """One replica of the HTTP edge; owns every request it accepted."""

    async def __init__(self, spec: DeploymentSpec) -> None:  # type: ignore[misc] # Serve awaits it
        """Returns when the system can serve. Raises ConfigError when it never will."""
        set_up_logging()
        self._spec = spec.in_application(serve.get_replica_context().app_name)
        self._config = config = spec.config
        self._clock = MonotonicClock()
        self._ingress_id = f"ingress-{uuid.uuid4().hex}"
        self._generations = Generations(
            config,
            ingress_id=self._ingress_id,
            find_worker=self._find_worker,
            find_allocator=self._find_allocator,
            clock=self._clock,
        )
        self._batchers = Batchers(
            self._find_batcher, patience_s=config.edge.place_timeout_s, clock=self._clock
        )
        self._system = SystemView(self._ask_supervisor, self._follow, self._connected)
        folder = Path(config.model.path)
        name, *aliases = served_names(config)
        tokenizing = await asyncio.to_thread(load_tokenizer, folder)
        topology = await self._system.wait_ready()
        lengths = [s.identity.max_model_len for s in topology.workers.values() if s.identity]
        self._model = ServedModel(
            name=name,
            max_model_len=min(lengths),
            vocab_size=tokenizing.vocab_size,
            created_s=int(time.time()),
            aliases=tuple(aliases),
            dialect=build_dialect(read_template_text(folder), config.api, tokenizing),
        )
        self._tokenizing = tokenizing
        self._recent_ttft = RecentTtft(self._clock)
        self._metrics = IngressMetrics(name, self._recent_ttft)
        self._answering = Answering(
            model=self._model,
            tokenizing=tokenizing,
            batchers=self._batchers,
            generations=self._generations,
            metrics=self._metrics,
            clock=self._clock,
            timeout_s=config.edge.request_timeout_s,
        )
        self._follower = asyncio.create_task(self._system.follow())
        logger.info("%s serves %s", self._ingress_id, name)

    async def check_health(self) -> None:
        """Asked by Serve, which replaces the replica when this raises."""
        if self._follower.done():
            raise RuntimeError(f"the topology task ended: {self._follower.exception()!r}")
        self._generations.links.check()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The routes; called by Serve after the constructor."""
        app = FastAPI(openapi_url=None)  # the document here is built from the structs
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        app.add_api_route("/v1/completions", self._complete, methods=["POST"])
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self._detokenize, methods=["POST"])
        app.add_api_route("/openapi.json", self._show_openapi, methods=["GET"])
        app.add_api_route("/v1/models", self._list_models, methods=["GET"])
        app.add_api_route("/v1/models/{name:path}", self._show_model, methods=["GET"])
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/ready", self._ready, methods=["GET"])
        app.add_api_route("/metrics", self._show_metrics, methods=["GET"])
        app.add_api_route("/laps", self._show_laps, methods=["GET"])
        app.add_api_route("/laps_status", self._show_laps_status, methods=["GET"])
        app.add_api_route("/version", self._version, methods=["GET"])
        app.add_exception_handler(Exception, self._on_error)
        app.add_exception_handler(EngineError, self._on_error)
        app.add_exception_handler(TimeoutError, self._on_error)
        app.add_exception_handler(StarletteHTTPException, self._on_http_error)
        return app

    # ---- generation -----------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        edge, model = self._config.edge, self._model
        return await self._answer(request, lambda body: parse_chat(body, edge, model))

    async def _complete(self, request: Request) -> Response:
        edge, model = self._config.edge, self._model
        return await self._answer(request, lambda body: parse_completion(body, edge, model))

    async def _answer(self, request: Request, parse: Parse) -> Response:
        arrived_s = self._clock.now_s()
        deadline_s = read_ttft_deadline_s(request.headers.get(TTFT_DEADLINE_HEADER))
        parsed = replace(parse(await self._read_body(request)), ttft_deadline_s=deadline_s)
        prepared = await self._answering.prepare(parsed, arrived_s)
        identity = ResponseIdentity(
            request_id=prepared.request_ids[0], created_s=int(time.time()), model=parsed.model
        )
        writer = build_writer(parsed, identity, self._tokenizing)
        # X-Request-Id is Serve's: it echoes the client's, or makes one, on every response.
        try:
            if parsed.stream:
                return await self._stream(prepared, writer)
            return await self._gather(prepared, writer)
        except asyncio.CancelledError:
            self._metrics.count_disconnected()
            raise

    async def _gather(self, prepared: PreparedRequest, writer: ResponseWriter) -> Response:
        """The whole answer as one JSON object."""
        writer.start(prepared.prompt_ids)
        async with aclosing(self._answering.run(prepared)) as deltas:
            async for item in deltas:
                writer.delta(item.choice, item.delta)
        return Response(b"".join(writer.finish()), media_type=JSON_TYPE)

    async def _stream(self, prepared: PreparedRequest, writer: ResponseWriter) -> Response:
        """The answer as server-sent events, once the first delta is there."""
        deltas = self._answering.run(prepared)
        try:
            first = await anext(deltas)
        except BaseException:
            await deltas.aclose()
            raise
        events = self._events(prepared, writer, first, deltas)
        return EventStream(events)

    async def _events(
        self,
        prepared: PreparedRequest,
        writer: ResponseWriter,
        first: ChoiceDelta,
        deltas: AsyncGenerator[ChoiceDelta, None],
    ) -> AsyncIterator[bytes]:
        async with aclosing(deltas):
            opening = [*writer.start(prepared.prompt_ids), *writer.delta(first.choice, first.delta)]
            try:
                yield b"".join(opening)
                async for item in deltas:
                    events = writer.delta(item.choice, item.delta)
                    if events:
                        yield b"".join(events)
            except Exception as error:  # too late for a status: it is said in the stream
                if not isinstance(error, EngineError | TimeoutError):
                    logger.error("a stream failed", exc_info=error)
                self._metrics.count_failed(error_reply(error).status)
                yield sse_error(error)
                return
            except (asyncio.CancelledError, GeneratorExit):
                self._metrics.count_disconnected()
                raise
            yield b"".join(writer.finish())

    async def _read_body(self, request: Request) -> bytes:
        """The body, counted as it comes: the length a client claims proves nothing."""
        check_content_type(request.headers.get("content-type"))
        limit = self._config.edge.max_body_bytes
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise RequestError(f"The request body exceeds {limit} bytes.", status=413)
        return bytes(body)

    # ---- everything else ------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        call = parse_tokenize(await self._read_body(request), self._model)
        async with asyncio.timeout(self._config.edge.request_timeout_s):
            token_ids = await self._batchers.tokenize(call.prompt)
        answer = tokenize_answer(call, token_ids, self._model, self._tokenizing)
        return Response(to_json(answer), media_type=JSON_TYPE)

    async def _detokenize(self, request: Request) -> Response:
        token_ids = parse_detokenize(await self._read_body(request), self._model)
        answer = detokenize_answer(token_ids, self._tokenizing)
        return Response(to_json(answer), media_type=JSON_TYPE)

    async def _show_openapi(self) -> Response:
        return Response(build_openapi("LAPS engine", VERSION), media_type=JSON_TYPE)

    async def _list_models(self) -> Response:
        return Response(to_json(model_list(self._model)), media_type=JSON_TYPE)

    async def _show_model(self, name: str) -> Response:
        check_model(name, self._model)
        return Response(to_json(model_card(self._model, name)), media_type=JSON_TYPE)

    async def _health(self) -> Response:
        """This replica's event loop answers."""
        return JSONResponse({"status": "ok"})

    async def _ready(self) -> Response:
        """200 while every role has a worker that is loaded and connected, else 503."""
        missing = self._system.missing_roles()
        if missing:
            return JSONResponse({"status": "not ready", "missing_roles": missing}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def _show_metrics(self) -> Response:
        try:
            laps = await self._ask_laps_status()
        except CapacityError:  # what is known here is worth a scrape without it
            laps = None
        generations = self._generations
        text = self._metrics.render(
            generations.links.links(), generations.num_open, generations.counters.num_retries, laps
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _show_laps(self) -> Response:
        """The live page; it asks for `/laps_status` by itself."""
        return HTMLResponse(page(), headers=PAGE_HEADERS)

    async def _show_laps_status(self) -> Response:
        """Pools, what waits in them and the last moves, as the allocator sees them; else 503."""
        status = await self._ask_laps_status()
        view = build_view(
            model=self._model.name,
            ingress=self._ingress_id,
            laps=self._config.laps,
            ttft=self._recent_ttft.summary(),
            links=self._generations.links.links(),
        )
        headers = {"Cache-Control": "no-store"}
        return Response(laps_json(status, view), media_type=JSON_TYPE, headers=headers)

    async def _version(self) -> Response:
        return JSONResponse({"version": VERSION, "deployment": self._spec.hash})

    # ---- errors ---------------------------------------------------------------------------------

    async def _on_error(self, request: Request, error: Exception) -> Response:
        """Any error before the first byte, as OpenAI's error object."""
        if isinstance(error, TaskCancelledError):  # Serve's word for a client that has left
            self._metrics.count_disconnected()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        reply = error_reply(error)
        if reply.status >= 500 and not isinstance(error, EngineError | TimeoutError):
            logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        self._metrics.count_failed(reply.status)
        return Response(reply.body, reply.status, headers=reply.headers, media_type=JSON_TYPE)

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        """Unknown route or wrong method, in the same shape as every other error."""
        assert isinstance(error, StarletteHTTPException), f"registered for {type(error)} too"
        message = f"{error.detail}: {request.method} {request.url.path[:200]}"
        reply = error_reply(RequestError(message, code="unknown_url", status=error.status_code))
        return Response(reply.body, reply.status, headers=error.headers, media_type=JSON_TYPE)

    # ---- other actors ---------------------------------------------------------------------------

    def _follow(self, topology: Topology) -> None:
        self._generations.update(topology)
        self._batchers.update(topology.batchers)

    def _connected(self) -> set[str]:
        return {link.name for link in self._generations.links.links() if link.is_up}

    async def _ask_supervisor(self) -> Topology:
        try:
            async with asyncio.timeout(SUPERVISOR_TIMEOUT_S):
                actor = await asyncio.to_thread(serve.get_deployment_actor, SUPERVISOR)
                return await SupervisorHandle(actor).topology()
        except (ValueError, TimeoutError) as error:
            raise WorkerError("the supervisor is not running") from error

    async def _ask_laps_status(self) -> LapsStatus:
        """Raises CapacityError while the allocator is away."""
        topology = self._system.topology
        assert topology is not None, "a replica that answers has seen one"
        try:
            async with asyncio.timeout(ALLOCATOR_TIMEOUT_S):
                allocator = await self._find_allocator(topology.allocator)
                return await allocator.status()
        except (WorkerError, TimeoutError) as error:
            raise CapacityError("the allocator does not answer", retry_after_s=1.0) from error

    async def _find_worker(self, name: str) -> WorkerHandle:
        return WorkerHandle(name, await find_actor(name, self._spec.namespace))

    async def _find_allocator(self, name: str) -> AllocatorHandle:
        return AllocatorHandle(name, await find_actor(name, self._spec.namespace))

    async def _find_batcher(self, name: str) -> BatcherHandle:
        return BatcherHandle(name, await find_actor(name, self._spec.namespace))

"""The ingress: a Serve deployment that speaks OpenAI's protocol. Routes, statuses and SSE only.

Everything that can fail is done before the first byte of an answer: key, tokens, a worker, and in
stream mode the first delta too, so that an error has the right status. A later error is an SSE
event without a [DONE] after it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from ray import serve
from ray.exceptions import TaskCancelledError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from actors.anthropic.errors import reply_at
from actors.anthropic.objects import TokenCount
from actors.anthropic.reading import parse_count_tokens, parse_messages
from actors.ingress.answering import JSON_TYPE, Answering
from actors.ingress.auth import KEY_NAME, READING, KeyGate
from actors.ingress.closed_replica import close_call_port
from actors.ingress.composition import Edge, build_edge
from actors.ingress.docs_page import docs_page
from actors.ingress.openapi import build_openapi
from actors.ingress.pages import (
    PAGE_HEADERS,
    build_laps_view,
    chat_page,
    laps_json,
    laps_page,
)
from actors.ingress.rate_limits import RateLimitError
from actors.ingress.stopping import StoppingGate
from actors.ingress.unread_body import UnreadBody
from actors.lifecycle.deployment import VERSION, DeploymentSpec
from actors.lifecycle.threads import share_interpreter
from actors.observability.logs import set_up_logging
from actors.openai.embeddings import parse_embedding
from actors.openai.protocol import ParsedRequest, parse_chat, parse_chat_batch, parse_completion
from actors.openai.request_bodies import Invocation, decode_fields, is_given
from actors.openai.response_objects import NotReady, model_card, model_list, to_json
from actors.openai.responses.objects import DeletedResponse
from actors.openai.responses.reading import parse_responses
from actors.openai.scores import parse_rerank, parse_score
from actors.openai.served_model import ServedModel, check_model
from actors.openai.token_requests import (
    detokenize_answer,
    parse_detokenize,
    parse_tokenize,
    tokenize_answer,
)
from configs.schema import EdgeConfig
from engine.errors import EngineError, RequestError
from engine.text.chat_template import describe_tokenizer

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's status; the client has gone

# What reads a body within the edge's limits, for a model.
BodyParser = Callable[[bytes, EdgeConfig, ServedModel], ParsedRequest]


class Ingress:
    """One replica of the HTTP edge, as Serve runs it."""

    async def __init__(self, spec: DeploymentSpec) -> None:  # type: ignore[misc] # Serve awaits it
        """Returns when the system can serve. Raises ConfigError when it never will."""
        set_up_logging(spec.config.log_level)
        share_interpreter()
        close_call_port()
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
        self._answering = Answering(edge)
        self._responses = edge.responses
        self._parse_score: BodyParser = partial(parse_score, tokenizing=edge.tokenizing)
        self._parse_rerank: BodyParser = partial(parse_rerank, tokenizing=edge.tokenizing)

    def app(self) -> FastAPI:
        """The ASGI application: all routes, unknown ones too, behind the API key check."""
        # The document of /openapi.json is built from the structs.
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=self._lifespan)
        app.add_api_route("/", self._show_chat, methods=READING)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        app.add_api_route("/v1/chat/completions/batch", self._chat_batch, methods=["POST"])
        app.add_api_route("/v1/completions", self._complete, methods=["POST"])
        app.add_api_route("/invocations", self._invoke, methods=["POST"])
        app.add_api_route("/v1/responses", self._respond, methods=["POST"])
        app.add_api_route("/v1/responses/{name}", self._show_response, methods=READING)
        app.add_api_route("/v1/responses/{name}", self._forget_response, methods=["DELETE"])
        app.add_api_route("/v1/messages", self._message, methods=["POST"])
        app.add_api_route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"])
        app.add_api_route("/v1/embeddings", self._embed, methods=["POST"])
        for path in ("/v1/score", "/score"):
            app.add_api_route(path, self._score, methods=["POST"])
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            app.add_api_route(path, self._rerank, methods=["POST"])
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self._detokenize, methods=["POST"])
        app.add_api_route("/tokenizer_info", self._show_tokenizer, methods=READING)
        app.add_api_route("/load", self._show_load, methods=READING)
        app.add_api_route("/docs", self._show_docs, methods=READING)
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
        app.add_exception_handler(ClientDisconnect, self._on_error)
        app.add_exception_handler(StarletteHTTPException, self._on_http_error)
        self._add_middlewares(app)
        return app

    def _add_middlewares(self, app: FastAPI) -> None:
        """Puts what every request passes around the routes; the last one is the outermost."""
        edge, api = self._config.edge, self._config.api
        app.add_middleware(StoppingGate, stopping=self._edge.stopping)
        app.add_middleware(
            KeyGate,
            keys=self._edge.keys,
            limits=edge,
            on_refused=self._metrics.count_failed,
            open_paths=api.open_paths,
        )
        if api.cors_origins:
            # Around the keys: a browser asks without one whether it may ask.
            app.add_middleware(
                CORSMiddleware,
                allow_origins=api.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["*"],
            )
        app.add_middleware(
            UnreadBody,
            limit_s=edge.upload_timeout_s,
            limit_bytes=edge.max_body_bytes,
            max_requests=edge.max_ongoing_requests,
        )

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        yield
        await self._responses.close()
        await asyncio.to_thread(self._edge.tracing.close)

    # ---- generation -----------------------------------------------------------------------------

    async def _answer(self, request: Request, parse: BodyParser) -> Response:
        """Answers a request for tokens, or for what the model says of a prompt."""
        edge, model = self._config.edge, self._model
        return await self._answering.answer(request, lambda body: parse(body, edge, model))

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat)

    async def _chat_batch(self, request: Request) -> Response:
        return await self._answer(request, parse_chat_batch)

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, parse_completion)

    async def _message(self, request: Request) -> Response:
        return await self._answer(request, parse_messages)

    async def _embed(self, request: Request) -> Response:
        return await self._answer(request, parse_embedding)

    async def _score(self, request: Request) -> Response:
        return await self._answer(request, self._parse_score)

    async def _rerank(self, request: Request) -> Response:
        return await self._answer(request, self._parse_rerank)

    async def _invoke(self, request: Request) -> Response:
        """SageMaker's only route: a body's fields say which endpoint it is for."""

        def parse(body: bytes, edge: EdgeConfig, model: ServedModel) -> ParsedRequest:
            return self._parser_for(decode_fields(body, Invocation))(body, edge, model)

        return await self._answer(request, parse)

    def _parser_for(self, fields: Invocation) -> BodyParser:
        if is_given(fields.messages):
            return parse_chat
        if is_given(fields.prompt):
            return parse_completion
        if is_given(fields.input):
            return parse_embedding
        if is_given(fields.query) and is_given(fields.documents):
            return self._parse_rerank
        return self._parse_score

    async def _respond(self, request: Request) -> Response:
        edge, model, responses = self._config.edge, self._model, self._responses
        owner = request.scope[KEY_NAME]

        async def parse(body: bytes) -> ParsedRequest:
            before = await responses.before(owner, body)
            return parse_responses(body, edge, model, responses.own.of(owner), before=before)

        return await self._answering.answer(request, parse)

    async def _show_response(self, request: Request, name: str) -> Response:
        owner, responses = request.scope[KEY_NAME], self._responses
        elsewhere = await responses.find_elsewhere(owner, name)
        body = responses.own.of(owner).body(name) if elsewhere is None else elsewhere.body
        return Response(body, media_type=JSON_TYPE)

    async def _forget_response(self, request: Request, name: str) -> Response:
        await self._responses.forget(request.scope[KEY_NAME], name)
        return Response(to_json(DeletedResponse(id=name)), media_type=JSON_TYPE)

    # ---- everything else ------------------------------------------------------------------------

    async def _count_tokens(self, request: Request) -> Response:
        prompt = parse_count_tokens(await self._answering.read_body(request), self._model)
        async with asyncio.timeout(self._config.edge.request_timeout_s):
            token_ids = await self._edge.prompts.ids_of(prompt)
        counted = TokenCount(input_tokens=len(token_ids))
        return Response(to_json(counted), media_type=JSON_TYPE)

    async def _tokenize(self, request: Request) -> Response:
        call = parse_tokenize(await self._answering.read_body(request), self._model)
        async with asyncio.timeout(self._config.edge.request_timeout_s):
            token_ids = await self._edge.prompts.ids_of(call.prompt)
        answer = tokenize_answer(call, token_ids, self._model, self._edge.tokenizing)
        return Response(to_json(answer), media_type=JSON_TYPE)

    async def _detokenize(self, request: Request) -> Response:
        token_ids = parse_detokenize(await self._answering.read_body(request), self._model)
        answer = detokenize_answer(token_ids, self._edge.tokenizing)
        return Response(to_json(answer), media_type=JSON_TYPE)

    async def _show_openapi(self) -> Response:
        return Response(build_openapi("LAPS engine", VERSION), media_type=JSON_TYPE)

    async def _show_docs(self) -> Response:
        return HTMLResponse(docs_page(), headers=PAGE_HEADERS)

    async def _show_tokenizer(self) -> Response:
        """Answers with what the folder's tokenizer_config.json says, as vLLM does."""
        folder = Path(self._config.model.path)
        return JSONResponse(await asyncio.to_thread(describe_tokenizer, folder))

    async def _show_load(self) -> Response:
        """Answers with the requests of this replica that are under way."""
        return JSONResponse({"server_load": self._edge.generations.num_open})

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
        return HTMLResponse(laps_page(), headers=PAGE_HEADERS)

    async def _show_laps_status(self) -> Response:
        """Answers with the allocator's pools, queues and last moves; 503 while it is away."""
        edge = self._edge
        status = await edge.observation.laps_status()
        view = build_laps_view(
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
        # The client has left: Serve raises the first, and reading the rest of a body the second.
        if isinstance(error, TaskCancelledError | ClientDisconnect):
            self._metrics.count_disconnected()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        reply = reply_at(request.url.path, error)
        if reply.status >= 500 and not isinstance(error, EngineError | TimeoutError):
            logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        self._metrics.count_failed(reply.status)
        headers = reply.headers | (error.headers if isinstance(error, RateLimitError) else {})
        return Response(reply.body, reply.status, headers=headers, media_type=JSON_TYPE)

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        """Answers an unknown route or wrong method in the shape of every other error."""
        assert isinstance(error, StarletteHTTPException), f"registered for {type(error)} too"
        message = f"{error.detail}: {request.method} {request.url.path[:200]}"
        refused = RequestError(message, code="unknown_url", status=error.status_code)
        reply = reply_at(request.url.path, refused)
        return Response(reply.body, reply.status, headers=error.headers, media_type=JSON_TYPE)

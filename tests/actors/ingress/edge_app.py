"""A whole ingress without Ray: the real routes and parts, tokens from a script, one fake worker."""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
from fastapi import FastAPI

from actors.ingress.admission import Admission
from actors.ingress.auth import ApiKeys
from actors.ingress.composition import Edge, describe_embeddings
from actors.ingress.generation import GenerationCounters, GenerationJob, Generations
from actors.ingress.observation import Observation
from actors.ingress.pipeline import RequestPipeline
from actors.ingress.prompt_tokens import Batchers, PromptTokens
from actors.ingress.queue_limit import QueueLimit
from actors.ingress.rate_limits import RateLimits
from actors.ingress.replica_exchange import OtherReplicas
from actors.ingress.replica_responses import ReplicaResponses
from actors.ingress.routes import Api
from actors.ingress.stopping import Stopping
from actors.ingress.system_view import SystemView
from actors.lifecycle.deployment import DeploymentSpec
from actors.observability.metrics import IngressMetrics
from actors.observability.recent_ttft import RecentTtft
from actors.observability.tracing import NoTracing, Tracing
from actors.openai.chat_dialect import build_dialect
from actors.openai.responses.stored import StoredResponses
from actors.openai.served_model import ServedModel
from actors.routing.worker_links import WorkerLink
from actors.rpc.handles import WorkerHandle
from configs.load import PROJECT_ROOT, load_config
from configs.schema import AppConfig
from engine.clock import Clock, MonotonicClock
from engine.errors import CapacityError, WorkerError
from engine.messages import (
    Assign,
    LapsStatus,
    LoadReport,
    TokenizeReply,
    TokenizeRequest,
    TokenRecord,
    Topology,
)
from engine.models.spec import load_spec
from engine.plan import TokenLogprobs
from engine.request import Constraint, PromptLogprobs, PromptScores, RequestKey
from engine.text.chat_template import ChatTemplate, load_chat_template, read_template_text
from engine.text.prompt_encoder import Encoded, PromptEncoder
from engine.text.tokenizing import Tokenizing, load_tokenizer

MODEL_FOLDER = PROJECT_ROOT / "demo_model" / "laps-demo"
MAX_MODEL_LEN = 512
MIN_VOCAB_SIZE = 256  # every byte-level tokenizer has so many tokens
IDLE = LoadReport(queued_tokens=0, num_waiting=0, num_running=0, num_free_blocks=8, num_blocks=8)
ASSIGN = Assign(prefill_worker="unified-0", decode_worker=None, length_class="short")

Send = Callable[[httpx.AsyncClient], Awaitable[Any]]


@dataclass(slots=True)
class ScriptedWorkers:
    """Stands in for `Generations`: as many tokens as asked for, or as `num_tokens` says."""

    load: LoadReport = IDLE
    num_tokens: int | None = None
    error: Exception | None = None  # raised in place of the first token
    joins_before: int | None = None  # the token before which the KV has moved; None = it stays
    pause: Callable[[int], Coroutine[Any, Any, None]] | None = None  # before token i
    token_ids: Sequence[int] | None = None  # what is said; None = 100 and its followers
    stops: bool = False  # the last token ends the answer; else its length does
    waited_s: float | None = None  # in the worker's queue
    num_together: int = 1  # tokens that come at once
    num_attempts: int = 1

    def links(self) -> list[WorkerLink]:
        handle = cast("WorkerHandle", object())
        return [WorkerLink(name="unified-0", role="unified", handle=handle, load=self.load)]

    async def run(
        self,
        job: GenerationJob,
        on_placed: Callable[[Assign], None],
        on_joined: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[list[TokenRecord], None]:
        if self.error is not None:
            raise self.error
        for _ in range(self.num_attempts):
            on_placed(ASSIGN)
        if job.spec.params.max_tokens == 0:
            yield [_end_of_prompt(job)]
            return
        said = range(100, 100 + job.spec.params.max_tokens)
        num_tokens = min(self.num_tokens or job.spec.params.max_tokens, job.spec.params.max_tokens)
        token_ids = (self.token_ids or said)[:num_tokens]
        num_tokens = len(token_ids)
        waiting: list[TokenRecord] = []
        finish = "stop" if self.stops else "length"
        for index in range(num_tokens):
            is_last = index == num_tokens - 1
            if self.pause is not None:
                await self.pause(index)
            if index == self.joins_before:
                on_joined()
            waiting.append(
                TokenRecord(
                    key=RequestKey(job.request_id, job.child),
                    index=index,
                    token_id=token_ids[index],
                    logprobs=_logprobs(job, token_ids[index]),
                    num_cached_tokens=0 if index == 0 else None,
                    waited_s=self.waited_s if index == 0 else None,
                    finish=finish if is_last else None,
                    stop_token_id=token_ids[index] if is_last and self.stops else None,
                    prompt=_prompt_scores(job) if index == 0 else None,
                )
            )
            if len(waiting) == self.num_together or is_last:
                yield waiting
                waiting = []


def _end_of_prompt(job: GenerationJob) -> TokenRecord:
    """Of a request that asks for no token: each of its labels is half as likely as the last."""
    return TokenRecord(
        key=RequestKey(job.request_id, job.child),
        index=0,
        token_id=job.prompt_ids[-1],
        is_output=False,
        prompt=_prompt_scores(job),
        num_cached_tokens=0,
        finish="length",
    )


def _prompt_scores(job: GenerationJob) -> PromptScores | None:
    """What the request asked to know about its prompt, each token of which had a chance of half."""
    params = job.spec.params
    labels = [-math.log(2) * rank for rank, _ in enumerate(params.label_token_ids, 1)]
    if params.prompt_logprobs is None:
        return PromptScores(labels, []) if labels else None
    rest = job.prompt_ids[1:]
    top_ids = [
        [(token_id + rank) % MIN_VOCAB_SIZE for rank in range(params.prompt_logprobs)]
        for token_id in rest
    ]
    values = [-math.log(2) * (1 + rank) for rank in range(params.prompt_logprobs)]
    piece = PromptLogprobs(
        first=1,
        chosen=[-math.log(2)] * len(rest),
        ranks=[1] * len(rest),
        top_ids=top_ids,
        top_logprobs=[values] * len(rest),
    )
    return PromptScores(labels, [piece])


def _logprobs(job: GenerationJob, token_id: int) -> TokenLogprobs | None:
    """As many as asked for, the chosen token's best."""
    num = job.spec.params.logprobs
    if num is None:
        return None
    top_ids = [(token_id + rank) % MIN_VOCAB_SIZE for rank in range(num)]
    return TokenLogprobs(-0.25, top_ids, [-0.25 - rank for rank in range(num)])


class _Generations:
    """As much of `Generations` as the ingress touches."""

    def __init__(self, workers: ScriptedWorkers) -> None:
        self.links = workers
        self.run = workers.run
        self.counters = GenerationCounters()
        self.num_open = 0
        self.hasher = None  # no worker has said how it names blocks


class _CountingEncoder(PromptEncoder):
    """Counts the prompts that it was asked to encode."""

    num_calls = 0

    def encode_batch(self, requests: Sequence[TokenizeRequest]) -> list[Encoded]:
        self.num_calls += len(requests)
        return super().encode_batch(requests)


class _Batchers:
    """Encodes here."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder

    async def ask(self, request: TokenizeRequest) -> TokenizeReply:
        return TokenizeReply(token_ids=self._encoder.encode(request))

    async def check(self, _: Constraint) -> None:
        """Every constraint compiles."""


@cache
def _chat_template(folder: Path) -> ChatTemplate:
    return load_chat_template(folder)


async def _no_topology() -> Topology:
    raise WorkerError("there is no supervisor")


async def _beat_nobody(_: Topology) -> None:
    """There are no other actors."""


async def no_allocator() -> LapsStatus:
    """What an allocator that is away answers."""
    raise CapacityError("there is no allocator")


@dataclass(slots=True)
class EdgeApp:
    """The parts a test looks at."""

    edge: Edge
    app: FastAPI
    workers: ScriptedWorkers
    encoder: _CountingEncoder

    def ask(self, send: Send, server: tuple[str, int] = ("127.0.0.1", 8000)) -> Any:
        """Run `send` with a client that talks to the application in this process."""

        async def main() -> object:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            url = f"http://{server[0]}:{server[1]}"
            async with httpx.AsyncClient(transport=transport, base_url=url) as client:
                return await send(client)

        return asyncio.run(main())

    def post(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        """POST a completion; `_` in a header's name stands for `-`."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        whole = {"model": "tiny", "prompt": "hi there"} | body

        async def send(client: httpx.AsyncClient) -> httpx.Response:
            return await client.post("/v1/completions", json=whole, headers=sent)

        response: httpx.Response = self.ask(send)
        return response


def edge_app(
    overrides: dict[str, Any] | None = None,
    *,
    clock: Clock | None = None,
    tracing: Tracing | None = None,
    model_folder: Path = MODEL_FOLDER,
    num_embeddings: int | None = None,
    batchers: Batchers | None = None,
    generations: Generations | None = None,
    makes_embeddings: bool = False,
    others: OtherReplicas | None = None,
) -> EdgeApp:
    """An ingress with this configuration (dotted keys over the defaults), or with parts given.

    makes_embeddings: as `model_folder` says; else that is only a tokenizer's folder.
    """
    config = load_config(None, overrides or {})
    clock = clock or MonotonicClock()
    tokenizing = load_tokenizer(model_folder, num_embeddings)
    encoder = _CountingEncoder(tokenizing, _chat_template(model_folder))
    workers, own_batchers = ScriptedWorkers(), _Batchers(encoder)
    prompts = PromptTokens(encoder, batchers or cast("Batchers", own_batchers))
    generations = generations or cast("Generations", _Generations(workers))
    metrics = IngressMetrics("tiny", recent := RecentTtft(clock))
    model = _served_model(config, model_folder, tokenizing, makes_embeddings=makes_embeddings)
    edge = Edge(
        ingress_id="ingress-0",
        spec=DeploymentSpec(config=config, model="m", hash="h", block_key=b""),
        clock=clock,
        model=model,
        tokenizing=tokenizing,
        prompts=prompts,
        generations=generations,
        system=SystemView(_no_topology, lambda _: None, set, _beat_nobody),
        metrics=metrics,
        recent_ttft=recent,
        observation=Observation(metrics, generations, no_allocator),
        pipeline=RequestPipeline(
            model=model,
            tokenizing=tokenizing,
            prompts=prompts,
            generations=generations,
            metrics=metrics,
            clock=clock,
            timeout_s=config.edge.request_timeout_s,
            max_short_tokens=config.laps.laps_alloc_threshold,
        ),
        keys=ApiKeys(config.api.keys) if config.api.keys else None,
        admission=Admission(
            generations.links.links,
            QueueLimit(config.edge.max_queued_tokens),
            max_wait_s=config.edge.max_predicted_wait_s,
            max_short_tokens=config.laps.laps_length_threshold,
        ),
        stopping=Stopping(lambda: None),
        rate_limits=RateLimits(config.api.limits, clock),
        responses=_responses(config, others or OtherReplicas(), clock),
        tracing=tracing or NoTracing(),
    )
    return EdgeApp(edge=edge, app=Api(edge).app(), workers=workers, encoder=encoder)


def _responses(config: AppConfig, others: OtherReplicas, clock: Clock) -> ReplicaResponses:
    return ReplicaResponses(StoredResponses(config.api.stored_responses_bytes), others, clock)


def _served_model(
    config: AppConfig, folder: Path, tokenizing: Tokenizing, *, makes_embeddings: bool
) -> ServedModel:
    spec = load_spec(folder) if makes_embeddings else None
    return ServedModel(
        name="tiny",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=tokenizing.vocab_size,
        dialect=build_dialect(read_template_text(folder), config.api, tokenizing),
        embeddings=None if spec is None else describe_embeddings(config.api, spec),
    )


def busy(queued_tokens: int, queued_s: float | None = None) -> LoadReport:
    """A load with so much before the next prompt."""
    return msgspec.structs.replace(IDLE, queued_tokens=queued_tokens, queued_s=queued_s)

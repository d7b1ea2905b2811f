"""Builds the parts of one ingress replica, once the system can serve."""

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path

from actors.ingress.admission import Admission
from actors.ingress.auth import ApiKeys
from actors.ingress.generation import Generations
from actors.ingress.observation import Observation
from actors.ingress.pipeline import RequestPipeline
from actors.ingress.prompt_tokens import Batchers, PromptTokens
from actors.ingress.rate_limits import RateLimits
from actors.ingress.replica_exchange import OtherReplicas, ReplicaExchange
from actors.ingress.replica_responses import ReplicaResponses
from actors.ingress.stopping import Stopping
from actors.ingress.system_view import Peers, SystemView
from actors.lifecycle.deployment import DeploymentSpec, rendezvous_name
from actors.observability.metrics import IngressMetrics
from actors.observability.ray_metrics import RayMetrics, ray_gauge
from actors.observability.recent_ttft import RecentTtft
from actors.observability.tracing import Tracing, build_tracing
from actors.openai.chat_dialect import build_dialect
from actors.openai.responses.stored import StoredResponses
from actors.openai.served_model import EmbeddingSpace, ServedModel, served_names
from actors.rpc.server import listen_address
from configs.schema import ApiConfig, AppConfig
from engine.clock import Clock, MonotonicClock
from engine.messages import Topology
from engine.models.spec import ModelSpec, load_spec
from engine.text.chat_template import read_template_text
from engine.text.prompt_encoder import load_prompt_encoder
from engine.text.tokenizing import Tokenizing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The parts of a replica; `tasks` run for as long as it lives."""

    ingress_id: str
    spec: DeploymentSpec
    clock: Clock
    model: ServedModel
    tokenizing: Tokenizing
    prompts: PromptTokens
    generations: Generations
    system: SystemView
    metrics: IngressMetrics
    recent_ttft: RecentTtft
    observation: Observation
    pipeline: RequestPipeline
    keys: ApiKeys | None  # None = every client may ask
    admission: Admission
    stopping: Stopping
    rate_limits: RateLimits
    responses: ReplicaResponses
    tracing: Tracing
    tasks: tuple[asyncio.Task[None], ...] = ()

    def check(self) -> None:
        """Raises the error of a task that has ended; none should."""
        for task in self.tasks:
            if task.done():
                reason = "cancelled" if task.cancelled() else repr(task.exception())
                raise RuntimeError(f"a task of the ingress ended: {reason}")
        self.generations.links.check()


async def build_edge(spec: DeploymentSpec) -> Edge:
    """Returns when the system can serve. Raises ConfigError when it never will."""
    config, clock = spec.config, MonotonicClock()
    tracing = build_tracing(config.tracing, f"laps {served_names(config)[0]}", clock)
    ingress_id = f"ingress-{uuid.uuid4().hex}"
    peers = Peers(spec.namespace)
    generations = Generations(
        config,
        ingress_id=ingress_id,
        find_worker=peers.worker,
        find_allocator=peers.allocator,
        clock=clock,
    )
    batchers = Batchers(peers.batcher, patience_s=config.edge.place_timeout_s, clock=clock)
    system = _view_system(spec, peers, generations, batchers)
    folder = Path(config.model.path)
    encoder = await asyncio.to_thread(load_prompt_encoder, folder, load_spec(folder).vocab_size)
    prompts, tokenizing = PromptTokens(encoder, batchers), encoder.tokenizing
    model = _describe_model(config, tokenizing, await system.wait_ready())
    recent_ttft = RecentTtft(clock)
    metrics = IngressMetrics(model.name, recent_ttft, config.cache, config.speculation.drafter)
    limiting = await _build_limiting(config, ingress_id, peers, system, generations, clock)
    observation = Observation(
        metrics,
        generations,
        lambda: peers.laps_status(system.require_topology),
        exchange=limiting.exchange,
    )
    pipeline = RequestPipeline(
        model=model,
        tokenizing=tokenizing,
        prompts=prompts,
        generations=generations,
        metrics=metrics,
        clock=clock,
        timeout_s=config.edge.request_timeout_s,
        max_short_tokens=config.laps.laps_alloc_threshold,
    )
    _log_start(ingress_id, model.name, len(config.api.keys))
    return Edge(
        ingress_id=ingress_id,
        spec=spec,
        clock=clock,
        model=model,
        tokenizing=tokenizing,
        prompts=prompts,
        generations=generations,
        system=system,
        metrics=metrics,
        recent_ttft=recent_ttft,
        observation=observation,
        pipeline=pipeline,
        keys=ApiKeys(config.api.keys) if config.api.keys else None,
        admission=limiting.admission,
        stopping=Stopping(generations.end_all),
        rate_limits=limiting.rate_limits,
        responses=limiting.responses,
        tracing=tracing,
        tasks=_start_tasks(system, observation, limiting),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limiting:
    """What decides whether a request may be computed, and what else replicas share."""

    admission: Admission
    rate_limits: RateLimits
    responses: ReplicaResponses
    exchange: ReplicaExchange | None  # None = this replica is the only one

    def tasks(self) -> list[Coroutine[None, None, None]]:
        return [] if self.exchange is None else [self.exchange.run()]


def _start_tasks(
    system: SystemView, observation: Observation, limiting: _Limiting
) -> tuple[asyncio.Task[None], ...]:
    exporting = observation.publish_to(RayMetrics(ray_gauge))
    return tuple(map(asyncio.create_task, [system.follow(), exporting, *limiting.tasks()]))


async def _build_limiting(
    config: AppConfig,
    ingress_id: str,
    peers: Peers,
    system: SystemView,
    generations: Generations,
    clock: Clock,
) -> _Limiting:
    others = OtherReplicas()
    rate_limits = RateLimits(config.api.limits, clock)
    admission = Admission(
        generations.links.links,
        generations.queue_limit,
        max_wait_s=config.edge.max_predicted_wait_s,
        max_short_tokens=config.laps.laps_length_threshold,
        others=others,
    )
    stored = StoredResponses(config.api.stored_responses_bytes)
    responses = ReplicaResponses(stored, others, clock)
    exchange = None
    if config.edge.num_replicas > 1:
        exchange = ReplicaExchange(
            ingress_id,
            find_allocator=lambda: peers.allocator(system.require_topology().allocator),
            rate_limits=rate_limits,
            num_waiting_tokens=lambda: admission.num_waiting_tokens,
            note_exchange=admission.note_exchange,
            others=others,
            address=await responses.listen(listen_address(config)),
            clock=clock,
        )
        await exchange.introduce()  # the first request also finds what keys have left
    return _Limiting(
        admission=admission, rate_limits=rate_limits, responses=responses, exchange=exchange
    )


def _log_start(ingress_id: str, model: str, num_keys: int) -> None:
    whom = f"{num_keys} API keys" if num_keys else "everybody"
    logger.info("%s serves %s to %s", ingress_id, model, whom)


def _view_system(
    spec: DeploymentSpec, peers: Peers, generations: Generations, batchers: Batchers
) -> SystemView:
    """Builds the view of the system; it passes the supervisor's topology to all that follow it."""

    def follow(topology: Topology) -> None:
        generations.update(topology)
        batchers.update(topology.batchers)

    def connected() -> set[str]:
        return {link.name for link in generations.links.links() if link.is_up}

    async def beat(topology: Topology) -> None:
        await peers.beat([*topology.batchers, topology.allocator, rendezvous_name(spec.hash)])

    return SystemView(peers.topology, follow, connected, beat)


def _describe_model(config: AppConfig, tokenizing: Tokenizing, topology: Topology) -> ServedModel:
    """Describes the model by its folder and by the limits that its workers report."""
    name, *aliases = served_names(config)
    folder = Path(config.model.path)
    template = read_template_text(folder)
    lengths = [s.identity.max_model_len for s in topology.workers.values() if s.identity]
    return ServedModel(
        name=name,
        max_model_len=min(lengths),
        vocab_size=tokenizing.vocab_size,
        created_s=int(time.time()),
        aliases=tuple(aliases),
        dialect=build_dialect(template, config.api, tokenizing),
        embeddings=describe_embeddings(config.api, load_spec(folder)),
    )


def describe_embeddings(api: ApiConfig, spec: ModelSpec) -> EmbeddingSpace | None:
    """Describes the embeddings that the model makes; None = it generates."""
    pooling = spec.pooling
    if pooling is None:
        return None
    return EmbeddingSpace(
        num_dimensions=spec.hidden_size,
        is_normalised=pooling.is_normalised,
        can_shorten=pooling.can_shorten if api.matryoshka is None else api.matryoshka,
        short_dimensions=pooling.num_dimensions,
    )

"""Connects a worker's engine host to KV transfer, as sender or as receiver."""

import asyncio
from dataclasses import asdict

from actors.kv_transfer.channels.worker_channels import KvPieces, WorkerChannels, device_channels
from actors.kv_transfer.faulty_pieces import FaultyPieces
from actors.kv_transfer.peer_links import PeerLinks
from actors.kv_transfer.rank_pieces import RankPieces
from actors.kv_transfer.rank_pulls import RankPuller
from actors.kv_transfer.receiver import HandoffReceiver
from actors.kv_transfer.rendezvous import RayRendezvousClient
from actors.kv_transfer.sender import HandoffSender
from actors.lifecycle.deployment import rendezvous_name
from actors.rpc.handles import WorkerHandle, find_actor
from actors.rpc.server import listen_address
from actors.worker.engine_host import EngineHost
from actors.worker.kv_connector import KvConnector
from actors.worker.token_streams import TokenStreams
from engine.build import Engine
from engine.kv.transfer import BlockTerms, IncomingHandoffs, OutgoingEvent
from engine.messages import HandoffTotals
from engine.ranks.asides import Work
from engine.ranks.rank import Rank
from engine.ranks.shared_stores import part_of
from engine.request import Request, RequestKey

RENDEZVOUS_RPC_S = 5.0


class SendingConnector(KvConnector):
    """Connects a prefill worker: it sends the KV of finished prompts."""

    def __init__(self, host: EngineHost, engine: Engine) -> None:
        config = host.config

        async def find_peer(name: str) -> WorkerHandle:
            return WorkerHandle(name, await find_actor(name, host.namespace))

        self._outgoing = engine.outgoing
        pieces = _pieces(host, engine)
        channels = _channels(host, pieces)
        self._sender = HandoffSender(
            host.identity,
            config.handoff,
            engine=host,
            outgoing=engine.outgoing,
            links=PeerLinks(
                host.identity,
                config.handoff,
                channels=channels,
                find_peer=find_peer,
                clock=host.clock,
                is_on_gpu=pieces.is_on_gpu,
                offer=channels.offer,
            ),
            store=FaultyPieces(pieces, host.faults) if host.faults else pieces,
            clock=host.clock,
            on_failure=host.fail,
        )
        host.streams.report_handoffs(self._totals)

    def on_outgoing(self, event: OutgoingEvent) -> None:
        self._sender.on_event(event)

    def cancel(self, key: RequestKey) -> None:
        self._sender.cancel(key)

    def drop_ingress(self, ingress_id: str) -> None:
        self._sender.cancel_ingress(ingress_id)

    def keys_of(self, ingress_id: str) -> list[RequestKey]:
        return self._outgoing.keys_of(ingress_id)

    @property
    def num_handoffs(self) -> int:
        return len(self._sender)

    def owners(self) -> dict[str, list[int]]:
        return dict(self._outgoing.owners())

    def statistics(self) -> dict[str, object]:
        return {"sender": asdict(self._sender.statistics())}

    def _totals(self) -> HandoffTotals:
        counts = self._sender.statistics()
        return HandoffTotals(
            num_done=counts.num_sent,
            num_bytes=counts.num_bytes,
            num_failures=counts.num_retries + sum(counts.failures.values()),
        )


class AnnouncedJoins:
    """A scheduler that announces to the ingress when its request joins, which ends the handoff."""

    def __init__(
        self, engine: Engine, streams: TokenStreams, loop: asyncio.AbstractEventLoop
    ) -> None:
        """loop: that of `streams`; everything else here is called on the engine thread."""
        self._scheduler = engine.shared_scheduler
        self._streams = streams
        self._loop = loop

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    def is_short(self, num_known_tokens: int) -> bool:
        return self._scheduler.is_short(num_known_tokens)

    def terms_of_joining(
        self, request: Request, num_promised_rows: int, *, overtakes: bool
    ) -> BlockTerms | None:
        return self._scheduler.terms_of_joining(request, num_promised_rows, overtakes=overtakes)

    def make_way(self, request: Request) -> None:
        self._scheduler.make_way(request)

    def join(self, request: Request) -> None:
        self._scheduler.join(request)
        self._loop.call_soon_threadsafe(
            self._streams.announce_joined, request.ingress_id, request.key
        )

    def abort(self, key: RequestKey) -> bool:
        return self._scheduler.abort(key)


class ReceivingConnector(KvConnector):
    """Connects a decode worker: it reserves blocks, receives KV and starts requests on it."""

    def __init__(self, host: EngineHost, engine: Engine) -> None:
        config = host.config
        self._incoming = IncomingHandoffs(
            engine.shared_cache,
            hasher=engine.hasher,
            scheduler=AnnouncedJoins(engine, host.streams, asyncio.get_running_loop()),
            identity=host.identity,
            clock=host.clock,
            lease_s=config.handoff.lease_s,
            max_rows=engine.limits.scheduler.max_num_seqs,
        )
        pieces = _pieces(host, engine)
        self.receiver = HandoffReceiver(
            host.identity,
            config.handoff,
            engine=host,
            incoming=self._incoming,
            channels=_channels(host, pieces),
            store=pieces,
            on_grant=pieces.fence,
            refusal=host.draining.refusal,
        )

    def on_step(self) -> None:
        self.receiver.on_step()

    def cancel(self, key: RequestKey) -> None:
        self.receiver.cancel(key)

    def drop_ingress(self, ingress_id: str) -> None:
        self.receiver.cancel_ingress(ingress_id)

    @property
    def num_handoffs(self) -> int:
        return len(self._incoming)

    def owners(self) -> dict[str, list[int]]:
        return dict(self._incoming.owners())

    def statistics(self) -> dict[str, object]:
        return {
            "receiver": asdict(self.receiver.statistics()),
            "incoming": asdict(self._incoming.statistics()),
        }


def pull_heads(engine: Engine, rank: Rank) -> Work:
    """What a rank of a decode worker, not the first, does for its handoffs."""
    part = part_of(rank, engine.whole_layout)
    return RankPuller(part, KvPieces(engine.kv_store), index=rank.index).do


def _pieces(host: EngineHost, engine: Engine) -> KvPieces | RankPieces:
    """Of this worker's store, or of its ranks' stores."""
    if not engine.rank_stores:
        return KvPieces(engine.kv_store)
    return RankPieces(engine.rank_stores, host.steps, host.config.handoff.transfer_deadline_s)


def _channels(host: EngineHost, pieces: KvPieces | RankPieces) -> WorkerChannels:
    config, deployment_hash = host.config, host.name.rpartition(".")[2]
    return WorkerChannels(
        RayRendezvousClient(rendezvous_name(deployment_hash), host.namespace, RENDEZVOUS_RPC_S),
        address=listen_address(config),
        deadline_s=config.handoff.transfer_deadline_s,
        max_in_flight_bytes=config.handoff.max_in_flight_bytes,
        floors_gb_s=config.handoff.floors_gb_s,
        device=device_channels(
            pieces, config.handoff, host.asides if config.handoff.pull_by_ranks else None
        ),
    )

"""Connects a worker's engine host to KV transfer, as sender or as receiver."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, replace

import msgspec

from actors.kv_transfer.channels.worker_channels import (
    ByRanks,
    Pieces,
    WorkerChannels,
    device_channels,
)
from actors.kv_transfer.contracts import PieceBytes
from actors.kv_transfer.faulty_pieces import FaultyPieces
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.own_blocks import OwnBlockPieces
from actors.kv_transfer.peer_links import PeerLinks
from actors.kv_transfer.rank_links import Giver, GiversOffer, HeadGiver, Wires
from actors.kv_transfer.rank_pieces import OneRank, RankPieces
from actors.kv_transfer.rank_pulls import Linking, PullsByRanks, RankPuller
from actors.kv_transfer.receiver import HandoffReceiver
from actors.kv_transfer.rendezvous import RankCalls, RayRendezvousClient
from actors.kv_transfer.sender import HandoffSender
from actors.lifecycle.deployment import DeploymentSpec, rank_name, rendezvous_name
from actors.rpc.handles import WorkerHandle, find_actor
from actors.rpc.server import listen_address
from actors.worker.engine_host import EngineHost
from actors.worker.kv_connector import KvConnector
from actors.worker.token_streams import TokenStreams
from configs.schema import AppConfig
from engine.engine import Engine
from engine.kv.cache import BlockTerms
from engine.kv.transfer import DecodeScheduler, IncomingHandoffs, OutgoingEvent
from engine.messages import HandoffTotals
from engine.ranks.rank import Rank
from engine.ranks.rank_tasks import OneRankTasks, Work
from engine.ranks.shared_stores import part_of
from engine.request import Request, RequestKey

RENDEZVOUS_RPC_S = 5.0

Give = Callable[[bytes], PieceBytes | None]  # an order -> the heads, unless they went otherwise


class SendingConnector(KvConnector):
    """Connects a prefill worker: it sends the KV of finished prompts."""

    def __init__(self, host: EngineHost, engine: Engine) -> None:
        config, identity = host.config, host.identity_of(engine)

        async def find_peer(name: str) -> WorkerHandle:
            return WorkerHandle(name, await find_actor(name, host.namespace))

        self._outgoing = engine.outgoing
        pieces = _pieces(host, engine)
        self.give: Give | None = None  # None = ranks do not ask each other
        if config.handoff.pull_by_ranks:
            rank = Rank(0, max(1, len(engine.rank_stores)))
            self.give = give_heads(host.spec, engine, rank, host.name)
        channels = _channels(host, engine, pieces)
        self._sender = HandoffSender(
            identity,
            config.handoff,
            engine=host,
            outgoing=engine.outgoing,
            links=PeerLinks(
                identity,
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
            num_found_blocks=counts.num_found_blocks,
            num_failures=counts.num_retries + sum(counts.failures.values()),
        )


class AnnouncedJoins:
    """A scheduler that announces to the ingress when its request joins, which ends the handoff."""

    def __init__(
        self, scheduler: DecodeScheduler, streams: TokenStreams, loop: asyncio.AbstractEventLoop
    ) -> None:
        """loop: that of `streams`; everything else here is called on the engine thread."""
        self._scheduler = scheduler
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
        config, identity = host.config, host.identity_of(engine)
        loop = asyncio.get_running_loop()
        self._incoming = IncomingHandoffs(
            [
                replace(rank, scheduler=AnnouncedJoins(rank.scheduler, host.streams, loop))
                for rank in engine.joining_ranks
            ],
            hasher=engine.hasher,
            identity=identity,
            clock=host.clock,
            lease_s=config.handoff.lease_s,
            max_rows=engine.limits.scheduler.max_num_seqs,
        )
        pieces = _pieces(host, engine)
        self.receiver = HandoffReceiver(
            identity,
            config.handoff,
            engine=host,
            incoming=self._incoming,
            channels=_channels(host, engine, pieces),
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


def pull_heads(spec: DeploymentSpec, engine: Engine, rank: Rank, name: str) -> Work:
    """What a rank of a decode worker, not the first, does for its handoffs."""
    part, pieces = part_of(rank, engine.whole_layout), KvPieces(engine.kv_store)
    linking = _linking(spec.config, spec.namespace, name, pieces)
    return RankPuller(part, pieces, index=rank.index, linking=linking).do


def give_heads(spec: DeploymentSpec, engine: Engine, rank: Rank, name: str) -> Give:
    """What a rank of a prefill worker does for those that ask it for heads."""
    part, pieces = part_of(rank, engine.whole_layout), KvPieces(engine.kv_store)
    wires = _linking(spec.config, spec.namespace, name, pieces).wires
    return HeadGiver(part, pieces, wires).do


def _linking(config: AppConfig, namespace: str, name: str, pieces: KvPieces) -> Linking:
    """Of the rank with this name, a worker's or `rank_name`."""
    deployment_hash = name.rpartition(".")[2]
    board = RayRendezvousClient(rendezvous_name(deployment_hash), namespace, RENDEZVOUS_RPC_S)
    wires = Wires(
        rendezvous=board,
        address=listen_address(config),
        config=config.handoff,
        device=pieces.device,
    )
    # A wire meets its other end within a deadline, and connects within another.
    timeout_s = 2 * config.handoff.transfer_deadline_s + RENDEZVOUS_RPC_S
    return Linking(wires=wires, find=RankCalls(namespace, timeout_s).find, reader=name)


def _pieces(host: EngineHost, engine: Engine) -> Pieces:
    """Of this worker's store, or of its ranks' stores."""
    handoff = host.config.handoff
    if not engine.rank_stores:
        return KvPieces(engine.kv_store, names_blocks=handoff.pull_by_ranks)
    stores, deadline_s = engine.rank_stores, handoff.transfer_deadline_s
    if engine.has_own_blocks:
        return OwnBlockPieces(stores, host.steps, deadline_s)
    return RankPieces(stores, host.steps, deadline_s, names_blocks=handoff.pull_by_ranks)


def _channels(host: EngineHost, engine: Engine, pieces: Pieces) -> WorkerChannels:
    config, deployment_hash = host.config, host.name.rpartition(".")[2]
    return WorkerChannels(
        RayRendezvousClient(rendezvous_name(deployment_hash), host.namespace, RENDEZVOUS_RPC_S),
        address=listen_address(config),
        deadline_s=config.handoff.transfer_deadline_s,
        max_in_flight_bytes=config.handoff.max_in_flight_bytes,
        floors_gb_s=config.handoff.floors_gb_s,
        device=device_channels(pieces, config.handoff),
        by_ranks=_by_ranks(host, engine, pieces),
    )


def _by_ranks(host: EngineHost, engine: Engine, pieces: Pieces) -> ByRanks | None:
    """None = rank 0 moves the heads of all ranks."""
    if not host.config.handoff.pull_by_ranks:
        return None
    assert not isinstance(pieces, OwnBlockPieces), "refused with DP attention"
    size, whole = max(1, len(engine.rank_stores)), engine.whole_layout
    if host.role == "prefill":
        names = [host.name, *(rank_name(host.name, rank) for rank in range(1, size))]
        givers = [Giver(part_of(Rank(i, size), whole), name) for i, name in enumerate(names)]
        offer = GiversOffer(engine.cache.num_blocks, givers)
        return ByRanks(offer=msgspec.msgpack.encode(offer))
    own = pieces if isinstance(pieces, KvPieces) else KvPieces(engine.kv_store)
    linking = _linking(host.config, host.namespace, host.name, own)
    puller = RankPuller(part_of(Rank(0, size), whole), own, linking=linking)
    all_of = OneRank(pieces) if isinstance(pieces, KvPieces) else pieces
    return ByRanks(pulls=PullsByRanks(all_of, host.rank_tasks or OneRankTasks(), puller))

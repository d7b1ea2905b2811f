"""Two ends of a KV channel as Ray actors, for tests: bare, and with sender and receiver on top."""

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import starmap
from typing import Any, TypeVar

import numpy as np
import ray
import torch

from actors.kv_transfer.channels.gloo_pair import GlooReceiver
from actors.kv_transfer.channels.worker_channels import WorkerChannels
from actors.kv_transfer.contracts import Channels, ReceiveChannel, SendChannel
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.peer_links import PeerLinks
from actors.kv_transfer.receiver import HandoffReceiver
from actors.kv_transfer.rendezvous import RayRendezvousClient
from actors.kv_transfer.sender import HandoffSender
from actors.rpc.handles import WorkerHandle
from actors.rpc.server import CallServer, Handler
from configs.schema import HandoffConfig
from engine.clock import MonotonicClock
from engine.errors import WorkerError
from engine.kv.cache import BlockCache, BlockTerms
from engine.kv.hashes import RequestHasher
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.kv.transfer import IncomingHandoffs, JoiningRank, OutgoingEvent, OutgoingHandoffs
from engine.messages import (
    CancelTransfer,
    ChannelKind,
    FailureRecord,
    PairRequest,
    PieceHeader,
    PieceReply,
    RenewLease,
    ReserveRequest,
    Role,
    WorkerIdentity,
    decode,
    encode,
)
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from tests.actors.kv_transfer.corrupting_pieces import CorruptingPieces

T = TypeVar("T")

NAMESPACE = "channel-tests"
LAYOUT = KvLayout.with_heads(
    num_layers=3, block_size=16, num_kv_heads=2, head_dim=24, dtype="bfloat16"
)
NUM_BLOCKS = 600


def identity(name: str, role: Role) -> WorkerIdentity:
    return WorkerIdentity(
        name=name,
        incarnation=f"{name}-{time.monotonic_ns()}",
        role=role,
        model="m",
        layout=LAYOUT,
        max_model_len=NUM_BLOCKS * 16,
        pid=1,
    )


def channels(board: str, deadline_s: float, max_in_flight_bytes: int = 8 * 2**20) -> WorkerChannels:
    return WorkerChannels(
        RayRendezvousClient(board, NAMESPACE, rpc_timeout_s=deadline_s),
        address="127.0.0.1",
        deadline_s=deadline_s,
        max_in_flight_bytes=max_in_flight_bytes,
    )


class Side:
    """One end of bare channels."""

    def __init__(self) -> None:
        self._sending: SendChannel | None = None
        self._receiving: ReceiveChannel | None = None
        self.received: dict[int, bytes] = {}

    async def open(
        self, board: str, deadline_s: float, kind: ChannelKind, epoch: int, *, sends: bool
    ) -> str:
        """ "open", or the error."""
        ends = channels(board, deadline_s)
        request = PairRequest(
            sender=identity("p", "prefill"),
            channel=kind,
            epoch=epoch,
            rendezvous_key=f"test/{epoch}/",
        )
        try:
            if sends:
                self._sending = await ends.open_send(request)
            else:
                self._receiving = await ends.open_receive(request)
        except WorkerError as error:
            return f"{type(error).__name__}: {error.message}"
        return "open"

    async def send(self, peer: Any, seed: int, num_bytes: int) -> str:
        """`peer` None: the piece's header reaches nobody."""
        data = random_bytes(seed, num_bytes)
        assert self._sending is not None

        async def deliver(seq: int, payload: list[Any]) -> PieceReply:
            if peer is None:
                await asyncio.Event().wait()
            outcome = await peer.receive.remote(seq, num_bytes, payload)
            return PieceReply(outcome="accepted" if outcome == "ok" else "failed", reason=outcome)

        try:
            reply = await self._sending.send(data if num_bytes else None, deliver)
        except WorkerError as error:
            return f"{type(error).__name__}: {error.message}"
        return reply.outcome

    async def receive(self, seq: int, num_bytes: int, payload: list[Any]) -> str:
        assert self._receiving is not None
        if not self._receiving.claim(seq):
            return "twice"
        try:
            data = await self._receiving.receive(seq, num_bytes, payload)
        except WorkerError as error:
            return f"{type(error).__name__}: {error.message}"
        self.received[seq] = data.tobytes()
        return "ok"

    async def hasten(self, deadline_s: float) -> None:
        """From now on, for the receiving end of a gloo pair."""
        assert isinstance(self._receiving, GlooReceiver)
        self._receiving._connection._wire._deadline_s = deadline_s

    async def put(self, seed: int, num_bytes: int) -> list[Any]:
        return [ray.put(random_bytes(seed, num_bytes))]

    async def take(self, seq: int) -> bytes:
        return self.received.pop(seq)

    async def close(self) -> None:
        for channel in (self._sending, self._receiving):
            if channel is not None:
                await channel.close()
        self._sending = self._receiving = None


def random_bytes(seed: int, num_bytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


class _LoopEngine:
    async def call(self, fn: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        return fn()


class PrefillSide:
    """A prefill worker without a model: its prompts' KV is random."""

    def __init__(self, board: str, decode_side: Any, config: HandoffConfig) -> None:
        self._cache = BlockCache(NUM_BLOCKS, enable_prefix_caching=True, protected_share=0.8)
        self._store = KvStore(LAYOUT, num_blocks=NUM_BLOCKS, device=torch.device("cpu"))
        self._pieces = CorruptingPieces(self._store)
        self._loop = asyncio.get_event_loop()
        self._outgoing = OutgoingHandoffs(self._cache, self._notify)
        self._failures: dict[str, FailureRecord] = {}
        me = identity("prefill-0", "prefill")
        clock = MonotonicClock()

        async def find(name: str) -> WorkerHandle:
            return WorkerHandle(name, decode_side)

        ends: Channels = channels(board, config.transfer_deadline_s)
        self._sender = HandoffSender(
            me,
            config,
            engine=_LoopEngine(),
            outgoing=self._outgoing,
            links=PeerLinks(me, config, channels=ends, find_peer=find, clock=clock),
            store=self._pieces,
            clock=clock,
            on_failure=self._on_failure,
        )

    def _notify(self, event: OutgoingEvent) -> None:
        self._loop.call_soon(self._sender.on_event, event)

    def _on_failure(self, ingress_id: str, record: FailureRecord) -> None:
        self._failures[record.key.request_id] = record

    async def hand_over(self, name: str, num_tokens: int) -> list[int]:
        """Compute a prompt and hand it over; returns the digests of its blocks."""
        request = Request(
            spec=RequestSpec(params=SamplingParams(max_tokens=5)),
            key=RequestKey(name),
            ingress_id="i",
            tokens=[hash((name, i)) % 50_000 for i in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            arrival_s=0.0,
            decode_worker="decode-0",
        )
        self._outgoing.start(request)
        block_ids = self._cache.allocate(LAYOUT.num_blocks_for(num_tokens))
        assert block_ids is not None
        self._store.tensor[block_ids] = torch.randn(
            len(block_ids), *LAYOUT.block_shape, dtype=torch.bfloat16
        )
        request.block_ids, request.num_computed_tokens = block_ids, num_tokens
        request.tokens.append(1)
        digests = self._store.digest(block_ids)
        self._store.digests.keep(block_ids, digests)
        self._outgoing.add(request)
        return digests

    async def settled(self, name: str) -> str:
        """Wait for the end of every handoff; "sent" or why this one failed."""
        while len(self._sender):  # noqa: ASYNC110 - the sender has no event for tests
            await asyncio.sleep(0.005)
        failure = self._failures.get(name)
        return "sent" if failure is None else failure.reason

    async def set_corrupting(self, is_on: bool) -> None:
        self._pieces.is_on = is_on

    async def statistics(self) -> dict[str, Any]:
        statistics = self._sender.statistics()
        return {
            "held": self._cache.num_held,
            "retries": statistics.num_retries,
            "fallbacks": statistics.num_fallbacks,
            "bytes": statistics.num_bytes,
        }

    async def close(self) -> None:
        await self._sender.close()
        self._pieces.close()


class _Scheduler:
    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self.running: dict[RequestKey, Request] = {}
        self.num_waiting = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    def is_short(self, num_known_tokens: int) -> bool:
        return False

    def terms_of_joining(
        self, request: Request, num_promised_rows: int, *, overtakes: bool
    ) -> BlockTerms | None:
        if self.num_waiting:
            return None
        return BlockTerms(num_spare_blocks=self.num_running + num_promised_rows)

    def make_way(self, request: Request) -> None:
        """Nobody is preempted."""

    def join(self, request: Request) -> None:
        self.running[request.key] = request

    def abort(self, key: RequestKey) -> bool:
        request = self.running.pop(key, None)
        if request is not None:
            self._cache.release(request.block_ids)
        return request is not None


class DecodeSide:
    """A decode worker without a model, with the remote surface of the real one."""

    def __init__(self, board: str, config: HandoffConfig) -> None:
        me = identity("decode-0", "decode")
        self._cache = BlockCache(NUM_BLOCKS, enable_prefix_caching=True, protected_share=0.8)
        self._store = KvStore(LAYOUT, num_blocks=NUM_BLOCKS, device=torch.device("cpu"))
        self._pieces = KvPieces(self._store)
        self._scheduler = _Scheduler(self._cache)
        self._incoming = IncomingHandoffs(
            [JoiningRank(cache=self._cache, scheduler=self._scheduler)],
            hasher=RequestHasher(b"k" * 16, model="m", dtype="bfloat16", block_size=16),
            identity=me,
            clock=MonotonicClock(),
            lease_s=config.lease_s,
            max_rows=8,
        )
        self._receiver = HandoffReceiver(
            me,
            config,
            engine=_LoopEngine(),
            incoming=self._incoming,
            channels=channels(board, config.transfer_deadline_s),
            store=self._pieces,
        )
        self._server = CallServer("127.0.0.1", self._calls())
        self._num_calls = 0  # of Ray, for pieces

    async def address(self) -> bytes:
        return await self._server.address()

    async def hang_up(self) -> None:
        """End all connections to here, whatever is under way on them."""
        await self._server.close()
        self._server = CallServer("127.0.0.1", self._calls())

    def _calls(self) -> dict[str, Handler]:
        return {
            "reserve": self.reserve,
            "receive_pieces": self._receive_pieces,
            "cancel_transfer": self.cancel_transfer,
            "renew": self.renew,
        }

    async def _receive_pieces(self, pieces: bytes) -> bytes:
        pairs = decode(pieces, list[tuple[PieceHeader, list[Any]]])
        return encode(await asyncio.gather(*starmap(self._receiver.receive_piece, pairs)))

    async def reserve(self, request: bytes) -> bytes:
        return encode(await self._receiver.reserve(decode(request, ReserveRequest)))

    async def open_pair(self, request: bytes) -> bytes:
        return encode(await self._receiver.open_pair(decode(request, PairRequest)))

    async def receive_pieces(self, headers: bytes, *payloads: list[Any]) -> bytes:
        self._num_calls += 1
        taking = map(self._receiver.receive_piece, decode(headers, list[PieceHeader]), payloads)
        return encode(await asyncio.gather(*taking))

    async def cancel_transfer(self, request: bytes) -> bytes:
        return encode(await self._receiver.cancel_transfer(decode(request, CancelTransfer)))

    async def renew(self, request: bytes) -> bytes:
        await self._receiver.renew(decode(request, RenewLease))
        return b""

    async def digests(self, name: str) -> list[int] | None:
        """Digests of what a committed request reads, which then ends; None if it is not here."""
        request = self._scheduler.running.get(RequestKey(name))
        if request is None:
            return None
        digests = self._store.digest(request.block_ids)
        self._scheduler.abort(request.key)
        return digests

    async def statistics(self) -> dict[str, Any]:
        return {
            "held": self._cache.num_held,
            "failures": self._receiver.statistics().failures,
            "epochs": self._receiver.statistics().num_epochs,
            "bytes": self._receiver.statistics().num_bytes,
            "calls": self._num_calls,
        }

    async def close(self) -> None:
        await self._receiver.close()
        await self._server.close()
        self._pieces.close()


class Host(Side):
    """One actor that can be any of the above, one after the other: processes are slow to start."""

    def __init__(self) -> None:
        super().__init__()
        self._prefill: PrefillSide | None = None
        self._decode: DecodeSide | None = None

    async def start_prefill(self, board: str, decode_side: Any, config: HandoffConfig) -> None:
        self._prefill = PrefillSide(board, decode_side, config)

    async def start_decode(self, board: str, config: HandoffConfig) -> None:
        self._decode = DecodeSide(board, config)

    async def ping(self) -> str:
        return "here"

    async def threads(self) -> list[str]:
        """Threads of ours that are alive."""
        return [t.name for t in threading.enumerate() if t.name.startswith("kv-")]

    async def num_references(self) -> int:
        worker: Any = ray._private.worker.global_worker
        return len(worker.core_worker.get_all_reference_counts())

    async def prefill(self, verb: str, *arguments: Any) -> Any:
        return await getattr(self._prefill, verb)(*arguments)

    async def decode(self, verb: str, *arguments: Any) -> Any:
        return await getattr(self._decode, verb)(*arguments)

    # the remote surface of a decode worker

    async def address(self) -> bytes:
        return await self._decoding.address()

    async def open_pair(self, request: bytes) -> bytes:
        return await self._decoding.open_pair(request)

    async def receive_pieces(self, headers: bytes, *payloads: list[Any]) -> bytes:
        return await self._decoding.receive_pieces(headers, *payloads)

    @property
    def _decoding(self) -> DecodeSide:
        assert self._decode is not None
        return self._decode

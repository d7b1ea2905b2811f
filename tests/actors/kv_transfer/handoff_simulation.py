"""A prefill and a decode worker in one process, on virtual time, with faults on demand.

The channel is a dictionary and the KV store an array of bytes; everything else is the real code.
"""

import asyncio
import random
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np

from actors.kv_transfer.contracts import PieceBytes, StagedPiece
from actors.kv_transfer.peer_links import PeerLinks, no_offer
from actors.kv_transfer.receiver import HandoffReceiver
from actors.kv_transfer.sender import HandoffSender
from configs.schema import HandoffConfig
from engine.errors import HandoffError, WorkerError
from engine.kv.cache import BlockCache, check_blocks
from engine.kv.transfer import OutgoingEvent, OutgoingHandoffs
from engine.messages import ChannelKind, FailureRecord, Role, WorkerIdentity
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from tests.engine.kv.handoff_world import (
    BLOCK_SIZE,
    LAYOUT,
    RECEIVER,
    SENDER,
    Decode,
    key_of,
)
from tests.harness.handoff_network import CONFIG, FakeChannels, FakePeer, Faults
from tests.harness.virtual_time import run_virtual

T = TypeVar("T")

FIRST_TOKEN = 42


class LoopEngine:
    """The engine thread, simulated: calls run one at a time, a little later, between two steps."""

    def __init__(self) -> None:
        self.between_steps = asyncio.Event()
        self.between_steps.set()

    async def call(self, fn: Callable[[], T]) -> T:
        await asyncio.sleep(0.001)
        await self.between_steps.wait()
        return fn()


class MemoryPieces:
    """A KV store of bytes: [num_blocks, block_bytes]."""

    def __init__(self, num_blocks: int, seed: int, faults: Faults) -> None:
        self._faults = faults
        rng = np.random.default_rng(seed)
        shape = (num_blocks, LAYOUT.block_bytes)
        self.blocks = rng.integers(0, 256, size=shape, dtype=np.uint8)

    async def read(self, block_ids: Sequence[int]) -> StagedPiece:
        await asyncio.sleep(0.001)
        data = self.blocks[list(block_ids)].reshape(-1)
        return StagedPiece(data=data, digests=_digests(data))

    async def write(self, block_ids: Sequence[int], piece: StagedPiece) -> bool:
        await asyncio.sleep(0.001)
        number, self._faults.num_writes = self._faults.num_writes, self._faults.num_writes + 1
        if number in self._faults.fail_write:
            raise HandoffError("rank 1: a wire broke")
        if _digests(piece.data) != piece.digests:
            return False
        self.blocks[list(block_ids)] = piece.data.reshape(len(block_ids), -1)
        return True


def _digests(data: PieceBytes) -> list[int]:
    return [zlib.crc32(block.tobytes()) for block in data.reshape(-1, LAYOUT.block_bytes)]


class ScrubbingCache(BlockCache):
    """Whatever is read after it was let go of reads garbage."""

    def __init__(self, num_blocks: int, pieces: MemoryPieces) -> None:
        super().__init__(num_blocks, enable_prefix_caching=True, protected_share=0.8)
        self._pieces = pieces

    def release(self, block_ids: Sequence[int]) -> None:
        super().release(block_ids)
        for block_id in block_ids:
            if self.num_references(block_id) == 0:
                self._pieces.blocks[block_id] = 0xEE


# ---- the two workers ----------------------------------------------------------------------------


class World:
    """P and D, and what became of every request. Create inside the loop."""

    is_on_gpu = False
    first_block = 0  # of P, as its events and books number it

    def __init__(
        self,
        decode_side: Decode,
        faults: Faults | None = None,
        *,
        config: HandoffConfig = CONFIG,
        seed: int = 0,
        outgoing_class: type[OutgoingHandoffs] = OutgoingHandoffs,
        sender_class: type[HandoffSender] = HandoffSender,
    ) -> None:
        self.faults = faults or Faults()
        self.decode = decode_side
        self.clock = decode_side.clock
        self.config = config
        self.channels = self.new_channels()
        self.failures: dict[RequestKey, FailureRecord] = {}
        self.kv: dict[RequestKey, PieceBytes] = {}  # what P computed
        self.computing: dict[RequestKey, Request] = {}  # with blocks, before they are added
        self._seed = seed
        self._classes = outgoing_class, sender_class
        self.start_receiver(decode_side, RECEIVER)
        self.start_sender(SENDER)

    def start_receiver(self, decode_side: Decode, identity: WorkerIdentity) -> None:
        """A decode worker, in place of an earlier one."""
        self.decode, self.decode_engine = decode_side, LoopEngine()
        self.decode_pieces = self.new_pieces("decode", decode_side.cache.num_blocks, self._seed + 1)
        self.receiver = HandoffReceiver(
            identity,
            self.config,
            engine=self.decode_engine,
            incoming=decode_side.incoming,
            channels=self.channels,
            store=self.decode_pieces,
            on_grant=self.on_grant,
        )
        self.peer = FakePeer(self.receiver, self.faults)

    def start_sender(self, identity: WorkerIdentity) -> None:
        """A prefill worker, in place of an earlier one."""
        outgoing_class, sender_class = self._classes
        self.prefill_engine = LoopEngine()
        self.prefill_pieces = self.new_pieces("prefill", 64, self._seed)
        self.prefill_cache = ScrubbingCache(64, self.prefill_pieces)
        self.computing.clear()
        self.outgoing = outgoing_class(
            self.prefill_cache, self._notify, first_block=self.first_block
        )
        self.sender = sender_class(
            identity,
            self.config,
            engine=self.prefill_engine,
            outgoing=self.outgoing,
            links=PeerLinks(
                identity,
                self.config,
                channels=self.channels,
                find_peer=self._find,
                clock=self.clock,
                is_on_gpu=self.is_on_gpu,
                offer=self.offer,
            ),
            store=self.prefill_pieces,
            clock=self.clock,
            on_failure=self._on_failure,
        )

    def new_channels(self) -> FakeChannels:
        return FakeChannels(self.faults)

    def offer(self, kind: ChannelKind) -> bytes:
        """What P says of its store when it opens a channel."""
        return no_offer(kind)

    def new_pieces(self, role: Role, num_blocks: int, seed: int) -> MemoryPieces:
        return MemoryPieces(num_blocks, seed, self.faults)

    def on_grant(self) -> None:
        """D has reserved blocks."""

    async def _find(self, name: str) -> FakePeer:
        if self.peer.is_dead:
            raise WorkerError(f"{name} is not running")
        return self.peer

    def _notify(self, event: OutgoingEvent) -> None:
        asyncio.get_running_loop().call_soon(self.sender.on_event, event)

    def _on_failure(self, ingress_id: str, record: FailureRecord) -> None:
        assert ingress_id == "ingress-0"
        assert record.key not in self.failures, "reported twice"
        self.failures[record.key] = record

    # ---- what P's scheduler does

    def start(
        self, number: int, token_ids: Sequence[int], *, deadline_s: float | None = None
    ) -> Request:
        request = self.build(number, token_ids, deadline_s=deadline_s)
        self.outgoing.start(request)
        return request

    def build(
        self, number: int, token_ids: Sequence[int], *, deadline_s: float | None = None
    ) -> Request:
        return Request(
            spec=RequestSpec(params=SamplingParams(max_tokens=9), deadline_s=deadline_s),
            key=key_of(number),
            ingress_id="ingress-0",
            tokens=list(token_ids),
            num_prompt_tokens=len(token_ids),
            arrival_s=0.0,
            decode_worker="decode-0",
        )

    def hit(self, request: Request, num_tokens: int) -> None:
        """P's prefix cache has that much of a prompt that has not started."""
        self._write(request, num_tokens)
        request.num_indexed_blocks = num_tokens // BLOCK_SIZE

    def compute(self, request: Request, num_tokens: int) -> None:
        """A chunk ends `num_tokens` into the prompt; the first one takes all blocks."""
        self.hit(request, num_tokens)
        self.outgoing.advance(request)

    def preempt(self, request: Request) -> None:
        """The prompt will compute from its start, in other blocks."""
        self.outgoing.retract(request.key)
        self._release_blocks(request)

    def drop(self, request: Request) -> None:
        """The request ends before its prompt."""
        self.outgoing.drop(request.key)
        self._release_blocks(request)

    def finish(self, request: Request) -> None:
        num_tokens = request.num_known_tokens
        self._write(request, num_tokens)
        request.num_drafter_tokens = num_tokens // 2  # of any number
        request.tokens.append(FIRST_TOKEN)
        self.kv[request.key] = self.prefill_pieces.blocks[request.block_ids].copy()
        del self.computing[request.key]
        self.outgoing.add(request)

    def _write(self, request: Request, num_tokens: int) -> None:
        if not request.block_ids:
            num_blocks = -(-request.num_known_tokens // BLOCK_SIZE)
            block_ids = self.prefill_cache.allocate(num_blocks)
            assert block_ids is not None
            self.computing[request.key] = request
            random.Random(num_blocks).shuffle(block_ids)
            request.block_ids = block_ids
        num_written = request.num_computed_tokens // BLOCK_SIZE
        for i in range(num_written, -(-num_tokens // BLOCK_SIZE)):  # equal prefixes, equal KV
            prefix = tuple(request.tokens[: min((i + 1) * BLOCK_SIZE, num_tokens)])
            rng = np.random.default_rng(abs(hash(prefix)))
            block = rng.integers(0, 256, LAYOUT.block_bytes)
            self.prefill_pieces.blocks[request.block_ids[i]] = block
        request.num_computed_tokens = num_tokens

    def _release_blocks(self, request: Request) -> None:
        self.computing.pop(request.key, None)  # it may have none yet
        self.prefill_cache.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = request.num_indexed_blocks = 0

    # ---- what must hold

    async def until(self, is_true: Callable[[], bool], limit_s: float = 1000.0) -> None:
        """Let things happen until `is_true`, in virtual time."""
        end_s = self.clock.now_s() + limit_s
        while not is_true():
            assert self.clock.now_s() < end_s, "it did not happen"
            await asyncio.sleep(0.005)

    async def settled(self) -> None:
        await asyncio.sleep(0)  # events of the scheduler reach the sender first
        await self.until(lambda: len(self.sender) == 0)

    def check_arrived(self, request: Request) -> Request:
        """The request runs at D, and reads there what P computed."""
        arrived = self.decode.scheduler.running[request.key]
        assert arrived.tokens == request.tokens
        assert arrived.num_drafter_tokens == request.num_drafter_tokens
        found = self.decode_pieces.blocks[arrived.block_ids]
        assert np.array_equal(found, self.kv[request.key]), "D reads what P did not compute"
        assert request.key not in self.failures
        return arrived

    def check_books(self) -> None:
        self.decode.check()
        computing = [(f"computes {key}", r.block_ids) for key, r in self.computing.items()]
        outgoing = [
            (name, [block_id - self.first_block for block_id in block_ids])
            for name, block_ids in self.outgoing.owners()
        ]
        check_blocks(self.prefill_cache, [*outgoing, *computing])

    async def close(self) -> None:
        """Shut both down and look for anything that stayed."""
        await asyncio.sleep(0)
        await self.sender.close()
        await self.receiver.close()
        self.check_books()
        assert len(self.outgoing) == 0
        assert self.prefill_cache.num_held == 0
        assert self.channels.num_open == 0
        assert self.sender.statistics().num_handoffs == 0
        assert self.sender.statistics().num_channels == 0
        statistics = self.receiver.statistics()
        assert statistics.num_waiting == statistics.num_channels == 0
        assert statistics.num_pieces_under_way == 0
        assert len(self.decode.incoming) == 0
        for key in list(self.decode.scheduler.running):
            self.decode.scheduler.finish(key)
        assert self.decode.cache.num_held == 0


def simulate(
    scenario: Callable[[World], Awaitable[None]],
    faults: Faults | None = None,
    *,
    decode_side: Decode | None = None,
    config: HandoffConfig = CONFIG,
    seed: int = 0,
    outgoing_class: type[OutgoingHandoffs] = OutgoingHandoffs,
    sender_class: type[HandoffSender] = HandoffSender,
) -> None:
    """Run a scenario on virtual time, then shut down and check that nothing is left."""
    side = decode_side or Decode(num_blocks=40, max_rows=8)

    async def main() -> None:
        world = World(
            side,
            faults,
            config=config,
            seed=seed,
            outgoing_class=outgoing_class,
            sender_class=sender_class,
        )
        await scenario(world)
        await world.close()

    run_virtual(side.clock, main())

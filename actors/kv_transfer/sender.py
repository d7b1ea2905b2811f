"""The prefill side of a handoff on its event loop: reserves, sends the blocks, releases them.

One task per request, from its first chunk to the acknowledgement:

    reserve -> pieces of what is computed, while the rest computes -> last piece -> acknowledged
            -> release

`ReservationClient` (reservations.py) reserves blocks at a decode worker and renews the lease. Full
blocks go as soon as their step was committed (pieces_out.py); the last piece has the first token,
so it goes after the prompt's end. A failed piece or channel starts the transfer over, once, on the
next channel (peer_links.py opens it; pieces_out.py says from where). After that, or if the decode
side is dead or refuses, the request is reported as failed and retryable. Cancelling never
interrupts a piece under way. Whatever happens, the blocks are released and the decode side is told.

All state here belongs to the event loop; `OutgoingHandoffs` is touched through `EngineCalls` only.
Knows no tensors.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.kv_transfer.contracts import DeclinedError, EngineCalls, Peer, PieceStore
from actors.kv_transfer.peer_links import PeerLinks
from actors.kv_transfer.pieces_out import ComputedBlocks, PieceSender, Transfer
from actors.kv_transfer.reservations import ReservationClient
from actors.kv_transfer.waits import EndedError, bounded, settle, unless_ended
from configs.schema import HandoffConfig
from engine.clock import Clock
from engine.errors import HandoffError, WorkerError
from engine.kv.transfer import (
    HandoffDropped,
    HandoffProgress,
    HandoffReady,
    HandoffRetracted,
    HandoffStarted,
    OutgoingEvent,
    OutgoingHandoffs,
    OutgoingOfRanks,
)
from engine.messages import (
    CancelTransfer,
    FailureRecord,
    PieceReply,
    Reservation,
    WorkerIdentity,
)
from engine.request import RequestKey

logger = logging.getLogger(__name__)

MAX_CANCELLED_KEYS = 4096


@dataclass(slots=True, kw_only=True, eq=False)
class _Handoff:
    started: HandoffStarted
    blocks: ComputedBlocks
    computed: asyncio.Future[None]  # the prompt is
    ended: asyncio.Future[None]  # cancelled, or dropped by the scheduler
    phase: str = "find"  # then "reserve", "compute", "transfer"
    is_known_to_peer: bool = False  # a call about this request was made

    @property
    def key(self) -> RequestKey:
        return self.started.key


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStatistics:
    """Sizes now, then counters since start."""

    num_handoffs: int
    num_channels: int
    num_sent: int  # handed over and acknowledged
    num_ended: int  # cancelled or finished on the prefill side
    num_pieces: int
    num_calls: int  # that carried them
    num_bytes: int
    num_found_blocks: int  # of these prompts, that decode workers had: not sent
    num_early_blocks: int  # sent while their prompt still computed
    num_retries: int
    num_fallbacks: int  # channels opened that were not of the favourite kind
    failures: dict[str, int] = field(default_factory=dict)  # phase -> requests given up


class HandoffSender:
    """Moves computed prompts to decode workers. Created on the event loop."""

    def __init__(
        self,
        identity: WorkerIdentity,
        config: HandoffConfig,
        *,
        engine: EngineCalls,
        outgoing: OutgoingHandoffs | OutgoingOfRanks,
        links: PeerLinks,
        store: PieceStore,
        clock: Clock,
        on_failure: Callable[[str, FailureRecord], None],
    ) -> None:
        """`on_failure(ingress_id, record)` is called on the event loop, blocks already released."""
        self._identity = identity
        self._config = config
        self._engine = engine
        self._outgoing = outgoing
        self._links = links
        self._pieces = PieceSender(identity, config, store)
        self._clock = clock
        self._on_failure = on_failure
        self._reservations = ReservationClient(identity, config, clock)
        self._handoffs: dict[RequestKey, _Handoff] = {}
        self._tasks: dict[RequestKey, asyncio.Task[None]] = {}
        self._engine_calls: set[asyncio.Task[None]] = set()  # they run beside the handoffs
        # Cancelled before their start came from the engine; oldest first.
        self._cancelled: dict[RequestKey, None] = {}
        self._is_closing = False
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    # ---- from the worker ------------------------------------------------------------------------

    def on_event(self, event: OutgoingEvent) -> None:
        """Takes an event of the scheduler; on the event loop, in the engine's order."""
        if isinstance(event, HandoffStarted):
            self._start(event)
            return
        handoff = self._handoffs.get(event.key)
        if handoff is None:
            return  # cancelled before; `OutgoingHandoffs` frees its blocks
        if isinstance(event, HandoffProgress):
            handoff.blocks.advance(event.block_ids)
        elif isinstance(event, HandoffRetracted):
            handoff.blocks.retract()
            self._let_go(handoff)
        elif isinstance(event, HandoffReady):
            handoff.blocks.complete(event)
            settle(handoff.computed, None)
        elif isinstance(event, HandoffDropped):
            settle(handoff.ended, None)

    def cancel(self, key: RequestKey) -> None:
        """Gives up a request in any phase; frees blocks when no piece reads them. Idempotent."""
        handoff = self._handoffs.get(key)
        if handoff is not None:
            settle(handoff.ended, None)
            return
        self._cancelled[key] = None  # its start may still be on the way from the engine
        if len(self._cancelled) > MAX_CANCELLED_KEYS:
            del self._cancelled[next(iter(self._cancelled))]

    def cancel_ingress(self, ingress_id: str) -> None:
        for handoff in self._handoffs.values():
            if handoff.started.ingress_id == ingress_id:
                settle(handoff.ended, None)

    async def close(self) -> None:
        """Cancel everything, wait until it is over (bounded by deadlines), close the channels."""
        self._is_closing = True
        for handoff in self._handoffs.values():
            settle(handoff.ended, None)
        await asyncio.gather(*self._tasks.values())
        await asyncio.gather(*self._engine_calls)
        await self._links.close()

    def __len__(self) -> int:
        return len(self._handoffs)

    def statistics(self) -> SenderStatistics:
        return SenderStatistics(
            num_handoffs=len(self._handoffs),
            num_channels=self._links.num_open,
            num_sent=self._counts["sent"],
            num_ended=self._counts["ended"],
            num_pieces=self._pieces.counts["pieces"],
            num_calls=self._pieces.num_calls,
            num_bytes=self._pieces.counts["bytes"],
            num_found_blocks=self._counts["found blocks"],
            num_early_blocks=self._pieces.counts["early blocks"],
            num_retries=self._counts["retries"],
            num_fallbacks=self._links.num_fallbacks,
            failures=dict(self._failures),
        )

    # ---- one handoff ----------------------------------------------------------------------------

    def _start(self, event: HandoffStarted) -> None:
        loop = asyncio.get_running_loop()
        handoff = _Handoff(
            started=event,
            blocks=ComputedBlocks(),
            computed=loop.create_future(),
            ended=loop.create_future(),
        )
        if self._is_closing or event.key in self._cancelled:
            settle(handoff.ended, None)
        self._handoffs[event.key] = handoff
        task = loop.create_task(self._run(handoff))
        self._tasks[event.key] = task
        task.add_done_callback(lambda _: self._tasks.pop(event.key, None))

    async def _run(self, handoff: _Handoff) -> None:
        """Runs the handoff of one request, from its first chunk to its end."""
        failure: FailureRecord | None = None
        try:
            await self._hand_over(handoff)
            self._count_sent(handoff)
        except EndedError:
            self._counts["ended"] += 1
            # First, because a silent decode worker must not hold blocks here.
            await self._release(handoff)
            await self._tell(handoff, "given up by the sender")
        except WorkerError as error:
            failure = await self._settle_failure(handoff, error)
        except Exception as error:
            logger.exception("%s: unexpected in the handoff", handoff.key)
            failure = await self._settle_failure(handoff, WorkerError(type(error).__name__))
        finally:
            await self._release(handoff)
            del self._handoffs[handoff.key]
        if failure is not None:
            self._on_failure(handoff.started.ingress_id, failure)

    def _count_sent(self, handoff: _Handoff) -> None:
        self._counts["sent"] += 1
        self._counts["found blocks"] += handoff.blocks.num_hit_blocks

    async def _hand_over(self, handoff: _Handoff) -> None:
        peer = await self._links.peer(handoff.started.decode_worker)
        handoff.phase = "reserve"
        handoff.is_known_to_peer = True
        reservation = await self._reservations.reserve(handoff.started, handoff.ended, peer)
        self._mark_reserved(handoff.key)
        handoff.blocks.expect(reservation)
        renewing = asyncio.ensure_future(self._reservations.keep(handoff.key, reservation, peer))
        try:
            await self._transfer(handoff, peer, reservation, renewing)
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    def _mark_reserved(self, key: RequestKey) -> None:
        """Notes the reservation for the scheduler's count, without waiting for the engine."""
        self._spawn(self._engine.call(lambda: self._outgoing.mark_reserved(key)))

    async def _release(self, handoff: _Handoff) -> None:
        """Frees the handoff's blocks; idempotent."""
        await self._engine.call(lambda: self._outgoing.release(handoff.key))

    def _let_go(self, handoff: _Handoff) -> None:
        """Frees retracted blocks when no piece reads them, in the order of the retractions."""

        async def let_go() -> None:
            async with handoff.blocks.reading:
                await self._engine.call(lambda: self._outgoing.let_go(handoff.key))

        self._spawn(let_go())

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        """Runs a task beside the handoffs; `close` waits for it."""
        task = asyncio.ensure_future(call)
        self._engine_calls.add(task)
        task.add_done_callback(self._engine_calls.discard)

    async def _settle_failure(self, handoff: _Handoff, error: WorkerError) -> FailureRecord | None:
        """Returns the failure to report; None if the request ended meanwhile or arrived after all.

        A prompt in progress is finished first, because the client gets its first token in any case:
        the failure is reported when its last block would have been sent.
        """
        started = handoff.started
        if not isinstance(error, DeclinedError):  # else it lives, and its connection is kept
            self._links.forget_peer(started.decode_worker)
        if await self._tell(handoff, error.message) == "committed":
            self._count_sent(handoff)
            return None
        try:
            await unless_ended(handoff.computed, handoff.ended)
        except EndedError:
            self._counts["ended"] += 1
            return None
        # Not before: a request that ended is often cancelled at the decode worker first.
        logger.warning("%s: no handoff to %s: %s", handoff.key, started.decode_worker, error)
        self._failures[handoff.phase] += 1
        if started.deadline_s is not None and self._clock.now_s() >= started.deadline_s:
            return FailureRecord(
                key=handoff.key, reason="the deadline passed", retryable=False, code="timeout"
            )
        return FailureRecord(key=handoff.key, reason=error.message, retryable=True)

    async def _tell(
        self, handoff: _Handoff, reason: str
    ) -> Literal["cancelled", "committed", "unknown"]:
        """Cancels what the decode side may hold of a request; "unknown" = it was not reached."""
        if not handoff.is_known_to_peer:
            return "unknown"
        request = CancelTransfer(key=handoff.key, reason=reason)
        try:
            peer = await self._links.peer(handoff.started.decode_worker)
            reply = await bounded(peer.cancel_transfer(request), self._config.transfer_deadline_s)
        except WorkerError as error:
            logger.info(
                "%s: not cancelled at the decode side, its lease ends it: %s", handoff.key, error
            )
            return "unknown"
        return reply.outcome

    # ---- transfer -------------------------------------------------------------------------------

    async def _transfer(
        self,
        handoff: _Handoff,
        peer: Peer,
        reservation: Reservation,
        renewing: asyncio.Future[None],
    ) -> None:
        """Send all that the decode side lacks as it is computed, and once more under a new epoch if
        that fails.

        Raises HandoffError when both tries failed, DeclinedError when the decode side has ended the
        reservation, WorkerError when it is dead.
        """
        link = self._links.link(handoff.started.decode_worker)
        transfer = Transfer(
            key=handoff.key,
            blocks=handoff.blocks,
            ended=handoff.ended,
            peer=peer,
            reservation=reservation,
        )
        has_failed = False
        reply: PieceReply | None = None
        while reply is None:
            handoff.phase = "compute"
            await unless_ended(handoff.blocks.wait_sendable(), handoff.ended, renewing)
            handoff.phase = "transfer"
            try:
                async with AsyncExitStack() as stack:
                    opening = stack.enter_async_context(link.use(peer))
                    channel = await unless_ended(opening, handoff.ended)
                    reply = await self._pieces.send_computed(transfer, channel)
            except HandoffError as error:
                if has_failed:
                    raise
                has_failed = True
                handoff.blocks.start_over()
                logger.warning("%s: sending again under a new epoch: %s", handoff.key, error)
                self._counts["retries"] += 1
        if reply.outcome != "committed":
            raise DeclinedError(f"{handoff.started.decode_worker} gave up: {reply.reason}")

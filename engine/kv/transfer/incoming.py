"""The decode side of a KV handoff: tracks reservations and which of their blocks have arrived.

    reserve ...... begin_write, end_write, ... , commit
    |<---------------- lease, renewed ---------->|

A request is handed to the scheduler, and so decoded from its blocks, only after every missing block
was written under the transfer's current epoch. Until then it can be cancelled or expire at any
time. If a piece is being written at that moment, the reservation becomes an *orphan*, and its
blocks are freed when the last write ends. An epoch is one incarnation of a channel; a newer epoch
restarts the transfer.

Where each rank of the worker has requests of its own (DP attention), a reservation is of one of
them, for good: its blocks, prefixes and row are that rank's. Blocks are told to others by numbers
of the whole worker.

Called on the engine thread. `begin_write`, `is_committed` and `is_live` may be called on any
thread, so that copying one piece never waits for the step that commits another. Knows no tensors,
channels or Ray; the caller has checked digests.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.clock import Clock
from engine.errors import HandoffError
from engine.kv.cache import BlockCache, BlockTerms
from engine.messages import (
    NotNow,
    PieceHeader,
    Refused,
    Reservation,
    ReserveRequest,
    WorkerIdentity,
)
from engine.rank_choice import RankLoad, choose_rank
from engine.request import Request, RequestKey


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockWrite:
    """Permission to write some blocks of a transfer, from `begin_write` to `end_write`."""

    transfer_id: str
    epoch: int
    first_block: int
    block_ids: list[int]

    @property
    def blocks(self) -> range:
        """Positions in the request's block list: [first_block, first_block + n)."""
        return range(self.first_block, self.first_block + len(self.block_ids))


# Number of finished keys that are remembered, to recognise late messages about them.
MAX_ENDED_KEYS = 8192
MAX_BUILT = 4  # refused requests that stay built; only the first few in line are asked about

Ending = Literal["committed", "cancelled", "expired"]


class DecodeScheduler(Protocol):
    """The scheduler that takes over committed requests."""

    @property
    def num_running(self) -> int: ...

    def is_short(self, num_known_tokens: int) -> bool:
        """Whether a request may overtake others within the reserve."""
        ...

    def terms_of_joining(
        self, request: Request, num_promised_rows: int, *, overtakes: bool
    ) -> BlockTerms | None:
        """Conditions for holding blocks for a request that is to join; None = not now.

        overtakes: whether a request before it was refused.
        """
        ...

    def make_way(self, request: Request) -> None:
        """Record that a request that is to join could not get a row or blocks."""
        ...

    def join(self, request: Request) -> None:
        """Take over a request whose KV is here, with its block references."""
        ...

    def abort(self, key: RequestKey) -> bool:
        """Remove a request and free what it holds; False if it is not there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoiningRank:
    """One rank's blocks and scheduler; of a worker whose ranks share all requests, the only one."""

    cache: BlockCache
    scheduler: DecodeScheduler
    first_block: int = 0  # the number, in the worker, of its first block

    def numbered(self, block_ids: Sequence[int]) -> list[int]:
        """The numbers of its blocks in the worker."""
        return [self.first_block + block_id for block_id in block_ids]


@dataclass(slots=True, kw_only=True, eq=False)
class IncomingTransfer:
    """Blocks [0, num_hit_blocks) were found here; [num_hit_blocks, num_blocks) are to arrive."""

    transfer_id: str
    sender: WorkerIdentity
    rank: JoiningRank
    request: Request  # holds all reserved blocks, of that rank
    num_hit_blocks: int
    expires_s: float
    epoch: int = 0  # of the channel in use; 0 = no piece has begun
    arrived: set[int] = field(default_factory=set)  # in this epoch
    writes: list[BlockWrite] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return len(self.request.block_ids)

    def release(self) -> None:
        self.rank.cache.release(self.request.block_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What one rank has for a request."""

    rank: JoiningRank
    hit_ids: list[int]
    num_new: int  # blocks
    load: RankLoad


class Hasher(Protocol):
    def extend(self, request: Request) -> None:
        """Append to `request.block_hashes` the hashes of its full blocks that are known by now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingStatistics:
    """Current sizes, then counters since start."""

    num_reservations: int
    num_orphans: int
    num_reserved_blocks: int  # of reservations and orphans
    num_reserved: int
    num_hit_blocks: int
    num_committed: int
    num_cancelled: int
    num_expired: int


class IncomingHandoffs:
    """Reservations from `reserve` until `commit`, cancellation or the end of the lease."""

    def __init__(
        self,
        ranks: Sequence[JoiningRank],
        *,
        hasher: Hasher,
        identity: WorkerIdentity,
        clock: Clock,
        lease_s: float,
        max_rows: int,
    ) -> None:
        """ranks: those that have requests of their own. max_rows: of each."""
        self._ranks = ranks
        self._hasher = hasher
        self._identity = identity
        self._clock = clock
        self._lease_s = lease_s
        self._max_rows = max_rows
        self._live: dict[RequestKey, IncomingTransfer] = {}
        self._orphans: dict[str, IncomingTransfer] = {}  # by transfer id
        # Guards the writes and the end of transfers. Only the engine thread changes `_live` and
        # `_orphans`, so it may read them without the lock.
        self._writes = threading.Lock()
        self._ended: dict[RequestKey, Ending] = {}  # oldest first, at most MAX_ENDED_KEYS
        self._counts: dict[Ending, int] = {"committed": 0, "cancelled": 0, "expired": 0}
        self._num_reserved = self._num_hit_blocks = 0
        # The requests built last, because waiting ones are asked about at every step.
        self._built: dict[RequestKey, tuple[ReserveRequest, Request]] = {}

    # ---- reservations ---------------------------------------------------------------------------

    def may_overtake(self, asked: ReserveRequest) -> bool:
        """Whether it may get a reservation although an earlier request was refused."""
        return self._ranks[0].scheduler.is_short(len(asked.token_ids))

    def reserve(
        self, asked: ReserveRequest, *, overtakes: bool = False
    ) -> Reservation | NotNow | Refused:
        """Hold blocks for all tokens of `asked`; blocks found in the prefix index need no transfer.

        Granted if a row will be free at commit and the scheduler's conditions leave enough blocks:
        requests that run or will run must be able to grow, and requests preempted here go first. If
        a short request is not granted, the scheduler is asked to make room for it.
        """
        if (reason := self._reason_to_refuse(asked)) is not None:
            return Refused(reason=reason)
        request = self._request_of(asked)
        places = [self._place(rank, request, overtakes) for rank in self._ranks]
        place = places[choose_rank([place.load for place in places])]
        rank = place.rank
        if not place.load.has_room:
            rank.scheduler.make_way(request)
            return NotNow()
        self._built.pop(asked.key, None)
        hit_ids = rank.cache.acquire_prefix(request.block_hashes)
        assert hit_ids == place.hit_ids, f"{asked.key}: {hit_ids} is not {place.hit_ids}"
        new_ids = rank.cache.allocate(place.num_new)
        assert new_ids is not None, f"{asked.key}: {place.num_new} blocks were counted as available"
        request.block_ids = hit_ids + new_ids
        request.num_indexed_blocks = len(hit_ids)
        self._num_reserved += 1
        self._num_hit_blocks += len(hit_ids)
        transfer = IncomingTransfer(
            transfer_id=f"{self._identity.incarnation}:{self._num_reserved}",
            sender=asked.sender,
            rank=rank,
            request=request,
            num_hit_blocks=len(hit_ids),
            expires_s=self._clock.now_s() + self._lease_s,
        )
        self._live[asked.key] = transfer
        return Reservation(
            transfer_id=transfer.transfer_id,
            num_blocks=transfer.num_blocks,
            num_hit_blocks=len(hit_ids),
            lease_s=self._lease_s,
        )

    def renew(self, key: RequestKey, transfer_id: str) -> None:
        """Extend the lease by its full length. Raises HandoffError if the reservation is gone."""
        self._find(key, transfer_id).expires_s = self._clock.now_s() + self._lease_s

    def cancel(self, key: RequestKey) -> Literal["cancelled", "committed"]:
        """End the reservation of `key`, or ensure that none is granted from now on.

        Returns "committed", and does nothing, if the request belongs to the scheduler already.
        """
        if self._ended.get(key) == "committed":
            return "committed"
        self._end(key, "cancelled")
        return "cancelled"

    def abort(self, key: RequestKey) -> None:
        """End `key` wherever it is: reserved here, or committed to the scheduler already."""
        self.cancel(key)
        for rank in self._ranks:
            rank.scheduler.abort(key)

    def expire(self) -> list[RequestKey]:
        """End every reservation whose lease has expired; returns their keys."""
        now_s = self._clock.now_s()
        keys = [key for key, transfer in self._live.items() if now_s >= transfer.expires_s]
        for key in keys:
            self._end(key, "expired")
        return keys

    # ---- pieces ---------------------------------------------------------------------------------

    def begin_write(self, header: PieceHeader) -> BlockWrite:
        """Give permission to write the blocks of one piece, and hold them until `end_write`.

        May be called on any thread. An epoch newer than the transfer's restarts the transfer.
        Raises HandoffError, without effect, for a transfer that is over, an older epoch, a newer
        epoch while a write of the older one is under way, blocks outside the missing ones, and
        blocks that have arrived or are being written.
        """
        with self._writes:
            return self._begin_write(header)

    def _begin_write(self, header: PieceHeader) -> BlockWrite:
        transfer = self._find(header.key, header.transfer_id)
        is_sender = header.sender_incarnation == transfer.sender.incarnation
        if header.sender != transfer.sender.name or not is_sender:
            raise HandoffError(f"{header.key} was reserved by {transfer.sender.name}")
        first, end = header.first_block, header.first_block + header.num_blocks
        if not transfer.num_hit_blocks <= first <= end <= transfer.num_blocks:
            raise HandoffError(
                f"{header.key}: blocks [{first}, {end}) are outside"
                f" [{transfer.num_hit_blocks}, {transfer.num_blocks})"
            )
        self._check_epoch(transfer, header.epoch)
        if header.epoch == transfer.epoch:
            under_way = {block for write in transfer.writes for block in write.blocks}
            if (under_way | transfer.arrived) & set(range(first, end)):
                raise HandoffError(f"{header.key}: blocks [{first}, {end}) came twice")
        else:
            transfer.epoch = header.epoch
            transfer.arrived.clear()
        write = BlockWrite(
            transfer_id=transfer.transfer_id,
            epoch=header.epoch,
            first_block=first,
            block_ids=transfer.rank.numbered(transfer.request.block_ids[first:end]),
        )
        transfer.writes.append(write)
        transfer.expires_s = self._clock.now_s() + self._lease_s
        return write

    def end_write(self, key: RequestKey, write: BlockWrite, *, is_verified: bool) -> bool:
        """End a write; with `is_verified` its blocks have arrived.

        Returns whether the reservation is still live. If not, the end of its last write frees its
        blocks.
        """
        orphan = self._orphans.get(write.transfer_id)
        transfer = self._live[key] if orphan is None else orphan
        with self._writes:
            assert write.epoch == transfer.epoch, f"{key}: {transfer.epoch} began over {write}"
            transfer.writes.remove(write)
            transfer.arrived.update(write.blocks if is_verified else ())
        if orphan is not None:
            if not orphan.writes:
                del self._orphans[write.transfer_id]
                orphan.release()
            return False
        transfer.expires_s = self._clock.now_s() + self._lease_s
        return True

    def commit(self, header: PieceHeader) -> None:
        """Hand the request with its first token to the scheduler: all of its KV is here.

        `header` is the last piece's. Raises HandoffError, without effect, unless every missing
        block arrived under its epoch and no write is under way.
        """
        transfer = self._find(header.key, header.transfer_id)
        with self._writes:
            if header.first_token_id is None or header.epoch != transfer.epoch or transfer.writes:
                raise HandoffError(f"{header.key} cannot commit with this piece")
            missing = set(range(transfer.num_hit_blocks, transfer.num_blocks)) - transfer.arrived
            if missing:
                raise HandoffError(f"{header.key}: blocks {sorted(missing)} have not arrived")
            self._remember(header.key, "committed")  # first: it is always in `_ended` or `_live`
            del self._live[header.key]
        request = transfer.request
        request.num_computed_tokens = request.num_known_tokens
        request.num_drafter_tokens = min(header.num_drafter_tokens, request.num_known_tokens)
        request.tokens.append(header.first_token_id)
        request.num_emitted_tokens += 1
        transfer.rank.scheduler.join(request)

    # ---- observation ----------------------------------------------------------------------------

    def is_committed(self, key: RequestKey) -> bool:
        """Whether `key` was handed to the scheduler, among the last `MAX_ENDED_KEYS` keys."""
        return self._ended.get(key) == "committed"

    def keys_of(self, ingress_id: str) -> list[RequestKey]:
        """Keys of live reservations for one ingress."""
        return [k for k, t in self._live.items() if t.request.ingress_id == ingress_id]

    def __len__(self) -> int:
        """Number of reservations and orphans, which still hold blocks here."""
        return len(self._live) + len(self._orphans)

    def is_live(self, key: RequestKey) -> bool:
        return key in self._live

    def live_keys(self) -> list[RequestKey]:
        return list(self._live)

    def owners(self) -> Iterator[tuple[str, list[int]]]:
        """Every holder of block references here, for the check that none is lost."""
        for transfer in (*self._live.values(), *self._orphans.values()):
            if transfer.request.block_ids:
                block_ids = transfer.rank.numbered(transfer.request.block_ids)
                yield f"incoming {transfer.transfer_id}", block_ids

    def statistics(self) -> IncomingStatistics:
        return IncomingStatistics(
            num_reservations=len(self._live),
            num_orphans=len(self._orphans),
            num_reserved_blocks=sum(len(block_ids) for _, block_ids in self.owners()),
            num_reserved=self._num_reserved,
            num_hit_blocks=self._num_hit_blocks,
            num_committed=self._counts["committed"],
            num_cancelled=self._counts["cancelled"],
            num_expired=self._counts["expired"],
        )

    # ---- parts ----------------------------------------------------------------------------------

    def _place(self, rank: JoiningRank, request: Request, overtakes: bool) -> _Place:
        cache, layout = rank.cache, self._identity.layout
        hit_ids = cache.match(request.block_hashes)
        num_new = layout.num_blocks_for(len(request.tokens)) - len(hit_ids)
        num_promised = sum(transfer.rank is rank for transfer in self._live.values())
        num_rows = rank.scheduler.num_running + num_promised
        terms = None
        if num_rows < self._max_rows:
            terms = rank.scheduler.terms_of_joining(request, num_promised, overtakes=overtakes)
        has_room = terms is not None and _allows(
            terms, num_new, cache.num_available_without(hit_ids)
        )
        load = RankLoad(
            num_requests=num_rows,
            is_full=not has_room,
            num_tokens_before=num_new * layout.block_size,
            has_room=has_room,
            num_available_blocks=cache.num_available,
        )
        return _Place(rank=rank, hit_ids=hit_ids, num_new=num_new, load=load)

    def _reason_to_refuse(self, asked: ReserveRequest) -> str | None:
        """Why `asked` can never be granted here; None if it may be."""
        mine, num_tokens = self._identity, len(asked.token_ids)
        if asked.sender.model != mine.model:
            return f"{mine.name} serves another model than {asked.sender.name}"
        if asked.sender.layout != mine.layout:
            return f"{mine.name} stores KV as {mine.layout}, not as {asked.sender.layout}"
        if asked.key in self._live:
            return "a reservation for this request exists"
        if asked.key in self._ended:
            return f"this request was {self._ended[asked.key]} here"
        if not 0 < asked.num_prompt_tokens <= num_tokens:
            return f"{asked.num_prompt_tokens} prompt tokens of {num_tokens}"
        if num_tokens >= mine.max_model_len:
            return f"{num_tokens} tokens leave no room in a context of {mine.max_model_len}"
        num_blocks = mine.layout.num_blocks_for(num_tokens)
        if num_blocks > (most := self._ranks[0].cache.num_blocks):
            return f"{num_blocks} blocks can never fit the {most} here"
        if asked.spec.deadline_s is not None and asked.spec.deadline_s <= asked.age_s:
            return "the request's deadline has passed"
        return None

    def _request_of(self, asked: ReserveRequest) -> Request:
        """The request of `asked`; the last few are kept, because hashing a long prompt is slow."""
        known = self._built.get(asked.key)
        if known is None or known[0] is not asked:
            if len(self._built) >= MAX_BUILT:
                del self._built[next(iter(self._built))]
            self._built[asked.key] = known = asked, self._build_request(asked)
        return known[1]

    def _build_request(self, asked: ReserveRequest) -> Request:
        request = Request(
            key=asked.key,
            ingress_id=asked.ingress_id,
            spec=asked.spec,
            tokens=list(asked.token_ids),
            num_prompt_tokens=asked.num_prompt_tokens,
            arrival_s=self._clock.now_s(),
            age_s=asked.age_s,
            num_emitted_tokens=len(asked.token_ids) - asked.num_prompt_tokens,
        )
        self._hasher.extend(request)
        return request

    def _find(self, key: RequestKey, transfer_id: str) -> IncomingTransfer:
        transfer = self._live.get(key)
        if transfer is None:
            raise HandoffError(f"{key} has no reservation here ({self._ended.get(key, 'unknown')})")
        if transfer.transfer_id != transfer_id:
            raise HandoffError(f"{key}: the reservation is {transfer.transfer_id}")
        return transfer

    def _check_epoch(self, transfer: IncomingTransfer, epoch: int) -> None:
        if epoch < max(transfer.epoch, 1):
            raise HandoffError(f"epoch {epoch} of {transfer.transfer_id} is over")
        if epoch > transfer.epoch and transfer.writes:
            raise HandoffError(f"{transfer.transfer_id}: epoch {transfer.epoch} still writes")

    def _end(self, key: RequestKey, ending: Ending) -> None:
        """Free the reservation of `key`, or orphan it while it is written; record how it ended."""
        with self._writes:  # no write can begin after the removal
            transfer = self._live.pop(key, None)
        if transfer is not None and transfer.writes:
            self._orphans[transfer.transfer_id] = transfer
        elif transfer is not None:
            transfer.release()
        if transfer is not None or key not in self._ended:
            self._remember(key, ending)

    def _remember(self, key: RequestKey, ending: Ending) -> None:
        self._counts[ending] += 1
        self._ended[key] = ending
        if len(self._ended) > MAX_ENDED_KEYS:
            del self._ended[next(iter(self._ended))]


def _allows(terms: BlockTerms, num_new: int, num_available: int) -> bool:
    """Whether a request may take `num_new` of the available blocks."""
    if num_new > num_available - terms.num_spare_blocks:
        return False
    return terms.max_new_blocks is None or num_new <= terms.max_new_blocks

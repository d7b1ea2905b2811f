"""The prefill side of a KV handoff: prompts that compute or wait here until their KV has moved.

    start .. advance .. advance .. add ............... release
    the prompt computes; its       all of its blocks   freed
    full blocks are held here,     are held here
    too, and read by transfers

A full block never changes, so it may be sent as soon as the step that filled it is committed. If
the scheduler preempts the prompt (`retract`), the blocks held here stay valid for a transfer that
is reading them, and are released when the sender reports that nothing reads them (`let_go`),
because the prefill side needs the blocks. The copies on the decode side stay valid: they are the
KV of the same tokens.

Implements the scheduler's `HandoffQueue` and tells the sender what to do by immutable events.
Called on the engine thread only. Knows no tensors, no channels and no Ray.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from engine.kv.cache import BlockCache
from engine.request import Request, RequestKey, RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStarted:
    """A prompt's first chunk starts: ask `decode_worker` for a reservation."""

    key: RequestKey
    ingress_id: str
    decode_worker: str
    token_ids: list[int]  # computed on the prefill side; the decode side needs blocks for them
    num_prompt_tokens: int
    spec: RequestSpec
    asked_s: float  # its arrival at the ingress, on this worker's clock

    @property
    def deadline_s(self) -> float | None:
        """The request's deadline on this worker's clock; None = it has none."""
        deadline_s = self.spec.deadline_s
        return None if deadline_s is None else self.asked_s + deadline_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffProgress:
    """The first blocks of a computing prompt are full; they are held until a later event."""

    key: RequestKey
    block_ids: list[int]  # all full blocks, those of earlier events first


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRetracted:
    """The prompt will be recomputed in other blocks: call `let_go` when nothing reads these."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffReady:
    """The prompt is computed and its blocks are held until `OutgoingHandoffs.release`."""

    key: RequestKey
    block_ids: list[int]
    first_token_id: int
    num_drafter_tokens: int = 0  # as of `Request`


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffDropped:
    """The request ended here before its prompt was complete, or with its first token.

    `OutgoingHandoffs.release` releases the blocks that are still held for it.
    """

    key: RequestKey


OutgoingEvent = HandoffStarted | HandoffProgress | HandoffRetracted | HandoffReady | HandoffDropped


@dataclass(slots=True, kw_only=True, eq=False)
class _Outgoing:
    ingress_id: str
    num_tokens: int
    block_ids: list[int] | None = None  # None = still computing: the scheduler holds them
    shared_ids: list[int] = field(default_factory=list)  # the full blocks, held here as well
    retracted: deque[list[int]] = field(default_factory=deque)  # may be read, oldest first
    is_reserved: bool = False
    is_abandoned: bool = False  # released while still computing: `add` frees it at once
    is_dropped: bool = False  # it has left the scheduler

    @property
    def held_ids(self) -> list[int]:
        """All blocks held here; one entry per reference, so blocks may repeat."""
        retracted = chain.from_iterable(self.retracted)
        return [*(self.block_ids or ()), *self.shared_ids, *retracted]


class OutgoingHandoffs:
    """Prompts of the prefill side that move to other workers; the scheduler's `HandoffQueue`."""

    def __init__(
        self,
        cache: BlockCache,
        notify: Callable[[OutgoingEvent], None],
        *,
        first_block: int = 0,
    ) -> None:
        """`notify` is called on the engine thread and must not block.

        first_block: what events call the cache's first block; it is above 0 where each rank of the
        worker has blocks of its own.
        """
        self._cache = cache
        self._first_block = first_block
        self._notify = notify
        self._entries: dict[RequestKey, _Outgoing] = {}

    # ---- from the scheduler ---------------------------------------------------------------------

    @property
    def num_unreserved_blocks(self) -> int:
        """Blocks held by computed prompts for which the decode side has no reservation yet."""
        return sum(
            len(entry.block_ids)
            for entry in self._entries.values()
            if entry.block_ids is not None and not entry.is_reserved
        )

    def start(self, request: Request) -> None:
        """The first chunk starts, also when a preempted request starts again.

        Blocks found in the prefix cache can be sent at once.
        """
        if request.key in self._entries:
            self.advance(request)
            return
        assert request.decode_worker is not None, f"{request.key} has nowhere to go"
        self._entries[request.key] = _Outgoing(
            ingress_id=request.ingress_id, num_tokens=request.num_known_tokens
        )
        self._notify(
            HandoffStarted(
                key=request.key,
                ingress_id=request.ingress_id,
                decode_worker=request.decode_worker,
                token_ids=list(request.tokens),
                num_prompt_tokens=request.num_prompt_tokens,
                spec=request.spec,
                asked_s=request.arrival_s - request.age_s,
            )
        )
        self.advance(request)

    def advance(self, request: Request) -> None:
        """A step of the prompt was committed: hold its full blocks here too, and notify the sender.

        Nothing happens without a new full block, or if the request did not start.
        """
        entry = self._entries.get(request.key)
        num_full = request.num_indexed_blocks
        if entry is None or entry.is_abandoned or num_full <= len(entry.shared_ids):
            return
        assert entry.block_ids is None, f"{request.key} was added: it computes no more"
        self._cache.share(request.block_ids[len(entry.shared_ids) : num_full])
        entry.shared_ids = request.block_ids[:num_full]
        self._notify(HandoffProgress(key=request.key, block_ids=self._numbered(entry.shared_ids)))

    def retract(self, key: RequestKey) -> None:
        """The prompt was preempted: its blocks are released and it will compute again."""
        entry = self._entries.get(key)
        if entry is None or not entry.shared_ids:
            return
        entry.retracted.append(entry.shared_ids)
        entry.shared_ids = []
        self._notify(HandoffRetracted(key=key))

    def add(self, request: Request) -> None:
        """Take over a computed prompt, its first token and its block references."""
        entry = self._entries[request.key]
        assert entry.block_ids is None, f"{request.key} was added twice"
        assert request.num_computed_tokens == entry.num_tokens == request.num_known_tokens - 1, (
            f"{request.key}: {request.num_computed_tokens} tokens computed,"
            f" {request.num_known_tokens} known, {entry.num_tokens} announced"
        )
        if entry.is_abandoned:
            del self._entries[request.key]
            self._cache.release(request.block_ids)
            return
        self._cache.release(entry.shared_ids)
        entry.shared_ids = []
        entry.block_ids = request.block_ids
        self._notify(
            HandoffReady(
                key=request.key,
                block_ids=self._numbered(request.block_ids),
                first_token_id=request.tokens[-1],
                num_drafter_tokens=min(request.num_drafter_tokens, request.max_drafter_tokens),
            )
        )

    def drop(self, key: RequestKey) -> None:
        """The request ended here before `add`; nothing happens if it never started.

        Blocks that a transfer may be reading are held until `release`.
        """
        entry = self._entries.get(key)
        if entry is None or entry.is_dropped:
            return
        assert entry.block_ids is None, f"{key} was added: it left the scheduler"
        entry.is_dropped = True
        if not entry.held_ids:
            del self._entries[key]
        if not entry.is_abandoned:
            self._notify(HandoffDropped(key=key))

    # ---- from the sender ------------------------------------------------------------------------

    def mark_reserved(self, key: RequestKey) -> None:
        """The decode side granted a reservation; nothing happens if the handoff is over."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.is_reserved = True

    def let_go(self, key: RequestKey) -> None:
        """Release the blocks of the oldest `HandoffRetracted`; call it once for each event."""
        entry = self._entries.get(key)
        if entry is not None and not entry.is_abandoned:  # else they are released already
            self._cache.release(entry.retracted.popleft())

    def release(self, key: RequestKey) -> None:
        """Release all blocks of a handoff that has succeeded or failed. Idempotent.

        While the prompt still computes, the scheduler's references are released when it adds or
        drops the request.
        """
        entry = self._entries.get(key)
        if entry is None:
            return
        for block_ids in (entry.block_ids or [], entry.shared_ids, *entry.retracted):
            self._cache.release(block_ids)
        if entry.block_ids is not None or entry.is_dropped:
            del self._entries[key]
            return
        entry.shared_ids = []
        entry.retracted.clear()
        entry.is_abandoned = True

    # ---- observation ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def owners(self) -> Iterator[tuple[str, list[int]]]:
        """Every holder of block references here, for the check that none is lost."""
        for key, entry in self._entries.items():
            if held_ids := entry.held_ids:
                yield f"outgoing {key}", self._numbered(held_ids)

    def keys_of(self, ingress_id: str) -> list[RequestKey]:
        return [key for key, entry in self._entries.items() if entry.ingress_id == ingress_id]

    def _numbered(self, block_ids: Sequence[int]) -> list[int]:
        return [self._first_block + block_id for block_id in block_ids]


class OutgoingOfRanks:
    """To the sender one `OutgoingHandoffs`, of ranks that have requests of their own.

    Each request is known to one of them, and what is said of others to that one does nothing.
    """

    def __init__(self, of_rank: Sequence[OutgoingHandoffs]) -> None:
        self.of_rank = of_rank

    def mark_reserved(self, key: RequestKey) -> None:
        for own in self.of_rank:
            own.mark_reserved(key)

    def let_go(self, key: RequestKey) -> None:
        for own in self.of_rank:
            own.let_go(key)

    def release(self, key: RequestKey) -> None:
        for own in self.of_rank:
            own.release(key)

    def __len__(self) -> int:
        return sum(map(len, self.of_rank))

    def owners(self) -> Iterator[tuple[str, list[int]]]:
        for own in self.of_rank:
            yield from own.owners()

    def keys_of(self, ingress_id: str) -> list[RequestKey]:
        return [key for own in self.of_rank for key in own.keys_of(ingress_id)]

"""P's side of a KV handoff: prompts that compute or wait here until their KV has moved.

    start ...... add ................................ release
    the prompt   its blocks are held here, and read   freed
    computes     by transfer threads

Implements the scheduler's `Outbox` and tells the sender, by immutable events, what to do. Called
on the engine thread only. Knows no tensors, no channels and no Ray.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.kv.block_cache import BlockCache
from engine.request import Request, RequestKey, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStarted:
    """A prompt's first chunk starts: ask `decode_worker` for room."""

    key: RequestKey
    ingress_id: str
    decode_worker: str
    token_ids: list[int]  # what P will compute, and D needs blocks for
    num_prompt_tokens: int
    params: SamplingParams
    deadline_s: float | None  # on this worker's clock
    priority: int
    salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffReady:
    """The prompt is computed and its blocks are held until `OutgoingHandoffs.release`."""

    key: RequestKey
    block_ids: list[int]
    first_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffDropped:
    """The request ended on P before its prompt was complete, or with its first token."""

    key: RequestKey


OutgoingEvent = HandoffStarted | HandoffReady | HandoffDropped


@dataclass(slots=True, kw_only=True, eq=False)
class _Outgoing:
    ingress_id: str
    num_tokens: int
    block_ids: list[int] | None = None  # None = still computing: the scheduler holds them
    is_reserved: bool = False
    is_abandoned: bool = False  # released while still computing: frees as soon as it is added


class OutgoingHandoffs:
    """Prompts of P on their way to other workers; the scheduler's `Outbox`."""

    def __init__(self, cache: BlockCache, notify: Callable[[OutgoingEvent], None]) -> None:
        """`notify` is called on the engine thread and must not block."""
        self._cache = cache
        self._notify = notify
        self._entries: dict[RequestKey, _Outgoing] = {}

    # ---- from the scheduler ---------------------------------------------------------------------

    @property
    def num_unreserved_blocks(self) -> int:
        """Blocks held by computed prompts for which D has not made room yet."""
        return sum(
            len(entry.block_ids)
            for entry in self._entries.values()
            if entry.block_ids is not None and not entry.is_reserved
        )

    def start(self, request: Request) -> None:
        """The first chunk starts; nothing happens when a preempted request starts again."""
        if request.key in self._entries:
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
                params=request.params,
                deadline_s=request.deadline_s,
                priority=request.priority,
                salt=request.salt,
            )
        )

    def add(self, request: Request) -> None:
        """Take over a computed prompt with its first token, and its block references."""
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
        entry.block_ids = request.block_ids
        self._notify(
            HandoffReady(
                key=request.key,
                block_ids=list(request.block_ids),
                first_token_id=request.tokens[-1],
            )
        )

    def drop(self, key: RequestKey) -> None:
        """The request ended here before `add`; nothing happens if it never started."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        assert entry.block_ids is None, f"{key} was added: it left the scheduler"
        if not entry.is_abandoned:
            self._notify(HandoffDropped(key=key))

    # ---- from the sender ------------------------------------------------------------------------

    def mark_reserved(self, key: RequestKey) -> None:
        """D has room; nothing happens if the handoff is over."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.is_reserved = True

    def release(self, key: RequestKey) -> None:
        """The handoff is over, well or badly: drop the block references. Idempotent.

        While the prompt still computes, they are dropped when the scheduler adds or drops it.
        """
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.block_ids is None:
            entry.is_abandoned = True
            return
        del self._entries[key]
        self._cache.release(entry.block_ids)

    # ---- observation ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def owners(self) -> Iterator[tuple[str, list[int]]]:
        """Every holder of block references here, for the conservation law."""
        for key, entry in self._entries.items():
            if entry.block_ids:
                yield f"outgoing {key}", entry.block_ids

    def keys_of(self, ingress_id: str) -> list[RequestKey]:
        return [key for key, entry in self._entries.items() if entry.ingress_id == ingress_id]

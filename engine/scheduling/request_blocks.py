"""Acquires, grows, indexes and releases the KV blocks of a scheduler's requests.

Blocks with non-finite content are set aside until a step has zeroed them. Otherwise a later owner
would spread a NaN even from a masked position (0 * NaN). Knows no rows, no queue and no steps.
"""

from collections.abc import Iterable, Sequence

from engine.kv.cache import BlockCache
from engine.request import Request, RequestKey
from engine.scheduling.contracts import BlockHasher


class RequestBlocks:
    """The blocks that one scheduler's requests hold in its `BlockCache`."""

    def __init__(self, cache: BlockCache, hasher: BlockHasher, block_size: int) -> None:
        self._cache = cache
        self._hasher = hasher
        self.block_size = block_size
        self.nonfinite_block_ids: list[int] = []  # held here until `take_nonfinite`
        self._deferred_index: dict[
            RequestKey, tuple[Request, int]
        ] = {}  # pending calls of `index_full`

    def hash_full(self, request: Request) -> None:
        """Compute the hashes of the full blocks of known tokens, if the cache keeps prefixes."""
        if self._cache.keeps_prefixes:
            self._hasher.extend(request)

    def full(self, requests: Iterable[Request]) -> list[Request]:
        """Those of the requests whose computed tokens fill their blocks: the next needs a block."""
        size = self.block_size
        return [r for r in requests if r.num_computed_tokens >= len(r.block_ids) * size]

    def grow(self, requests: Sequence[Request]) -> list[tuple[Request, list[int]]]:
        """Append one block to each request; all must be available. Returns (request, new ids)."""
        grown = [(r, [b]) for r, b in zip(requests, self._allocate(len(requests)), strict=True)]
        for request, block_ids in grown:
            request.block_ids += block_ids
        return grown

    def extend(self, request: Request, num_tokens: int, *, num_spare_blocks: int) -> list[int]:
        """Append blocks for `num_tokens` tokens, as far as so many others stay available.

        Returns the new ids, perhaps none.
        """
        num_missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        if num_missing <= 0:
            return []
        num_new = min(num_missing, self._cache.num_available - num_spare_blocks)
        if num_new <= 0:
            return []
        block_ids = self._allocate(num_new)
        request.block_ids += block_ids
        return block_ids

    def num_slots(self, request: Request) -> int:
        """Tokens that the request's blocks have room for."""
        return len(request.block_ids) * self.block_size

    def num_uncached(self, request: Request) -> int:
        """Known tokens that the request would have to compute if admitted now; at least one."""
        hashes = request.block_hashes[: (request.num_known_tokens - 1) // self.block_size]
        return request.num_known_tokens - len(self._cache.match(hashes)) * self.block_size

    def num_needed(self, request: Request) -> int:
        """Available blocks that admission now would take: missing ones and unreferenced hits."""
        hashes = request.block_hashes[: (request.num_known_tokens - 1) // self.block_size]
        hit_ids = self._cache.match(hashes)
        num_missing = self.num_blocks_for(request) - len(hit_ids)
        return num_missing + self._cache.num_available - self._cache.num_available_without(hit_ids)

    def acquire(
        self, request: Request, *, num_spare_blocks: int, max_new_blocks: int | None = None
    ) -> bool:
        """Reference cached blocks and allocate the rest; False, without effect, if they do not fit.

        They fit if `num_spare_blocks` stay available and at most `max_new_blocks` are allocated.
        At least one token stays to be computed.
        """
        hashes = request.block_hashes[: (request.num_known_tokens - 1) // self.block_size]
        hit_ids = self._cache.match(hashes)
        num_missing = self.num_blocks_for(request) - len(hit_ids)
        if max_new_blocks is not None and num_missing > max_new_blocks:
            return False
        if self._cache.num_available_without(hit_ids) < num_missing + num_spare_blocks:
            return False
        request.block_ids = self._cache.acquire_prefix(hashes)
        request.block_ids += self._allocate(num_missing)
        request.num_indexed_blocks = len(hit_ids)
        request.num_computed_tokens = len(hit_ids) * self.block_size
        return True

    def index_full(self, request: Request, num_computed_tokens: int) -> None:
        """Add the blocks that the first `num_computed_tokens` tokens fill to the prefix index.

        The ids of these tokens must be known and their KV must be known to be finite.
        `request.num_computed_tokens` may be larger, because it also counts a step in flight. A
        block whose hash covers the next token is left out if that is not known.
        """
        num_full = num_computed_tokens // self.block_size
        if num_full <= request.num_indexed_blocks:
            return
        if self._cache.keeps_prefixes:
            self._hasher.extend(request)
            num_full = min(num_full, len(request.block_hashes))
            for i in range(request.num_indexed_blocks, num_full):
                parent = request.block_hashes[i - 1] if i else None
                self._cache.index(request.block_ids[i], request.block_hashes[i], parent)
        request.num_indexed_blocks = num_full

    def index_later(self, request: Request, num_computed_tokens: int) -> None:
        """Call `index_full` at the next `flush_deferred_index`, unless `take` comes first."""
        self._deferred_index[request.key] = request, num_computed_tokens

    def flush_deferred_index(self) -> None:
        """Make the pending calls of `index_full`.

        Indexing a long prompt takes about a millisecond, and its first step need not wait for it.
        """
        for request, num_computed_tokens in self._deferred_index.values():
            self.index_full(request, num_computed_tokens)
        self._deferred_index.clear()

    def take(self, request: Request) -> list[int]:
        """Remove and return the request's block references; the caller owns them from now on."""
        self._deferred_index.pop(request.key, None)
        block_ids, request.block_ids = request.block_ids, []
        request.num_indexed_blocks = 0
        return block_ids

    def set_aside(self, block_ids: Sequence[int]) -> list[int]:
        """Set aside the blocks of a non-finite sequence that nothing else references, for zeroing.

        All its blocks leave the prefix index. Returns the other blocks for the caller to release:
        these were complete, and finite, before the step that failed.
        """
        self._cache.forget(block_ids)
        is_shared = {b: self._cache.num_references(b) > 1 for b in block_ids}
        self.nonfinite_block_ids += [b for b, shared in is_shared.items() if not shared]
        return [b for b, shared in is_shared.items() if shared]

    def let_go(self, block_ids: Sequence[int], *, is_finite: bool) -> None:
        """Release a request's blocks; unless `is_finite`, blocks of its own are set aside."""
        self._cache.release(block_ids if is_finite else self.set_aside(block_ids))

    def take_nonfinite(self) -> list[int]:
        """Remove and return the blocks for the next plan to zero, with their references."""
        block_ids, self.nonfinite_block_ids = self.nonfinite_block_ids, []
        return block_ids

    def _allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks that were counted as available before."""
        block_ids = self._cache.allocate(num_blocks)
        assert block_ids is not None, f"{num_blocks} of {self._cache.num_available} blocks"
        return block_ids

    def num_blocks_for(self, request: Request) -> int:
        """Blocks for all known tokens of the request, cached or not."""
        return -(-request.num_known_tokens // self.block_size)

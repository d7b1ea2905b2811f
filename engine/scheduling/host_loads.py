"""Which waiting request has blocks of its prefix loaded from the host tier, and how long it waits.

A load fills the device's prefix index: blocks that have landed are indexed under their hashes, and
the request finds them when it is admitted. So a request is loaded for when its turn has come, and
the next ones go first meanwhile. It waits only as long as waiting cannot cost it much:

    seconds since the load began  <=  what the landed blocks save  +  a tenth of computing it all

After that it computes what has not landed, and has its first token within 1.1 times what computing
all of it would have taken, whatever the load does; or within 1 ms more, if that is longer: threads
hear of each other no sooner. Where running requests leave no room for it beside the load's blocks,
it has to wait for the end of the piece that is under way, too. A load is begun only if it is
predicted to take less time than it saves, and if the request could be admitted now. A request waits
for one load while it is queued; requests with the same prefix share it.

What a load wrote to blocks that did not pass their check is zeroed before others get them. Called
on the engine thread. Knows no bytes, no arena and no rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from engine.cost_model import StepCosts
from engine.kv.cache import BlockCache, BlockTerms
from engine.request import Request, RequestKey

_GRACE_SHARE = 0.1  # of computing everything, that waiting in vain may cost
_MIN_GRACE_S = 1e-3


class TierLoad(Protocol):
    """Blocks on their way into the device. Read `is_over` before `num_landed`."""

    @property
    def num_landed(self) -> int: ...
    @property
    def is_over(self) -> bool: ...
    def cancel(self) -> None:
        """What is not under way need not come."""
        ...

    def resume(self) -> None:
        """Go on after all, unless it is over already."""
        ...


class TierSave(Protocol):
    """Blocks on their way out of the device."""

    @property
    def is_over(self) -> bool:
        """Whether the device's blocks are not read any more."""
        ...


class HostTier(Protocol):
    """Blocks beside the device, by hash (see engine/kv/host/tier.py)."""

    @property
    def stores(self) -> Literal["evicted", "answers"]:
        """What is to be stored."""
        ...

    def begin_save(self, evicted: Sequence[tuple[int, bytes]]) -> TierSave | None:
        """Store blocks (id, hash), of each sequence the last ones first; None = none is copied."""
        ...

    def now_s(self) -> float:
        """Of any clock."""
        ...

    @property
    def is_active(self) -> bool:
        """Whether something is under way, for which `settle` must be called again."""
        ...

    def settle(self) -> None:
        """Take over what has ended; at every step."""
        ...

    def look(self, hashes: Sequence[bytes]) -> Sequence[Any]:
        """The blocks of the longest stored prefix of a chain of hashes; changes nothing."""
        ...

    def find(self, hashes: Sequence[bytes]) -> Sequence[Any]:
        """`look`; counts as a use of the blocks."""
        ...

    def num_on_disk(self, blocks: Sequence[Any]) -> int:
        """How many of found blocks would be read from files."""
        ...

    def load_seconds(self, blocks: Sequence[Any]) -> float:
        """Predicted time until these blocks would be loaded."""
        ...

    def load(self, blocks: Sequence[Any], block_ids: Sequence[int]) -> TierLoad:
        """Begin to load found blocks into blocks of the device, held by the caller."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoadStatistics:
    """Counters since the start."""

    num_asked_blocks: int  # of prompts, not on the device
    num_hit_blocks: int  # of these, found in the tier
    num_disk_hit_blocks: int  # of these, found in files alone
    num_unworthy_blocks: int  # found, and sooner computed than loaded; at every look
    num_wasted_blocks: int  # loaded, and nobody waited for them any more
    num_waits: int  # requests that waited for a load
    num_given_up: int  # of these, those that computed the rest
    wait_s: float  # of all of them together


@dataclass(slots=True, eq=False, kw_only=True)
class _Load:
    under_way: TierLoad
    hashes: list[bytes]  # from the sequence's start
    block_ids: list[int]  # of `hashes`; all are held here
    num_indexed: int  # found on the device, or landed
    num_found: int  # found on the device
    num_waiting: int = 0
    is_over: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class _Wait:
    load: _Load
    since_s: float
    num_blocks_before: int  # of the prompt, on the device at that time
    num_new_tokens: int  # to compute, but for the load
    costs: StepCosts
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Expected:
    """What the tier had of a request when it was queued."""

    num_tokens: int  # the end of the stored prefix
    charge: float  # of computing a token, that loading it takes


class NoHostLoads:
    """In place of `HostLoads` where there is no host tier: nothing is found, nobody waits."""

    is_active = False
    due_s: float | None = None

    def arrived(self, request: Request, costs: StepCosts) -> None:
        pass

    def num_uncached(self, request: Request, num_uncached: int) -> int:
        return num_uncached

    def forget(self, key: RequestKey, now_s: float | None = None) -> None:
        pass

    def begin(
        self,
        request: Request,
        terms_of: Callable[[], BlockTerms | None],
        now_s: float,
        costs: StepCosts,
    ) -> None:
        pass

    def is_awaited(self, key: RequestKey, now_s: float) -> bool:
        return False

    def settle(self) -> list[int]:
        return []

    def ended(self, request: Request) -> None:
        pass

    def owners(self) -> Iterator[tuple[str, list[int]]]:
        return iter(())

    def statistics(self) -> None:
        return None


class HostLoads:
    """The loads of one scheduler's requests."""

    def __init__(
        self, tier: HostTier, cache: BlockCache, block_size: int, max_step_tokens: int
    ) -> None:
        """max_step_tokens: longer prompts are computed in several steps."""
        self._tier = tier
        self._cache = cache
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._loads: list[_Load] = []
        self._saves: list[tuple[TierSave, list[int]]] = []  # and the blocks held for each
        self._loading: dict[bytes, _Load] = {}  # by the hashes of blocks to come
        self._waits: dict[RequestKey, _Wait] = {}
        self._expected: dict[RequestKey, _Expected] = {}
        self._asked: set[RequestKey] = set()
        self._num_asked = self._num_hits = self._num_disk_hits = 0
        self._num_unworthy = self._num_wasted = 0
        self._num_waits = self._num_given_up = 0
        self._wait_s = 0.0

    # ---- the queue ------------------------------------------------------------------------------

    def arrived(self, request: Request, costs: StepCosts) -> None:
        """Look a request up that enters the queue, so that it counts as what it will compute."""
        hashes = self._hashes_of(request)
        num_before = len(self._cache.match(hashes))
        blocks = self._tier.look(hashes[num_before:])
        if blocks:
            saved_s = self._saved_s(request, num_before, len(blocks), costs)
            load_s = self._tier.load_seconds(blocks)
            if load_s < saved_s:
                num_tokens = (num_before + len(blocks)) * self._block_size
                self._expected[request.key] = _Expected(num_tokens, load_s / saved_s)

    def num_uncached(self, request: Request, num_uncached: int) -> int:
        """Tokens that a waiting request has to compute, those that loading is worth among them.

        num_uncached: tokens that are not on the device.
        """
        expected = self._expected.get(request.key)
        if expected is None:
            return num_uncached
        num_stored = expected.num_tokens - (request.num_known_tokens - num_uncached)
        if num_stored <= 0:
            return num_uncached
        return num_uncached - num_stored + round(expected.charge * num_stored)

    def forget(self, key: RequestKey, now_s: float | None = None) -> None:
        """The request has left the queue; now_s: it was admitted."""
        self._expected.pop(key, None)
        self._asked.discard(key)
        wait = self._waits.pop(key, None)
        if wait is not None:
            self._end_wait(wait, now_s)

    # ---- loads ----------------------------------------------------------------------------------

    def begin(
        self,
        request: Request,
        terms_of: Callable[[], BlockTerms | None],
        now_s: float,
        costs: StepCosts,
    ) -> None:
        """Load what the tier has of a waiting request whose turn it is; once for each.

        terms_of: returns the terms on which it could be admitted now; None = it could not.
        """
        hashes = self._hashes_of(request)
        found_ids = self._cache.match(hashes)
        num_before = len(found_ids)
        if request.key in self._waits or num_before == len(hashes):
            return
        load = self._loading.get(hashes[num_before])
        if load is None:
            blocks = self._worthy(request, found_ids, hashes[num_before:], terms_of, costs)
            if not blocks:
                return
            began_s = self._tier.now_s()
            load = self._start(hashes, num_before, blocks)
            # Who computes everything waits for the same evictions.
            now_s += self._tier.now_s() - began_s
        elif load.num_waiting == 0:
            load.under_way.resume()
        load.num_waiting += 1
        self._num_waits += 1
        self._waits[request.key] = _Wait(
            load=load,
            since_s=now_s,
            num_blocks_before=num_before,
            num_new_tokens=request.num_known_tokens - num_before * self._block_size,
            costs=costs,
        )

    def is_awaited(self, key: RequestKey, now_s: float) -> bool:
        """Whether the request had better wait for its load; False without one, or after its end."""
        wait = self._waits.get(key)
        if wait is None or wait.is_over:
            return False
        if not wait.load.is_over and now_s < self._until_s(wait):
            return True
        self._num_given_up += not wait.load.is_over
        self._end_wait(wait, now_s)
        return False

    def settle(self) -> list[int]:
        """Index what has landed, and end the loads that are over.

        Returns blocks whose content is not known, with their references, to be zeroed.
        """
        self._tier.settle()
        unknown: list[int] = []
        for load in self._loads:
            is_over = load.under_way.is_over  # first: what landed before is counted then
            num_landed = load.num_found + load.under_way.num_landed
            self._num_wasted += (num_landed - load.num_indexed) * (load.num_waiting == 0)
            for i in range(load.num_indexed, num_landed):
                parent = load.hashes[i - 1] if i else None
                self._cache.index(load.block_ids[i], load.hashes[i], parent)
            load.num_indexed = num_landed
            if is_over:
                load.is_over = True
                self._cache.release(load.block_ids[:num_landed])
                unknown += load.block_ids[num_landed:]
                for block_hash in load.hashes[load.num_found :]:
                    del self._loading[block_hash]
        self._loads = [load for load in self._loads if not load.is_over]
        saves, self._saves = self._saves, []
        for save, held in saves:
            if save.is_over:
                self._cache.release(held)
            else:
                self._saves.append((save, held))
        return unknown

    def ended(self, request: Request) -> None:
        """Store the blocks that an answer has filled, if the tier is for those.

        request: one that ran, and still holds its blocks.
        """
        if self._tier.stores == "answers":
            first = request.num_prompt_tokens // self._block_size
            filled = range(first, request.num_indexed_blocks)
            ids, hashes = request.block_ids, request.block_hashes
            named = [(ids[i], hashes[i]) for i in reversed(filled)]
            save = self._tier.begin_save(named) if named else None
            if save is not None:
                # Held meanwhile: what arrives for others does not wait for copies.
                held = [ids[i] for i in filled]
                self._cache.share(held)
                self._saves.append((save, held))

    # ---- observation ----------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether `settle` must be called again, though no request may be left."""
        return bool(self._loads or self._saves) or self._tier.is_active

    @property
    def due_s(self) -> float | None:
        """When the first request gives up waiting, unless more has landed by then; None = none."""
        waits = [wait for wait in self._waits.values() if not wait.is_over]
        return min([self._until_s(wait) for wait in waits], default=None)

    def owners(self) -> Iterator[tuple[str, list[int]]]:
        """Every holder of block references here, for the check that none is lost."""
        for number, load in enumerate(self._loads):
            yield f"host load {number}", load.block_ids
        for number, (_, held) in enumerate(self._saves):
            yield f"host save {number}", held

    def statistics(self) -> HostLoadStatistics:
        return HostLoadStatistics(
            num_asked_blocks=self._num_asked,
            num_hit_blocks=self._num_hits,
            num_disk_hit_blocks=self._num_disk_hits,
            num_unworthy_blocks=self._num_unworthy,
            num_wasted_blocks=self._num_wasted,
            num_waits=self._num_waits,
            num_given_up=self._num_given_up,
            wait_s=self._wait_s,
        )

    # ---- parts ----------------------------------------------------------------------------------

    def _hashes_of(self, request: Request) -> list[bytes]:
        """Of the full blocks that may be found: the newest token is always computed."""
        return request.block_hashes[: (request.num_known_tokens - 1) // self._block_size]

    def _worthy(
        self,
        request: Request,
        found_ids: list[int],
        hashes: list[bytes],
        terms_of: Callable[[], BlockTerms | None],
        costs: StepCosts,
    ) -> Sequence[Any]:
        """Stored blocks to load now; hashes: of what the device lacks. Empty = compute instead.

        A request that could not enter asks at every step. So all that is stored of it is looked for
        only when it can.
        """
        if not self._tier.look(hashes[:1]):
            self._count_asked(request, hashes, ())
            return ()
        if not self._has_room(request, found_ids, terms_of()):
            return ()
        blocks = self._tier.find(hashes)
        self._count_asked(request, hashes, blocks)
        saved_s = self._saved_s(request, len(found_ids), len(blocks), costs)
        if self._tier.load_seconds(blocks) < saved_s:
            return blocks
        self._num_unworthy += len(blocks)
        return ()

    def _count_asked(self, request: Request, hashes: list[bytes], blocks: Sequence[Any]) -> None:
        """Once for each request."""
        if request.key not in self._asked:
            self._asked.add(request.key)
            self._num_asked += len(hashes)
            self._num_hits += len(blocks)
            self._num_disk_hits += self._tier.num_on_disk(blocks)

    def _has_room(self, request: Request, found_ids: list[int], terms: BlockTerms | None) -> bool:
        num_missing = -(-request.num_known_tokens // self._block_size) - len(found_ids)
        if terms is None or (
            terms.max_new_blocks is not None and num_missing > terms.max_new_blocks
        ):
            return False
        num_needed = num_missing + terms.num_spare_blocks
        return self._cache.num_available_without(found_ids) >= num_needed

    def _start(self, hashes: list[bytes], num_before: int, blocks: Sequence[Any]) -> _Load:
        held = self._cache.hold_prefix(hashes[:num_before])
        new = self._cache.allocate(len(blocks))
        assert new is not None, f"{len(blocks)} blocks were counted as available"
        load = _Load(
            under_way=self._tier.load(blocks, new),
            hashes=hashes[: num_before + len(blocks)],
            block_ids=held + new,
            num_indexed=num_before,
            num_found=num_before,
        )
        self._loads.append(load)
        self._loading.update(dict.fromkeys(load.hashes[num_before:], load))
        return load

    def _end_wait(self, wait: _Wait, now_s: float | None) -> None:
        if wait.is_over:
            return
        wait.is_over = True
        self._wait_s += 0.0 if now_s is None else now_s - wait.since_s
        wait.load.num_waiting -= 1
        if wait.load.num_waiting == 0:
            wait.load.under_way.cancel()

    def _until_s(self, wait: _Wait) -> float:
        num_landed = max(0, wait.load.num_indexed - wait.num_blocks_before)
        num_cached = wait.num_blocks_before * self._block_size
        num_new, num_saved = wait.num_new_tokens, num_landed * self._block_size
        all_s = self._seconds(num_new, num_cached, wait.costs)
        rest_s = self._seconds(num_new - num_saved, num_cached + num_saved, wait.costs)
        return wait.since_s + (all_s - rest_s) + max(_MIN_GRACE_S, _GRACE_SHARE * all_s)

    def _saved_s(
        self, request: Request, num_before: int, num_blocks: int, costs: StepCosts
    ) -> float:
        """Predicted seconds of computing that so many more blocks save."""
        num_cached = num_before * self._block_size
        num_new, num_saved = request.num_known_tokens - num_cached, num_blocks * self._block_size
        all_s = self._seconds(num_new, num_cached, costs)
        return all_s - self._seconds(num_new - num_saved, num_cached + num_saved, costs)

    def _seconds(self, num_new: int, num_cached: int, costs: StepCosts) -> float:
        """Predicted seconds of computing so many tokens, alone, in as many steps as that takes."""
        seconds = 0.0
        while num_new > 0:
            num_tokens = min(num_new, self._max_step_tokens)
            seconds += costs.seconds(num_tokens, num_cached)
            num_new, num_cached = num_new - num_tokens, num_cached + num_tokens
        return seconds


def build_host_loads(
    tier: HostTier | None, cache: BlockCache, block_size: int, max_step_tokens: int
) -> HostLoads | NoHostLoads:
    """The loads of a scheduler over `cache`; tier: None = there is none."""
    if tier is None or not cache.keeps_prefixes:
        return NoHostLoads()
    return HostLoads(tier, cache, block_size, max_step_tokens)

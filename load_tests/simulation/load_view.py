"""What placement knows while reports are on their way: reported load, and what was placed since.

The rules are those of the system's view: a placement counts until a report must have seen it, or
until its first token was predicted and a little longer. Workers report when a step ends and, here,
whenever one of their placements no longer counts; in the system it is at least ten times a second.
Writes the columns of `Prefillers` and `Decoders`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from engine.messages import Assign
from engine.routing.placement import COUNTED_AFTER_S, DONE_AFTER_S
from load_tests.simulation.fleet import Decoders, Prefillers
from load_tests.simulation.worker import Load


@dataclass(frozen=True, slots=True)
class _Placed:
    num_tokens: int
    work_s: float
    is_short: bool
    expires_s: float


class LoadView:
    """Of the workers that prefill. `load_of` asks one for its load."""

    def __init__(self, fleet: Prefillers, load_of: Callable[[int], Load]) -> None:
        self._fleet = fleet
        self._load_of = load_of
        self._placed: list[list[_Placed]] = [[] for _ in fleet.names]
        self._expiring: list[tuple[float, int]] = []  # (when, column)
        self._reported: list[Load | None] = [None] * len(fleet.names)

    def note(self, assign: Assign, now_s: float) -> None:
        """Count a placement."""
        i = self._fleet.index[assign.prefill_worker]
        expires_s = now_s + min(assign.ttft_s + DONE_AFTER_S, COUNTED_AFTER_S)
        is_short = assign.length_class == "short"
        work_s = assign.work_s - assign.shared_s
        self._placed[i].append(_Placed(assign.num_new_tokens, work_s, is_short, expires_s))
        heappush(self._expiring, (expires_s, i))
        self._write(i)

    def report(self, i: int, load: Load) -> None:
        """A worker told its load."""
        self._reported[i] = load
        self._write(i)

    def expire(self, now_s: float) -> None:
        """Drop what counts no more by now, and look at those workers again."""
        while self._expiring and self._expiring[0][0] <= now_s:
            _, i = heappop(self._expiring)
            self._placed[i] = [p for p in self._placed[i] if p.expires_s > now_s]
            self.report(i, self._load_of(i))

    def _write(self, i: int) -> None:
        """Sums in the order of placing, as long as the list: no rounding stays behind."""
        fleet, placed, load = self._fleet, self._placed[i], self._reported[i]
        fleet.num_waiting[i] = len(placed) + (load.num_waiting if load else 0)
        num_tokens = sum([p.num_tokens for p in placed])
        fleet.queued_tokens[i] = num_tokens + (load.num_tokens if load else 0)
        queued_s = load.queued.queued_s if load else 0.0
        fleet.queued_s[i] = queued_s + sum([p.work_s for p in placed])
        if load is None or load.queued.short is None:
            return
        short = [p for p in placed if p.is_short]
        fleet.has_short[i] = True
        fleet.num_short[i] = load.queued.short.num_waiting + len(short)
        short_s = load.queued.short.queued_s or 0.0
        fleet.short_s[i] = short_s + sum([p.work_s for p in short])


class DecodeView:
    """Of the workers that only decode: requests with a row, under way to one, or waiting for one.

    A request counts from its placement to its last token.
    """

    def __init__(self, fleet: Decoders, *, max_kv_tokens: int, block_size: int) -> None:
        """Sizes of one worker's store."""
        self._fleet = fleet
        self._block_size = block_size
        fleet.num_blocks[:] = fleet.num_free_blocks[:] = max_kv_tokens // block_size

    def enter(self, i: int, num_tokens: int) -> None:
        self._fleet.num_running[i] += 1
        self._fleet.num_free_blocks[i] -= math.ceil(num_tokens / self._block_size)

    def leave(self, i: int, num_tokens: int) -> None:
        self._fleet.num_running[i] -= 1
        self._fleet.num_free_blocks[i] += math.ceil(num_tokens / self._block_size)

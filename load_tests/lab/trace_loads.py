"""When each load from a host tier began, got on, and was given up: for `bench_host_tier --trace`.

Wraps a tier and what moves its blocks, in an engine that has not stepped yet. Times are of
`time.perf_counter`, in ms where they are shown.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.kv.cache import BlockCache
from engine.kv.host.tier import BlockMover, HostLoad, HostTier
from engine.kv.store import KvStore

Copy = Callable[[Sequence[int], Sequence[int]], list[int]]


@dataclass(slots=True, kw_only=True)
class Piece:
    num_blocks: int
    began_s: float
    copied_s: float = 0.0  # its digest begins
    ended_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class TracedLoad:
    num_blocks: int
    began_s: float
    pieces: list[Piece] = field(default_factory=list)
    given_up_s: float | None = None  # None = nobody gave it up while it was under way

    def describe(self) -> str:
        """One line: what was waited for before the first piece, and what each piece took."""

        def ms(seconds: float) -> str:
            return f"{1e3 * seconds:.1f}"

        told = [f"{self.num_blocks} blocks"]
        for piece in self.pieces:
            at, copied = piece.began_s - self.began_s, piece.copied_s - piece.began_s
            digest = piece.ended_s - piece.copied_s
            told.append(f"at {ms(at)}: {piece.num_blocks} in {ms(copied)} + {ms(digest)}")
        if self.given_up_s is not None:
            told.append(f"given up at {ms(self.given_up_s - self.began_s)}")
        return "; ".join(told)


class LoadTrace:
    """Every load of one engine's host tier since the last `take`."""

    def __init__(self, tier: HostTier, store: KvStore, cache: BlockCache) -> None:
        self._loads: list[TracedLoad] = []
        self._save_s: list[float] = []
        self._opening: TracedLoad | None = None
        self._piece = threading.local()
        self._begin_load, self._save = tier.load, tier.save
        self._digest = store.digest
        owner: Any = tier
        owner.load = self._traced_load
        owner = store
        owner.digest = self._traced_digest
        owner = cache
        owner._on_evict = self._traced_save
        tier.wrap_mover(self._wrap)

    def take(self) -> tuple[list[TracedLoad], list[float]]:
        """The loads, and seconds of the thread that steps for each call of `save`."""
        found = self._loads, self._save_s
        self._loads, self._save_s = [], []
        return found

    def _traced_save(self, evicted: Sequence[tuple[int, bytes]]) -> None:
        began_s = time.perf_counter()
        self._save(evicted)
        self._save_s.append(time.perf_counter() - began_s)

    def _traced_load(self, blocks: Sequence[Any], block_ids: Sequence[int]) -> HostLoad:
        traced = TracedLoad(num_blocks=len(blocks), began_s=time.perf_counter())
        self._loads.append(traced)
        self._opening = traced
        load = self._begin_load(blocks, block_ids)
        cancel = load.cancel

        def traced_cancel() -> None:
            if not load.is_over and load.num_landed < len(load.blocks):
                traced.given_up_s = time.perf_counter()
            cancel()

        owner: Any = load
        owner.cancel = traced_cancel
        return load

    def _traced_digest(self, block_ids: Sequence[int]) -> list[int]:
        piece: Piece | None = getattr(self._piece, "current", None)
        if piece is not None:
            piece.copied_s = time.perf_counter()
        return self._digest(block_ids)

    def _wrap(self, mover: BlockMover) -> BlockMover:
        trace = self

        class Traced:
            save = staticmethod(mover.save)

            @staticmethod
            def begin_load() -> Copy:
                copy, traced = mover.begin_load(), trace._opening
                assert traced is not None, "nobody but `load` begins one"

                def run(slots: Sequence[int], block_ids: Sequence[int]) -> list[int]:
                    piece = Piece(num_blocks=len(slots), began_s=time.perf_counter())
                    traced.pieces.append(piece)
                    trace._piece.current = piece
                    digests = copy(slots, block_ids)
                    piece.ended_s = time.perf_counter()
                    trace._piece.current = None
                    return digests

                return run

        return Traced()


def summary(loads: Sequence[TracedLoad], save_s: Sequence[float]) -> list[str]:
    """Lines of quantiles: where the time of loads went."""
    begun = [load for load in loads if load.pieces]
    pieces = [piece for load in begun for piece in load.pieces]
    gaps = [
        after.began_s - before.ended_s
        for load in begun
        for before, after in zip(load.pieces, load.pieces[1:], strict=False)
    ]
    given_up = [load for load in loads if load.given_up_s is not None]
    return [
        f"{len(loads)} loads; {len(given_up)} given up, of them"
        f" {sum(not load.pieces for load in given_up)} before their first piece",
        _quantiles("until the first piece", [p.pieces[0].began_s - p.began_s for p in begun]),
        _quantiles("between two pieces", gaps),
        _quantiles("a block's copy", [(p.copied_s - p.began_s) / p.num_blocks for p in pieces]),
        _quantiles("a piece's digest", [p.ended_s - p.copied_s for p in pieces]),
        _quantiles("a save, of the thread that steps", list(save_s)),
    ]


def _quantiles(name: str, seconds: list[float]) -> str:
    if len(seconds) < 2:
        return f"{name}: {len(seconds)} times"
    tenths = statistics.quantiles(seconds, n=10)
    cells = [f"{1e3 * s:.2f}" for s in (tenths[4], tenths[8], max(seconds))]
    return f"{name}, ms: median {cells[0]}, p90 {cells[1]}, largest {cells[2]}"

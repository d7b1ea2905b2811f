"""Computes how much more of a prompt each worker could load than it has on its device.

Tiers are shared: the blocks of a machine's host arena are there for all its workers. So one worker
tells of each tier, and when that is lost, another. What can be loaded begins where the device's
hit ends, each block in the fastest tier that has it.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from engine.messages import TierReport, TiersAfter
from engine.routing.prefix_hits import PrefixHits


@dataclass(frozen=True, slots=True)
class StoredHit:
    """What a worker can load of a prompt, after what is on its device."""

    num_tokens: int
    load_s: float


NOTHING_STORED = StoredHit(0, 0.0)


class TierHits:
    """The tiers of every worker. Mutated by `after`, `apply` and `forget` only."""

    def __init__(self, block_size: int) -> None:
        """`block_size` in tokens."""
        self._block_size = block_size
        self._stored = PrefixHits(block_size)  # by place
        self._tiers: dict[str, list[TierReport]] = {}  # worker -> its tiers, without blocks
        self._teller: dict[str, str] = {}  # place -> worker

    def after(self, worker: str) -> TiersAfter:
        """What to ask a worker for: the tiers of which no other one tells."""
        places = [tier.place for tier in self._tiers.get(worker, [])]
        return {
            place: self._stored.last_sequence(place)
            for place in places
            if self._teller.setdefault(place, worker) == worker
        }

    def apply(self, worker: str, reports: Sequence[TierReport]) -> bool:
        """Apply a worker's report; False if a tier's did not follow, which then counts as empty."""
        self._tiers[worker] = list(reports)
        self._keep_teller(worker, {report.place for report in reports})
        follows = True
        for report in reports:
            if report.blocks is not None and self._teller.get(report.place) == worker:
                follows &= self._stored.apply(report.place, report.blocks)
        self._forget_unused()
        return follows

    def forget(self, worker: str) -> None:
        """Forget a worker that is gone. What it told is known until another tells. Idempotent."""
        self._tiers.pop(worker, None)
        self._keep_teller(worker, set())
        self._forget_unused()

    def hits(
        self, block_hashes: Sequence[bytes], on_device: Mapping[str, int]
    ) -> dict[str, StoredHit]:
        """Worker -> what it can load of a chain; on_device: worker -> tokens that it need not.

        Workers that can load nothing are left out.
        """
        hits = {}
        for worker, tiers in self._tiers.items():
            first = on_device.get(worker, 0) // self._block_size
            counts = self._count(block_hashes[first:], tiers)
            if (num_blocks := sum(counts)) > 0:
                load_s = sum(n * tier.block_s for n, tier in zip(counts, tiers, strict=True))
                floor_s = max(tier.floor_s for n, tier in zip(counts, tiers, strict=True) if n)
                hits[worker] = StoredHit(num_blocks * self._block_size, floor_s + load_s)
        return hits

    def num_blocks(self) -> dict[str, int]:
        """Worker -> number of blocks that it could load, for display."""
        stored = self._stored.num_blocks()
        return {
            worker: sum(stored.get(tier.place, 0) for tier in tiers)
            for worker, tiers in self._tiers.items()
        }

    def _count(self, chain: Sequence[bytes], tiers: Sequence[TierReport]) -> list[int]:
        """How many blocks of a chain's stored beginning each tier would load."""
        known: list[AbstractSet[bytes]] = [self._stored.hashes(tier.place) for tier in tiers]
        counts = [0] * len(tiers)
        for block_hash in chain:
            level = next((i for i, hashes in enumerate(known) if block_hash in hashes), None)
            if level is None:
                break
            counts[level] += 1
        return counts

    def _keep_teller(self, worker: str, places: AbstractSet[str]) -> None:
        """Let a worker tell of these alone: it may have switched off a tier."""
        told = self._teller.items()
        self._teller = {place: w for place, w in told if w != worker or place in places}

    def _forget_unused(self) -> None:
        used = {tier.place for tiers in self._tiers.values() for tier in tiers}
        for place in [place for place in self._stored.num_blocks() if place not in used]:
            self._stored.forget(place)
            self._teller.pop(place, None)

"""Computes how much of a prompt each worker has in its prefix cache, from the workers' reports.

Block hashes are chained, and every indexed block can be found (engine/kv/index.py). So a worker's
hit is the length of the prompt's chain before the first hash that the worker lacks. A report that
does not follow the last one, or has another incarnation, is useless: the worker counts as empty
until a resync.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from engine.messages import BlockChanges


@dataclass(slots=True, eq=False)
class _Worker:
    incarnation: str
    sequence: int
    hashes: set[bytes] = field(default_factory=set)


class PrefixHits:
    """The indexed block hashes of every worker. Mutated by `apply` and `forget` only."""

    def __init__(self, block_size: int) -> None:
        """`block_size` in tokens."""
        self._block_size = block_size
        self._workers: dict[str, _Worker] = {}

    def last_sequence(self, worker: str) -> int | None:
        """The number of the last report applied; None = ask for a resync."""
        known = self._workers.get(worker)
        return known.sequence if known else None

    def apply(self, worker: str, changes: BlockChanges) -> bool:
        """Apply a report; False if it does not follow, after which the worker counts as empty."""
        known = self._workers.get(worker)
        if not changes.is_resync:
            expected = None if known is None else (known.incarnation, known.sequence + 1)
            if known is None or expected != (changes.incarnation, changes.sequence):
                self.forget(worker)
                return False
            known.hashes.difference_update(changes.removed)
            known.hashes.update(changes.added)
            known.sequence = changes.sequence
            return True
        self._workers[worker] = _Worker(
            changes.incarnation, changes.sequence, hashes=set(changes.added)
        )
        return True

    def forget(self, worker: str) -> None:
        """Forget a worker that is gone, with its cache. Idempotent."""
        self._workers.pop(worker, None)

    def hit_tokens(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """Worker -> tokens of the chain that it holds; workers that hold none are left out."""
        hits = {}
        for name, worker in self._workers.items():
            num_blocks = _num_leading(block_hashes, worker.hashes)
            if num_blocks > 0:
                hits[name] = num_blocks * self._block_size
        return hits

    def hashes(self, worker: str) -> AbstractSet[bytes]:
        """All that a worker has; a view, for the moment."""
        known = self._workers.get(worker)
        return known.hashes if known else frozenset()

    def num_blocks(self) -> dict[str, int]:
        """Worker -> number of indexed blocks, for display."""
        return {name: len(worker.hashes) for name, worker in self._workers.items()}


def _num_leading(block_hashes: Sequence[bytes], known: set[bytes]) -> int:
    for index, block_hash in enumerate(block_hashes):
        if block_hash not in known:
            return index
    return len(block_hashes)
